"""What ONNX Runtime's arenas take from a GPU for a run of a language model."""

from __future__ import annotations

from typing import NamedTuple

from hase.inference.core.arena import Arena
from hase.inference.core.buffers import buffers_of_run, lay_out, layouts_of
from hase.inference.core.cuda_memory import weight_bytes_of
from hase.inference.llm.dimensions import DecoderFile
from hase.records.attention import attended_by
from hase.records.kernel_record import ModelRecord


class Taken(NamedTuple):
    """Bytes that the arenas of a session, and of onnxruntime-genai, took from the device."""

    session: int
    genai: int


def taken_by_generation(record: ModelRecord, file: DecoderFile, shares_cache: bool, times: float = 1.0) -> Taken:
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
    layouts, kernels = layouts_of(record, "cuda"), [record.kernel_of(node) for node in record.nodes]
    scratch = [int((times if attended_by(kernel) else 1.0) * layouts[kernel.id].scratch_bytes) for kernel in kernels]
    lay_out(session, buffers_of_run(record, layouts, apart), scratch, times)
    return Taken(session.taken, genai.taken)
