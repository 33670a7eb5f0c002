"""A model on a GPU that other processes share: its latency next to any co-runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference.sharing.co_runner import LoadSource, NotShared, UnderLoad, check_mode_here, under_load
from training.sharing.learned import Sharing, co_runner_guessed, in_a_loop

if TYPE_CHECKING:
    from graph_model.simulation.pipeline import PipelineCosts
    from graph_model.simulation.sharing import CoRunner
    from graph_model.simulation.tracks import Tracks
    from inference.core.answers import Prediction
    from inference.core.predicted_run import PredictedRun


@dataclass(frozen=True)
class SharedModel:
    """A model, with all that is needed to predict it next to a co-runner.

    Attributes:
        prediction: of the model.
        alone_ms: its latency on an idle device.
        tracks, costs: of its run.
        sharing: how the target's GPU takes turns between processes.
        off_gpu_ms: how much longer a run takes than its tracks alone, idle or not (`ModelRun.off_gpu_ms`).
    """

    prediction: Prediction
    alone_ms: float
    tracks: Tracks
    costs: PipelineCosts
    sharing: Sharing
    off_gpu_ms: float = 0.0

    def next_to(self, co_runner: CoRunner, told_by: LoadSource) -> UnderLoad:
        """The distribution of its latency next to a co-runner."""
        return under_load(self.tracks, self.costs, self.sharing, co_runner, told_by).later_by(self.off_gpu_ms)

    def at_share(self, share: float, like: CoRunner | None = None) -> UnderLoad:
        """The distribution next to a background that is busy for `share` of the time (a ratio). The background's waits and
        phases are those of `like`, or of an average background among those that were measured."""
        return self.next_to(co_runner_guessed(share, self.sharing, like), "share")

    def in_a_loop(self, other: SharedModel) -> CoRunner:
        """This model, run without a pause, as a co-runner of the model `other`."""
        return in_a_loop((self.tracks, self.costs), (other.tracks, other.costs), self.sharing)


def shared_model_of(run: PredictedRun) -> SharedModel:
    """A predicted model, ready to be put next to a co-runner.

    Raises:
        UserError: the GPU is this machine's and shared in a way that was not measured.
        NotShared: nothing was learned of how the target is shared.
    """
    sharing, costs = run.fitted.sharing, run.run.costs
    if sharing is not None:
        check_mode_here(run.fitted)
    if sharing is None or costs is None:
        raise NotShared(run.fitted.target.name)
    return SharedModel(run.prediction, run.alone_ms, run.run.tracks, costs, sharing, run.run.off_gpu_ms(costs))
