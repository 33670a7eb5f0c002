"""Fits the latency of models in other run modes: with numpy arrays in and out, or captured as a CUDA graph.

With numpy arrays, a run also copies them, before and after both tracks. As a CUDA graph, nodes cost the host nothing, whatever
its pace, and the GPU pauses less between kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from graph_model.simulation.pipeline import PipelineCosts
from training.composition.fit_pipeline import ODD, US, MeasuredTracks, latencies_ms
from training.composition.fitted import GraphReplay, HostIo, Mask, copied_mib, host_io_ms
from training.composition.fitting import each_left_out, error_range_of
from utils.lazy import scipy
from utils.timing import error_statistics

if TYPE_CHECKING:
    from training.composition.measured_models import MeasuredModel

Floats = npt.NDArray[np.float64]
Mode = TypeVar("Mode", HostIo, GraphReplay)
LEAST_MODELS = 4  # fewer can't separate three constants


def fit_host_io(models: Sequence[MeasuredModel], predicted_ms: Floats, groups: Sequence[str]) -> HostIo | None:
    """How much longer a run with numpy arrays takes; None where too few models were run that way.

    Args:
        models: of the fit.
        predicted_ms: the latency of each with tensors on the device, predicted without its group.
        groups: of each model, held out together.
    """
    known = np.array([bool(np.isfinite(model.host_io_ms)) for model in models])
    if known.sum() < LEAST_MODELS:
        return None
    models = [model for model, one in zip(models, known, strict=True) if one]
    groups = [group for group, one in zip(groups, known, strict=True) if one]
    copied = np.array([copied_mib(model.record) for model in models])
    extra = np.array([model.host_io_ms - model.latency_ms for model in models])
    measured = np.array([model.host_io_ms for model in models])

    def fit(kept: Mask) -> HostIo:
        terms = np.column_stack([np.ones(int(kept.sum())), copied[kept]]) / measured[kept, None]
        (run, per_mib_in, per_mib_out), _ = scipy.optimize.nnls(terms, np.maximum(extra[kept], 0.0) / measured[kept])
        return HostIo(run_ms=float(run), in_ms_per_mib=float(per_mib_in), out_ms_per_mib=float(per_mib_out),
                      models=int(kept.sum()))

    def fit_and_predict(kept: Mask, out: Mask) -> Floats:
        costs = fit(kept)
        return predicted_ms[known][out] + np.array([host_io_ms(costs, one) for one in copied[out]])

    whole = fit(np.ones(len(models), dtype=bool))
    if len(set(groups)) < 2:
        return whole
    return judged(whole, each_left_out(groups, fit_and_predict), measured, groups)


def fit_graph_replay(models: Sequence[MeasuredModel], tracks: Sequence[MeasuredTracks],
                     groups: Sequence[str]) -> GraphReplay | None:
    """The costs of a run as a CUDA graph; None where too few models were run that way.

    Args:
        models: of the fit.
        tracks: of each model, with kernels predicted without the model's group.
        groups: of each model, held out together.
    """
    known = [bool(np.isfinite(model.cuda_graph_ms)) for model in models]
    if sum(known) < LEAST_MODELS:
        return None
    captured = [replace(one, latency_ms=model.cuda_graph_ms)
                for one, model, kept in zip(tracks, models, known, strict=True) if kept]
    groups = [group for group, kept in zip(groups, known, strict=True) if kept]

    def chosen(mask: Mask) -> list[MeasuredTracks]:
        return [one for one, kept in zip(captured, mask, strict=True) if kept]

    whole = GraphReplay(costs=_replay_costs(captured), models=len(captured))
    if len(set(groups)) < 2:
        return whole
    measured = np.array([one.latency_ms for one in captured])
    left_out = each_left_out(groups, lambda kept, out: latencies_ms(chosen(out), _replay_costs(chosen(kept))))
    return judged(whole, left_out, measured, groups)


def judged(fitted: Mode, left_out_ms: Floats, measured_ms: Floats, groups: Sequence[str]) -> Mode:
    """`fitted` with the errors of held-out latencies, and the prediction interval that follows from them."""
    return fitted.model_copy(update={"left_out": error_statistics(left_out_ms.tolist(), measured_ms.tolist()),
                                     "interval": error_range_of(left_out_ms, measured_ms, groups)})


def _replay_costs(models: Sequence[MeasuredTracks]) -> PipelineCosts:
    """The costs of captured models: the GPU's pause after each launch, and a constant."""
    latency = np.array([model.latency_ms for model in models])

    def costs(values: Sequence[float]) -> PipelineCosts:
        gap, end = values
        return PipelineCosts(node_ms=0.0, view_ms=0.0, launch_ms=0.0, start_ms=0.0, gap_ms=gap, lead_ms=0.0, end_ms=end)

    found = scipy.optimize.least_squares(
        lambda values: latencies_ms(models, costs(values)) / latency - 1.0, [0.5 * US, 10 * US], loss="soft_l1", f_scale=ODD,
        x_scale=[0.5 * US, 10 * US], bounds=(0.0, [5 * US, 200 * US]))
    return costs(found.x)
