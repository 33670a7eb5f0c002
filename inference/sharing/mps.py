"""A model's latency while other models use the same GPU through MPS, each in a process of its own."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from graph_model.simulation.mps import MpsProcess, mps_runs_ms, with_share
from graph_model.simulation.pipeline import pipeline_ms
from inference.core.uncertainty import span_of_error
from inference.sharing.co_runner import SEED, UnderLoad
from inference.sharing.shared_models import OneOfTwo, Pair, one_of_two
from training.sharing.mps import FIT
from utils.errors import UserError
from utils.sharing_mode import ALL_THREADS, SetSharing

if TYPE_CHECKING:
    from graph_model.simulation.pipeline import Floats, Tracks
    from inference.core.model_run import PredictedRun
    from inference.core.targets import Fitted
    from training.sharing.mps import LearnedMps

SHARES = (25, 50, 75)  # per cent of the threads, to choose from


class NotThroughMps(UserError):
    """Nothing was learned of how a target's GPU is shared through MPS."""

    def __init__(self, target: str) -> None:
        super().__init__(f"{target}: nothing was learned of how it is shared through MPS; measure it under mps "
                         f"(recipes/h200/measure_sharing.sh), then: {FIT}")


class ThroughMps:
    """Run times of models that share a GPU through MPS, with shares of its threads or without (`inference.sharing.ways`)."""

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

    def slowdowns(self, model: PredictedRun, percent: int, other: PredictedRun, other_percent: int) -> Floats:
        """How many times as long as alone, with the same share, runs take while the other model runs in a loop."""
        alone_ms, under_load = self.alone_and_beside(model, percent, other, other_percent)
        return under_load.slowdowns(alone_ms)

    def alone_and_beside(self, model: PredictedRun, percent: int, other: PredictedRun,
                         other_percent: int) -> tuple[float, UnderLoad]:
        """A model's latency alone (ms), and its distribution while the other runs in a loop, each with its share."""
        process, rules = self._process(model, percent), self._learned.sharing.rules
        alone_ms = self._alone_ms(model, process)
        if not np.any(process.tracks.launches > 0):
            return alone_ms, UnderLoad.of(np.array([alone_ms]), 1.0, "prediction")
        by_itself = float(np.median(mps_runs_ms(process, (), rules, np.random.default_rng(SEED), 2)))
        runs = mps_runs_ms(process, [self._process(other, other_percent)], rules, np.random.default_rng(SEED))
        return alone_ms, UnderLoad.of(runs, 1.0, "prediction").later_by(alone_ms - by_itself)

    def mean_error(self, model: PredictedRun, percent: int, alone_ms: float) -> float | None:
        """The mean error (a ratio) of latencies of models like this one beside others; None where none was measured."""
        gpu_ms = float(self._with_share(self._process(model, percent)).gpu_ms.sum())
        errors = self._learned.sharing.errors_of(gpu_ms, alone_ms, percent < ALL_THREADS)
        return errors.mean if errors else None

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
            f"{fitted.mps.sharing.learned_on}, and never measured on {fitted.target.name}",)


def pair_through_mps(first: PredictedRun, second: PredictedRun, sharing: SetSharing) -> Pair:
    """Two models on one GPU through MPS, each in a process of its own that runs it again and again without a pause.

    Raises:
        NotThroughMps: nothing was learned of how the target is shared through MPS.
        UserError: `sharing` has shares for another number of models.
    """
    learned = first.fitted.mps
    if learned is None:
        raise NotThroughMps(first.fitted.target.name)
    if not sharing.fits(2):
        raise UserError(f"two models share the GPU, and there are {len(sharing.percents)} shares of the threads: give one for "
                        "both (mps:50) or one for each (mps:25/75)")
    percents = sharing.percent_of(0), sharing.percent_of(1)
    through = ThroughMps(learned, shares=True)

    def of_pair(run: PredictedRun, percent: int, other: PredictedRun, other_percent: int) -> OneOfTwo:
        alone_ms, under_load = through.alone_and_beside(run, percent, other, other_percent)
        return one_of_two(run.prediction, other.prediction, alone_ms, under_load,
                          span_of_error(through.mean_error(run, percent, alone_ms)))

    return Pair(target=first.fitted.target.name, sharing=str(sharing),
                models=(of_pair(first, percents[0], second, percents[1]), of_pair(second, percents[1], first, percents[0])),
                warnings=tuple(dict.fromkeys((
                    *first.prediction.warnings, *second.prediction.warnings, *learned_elsewhere(first.fitted)))))
