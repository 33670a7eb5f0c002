"""Predictions of a GPU target's measured models, each made without the model's group: a family or a collection."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from records.labels import GPU_LABEL
from training.composition.error_sources import Stranger
from training.composition.fit_pipeline import LeftOut, MeasuredTracks, can_fit, left_out_ms
from training.composition.intervals import CalibratedInterval, Case, calibrate
from training.composition.left_out import Fold, HeldOutKind, folds_of, owners_of, predict_as_learned
from training.composition.measured_models import (
    MeasuredModel,
    TimesOfModels,
    known_times,
    measured_models,
    tracks_of,
)
from training.composition.strangers import sources_of_model, strangers
from training.kernels.predictors import ON_GPU, Predictors, read_predictors
from training.kernels.settings import TrainingConfig
from training.kernels.sidecar import read_sidecar
from training.kernels.targets import trained_targets
from training.kernels.training_set import TrainingSet, measured_times, read_training_set
from utils.errors import UserError
from utils.paths import Workspace

Floats = npt.NDArray[np.float64]
PLURAL = {"family": "families", "collection": "collections"}


@dataclass(frozen=True)
class HeldOut:
    """Predictions of a target's measured models, each made without the model's group.

    Attributes:
        left_out: what a group is.
        models: the measured models.
        groups: the group of each, held out together.
        rows: of the training set.
        folds: the groups that are held out together, and what is learned from meanwhile.
        measured: measured times by kernel id and label.
        strict: times by label, model and kernel id, all predicted.
    """

    left_out: HeldOutKind
    models: Sequence[MeasuredModel]
    groups: Sequence[str]
    rows: TrainingSet
    folds: Sequence[Fold]
    measured: Mapping[str, Mapping[str, float]]
    strict: Mapping[str, TimesOfModels]

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
        """As `strict`, but as measured where they were."""
        return known_times(self.strict, self.measured)

    @cached_property
    def strict_tracks(self) -> list[MeasuredTracks]:
        """The tracks of each model from `strict`."""
        return tracks_of(self.models, self.strict)

    @cached_property
    def predicted(self) -> LeftOut:
        """Latencies with all kernels predicted."""
        return left_out_ms(self.strict_tracks, self.groups)

    @cached_property
    def looked_up(self) -> LeftOut:
        """Latencies where kernels that other groups share have their measured times."""
        shared = {label: shared_times(times, self.rows, label, self.models, self.groups, self.left_out)
                  for label, times in self.strict.items()}
        return left_out_ms(tracks_of(self.models, shared), self.groups)

    @cached_property
    def as_measured(self) -> LeftOut:
        """Latencies with all kernels as measured."""
        return left_out_ms(tracks_of(self.models, self.known), self.groups)

    @cached_property
    def on_gpu(self) -> npt.NDArray[np.bool_]:
        """The models of which the CPU provider runs nothing that takes time: what it runs has ranges of error of its own, which
        are joined with an interval when a model is predicted."""
        return np.array([model.off_gpu is None or not model.off_gpu.run.host_ms[model.off_gpu.off].any()
                         for model in self.models])

    @cached_property
    def differs(self) -> dict[str, dict[str, Stranger]]:
        """How kernels differ from those that were learned from without a group, by group."""
        found = [(fold.groups, strangers(fold, self.rows, GPU_LABEL)) for fold in self.folds]
        return {group: of_fold for groups, of_fold in found for group in groups}

    def cases(self, kernels: Literal["predicted", "measured"]) -> list[Case]:
        """The error of each model of `on_gpu` at the measured pace of its host, and what it may come from."""
        found, times = (self.predicted, self.strict) if kernels == "predicted" else (self.as_measured, self.known)
        cases = []
        for model, group, paced_ms, judged in zip(self.models, self.groups, found.paced_ms, self.on_gpu, strict=True):
            if not judged:
                continue
            gpu_ms = times[GPU_LABEL][model.record.model]
            off = [False] * len(model.record.nodes) if model.off_gpu is None else model.off_gpu.off.tolist()
            nodes = [(kernel, node.runs * gpu_ms[kernel.id]) for node, out in zip(model.record.nodes, off, strict=True)
                     for kernel in [model.record.kernel_of(node)] if not out]
            taken = {name for name in gpu_ms if GPU_LABEL in self.measured.get(name, {})} if kernels == "measured" else set()
            cases.append(Case(model.collection, model.group, sources_of_model(nodes, self.differs[group], taken, paced_ms),
                              math.log(model.latency_ms / paced_ms)))
        return cases


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
    predictors = read_predictors(workspace.predictors(target))
    rows = read_training_set(workspace, target)
    models = measured_models(workspace, target, predictors.sidecar)
    if len(set(groups_of(models, left_out))) < 2 or not set(ON_GPU) <= set(predictors.labels):
        raise UserError(f"{target}: needs models of two {PLURAL[left_out]} at least, and kernels with label {GPU_LABEL}")
    found = held_out_of(rows, models, measured_times(workspace, target), predictors, config, left_out)
    if not can_fit(found.strict_tracks):
        raise UserError(f"{target}: too few models with the host's time; measure more (label {GPU_LABEL})")
    return found


def groups_of(models: Sequence[MeasuredModel], left_out: HeldOutKind) -> list[str]:
    """The family or the collection of each model."""
    return [model.group if left_out == "family" else model.collection for model in models]


def held_out_of(rows: TrainingSet, models: Sequence[MeasuredModel], measured: Mapping[str, Mapping[str, float]],
                predictors: Predictors, config: TrainingConfig, left_out: HeldOutKind) -> HeldOut:
    """`hold_out` for what has been read already."""
    groups = groups_of(models, left_out)
    strict = predict_as_learned(predictors, ON_GPU, rows, models, groups, left_out, config, f"leaving {PLURAL[left_out]} out")
    return HeldOut(left_out, models, groups, rows, folds_of(rows, models, groups, left_out, config.folds), measured, strict)


def calibrated_interval(rows: TrainingSet, models: Sequence[MeasuredModel], by_family: Mapping[str, TimesOfModels],
                        measured: Mapping[str, Mapping[str, float]], predictors: Predictors,
                        config: TrainingConfig) -> CalibratedInterval | None:
    """The prediction interval that follows from the errors of models whose collection was held out of everything; their family,
    where all are of one collection. None where there are too few.

    Args:
        by_family: predicted times by label, model and kernel id, families held out.
        measured: measured times by kernel id and label.
    """
    if len({model.collection for model in models}) > 1:
        held_out = held_out_of(rows, models, measured, predictors, config, "collection")
    else:
        groups = groups_of(models, "family")
        held_out = HeldOut("family", models, groups, rows, folds_of(rows, models, groups, "family", config.folds), measured,
                           {label: by_family[label] for label in ON_GPU})
    return calibrate([*held_out.cases("predicted"), *held_out.cases("measured")])


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
