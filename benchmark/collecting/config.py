"""The collector's config, validated from benchmark/config.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from hase.benchmark.metrics.power import NoPowerSensor, open_power_sensor
from hase.benchmark.metrics.source import MetricSource
from hase.benchmark.metrics.sources import SourceName, open_source
from hase.records.devices import Environment, current_environment
from hase.records.measurement import COMPUTE, DRIFT_ADMITTED, ENERGY, Background, Effort, Label, Variant
from hase.runtimes import MODULES, local_target, runtime_named
from hase.utils.config import Config
from hase.utils.errors import UserError
from hase.utils.fingerprint import DEFAULT_RUNTIME, Target
from hase.utils.logger import get_logger
from hase.utils.sharing_mode import SLICES, GpuSharing, SharingText

log = get_logger("collector")
Level = Annotated[float, Field(ge=0.0, le=1.0)]


class EffortConfig(Config):
    """How often and how long one thing is measured."""

    warmup: int = Field(2, ge=0)
    warmup_s: float = Field(0.02, ge=0)
    budget_s: float = Field(0.05, gt=0)
    least_runs: int = Field(5, ge=2)
    most_runs: int = Field(50, ge=2)

    def effort(self) -> Effort:
        return Effort(**self.model_dump())


class StressConfig(Config):
    """The co-runners of measurements under load."""

    backgrounds: tuple[Background, ...] = Field((COMPUTE,), min_length=1)
    settle_s: float = Field(1.0, ge=0)

    @field_validator("backgrounds")
    @classmethod
    def _all_names_differ(cls, backgrounds: tuple[Background, ...]) -> tuple[Background, ...]:
        if len({background.name for background in backgrounds}) != len(backgrounds):
            raise ValueError("two backgrounds have the same name; give each its own")
        return backgrounds


class SettingConfig(Config):
    """How a runtime with settings (see `RuntimeSetting`) runs kernels and models. 0 threads mean one per physical core."""

    level: str = ""
    threads: int = Field(0, ge=0)
    cores: int = Field(0, ge=0)
    memory_limit_mib: float = Field(0.0, ge=0)


class CollectorConfig(Config):
    """The collector's config; benchmark/config.yaml explains each entry."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    runtime: str = DEFAULT_RUNTIME
    setting: SettingConfig = SettingConfig()
    sharing: SharingText = SLICES
    labels: tuple[Label, ...] = ()
    model_labels: bool = True
    variants: tuple[Variant, ...] | None = None
    energy_s: float = Field(0.0, ge=0)
    energy_of_kernels: bool = False
    sessions: int = Field(1, ge=1)
    levels: tuple[Level, ...] = Field((0.0, 0.3, 0.6, 0.9), min_length=1)
    stress: StressConfig = StressConfig()
    metrics: tuple[str, ...] = ()
    source: SourceName = "auto"
    dcgm_address: str | None = None
    replay: Path | None = None
    replay_step_s: float | None = Field(None, gt=0)
    window_s: float = Field(0.5, gt=0)
    probe_s: float = Field(0.2, ge=0)
    kernel_levels: tuple[Level, ...] | None = None
    kernel: EffortConfig = EffortConfig()
    model: EffortConfig = EffortConfig(budget_s=2.0, least_runs=6, most_runs=200)
    block_kernels: int = Field(32, ge=1)
    block_models: int = Field(1, ge=1)
    carrier_mib: int = Field(0, ge=0)
    tracers: int = Field(1, ge=1, le=16)
    canary_drift: float = Field(DRIFT_ADMITTED, gt=0)
    attempts: int = Field(2, ge=1)
    attempts_under_load: int = Field(2, ge=1)
    patience_s: float = Field(15.0, ge=0)
    each_machine: bool = True
    ties: int = Field(100, ge=0)
    timeout_s: float = Field(120.0, gt=0)
    held_out: tuple[str, ...] = ()
    held_out_backgrounds: tuple[str, ...] = ()

    @field_validator("runtime")
    @classmethod
    def _known_runtime(cls, runtime: str) -> str:
        if runtime not in MODULES:
            raise ValueError(f"not a runtime of this version; it knows {', '.join(MODULES)}")
        return runtime

    @model_validator(mode="after")
    def _fits_the_runtime(self) -> CollectorConfig:
        runtime = runtime_named(self.runtime)
        if self.setting != SettingConfig() and not runtime.takes_setting:
            raise ValueError(f"setting: {runtime.title} has none; leave it out")
        if self.setting.level and self.setting.level not in runtime.levels:
            raise ValueError(f"setting: {runtime.title} has no level {self.setting.level}, but {', '.join(runtime.levels)}")
        return self

    @field_validator("levels", "labels", "variants")
    @classmethod
    def _all_differ(cls, values: tuple[float | str, ...] | None) -> tuple[float | str, ...] | None:
        if values is not None and len(set(values)) != len(values):
            raise ValueError("duplicate value")
        return values

    @field_validator("held_out_backgrounds")
    @classmethod
    def _all_are_backgrounds(cls, names: tuple[str, ...], given: ValidationInfo) -> tuple[str, ...]:
        known = {background.name for background in given.data["stress"].backgrounds} if "stress" in given.data else set(names)
        if unknown := sorted(set(names) - known):
            raise ValueError(f"stress.backgrounds has no {', '.join(unknown)}, but {', '.join(sorted(known))}")
        return names

    def gpu_sharing(self, device: str) -> GpuSharing:
        """How processes share `cpu` or `cuda`. Raises UserError if a CPU is to be shared through MPS."""
        sharing = GpuSharing.parse(self.sharing)
        if sharing.mps and device == "cpu":
            raise UserError(f"sharing {self.sharing}: this is a way of sharing a GPU, and the target is a CPU; leave it out")
        return sharing

    def open_source(self, device: str) -> MetricSource:
        """Opens the source of metrics of `cpu` or `cuda`. Raises UserError if this machine lacks it, or it lacks a metric."""
        return open_source(device, self.metrics, self.source, dcgm_address=self.dcgm_address, replay=self.replay,
                           replay_step_s=self.replay_step_s)

    def takes_kernels(self, level: float) -> bool:
        """Whether kernels are measured at this level, or only whole models."""
        return self.kernel_levels is None or level in self.kernel_levels

    def loads(self) -> list[tuple[float, Background | None]]:
        """The loads to measure under, in order: each level with every background, and an idle level with None."""
        return [(level, background) for level in self.levels for background in (self.stress.backgrounds if level else (None,))]

    def backgrounds_on(self, device: str) -> dict[str, Background]:
        """The backgrounds by name; none if only idle levels are measured. Raises UserError if the device cannot run one."""
        if not any(self.levels):
            return {}
        for background in self.stress.backgrounds:
            background.check_on(device)
        return {background.name: background for background in self.stress.backgrounds}

    def target(self, device: str) -> Target:
        """The target of `cpu` or `cuda` on this machine, with the config's runtime and setting."""
        runtime, setting = runtime_named(self.runtime), self.setting
        runtime.check()
        return local_target(device, self.runtime, setting.level, setting.threads, setting.cores)

    def environment(self, target: Target) -> Environment | None:
        """The environment to record with a dataset; None for a runtime without settings, whose target says everything."""
        if not runtime_named(self.runtime).takes_setting:
            return None
        return current_environment(target, self.setting.memory_limit_mib)

    def variants_on(self, device: str) -> tuple[str, ...]:
        """Further ways to run whole models on `cpu` or `cuda`. Raises UserError if the runtime lacks one."""
        return self._checked("variants", device, self.variants)

    def with_energy_on(self, device: str) -> CollectorConfig:
        """This config for `cpu` or `cuda`: without energy, and with a warning, if it can't be measured."""
        if not self.energy_s:
            return self
        runtime = runtime_named(self.runtime)
        try:
            if not runtime.measures_energy:
                raise NoPowerSensor(f"{runtime.title} can't measure it")
            open_power_sensor(device)
        except NoPowerSensor as error:
            log.warning("no energy is measured: %s", error)
            return self.model_copy(update={"energy_s": 0.0})
        return self

    def model_labels_on(self, device: str) -> tuple[str, ...]:
        """Labels of an idle whole model besides its latency: variants and energy."""
        return (*self.variants_on(device), *((ENERGY,) if self.energy_s else ()))

    def labels_on(self, device: str) -> tuple[str, ...]:
        """Labels of every kernel on `cpu` or `cuda`; a kernel without the first counts as not measured."""
        return self._checked("labels", device, self.labels or None)

    def _checked(self, what: Literal["labels", "variants"], device: str, chosen: tuple[str, ...] | None) -> tuple[str, ...]:
        """The chosen labels or variants, or the runtime's defaults for None. Raises UserError if the runtime lacks one."""
        runtime = runtime_named(self.runtime)
        on_device = runtime.on(device)
        possible, defaults = {"labels": (on_device.labels, on_device.default_labels),
                              "variants": (on_device.variants, on_device.default_variants)}[what]
        if chosen is None:
            return defaults
        if missing := [name for name in chosen if name not in possible]:
            raise UserError(f"{what}: {', '.join(missing)}: {runtime.title} has no such {what} on {device}"
                            + (f"; it has {', '.join(possible)}" if possible else ""))
        return chosen
