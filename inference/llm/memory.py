"""Predicts the memory of a request to a language model, and what fits into the device.

It counts weights, cache, other inputs and outputs (the prompt's logits are large: sequences × tokens × vocabulary), live
intermediate tensors at the peak, the arena's surplus, and the other parts of `hase.inference.memory.session`. A shared cache
does not grow: onnxruntime-genai allocates it for `max_length` tokens before the first run.

On CUDA all of this lies in two arenas, one of the session and one of onnxruntime-genai, whose regions double in size from 1 MiB
to 1 GiB and more (inference/memory/buffers.py). The surplus is their unused part. Libraries take a constant amount besides: on
an H200, 148 to 150 MiB in all 70 of 101 requests whose arena regions were predicted correctly.

It does not count the process or CUDA context itself, and onnxruntime-genai's copies of the last token's logits.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hase.inference.llm.answers import LlmMemory
from hase.inference.llm.language_model import DecoderFile
from hase.inference.memory.buffers import Arena, buffers_of_run, lay_out, layouts_of
from hase.inference.memory.session import LIBRARIES_MIB, gpu_weight_bytes, peak_memory
from hase.records.attention import kernel_grouped_query_sizes
from hase.records.kernel_record import ModelRecord
from hase.utils.processes import MIB

MOST_SEQUENCES = 2**20  # limit of the search for the largest batch
TOLERANCE = 0.01  # relative, of the longest context
MOST_STEPS = 12  # of a search; each analyses the model again


class DecoderRun(NamedTuple):
    """A run of one of a model's files, by its record."""

    file: DecoderFile
    record: ModelRecord

    @property
    def cache_bytes(self) -> tuple[int, int]:
        """The bytes of the caches before and after the run."""
        tensors = ((self.record.inputs, self.file.caches), (self.record.outputs, self.file.presents))
        before, after = (sum(held[name].bytes for name in names if name in held) for held, names in tensors)
        return before, after


def request_memory(runs: tuple[DecoderRun, ...], shares_cache: bool) -> LlmMemory:
    """The peak over the runs of a request (the prompt, and the last token). The arena keeps what any of them needed."""
    memories = [peak_memory(run.record, excluded={*run.file.caches, *run.file.presents}) for run in runs]
    cache = max(max(run.cache_bytes) if shares_cache else sum(run.cache_bytes) for run in runs) / MIB
    # A separate prefill file is a separate session with its own weights.
    weights = sum({run.file.path: memory.weights_mib for run, memory in zip(runs, memories, strict=True)}.values())
    activations, arena, workspace, loading = (max(getattr(memory, name) or 0.0 for memory in memories) for name in (
        "activations_mib", "arena_mib", "workspace_mib", "loading_mib"))
    if runs[0].record.flavour.device == "cuda":
        workspace = LIBRARIES_MIB
        arena = _surplus_mib(runs, shares_cache, weights + cache + activations)
    return _total(LlmMemory(weights_mib=weights, cache_mib=cache, activations_mib=activations, arena_mib=arena,
                            workspace_mib=workspace, loading_mib=loading, peak_mib=0.0))


def _total(memory: LlmMemory) -> LlmMemory:
    """Sets the peak of a request's memory: the sum of all parts except what loading leaves (`hase.inference.memory.session`).
    """
    return memory.model_copy(update={"peak_mib": memory.weights_mib + memory.cache_mib + memory.activations_mib +
                                     memory.arena_mib + memory.workspace_mib})


def _surplus_mib(runs: tuple[DecoderRun, ...], shares_cache: bool, used_mib: float, times: float = 1.0) -> float:
    """The unused memory of the arenas; the maximum over the runs. Each file has its own session."""
    session_bytes: dict[Path, int] = {}
    genai_bytes = 0
    for run in runs:
        taken = taken_by_generation(run.record, run.file, shares_cache, times)
        session_bytes[run.file.path] = max(session_bytes.get(run.file.path, 0), taken.session)
        genai_bytes = max(genai_bytes, taken.genai)
    return max((sum(session_bytes.values()) + genai_bytes) / MIB - used_mib, 0.0)


def times_as_many(memory: LlmMemory, times: float, runs: tuple[DecoderRun, ...], shares_cache: bool) -> LlmMemory:
    """The memory with `times` as many sequences: cache and activations grow in proportion, the rest is nearly constant."""
    cache, activations = times * memory.cache_mib, times * memory.activations_mib
    arena = times * memory.arena_mib
    if runs[0].record.flavour.device == "cuda":
        arena = _surplus_mib(runs, shares_cache, memory.weights_mib + cache + activations, times)
    return _total(memory.model_copy(update={"cache_mib": cache, "activations_mib": activations, "arena_mib": arena}))


def largest_batch(memory: LlmMemory, batch: int, runs: tuple[DecoderRun, ...], shares_cache: bool, device_mib: float) -> int:
    """The largest batch that fits into a device's memory, given the `memory` of a request with `batch` sequences; 0: none."""
    def exceeds(count: int) -> bool:
        used = memory.weights_mib + count / batch * (memory.cache_mib + memory.activations_mib)  # a lower bound, without arenas
        return used > device_mib or times_as_many(memory, count / batch, runs, shares_cache).peak_mib > device_mib

    return bisect.bisect_left(range(1, MOST_SEQUENCES + 1), True, key=exceeds)


def longest_context(left_mib: Callable[[int], float], fewest: int, most: int) -> int:
    """The most tokens of prompt and answer that fit, to within TOLERANCE; 0: not even `fewest`. `left_mib` gives the memory
    that is left at a number of tokens (MiB), negative if they do not fit. The search is the Illinois algorithm (regula falsi in
    which an end that is kept twice counts half), since memory may grow with the square of the tokens."""
    (low, low_left), (high, high_left) = ((tokens, left_mib(tokens)) for tokens in (fewest, most))
    if low_left < 0:
        return 0
    if high_left >= 0:
        return most
    kept_end = ""
    for _ in range(MOST_STEPS):
        if high - low <= max(1, TOLERANCE * low):
            break
        share = low_left / (low_left - high_left)
        tokens = min(max(low + round(share * (high - low)), low + 1), high - 1)
        left = left_mib(tokens)
        if left >= 0:
            high_left *= 0.5 if kept_end == "high" else 1.0
            low, low_left, kept_end = tokens, left, "high"
        else:
            low_left *= 0.5 if kept_end == "low" else 1.0
            high, high_left, kept_end = tokens, left, "low"
    return low


class TakenMemory(NamedTuple):
    """Bytes that the arenas of a session, and of onnxruntime-genai, took from the device."""

    session: int
    genai: int


def taken_by_generation(record: ModelRecord, file: DecoderFile, shares_cache: bool, times: float = 1.0) -> TakenMemory:
    """The arenas' memory after a run with `times` as many sequences as in the record. The session's arena has weights and
    intermediate tensors, onnxruntime-genai's has caches, other inputs and logits."""
    session, genai, excluded = Arena(), Arena(), {*file.caches, *file.presents}
    for size in gpu_weight_bytes(record).values():
        session.allocate(size)
    presents = () if shares_cache else file.presents
    for tensors, names in ((record.inputs, file.caches), (record.outputs, presents),
                           *((tensors, tuple(name for name in tensors if name not in excluded))
                             for tensors in (record.inputs, record.outputs))):
        for name in names:
            if name in tensors:
                genai.allocate(int(times * tensors[name].bytes))
    layouts, kernels = layouts_of(record, "cuda"), [record.kernel_of(node) for node in record.nodes]
    scratch = [int((times if kernel_grouped_query_sizes(kernel) else 1.0) * layouts[kernel.id].scratch_bytes)
               for kernel in kernels]
    lay_out(session, buffers_of_run(record, layouts, excluded), scratch, times)
    return TakenMemory(session.reserved_bytes, genai.reserved_bytes)
