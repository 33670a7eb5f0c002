"""Fits a composition to a handful of models, whose kernels were measured.

Where few kernels were measured, kernels that were held out are predicted badly, and constants that are fitted to such times
are bad even for models whose kernels are all known. So the constants are fitted to kernels as measured. The errors are still
those of models that were held out, with their kernels predicted.

On a GPU, a few models can't separate the costs of a run. They are taken from the GPU whose predictors come with Hase, and one
number is fitted: how many times as long this host takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from graph_model.simulation.pipeline import PipelineCosts
from records.labels import GPU_LABEL
from training.composition.candidates import Tried, compose
from training.composition.default_composition import shipped_costs
from training.composition.fit_pipeline import MeasuredTracks, latencies_ms
from training.composition.fitted import Candidate, latency_ms
from training.composition.fitting import Mask, each_left_out, fit_line, mape
from training.composition.measured_models import MeasuredModel, TimesOfModels, known_times, tracks_of
from training.kernels.predictors import ON_GPU
from training.kernels.settings import LAUNCHES
from utils.lazy import scipy

Floats = npt.NDArray[np.float64]
PACES = (0.2, 10.0)  # of a host, as multiples of the pace of the host whose GPU comes with Hase
# How much the mean error must fall for each factor of e in the pace. Of the H200's 366 models, two drawn at random give a pace
# that predicts all with a mean error of 2.5 % (4.1 % at the 95th percentile of 200 draws); without this, 16 % (59 %). If the
# host were 1.4 times as slow, it would be 6.0 % with and 13.5 % without.
PULL = 0.05
GRID = 40  # paces that are tried before the search between two of them


def try_few_models(models: Sequence[MeasuredModel], times: Mapping[str, TimesOfModels], measured: TimesOfModels,
                   groups: Sequence[str] | None) -> list[Tried]:
    """The candidates for a handful of models: on a GPU its two tracks, else a line over the sum of kernel times for each label.

    Args:
        models: of the fit.
        times: of their kernels, predicted out of fold, by label, model and kernel id.
        measured: measured times by kernel id and label.
        groups: of each model, held out together; None: nothing is held out.
    """
    known = known_times(times, measured)
    latency = np.array([model.latency_ms for model in models])
    if set(ON_GPU) <= set(times):
        return [_two_tracks(tracks_of(models, times), tracks_of(models, known), latency, groups)]

    def sums_ms(of_models: TimesOfModels) -> Floats:
        return np.array([compose(model.record, of_models[model.record.model])["sum"] for model in models])

    return [_line(label, sums_ms(times[label]), sums_ms(known[label]), latency, groups) for label in times if label != LAUNCHES]


def _line(label: str, predicted_ms: Floats, known_ms: Floats, latency: Floats, groups: Sequence[str] | None) -> Tried:
    """A line over the sums of kernels as measured, and what it says of held-out models with their kernels predicted."""
    nodes = np.zeros(len(latency))
    line = fit_line(known_ms, latency)

    def without(kept: Mask, out: Mask) -> Floats:
        return latency_ms(fit_line(known_ms[kept], latency[kept]), predicted_ms[out], nodes[out])

    fitted = latency_ms(line, known_ms, nodes)
    left_out = fitted if groups is None else each_left_out(groups, without)
    return Tried(_candidate(label, "sum", left_out, fitted, known_ms, latency, groups is not None,
                            alpha=line.alpha, beta_ms=line.beta_ms), left_out)


def fit_pace(models: Sequence[MeasuredTracks], costs: PipelineCosts) -> float:
    """How many times as long as `costs` say the host takes: the pace with the least mean error of some models' latencies.

    Models that are limited by the GPU say nothing of it, and leave it at 1.
    """
    latency = np.array([model.latency_ms for model in models])

    def error(pace: float) -> float:
        found = np.abs(latencies_ms(models, costs.at_pace(pace)) / latency - 1.0)
        return float(found.mean()) + PULL * abs(float(np.log(pace)))

    grid = np.geomspace(*PACES, GRID)
    best = int(np.argmin([error(float(pace)) for pace in grid]))
    around = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
    return float(scipy.optimize.minimize_scalar(error, bounds=around, method="bounded").x)


def _two_tracks(predicted: Sequence[MeasuredTracks], known: Sequence[MeasuredTracks], latency: Floats,
                groups: Sequence[str] | None) -> Tried:
    """A GPU's two tracks with the costs of the GPU that comes with Hase, at the pace of this host."""
    first = shipped_costs()
    costs = first.at_pace(fit_pace(known, first))

    def without(of_models: Sequence[MeasuredTracks]) -> Floats:
        def latencies(kept: Mask, out: Mask) -> Floats:
            pace = fit_pace([model for model, keep in zip(known, kept, strict=True) if keep], first)
            return latencies_ms([model for model, is_out in zip(of_models, out, strict=True) if is_out], first.at_pace(pace))

        return latencies_ms(of_models, costs) if groups is None else each_left_out(groups, latencies)

    fitted, left_out, left_out_known = latencies_ms(known, costs), without(predicted), without(known)
    plain = np.array([model.tracks.gpu_ms.sum() for model in known])
    candidate = _candidate(GPU_LABEL, "pipeline", left_out, fitted, plain, latency, groups is not None, costs=costs)
    if groups is not None:
        candidate = candidate.model_copy(update={"measured_cv_mape": mape(left_out_known, latency)})
    return Tried(candidate, left_out, left_out_known)


def _candidate(label: str, kind: str, left_out: Floats, fitted: Floats, plain: Floats, latency: Floats, held_out: bool,
               alpha: float = 1.0, beta_ms: float = 0.0, costs: PipelineCosts | None = None) -> Candidate:
    errors = np.abs(left_out / latency - 1)
    return Candidate.model_validate({
        "label": label, "kind": kind, "alpha": alpha, "beta_ms": beta_ms, "costs": costs,
        "cv_mape": float(errors.mean()) if held_out else None, "cv_max": float(errors.max()) if held_out else None,
        "fit_mape": mape(fitted, latency), "plain_mape": mape(plain, latency)})
