"""The devices that a collection measures: those of one machine, or of a cluster (ray_actors.py), which must be alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.units import Workers, measurer, start_workers
from hase.benchmark.collecting.work import Item
from hase.benchmark.measuring.actors import Actors, LocalActor
from hase.benchmark.metrics.source import MetricSource
from hase.runtimes.protocol import Setting
from hase.utils.errors import UserError
from hase.utils.fingerprint import Machine, Target, machine, resolve_device
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("collector")


@dataclass(frozen=True)
class Device:
    """A device, as the process says that will measure it.

    Attributes:
        name: for messages.
        target: that it is.
        machine: what it is.
        metrics: that can be read of it, by DCGM field name.
        measures_energy: whether energy is asked for and can be measured.
    """

    name: str
    target: Target
    machine: Machine
    metrics: tuple[str, ...]
    measures_energy: bool


class Devices(Protocol):
    """The devices that will be measured, and the actors that measure them.

    Attributes:
        found: the devices.
    """

    found: Sequence[Device]

    def actors(self, config: CollectorConfig, workspace: Workspace) -> AbstractContextManager[Actors[Item]]:
        """The actors for the devices; they end with the block.

        Args:
            config: of the collector, without energy where that can't be measured.
            workspace: holds what is measured.

        Raises:
            UserError: another process measures on every device.
        """


class LocalDevice:
    """The device of this machine that the config names (see `Devices`).

    Raises:
        UserError: there is no such device, the runtime is missing, or a metric can't be read.
    """

    def __init__(self, config: CollectorConfig) -> None:
        device = resolve_device(config.device)
        if config.device == "auto" and device == "cpu":
            log.info("no NVIDIA GPU here: measuring the CPU")
        self.device, self._source = open_device(config, device, "this machine")
        self.found: Sequence[Device] = [self.device]

    @contextmanager
    def actors(self, config: CollectorConfig, workspace: Workspace) -> Iterator[Actors[Item]]:
        target = self.device.target
        device = target.flavour.device
        with start_workers(config, device, config.labels_on(device),
                           Setting.of(target, workspace.kernel_onnx, config.setting.memory_limit_mib)) as workers:
            yield self.actor_with(workers, config, workspace)

    def actor_with(self, workers: Workers, config: CollectorConfig, workspace: Workspace) -> LocalActor[Item]:
        """The actor that measures with workers which were started."""
        return LocalActor(measurer(config, self.device.target, self.device.machine.uuid, self._source, workers, workspace))


def open_device(config: CollectorConfig, device: str, name: str) -> tuple[Device, MetricSource]:
    """`cpu` or `cuda` of the machine that this process runs on, and the source of its metrics.

    Raises:
        UserError: the runtime is missing, or a metric can't be read.
    """
    target, source = config.target(device), config.open_source(device)
    energy = bool(config.with_energy_on(device).energy_s)
    return Device(name, target, machine(device), tuple(source.fields), energy), source


def check_alike(devices: Sequence[Device]) -> None:
    """Checks that devices can be measured into one dataset.

    Raises:
        UserError: they are of several targets, or have different metrics.
    """
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
