"""Fits what a run costs on a GPU's two tracks: the host that dispatches, and the GPU that follows.

All costs are fitted together, to whole latencies at the pace that the host had when each was measured, and with a small
weight to the host times of models (dispatched without waiting for the GPU) that their host holds up: beside a busy GPU a
launch takes the host longer, which does not matter to a latency. On relative errors, with a loss that lets single odd
models pull less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmark.records.labels import GPU_LABEL
from graph_model.simulation.pipeline import PipelineCosts, dispatched_ms, pipeline_ms
from graph_model.simulation.tracks import Tracks
from training.composition.fitted import Candidate
from utils.lazy import scipy

Floats = npt.NDArray[np.float64]
LEAST_MODELS = 8  # fewer can't tell seven constants apart
ODD = 0.03  # relative error from which a model counts as odd
HOST_WEIGHT = 0.2  # of a host time's error beside a latency's; latencies left out erred more with 0.5 (an H200: 3.0 %, not 2.8)
HOST_BOUND = 0.75  # of its latency that a model's host needs at least to count as what holds it up
US = 1e-3  # milliseconds
# Two facts of single nodes run alone on an H200, label `run` less `gpu` (recipes/h200/labels-nvidia-h200.tar.xz). A node of one
# launch, element by element, takes 15.5 us (median of 373), of which node and launch are 6. Models of 0.2 ms and more do not
# tell the rest from twice as much, which would double what a model of a few nodes takes.
START_MS = 9 * US
# A convolution of two launches takes 24.5 us (79): its call costs as much as 0.9 launches; that of a Gemm (15) costs 0.5.
# Families are too few to fit it freely: with each left out in turn, host times are off by 4.8 % on average with none, 4.6 with
# 0.4 launches and 4.5 with 0.6; latencies by 3.01, 3.00 and 3.03 %.
LIBRARY_LAUNCHES = 0.5
FITTED = tuple(name for name in PipelineCosts.model_fields if name != "library_ms")
FIRST = PipelineCosts(node_ms=2 * US, view_ms=0.3 * US, launch_ms=4 * US, start_ms=5 * US, gap_ms=1 * US, lead_ms=-5 * US,
                      end_ms=5 * US)  # where the search begins
SCALE = PipelineCosts(node_ms=1 * US, view_ms=1 * US, launch_ms=1 * US, start_ms=10 * US, gap_ms=0.5 * US, lead_ms=5 * US,
                      end_ms=5 * US)  # the steps in which it goes
LEAST = PipelineCosts(node_ms=0.0, view_ms=0.0, launch_ms=0.0, start_ms=0.0, gap_ms=0.0, lead_ms=-100 * US, end_ms=0.0)
MOST = PipelineCosts(node_ms=20 * US, view_ms=10 * US, launch_ms=20 * US, start_ms=START_MS, gap_ms=5 * US, lead_ms=50 * US,
                     end_ms=100 * US)


@dataclass(frozen=True)
class MeasuredTracks:
    """A model of the fit: its tracks; the measured latency (ms), and the host's time (ms) where it is known, else NaN; and
    how many times longer than usual the host took meanwhile."""

    tracks: Tracks
    host_ms: float
    latency_ms: float
    pace: float = 1.0


def fit_pipeline(models: Sequence[MeasuredTracks]) -> PipelineCosts:
    """The costs of a run on both tracks where the host has its usual pace, from at least LEAST_MODELS models."""
    held_up = [model for model in models if model.host_ms > HOST_BOUND * model.latency_ms]
    latency = np.array([model.latency_ms for model in models])
    host = np.array([model.host_ms for model in held_up])

    def costs(values: Sequence[float]) -> PipelineCosts:
        fitted = dict(zip(FITTED, values, strict=True))
        return PipelineCosts(**fitted, library_ms=LIBRARY_LAUNCHES * fitted["launch_ms"])

    def errors(values: Sequence[float]) -> Floats:
        found = costs(values)
        return np.concatenate([latencies_ms(models, found, paced=True) / latency - 1.0,
                               HOST_WEIGHT * (hosts_ms(held_up, found) / host - 1.0)])

    first, scale, least, most = ([getattr(one, name) for name in FITTED] for one in (FIRST, SCALE, LEAST, MOST))
    found = scipy.optimize.least_squares(errors, first, loss="soft_l1", f_scale=ODD, x_scale=scale, bounds=(least, most))
    return costs(found.x)


def can_fit(models: Sequence[MeasuredTracks]) -> bool:
    """Whether enough models tell of both tracks."""
    return sum(bool(np.isfinite(model.host_ms)) for model in models) >= LEAST_MODELS


def latencies_ms(models: Sequence[MeasuredTracks], costs: PipelineCosts, paced: bool = False) -> Floats:
    """The latency of each model (ms) at some costs and the host's usual pace; where `paced`, at that measured beside each."""
    return np.array([pipeline_ms(model.tracks, costs.at_pace(model.pace) if paced else costs) for model in models])


def hosts_ms(models: Sequence[MeasuredTracks], costs: PipelineCosts) -> Floats:
    """What each model takes the host (ms) at some costs and at the pace measured beside it."""
    return np.array([dispatched_ms(model.tracks, costs.at_pace(model.pace))[-1] for model in models])


class LeftOut(NamedTuple):
    """Each model's latency (ms) at costs fitted without its group: at the host's usual pace, and at that measured beside it."""

    usual_ms: Floats
    paced_ms: Floats


def left_out_costs(models: Sequence[MeasuredTracks], groups: Sequence[str]) -> dict[str, PipelineCosts]:
    """The costs of a run by group, fitted without that group's models."""
    return {group: fit_pipeline([model for model, of in zip(models, groups, strict=True) if of != group])
            for group in set(groups)}


def left_out_ms(models: Sequence[MeasuredTracks], groups: Sequence[str]) -> LeftOut:
    """The latencies of models, each group left out of the fit in turn."""
    costs = left_out_costs(models, groups)
    return LeftOut(*(np.array([latencies_ms([model], costs[group], paced)[0]
                               for model, group in zip(models, groups, strict=True)]) for paced in (False, True)))


def fit_pipeline_candidate(predicted: Sequence[MeasuredTracks], measured: Sequence[MeasuredTracks],
                           groups: Sequence[str]) -> tuple[Candidate, Floats, Floats]:
    """The two tracks as a way of composing, each group left out of the fit in turn; each model's latency then (ms, at the
    host's usual pace), with its kernels predicted and as measured.

    Args:
        predicted: the models with kernels predicted without their group.
        measured: the same with measured kernels where there are any, for the composition alone.
        groups: what each model is left out with.
    """
    latency = np.array([model.latency_ms for model in predicted])

    def errors(found: Floats) -> Floats:
        return np.abs(found / latency - 1)

    costs = fit_pipeline(predicted)
    left_out, known = (left_out_ms(models, groups).usual_ms for models in (predicted, measured))
    return Candidate(
        label=GPU_LABEL, kind="pipeline", alpha=1.0, beta_ms=0.0, costs=costs, cv_mape=float(errors(left_out).mean()),
        cv_max=float(errors(left_out).max()), fit_mape=float(errors(latencies_ms(predicted, costs)).mean()),
        plain_mape=float(errors(np.array([model.tracks.gpu_ms.sum() for model in measured])).mean()),
        measured_cv_mape=float(errors(known).mean())), left_out, known
