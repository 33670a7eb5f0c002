"""Which CUDA kernels ONNX Runtime picks for the operators of language models.

The rules are those of ONNX Runtime 1.31, read in contrib_ops/cuda: bert/group_query_attention.cc (ComputeInternal),
bert/attention.cc, bert/multihead_attention.cc and bert/packed_multihead_attention.cc (ComputeInternal),
bert/cudnn_fmha/cudnn_flash_attention.cu (is_supported), bert/flash_attention/flash_api.cc (is_supported, num_splits_heuristic),
quantization/matmul_nbits.cc (ComputeInternal), matmul_4bits.cu and matmul_8bits.cu (TryMatMul4Bits, TryMatMul8Bits). Without
options and environment variables, as people run it: XQA is on, cuDNN's attention from compute capability 9 on, fpA_intB off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from hase.records.attention import Attended, attended_by
from hase.records.kernel_record import DTYPE_BYTES, Kernel, input_at
from hase.records.plain_attention import KEY_MASKS, OLD_KEYS, plain_attended_by, projects

Algorithm = Literal[
    "", "xqa", "cudnn", "flash decoding", "flash", "memory efficient", "unfused",  # of attention
    "router", "vector", "rows", "dequantised", "dequantised in parts"]  # of products with quantised matrices
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
XQA_GROUPS, XQA_HEAD_SIZES = (1, 2, 4, 5, 8, 16, 32), (64, 128, 256)
MOST_HEAD_SIZE = 256  # of flash attention and of cuDNN's
MOST_EFFICIENT_HEAD_SIZE = 1024  # of memory-efficient attention
FLASH_FROM = 513  # tokens, where queries, keys and values lie in one tensor
EFFICIENT_FROM = 256  # queries or keys, in single precision
HALF = ("float16", "bfloat16")
MOST_SPLITS = 128
TILE, DECODING_TILE = 128, 64  # queries that a block of threads computes
COLUMNS = 8  # that a block of threads computes, and numbers that a thread reads at a time
MOST_ROWS = {4: 16, 8: 5}  # of a product without dequantising the matrix, by bits
ROUTER = (32, 2880)  # columns and depth that have a kernel of their own
PART_COLUMNS, WHOLE_BYTES = 32768, 256 << 20  # of a large matrix, a part at a time is dequantised


@dataclass(frozen=True)
class Gpu:
    """What the choice depends on: compute capability, multiprocessors, and shared memory of a block of threads."""

    capability: float = 9.0
    multiprocessors: int = 132
    shared_bytes: int = 48 << 10


H200 = Gpu()


def attention_algorithm(kernel: Kernel, sizes: Attended, gpu: Gpu = H200) -> Algorithm:
    """How a GroupQueryAttention in half precision is computed; "" for float32, which the CUDA provider lacks.

    Args:
        kernel: the attention.
        sizes: its sizes.
        gpu: that runs it.
    """
    if kernel.dtype not in HALF:
        return ""
    softcap, sink = float(kernel.attributes.get("softcap", 0.0)), input_at(kernel.inputs, 11).present
    biased = sizes.mask == "added"
    smooth = kernel.attributes.get("smooth_softmax", 0) == 1
    first = sizes.queries == sizes.total
    if (gpu.capability >= 8 and not biased and not first and sizes.queries == 1 and sizes.shares_buffer and not softcap
            and (sink or not smooth) and sizes.head_size in XQA_HEAD_SIZES and group_size(sizes) in XQA_GROUPS):
        return "xqa"
    fits = sizes.head_size % 8 == 0 and sizes.head_size <= MOST_HEAD_SIZE
    if gpu.capability >= 9 and fits and not (biased or softcap or smooth or sink or sizes.window):
        return "cudnn"
    if gpu.capability >= 8 and fits and not biased:
        return "flash decoding" if not first and sizes.shares_buffer and not sizes.normed else "flash"
    return "unfused" if biased or sizes.head_size % 8 else "memory efficient"


def plain_algorithm(kernel: Kernel, sizes: Attended, gpu: Gpu = H200) -> Algorithm:
    """How attention of another operator is computed from compute capability 9 on; "" for ONNX's own, which no rule is known of.

    Args:
        kernel: the attention.
        sizes: its sizes.
        gpu: that runs it.
    """
    half, fits = kernel.dtype in HALF, sizes.head_size % 8 == 0
    small = half and fits and sizes.head_size <= MOST_HEAD_SIZE and gpu.capability >= 8
    added = sizes.mask == "added"
    if kernel.op_type.startswith("Packed"):
        flash = small and not added and not (sizes.packed and sizes.queries < FLASH_FROM)
        return "flash" if flash else "memory efficient" if fits and not added else "unfused"
    if not kernel.domain:
        return ""
    projected = projects(kernel.op_type, kernel.inputs)
    mask = input_at(kernel.inputs, KEY_MASKS[kernel.op_type])
    copies = projected and (input_at(kernel.inputs, OLD_KEYS[kernel.op_type]).present or len(kernel.outputs) > 1)
    if small and gpu.capability >= 9 and (not mask.present or mask.shape == (sizes.batch,)) and not copies:
        return "cudnn"
    efficient = (fits and sizes.head_size <= MOST_EFFICIENT_HEAD_SIZE and not copies
                 and (not mask.present or mask.shape == (3 * sizes.batch + 2,))
                 and not (projected and kernel.dtype == "bfloat16")
                 and (half or max(sizes.queries, 0 if projected else sizes.total) >= EFFICIENT_FROM)
                 and not (added and sizes.queries % (4 * int(DTYPE_BYTES.get(kernel.dtype, 4)))))
    return "memory efficient" if efficient else "unfused"


def group_size(sizes: Attended) -> int:
    """Query heads for each head of keys."""
    return sizes.heads // max(sizes.kv_heads, 1)


def splits(sizes: Attended, algorithm: Algorithm, gpu: Gpu = H200) -> int:
    """Into how many parts flash attention splits the keys, so that they fill the GPU; 1 for other algorithms."""
    if algorithm not in ("flash", "flash decoding"):
        return 1
    decodes = algorithm == "flash decoding"
    keys = min(sizes.total, sizes.window) if decodes and sizes.window else sizes.total
    block = 256 if sizes.head_size <= 64 else 128 if sizes.head_size <= 128 else 64
    key_blocks = math.ceil(keys / block)
    work = sizes.batch * (sizes.kv_heads if decodes else sizes.heads) * math.ceil(sizes.queries / 64)
    if work >= 0.8 * gpu.multiprocessors:
        return 1
    parts = [count for count in range(1, min(MOST_SPLITS, gpu.multiprocessors, key_blocks) + 1)
             if count == 1 or math.ceil(key_blocks / count) != math.ceil(key_blocks / (count - 1))]
    filled = {count: work * count / gpu.multiprocessors for count in parts}
    efficiency = {count: waves / math.ceil(waves) for count, waves in filled.items()}
    best = max(efficiency.values(), default=0.0)
    return next((count for count in parts if efficiency[count] >= 0.85 * best), 1)


def thread_blocks(sizes: Attended, algorithm: Algorithm, parts: int) -> int:
    """About how many blocks of threads compute an attention: with one query for each sequence, a block for each head of keys;
    with more, one for each tile of queries and each head. Each counts as often as the keys are split."""
    if algorithm == "xqa":
        return sizes.batch * sizes.kv_heads
    if algorithm == "flash decoding":
        return sizes.batch * sizes.kv_heads * math.ceil(sizes.queries * group_size(sizes) / DECODING_TILE) * parts
    return sizes.batch * sizes.heads * math.ceil(sizes.queries / TILE) * parts


def product_algorithm(kernel: Kernel, gpu: Gpu = H200) -> Algorithm:
    """How a MatMulNBits is computed: a row, or a few, by the packed matrix itself; more by one that is dequantised first."""
    attributes = kernel.attributes
    depth, columns, block, bits = (int(attributes.get(name, default)) for name, default in (
        ("K", 0), ("N", 0), ("block_size", 32), ("bits", 4)))
    rows = product_rows(kernel)
    zeros, reordered = input_at(kernel.inputs, 3), input_at(kernel.inputs, 4).present
    has_zeros = zeros.present
    element = int(DTYPE_BYTES.get(kernel.dtype, 4))
    fits = (rows <= MOST_ROWS.get(bits, 0) and columns % COLUMNS == 0 and depth % COLUMNS == 0 and not reordered
            and not (has_zeros and zeros.dtype != "uint8"))
    if bits == 8:
        fits = fits and 256 % max(block, 1) == 0 and depth % max(block, 1) == 0
    blocks = math.ceil(depth / max(block, 1))
    shared_bytes = COLUMNS * (element * blocks + (has_zeros and (2 * math.ceil(blocks / 2) if bits == 4 else blocks)))
    if fits and bits == 4 and rows == 1 and not has_zeros and block in (32, 64) and (columns, depth) == ROUTER:
        return "router"
    if fits and rows > 1 and (kernel.dtype != "float32" or bits == 8 or shared_bytes <= gpu.shared_bytes):
        return "rows"
    if fits and rows == 1 and shared_bytes <= gpu.shared_bytes:
        return "vector"
    in_parts = columns * blocks * block * element > WHOLE_BYTES and columns > 2 * PART_COLUMNS and not reordered
    return "dequantised in parts" if in_parts else "dequantised"


def product_rows(kernel: Kernel) -> int:
    """Rows of the first matrix of a product, over all of a batch."""
    return math.prod(kernel.inputs[0].shape[:-1])


def language_algorithm(kernel: Kernel, gpu: Gpu = H200) -> Algorithm:
    """How a kernel is computed; "" for operators with one way alone."""
    if sizes := attended_by(kernel):
        return attention_algorithm(kernel, sizes, gpu)
    if sizes := plain_attended_by(kernel):
        return plain_algorithm(kernel, sizes, gpu)
    return product_algorithm(kernel, gpu) if kernel.op_type == "MatMulNBits" else ""
