"""Errors of predictions for groups of models (families or collections) that were held out of all training.

Each group in turn is held out: its kernels, the shapes sampled near them, and its models in the fit of the composition. The
same split serves the baselines: a line over the sum of kernel times, the roofline, and random forests on raw shapes for each
class of kernels. These follow nn-Meter (Zhang et al., MobiSys 2021), with the settings of its published trainer. nn-Meter was
made for phones and has no batch size among its features; here it is the first of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hase.learned.composition.intervals import Sources, for_any_host
from hase.learned.kernels.interface import TrainingConfig, TrainingSet
from hase.learned.kernels.predictors import leaves_gpu_idle
from hase.records.measurement import GPU_LABEL
from hase.training.composition.calibration import interval_score, intervals_held_out
from hase.training.composition.formulas import fit_graph_replay, fit_host_io, leave_out
from hase.training.composition.held_out import (
    PLURAL,
    Fold,
    HeldOut,
    HeldOutKind,
    by_model,
    folds_of,
    gpu_targets,
    hold_out,
    kernel_errors,
)
from hase.training.composition.measured_models import MeasuredModel, TimesOfModels
from hase.training.kernels import targets
from hase.training.kernels.fitting import fit_roofline, parallel_map
from hase.utils.lazy import sklearn
from hase.utils.paths import Workspace
from hase.utils.timing import ErrorStatistics, Floats, error_statistics

COUNTED_SHARE = 0.02  # of the latency (or that times a logarithm), above which a source of error counts
HOST_BOUND = 0.9  # square of the share of the latency in which the host works, above which it counts as the slower track
ALL = "all"  # in column `of`: the models of all collections
MOST_KERNELS = 6000  # that a forest learns from, drawn at random from its class; nn-Meter samples about as many
SIZES = ("batch", "height", "width", "channels", "out_channels", "kernel_height", "stride", "log_flops", "log_weights")


def collection_masks(collections: Sequence[str]) -> dict[str, npt.NDArray[np.bool_]]:
    """Masks of the models for the rows of a table: all models, and those of each collection if there are several."""
    every = np.array(collections)
    names = sorted(set(collections)) if len(set(collections)) > 1 else []
    return {ALL: np.ones(len(every), dtype=bool)} | {name or "none": every == name for name in names}


def held_out_model_rows(method: str, predicted_ms: Floats, held_out: HeldOut) -> list[dict[str, Any]]:
    """The rows of one method of prediction in the table of models: over all models, and for each collection."""
    latency_ms = held_out.latency_ms
    return [_error_row(method, part, error_statistics(predicted_ms[mask].tolist(), latency_ms[mask].tolist()))
            for part, mask in collection_masks(held_out.collections).items()]


def _error_row(method: str, part: str, errors: ErrorStatistics) -> dict[str, Any]:
    return {"models by": method, "of": part, "models": errors.count, "MAPE_%": 100 * errors.mape,
            "median_%": 100 * errors.median, "within_5_%": 100 * errors.within_5, "within_10_%": 100 * errors.within_10,
            "worst_%": 100 * errors.worst}


def pipeline_rows(held_out: HeldOut) -> list[dict[str, Any]]:
    """The rows of Hase's own two tracks: all kernels predicted, shared ones looked up, and all as measured."""
    return [row for method, predicted_ms in (
        ("two tracks, all kernels predicted", held_out.predicted.usual_ms),
        ("two tracks, all kernels predicted, host's pace as measured", held_out.predicted.paced_ms),
        (f"two tracks, kernels that other {PLURAL[held_out.left_out]} share looked up", held_out.looked_up.usual_ms),
        ("two tracks, kernels as measured: the composition alone", held_out.as_measured.usual_ms),
        ("two tracks, kernels and host's pace as measured", held_out.as_measured.paced_ms),
    ) for row in held_out_model_rows(method, predicted_ms, held_out)]


def run_mode_rows(held_out: HeldOut) -> list[dict[str, Any]]:
    """The rows of models run with numpy arrays or as CUDA graphs, if any."""
    models, groups = held_out.models, held_out.groups
    costs = {"numpy in and out": fit_host_io(models, held_out.predicted.usual_ms, groups),
             "a CUDA graph": fit_graph_replay(models, held_out.strict_tracks, groups)}
    return [_error_row(f"two tracks, all kernels predicted; run with {mode}", ALL, fitted.left_out)
            for mode, fitted in costs.items() if fitted and fitted.left_out]


def line_rows(held_out: HeldOut, times: Mapping[str, TimesOfModels]) -> list[dict[str, Any]]:
    """Rows for each entry of `times`, of a line over the sum of a model's kernels, fitted without the model's group."""
    rows = []
    for source, times_of_models in times.items():
        sums_ms = np.array([sum(times_of_models[model.record.model][node.kernel_id] for node in model.record.nodes)
                            for model in held_out.models])
        rows += held_out_model_rows(f"α·Σ+β, {source}", leave_out(sums_ms, sums_ms, held_out.latency_ms, held_out.groups),
                                    held_out)
    return rows


def roofline_times(rows: TrainingSet, models: Sequence[MeasuredModel]) -> TimesOfModels:
    """Kernel times (ms) by model and kernel id from the roofline alone (two rates and a shortest time), fitted to all."""
    idle = rows.rows(rows.idle & np.isfinite(rows.times_ms[GPU_LABEL]))
    roofline = fit_roofline(idle.flops, idle.bytes_moved, idle.times_ms[GPU_LABEL])
    return {model.record.model: {
        name: float(roofline.bound_ms(np.array([kernel.flops]), np.array([kernel.bytes_read + kernel.bytes_written]))[0])
        if kernel.moves_data else 0.0 for name, kernel in model.record.kernels.items()} for model in models}


def model_table(held_out: HeldOut, config: TrainingConfig, forests: bool) -> list[dict[str, Any]]:
    """Errors of models, one row for each method of prediction and collection."""
    times = {"all kernels predicted": held_out.strict[GPU_LABEL], "kernels as measured": held_out.known[GPU_LABEL],
             "roofline of each kernel": roofline_times(held_out.rows, held_out.models)}
    table = pipeline_rows(held_out) + line_rows(held_out, times) + run_mode_rows(held_out)
    if forests:
        by_forests = nn_meter_times(held_out.rows, held_out.models, held_out.groups, held_out.left_out, config)
        table += line_rows(held_out, {"nn-Meter's forests, all kernels predicted": by_forests})
    return table


def kernel_table(held_out: HeldOut) -> list[dict[str, Any]]:
    """Errors of the GPU's time of kernels, over all models and for each collection if there are several."""
    table = []
    for part, mask in collection_masks(held_out.collections).items():
        names = {model.record.model for model, inside in zip(held_out.models, mask, strict=True) if inside}
        times = {name: times for name, times in held_out.strict[GPU_LABEL].items() if name in names}
        if errors := kernel_errors(times, held_out.measured, GPU_LABEL):
            table.append({"of": part} | errors)
    return table


CONDITIONS: dict[str, Callable[[Sources], bool]] = {  # groups of predictions by what they rest on
    "all kernels known": lambda sources: sources.unmeasured + sources.other_form + sources.beyond == 0.0,
    "operators never measured": lambda sources: sources.unmeasured > COUNTED_SHARE,
    "other forms than measured": lambda sources: sources.other_form > COUNTED_SHARE,
    "sizes beyond those measured": lambda sources: sources.beyond > COUNTED_SHARE,
    "the host is the slower track": lambda sources: sources.host > HOST_BOUND,
}


def interval_table(held_out: HeldOut) -> list[dict[str, Any]]:
    """How good 90 % intervals are that were calibrated on the other collections (or families): the share of latencies that they
    hold, their width (the median of upper over lower end, less one), and the mean `interval_score`. Over all models, for each
    collection, and for each of CONDITIONS; without models that run in part on the CPU provider."""
    predicted, measured = (held_out.cases(kernels) for kernels in ("predicted", "measured"))
    held_out_ends = intervals_held_out([*predicted, *measured])
    if not held_out_ends:
        return []
    table = []
    for kernels, cases, latencies, ends in (("predicted", predicted, held_out.predicted, held_out_ends[:len(predicted)]),
                                            ("as measured", measured, held_out.as_measured, held_out_ends[len(predicted):])):
        masks = collection_masks([case.collection for case in cases]) | {
            name: np.array([holds(case.sources) for case in cases]) for name, holds in CONDITIONS.items()}
        for pace in ("measured", "unknown"):
            usual_ms, paced_ms, fastest_ms, slowest_ms, _ = (at_pace[held_out.on_gpu] for at_pace in latencies)
            hosts = zip(fastest_ms, usual_ms, slowest_ms, strict=True)
            spans = ends if pace == "measured" else [for_any_host(end, *host) for end, host in zip(ends, hosts, strict=True)]
            ratios = held_out.latency_ms[held_out.on_gpu] / (paced_ms if pace == "measured" else usual_ms)
            inside = np.array([low <= ratio <= high for (low, high), ratio in zip(spans, ratios, strict=True)])
            width, score = np.array([high / low - 1.0 for low, high in spans]), interval_score(spans, ratios)
            for part, mask in masks.items():
                if mask.any():
                    table.append({"kernels": kernels, "host's pace": pace, "of": part, "models": int(mask.sum()),
                                  "held_%": 100 * float(inside[mask].mean()), "width_%": 100 * float(np.median(width[mask])),
                                  "score": float(score[mask].mean())})
    return table



def judge_targets(workspace: Workspace, args: argparse.Namespace, config: TrainingConfig, left_out: HeldOutKind) -> None:
    """Holds out each group of each target, and prints the errors: as tables, or as JSON if `args` says so."""
    def judge(target: str, show: targets.Show) -> dict[str, Any]:
        held_out = hold_out(workspace, target, config, left_out)
        models, kernels = model_table(held_out, config, not args.without_forests), kernel_table(held_out)
        show(models, f"{target}: whole models, each {left_out} held out in turn")
        show(kernels, f"{target}: the GPU's time of their kernels, each {left_out} held out")
        if intervals := interval_table(held_out):
            show(intervals, f"{target}: 90 % intervals, calibrated without the {left_out} that they are for")
        return {"models": models, "kernels": kernels[0], "kernels_of": kernels, "intervals": intervals}

    targets.for_each_target([args.target] if args.target else gpu_targets(workspace), judge, args.json)


FORESTS: dict[str, tuple[tuple[int, int, float], tuple[str, ...]]] = {  # class: (trees, depth, features per split), features
    "conv": ((550, 80, 5), SIZES),
    "dwconv": ((240, 40, 7), SIZES),
    "fc": ((330, 70, 4), ("m", "n", "k", "log_flops")),
    "pool": ((370, 50, 5), ("batch", "height", "width", "channels", "out_channels", "kernel_height", "stride")),
    "add": ((570, 50, 3), ("batch", "height", "width", "channels")),
    "concat": ((690, 100, 5), ("batch", "height", "width", "channels", "out_channels", "inputs")),
    "relu": ((190, 50, 2), ("batch", "height", "width", "channels")),
    "others": ((370, 50, 1.0), ("batch", "height", "width", "channels")),
}


def kernel_class(kernel_type: str, depthwise: bool) -> str:
    """The class of a kernel, which names one of FORESTS."""
    if kernel_type.startswith("Conv"):
        return "dwconv" if depthwise else "conv"
    if kernel_type in ("Gemm", "MatMul", "FusedMatMul"):
        return "fc"
    if "Pool" in kernel_type:
        return "pool"
    return {"Add": "add", "Concat": "concat", "Relu": "relu"}.get(kernel_type, "others")


def nn_meter_times(rows: TrainingSet, models: Sequence[MeasuredModel], groups: Sequence[str],
                   left_out: HeldOutKind, config: TrainingConfig) -> dict[str, dict[str, float]]:
    """For each model, the GPU times (ms) of its kernels by id, predicted by forests trained without the model's group."""
    rows = rows.rows(rows.idle & np.isfinite(rows.times_ms[GPU_LABEL]))
    depthwise = rows.schema.index("depthwise")
    classes = np.array([kernel_class(name, bool(flag)) for name, flag in zip(
        rows.types, rows.features[:, depthwise] > 0, strict=True)])

    def one_fold(fold: Fold) -> dict[str, dict[str, float]]:
        features = dict(zip(fold.kernels, rows.schema.matrix(fold.kernels.values()), strict=True))
        median = float(np.median(rows.times_ms[GPU_LABEL][fold.seen]))  # for classes that only the held-out models have
        times = {name: 0.0 if leaves_gpu_idle(kernel, GPU_LABEL) else median for name, kernel in fold.kernels.items()}
        generator = np.random.default_rng(config.seed)
        for name, ((trees, depth, split), feature_names) in FORESTS.items():
            columns = [rows.schema.index(feature) for feature in feature_names]
            kernel_ids = [kernel.id for kernel in fold.kernels.values() if times[kernel.id] and kernel_class(
                kernel.type, bool(features[kernel.id][depthwise])) == name]
            known = np.flatnonzero(fold.seen & (classes == name))
            if not kernel_ids or not len(known):
                continue
            drawn = generator.permutation(known)[:MOST_KERNELS]
            forest = sklearn.ensemble.RandomForestRegressor(
                n_estimators=trees, max_depth=depth, random_state=10, n_jobs=1,
                max_features=min(split, len(columns)) if isinstance(split, int) else split)
            forest.fit(rows.features[drawn][:, columns], rows.times_ms[GPU_LABEL][drawn])
            predicted_ms = forest.predict(np.array([features[kernel_id][columns] for kernel_id in kernel_ids]))
            times |= dict(zip(kernel_ids, predicted_ms.tolist(), strict=True))
        return by_model(fold, times)

    folds = folds_of(rows, models, groups, left_out, config.folds)
    return {name: times for part in parallel_map(one_fold, folds, config.workers) for name, times in part.items()}
