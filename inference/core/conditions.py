"""What predictions hold for besides the model and the target: how it is run, what else runs, and how fast the host is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from inference.core.host_pace import HostPace, check_host, counts, given_pace, recent_pace
from inference.core.run_modes import AS_USUAL, RunMode
from inference.sharing.co_runner import LoadSource, NotShared, co_runner_of
from training.composition.fitted import FIT, Composition
from utils.errors import UserError

if TYPE_CHECKING:
    from graph_model.simulation.pipeline import PipelineCosts
    from graph_model.simulation.sharing import CoRunner
    from inference.core.targets import Fitted
    from training.sharing.learned import Sharing
    from utils.paths import Workspace


class SharedGpu(NamedTuple):
    """What else runs on the GPU, how the target's GPU turns between processes, and what the former was learned from."""

    sharing: Sharing
    co_runner: CoRunner
    told_by: LoadSource


class Conditions(NamedTuple):
    """What a prediction holds for.

    Attributes:
        fitted: what was learned of the target.
        used: the composition, the target's own unless another was asked for.
        run_mode: how the model is run.
        strict: no measured kernel time is looked up.
        load: metrics of what else runs, by DCGM field name; empty where nothing does.
        shared_gpu: what else runs, where latencies next to it have a distribution; else None.
        pace: of the host; None where it does not count.
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
        """The target's: `cpu` or `cuda`."""
        return self.fitted.target.flavour.device

    @property
    def kernel_load(self) -> dict[str, float]:
        """The load that kernels' times answer to: none where the whole run waits for its turn instead."""
        return {} if self.shared_gpu else self.load

    @property
    def usual_costs(self) -> PipelineCosts | None:
        """What a run costs at the host's usual pace; None where the composition knows no two tracks."""
        return self.used.cuda_graph.costs if self.run_mode.cuda_graph and self.used.cuda_graph else self.used.costs

    @property
    def costs(self) -> PipelineCosts | None:
        """What a run costs at the host's pace; None where the composition knows no two tracks."""
        usual = self.usual_costs
        if self.pace and self.pace.ratio is not None and usual is not None:
            return usual.at_pace(self.pace.ratio)
        return usual


def check_run_mode(run_mode: RunMode, used: Composition, target: str) -> None:
    """Whether a model's run that way can be predicted.

    Raises:
        UserError: no models were run so on the target, or ONNX Runtime itself can't.
    """
    if run_mode.cuda_graph and run_mode.io == "host":
        raise UserError("a CUDA graph reads and writes tensors at fixed places on the device: predict it with --io device")
    for asked, fitted, what in ((run_mode.io == "host", used.host_io, "host_io"),
                                (run_mode.cuda_graph, used.cuda_graph, "cuda_graph")):
        if asked and fitted is None:
            raise UserError(f"{target}: no models were run so ({what}); measure some (variants in the collector's config), and "
                            f"fit again: {FIT}")


def pace_of(asked: float | HostPace | None, fitted: Fitted, used: Composition, run_mode: RunMode,
            workspace: Workspace) -> HostPace | None:
    """The pace of the host that predictions hold for; None where it does not count.

    Raises:
        UserError: one is asked for that can't be a ratio, or of a target that has none.
    """
    if asked is not None:
        check_host(fitted, used)
        asked = asked if isinstance(asked, HostPace) else given_pace(asked)
    if not counts(used, run_mode):
        return None
    return recent_pace(fitted, workspace) if asked is None else asked


def shared_gpu_of(fitted: Fitted, used: Composition, run_mode: RunMode, load: Mapping[str, float],
                  co_runner: CoRunner | None) -> SharedGpu | None:
    """What else runs, where latencies next to it have a distribution; None where nothing runs, or where metrics alone say what
    does and nothing was learned of sharing.

    Raises:
        UserError: a probe's reading is given, or the model is run in a way, for which nothing was learned.
    """
    sharing = fitted.sharing if used.kind == "pipeline" else None
    if sharing is None:
        if co_runner is not None:
            raise NotShared(fitted.target.name)
        return None
    found = co_runner or co_runner_of(fitted, load)
    if found is None:
        return None
    check_mode_while_shared(run_mode)
    return SharedGpu(sharing, found, "metrics" if co_runner is None else "probe")


def check_mode_while_shared(run_mode: RunMode) -> None:
    """Refuses ways of running that were not measured beside other work."""
    if run_mode != AS_USUAL:
        raise UserError(f"a model run {run_mode.description} was not measured beside other work; predict it with tensors on "
                        "the device, node by node, or idle")


def sharing_warning(shared_gpu: SharedGpu | None) -> tuple[str, ...]:
    """What to know about a latency beside work that only metrics tell of; nothing where a probe does."""
    if shared_gpu is None or shared_gpu.told_by == "probe":
        return ()
    if not shared_gpu.sharing.probed or not shared_gpu.sharing.from_metrics:
        return ()
    return (f"metrics alone hide how long the other work's turns are: means predicted from them erred by "
            f"{shared_gpu.sharing.from_metrics.mean:.0%} on average, from a probe (--probe, or --probe-every of Prometheus's "
            f"exporter, benchmark/metrics_exporter.py) by {shared_gpu.sharing.probed.mean:.0%}",)
