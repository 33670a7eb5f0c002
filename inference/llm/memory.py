"""The memory of a request to a language model, and what fits into that of a device.

Counted are the weights, the cache, the other inputs and outputs (the prompt's logits are large: sequences × tokens × words)
with the intermediate tensors alive at the peak, the arena's surplus, and what `hase.inference.core.memory` counts besides. The cache
does not grow where runs share it: onnxruntime-genai makes it for `max_length` tokens before the first run.

On CUDA all of this lies in arenas, one of the session and one of onnxruntime-genai, whose regions double in size from 1 MiB to
1 GiB and more (inference/core/arena.py). The surplus is what they hold and do not use. Libraries keep a constant amount
besides: on an H200 requests took 148 to 150 MiB more than the arenas' regions wherever these were right, which is 70 of 101.

Not counted: the process or CUDA context itself, and onnxruntime-genai's copies of the last token's logits.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hase.inference.core.arena import MIB
from hase.inference.core.cuda_memory import LIBRARIES_MIB
from hase.inference.core.memory import peak_memory
from hase.inference.llm.answers import LlmMemory
from hase.inference.llm.dimensions import DecoderFile
from hase.inference.llm.taken_memory import taken_by_generation
from hase.records.kernel_record import ModelRecord

MOST_SEQUENCES = 2**20  # of a batch that is asked about
CLOSE = 0.01  # of a context: how much longer one might fit
TRIES = 12  # of a search; each analyses the model once more


class Run(NamedTuple):
    """A run of one of a model's files, by its record."""

    file: DecoderFile
    record: ModelRecord

    @property
    def cache_bytes(self) -> tuple[int, int]:
        """Of the caches before and after the run."""
        tensors = ((self.record.inputs, self.file.caches), (self.record.outputs, self.file.presents))
        before, after = (sum(held[name].bytes for name in names if name in held) for held, names in tensors)
        return before, after


def request_memory(runs: tuple[Run, ...], shares_cache: bool) -> LlmMemory:
    """The peak over the runs of a request, whose arena keeps what any of them needed.

    Args:
        runs: of the prompt and of the last token.
        shares_cache: whether a run writes into the buffer that it reads.
    """
    memories = [peak_memory(run.record, apart={*run.file.caches, *run.file.presents}) for run in runs]
    cache = max(max(run.cache_bytes) if shares_cache else sum(run.cache_bytes) for run in runs) / MIB
    # A prefill in a file of its own is a session of its own, with weights of its own.
    weights = sum({run.file.path: memory.weights_mib for run, memory in zip(runs, memories, strict=True)}.values())
    activations, arena, workspace, loading = (max(getattr(memory, name) or 0.0 for memory in memories) for name in (
        "activations_mib", "arena_mib", "workspace_mib", "loading_mib"))
    if runs[0].record.flavour.device == "cuda":
        workspace = LIBRARIES_MIB
        arena = _surplus_mib(runs, shares_cache, weights + cache + activations)
    return _total(LlmMemory(weights_mib=weights, cache_mib=cache, activations_mib=activations, arena_mib=arena,
                            workspace_mib=workspace, loading_mib=loading, peak_mib=0.0))


def _total(memory: LlmMemory) -> LlmMemory:
    """The same with its peak as the sum of its parts, but for what loading leaves (`hase.inference.core.memory`)."""
    return memory.model_copy(update={"peak_mib": memory.weights_mib + memory.cache_mib + memory.activations_mib +
                                     memory.arena_mib + memory.workspace_mib})


def _surplus_mib(runs: tuple[Run, ...], shares_cache: bool, used_mib: float, times: float = 1.0) -> float:
    """What the arenas hold and do not use: the most after any of the runs, of which each file has a session of its own."""
    sessions: dict[Path, int] = {}
    genai = 0
    for run in runs:
        taken = taken_by_generation(run.record, run.file, shares_cache, times)
        sessions[run.file.path], genai = max(sessions.get(run.file.path, 0), taken.session), max(genai, taken.genai)
    return max((sum(sessions.values()) + genai) / MIB - used_mib, 0.0)


def times_as_many(memory: LlmMemory, times: float, runs: tuple[Run, ...], shares_cache: bool) -> LlmMemory:
    """The memory of so many times as many sequences: cache and activations grow with them, and what does not is far smaller.

    Args:
        memory: of a request.
        times: a ratio.
        runs, shares_cache: of the request, as for `request_memory`.
    """
    cache, activations = times * memory.cache_mib, times * memory.activations_mib
    arena = times * memory.arena_mib
    if runs[0].record.flavour.device == "cuda":
        arena = _surplus_mib(runs, shares_cache, memory.weights_mib + cache + activations, times)
    return _total(memory.model_copy(update={"cache_mib": cache, "activations_mib": activations, "arena_mib": arena}))


def largest_batch(memory: LlmMemory, batch: int, runs: tuple[Run, ...], shares_cache: bool, device_mib: float) -> int:
    """The largest batch that fits into a device's memory; 0: none.

    Args:
        memory: of a request with `batch` sequences.
        batch: number of sequences.
        runs, shares_cache: of the request, as for `request_memory`.
        device_mib: its memory.
    """
    def exceeds(count: int) -> bool:
        used = memory.weights_mib + count / batch * (memory.cache_mib + memory.activations_mib)  # a lower bound, without arenas
        return used > device_mib or times_as_many(memory, count / batch, runs, shares_cache).peak_mib > device_mib

    return bisect.bisect_left(range(1, MOST_SEQUENCES + 1), True, key=exceeds)


def longest_context(left_mib: Callable[[int], float], fewest: int, most: int) -> int:
    """The most tokens of prompt and answer that fit, to within CLOSE; 0: not even `fewest`.

    Args:
        left_mib: the memory that is left with so many tokens, in MiB; below 0 they do not fit. It falls as there are more.
        fewest, most: tokens between which to search: where a line between the ends crosses 0. An end that is kept twice counts
            half (the Illinois algorithm), since memory may grow with the square of the tokens.
    """
    (low, low_left), (high, high_left) = ((tokens, left_mib(tokens)) for tokens in (fewest, most))
    if low_left < 0:
        return 0
    if high_left >= 0:
        return most
    kept = ""
    for _ in range(TRIES):
        if high - low <= max(1, CLOSE * low):
            break
        share = low_left / (low_left - high_left)
        tokens = min(max(low + round(share * (high - low)), low + 1), high - 1)
        left = left_mib(tokens)
        if left >= 0:
            high_left *= 0.5 if kept == "high" else 1.0
            low, low_left, kept = tokens, left, "high"
        else:
            low_left *= 0.5 if kept == "low" else 1.0
            high, high_left, kept = tokens, left, "low"
    return low
