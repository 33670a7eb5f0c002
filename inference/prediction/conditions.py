"""The conditions of a prediction: the target, how the model is run, what else runs, and how fast the host is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from hase.inference.prediction.targets import Fitted, is_here, local_targets
from hase.inference.prediction.under_load import LoadSource, NotShared, co_runner_from_metrics
from hase.learned.composition.fitted import Composition
from hase.learned.target_files import FIT_COMPOSITION
from hase.records.host_pace import MEASURE, MachinePace, read_pace
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.files import cached, signature
from hase.utils.fingerprint import gpu_facts
from hase.utils.locks import measuring
from hase.utils.paths import Workspace

if TYPE_CHECKING:
    from hase.graph_model.simulation.pipeline import PipelineCosts
    from hase.graph_model.simulation.sharing import CoRunner
    from hase.inference.prediction.sources import Precision
    from hase.learned.sharing import Sharing

Io = Literal["device", "host"]
PaceSource = Literal["given", "file", "measured", "unknown"]
RECENT_S = 600.0  # maximum age of a pace in the workspace's file
WATCHED_S = 0.3  # length of a measurement of the pace before each watched prediction
LEAST_PACE, MOST_PACE = 0.1, 10.0  # as ratios; a number outside is probably in microseconds or per cent
_read: dict[object, MachinePace] = {}


class RunMode(Frozen):
    """How a model is run.

    Attributes:
        io: `device`: tensors stay on the device (IOBinding); `host`: numpy arrays in and out.
        cuda_graph: captured once as a CUDA graph, and replayed.
    """

    io: Io = "device"
    cuda_graph: bool = False

    @property
    def label(self) -> str:
        """The dataset's label of whole models that were measured in this mode."""
        return "cuda_graph" if self.cuda_graph else "host_io" if self.io == "host" else "latency"

    @property
    def description(self) -> str:
        return "as a CUDA graph" if self.cuda_graph else "with tensors on the " + self.io


AS_USUAL = RunMode()


class HostPace(NamedTuple):
    """How fast a host dispatches: its time relative to the usual, a ratio; None where unknown.

    Usual is the pace of the machines on which the target's models were measured. It matters on a GPU whose composition
    simulates the host, but not for the replay of a CUDA graph. `measured` is the measurement that it comes from, if any.
    """

    ratio: float | None
    source: PaceSource
    measured: MachinePace | None = None

    @property
    def known(self) -> bool:
        return self.ratio is not None


UNKNOWN = HostPace(None, "unknown")
USUAL = HostPace(1.0, "given")  # the pace of latencies in a dataset


def pace_matters(used: Composition, run_mode: RunMode) -> bool:
    """Whether the host's pace changes the latency of a model in this run mode."""
    return used.kind == "pipeline" and used.costs is not None and not run_mode.cuda_graph


def given_pace(ratio: float) -> HostPace:
    """A pace that the user gives. Raises UserError for a number that can't be a ratio of paces."""
    if not LEAST_PACE <= ratio <= MOST_PACE:
        raise UserError(f"host pace {ratio:g}: a ratio to the usual pace is expected, such as 1.15, between {LEAST_PACE:g} and "
                        f"{MOST_PACE:g}; {MEASURE} prints it")
    return HostPace(float(ratio), "given")


def check_host(fitted: Fitted, used: Composition) -> None:
    """Raises UserError if a target's composition can't take a host's pace into account."""
    if fitted.target.flavour.device == "cpu":
        raise UserError(f"{fitted.target.name}: a CPU target's host is the target itself, so it has no host pace; leave it out")
    if used.kind != "pipeline" or used.costs is None:
        raise UserError(f"{fitted.target.name}: its composition ({used.kind}) does not know the host apart from the GPU, so no "
                        "host pace can be taken into account; leave it out")


def ratio_of(probe_us: float, fitted: Fitted) -> float:
    """The pace that follows from the time of the host's probe, in microseconds. Raises UserError: the ratio is impossible, or
    no probe was read when the target's models were measured.
    """
    check_host(fitted, fitted.composition)
    usual_us = fitted.composition.probe_us
    if usual_us is None:
        raise UserError(f"{fitted.target.name}: the host's pace was not recorded when its models were measured, so there is "
                        "nothing to compare a probe with; give the ratio itself, --host-pace RATIO")
    ratio = probe_us / usual_us
    if not LEAST_PACE <= ratio <= MOST_PACE:
        raise UserError(f"{fitted.target.name}: a probe of its host takes about {usual_us:.0f} µs, and {probe_us:g} µs is "
                        f"{ratio:.3g} times that; {LEAST_PACE:g} to {MOST_PACE:g} times are possible; measure it again: "
                        f"{MEASURE}")
    return ratio


def pace_of_file(path: Path, fitted: Fitted) -> HostPace:
    """The pace in a file that benchmark/host_pace.py wrote on the target's machine, however old it is. Raises UserError: the
    file can't be read, or was measured with another kind of GPU than the target.
    """
    recorded = read_pace(path)
    ratio = ratio_of(recorded.probe_us, fitted)
    if (recorded.device, recorded.machine.device_name) != ("cuda", fitted.target.device_name):
        raise UserError(f"{path}: measured with a {recorded.machine.device_name}, and the target is {fitted.target.name}; "
                        f"measure on the machine in question: {MEASURE} --out {path.name}")
    return HostPace(ratio, "file", recorded)


def measured_pace(fitted: Fitted, seconds: float | None = None) -> HostPace:
    """Measures the pace of this machine's host now.

    It measures for `seconds`, even while other processes measure; by default as long as benchmark/host_pace.py, which needs the
    GPU alone.

    Raises:
        UserError: this machine is not the target, or (without `seconds`) another process measures on its GPU.
    """
    from hase.benchmark.ort.probes import PACE_SECONDS, measure_pace  # noqa: PLC0415 - most predictions do not need it

    check_host(fitted, fitted.composition)
    if not is_here(fitted.target):
        raise UserError(f"the host's pace has to be measured on the machine in question, a {fitted.target.name}, and this is "
                        f"{' and '.join(local.name for local in local_targets())}; run there: {MEASURE} --out machine.json, "
                        "and give that file with --machine")
    with nullcontext() if seconds else measuring("cuda"):
        measured = measure_pace(seconds=seconds or PACE_SECONDS)
        return HostPace(ratio_of(measured.probe_us, fitted), "measured", measured)


def recent_pace(fitted: Fitted, workspace: Workspace) -> HostPace:
    """The pace in the workspace's file if it is valid here, else UNKNOWN. Valid: this machine is the target, was not rebooted
    since, and the pace was measured at most RECENT_S ago.
    """
    path = workspace.host_pace
    if not is_here(fitted.target) or fitted.composition.probe_us is None or (file_signature := signature(path)) is None:
        return UNKNOWN
    recorded: MachinePace = cached(_read, file_signature, lambda: read_pace(path), limit=4)
    if recorded.machine.uuid != gpu_facts().get("uuid") or not recorded.of_this_boot or not 0.0 <= recorded.age_s <= RECENT_S:
        return UNKNOWN
    return HostPace(ratio_of(recorded.probe_us, fitted), "file", recorded)


@dataclass(frozen=True)
class PaceAsked:
    """Where a command takes the host's pace from.

    Attributes:
        option: the ratio itself, or `measure` for a measurement on this machine.
        machine: a file of benchmark/host_pace.py.
        watched: the command repeats its predictions, and on the target itself measures the pace before each.
    """

    option: float | Literal["measure"] | None = None
    machine: Path | None = None
    watched: bool = False

    def of_prometheus(self, fitted: Fitted, run_mode: RunMode) -> bool:
        """Whether to read it from Prometheus."""
        given = self.option is not None or self.machine is not None
        return not given and not self._each_time(fitted, run_mode) and probe_tells_pace(fitted, run_mode)

    def now(self, fitted: Fitted, run_mode: RunMode, host_probe_us: float | None = None) -> float | HostPace | None:
        """The current pace, as `inference.predict` accepts it; None where no source was given. `host_probe_us` comes from
        Prometheus. Raises UserError: it can't be measured here, or the file can't be used.
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
        return self.watched and not given and is_here(fitted.target) and probe_tells_pace(fitted, run_mode)


def probe_tells_pace(fitted: Fitted, run_mode: RunMode) -> bool:
    """Whether the host's pace matters, and can be derived from the time of the host's probe."""
    return pace_matters(fitted.composition, run_mode) and fitted.composition.probe_us is not None


class LoadOptions(TypedDict, total=False):
    """Options of a prediction for the load and the host's pace; every key is optional.

    Attributes:
        load: metrics of the load on the device, by DCGM field name; None or empty: the device is idle.
        notices: notes for the reader about the load; they become the prediction's first warnings.
        co_runner: what else runs on the GPU, as a probe saw it (`hase.learned.sharing.co_runner_probed`). More precise than
            metrics.
        host_pace: the host's dispatch time relative to the usual, a ratio. None: the recent measurement of
            benchmark/host_pace.py on this machine, if it is the target; else unknown.
    """

    load: Mapping[str, float] | None
    notices: Sequence[str]
    co_runner: CoRunner | None
    host_pace: float | HostPace | None


class Options(LoadOptions, total=False):
    """Options of a prediction besides the model and the target; every key is optional.

    Attributes:
        static: treat dynamic dimensions as if the model were exported with `dims`; otherwise as a session runs it that accepts
            any sizes.
        run_mode: how the model is run; by default with its tensors on the device, node by node.
        composition: a composition other than the target's own.
        dtype: `fp16`: predict a single-precision model as converted to half precision by onnxconverter-common.
    """

    dims: Mapping[str, int] | None
    static: bool
    run_mode: RunMode
    composition: Composition | None
    dtype: Precision | None


class SharedGpu(NamedTuple):
    """How processes share the target's GPU, the co-runner on it, and where that information comes from."""

    sharing: Sharing
    co_runner: CoRunner
    load_source: LoadSource


class Conditions(NamedTuple):
    """The conditions that a prediction holds for.

    Attributes:
        used: the composition; the target's own, unless another was given.
        strict: predict every kernel; look up no measured times.
        load: metrics of the load, by DCGM field name; empty on an idle device.
        shared_gpu: the co-runner, where the latency next to it is predicted as a distribution; else None.
        pace: of the host; None where it does not matter.
    """

    fitted: Fitted
    used: Composition
    run_mode: RunMode
    strict: bool
    load: dict[str, float]
    shared_gpu: SharedGpu | None
    pace: HostPace | None

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        return self.fitted.target.flavour.device

    @property
    def kernel_load(self) -> dict[str, float]:
        """The load that changes kernel times; empty where instead the whole run waits for its turns."""
        return {} if self.shared_gpu else self.load

    @property
    def usual_costs(self) -> PipelineCosts | None:
        """The costs of a run at the host's usual pace; None where the composition does not simulate host and GPU."""
        return self.used.cuda_graph.costs if self.run_mode.cuda_graph and self.used.cuda_graph else self.used.costs

    @property
    def costs(self) -> PipelineCosts | None:
        """The costs of a run at the host's own pace; None as for `usual_costs`."""
        usual = self.usual_costs
        if self.pace and self.pace.ratio is not None and usual is not None:
            return usual.at_pace(self.pace.ratio)
        return usual


def check_run_mode(run_mode: RunMode, used: Composition, target: str) -> None:
    """Raises UserError if no models were measured in a run mode, or ONNX Runtime does not support it."""
    if run_mode.cuda_graph and run_mode.io == "host":
        raise UserError("a CUDA graph reads and writes tensors at fixed places on the device: predict it with --io device")
    for wanted, fitted, variant in ((run_mode.io == "host", used.host_io, "host_io"),
                                (run_mode.cuda_graph, used.cuda_graph, "cuda_graph")):
        if wanted and fitted is None:
            raise UserError(f"{target}: no model was measured with {variant}, so it can't be predicted; measure models with it "
                            f"(variants: [{variant}] in the collector's config), and fit again: {FIT_COMPOSITION}")


def pace_of(given: float | HostPace | None, fitted: Fitted, used: Composition, run_mode: RunMode,
            workspace: Workspace) -> HostPace | None:
    """The host's pace to predict for; None where it does not matter. Raises UserError: not a ratio, or the target has no pace.
    """
    if given is not None:
        check_host(fitted, used)
        given = given if isinstance(given, HostPace) else given_pace(given)
    if not pace_matters(used, run_mode):
        return None
    return recent_pace(fitted, workspace) if given is None else given


def shared_gpu_of(fitted: Fitted, used: Composition, run_mode: RunMode, load: Mapping[str, float],
                  co_runner: CoRunner | None) -> SharedGpu | None:
    """The shared GPU, where the latency next to a co-runner is predicted as a distribution.

    None where nothing else runs, or where nothing was learned of sharing and the load is known only by metrics. Raises
    UserError: a probe's reading is given and nothing was learned of sharing, or the run mode was not measured under load.
    """
    sharing = fitted.sharing if used.kind == "pipeline" else None
    if sharing is None:
        if co_runner is not None:
            raise NotShared(fitted.target.name)
        return None
    known_co_runner = co_runner or co_runner_from_metrics(fitted, load)
    if known_co_runner is None:
        return None
    check_mode_while_shared(run_mode)
    return SharedGpu(sharing, known_co_runner, "metrics" if co_runner is None else "probe")


def check_mode_while_shared(run_mode: RunMode) -> None:
    """Raises UserError if a run mode was not measured while the GPU was shared."""
    if run_mode != AS_USUAL:
        raise UserError(f"a model run {run_mode.description} was not measured while the GPU was shared; predict it with "
                        "tensors on the device, node by node, or idle")


def sharing_warning(shared_gpu: SharedGpu | None) -> tuple[str, ...]:
    """A warning if the co-runner is known by metrics only, although a probe would tell more."""
    if shared_gpu is None or shared_gpu.load_source == "probe":
        return ()
    if not shared_gpu.sharing.probed or not shared_gpu.sharing.from_metrics:
        return ()
    return (f"metrics do not show how long the co-runner's turns are: means predicted from them erred by "
            f"{shared_gpu.sharing.from_metrics.mean:.0%} on average, those from a probe (--probe, or --probe-every of "
            f"Prometheus's exporter, benchmark/metrics_exporter.py) by {shared_gpu.sharing.probed.mean:.0%}",)
