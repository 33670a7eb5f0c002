"""Errors of predictions for groups of models (families or collections) that were held out of everything.

Holds out each group in turn: its kernels, the shapes sampled near them, and its models in the fit of the composition. The same
split serves the baselines: a line over the sum of kernel times, the roofline, and nn-Meter's random forests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmark.records.labels import GPU_LABEL
from training.baselines import nn_meter
from training.composition.fit_pipeline import LeftOut, MeasuredTracks, can_fit, left_out_ms
from training.composition.fitting import leave_out
from training.composition.left_out import HeldOutKind, kernel_errors, owners_of, predict_out_of_fold
from training.composition.measured_models import (
    MeasuredModel,
    TimesOfModels,
    known_times,
    measured_models,
    tracks_of,
)
from training.composition.run_modes import fit_graph_replay, fit_host_io
from training.kernels.predictors import ON_GPU
from training.kernels.roofline import fit_roofline
from training.kernels.settings import TrainingConfig
from training.kernels.sidecar import read_sidecar
from training.kernels.targets import trained_targets
from training.kernels.training_set import TrainingSet, measured_times, read_training_set
from utils import cli
from utils.errors import UserError
from utils.paths import Workspace
from utils.timing import ErrorStatistics, error_statistics

Floats = npt.NDArray[np.float64]
ALL = "all"  # in column `of`: the models of all collections
PLURAL = {"family": "families", "collection": "collections"}


@dataclass(frozen=True)
class HeldOut:
    """Predictions of a target's measured models, each made without the model's group.

    Attributes:
        left_out: what a group is.
        models: the measured models.
        groups: the group of each, held out together.
        rows: of the training set.
        measured: measured times by kernel id and label.
        strict, known: times by label, model and kernel id: all predicted; and as measured where they were.
        strict_tracks: the tracks of each model from `strict`.
        predicted, looked_up, as_measured: latencies (ms): all kernels predicted; those that other groups share looked up; all
            as measured.
    """

    left_out: HeldOutKind
    models: list[MeasuredModel]
    groups: list[str]
    rows: TrainingSet
    measured: dict[str, dict[str, float]]
    strict: dict[str, dict[str, dict[str, float]]]
    known: dict[str, TimesOfModels]
    strict_tracks: list[MeasuredTracks]
    predicted: LeftOut
    looked_up: LeftOut
    as_measured: LeftOut

    @property
    def latency_ms(self) -> Floats:
        """The measured latency of each model."""
        return np.array([model.latency_ms for model in self.models])

    @property
    def collections(self) -> list[str]:
        """The collection of each model."""
        return [model.collection for model in self.models]


def gpu_targets(workspace: Workspace) -> list[str]:
    """The targets whose predictors have label `gpu`.

    Raises:
        UserError: there is none.
    """
    names = [name for name in trained_targets(workspace) if set(ON_GPU) <= set(read_sidecar(workspace.predictors(name)).labels)]
    if not names:
        raise UserError(f"{workspace.predictors('')}: no target has label gpu; the others are judged by "
                        "python training/fit_composition.py")
    return names


def hold_out(workspace: Workspace, target: str, config: TrainingConfig, left_out: HeldOutKind) -> HeldOut:
    """Holds out each group of a GPU target in turn, several in a fold where there are more than `config.folds`.

    Raises:
        UserError: no dataset or predictors, only one group, or none of what a GPU's two tracks need.
    """
    sidecar = read_sidecar(workspace.predictors(target))
    rows = read_training_set(workspace, target)
    models = measured_models(workspace, target, sidecar)
    groups = [model.group if left_out == "family" else model.collection for model in models]
    if len(set(groups)) < 2 or not set(ON_GPU) <= set(sidecar.labels):
        raise UserError(f"{target}: needs models of two {PLURAL[left_out]} at least, and kernels with label {GPU_LABEL}")
    measured = measured_times(workspace, target)
    strict = {label: predict_out_of_fold(rows, models, groups, left_out, label, sidecar.labels[label].own_types, config)
              for label in cli.progress(ON_GPU, f"leaving {PLURAL[left_out]} out")}
    shared = {label: shared_times(strict[label], rows, label, models, groups, left_out) for label in ON_GPU}
    strict_tracks, known = tracks_of(models, strict), known_times(strict, measured)
    if not can_fit(strict_tracks):
        raise UserError(f"{target}: too few models with the host's time; measure more (label {GPU_LABEL})")
    predicted, looked_up, as_measured = (left_out_ms(tracks, groups) for tracks in (
        strict_tracks, tracks_of(models, shared), tracks_of(models, known)))
    return HeldOut(left_out, models, groups, rows, measured, strict, known, strict_tracks, predicted, looked_up, as_measured)


def shared_times(out_of_fold: TimesOfModels, rows: TrainingSet, label: str, models: Sequence[MeasuredModel],
                 groups: Sequence[str], left_out: HeldOutKind) -> dict[str, dict[str, float]]:
    """The out-of-fold times by model and kernel id, where kernels that another group has too, or that were sampled near no
    model, have their measured times."""
    times = {str(name): (float(time), owners) for name, time, owners, idle in zip(
        rows.ids, rows.times_ms[label], owners_of(rows, left_out), rows.idle, strict=True) if idle and np.isfinite(time)}
    found: dict[str, dict[str, float]] = {}
    for model, group in zip(models, groups, strict=True):
        name = model.record.model
        found[name] = {
            kernel: times[kernel][0] if time and kernel in times and times[kernel][1] != {group} else time
            for kernel, time in out_of_fold[name].items()}
    return found


def parts_of(collections: Sequence[str]) -> dict[str, npt.NDArray[np.bool_]]:
    """Masks of the models that a table has rows for: all, and those of each collection where there are several."""
    every = np.array(collections)
    names = sorted(set(collections)) if len(set(collections)) > 1 else []
    return {ALL: np.ones(len(every), dtype=bool)} | {name or "none": every == name for name in names}


def model_rows(what: str, predicted_ms: Floats, held_out: HeldOut) -> list[dict[str, Any]]:
    """Rows of the table of models, over all and for each collection; `what` says how they were predicted."""
    latency_ms = held_out.latency_ms
    return [row(what, part, error_statistics(predicted_ms[mask].tolist(), latency_ms[mask].tolist()))
            for part, mask in parts_of(held_out.collections).items()]


def row(what: str, part: str, found: ErrorStatistics) -> dict[str, Any]:
    """Errors of models as one row of the table, in per cent."""
    return {"models by": what, "of": part, "models": found.count, "MAPE_%": 100 * found.mape, "median_%": 100 * found.median,
            "within_5_%": 100 * found.within_5, "within_10_%": 100 * found.within_10, "worst_%": 100 * found.worst}


def pipeline_rows(held_out: HeldOut) -> list[dict[str, Any]]:
    """The rows of the two tracks: all kernels predicted, shared ones looked up, and all as measured."""
    others = PLURAL[held_out.left_out]
    return [found for what, predicted_ms in (
        ("two tracks, all kernels predicted", held_out.predicted.usual_ms),
        ("two tracks, all kernels predicted, host's pace as measured", held_out.predicted.paced_ms),
        (f"two tracks, kernels that other {others} share looked up", held_out.looked_up.usual_ms),
        ("two tracks, kernels as measured: the composition alone", held_out.as_measured.usual_ms),
        ("two tracks, kernels and host's pace as measured", held_out.as_measured.paced_ms),
    ) for found in model_rows(what, predicted_ms, held_out)]


def run_mode_rows(held_out: HeldOut) -> list[dict[str, Any]]:
    """The rows of models that were run with numpy arrays or as CUDA graphs; empty where there are none."""
    models, groups = held_out.models, held_out.groups
    fitted = {"numpy in and out": fit_host_io(models, held_out.predicted.usual_ms, groups),
              "a CUDA graph": fit_graph_replay(models, held_out.strict_tracks, groups)}
    return [row(f"two tracks, all kernels predicted; run with {what}", ALL, found.left_out)
            for what, found in fitted.items() if found and found.left_out]


def line_rows(held_out: HeldOut, times: Mapping[str, TimesOfModels]) -> list[dict[str, Any]]:
    """Rows for each entry of `times`, of a line over the sum of a model's kernels, fitted without the model's group."""
    def sums_ms(of_models: TimesOfModels) -> Floats:
        return np.array([sum(of_models[model.record.model][node.kernel_id] for node in model.record.nodes)
                         for model in held_out.models])

    return [found for what, of_models in times.items() for found in model_rows(
        f"α·Σ+β, {what}", leave_out(sums_ms(of_models), held_out.latency_ms, held_out.groups), held_out)]


def roofline_times(rows: TrainingSet, models: Sequence[MeasuredModel]) -> TimesOfModels:
    """Kernel times (ms) by model and kernel id from the roofline alone: two rates and a floor, fitted to all kernels."""
    idle = rows.rows(rows.idle & np.isfinite(rows.times_ms[GPU_LABEL]))
    roofline = fit_roofline(idle.flops, idle.bytes_moved, idle.times_ms[GPU_LABEL])
    return {model.record.model: {
        name: float(roofline.bound_ms(np.array([kernel.flops]), np.array([kernel.bytes_read + kernel.bytes_written]))[0])
        if kernel.moves_data else 0.0 for name, kernel in model.record.kernels.items()} for model in models}


def model_table(held_out: HeldOut, config: TrainingConfig, forests: bool) -> list[dict[str, Any]]:
    """Errors of models, one row for each way of predicting, and one for each collection where there are several."""
    over = {"all kernels predicted": held_out.strict[GPU_LABEL], "kernels as measured": held_out.known[GPU_LABEL],
            "roofline of each kernel": roofline_times(held_out.rows, held_out.models)}
    table = pipeline_rows(held_out) + line_rows(held_out, over) + run_mode_rows(held_out)
    if forests:
        guessed = nn_meter.predict_out_of_fold(held_out.rows, held_out.models, held_out.groups, held_out.left_out, config)
        table += line_rows(held_out, {"nn-Meter's forests, all kernels predicted": guessed})
    return table


def kernel_table(held_out: HeldOut) -> list[dict[str, Any]]:
    """Errors of the GPU's time of kernels, over all models and for each collection where there are several."""
    table = []
    for part, mask in parts_of(held_out.collections).items():
        names = {model.record.model for model, inside in zip(held_out.models, mask, strict=True) if inside}
        times = {name: times for name, times in held_out.strict[GPU_LABEL].items() if name in names}
        if found := kernel_errors(times, held_out.measured, GPU_LABEL):
            table.append({"of": part} | found)
    return table
