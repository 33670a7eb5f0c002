"""The devices that a collection measures, on one machine or a cluster (ray_actors.py), all of the same kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.plans import Item
from hase.benchmark.collecting.units import Workers, measurer, start_workers
from hase.benchmark.measuring.driver import Actors, LocalActor
from hase.benchmark.metrics.source import MetricSource
from hase.runtimes.protocol import RuntimeSetting
from hase.utils.errors import UserError
from hase.utils.fingerprint import Machine, Target, machine, resolve_device
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("collector")


@dataclass(frozen=True)
class FoundDevice:
    """A device to measure, described by the process that will measure it."""

    name: str  # for messages
    target: Target
    machine: Machine
    metrics: tuple[str, ...]  # readable ones, by DCGM field name
    measures_energy: bool  # energy is requested and can be measured


class Devices(Protocol):
    """The devices to measure, and the actors that measure them."""

    found: Sequence[FoundDevice]

    def actors(self, config: CollectorConfig, workspace: Workspace) -> AbstractContextManager[Actors[Item]]:
        """Actors for the devices until the block ends. Raises UserError if another process measures on every device."""


class LocalDevice:
    """The device of this machine that the config names. Raises UserError if a metric cannot be read."""

    def __init__(self, config: CollectorConfig) -> None:
        device = resolve_device(config.device)
        if config.device == "auto" and device == "cpu":
            log.info("no NVIDIA GPU here: measuring the CPU")
        self.device, self._source = open_device(config, device, "this machine")
        self.found: Sequence[FoundDevice] = [self.device]

    @contextmanager
    def actors(self, config: CollectorConfig, workspace: Workspace) -> Iterator[Actors[Item]]:
        target = self.device.target
        device = target.flavour.device
        with start_workers(config, device, config.labels_on(device),
                           RuntimeSetting.of(target, workspace.kernel_onnx, config.setting.memory_limit_mib)) as workers:
            yield self.actor_with(workers, config, workspace)

    def actor_with(self, workers: Workers, config: CollectorConfig, workspace: Workspace) -> LocalActor[Item]:
        """The actor that measures with workers that are already running."""
        return LocalActor(measurer(config, self.device.target, self.device.machine.uuid, self._source, workers, workspace))


def open_device(config: CollectorConfig, device: str, name: str) -> tuple[FoundDevice, MetricSource]:
    """`cpu` or `cuda` of this machine, and its source of metrics. Raises UserError as `LocalDevice` does."""
    target, source = config.target(device), config.open_source(device)
    measures_energy = bool(config.with_energy_on(device).energy_s)
    return FoundDevice(name, target, machine(device), tuple(source.fields), measures_energy), source


def check_alike(devices: Sequence[FoundDevice]) -> None:
    """Raises UserError if devices have different targets or metrics, so that they cannot share a dataset."""
    targets: dict[str, list[str]] = {}
    metrics: dict[str, list[str]] = {}
    for device in devices:
        targets.setdefault(device.target.name, []).append(device.name)
        metrics.setdefault(", ".join(device.metrics), []).append(device.name)

    def listed(groups: dict[str, list[str]]) -> str:
        return "; ".join(f"{what} ({', '.join(names)})" for what, names in groups.items())

    if len(targets) > 1:
        raise UserError(f"the devices are of {len(targets)} targets, and a dataset is of one: {listed(targets)}; start Ray on "
                        "machines of one kind, with one version of the runtime")
    if len(metrics) > 1:
        raise UserError(f"the devices have different metrics: {listed(metrics)}; name those that all have in the config "
                        "(`metrics`)")
