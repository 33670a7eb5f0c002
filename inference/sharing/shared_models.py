"""A model on a target that other work may share: its latency beside whatever that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graph_model.simulation.pipeline import PipelineCosts, pipeline_ms
from graph_model.simulation.sharing import OtherWork
from graph_model.simulation.tracks import Tracks
from inference.core.answers import Prediction
from inference.core.prediction import predict
from inference.core.sources import Source, record_of
from inference.core.targets import fitted_for
from inference.core.timeline import off_gpu_of, tracks_of
from inference.sharing.co_runner import NotShared, ToldBy, UnderLoad, check_mode_here, under_load
from training.sharing.learned import Sharing, in_a_loop, other_work_guessed
from utils.paths import Workspace


@dataclass(frozen=True)
class SharedModel:
    """A model, predicted for an idle target, and what is needed to put it beside other work.

    Attributes:
        idle: its prediction on the idle device.
        tracks, costs: of its run.
        sharing: how the target's GPU turns between processes.
        off_gpu_ms: by how much nodes of the CPU provider and copies make an idle run longer.
    """

    idle: Prediction
    tracks: Tracks
    costs: PipelineCosts
    sharing: Sharing
    off_gpu_ms: float = 0.0

    def beside(self, other: OtherWork, told_by: ToldBy) -> UnderLoad:
        """The distribution of its latency beside other work."""
        return under_load(self.tracks, self.costs, self.sharing, other, told_by).later_by(self.off_gpu_ms)

    def at_share(self, share: float, like: OtherWork | None = None) -> UnderLoad:
        """The distribution beside a background that is busy for `share` of the time (a ratio), with waits and phases as of an
        average kind of background, or of `like`."""
        return self.beside(other_work_guessed(share, self.sharing, like), "share")

    def in_a_loop(self, other: SharedModel) -> OtherWork:
        """This model, run without a pause, as `other` meets it."""
        return in_a_loop((self.tracks, self.costs), (other.tracks, other.costs), self.sharing)


def shared_model(source: Source, *, dims: Mapping[str, int] | None = None, target: str | None = None, strict: bool = False,
                 workspace: Workspace | None = None, force: bool = False, static: bool = False,
                 host_pace: float | None = None) -> SharedModel:
    """A model on a target whose sharing is known. Arguments are those of `inference.predict`.

    Raises:
        UserError: as `predict`.
        NotShared: nothing was learned of how the target is shared.
    """
    workspace = workspace or Workspace()
    fitted = fitted_for(workspace, target)
    if fitted.sharing is not None:
        check_mode_here(fitted)
    record = record_of(workspace.find_model(Path(source)) if isinstance(source, (str, Path)) else source,
                       fitted.target.flavour.device, dims, static)
    idle = predict(record, target=target, strict=strict, workspace=workspace, force=force, host_pace=host_pace)
    if fitted.sharing is None or idle.composition.costs is None:
        raise NotShared(fitted.target.name)
    tracks, costs = tracks_of(idle, record), idle.composition.costs
    off_gpu = off_gpu_of(idle, record)
    off_gpu_ms = pipeline_ms(tracks, costs, off_gpu) - pipeline_ms(tracks, costs) if off_gpu else 0.0
    return SharedModel(idle, tracks, costs, fitted.sharing, off_gpu_ms)
