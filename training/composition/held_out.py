"""Holds models out of all training, and predicts their latencies and the times of their kernels.

A group of models is a family or a collection. Predictors and a GPU's two tracks are fitted without it; then its kernels and
models are predicted, and the novelty of its kernels is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from hase.learned.composition.intervals import KNOWN, CalibratedInterval, Novelty, Sources, sources
from hase.learned.kernels.estimators import predict_kernels
from hase.learned.kernels.features import times_beyond
from hase.learned.kernels.interface import TimePredictor, TrainingConfig, TrainingSet
from hase.learned.kernels.measured import measured_times
from hase.learned.kernels.predictors import ON_GPU, Predictors, corrected_prediction, read_predictors
from hase.learned.kernels.sidecar import read_sidecar
from hase.learned.kernels.uncertainty import Uncertainty
from hase.records.measurement import GPU_LABEL
from hase.training.composition.calibration import HeldOutCase, calibrate
from hase.training.composition.formulas import HeldOutLatencies, can_fit, left_out_ms
from hase.training.composition.measured_models import (
    MeasuredModel,
    MeasuredTracks,
    TimesOfModels,
    known_times,
    measured_models,
    tracks_of,
)
from hase.training.kernels.fitting import correction_trainer, fit_kernel_model, parallel_map
from hase.training.kernels.targets import trained_targets
from hase.training.kernels.training_set import read_training_set
from hase.utils.errors import UserError
from hase.utils.logger import get_logger, progress
from hase.utils.paths import Workspace
from hase.utils.timing import Floats, time_weighted_error

if TYPE_CHECKING:
    from hase.records.kernel_record import Kernel

log = get_logger("composition")
NO_DOUBTS: Mapping[str, float] = {}
HeldOutKind = Literal["family", "collection", "model", "nothing"]  # groups of models that are held out together
LEAST_KERNELS = 20  # to learn from when a group is held out; predictions from fewer are meaningless
PLURAL = {"family": "families", "collection": "collections"}


@dataclass(frozen=True)
class Fold:
    """Groups of models that are held out together; `seen` is a mask of the training set's rows that may be learned from."""

    groups: frozenset[str]
    models: tuple[MeasuredModel, ...]
    kernels: dict[str, Kernel]
    seen: npt.NDArray[np.bool_]


def owners_of(rows: TrainingSet, left_out: HeldOutKind) -> tuple[frozenset[str], ...]:
    """The groups of each row, which is held out with any of them; empty for single models (their kernels go by id)."""
    return {"family": rows.groups, "collection": rows.collections}.get(left_out, (frozenset(),) * len(rows))


def folds_of(rows: TrainingSet, models: Sequence[MeasuredModel], groups: Sequence[str], left_out: HeldOutKind,
             most: int) -> list[Fold]:
    """At most `most` folds in which every group is held out once; with more groups, several share a fold. Kernels sampled near
    the shapes of a held-out family or collection are held out with it."""
    names, owners = sorted(set(groups)), owners_of(rows, left_out)
    folds = []
    for fold in range(min(most, len(names))):
        held_out = frozenset(name for index, name in enumerate(names) if index % most == fold)
        fold_models = tuple(model for model, group in zip(models, groups, strict=True) if group in held_out)
        kernels = {kernel.id: kernel for model in fold_models for kernel in model.record.kernels.values()}
        seen = ~np.isin(rows.ids, list(kernels))
        seen &= np.array([not (row_groups & held_out) for row_groups in owners], dtype=bool)
        folds.append(Fold(held_out, fold_models, kernels, seen))
    return folds


def by_model(fold: Fold, times_ms: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The times of a fold's kernels (by id) for each of its models."""
    return {model.record.model: {name: times_ms[name] for name in model.record.kernels} for model in fold.models}


def predict_out_of_fold(rows: TrainingSet, models: Sequence[MeasuredModel], groups: Sequence[str], left_out: HeldOutKind,
                        label: str, chosen: Mapping[str, str], config: TrainingConfig,
                        learn: Callable[[TrainingSet], TimePredictor] | None = None) -> dict[str, dict[str, float]]:
    """For each model, the idle times (ms) of its kernels by id, predicted by a training without them (see `folds_of`). `learn`
    replaces Hase's own training, and takes the rows to learn from."""
    rows = rows.rows(np.isfinite(rows.times_ms[label]))
    idle_load = list(rows.idle_load.values())

    def one_fold(fold: Fold) -> dict[str, dict[str, float]]:
        seen = fold.seen
        if len(set(rows.ids[seen])) < LEAST_KERNELS:
            log.warning("%s: too few kernels are left to learn from without %s, so its kernels stay in the training, and the "
                        "errors below are too optimistic", label, ", ".join(sorted(fold.groups)))
            seen = np.ones(len(rows), dtype=bool)
        fitted: TimePredictor = (
            learn(rows.rows(seen)) if learn else fit_kernel_model(rows.rows(seen), label, chosen, config))
        kernels = list(fold.kernels.values())
        times = predict_kernels(fitted, kernels, rows.schema.matrix(kernels), idle_load)
        return by_model(fold, {kernel.id: corrected_prediction(kernel, label, float(time))
                               for kernel, time in zip(kernels, times, strict=True)})

    folds = folds_of(rows, models, groups, left_out, config.folds)
    return {name: times for part in parallel_map(one_fold, folds, config.workers) for name, times in part.items()}


def predict_as_learned(predictors: Predictors, labels: Sequence[str], rows: TrainingSet, models: Sequence[MeasuredModel],
                       groups: Sequence[str], left_out: HeldOutKind, config: TrainingConfig,
                       doing: str) -> dict[str, dict[str, dict[str, float]]]:
    """`predict_out_of_fold` for some labels, learned as a target's predictors were; times by label, model and id. Kernel types
    have the same predictors, and corrections of another target are also learned without the group."""
    times = {}
    for label in progress(labels, doing):
        chosen = predictors.sidecar.labels[label].chosen
        learn = correction_trainer(predictors.kernel_model(label), label, chosen, config)
        times[label] = predict_out_of_fold(rows, models, groups, left_out, label, chosen, config, learn)
    return times


def kernel_errors(out_of_fold: TimesOfModels, measured: Mapping[str, Mapping[str, float]], label: str) -> dict[str, float]:
    """Errors of all models' kernels, in per cent; each kernel counts once per group. Empty if none was measured."""
    pairs = {(kernel, round(time, 9)): (time, measured[kernel][label]) for times in out_of_fold.values()
             for kernel, time in times.items() if time and label in measured.get(kernel, {})}
    if not pairs:
        return {}
    predicted, times = np.array(list(pairs.values())).T
    errors = np.abs(predicted / times - 1)
    return {"MAPE_%": 100 * float(errors.mean()), "median_%": 100 * float(np.median(errors)),
            "time_weighted_MAPE_%": 100 * time_weighted_error(predicted, times), "kernels": len(pairs)}


def novelties_of(fold: Fold, rows: TrainingSet, label: str, doubts: Mapping[str, float] = NO_DOUBTS) -> dict[str, Novelty]:
    """How a fold's kernels differ from those in training, by id, without those that don't; `doubts` are by kernel id."""
    seen = fold.seen & np.isfinite(rows.times_ms[label])
    types = set(rows.types[seen].tolist())
    pairs = set(zip(rows.types[seen].tolist(), rows.forms[seen].tolist(), strict=True))
    forms: dict[str, tuple[str, ...]] = {}
    for name, form in pairs:
        forms[name] = (*forms.get(name, ()), form)
    known = Uncertainty(dataset_sha256="", ranges={}, forms=forms)
    features = rows.features[seen]
    moving = [kernel for kernel in fold.kernels.values() if kernel.moves_data]
    if not moving:
        return {}
    beyond = times_beyond(rows.schema, rows.schema.matrix(moving), features.min(axis=0), features.max(axis=0))
    novelties = {kernel.id: Novelty("beyond", float(times)) if times > 1.0 else KNOWN
                 for kernel, times in zip(moving, beyond, strict=True)}
    for kernel in moving:
        if kernel.type not in types:
            novelties[kernel.id] = Novelty("unmeasured")
        elif not known.knows_form(kernel):
            novelties[kernel.id] = Novelty("other form")
    doubted = {name: novelty._replace(doubt=doubts.get(name, 0.0)) for name, novelty in novelties.items()}
    return {name: novelty for name, novelty in doubted.items() if novelty != KNOWN}


def sources_of_model(times_ms: Sequence[tuple[Kernel, float]], novelties: Mapping[str, Novelty], measured: Iterable[str],
                     latency_ms: float, host_work_ms: float) -> Sources:
    """`sources` of a held-out model: each kernel's GPU time for all its runs, and the ids of those with a measured time."""
    looked_up = set(measured)
    return sources(((kernel.id, time_ms, None if kernel.id in looked_up or not time_ms else novelties.get(kernel.id, KNOWN))
                    for kernel, time_ms in times_ms), latency_ms, host_work_ms)


@dataclass(frozen=True)
class HeldOut:
    """Predictions of a target's measured models, each made without the model's group. `measured` are times by kernel id and
    label, `strict` predicted ones by label, model and kernel id, `doubts` logarithms by kernel id (empty if not learned)."""

    left_out: HeldOutKind
    models: Sequence[MeasuredModel]
    groups: Sequence[str]
    rows: TrainingSet
    folds: Sequence[Fold]
    measured: Mapping[str, Mapping[str, float]]
    strict: Mapping[str, TimesOfModels]
    doubts: Mapping[str, float] = field(default_factory=dict)

    @property
    def latency_ms(self) -> Floats:
        """The measured latency of each model."""
        return np.array([model.latency_ms for model in self.models])

    @property
    def collections(self) -> list[str]:
        """The collection of each model."""
        return [model.collection for model in self.models]

    @cached_property
    def known(self) -> dict[str, TimesOfModels]:
        """Measured times if available, else those of `strict`."""
        return known_times(self.strict, self.measured)

    @cached_property
    def strict_tracks(self) -> list[MeasuredTracks]:
        """The tracks of each model from `strict`."""
        return tracks_of(self.models, self.strict)

    @cached_property
    def predicted(self) -> HeldOutLatencies:
        """Latencies with all kernels predicted."""
        return left_out_ms(self.strict_tracks, self.groups)

    @cached_property
    def looked_up(self) -> HeldOutLatencies:
        """Latencies with measured times of kernels that other groups share."""
        shared = {label: shared_times(times, self.rows, label, self.models, self.groups, self.left_out)
                  for label, times in self.strict.items()}
        return left_out_ms(tracks_of(self.models, shared), self.groups)

    @cached_property
    def as_measured(self) -> HeldOutLatencies:
        """Latencies with all kernels measured."""
        return left_out_ms(tracks_of(self.models, self.known), self.groups)

    @cached_property
    def on_gpu(self) -> npt.NDArray[np.bool_]:
        """A mask of the models whose kernels all run on the GPU. The CPU provider's kernels have error ranges of their own,
        which are joined with an interval when a model is predicted."""
        return np.array([model.off_gpu is None or not model.off_gpu.run.host_ms[model.off_gpu.off].any()
                         for model in self.models])

    @cached_property
    def novelties(self) -> dict[str, dict[str, Novelty]]:
        """How kernels differ from those in a training without the group, by group."""
        by_fold = [(fold.groups, novelties_of(fold, self.rows, GPU_LABEL, self.doubts)) for fold in self.folds]
        return {group: fold_novelties for groups, fold_novelties in by_fold for group in groups}

    def cases(self, kernels: Literal["predicted", "measured"]) -> list[HeldOutCase]:
        """The error of each model of `on_gpu` at its host's measured pace, and the sources of that error."""
        latencies, times = (self.predicted, self.strict) if kernels == "predicted" else (self.as_measured, self.known)
        cases = []
        for model, group, paced_ms, host_work_ms, on_gpu in zip(
                self.models, self.groups, latencies.paced_ms, latencies.host_work_ms, self.on_gpu, strict=True):
            if not on_gpu:
                continue
            gpu_ms = times[GPU_LABEL][model.record.model]
            off_gpu = [False] * len(model.record.nodes) if model.off_gpu is None else model.off_gpu.off.tolist()
            nodes = [(kernel, node.runs * gpu_ms[kernel.id]) for node, off in zip(model.record.nodes, off_gpu, strict=True)
                     for kernel in [model.record.kernel_of(node)] if not off]
            known = {name for name in gpu_ms if GPU_LABEL in self.measured.get(name, {})} if kernels == "measured" else set()
            model_sources = sources_of_model(nodes, self.novelties[group], known, paced_ms, host_work_ms)
            cases.append(HeldOutCase(model.collection, model.group, model_sources, math.log(model.latency_ms / paced_ms)))
        return cases


def gpu_targets(workspace: Workspace) -> list[str]:
    """The targets whose predictors have label `gpu`."""
    names = [name for name in trained_targets(workspace) if set(ON_GPU) <= set(read_sidecar(workspace.predictors(name)).labels)]
    if not names:
        raise UserError(f"{workspace.predictors('')}: no target has label gpu; the others are judged by "
                        "python training/fit_composition.py")
    return names


def hold_out(workspace: Workspace, target: str, config: TrainingConfig, left_out: HeldOutKind) -> HeldOut:
    """Holds out each group of a GPU target in turn, in at most `config.folds` folds."""
    predictors = read_predictors(workspace.predictors(target))
    rows = read_training_set(workspace, target)
    models = measured_models(workspace, target, predictors.sidecar)
    if len(set(groups_of(models, left_out))) < 2 or not set(ON_GPU) <= set(predictors.labels):
        raise UserError(f"{target}: needs models of two {PLURAL[left_out]} at least, and kernels with label {GPU_LABEL}")
    held_out = held_out_of(rows, models, measured_times(workspace, target), predictors, config, left_out)
    if not can_fit(held_out.strict_tracks):
        raise UserError(f"{target}: too few models with the host's time; measure more (label {GPU_LABEL})")
    return held_out


def groups_of(models: Sequence[MeasuredModel], left_out: HeldOutKind) -> list[str]:
    """The family or the collection of each model."""
    return [model.group if left_out == "family" else model.collection for model in models]


def held_out_of(rows: TrainingSet, models: Sequence[MeasuredModel], measured: Mapping[str, Mapping[str, float]],
                predictors: Predictors, config: TrainingConfig, left_out: HeldOutKind) -> HeldOut:
    """`hold_out` for data that have been read already."""
    groups = groups_of(models, left_out)
    strict = predict_as_learned(predictors, ON_GPU, rows, models, groups, left_out, config, f"leaving {PLURAL[left_out]} out")
    return HeldOut(left_out, models, groups, rows, folds_of(rows, models, groups, left_out, config.folds), measured, strict,
                   doubts_of(models, predictors))


def doubts_of(models: Iterable[MeasuredModel], predictors: Predictors) -> dict[str, float]:
    """The doubts of all kernels of models, by id. Doubts are learned from errors of kernels held out alone, so those of a
    held-out model are among them."""
    return predictors.doubts(list({kernel.id: kernel for model in models for kernel in model.record.kernels.values()}.values()))


def calibrated_interval(rows: TrainingSet, models: Sequence[MeasuredModel], by_family: Mapping[str, TimesOfModels],
                        measured: Mapping[str, Mapping[str, float]], predictors: Predictors,
                        config: TrainingConfig) -> CalibratedInterval | None:
    """The prediction interval from errors of models with their collection held out of everything; None if there are too few. If
    all are of one collection, families are held out. `by_family` has predicted times by label, model and kernel id with
    families held out, `measured` measured times by kernel id and label."""
    if len({model.collection for model in models}) > 1:
        held_out = held_out_of(rows, models, measured, predictors, config, "collection")
    else:
        groups = groups_of(models, "family")
        held_out = HeldOut("family", models, groups, rows, folds_of(rows, models, groups, "family", config.folds), measured,
                           {label: by_family[label] for label in ON_GPU}, doubts_of(models, predictors))
    return calibrate([*held_out.cases("predicted"), *held_out.cases("measured")])


def shared_times(out_of_fold: TimesOfModels, rows: TrainingSet, label: str, models: Sequence[MeasuredModel],
                 groups: Sequence[str], left_out: HeldOutKind) -> dict[str, dict[str, float]]:
    """The out-of-fold times by model and kernel id, or measured times of kernels that are not the group's alone. Those are
    kernels that another group has, or that were sampled near no model."""
    times = {str(name): (float(time), owners) for name, time, owners, idle in zip(
        rows.ids, rows.times_ms[label], owners_of(rows, left_out), rows.idle, strict=True) if idle and np.isfinite(time)}
    shared: dict[str, dict[str, float]] = {}
    for model, group in zip(models, groups, strict=True):
        name = model.record.model
        shared[name] = {
            kernel: times[kernel][0] if time and kernel in times and times[kernel][1] != {group} else time
            for kernel, time in out_of_fold[name].items()}
    return shared
