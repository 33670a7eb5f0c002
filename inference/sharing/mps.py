"""A model's latency while other models use the same GPU through MPS, each in a process of its own."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from hase.graph_model.simulation.mps import MpsProcess, mps_runs_ms, with_share
from hase.graph_model.simulation.pipeline import pipeline_ms
from hase.inference.core.uncertainty import Span, span_of_error
from hase.inference.sharing.co_runner import SEED, UnderLoad
from hase.learned.sharing.mps import FIT
from hase.utils.errors import UserError
from hase.utils.sharing_mode import ALL_THREADS, SetSharing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hase.graph_model.simulation.pipeline import Tracks
    from hase.inference.core.model_run import PredictedRun
    from hase.inference.core.targets import Fitted
    from hase.learned.sharing.mps import LearnedMps

SHARES = (25, 50, 75)  # per cent of the threads, to choose from


class NotThroughMps(UserError):
    """Nothing was learned of how a target's GPU is shared through MPS."""

    def __init__(self, target: str) -> None:
        super().__init__(f"{target}: nothing was learned of how it is shared through MPS; measure it under mps "
                         f"(recipes/h200/measure_sharing.sh), then: {FIT}")


class ThroughMps:
    """Run times of models that share a GPU through MPS, with shares of its threads or without (`hase.inference.sharing.ways`)."""

    def __init__(self, learned: LearnedMps, shares: bool) -> None:
        self._learned, self._shares = learned, shares

    def choices(self, models: int) -> list[SetSharing]:
        """No shares; or every choice of SHARES that gives all threads away, and none twice."""
        if not self._shares or models == 1:
            return [SetSharing(True)]
        return [SetSharing(True, percents) for percents in product(SHARES, repeat=models) if sum(percents) == ALL_THREADS]

    def alone_ms(self, model: PredictedRun, percent: int) -> float:
        """The latency of a run with a share of the threads, while nothing else runs."""
        return self._alone_ms(model, self._process(model, percent))

    def beside(self, model: PredictedRun, percent: int, others: Sequence[tuple[PredictedRun, int]]) -> tuple[float, UnderLoad]:
        """A model's latency alone (ms), and its distribution while the others run in loops, each with its share."""
        process, rules = self._process(model, percent), self._learned.sharing.rules
        alone_ms = self._alone_ms(model, process)
        if not np.any(process.tracks.launches > 0):
            return alone_ms, UnderLoad.of(np.array([alone_ms]), 1.0, "prediction")
        by_itself = float(np.median(mps_runs_ms(process, (), rules, np.random.default_rng(SEED), 2)))
        runs = mps_runs_ms(process, [self._process(*other) for other in others], rules, np.random.default_rng(SEED))
        return alone_ms, UnderLoad.of(runs, 1.0, "prediction").later_by(alone_ms - by_itself)

    def span(self, model: PredictedRun, percent: int, alone_ms: float) -> Span:
        """The factors by which nine of ten latencies of models like this one are off beside others."""
        gpu_ms = float(self._with_share(self._process(model, percent)).gpu_ms.sum())
        errors = self._learned.sharing.errors_of(gpu_ms, alone_ms, percent < ALL_THREADS)
        return span_of_error(errors.mean if errors else None)

    def _with_share(self, process: MpsProcess) -> Tracks:
        return with_share(process.tracks, process.grids, process.share, self._learned.sharing.rules)

    def _process(self, run: PredictedRun, percent: int) -> MpsProcess:
        return mps_process(run, self._learned, percent)

    def _alone_ms(self, model: PredictedRun, process: MpsProcess) -> float:
        fewer = self._with_share(process)
        usual_ms = pipeline_ms(process.tracks, model.run.costs) if model.run.costs else 0.0
        return model.alone_ms + pipeline_ms(fewer, process.costs) - usual_ms


def mps_process(run: PredictedRun, learned: LearnedMps, percent: int) -> MpsProcess:
    """A predicted model as a process with a share of the GPU's threads.

    Raises:
        NotThroughMps: the target's runs are no two tracks of host and GPU.
    """
    costs = run.run.costs
    if costs is None:
        raise NotThroughMps(run.fitted.target.name)
    record, tracks = run.run.record, run.run.tracks
    kernels = [record.kernels[record.nodes[place].kernel_id] for place in run.run.order]
    grids = learned.grids(kernels, run.fitted.predictors.features_of(kernels), tracks.gpu_ms)
    return MpsProcess(tracks, costs.at_pace(learned.sharing.host_slowdown), grids, percent / ALL_THREADS)


def learned_elsewhere(fitted: Fitted) -> tuple[str, ...]:
    """What to know where sharing through MPS was learned on another GPU than the target."""
    if fitted.mps is None or fitted.mps.sharing.learned_on == fitted.target.name:
        return ()
    return (f"how kernels of several processes run at the same time through MPS was learned on "
            f"{fitted.mps.sharing.learned_on}, and not on {fitted.target.name}",)

