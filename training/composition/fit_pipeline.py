"""Fits what a run costs on a GPU's two tracks: the host that dispatches, and the GPU that follows.

All costs are fitted together to the latencies of whole models, each at the pace that its host had when it was measured. With a
small weight they are also fitted to host times (dispatch without waiting for the GPU), but only of models that are limited by
their host: while the GPU is busy, a launch takes the host longer, which makes no difference to the latency. The fit minimises
relative errors with a loss (soft L1) that limits the influence of outliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graph_model.simulation.pipeline import PipelineCosts, dispatched_ms, pipeline_ms
from graph_model.simulation.tracks import OffGpu, Tracks
from records.labels import GPU_LABEL
from training.composition.fitted import Candidate
from utils.lazy import scipy

Floats = npt.NDArray[np.float64]
LEAST_MODELS = 8  # fewer can't separate seven constants
ODD = 0.03  # relative error from which a model counts as an outlier
HOST_WEIGHT = 0.2  # of a host time's error, where a latency's is 1; with 0.5, held-out latencies are worse (3.0 %, not 2.8)
HOST_BOUND = 0.75  # a model whose host needs at least this share of its latency is limited by its host
US = 1e-3  # milliseconds
MOST_PARTS = 20  # that groups are held out in; with more groups, several are held out together
# How many times as long as usual hosts with one kind of GPU take to dispatch. Measured with H200s: 1.15 to 1.6 times on other
# hosts than those of the shipped predictors, or with other users on the same host; 0.85 times in one session.
HOSTS = (0.85, 1.6)
# Two constants come from single nodes run alone on an H200, label `run` minus `gpu` (recipes/h200/labels-nvidia-h200.tar.xz).
# An elementwise node of one launch takes 15.5 us (median of 373), of which node and launch are 6. The rest bounds start_ms: a
# fit to models of 0.2 ms and more can't tell it from twice as much, which would double the latency of a model of a few nodes.
START_MS = 9 * US
# A convolution of two launches takes 24.5 us (median of 79), so its library call costs as much as 0.9 launches; that of a Gemm
# (median of 15) costs 0.5. Free fits of them differ too much between families. Each collection of models held out in turn, the
# mean error of latencies from measured kernels is 3.2 % with 0.5 launches for both, and 2.8 % with these two.
CONVOLUTION_LAUNCHES, PRODUCT_LAUNCHES = 1.0, 0.5
# The host's time of models that are nearly all recurrent layers, per launch: 6.1 us (LSTM, 108 and 210 launches) and 7.8 us
# (Sequencer2D, 3,408 launches), where a launch of other nodes takes 4.5.
RECURRENT_LAUNCHES = 0.35
# Host times of models say that a reduction, normalisation, softmax or pool takes about 3 us longer than another node of one
# launch. Each collection held out in turn, it lowers the mean error of latencies from measured kernels from 3.67 to 3.55 %.
REDUCING_LAUNCHES = 0.5
FOLLOWING = {"convolution_ms": CONVOLUTION_LAUNCHES, "product_ms": PRODUCT_LAUNCHES, "recurrent_launch_ms": RECURRENT_LAUNCHES,
             "reducing_ms": REDUCING_LAUNCHES}
FITTED = tuple(name for name in PipelineCosts.model_fields if name not in FOLLOWING)
FIRST = PipelineCosts(node_ms=2 * US, view_ms=0.3 * US, launch_ms=4 * US, start_ms=5 * US, gap_ms=1 * US, lead_ms=-5 * US,
                      end_ms=5 * US)  # where the search begins
SCALE = PipelineCosts(node_ms=1 * US, view_ms=1 * US, launch_ms=1 * US, start_ms=10 * US, gap_ms=0.5 * US, lead_ms=5 * US,
                      end_ms=5 * US)  # the steps in which it goes
LEAST = PipelineCosts(node_ms=0.0, view_ms=0.0, launch_ms=0.0, start_ms=0.0, gap_ms=0.0, lead_ms=-100 * US, end_ms=0.0)
MOST = PipelineCosts(node_ms=20 * US, view_ms=10 * US, launch_ms=20 * US, start_ms=START_MS, gap_ms=5 * US, lead_ms=50 * US,
                     end_ms=100 * US)


@dataclass(frozen=True)
class MeasuredTracks:
    """A model of the fit.

    Attributes:
        tracks: its nodes.
        host_ms: measured time of the host; NaN where it is not known.
        latency_ms: measured latency.
        pace: how many times as long as usual the host took meanwhile, a ratio.
        off_gpu: what its nodes do off the GPU; None where all run on the GPU.
    """

    tracks: Tracks
    host_ms: float
    latency_ms: float
    pace: float = 1.0
    off_gpu: OffGpu | None = None


def fit_pipeline(models: Sequence[MeasuredTracks]) -> PipelineCosts:
    """The costs of a run on both tracks at the host's usual pace; needs at least LEAST_MODELS models."""
    held_up = [model for model in models if model.host_ms > HOST_BOUND * model.latency_ms]
    latency = np.array([model.latency_ms for model in models])
    host = np.array([model.host_ms for model in held_up])

    def costs(values: Sequence[float]) -> PipelineCosts:
        fitted = dict(zip(FITTED, values, strict=True))
        return PipelineCosts(**fitted, **{name: share * fitted["launch_ms"] for name, share in FOLLOWING.items()})

    def errors(values: Sequence[float]) -> Floats:
        found = costs(values)
        return np.concatenate([latencies_ms(models, found, paced=True) / latency - 1.0,
                               HOST_WEIGHT * (hosts_ms(held_up, found) / host - 1.0)])

    first, scale, least, most = ([getattr(one, name) for name in FITTED] for one in (FIRST, SCALE, LEAST, MOST))
    found = scipy.optimize.least_squares(errors, first, loss="soft_l1", f_scale=ODD, x_scale=scale, bounds=(least, most))
    return costs(found.x)


def can_fit(models: Sequence[MeasuredTracks]) -> bool:
    """Whether the host's time is known of enough models."""
    return sum(bool(np.isfinite(model.host_ms)) for model in models) >= LEAST_MODELS


def latencies_ms(models: Sequence[MeasuredTracks], costs: PipelineCosts, paced: bool = False) -> Floats:
    """The latency (ms) of each model with these costs: at the host's usual pace, or `paced`: at the pace measured with it."""
    return np.array([pipeline_ms(model.tracks, costs.at_pace(model.pace) if paced else costs, model.off_gpu)
                     for model in models])


def hosts_ms(models: Sequence[MeasuredTracks], costs: PipelineCosts) -> Floats:
    """The host's time (ms) for each model with these costs, at the pace measured with the model."""
    return np.array([dispatched_ms(model.tracks, costs.at_pace(model.pace), model.off_gpu)[-1] for model in models])


class LeftOut(NamedTuple):
    """Each model's latency (ms) with costs fitted without its group: at the host's usual pace, at the measured pace, and at the
    paces of the fastest and the slowest plausible host."""

    usual_ms: Floats
    paced_ms: Floats
    fastest_ms: Floats
    slowest_ms: Floats


def left_out_costs(models: Sequence[MeasuredTracks], groups: Sequence[str]) -> dict[str, PipelineCosts]:
    """For each group, the costs of a run fitted without its models. Where there are more than MOST_PARTS groups, several are
    held out together."""
    part_of = {group: place % MOST_PARTS for place, group in enumerate(sorted(set(groups)))}
    costs = {part: fit_pipeline([model for model, of in zip(models, groups, strict=True) if part_of[of] != part])
             for part in set(part_of.values())}
    return {group: costs[part] for group, part in part_of.items()}


def left_out_ms(models: Sequence[MeasuredTracks], groups: Sequence[str]) -> LeftOut:
    """The latencies of models, each group held out of the fit in turn."""
    costs = left_out_costs(models, groups)

    def at(pace: float | None) -> Floats:
        return np.array([pipeline_ms(model.tracks, costs[group].at_pace(model.pace if pace is None else pace), model.off_gpu)
                         for model, group in zip(models, groups, strict=True)])

    return LeftOut(at(1.0), at(None), *(at(pace) for pace in HOSTS))


def fit_pipeline_candidate(predicted: Sequence[MeasuredTracks], measured: Sequence[MeasuredTracks],
                           groups: Sequence[str]) -> tuple[Candidate, Floats, Floats]:
    """The two tracks as a candidate, and the latency (ms) of each model with its group held out, at the host's usual pace: with
    its kernels predicted, and with its kernels as measured.

    Args:
        predicted: the models, with kernels predicted without their group.
        measured: the same models with measured kernels where there are any, to see the error of the composition alone.
        groups: of each model, held out together.
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
