"""The memory of a request to a language model, and what fits into that of a device.

Counted are the weights, the cache, the other inputs and outputs (the prompt's logits are large: sequences × tokens × words)
with the intermediate tensors alive at the peak, the arena's surplus, and what `inference.core.memory` counts besides. The cache
does not grow where runs share it: onnxruntime-genai makes it for `max_length` tokens before the first run.

On CUDA cache and activations lie in ONNX Runtime's arena, whose regions double in size from 1 MiB to 1 GiB (`ArenaConfig`:
DEFAULT_MAX_POWER_OF_TWO_EXTEND_BYTES). The surplus is what is left in the last region. No measurement of a language model is in
this yet.

Not counted: the process or CUDA context itself, onnxruntime-genai's copies of the logits in float32, and the scratch of
attention kernels.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

from inference.core.memory import MIB, peak_memory
from inference.llm.answers import LlmMemory
from inference.llm.dimensions import DecoderFile
from records.kernel_record import ModelRecord

FIRST_REGION, LAST_REGION = MIB, 1024 * MIB  # bytes
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
        arena = left_in_region(MIB * (cache + activations)) / MIB
    return _total(LlmMemory(weights_mib=weights, cache_mib=cache, activations_mib=activations, arena_mib=arena,
                            workspace_mib=workspace, loading_mib=loading, peak_mib=0.0))


def _total(memory: LlmMemory) -> LlmMemory:
    """The same with its peak as the sum of its parts."""
    return memory.model_copy(update={"peak_mib": memory.weights_mib + memory.cache_mib + memory.activations_mib +
                                     memory.arena_mib + memory.workspace_mib + memory.loading_mib})


def left_in_region(used: float) -> float:
    """Bytes left in the last region of an arena that holds `used` bytes."""
    region, held = FIRST_REGION, 0
    while held < used and region < LAST_REGION:
        held += region
        region *= 2
    return held - used if held >= used else (held - used) % LAST_REGION


def times_as_many(memory: LlmMemory, times: float, device: str) -> LlmMemory:
    """The memory of so many times as many sequences: cache and activations grow with them, and what does not is far smaller.

    Args:
        memory: of a request.
        times: a ratio.
        device: `cpu` or `cuda`.
    """
    cache, activations = times * memory.cache_mib, times * memory.activations_mib
    arena = left_in_region(MIB * (cache + activations)) / MIB if device == "cuda" else times * memory.arena_mib
    return _total(memory.model_copy(update={"cache_mib": cache, "activations_mib": activations, "arena_mib": arena}))


def largest_batch(memory: LlmMemory, batch: int, device: str, device_mib: float) -> int:
    """The largest batch that fits into a device's memory; 0: none.

    Args:
        memory: of a request with `batch` sequences.
        batch: number of sequences.
        device: `cpu` or `cuda`.
        device_mib: its memory.
    """
    return bisect.bisect_right(range(1, MOST_SEQUENCES + 1), device_mib,
                               key=lambda count: times_as_many(memory, count / batch, device).peak_mib)


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
