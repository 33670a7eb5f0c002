"""One profile, a model under an algorithm at one input size, and how it is measured: what runs, the model's latency, its
layers, their CUDA kernels, and the energy of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hase.benchmark.measuring.gpu_trace import KERNEL, GpuRun, in_range, read, record_ranges
from hase.benchmark.measuring.run_times import time_runs_ms, wait_for
from hase.benchmark.metrics.power import PowerMonitor, energy_of_runs
from hase.benchmark.metrics.power_sensors import PowerSensor
from hase.extras.convolutions.algorithms import NotSupported, counted
from hase.extras.convolutions.engines import (
    OK,
    ForcedModel,
    LayerCall,
    incompatible,
    is_out_of_memory,
    relative_error,
)
from hase.extras.convolutions.timing import CallTimes, hold_for_trace, time_layers
from hase.records.measurement import SLOWDOWN_ADMITTED, Measurement, now
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.lazy import torch

if TYPE_CHECKING:
    from hase.extras.convolutions.algorithms import Tensor

VERSION = 1
REMAKE = "python extras/convolutions/run_profile.py"
DEFAULT_SMALLEST, DEFAULT_LARGEST = 224, 1016  # 100 sizes in steps of 8
PROFILE, CONVOLUTION = "profile", "convolution"  # subjects: a whole model, and one call of a layer in it
SEED = 0
FEWEST_RUNS = 3


class ProfileSettings(Frozen):
    """What one folder of results holds: `profile.json`. A run that resumes must ask for the same, but for the sizes.

    Attributes:
        model: a torchvision model.
        algorithm: its name with blanks.
        gpu: a short name of the device: `h200`, `cpu`.
        device: `cuda` or `cpu`.
        device_name: in full.
        batch, dtype: of the input; `fp32` or `fp16`.
        tf32: whether single precision may be computed in TF32 (GPUs since Ampere).
        fallback: whether layers that the algorithm can't run use the library's choice.
        input_sizes: heights (and widths) of the input, in pixels.
        warmup, measure: runs before and in each measurement.
    """

    version: int = VERSION
    model: str
    algorithm: str
    gpu: str
    device: str
    device_name: str
    batch: int = 1
    dtype: str = "fp32"
    tf32: bool = True
    fallback: bool = False
    input_sizes: tuple[int, ...]
    warmup: int = 10
    measure: int = 30

    @property
    def name(self) -> str:
        """`<model>_<algorithm>`, with underscores: how the names of the tables begin."""
        return f"{self.model}_{self.algorithm.replace(' ', '_')}"

    @property
    def units(self) -> list[ProfileUnit]:
        """What is to be measured, the smallest input first."""
        return [ProfileUnit(self, size) for size in self.input_sizes]

    def same_but_sizes(self, settings: ProfileSettings) -> bool:
        """Whether the measurements of `settings` can go on with these settings."""
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
        """For messages."""
        return f"{self.settings.model} at {self.input_size}x{self.input_size}, batch {self.settings.batch}"


def even_sizes(count: int, smallest: int, largest: int) -> tuple[int, ...]:
    """`count` even numbers between two input sizes, evenly spaced; fewer where there are not so many.

    Raises:
        UserError: the smallest is larger than the largest, or they leave no even number.
    """
    if smallest > largest:
        raise UserError(f"--min-size {smallest} is larger than --max-size {largest}")
    low, high = (smallest + 1) // 2, largest // 2
    if low > high:
        raise UserError(f"there is no even input size between {smallest} and {largest}")
    steps = max(count - 1, 1)
    return tuple(sorted({2 * (low + round(place * (high - low) / steps)) for place in range(count)}))


@dataclass(frozen=True)
class Instruments:
    """What profiles are measured with.

    Attributes:
        device: `cpu` or `cuda`.
        sensor: of the device's power; None where there is none. It is read in windows of energy alone, since its thread takes
            time from the host.
        energy_s: length of the window in which energy is measured, in seconds; 0 for none.
        idle_w: the power of the idle device; None where it is not known.
        no_energy: why there is no energy; "" where there is.
        energy_of_mixed: whether energy is measured where some layers run by fallback, too.
        traced: whether CUPTI records the CUDA kernels of each layer.
        event_overhead_ms: what a pair of CUDA events adds to the time of a layer between them; None where it is not known.
        longest_s: a model so slow that its runs would take longer is run less often, but FEWEST_RUNS times.
    """

    device: str
    sensor: PowerSensor | None = None
    energy_s: float = 3.0
    idle_w: float | None = None
    no_energy: str = ""
    energy_of_mixed: bool = True
    traced: bool = True
    event_overhead_ms: float | None = None
    longest_s: float = math.inf


def measure_profile(unit: ProfileUnit, forced: ForcedModel, instruments: Instruments) -> list[Measurement]:
    """The measurements of a profile: one of the model, and one for each call of a convolution.

    A profile that fails is a measurement that says so; so is one whose layers can't all run, and each layer then says why.
    """
    began = now()
    try:
        return _measure(unit, forced, instruments, began)
    except (RuntimeError, NotSupported) as error:
        if instruments.device == "cuda":
            torch.cuda.empty_cache()
        return [_whole(unit, began, status="failed", error=describe_failure(unit, error))]


def describe_failure(unit: ProfileUnit, error: Exception) -> str:
    """What an error of torch or cuDNN means for a profile; for lack of memory, what to do."""
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
    alone = len(forced.refused) == len(forced.calls)  # a fallback for every layer would be a run of another algorithm
    if (alone or not settings.fallback) and (why := incompatible(settings.algorithm, settings.model, forced.calls)):
        return [_whole(unit, began, status="failed", error=why, facts=_model_facts(unit, forced)),
                *(_layer(unit, call, facts, began) for call, facts in zip(forced.calls, layers, strict=True))]
    if broken := [call for call in forced.calls if not call.algorithm]:
        error = f"{unit.what}: {broken[0].layer} can't run, by the library's own choice either ({broken[0].detail})"
        return [_whole(unit, began, status="failed", error=error, facts=_model_facts(unit, forced))]
    run = partial(forced.model, images)
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=settings.tf32):
        difference = output_difference(forced, images)
        if not difference <= forced.model_tolerance(images):  # NaN is no equal output either
            return [_whole(unit, began, status="failed", error=f"{unit.what}: outputs differ from torch's by {difference:.2g}")]
        with forced.forced():
            (run_ms,) = time_runs_ms(run, 1, instruments.device)
            time_runs_ms(run, affordable(settings.warmup, run_ms, instruments) - 1, instruments.device)
            runs = affordable(settings.measure, run_ms, instruments)
            samples_ms = time_runs_ms(run, runs, instruments.device)
            layer_times = time_layers(run, forced.layers.values(), runs, instruments.device)
            mixed = bool(forced.refused) and not instruments.energy_of_mixed
            quantities, doubts = ({}, "not asked for: some layers run by fallback") if mixed else measure_energy(
                run, instruments, float(np.mean(samples_ms)))
        host_ms = [call.host_ms for call in layer_times]
        traced = trace_layers(forced, run, host_ms) if instruments.device == "cuda" and instruments.traced else []
    if instruments.event_overhead_ms is not None:
        quantities = quantities | {"event_overhead_ms": (instruments.event_overhead_ms,)}
    facts = _model_facts(unit, forced) | {"output_error": difference, "energy_doubts": doubts}
    whole = _whole(unit, began, samples_ms=rounded(samples_ms), facts=facts, quantities=quantities)
    return [whole, *(_layer(unit, call, layers[place], began, layer_times[place], traced[place] if traced else None)
                     for place, call in enumerate(forced.calls))]


def affordable(runs: int, run_ms: float, instruments: Instruments) -> int:
    """How many of `runs` fit into `instruments.longest_s`; FEWEST_RUNS at least, if so many are asked for."""
    return int(min(runs, max(FEWEST_RUNS, 1e3 * instruments.longest_s / run_ms)))


def draw_images(unit: ProfileUnit, device: str) -> Tensor:
    """Random images of the profile's size, the same each time.

    Raises:
        RuntimeError: the device has no memory left.
    """
    torch.manual_seed(SEED)
    images = torch.randn(unit.settings.batch, 3, unit.input_size, unit.input_size)
    return images.to(device, torch.float16 if unit.settings.dtype == "fp16" else torch.float32)


def output_difference(forced: ForcedModel, images: Tensor) -> float:
    """The difference of the model's outputs to those of torch's own convolutions, relative, by the Euclidean norm."""
    expected = forced.model(images).float()
    with forced.forced():
        return relative_error(forced.model(images).float(), expected)


def measure_energy(run: Callable[[], Any], instruments: Instruments,
                   latency_ms: float) -> tuple[dict[str, tuple[float, ...]], str]:
    """Energy and power while the model runs again and again, and what is doubtful about them; without a sensor the reason.

    Args:
        latency_ms: of a run before; much slower ones are a doubt.
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

    The GPU is held before each call, as where the calls are timed: kernels that can run side by side then do.

    Args:
        forced: planned.
        run: runs its model.
        host_ms: the host's time of each call.
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
    """Times to the nanosecond; clocks and events are no finer."""
    return tuple(round(float(sample), 6) for sample in samples_ms)


def _whole(unit: ProfileUnit, began: str, **fields: Any) -> Measurement:
    return Measurement(subject=PROFILE, id=unit.id, label="latency", context="alone", place="alone", started=began, ended=now(),
                       **({"facts": _unit_facts(unit)} | fields))


def _layer(unit: ProfileUnit, call: LayerCall, facts: dict[str, Any], began: str, times: CallTimes | None = None,
           traced: GpuRun | None = None) -> Measurement:
    """One call of a layer; a refused one has a status and no times, unless another algorithm ran it."""
    kernels = counted(work.name for work in traced.work if work.category == KERNEL) if traced else ()
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
    """What is known of a call before it is timed."""
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
