"""Profiles a model under one convolution algorithm: power, time by layer, and the class that combines them.

    profiler = UnifiedProfiler(settings)
    profiler.profile(folder)

The power monitor and the measuring loop are those of benchmark/. The command is run_profile.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from hase.benchmark.measuring.blocks import Bench, PlannedBlock, Steadiness
from hase.benchmark.measuring.driver import Totals, measure_loads, pending
from hase.benchmark.metrics.power import NoPowerSensor, PowerMonitor, open_power_sensor
from hase.extras.convolutions.profiling.algorithms import algorithm_named
from hase.extras.convolutions.profiling.engines import Engine, ForcedModel, engine_of, fallback_of, instead
from hase.extras.convolutions.profiling.measure import (
    Instruments,
    LayerTimer,
    ProfileSettings,
    ProfileUnit,
    event_overhead_ms,
    measure_profile,
)
from hase.extras.convolutions.profiling.results import ResultsJournal, write_settings
from hase.model_zoo.exporting.torch_models import build, check_names
from hase.records.measurement import Block, Measurement
from hase.utils.fingerprint import machine
from hase.utils.lazy import torch
from hase.utils.locks import measuring, sole_writer
from hase.utils.logger import get_logger
from hase.utils.timing import time_runs_ms

__all__ = ["CUDALayerTimer", "PowerMonitor", "UnifiedProfiler"]
CANARY_CHANNELS, CANARY_SIDE, CANARY_WARMUP, CANARY_RUNS = 64, 56, 5, 15
IDLE_S = 1.0  # how long the idle device's power is read
log = get_logger("profiler")


class CUDALayerTimer(LayerTimer):
    """Times each module call on the GPU with CUDA events, in hooks."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        super().__init__(modules, "cuda")


class UnifiedProfiler:
    """Profiles one model under one algorithm at several input sizes.

    Args:
        energy_s: length of the energy measurement, in seconds; 0 for none.
        retry: whether to measure failed sizes again.
        engine, fallback: what runs the layers; by default chosen from the settings.
    """

    def __init__(self, settings: ProfileSettings, energy_s: float = 3.0, steadiness: Steadiness | None = None,
                 retry: bool = False, engine: Engine | None = None, fallback: Engine | None = None) -> None:
        self.settings, self._energy_s, self._retry = settings, energy_s, retry
        self._steadiness = steadiness or Steadiness(patience_s=3.0)
        algorithm = algorithm_named(settings.algorithm, settings.device)
        self._engine = engine or engine_of(algorithm, settings.device, settings.tf32)
        self._fallback = fallback
        if settings.fallback and fallback is None:
            self._fallback = engine_of(fallback_of(settings.device), settings.device, settings.tf32)
        check_names([settings.model])
        capability = torch.cuda.get_device_capability() if settings.device == "cuda" and torch.cuda.is_available() else None
        if line := instead(algorithm, settings.device, capability, settings.fallback):
            log.warning("%s", line)
        self._model: ForcedModel | None = None

    def profile(self, folder: Path, model: torch.nn.Module | None = None,
                instruments: Instruments | None = None) -> Totals[ProfileUnit]:
        """Measures the input sizes that the journal in `folder` lacks, and writes both tables.

        `model` replaces the one in the settings if it is already built; `instruments` may be shared by several profiles. Raises
        UserError if the folder holds another profile, or another process writes there or measures on this device.
        """
        settings = self.settings
        with sole_writer(folder), measuring(settings.device):
            write_settings(folder, settings)
            opened = instruments or open_instruments(settings.device, self._energy_s)
            journal = ResultsJournal(folder, settings.name)
            bench = Bench(settings.device, machine(settings.device).uuid, canary(settings.device), steadiness=self._steadiness)

            def blocks_of(load: tuple[float, str], measured: Sequence[Block]) -> list[PlannedBlock[ProfileUnit]]:
                other_machines = {block.machine for block in measured} - {bench.machine_uuid}
                left = pending(settings.units, measured, lambda m: m.status == "ok" or not self._retry)
                if other_machines and left:
                    log.info("%s: goes on with what another %s measured", folder, settings.gpu)
                return [PlannedBlock(unit.id, [unit]) for unit in left]

            def time_units(units: Sequence[ProfileUnit], level: float) -> list[Measurement]:
                measured_units = [measure_profile(unit, self._forced(model), opened) for unit in units]
                for profile, *_ in measured_units:
                    log.info("%s", described(profile))
                return list(chain.from_iterable(measured_units))

            return measure_loads(bench, blocks_of, time_units, journal)

    def _forced(self, model: torch.nn.Module | None) -> ForcedModel:
        """The model on its device; built when the first size is measured."""
        if self._model is None:
            size = self.settings.input_sizes[0]
            built = model or build(self.settings.model, self.settings.dtype, (size, size))
            self._model = ForcedModel(built.to(self.settings.device), self._engine, self._fallback, self.settings.tf32)
        return self._model


def described(profile: Measurement) -> str:
    """A line about a measured profile, or the reason why it failed."""
    if profile.status != "ok":
        return profile.error
    joules = profile.quantities.get("energy_j")
    return (f"{profile.facts['model']}, {profile.facts['algorithm']}, input size {profile.facts['input_size']}: "
            f"{np.mean(profile.samples_ms):.3f} ms" + (f", {joules[0]:.4g} J" if joules else ""))


def open_instruments(device: str, energy_s: float) -> Instruments:
    """Opens the instruments that measure profiles on `cpu` or `cuda`. Without a power sensor, a warning says why."""
    overhead_ms = event_overhead_ms() if device == "cuda" else None
    if not energy_s:
        return Instruments(device, energy_s=0.0, no_energy="not asked for", event_overhead_ms=overhead_ms)
    try:
        sensor = open_power_sensor(device)
    except NoPowerSensor as error:
        log.warning("no energy is measured: %s", error)
        return Instruments(device, energy_s=0.0, no_energy=str(error), event_overhead_ms=overhead_ms)
    with PowerMonitor(sensor) as monitor:
        idle_w = monitor.rest(IDLE_S).mean_w
    return Instruments(device, sensor, energy_s, idle_w, event_overhead_ms=overhead_ms)


def canary(device: str) -> Callable[[bool], list[float]]:
    """The canary: a function that returns the times (ms) of some runs of torch's own convolution of a fixed shape."""
    images = torch.ones(1, CANARY_CHANNELS, CANARY_SIDE, CANARY_SIDE, device=device)
    weights = torch.ones(CANARY_CHANNELS, CANARY_CHANNELS, 3, 3, device=device)

    def run() -> None:
        torch.nn.functional.conv2d(images, weights, padding=1)

    def run_ms(loaded: bool) -> list[float]:
        return time_runs_ms(run, CANARY_RUNS, warmup=CANARY_WARMUP, by_events=device == "cuda")

    return run_ms
