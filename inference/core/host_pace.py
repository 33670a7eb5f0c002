"""The host's pace that a prediction holds for: given, measured, read from a file, or unknown.

A pace is a ratio: how many times as long as usual the host takes to dispatch. Usual is the pace of the machines on which the
target's models were measured. It matters on a GPU whose composition has the host as a track of its own, but not for the
replay of a CUDA graph.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from hase.inference.core.targets import Fitted, is_here, local_targets
from hase.records.host_pace import MEASURE, MachinePace, read_pace
from hase.utils.errors import UserError
from hase.utils.files import cached, signature
from hase.utils.fingerprint import gpu_facts
from hase.utils.locks import measuring
from hase.utils.paths import Workspace

if TYPE_CHECKING:
    from hase.inference.core.run_modes import RunMode
    from hase.learned.composition.fitted import Composition

PaceSource = Literal["given", "file", "measured", "unknown"]
RECENT_S = 600.0  # how old the workspace's own file may be
WATCHED_S = 0.3  # time of a measurement before each of many predictions
LEAST, MOST = 0.1, 10.0  # a number beyond these is no ratio, but microseconds or per cent
_read: dict[object, MachinePace] = {}


class HostPace(NamedTuple):
    """A pace (a ratio; None where it is unknown), where it comes from, and what was measured with it; None where it was not."""

    ratio: float | None
    source: PaceSource
    measured: MachinePace | None = None


UNKNOWN = HostPace(None, "unknown")
USUAL = HostPace(1.0, "given")  # the pace at which latencies in a dataset are compared


def counts(used: Composition, run_mode: RunMode) -> bool:
    """Whether the host's pace changes the latency of a model that is run in a run mode."""
    return used.kind == "pipeline" and used.costs is not None and not run_mode.cuda_graph


def given_pace(ratio: float) -> HostPace:
    """A pace that the user gives.

    Raises:
        UserError: the number can't be a ratio of paces.
    """
    if not LEAST <= ratio <= MOST:
        raise UserError(f"host pace {ratio:g}: a ratio to the usual pace is expected, such as 1.15, between {LEAST:g} and "
                        f"{MOST:g}; {MEASURE} prints it")
    return HostPace(float(ratio), "given")


def check_host(fitted: Fitted, used: Composition) -> None:
    """Checks that a target's composition can take a host's pace into account.

    Raises:
        UserError: it can't.
    """
    if fitted.target.flavour.device == "cpu":
        raise UserError(f"{fitted.target.name}: a CPU target's host is the target itself, so it has no host pace; leave it out")
    if used.kind != "pipeline" or used.costs is None:
        raise UserError(f"{fitted.target.name}: its composition ({used.kind}) does not know the host apart from the GPU, so no "
                        "host pace can be taken into account; leave it out")


def ratio_of(probe_us: float, fitted: Fitted) -> float:
    """The pace that follows from the time of the host's probe, in microseconds.

    Raises:
        UserError: no probe was read when the models of the target's composition were measured, or the ratio is impossible.
    """
    check_host(fitted, fitted.composition)
    usual_us = fitted.composition.probe_us
    if usual_us is None:
        raise UserError(f"{fitted.target.name}: the host's pace was not recorded when its models were measured, so there is "
                        "nothing to compare a probe with; give the ratio itself, --host-pace RATIO")
    ratio = probe_us / usual_us
    if not LEAST <= ratio <= MOST:
        raise UserError(f"{fitted.target.name}: a probe of its host takes about {usual_us:.0f} µs, and {probe_us:g} µs is "
                        f"{ratio:.3g} times that; {LEAST:g} to {MOST:g} times are possible; measure it again: {MEASURE}")
    return ratio


def pace_of_file(path: Path, fitted: Fitted) -> HostPace:
    """The pace in a file that benchmark/host_pace.py wrote on the machine in question, however old it is.

    Raises:
        UserError: the file can't be read, or was measured with another kind of GPU than the target.
    """
    recorded = read_pace(path)
    ratio = ratio_of(recorded.probe_us, fitted)
    if (recorded.device, recorded.machine.device_name) != ("cuda", fitted.target.device_name):
        raise UserError(f"{path}: measured with a {recorded.machine.device_name}, and the target is {fitted.target.name}; "
                        f"measure on the machine in question: {MEASURE} --out {path.name}")
    return HostPace(ratio, "file", recorded)


def measured_pace(fitted: Fitted, seconds: float | None = None) -> HostPace:
    """The pace of this machine's host now.

    Args:
        fitted: the target, which is this machine.
        seconds: how long to measure, whatever else runs; by default as long as benchmark/host_pace.py, alone.

    Raises:
        UserError: this machine is not the target, or (without `seconds`) another process measures on its GPU.
    """
    from hase.benchmark.ort.probes import PACE_SECONDS, measure_pace

    check_host(fitted, fitted.composition)
    if not is_here(fitted.target):
        raise UserError(f"the host's pace has to be measured on the machine in question, a {fitted.target.name}, and this is "
                        f"{' and '.join(local.name for local in local_targets())}; run there: {MEASURE} --out machine.json, "
                        "and give that file with --machine")
    with nullcontext() if seconds else measuring("cuda"):
        measured = measure_pace(seconds=seconds or PACE_SECONDS)
        return HostPace(ratio_of(measured.probe_us, fitted), "measured", measured)


def recent_pace(fitted: Fitted, workspace: Workspace) -> HostPace:
    """The pace in the workspace's own file, if this machine is the target, was not rebooted since, and the pace was measured at
    most RECENT_S ago; else UNKNOWN."""
    path = workspace.host_pace
    if not is_here(fitted.target) or fitted.composition.probe_us is None or (about := signature(path)) is None:
        return UNKNOWN
    recorded: MachinePace = cached(_read, about, lambda: read_pace(path), limit=4)
    if recorded.machine.uuid != gpu_facts().get("uuid") or not recorded.of_this_boot or not 0.0 <= recorded.age_s <= RECENT_S:
        return UNKNOWN
    return HostPace(ratio_of(recorded.probe_us, fitted), "file", recorded)


@dataclass(frozen=True)
class PaceAsked:
    """Where a command takes the host's pace from.

    Attributes:
        option: the ratio itself, or `measure` for a measurement on this machine; None where neither was given.
        machine: a file of benchmark/host_pace.py.
        watched: whether many predictions follow one another, so that the pace is measured before each on the target itself.
    """

    option: float | Literal["measure"] | None = None
    machine: Path | None = None
    watched: bool = False

    def of_prometheus(self, fitted: Fitted, run_mode: RunMode) -> bool:
        """Whether to ask a Prometheus for it."""
        return self.option is None and self.machine is None and not self._each_time(fitted, run_mode) and compares(fitted,
                                                                                                                   run_mode)

    def now(self, fitted: Fitted, run_mode: RunMode, host_probe_us: float | None = None) -> float | HostPace | None:
        """The pace now, as `inference.predict` takes it; None where no source was given.

        Args:
            fitted: the target.
            run_mode: how the model is run.
            host_probe_us: the time of the host's probe, from Prometheus.

        Raises:
            UserError: it can't be measured here, or the file can't be used.
        """
        if isinstance(self.option, float):
            return self.option
        if self.machine:
            return pace_of_file(self.machine, fitted)
        if self.option == "measure" or self._each_time(fitted, run_mode):
            return measured_pace(fitted, WATCHED_S if self.watched else None)
        return None if host_probe_us is None else HostPace(ratio_of(host_probe_us, fitted), "measured")

    def is_followed(self, fitted: Fitted, run_mode: RunMode) -> bool:
        """Whether it is measured again before each prediction."""
        return self.watched and (self.option == "measure" or self._each_time(fitted, run_mode))

    def _each_time(self, fitted: Fitted, run_mode: RunMode) -> bool:
        given = self.option is not None or self.machine is not None
        return self.watched and not given and is_here(fitted.target) and compares(fitted, run_mode)


def compares(fitted: Fitted, run_mode: RunMode) -> bool:
    """Whether the host's pace matters, and can be derived from the time of the host's probe."""
    return counts(fitted.composition, run_mode) and fitted.composition.probe_us is not None
