"""Measures a model under an algorithm at one input size: latency, layers, their CUDA kernels, and energy per run.

Layers are timed by CUDA events on a GPU and by the host's clock on a CPU. A pair of events adds to the time between them:
`event_overhead_ms` says how much.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hase.benchmark.measuring.gpu_trace import in_range, read, record_ranges
from hase.benchmark.metrics.power import PowerMonitor, PowerSensor, energy_of_runs
from hase.extras.convolutions.profiling.algorithms import NotSupported, count_names
from hase.extras.convolutions.profiling.engines import (
    OK,
    ForcedModel,
    LayerCall,
    incompatible,
    is_out_of_memory,
    relative_error,
)
from hase.records.measurement import SLOWDOWN_ADMITTED, Measurement, now
from hase.records.traces import KERNEL, GpuRun
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.lazy import torch
from hase.utils.logger import get_logger
from hase.utils.timing import Stopwatch, time_runs_ms, wait_for

if TYPE_CHECKING:
    from hase.extras.convolutions.profiling.algorithms import Tensor


# The GPU is held before a layer that is timed: for this multiple of the host's time for the layer, and at least so long.
HOLD_RATIO, SHORTEST_HOLD_MS = 1.5, 0.05
TRACE_HOLD_RATIO, SHORTEST_TRACE_HOLD_MS = 3.0, 0.2  # the same before a layer that is traced, since tracing slows the host
LONGEST_HOLD_MS = 20.0  # more does not help a layer whose launches fill the GPU's queue
CLOCK_KHZ = 2.0e6  # about a GPU's clock; a hold that is a little shorter or longer does no harm
LAYERS, RUNS, NUMBERS = 50, 10, 2**20  # of `event_overhead_ms`: layers of one kernel of a few microseconds each
log = get_logger("convolutions")


@dataclass(frozen=True)
class LayerTime:
    """Time of one call of a layer."""

    ms: float  # the device's; on a GPU it includes part of the events around it (`event_overhead_ms`)
    host_ms: float  # from hook to hook
    late: bool  # the GPU began before the host had launched everything, so it may have waited for the host


class LayerTimer:
    """Times every call of some modules by hooks; used in a `with` statement.

    A slow host makes the GPU wait within a layer. To prevent this, the GPU can be held for `holds_ms` before each call of a
    run, if a layer's launches fit into the GPU's queue (about a thousand).
    """

    def __init__(self, modules: Iterable[torch.nn.Module], device: str, holds_ms: Sequence[float] = ()) -> None:
        self._modules, self._device, self._holds_ms = list(modules), device, holds_ms
        self._hooks: list[Any] = []
        self._watches: list[Stopwatch] = []
        self._began_s = 0.0  # host time when the last call began
        self._host: list[tuple[float, bool]] = []  # per call: the host's time in ms, and whether it was late

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
        """All calls since the last `take`, in order. Waits for the device."""
        wait_for(self._device)
        taken = [LayerTime(watch.ms, host_ms, late) for watch, (host_ms, late) in zip(self._watches, self._host, strict=True)]
        self._watches, self._host = [], []
        return taken


def hold_for_trace(host_ms: float = 0.0) -> None:
    """Holds the GPU before a traced layer; `host_ms` is the layer's host time without tracing."""
    hold("cuda", SHORTEST_TRACE_HOLD_MS + TRACE_HOLD_RATIO * host_ms)


def hold(device: str, ms: float) -> None:
    """Keeps the GPU busy for about `ms` so that the host can launch ahead; does nothing on a CPU."""
    if device == "cuda":
        torch.cuda._sleep(int(min(ms, LONGEST_HOLD_MS) * CLOCK_KHZ))


@dataclass(frozen=True)
class CallTimes:
    """Times of one call of a layer over several runs."""

    samples_ms: tuple[float, ...]  # from runs in which the host was ahead of the GPU; if there are none, from all runs
    ahead_runs: int  # with the host ahead; if 0, the times are partly the host's
    host_ms: float


def time_layers(run: Callable[[], Any], modules: Iterable[torch.nn.Module], count: int, device: str) -> list[CallTimes]:
    """Times each call of `modules` in `count` runs; on a GPU by its own clock, with the host ahead."""
    modules = list(modules)
    with LayerTimer(modules, device) as timer:
        run()  # how long does the host take for each layer?
        calls = timer.take()
    holds_ms = [SHORTEST_HOLD_MS + HOLD_RATIO * call.host_ms for call in calls]
    with LayerTimer(modules, device, holds_ms) as timer:
        rows = []
        for _ in range(count):
            run()
            rows.append(timer.take())
    return [_call_times(times) for times in zip(*rows, strict=True)]


def _call_times(calls: Sequence[LayerTime]) -> CallTimes:
    ahead = [call.ms for call in calls if not call.late]
    samples_ms = ahead or [call.ms for call in calls]
    return CallTimes(tuple(samples_ms), len(ahead), statistics.median(call.host_ms for call in calls))


def event_overhead_ms() -> float | None:
    """Time by events minus CUPTI's, for layers with one CUDA kernel: 0.004 ms on an H200; None if it cannot be measured."""
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


# a model at one input size -----------------------------------------------------------------------------------------------

VERSION = 1
REMAKE = "python extras/convolutions/run_profile.py"
DEFAULT_SMALLEST, DEFAULT_LARGEST = 224, 1016  # 100 sizes in steps of 8
PROFILE, CONVOLUTION = "profile", "convolution"  # subjects: a whole model, and one call of a layer in it
SEED = 0
FEWEST_RUNS = 3


class ProfileSettings(Frozen):
    """What one results folder holds (`profile.json`). A resumed run must ask for the same, except for the sizes."""

    version: int = VERSION
    model: str
    algorithm: str
    gpu: str  # short name of the device: `h200`, `cpu`
    device: str  # `cuda` or `cpu`
    device_name: str
    batch: int = 1
    dtype: str = "fp32"  # or `fp16`
    tf32: bool = True  # whether single precision may use TF32 (GPUs since Ampere)
    fallback: bool = False  # whether the library's choice runs the layers that the algorithm cannot
    input_sizes: tuple[int, ...]  # heights (= widths) of the input, in pixels
    warmup: int = 10  # runs before each measurement
    measure: int = 30  # runs in it

    @property
    def name(self) -> str:
        """`<model>_<algorithm>` with underscores; prefix of the table files."""
        return f"{self.model}_{self.algorithm.replace(' ', '_')}"

    @property
    def units(self) -> list[ProfileUnit]:
        """The units to measure, smallest input first."""
        return [ProfileUnit(self, size) for size in self.input_sizes]

    def same_but_sizes(self, settings: ProfileSettings) -> bool:
        """Whether measurements of `settings` can be continued with these settings."""
        free = {"input_sizes": (), "warmup": 0, "measure": 0, "device_name": ""}
        return self.model_copy(update=free) == settings.model_copy(update=free)


@dataclass(frozen=True)
class ProfileUnit:
    """A model under an algorithm at one input size."""

    settings: ProfileSettings
    input_size: int

    @property
    def id(self) -> str:
        return f"{self.settings.name}_b{self.settings.batch}_{self.settings.dtype}_{self.input_size}"

    @property
    def what(self) -> str:
        """Description for messages."""
        return f"{self.settings.model} at {self.input_size}x{self.input_size}, batch {self.settings.batch}"


def even_sizes(count: int, smallest: int, largest: int) -> tuple[int, ...]:
    """`count` even numbers, evenly spaced between two sizes; fewer if there are not enough, UserError if none."""
    if smallest > largest:
        raise UserError(f"--min-size {smallest} is larger than --max-size {largest}")
    low, high = (smallest + 1) // 2, largest // 2
    if low > high:
        raise UserError(f"there is no even input size between {smallest} and {largest}")
    steps = max(count - 1, 1)
    return tuple(sorted({2 * (low + round(index * (high - low) / steps)) for index in range(count)}))


@dataclass(frozen=True)
class Instruments:
    """What profiles are measured with: sensors, tracing and limits."""

    device: str
    sensor: PowerSensor | None = None  # of power; used only in energy measurements, since its thread takes host time
    energy_s: float = 3.0  # length of the energy measurement; 0 for none
    idle_w: float | None = None  # power of the idle device; None if unknown
    no_energy: str = ""  # why there is no energy; "" if there is
    energy_of_mixed: bool = True  # whether to measure energy when some layers run by fallback
    traced: bool = True  # whether CUPTI records the CUDA kernels of each layer
    event_overhead_ms: float | None = None  # what a pair of CUDA events adds to a layer's time; None if unknown
    longest_s: float = math.inf  # a slower model gets fewer runs, but at least FEWEST_RUNS


def measure_profile(unit: ProfileUnit, forced: ForcedModel, instruments: Instruments) -> list[Measurement]:
    """The measurements of a profile: one of the model, and one per call of a convolution.

    A failed profile is a measurement with that status. If some layers cannot run, the profile fails and each layer says why.
    """
    began = now()
    try:
        return _measure(unit, forced, instruments, began)
    except (RuntimeError, NotSupported) as error:
        if instruments.device == "cuda":
            torch.cuda.empty_cache()
        return [_model_measurement(unit, began, status="failed", error=describe_failure(unit, error))]


def describe_failure(unit: ProfileUnit, error: Exception) -> str:
    """Explains an error of torch or cuDNN; for lack of memory it says what to do."""
    if not is_out_of_memory(error):
        return f"{unit.what}: {str(error).partition(chr(10))[0] or 'failed'}"
    advice = (f"try --batch {unit.settings.batch // 2}" if unit.settings.batch > 1
              else "try a smaller --max-size, or a device with more memory")
    return f"{unit.what}: out of memory; {advice}"


def _measure(unit: ProfileUnit, forced: ForcedModel, instruments: Instruments, began: str) -> list[Measurement]:
    settings = unit.settings
    images = draw_images(unit, instruments.device)
    forced.plan(images)
    layers = [_layer_facts(call) for call in forced.calls]
    all_refused = len(forced.refused) == len(forced.calls)  # a fallback for every layer would be a run of another algorithm
    if (all_refused or not settings.fallback) and (why := incompatible(settings.algorithm, settings.model, forced.calls)):
        return [_model_measurement(unit, began, status="failed", error=why, facts=_model_facts(unit, forced)),
                *(_layer(unit, call, facts, began) for call, facts in zip(forced.calls, layers, strict=True))]
    if unrunnable := [call for call in forced.calls if not call.algorithm]:
        error = f"{unit.what}: {unrunnable[0].layer} can't run, by the library's own choice either ({unrunnable[0].detail})"
        return [_model_measurement(unit, began, status="failed", error=error, facts=_model_facts(unit, forced))]
    run = partial(forced.model, images)
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=settings.tf32):
        difference = output_difference(forced, images)
        if not difference <= forced.model_tolerance(images):  # also true for NaN
            error = f"{unit.what}: outputs differ from torch's by {difference:.2g}"
            return [_model_measurement(unit, began, status="failed", error=error)]
        with forced.forced():
            (run_ms,) = time_runs_ms(run, 1, by_events=instruments.device == "cuda")
            time_runs_ms(run, affordable(settings.warmup, run_ms, instruments) - 1, by_events=instruments.device == "cuda")
            runs = affordable(settings.measure, run_ms, instruments)
            samples_ms = time_runs_ms(run, runs, by_events=instruments.device == "cuda")
            layer_times = time_layers(run, forced.layers.values(), runs, instruments.device)
            mixed = bool(forced.refused) and not instruments.energy_of_mixed
            quantities, doubts = ({}, "not asked for: some layers run by fallback") if mixed else measure_energy(
                run, instruments, float(np.mean(samples_ms)))
        host_ms = [call.host_ms for call in layer_times]
        traced = trace_layers(forced, run, host_ms) if instruments.device == "cuda" and instruments.traced else []
    if instruments.event_overhead_ms is not None:
        quantities = quantities | {"event_overhead_ms": (instruments.event_overhead_ms,)}
    facts = _model_facts(unit, forced) | {"output_error": difference, "energy_doubts": doubts}
    whole = _model_measurement(unit, began, samples_ms=rounded(samples_ms), facts=facts, quantities=quantities)
    return [whole, *(_layer(unit, call, layers[index], began, layer_times[index], traced[index] if traced else None)
                     for index, call in enumerate(forced.calls))]


def affordable(runs: int, run_ms: float, instruments: Instruments) -> int:
    """How many of `runs` fit into `instruments.longest_s`; at least FEWEST_RUNS, if that many are asked for."""
    return int(min(runs, max(FEWEST_RUNS, 1e3 * instruments.longest_s / run_ms)))


def draw_images(unit: ProfileUnit, device: str) -> Tensor:
    """Random images of the profile's size, the same each time. Raises RuntimeError if the device has no memory left."""
    torch.manual_seed(SEED)
    images = torch.randn(unit.settings.batch, 3, unit.input_size, unit.input_size)
    return images.to(device, torch.float16 if unit.settings.dtype == "fp16" else torch.float32)


def output_difference(forced: ForcedModel, images: Tensor) -> float:
    """Relative difference (Euclidean norm) of the model's outputs to those with torch's own convolutions."""
    expected = forced.model(images).float()
    with forced.forced():
        return relative_error(forced.model(images).float(), expected)


def measure_energy(run: Callable[[], Any], instruments: Instruments,
                   latency_ms: float) -> tuple[dict[str, tuple[float, ...]], str]:
    """Energy and power of repeated runs, with doubts about them; without a sensor, the reason.

    Runs much slower than `latency_ms`, measured before, are a doubt.
    """
    if instruments.sensor is None or not instruments.energy_s:
        return {}, instruments.no_energy

    def run_to_the_end() -> None:
        run()
        wait_for(instruments.device)

    with PowerMonitor(instruments.sensor) as monitor:
        measured = energy_of_runs(monitor, run_to_the_end, instruments.energy_s)
    quantities: dict[str, tuple[float, ...]] = {
        "energy_j": (measured.energy_j,), "power_w": (measured.used.mean_w,), "energy_window_s": (measured.used.seconds,)}
    if measured.used.agreement is not None:
        quantities["energy_agreement"] = (measured.used.agreement,)
    if instruments.idle_w is not None:
        quantities["idle_power_w"] = (instruments.idle_w,)
    doubts = list(measured.used.warnings)
    if (slower := float(np.mean(measured.samples_ms)) / latency_ms) > SLOWDOWN_ADMITTED:
        doubts.append(f"runs took {slower:.2f} times as long as before: other work ran meanwhile")
    return quantities, "; ".join(doubts)


def trace_layers(forced: ForcedModel, run: Callable[[], Any], host_ms: Sequence[float]) -> list[GpuRun]:
    """The GPU's work in each call of a convolution, by CUPTI, in one run without hooks.

    The GPU is held before each call, as for timing, so that kernels which can run side by side do so.
    """
    def run_once() -> None:
        run()
        torch.cuda.synchronize()

    @contextmanager
    def held_range(number: int) -> Iterator[None]:
        hold_for_trace(host_ms[number])
        with in_range(number):
            yield

    with forced.forced(around=held_range):
        return read(record_ranges(run_once, len(forced.calls)))


def rounded(samples_ms: Iterable[float]) -> tuple[float, ...]:
    """Times rounded to the nanosecond; clocks and events are no finer."""
    return tuple(round(float(sample), 6) for sample in samples_ms)


def _model_measurement(unit: ProfileUnit, began: str, **fields: Any) -> Measurement:
    return Measurement(subject=PROFILE, id=unit.id, label="latency", context="alone", place="alone", started=began, ended=now(),
                       **({"facts": _unit_facts(unit)} | fields))


def _layer(unit: ProfileUnit, call: LayerCall, facts: dict[str, Any], began: str, times: CallTimes | None = None,
                       traced: GpuRun | None = None) -> Measurement:
    """Measurement of one call of a layer. A refused call has a status but no times, unless a fallback ran it."""
    kernels = count_names(work.name for work in traced.work if work.category == KERNEL) if traced else ()
    by_cupti = {"cupti_ms": traced.busy_us, "cupti_span_ms": traced.span_us} if traced else {}
    if times:
        facts = facts | {"ahead_runs": times.ahead_runs}
    failed = call.status != OK and not times
    return Measurement(
        subject=CONVOLUTION, id=f"{unit.id}.{call.layer}", label="layer", context=unit.id, place="in_model",
        samples_ms=rounded(times.samples_ms if times else ()), facts=facts | _unit_facts(unit), cuda_kernels=kernels,
        quantities={name: rounded([time_us / 1e3]) for name, time_us in by_cupti.items()},
        launches=len(traced.work) if traced else None, status="failed" if failed else "ok",
        error=f"{call.status}: {call.detail}" if failed else "", started=began, ended=now())


def _unit_facts(unit: ProfileUnit) -> dict[str, Any]:
    settings = unit.settings
    return {"model": settings.model, "algorithm": settings.algorithm, "input_size": unit.input_size, "batch": settings.batch,
            "dtype": settings.dtype, "tf32": int(settings.tf32 and settings.device == "cuda"), "gpu": settings.gpu}


def _model_facts(unit: ProfileUnit, forced: ForcedModel) -> dict[str, Any]:
    return _unit_facts(unit) | {"layers": len(forced.calls), "refused_layers": len(forced.refused)}


def _layer_facts(call: LayerCall) -> dict[str, Any]:
    """Facts about a call before it is timed."""
    facts: dict[str, Any] = {"layer": call.layer, "layer_status": call.status, "layer_detail": call.detail,
                             "ran": call.algorithm, "workspace_bytes": call.workspace_bytes}
    if call.output_error is not None:
        facts["output_error"] = call.output_error
    if call.shape is None:
        return facts
    shape = call.shape
    pairs = {"kernel": shape.kernel, "stride": shape.stride, "padding": shape.padding, "dilation": shape.dilation}
    return facts | {
        "in_channels": shape.in_channels, "out_channels": shape.out_channels, "height": shape.height, "width": shape.width,
        "groups": shape.groups, "bias": int(shape.bias), "flops": shape.flops, "bytes_moved": shape.bytes_moved,
        **{f"{name}_{side}": size for name, pair in pairs.items() for side, size in zip("hw", pair, strict=True)}}
