"""The compositions that are tried for a target, and which of them is used.

Tried are a line for each label and kind of sum, and a GPU's two tracks. Used is the simplest one that is possible, unless a
richer one is clearly better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graph_model.dag.dag import build_dag, calculate_latency
from records.kernel_record import ModelRecord
from training.composition.fit_pipeline import MeasuredTracks, can_fit, fit_pipeline_candidate
from training.composition.fitted import KINDS, Candidate, Kind, working_nodes
from training.composition.fitting import fit_candidate
from training.composition.measured_models import MeasuredModel, TimesOfModels, known_times, tracks_of
from training.kernels.settings import LAUNCHES
from utils.errors import UserError

SIMPLEST_FIRST: tuple[Kind, ...] = ("sum", "critical_path", "sum_nodes", "pipeline")
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


def choose(tried: Sequence[Tried], measured_ms: Floats, groups: Sequence[str] | None, overlap: bool,
           forced: Kind | None = None) -> Tried:
    """The candidate to use: the simplest one, unless a richer one errs less by more than the noise of the comparison.

    Of each kind, the label with the smallest error competes; between equals the first. From the simplest on, a kind gives way
    to a richer one that is better by more than one standard error of their paired difference, in which each group of models
    counts once (after the one-standard-error rule: Breiman et al., Classification and Regression Trees, 1984, section 3.4.3).
    Where nothing was held out there is no such comparison, and the simplest kind is used.

    Args:
        tried: the candidates.
        measured_ms: the latency of each model.
        groups: of each model, held out together; None: nothing was held out.
        overlap: whether kernels of some model overlap; where none do, a run takes longer than its longest path.
        forced: the kind to use, even if it is worse or not possible.

    Raises:
        UserError: no candidate is of the kind that is forced.
    """
    errors = [np.abs(candidate.predicted_ms / measured_ms - 1) for candidate in tried]
    best_of: dict[Kind, int] = {}
    for place in sorted(range(len(tried)), key=lambda place: (round(float(errors[place].mean()), 6), place)):
        best_of.setdefault(tried[place].candidate.kind, place)
    if forced:
        if forced not in best_of:
            raise UserError(f"composition {forced} can't be fitted here; possible are: {', '.join(sorted(best_of))}")
        return tried[best_of[forced]]
    used, *richer = (best_of[kind] for kind in SIMPLEST_FIRST if kind in best_of and (overlap or kind != "critical_path"))
    for place in richer:
        if groups is not None and exceeds_noise(errors[used] - errors[place], groups):
            used = place
    return tried[used]


def exceeds_noise(differences: Floats, groups: Sequence[str]) -> bool:
    """Whether the mean of the models' differences exceeds its standard error; each of the groups (two or more) counts once."""
    group_of_model = np.array(groups)
    means = np.array([differences[group_of_model == group].mean() for group in sorted(set(groups))])
    return bool(means.mean() > means.std(ddof=1) / np.sqrt(len(means)))
