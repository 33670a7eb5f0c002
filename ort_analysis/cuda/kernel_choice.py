"""Predicts which CUDA kernels run an operator: ONNX Runtime's for language models, and cuBLAS's slow-to-launch ones.

The rules for language models are those of ONNX Runtime 1.31, in contrib_ops/cuda: bert/group_query_attention.cc
(ComputeInternal), bert/attention.cc, bert/multihead_attention.cc and bert/packed_multihead_attention.cc (ComputeInternal),
bert/cudnn_fmha/cudnn_flash_attention.cu (is_supported), bert/flash_attention/flash_api.cc (is_supported, num_splits_heuristic),
quantization/matmul_nbits.cc (ComputeInternal), matmul_4bits.cu and matmul_8bits.cu (TryMatMul4Bits, TryMatMul8Bits). With
default options and environment: XQA is on, cuDNN's attention from compute capability 9 on, fpA_intB off.

Some cuBLAS kernels take the host longer to launch. Before launching an `xmma` kernel (including those for Hopper), cuBLAS asks
CUDA twice for the kernel's attributes (cudaFuncGetAttributes), as traces of host calls show. `nvjet` kernels are slower to
launch too; those of CUTLASS, for products with a vector (gemv), and for few rows (gemmSN) are not. It matters most in recurrent
layers, which multiply in each step. cuBLAS's choice is not documented. Two decision trees predict it from the sizes:
slow_launches.json, learned by recipes/cuda_kernels/learn_slow_launches.py from kernel names on an NVIDIA H200.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hase.records.attention import (
    KEY_MASKS,
    OLD_KEYS,
    AttentionSizes,
    kernel_attention_sizes,
    kernel_grouped_query_sizes,
    projects,
)
from hase.records.kernel_costs import alignment, matrix_product
from hase.records.kernel_record import DTYPE_BYTES, Kernel, input_at
from hase.records.operators import operator_row
from hase.utils import files
from hase.utils.config import Frozen

Algorithm = Literal[
    "", "xqa", "cudnn", "flash decoding", "flash", "memory efficient", "unfused",  # of attention
    "router", "vector", "rows", "dequantised", "dequantised in parts"]  # of products with quantised matrices
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
XQA_GROUPS, XQA_HEAD_SIZES = (1, 2, 4, 5, 8, 16, 32), (64, 128, 256)
MOST_HEAD_SIZE = 256  # of flash attention and of cuDNN's
MOST_EFFICIENT_HEAD_SIZE = 1024  # of memory-efficient attention
FLASH_FROM = 513  # tokens, if queries, keys and values are in one tensor
EFFICIENT_FROM = 256  # queries or keys, in single precision
HALF = ("float16", "bfloat16")
MOST_SPLITS = 128
TILE, DECODING_TILE = 128, 64  # queries that a block of threads computes
COLUMNS = 8  # that a block of threads computes, and numbers that a thread reads at a time
MOST_ROWS = {4: 16, 8: 5}  # of a product without dequantising the matrix, by bits
ROUTER = (32, 2880)  # columns and depth of the product that has a kernel of its own
PART_COLUMNS, WHOLE_BYTES = 32768, 256 << 20  # of a large matrix, a part at a time is dequantised
TABLE = Path(__file__).with_name("slow_launches.json")
VERSION = 1
LEARN = "python recipes/cuda_kernels/learn_slow_launches.py"
PRODUCTS = ("gemm", "product")  # cost rules of operators that are one product of matrices
RECURRENT = ("GRU", "LSTM", "RNN")
PRODUCT_FEATURES = ("matrices", "m", "n", "k", "transposed", "element_bytes", "m_alignment", "n_alignment", "k_alignment")
RECURRENT_FEATURES = ("rows", "hidden_size", "columns", "directions", "element_bytes", "rows_times_columns")


@dataclass(frozen=True)
class Gpu:
    """GPU properties that affect the choice: compute capability, multiprocessors, shared memory per thread block."""

    capability: float = 9.0
    multiprocessors: int = 132
    shared_bytes: int = 48 << 10


H200 = Gpu()


def attention_algorithm(kernel: Kernel, sizes: AttentionSizes, gpu: Gpu = H200) -> Algorithm:
    """The algorithm of a half-precision GroupQueryAttention; "" for float32, which the CUDA provider lacks."""
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


def plain_algorithm(kernel: Kernel, sizes: AttentionSizes, gpu: Gpu = H200) -> Algorithm:
    """The algorithm of other attention operators from compute capability 9 on; "" for ONNX's own (rule unknown)."""
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


def group_size(sizes: AttentionSizes) -> int:
    """Query heads per key head."""
    return sizes.heads // max(sizes.kv_heads, 1)


def splits(sizes: AttentionSizes, algorithm: Algorithm, gpu: Gpu = H200) -> int:
    """The number of parts into which flash attention splits the keys to fill the GPU; 1 for other algorithms."""
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


def thread_blocks(sizes: AttentionSizes, algorithm: Algorithm, parts: int) -> int:
    """The approximate number of thread blocks of an attention. With one query per sequence, a block per key head; with more,
    one per tile of queries and head. Times the number of key splits."""
    if algorithm == "xqa":
        return sizes.batch * sizes.kv_heads
    if algorithm == "flash decoding":
        return sizes.batch * sizes.kv_heads * math.ceil(sizes.queries * group_size(sizes) / DECODING_TILE) * parts
    return sizes.batch * sizes.heads * math.ceil(sizes.queries / TILE) * parts


def product_algorithm(kernel: Kernel, gpu: Gpu = H200) -> Algorithm:
    """The algorithm of a MatMulNBits: few rows use the packed matrix, more a matrix that is dequantised first."""
    attributes = kernel.attributes
    depth, columns, block, bits = (int(attributes.get(name, default)) for name, default in (
        ("K", 0), ("N", 0), ("block_size", 32), ("bits", 4)))
    rows = product_rows(kernel)
    zero_points, reordered = input_at(kernel.inputs, 3), input_at(kernel.inputs, 4).present
    has_zero_points = zero_points.present
    element = int(DTYPE_BYTES.get(kernel.dtype, 4))
    fits = (rows <= MOST_ROWS.get(bits, 0) and columns % COLUMNS == 0 and depth % COLUMNS == 0 and not reordered
            and not (has_zero_points and zero_points.dtype != "uint8"))
    if bits == 8:
        fits = fits and 256 % max(block, 1) == 0 and depth % max(block, 1) == 0
    blocks = math.ceil(depth / max(block, 1))
    shared_bytes = COLUMNS * (element * blocks + (has_zero_points and (2 * math.ceil(blocks / 2) if bits == 4 else blocks)))
    if fits and bits == 4 and rows == 1 and not has_zero_points and block in (32, 64) and (columns, depth) == ROUTER:
        return "router"
    if fits and rows > 1 and (kernel.dtype != "float32" or bits == 8 or shared_bytes <= gpu.shared_bytes):
        return "rows"
    if fits and rows == 1 and shared_bytes <= gpu.shared_bytes:
        return "vector"
    in_parts = columns * blocks * block * element > WHOLE_BYTES and columns > 2 * PART_COLUMNS and not reordered
    return "dequantised in parts" if in_parts else "dequantised"


def product_rows(kernel: Kernel) -> int:
    """Rows of a product's first matrix, over the whole batch."""
    return math.prod(kernel.inputs[0].shape[:-1])


def language_algorithm(kernel: Kernel, gpu: Gpu = H200) -> Algorithm:
    """The algorithm of a language model's kernel; "" for operators with only one."""
    if sizes := kernel_grouped_query_sizes(kernel):
        return attention_algorithm(kernel, sizes, gpu)
    if sizes := kernel_attention_sizes(kernel):
        return plain_algorithm(kernel, sizes, gpu)
    return product_algorithm(kernel, gpu) if kernel.op_type == "MatMulNBits" else ""


# kernels that are slow to launch -----------------------------------------------------------------------------------------

class DecisionTree(Frozen):
    """A decision tree with yes or no at its leaves; one entry per node in each tuple, the root first."""

    feature: tuple[int, ...]  # the index of the number that is compared, -1 at a leaf
    threshold: tuple[float, ...]  # numbers up to it go left
    left: tuple[int, ...]  # left, right: the next node
    right: tuple[int, ...]
    slow: tuple[bool, ...]  # the answer at a leaf

    def answer(self, numbers: Sequence[float]) -> bool:
        node = 0
        while (feature := self.feature[node]) >= 0:
            node = self.left[node] if numbers[feature] <= self.threshold[node] else self.right[node]
        return self.slow[node]


class SlowLaunches(Frozen):
    """The trees in `slow_launches.json`."""

    version: int = VERSION
    source: str  # the device and the libraries whose kernels were learned from
    products: DecisionTree  # products, recurrent: the trees for numbers as PRODUCT_FEATURES and RECURRENT_FEATURES have them
    recurrent: DecisionTree


@functools.cache
def slow_launches() -> SlowLaunches:
    return files.read_record(TABLE, SlowLaunches, VERSION, LEARN)


def product_numbers(kernel: Kernel) -> tuple[float, ...] | None:
    """The PRODUCT_FEATURES of a kernel that is one matrix product; None for others."""
    row = operator_row(kernel.op_type)
    if row.dispatch != "product" or row.cost not in PRODUCTS or not kernel.outputs or len(kernel.outputs[0].shape) < 2:
        return None
    product = matrix_product(kernel)
    return (*map(float, product), float(DTYPE_BYTES.get(kernel.dtype, 0)),
            *(float(alignment(size)) for size in (product.m, product.n, product.k)))


def recurrent_numbers(kernel: Kernel) -> tuple[float, ...] | None:
    """The RECURRENT_FEATURES of a recurrent layer; None for other kernels, or if weight sizes are unknown. In each step and
    direction it multiplies a `rows` × `hidden_size` matrix by one with `columns` columns, those of all gates."""
    if kernel.op_type not in RECURRENT or len(kernel.inputs) < 3 or len(kernel.inputs[2].shape) != 3:
        return None
    directions, columns, hidden_size = kernel.inputs[2].shape
    rows = kernel.inputs[0].shape[0 if kernel.attributes.get("layout") else 1]
    return tuple(map(float, (rows, hidden_size, columns, directions, DTYPE_BYTES.get(kernel.dtype, 0), rows * columns)))


def is_slow_to_launch(kernel: Kernel) -> bool:
    """Whether cuBLAS probably chooses a kernel that takes the host longer to launch."""
    if numbers := product_numbers(kernel):
        return slow_launches().products.answer(numbers)
    if numbers := recurrent_numbers(kernel):
        return slow_launches().recurrent.answer(numbers)
    return False
