"""Times of a model's runs and of its layers: CUDA events on a GPU, the host's clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from utils.lazy import torch

AHEAD = 1.5  # how long the GPU is held before a run whose layers are timed, relative to the host's time of a run
CLOCK_KHZ = 2.0e6  # about a GPU's clock; a hold that is a little shorter or longer does no harm
LONGEST_HOLD_MS = 200.0


def wait_for(device: str) -> None:
    """Waits until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


class Stopwatch:
    """Takes the time between two moments of the device's work, in ms; read it after `wait_for`."""

    def __init__(self, device: str) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else []
        self._times_s = [0.0, 0.0]

    def start(self) -> None:
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def _mark(self, which: int) -> None:
        if self._events:
            self._events[which].record()
        else:
            self._times_s[which] = time.perf_counter()

    @property
    def ms(self) -> float:
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1]))
        return 1e3 * (self._times_s[1] - self._times_s[0])


def time_runs_ms(run: Callable[[], Any], count: int, device: str) -> list[float]:
    """The time of each of `count` runs in ms, from when the host begins until the device is done."""
    times_ms = []
    for _ in range(count):
        watch = Stopwatch(device)
        wait_for(device)
        watch.start()
        run()
        watch.stop()
        wait_for(device)
        times_ms.append(watch.ms)
    return times_ms


class LayerTimer:
    """Times every call of some modules by hooks, while it is used in a `with` statement.

    An event takes the GPU a microsecond or two; the host's time between two layers is not in their times. But where the host is
    slower than the GPU, the GPU waits for it within a layer. `hold` prevents that.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], device: str) -> None:
        self._modules, self._device = list(modules), device
        self._hooks: list[Any] = []
        self._watches: list[Stopwatch] = []

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
        watch = Stopwatch(self._device)
        self._watches.append(watch)
        watch.start()

    def _end(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._watches[-1].stop()

    def take_ms(self) -> list[float]:
        """The time of every call since the last `take_ms`, in the order of the calls. Waits for the device."""
        wait_for(self._device)
        taken, self._watches = [watch.ms for watch in self._watches], []
        return taken


def hold(device: str, ms: float) -> None:
    """Keeps the GPU busy for about `ms`, so that the host can launch ahead of it; does nothing on a CPU."""
    if device == "cuda":
        torch.cuda._sleep(int(min(ms, LONGEST_HOLD_MS) * CLOCK_KHZ))


def time_layers_ms(run: Callable[[], Any], modules: Iterable[torch.nn.Module], count: int, device: str) -> list[list[float]]:
    """For each of `count` runs the time of each call of `modules`, in ms: on a GPU the GPU's own, since the host is ahead."""
    with LayerTimer(modules, device) as timer:
        began_s = time.perf_counter()
        run()  # hooks and events are made; how long does the host take?
        host_ms = 1e3 * (time.perf_counter() - began_s)
        timer.take_ms()
        rows = []
        for _ in range(count):
            hold(device, AHEAD * host_ms)
            run()
            rows.append(timer.take_ms())
        return rows
