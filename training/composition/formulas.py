"""Fits the constants of each formula of a model's latency: a line over kernel times, a GPU's two tracks, and other run modes.

The two tracks are the host that dispatches, and the GPU that follows. All costs are fitted together to the latencies of whole
models, each at its host's pace during the measurement. With a small weight they also fit host times (dispatch without waiting
for the GPU), but only of models limited by their host: while the GPU is busy, a launch takes the host longer without any effect
on the latency. The fit minimises relative errors with a loss (soft L1) that limits the influence of outliers.

Other run modes: with numpy arrays, a run also copies them, before and after both tracks. As a CUDA graph, nodes cost the host
nothing, whatever its pace, and the GPU pauses less between kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import NamedTuple, TypeVar

import numpy as np

from hase.graph_model.simulation.pipeline import OffGpu, PipelineCosts, Runs, Tracks, host_work_ms, pipeline_ms
from hase.learned.composition.fitted import GraphReplay, HostIo, Line, Mask, copied_mib, host_io_ms, latency_ms
from hase.learned.composition.intervals import HOSTS
from hase.training.composition.calibration import error_range_of
from hase.training.composition.measured_models import MeasuredModel, MeasuredTracks
from hase.utils.lazy import scipy
from hase.utils.timing import Floats, error_statistics

ModeCosts = TypeVar("ModeCosts", HostIo, GraphReplay)
MODELS_FOR_NODES = 5  # fewer can't separate γ from α and β
LEAST_MODELS = 8  # fewer can't separate the seven constants of two tracks
LEAST_IN_MODE = 4  # fewer can't separate the three constants of another run mode
OUTLIER = 0.03  # relative error from which a model counts as an outlier
HOST_WEIGHT = 0.2  # of a host time's error, where a latency's is 1; with 0.5, held-out latencies are worse (3.0 %, not 2.8)
HOST_BOUND = 0.75  # a model whose host needs at least this share of its latency is limited by its host
US = 1e-3  # a microsecond in milliseconds
MOST_PARTS = 20  # fits with groups held out; with more groups, several are held out together
# Two constants come from single nodes run alone on an H200, label `run` minus `gpu` (recipes/h200/labels-nvidia-h200.tar.xz).
# An elementwise node of one launch takes 15.5 us (median of 373), of which node and launch are 6. The rest bounds start_ms: a
# fit to models of 0.2 ms and more can't tell it from twice as much, which would double the latency of a model of a few nodes.
START_MS = 9 * US
# A convolution of two launches takes 24.5 us (median of 79), so its library call costs as much as 0.9 launches; that of a Gemm
# (median of 15) costs 0.5. Free fits of them differ too much between families. Each collection of models held out in turn, the
# mean error of latencies from measured kernels is 3.2 % with 0.5 launches for both, and 2.8 % with these two.
CONVOLUTION_LAUNCHES, PRODUCT_LAUNCHES = 1.0, 0.4
# In recurrent layers a launch takes 5.7 us, and 7.8 where cuBLAS takes a kernel that is slow to launch (layers of 72 steps,
# recipes/cuda_kernels/measure_recurrent.py), where one of other nodes takes 4.5. A layer costs some 45 us once: without them,
# layers of 24 steps are predicted 14 to 18 % too short. Each collection held out, the mean error of latencies from measured
# kernels falls from 3.28 to 3.08 % with these four; with 0.3 and 0.6 for products it is 3.11, with 0.3 and 0.8 it is 3.22.
RECURRENT, RECURRENT_LAUNCHES, SLOW_RECURRENT_LAUNCHES, SLOW_PRODUCT_LAUNCHES = 10.0, 0.15, 0.5, 0.4
# Host times of models say that a reduction, normalisation, softmax or pool takes about 3 us longer than another node of one
# launch. Each collection held out in turn, it lowers the mean error of latencies from measured kernels from 3.67 to 3.55 %.
REDUCING_LAUNCHES = 0.5
# An Einsum of two tensors takes 24 to 49 µs to dispatch (six kernels of no model, on an H100:
# recipes/cuda_kernels/measure_dispatch.py), which is 9 µs longer, at the median, than a product with as many launches.
EINSUM_LAUNCHES = 2.5
# costs that are not fitted, but are this multiple of launch_ms
FOLLOWING = {"convolution_ms": CONVOLUTION_LAUNCHES, "product_ms": PRODUCT_LAUNCHES, "recurrent_ms": RECURRENT,
             "recurrent_launch_ms": RECURRENT_LAUNCHES, "reducing_ms": REDUCING_LAUNCHES, "einsum_ms": EINSUM_LAUNCHES,
             "slow_product_ms": SLOW_PRODUCT_LAUNCHES, "slow_recurrent_launch_ms": SLOW_RECURRENT_LAUNCHES}
NOT_FITTED = ("attention_ms", "off_gpu")  # learned from language models (training/llm); the host's pace, as measured
FITTED = tuple(name for name in PipelineCosts.model_fields if name not in FOLLOWING and name not in NOT_FITTED)
START = PipelineCosts(node_ms=2 * US, view_ms=0.3 * US, launch_ms=4 * US, start_ms=5 * US, gap_ms=1 * US, lead_ms=-5 * US,
                      end_ms=5 * US)  # where the search begins
STEPS = PipelineCosts(node_ms=1 * US, view_ms=1 * US, launch_ms=1 * US, start_ms=10 * US, gap_ms=0.5 * US, lead_ms=5 * US,
                      end_ms=5 * US)  # its step sizes
LEAST = PipelineCosts(node_ms=0.0, view_ms=0.0, launch_ms=0.0, start_ms=0.0, gap_ms=0.0, lead_ms=-100 * US, end_ms=0.0)
MOST = PipelineCosts(node_ms=20 * US, view_ms=10 * US, launch_ms=20 * US, start_ms=START_MS, gap_ms=5 * US, lead_ms=50 * US,
                     end_ms=100 * US)


def fit_line(sums_ms: Floats, measured_ms: Floats, nodes: Floats | None = None) -> Line:
    """The line that minimises Σ(latency / measured − 1)², with α > 0 and β ≥ 0. β and γ are 0 if there are too few different
    models to separate them from α. `nodes` are working nodes; None for a line without γ."""
    ratio, inverse = sums_ms / measured_ms, 1.0 / measured_ms
    ones = np.ones(len(sums_ms))
    if nodes is not None and len(set(sums_ms.tolist())) >= MODELS_FOR_NODES:
        per_node = nodes / measured_ms
        (alpha, gamma, beta), *_ = np.linalg.lstsq(np.column_stack([ratio, per_node, inverse]), ones, rcond=None)
        if beta < 0:
            (alpha, gamma), *_ = np.linalg.lstsq(np.column_stack([ratio, per_node]), ones, rcond=None)
            beta = 0.0
        if alpha > 0:
            return Line(float(alpha), float(beta), float(gamma))
    if len(set(sums_ms.tolist())) > 1:
        (alpha, beta), *_ = np.linalg.lstsq(np.column_stack([ratio, inverse]), ones, rcond=None)
        if alpha > 0 and beta >= 0:
            return Line(float(alpha), float(beta))
    return Line(float(ratio.sum() / (ratio @ ratio)), 0.0)


def each_left_out(groups: Sequence[str], fit_and_predict: Callable[[Mask, Mask], Floats | Sequence[float]]) -> Floats:
    """Each model's latency (ms), predicted by a fit without its group. `fit_and_predict` takes masks of the models to fit to
    and to predict, and returns the latencies of the latter."""
    group_of_model = np.array(groups)
    predicted_ms = np.empty(len(groups))
    for group in set(groups):
        held_out = group_of_model == group
        predicted_ms[held_out] = fit_and_predict(~held_out, held_out)
    return predicted_ms


def leave_out(fitted_to_ms: Floats, sums_ms: Floats, measured_ms: Floats, groups: Sequence[str],
              nodes: Floats | None = None) -> Floats:
    """Each model's latency (ms), predicted from `sums_ms` by a line fitted to `fitted_to_ms` of the other groups."""
    counts = np.zeros(len(groups)) if nodes is None else nodes

    def fit_and_predict(fit: Mask, held_out: Mask) -> Floats:
        line = fit_line(fitted_to_ms[fit], measured_ms[fit], None if nodes is None else nodes[fit])
        return latency_ms(line, sums_ms[held_out], counts[held_out])

    return each_left_out(groups, fit_and_predict)


def mape(predicted_ms: Floats, measured_ms: Floats) -> float:
    """The mean absolute error, as a ratio."""
    return float(np.abs(predicted_ms / measured_ms - 1).mean())


def fit_pipeline(models: Sequence[MeasuredTracks]) -> PipelineCosts:
    """The costs of a run on both tracks at the host's usual pace; needs at least LEAST_MODELS models."""
    host_bound = [model for model in models if model.host_ms > HOST_BOUND * model.latency_ms]
    runs, host_bound_runs = paced_runs(models), paced_runs(host_bound)
    latency = np.array([model.latency_ms for model in models])
    host = np.array([model.host_ms for model in host_bound])

    def costs(values: Sequence[float]) -> PipelineCosts:
        fitted = dict(zip(FITTED, values, strict=True))
        return PipelineCosts(**fitted, **{name: share * fitted["launch_ms"] for name, share in FOLLOWING.items()})

    def errors(values: Sequence[float]) -> Floats:
        candidate = costs(values)
        return np.concatenate([runs.latencies_ms(candidate) / latency - 1.0,
                               HOST_WEIGHT * (host_bound_runs.hosts_ms(candidate) / host - 1.0)])

    start, steps, least, most = ([getattr(values, name) for name in FITTED] for values in (START, STEPS, LEAST, MOST))
    fitted = scipy.optimize.least_squares(errors, start, loss="soft_l1", f_scale=OUTLIER, x_scale=steps, bounds=(least, most))
    return costs(fitted.x)


def can_fit(models: Sequence[MeasuredTracks]) -> bool:
    """Whether the host's time is known for enough models."""
    return sum(bool(np.isfinite(model.host_ms)) for model in models) >= LEAST_MODELS


def latencies_ms(models: Sequence[MeasuredTracks], costs: PipelineCosts) -> Floats:
    """The latency (ms) of each model with these costs, at the host's usual pace."""
    return np.array([pipeline_ms(model.tracks, costs, model.off_gpu) for model in models])


def paced_runs(models: Sequence[MeasuredTracks]) -> Runs:
    """Runs of the models, each at its host's pace during the measurement."""
    return Runs([(model.tracks, model.pace, model.off_gpu) for model in models])


class HeldOutLatencies(NamedTuple):
    """Each model's latency (ms) with costs fitted without its group, for several paces of the host. The paces are the usual
    one, the measured one, and the fastest and slowest plausible ones. The host's work (ms) is at the measured pace."""

    usual_ms: Floats
    paced_ms: Floats
    fastest_ms: Floats
    slowest_ms: Floats
    host_work_ms: Floats


def left_out_costs(models: Sequence[MeasuredTracks], groups: Sequence[str]) -> dict[str, PipelineCosts]:
    """For each group, the costs of a run fitted without its models; above MOST_PARTS groups, several are held out together."""
    part_of_group = {group: index % MOST_PARTS for index, group in enumerate(sorted(set(groups)))}
    costs = {part: fit_pipeline([model for model, group in zip(models, groups, strict=True) if part_of_group[group] != part])
             for part in set(part_of_group.values())}
    return {group: costs[part] for group, part in part_of_group.items()}


def left_out_ms(models: Sequence[MeasuredTracks], groups: Sequence[str]) -> HeldOutLatencies:
    """The latencies of models, each group held out of the fit in turn."""
    costs = left_out_costs(models, groups)

    def each_model(simulate: Callable[[Tracks, PipelineCosts, OffGpu | None], float], pace: float | None) -> Floats:
        return np.array([simulate(model.tracks, costs[group].at_pace(model.pace if pace is None else pace), model.off_gpu)
                         for model, group in zip(models, groups, strict=True)])

    usual_ms, paced_ms, fastest_ms, slowest_ms = (each_model(pipeline_ms, pace) for pace in (1.0, None, *HOSTS))
    return HeldOutLatencies(usual_ms, paced_ms, fastest_ms, slowest_ms, each_model(host_work_ms, None))


def fit_host_io(models: Sequence[MeasuredModel], predicted_ms: Floats, groups: Sequence[str]) -> HostIo | None:
    """The additional time of a run with numpy arrays; None if too few models were run that way. `predicted_ms` has the
    latencies with tensors on the device, predicted without the model's group."""
    known = np.array([bool(np.isfinite(model.host_io_ms)) for model in models])
    if known.sum() < LEAST_IN_MODE:
        return None
    models, groups = list(compress(models, known)), list(compress(groups, known))
    copied = np.array([copied_mib(model.record) for model in models])
    extra = np.array([model.host_io_ms - model.latency_ms for model in models])
    measured = np.array([model.host_io_ms for model in models])

    def fit(kept: Mask) -> HostIo:
        terms = np.column_stack([np.ones(int(kept.sum())), copied[kept]]) / measured[kept, None]
        (run, per_mib_in, per_mib_out), _ = scipy.optimize.nnls(terms, np.maximum(extra[kept], 0.0) / measured[kept])
        return HostIo(run_ms=float(run), in_ms_per_mib=float(per_mib_in), out_ms_per_mib=float(per_mib_out),
                      models=int(kept.sum()))

    def fit_and_predict(kept: Mask, held_out: Mask) -> Floats:
        costs = fit(kept)
        return predicted_ms[known][held_out] + np.array([host_io_ms(costs, mib) for mib in copied[held_out]])

    fitted = fit(np.ones(len(models), dtype=bool))
    if len(set(groups)) < 2:
        return fitted
    return with_errors(fitted, each_left_out(groups, fit_and_predict), measured, groups)


def fit_graph_replay(models: Sequence[MeasuredModel], tracks: Sequence[MeasuredTracks],
                     groups: Sequence[str]) -> GraphReplay | None:
    """The costs of a run as a CUDA graph; None if too few models ran so. `tracks`: kernels predicted without the group."""
    known = [bool(np.isfinite(model.cuda_graph_ms)) for model in models]
    if sum(known) < LEAST_IN_MODE:
        return None
    captured = [replace(model_tracks, latency_ms=model.cuda_graph_ms)
                for model_tracks, model in compress(zip(tracks, models, strict=True), known)]
    groups = list(compress(groups, known))

    def fit_and_predict(kept: Mask, held_out: Mask) -> Floats:
        return latencies_ms(list(compress(captured, held_out)), _replay_costs(list(compress(captured, kept))))

    fitted = GraphReplay(costs=_replay_costs(captured), models=len(captured))
    if len(set(groups)) < 2:
        return fitted
    measured = np.array([model.latency_ms for model in captured])
    return with_errors(fitted, each_left_out(groups, fit_and_predict), measured, groups)


def with_errors(fitted: ModeCosts, left_out_ms: Floats, measured_ms: Floats, groups: Sequence[str]) -> ModeCosts:
    """`fitted` with the errors of held-out latencies, and the prediction interval from them."""
    return fitted.model_copy(update={"left_out": error_statistics(left_out_ms.tolist(), measured_ms.tolist()),
                                     "interval": error_range_of(left_out_ms, measured_ms, groups)})


def _replay_costs(models: Sequence[MeasuredTracks]) -> PipelineCosts:
    """The costs of captured models: the GPU's pause after each launch, and a constant."""
    latency = np.array([model.latency_ms for model in models])
    runs = Runs([(model.tracks, 1.0, model.off_gpu) for model in models])

    def costs(values: Sequence[float]) -> PipelineCosts:
        gap, end = values
        return PipelineCosts(node_ms=0.0, view_ms=0.0, launch_ms=0.0, start_ms=0.0, gap_ms=gap, lead_ms=0.0, end_ms=end)

    fitted = scipy.optimize.least_squares(
        lambda values: runs.latencies_ms(costs(values)) / latency - 1.0, [0.5 * US, 10 * US], loss="soft_l1", f_scale=OUTLIER,
        x_scale=[0.5 * US, 10 * US], bounds=(0.0, [5 * US, 200 * US]))
    return costs(fitted.x)
