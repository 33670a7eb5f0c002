"""The compositions that are tried for a target: a line for each label and kind of sum, and a GPU's two tracks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graph_model.dag.dag import build_dag, calculate_latency
from records.kernel_record import ModelRecord
from training.composition.fit_pipeline import MeasuredTracks, can_fit, fit_pipeline_candidate
from training.composition.fitted import KINDS, Candidate, working_nodes
from training.composition.fitting import fit_candidate
from training.composition.measured_models import MeasuredModel, TimesOfModels, known_times, tracks_of
from training.kernels.settings import LAUNCHES

Floats = npt.NDArray[np.float64]


class Tried(NamedTuple):
    """A candidate, and the latency (ms) that it predicts for each model of the fit.

    Attributes:
        predicted_ms: with kernels predicted, and the constants fitted without the model's group (if groups are held out).
        known_ms: the same with kernels as measured; only of kind `pipeline`.
    """

    candidate: Candidate
    predicted_ms: Floats
    known_ms: Floats | None = None


def compose(record: ModelRecord, times_ms: Mapping[str, float]) -> dict[str, float]:
    """Σ and longest path (ms) of a model whose kernels take `times_ms` by id."""
    dag = build_dag(record)
    by_node = {node.name: times_ms[node.kernel_id] for node in record.nodes}
    return {kind: calculate_latency(dag, by_node, "critical_path" if kind == "critical_path" else "sum") for kind in KINDS}


def try_lines(models: Sequence[MeasuredModel], times: Mapping[str, TimesOfModels], groups: Sequence[str] | None) -> list[Tried]:
    """A line for each label and kind of sum.

    Args:
        models: of the fit.
        times: of their kernels, by label, model and kernel id.
        groups: of each model, held out together; None: nothing is held out.
    """
    measured = np.array([model.latency_ms for model in models])
    nodes = np.array([working_nodes(model.record) for model in models], dtype=float)
    tried = []
    for label, of_models in times.items():
        if label == LAUNCHES:
            continue
        composed = [compose(model.record, of_models[model.record.model]) for model in models]
        for kind in KINDS:
            bases = np.array([sums[kind] for sums in composed])
            tried.append(Tried(*fit_candidate(label, kind, bases, measured, nodes, groups)))
    return tried


def try_pipeline(models: Sequence[MeasuredModel], tracks: Sequence[MeasuredTracks], times: Mapping[str, TimesOfModels],
                 measured: TimesOfModels, groups: Sequence[str]) -> list[Tried]:
    """A GPU's two tracks as a candidate; empty where both are known of too few models.

    Args:
        models: of the fit.
        tracks: of each model, with kernels predicted without the model's group.
        times: the times behind `tracks`, by label, model and kernel id.
        measured: measured times by kernel id and label.
        groups: of each model, held out together.
    """
    if not can_fit(tracks):
        return []
    return [Tried(*fit_pipeline_candidate(tracks, tracks_of(models, known_times(times, measured)), groups))]
