"""What ONNX Runtime's arenas take from a GPU for a run of a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from inference.core.arena import Arena
from inference.core.buffers import buffers_of_run, lay_out, layouts_of
from inference.llm.dimensions import DecoderFile
from records.attention import attended_by
from records.kernel_record import DTYPE_BYTES, Kernel, ModelRecord
from runtimes.ort.cuda.language_kernels import PART_COLUMNS, product_algorithm


def weight_bytes_of(record: ModelRecord) -> Mapping[str, int]:
    """The constants that nodes on the GPU read, in the order in which they first do, with their bytes."""
    weights: dict[str, int] = {}
    for node in record.nodes:
        if node.provider == "cuda":
            weights |= {name: tensor.bytes for name, tensor in zip(node.inputs, record.kernel_of(node).inputs, strict=False)
                        if tensor.constant and name not in weights}
    return weights


def scratch_bytes(kernel: Kernel) -> int:
    """What a kernel takes while it runs: attention the rotated queries and a sum for each of them, a product with a quantised
    matrix that is dequantised first, this matrix or a part of its columns."""
    if sizes := attended_by(kernel):
        queries = sizes.batch * sizes.queries * sizes.heads
        return int(queries * (sizes.head_size * DTYPE_BYTES.get(kernel.dtype, 2) + DTYPE_BYTES["float32"]))
    if kernel.op_type == "MatMulNBits" and (algorithm := product_algorithm(kernel)).startswith("dequantised"):
        columns = int(kernel.attributes.get("N", 0))
        if algorithm == "dequantised in parts":
            columns = min(columns, PART_COLUMNS)
        return int(columns * int(kernel.attributes.get("K", 0)) * DTYPE_BYTES.get(kernel.dtype, 2))
    return 0


class Taken(NamedTuple):
    """Bytes that the arenas of a session, and of onnxruntime-genai, took from the device."""

    session: int
    genai: int


def taken_bytes(record: ModelRecord, file: DecoderFile, shares_cache: bool, times: float = 1.0) -> Taken:
    """What arenas hold after a run: weights and intermediate tensors lie in the session's; caches, the other inputs, and logits
    in that of onnxruntime-genai.

    Args:
        record: of the run.
        file: of the model.
        shares_cache: whether a run writes into the caches that it reads.
        times: how many times as many sequences run as in the record.
    """
    session, genai, apart = Arena(), Arena(), {*file.caches, *file.presents}
    for size in weight_bytes_of(record).values():
        session.allocate(size)
    presents = () if shares_cache else file.presents
    for tensors, names in ((record.inputs, file.caches), (record.outputs, presents),
                           *((tensors, tuple(name for name in tensors if name not in apart))
                             for tensors in (record.inputs, record.outputs))):
        for name in names:
            if name in tensors:
                genai.allocate(int(times * tensors[name].bytes))
    kernels = [record.kernel_of(node) for node in record.nodes]
    scratch = [int(times * scratch_bytes(kernel)) if attended_by(kernel) else scratch_bytes(kernel) for kernel in kernels]
    lay_out(session, buffers_of_run(record, layouts_of(record, "cuda"), apart), scratch, times)
    return Taken(session.taken, genai.taken)
