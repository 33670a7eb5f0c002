"""Times of a model's layers: CUDA events on a GPU, the host's clock on a CPU.

A pair of events adds to the time of the work between them: `event_overhead_ms` says how much.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from hase.benchmark.measuring.gpu_trace import in_range, read, record_ranges
from hase.benchmark.measuring.run_times import Stopwatch, wait_for
from hase.utils.lazy import torch
from hase.utils.logger import get_logger

AHEAD = 1.5  # how long the GPU is held before a layer that is timed, relative to the host's time of the layer
CLOCK_KHZ = 2.0e6  # about a GPU's clock; a hold that is a little shorter or longer does no harm
AHEAD_OF_TRACE, SHORTEST_HOLD_OF_TRACE_MS = 3.0, 0.2  # the same before a layer that is traced, which slows the host
SHORTEST_HOLD_MS, LONGEST_HOLD_MS = 0.05, 20.0  # a layer whose launches fill the GPU's queue is not helped by more
LAYERS, RUNS, NUMBERS = 50, 10, 2**20  # of the reference: layers of one kernel of a few microseconds each
log = get_logger("convolutions")


@dataclass(frozen=True)
class LayerTime:
    """One call of a layer.

    Attributes:
        ms: the device's time. On a GPU an event before and one after take part of it (`event_overhead_ms`).
        host_ms: the host's time, from hook to hook.
        late: the GPU had begun before the host had launched everything, so that it may have waited for the host.
    """

    ms: float
    host_ms: float
    late: bool


class LayerTimer:
    """Times every call of some modules by hooks, while it is used in a `with` statement.

    Where the host is slower than the GPU, the GPU waits for it within a layer. Holding the GPU before each layer prevents that,
    if the layer's launches fit into the GPU's queue (about a thousand).

    Args:
        modules: to be timed.
        device: `cpu` or `cuda`.
        holds_ms: for how long the GPU is held before each call of a run, in their order; none by default.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], device: str, holds_ms: Sequence[float] = ()) -> None:
        self._modules, self._device, self._holds_ms = list(modules), device, holds_ms
        self._hooks: list[Any] = []
        self._watches: list[Stopwatch] = []
        self._began_s = 0.0  # the host's, of the last call
        self._host: list[tuple[float, bool]] = []  # of each call the host's time in ms, and whether it was late

    def __enter__(self) -> Self:
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(self._begin))
            self._hooks.append(module.register_forward_hook(self._end))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._holds_ms:
            hold(self._device, self._holds_ms[len(self._watches)])
        watch = Stopwatch(self._device)
        self._watches.append(watch)
        self._began_s = time.perf_counter()
        watch.start()

    def _end(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        watch = self._watches[-1]
        watch.stop()
        self._host.append((1e3 * (time.perf_counter() - self._began_s), watch.began))

    def take(self) -> list[LayerTime]:
        """Every call since the last `take`, in the order of the calls. Waits for the device."""
        wait_for(self._device)
        taken = [LayerTime(watch.ms, host_ms, late) for watch, (host_ms, late) in zip(self._watches, self._host, strict=True)]
        self._watches, self._host = [], []
        return taken


def hold_for_trace(host_ms: float = 0.0) -> None:
    """Holds the GPU before a layer that is traced and that takes the host so long without."""
    hold("cuda", SHORTEST_HOLD_OF_TRACE_MS + AHEAD_OF_TRACE * host_ms)


def hold(device: str, ms: float) -> None:
    """Keeps the GPU busy for about `ms`, so that the host can launch ahead of it; does nothing on a CPU."""
    if device == "cuda":
        torch.cuda._sleep(int(min(ms, LONGEST_HOLD_MS) * CLOCK_KHZ))


@dataclass(frozen=True)
class CallTimes:
    """What several runs say about one call of a layer.

    Attributes:
        samples_ms: of the runs in which the host was ahead of the GPU; of all runs where it never was.
        ahead_runs: in how many it was. With none, the times are partly the host's.
        host_ms: the host's time of a call.
    """

    samples_ms: tuple[float, ...]
    ahead_runs: int
    host_ms: float


def time_layers(run: Callable[[], Any], modules: Iterable[torch.nn.Module], count: int, device: str) -> list[CallTimes]:
    """Times each call of `modules` in `count` runs: on a GPU by its own clock, since the host is ahead."""
    modules = list(modules)
    with LayerTimer(modules, device) as timer:
        run()  # how long does the host take for each layer?
        calls = timer.take()
    holds_ms = [SHORTEST_HOLD_MS + AHEAD * call.host_ms for call in calls]
    with LayerTimer(modules, device, holds_ms) as timer:
        rows = []
        for _ in range(count):
            run()
            rows.append(timer.take())
    return [_summed_up(times) for times in zip(*rows, strict=True)]


def _summed_up(calls: Sequence[LayerTime]) -> CallTimes:
    ahead = [call.ms for call in calls if not call.late]
    samples_ms = ahead or [call.ms for call in calls]
    return CallTimes(tuple(samples_ms), len(ahead), statistics.median(call.host_ms for call in calls))


def event_overhead_ms() -> float | None:
    """The difference between the time by events, as layers are timed, and CUPTI's time, of layers that launch one CUDA kernel.

    Returns:
        Milliseconds, 0.004 on an H200; None, with a warning, where such a layer can't be timed.
    """
    layers = torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(LAYERS)))
    numbers = torch.ones(NUMBERS, device="cuda")

    def run_traced() -> None:
        for number, layer in enumerate(layers):
            hold_for_trace()
            with in_range(number):
                layer(numbers)
        wait_for("cuda")

    with torch.inference_mode():
        layers(numbers)
        wait_for("cuda")
        timed = [call for call in time_layers(lambda: layers(numbers), layers, RUNS, "cuda") if call.ahead_runs]
        traced = [run.busy_us / 1e3 for run in read(record_ranges(run_traced, LAYERS)) if len(run.work) == 1]
    if not timed or not traced:
        log.warning("what CUDA events add to the time of a layer could not be measured; layers' times hold it")
        return None
    return statistics.median(time for call in timed for time in call.samples_ms) - statistics.median(traced)
