"""Fits what a run costs on a GPU's two tracks: the host that dispatches, and the GPU that follows.

First the host's pace, from the host times of whole models (dispatched without waiting for the GPU); then, with that pace,
what lies between the tracks and at their ends, from whole latencies. Both on relative errors, with a loss that lets single
odd models pull less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmark.dataset import GPU_LABEL
from overlap_simulator import PipelineCosts, pipeline_ms
from training.composition import Candidate, Mask, each_left_out

Floats = npt.NDArray[np.float64]
LEAST_MODELS = 8  # fewer can't tell seven constants apart
ODD = 0.03  # relative error from which a model counts as odd
US = 1e-3  # milliseconds


@dataclass(frozen=True)
class Tracks:
    """A model of the fit: per node the GPU's time (ms), launches and whether it moves data; measured latency, and the
    host's time where it is known (else NaN)."""

    gpu_ms: Floats
    launches: Floats
    moves: npt.NDArray[np.bool_]
    host_ms: float
    latency_ms: float


def fit_host(models: Sequence[Tracks]) -> tuple[float, float, float, float]:
    """Host time in ms for a node that moves data, for one that does not, for a launch, and for a run besides; from those models
    whose host time is known."""
    from scipy.optimize import least_squares, nnls

    models = [model for model in models if np.isfinite(model.host_ms)]
    counts = np.array([[model.moves.sum(), (~model.moves).sum(), model.launches.sum(), 1.0] for model in models])
    relative = counts / np.array([[model.host_ms] for model in models])
    start, _ = nnls(relative, np.ones(len(models)))
    found = least_squares(lambda costs: relative @ costs - 1.0, start, bounds=(0.0, np.inf), loss="soft_l1", f_scale=ODD)
    node, view, launch, run = (float(cost) for cost in found.x)
    return node, view, launch, run


def fit_pipeline(models: Sequence[Tracks]) -> PipelineCosts:
    """The costs of a run on both tracks, from at least LEAST_MODELS models."""
    from scipy.optimize import least_squares

    node, view, launch, _ = fit_host(models)

    def costs(values: Sequence[float]) -> PipelineCosts:
        pace, start, gap, lead, end = values
        return PipelineCosts(node_ms=pace * node, view_ms=pace * view, launch_ms=pace * launch, start_ms=start, gap_ms=gap,
                             lead_ms=lead, end_ms=end)

    latency = np.array([model.latency_ms for model in models])

    def errors(values: Sequence[float]) -> Floats:
        return latencies_ms(models, costs(values)) / latency - 1.0

    found = least_squares(errors, [1.0, 30 * US, 1.0 * US, -5 * US, 5 * US], loss="soft_l1", f_scale=ODD,
                          x_scale=[0.1, 10 * US, 0.5 * US, 5 * US, 5 * US],
                          bounds=([0.5, 0.0, 0.0, -100 * US, 0.0], [1.5, 200 * US, 5 * US, 50 * US, 100 * US]))
    return costs(found.x)


def can_fit(models: Sequence[Tracks]) -> bool:
    """Whether enough models tell of both tracks."""
    return sum(bool(np.isfinite(model.host_ms)) for model in models) >= LEAST_MODELS


def latencies_ms(models: Sequence[Tracks], costs: PipelineCosts) -> Floats:
    """The latency of each model (ms) at some costs."""
    return np.array([pipeline_ms(model.gpu_ms, model.launches, model.moves, costs) for model in models])


def left_out_ms(models: Sequence[Tracks], groups: Sequence[str]) -> Floats:
    """Each model's latency (ms) at costs fitted without its group."""
    def fit_and_predict(fit: Mask, out: Mask) -> Floats:
        costs = fit_pipeline([model for model, kept in zip(models, fit, strict=True) if kept])
        return latencies_ms([model for model, kept in zip(models, out, strict=True) if kept], costs)

    return each_left_out(groups, fit_and_predict)


def fit_pipeline_candidate(predicted: Sequence[Tracks], measured: Sequence[Tracks],
                           groups: Sequence[str]) -> tuple[Candidate, Floats, Floats]:
    """The two tracks as a way of composing, each group left out of the fit in turn; each model's latency then (ms), with its
    kernels predicted and as measured.

    Args:
        predicted: the models with kernels predicted without their group.
        measured: the same with measured kernels where there are any, for the composition alone.
        groups: what each model is left out with.
    """
    latency = np.array([model.latency_ms for model in predicted])

    def errors(found: Floats) -> Floats:
        return np.abs(found / latency - 1)

    costs, left_out, known = fit_pipeline(predicted), left_out_ms(predicted, groups), left_out_ms(measured, groups)
    return Candidate(
        label=GPU_LABEL, kind="pipeline", alpha=1.0, beta_ms=0.0, costs=costs, cv_mape=float(errors(left_out).mean()),
        cv_max=float(errors(left_out).max()), fit_mape=float(errors(latencies_ms(predicted, costs)).mean()),
        plain_mape=float(errors(np.array([model.gpu_ms.sum() for model in measured])).mean()),
        measured_cv_mape=float(errors(known).mean())), left_out, known
