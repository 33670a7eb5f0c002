"""What a prediction holds for: the target, how the model is run, what else runs, and how fast the host is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from hase.inference.core.host_pace import HostPace, check_host, counts, given_pace, recent_pace
from hase.inference.core.run_modes import AS_USUAL, RunMode
from hase.inference.sharing.co_runner import LoadSource, NotShared, co_runner_of
from hase.learned.composition.fitted import FIT, Composition
from hase.utils.errors import UserError

if TYPE_CHECKING:
    from hase.graph_model.simulation.pipeline import PipelineCosts
    from hase.graph_model.simulation.sharing import CoRunner
    from hase.inference.core.targets import Fitted
    from hase.learned.sharing.slices import Sharing
    from hase.utils.paths import Workspace


class SharedGpu(NamedTuple):
    """How the target's GPU takes turns between processes, the co-runner on it, and the source of what is known of that."""

    sharing: Sharing
    co_runner: CoRunner
    load_source: LoadSource


class Conditions(NamedTuple):
    """What a prediction holds for.

    Attributes:
        fitted: what was learned for the target.
        used: the composition; the target's own, unless another was given.
        run_mode: how the model is run.
        strict: whether measured kernel times are not looked up.
        load: metrics of the load, by DCGM field name; empty on an idle device.
        shared_gpu: the co-runner, where the latency next to it has a distribution; else None.
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
        """The target's device: `cpu` or `cuda`."""
        return self.fitted.target.flavour.device

    @property
    def kernel_load(self) -> dict[str, float]:
        """The load that changes kernels' times; empty where the whole run waits for its turns instead."""
        return {} if self.shared_gpu else self.load

    @property
    def usual_costs(self) -> PipelineCosts | None:
        """The costs of a run at the host's usual pace; None where the composition does not simulate host and GPU."""
        return self.used.cuda_graph.costs if self.run_mode.cuda_graph and self.used.cuda_graph else self.used.costs

    @property
    def costs(self) -> PipelineCosts | None:
        """The costs of a run at the host's pace; None where the composition does not simulate host and GPU."""
        usual = self.usual_costs
        if self.pace and self.pace.ratio is not None and usual is not None:
            return usual.at_pace(self.pace.ratio)
        return usual


def check_run_mode(run_mode: RunMode, used: Composition, target: str) -> None:
    """Checks that a run mode can be predicted for a target.

    Raises:
        UserError: no models were measured in it, or ONNX Runtime does not support it.
    """
    if run_mode.cuda_graph and run_mode.io == "host":
        raise UserError("a CUDA graph reads and writes tensors at fixed places on the device: predict it with --io device")
    for wanted, fitted, what in ((run_mode.io == "host", used.host_io, "host_io"),
                                (run_mode.cuda_graph, used.cuda_graph, "cuda_graph")):
        if wanted and fitted is None:
            raise UserError(f"{target}: no model was measured with {what}, so it can't be predicted; measure models with it "
                            f"(variants: [{what}] in the collector's config), and fit again: {FIT}")


def pace_of(given: float | HostPace | None, fitted: Fitted, used: Composition, run_mode: RunMode,
            workspace: Workspace) -> HostPace | None:
    """The pace of the host for which to predict; None where it does not matter.

    Raises:
        UserError: the given pace can't be a ratio, or the target has no host pace.
    """
    if given is not None:
        check_host(fitted, used)
        given = given if isinstance(given, HostPace) else given_pace(given)
    if not counts(used, run_mode):
        return None
    return recent_pace(fitted, workspace) if given is None else given


def shared_gpu_of(fitted: Fitted, used: Composition, run_mode: RunMode, load: Mapping[str, float],
                  co_runner: CoRunner | None) -> SharedGpu | None:
    """The shared GPU, where the latency next to a co-runner has a distribution. None where nothing else runs, and where nothing
    was learned of sharing and the load is known by metrics alone.

    Raises:
        UserError: a probe's reading is given and nothing was learned of sharing, or the run mode was not measured under load.
    """
    sharing = fitted.sharing if used.kind == "pipeline" else None
    if sharing is None:
        if co_runner is not None:
            raise NotShared(fitted.target.name)
        return None
    known_co_runner = co_runner or co_runner_of(fitted, load)
    if known_co_runner is None:
        return None
    check_mode_while_shared(run_mode)
    return SharedGpu(sharing, known_co_runner, "metrics" if co_runner is None else "probe")


def check_mode_while_shared(run_mode: RunMode) -> None:
    """Checks that a run mode was measured while the GPU was shared.

    Raises:
        UserError: it was not.
    """
    if run_mode != AS_USUAL:
        raise UserError(f"a model run {run_mode.description} was not measured while the GPU was shared; predict it with "
                        "tensors on the device, node by node, or idle")


def sharing_warning(shared_gpu: SharedGpu | None) -> tuple[str, ...]:
    """A warning if the co-runner is known by metrics only, although a probe would show more."""
    if shared_gpu is None or shared_gpu.load_source == "probe":
        return ()
    if not shared_gpu.sharing.probed or not shared_gpu.sharing.from_metrics:
        return ()
    return (f"metrics do not show how long the co-runner's turns are: means predicted from them erred by "
            f"{shared_gpu.sharing.from_metrics.mean:.0%} on average, those from a probe (--probe, or --probe-every of "
            f"Prometheus's exporter, benchmark/metrics_exporter.py) by {shared_gpu.sharing.probed.mean:.0%}",)
