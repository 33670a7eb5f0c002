"""Fits a target's composition: the simplest candidate that is possible, unless a richer one is clearly better.

Candidates are a line for each label and kind of sum, and on a GPU the two tracks, host and GPU.

Lines are fitted to measured kernels. If few were measured, held-out ones are predicted badly, and constants fitted to such
times are bad even for models whose kernels are all known. A candidate is judged by its errors on held-out models both with
predicted and with measured kernels, since predictions use both.

A handful of models can't separate many constants. On a CPU they get no time for each node. On a GPU the costs of a run are
those of the GPU whose predictors come with Hase, and only this host's pace is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from hase.graph_model.simulation.pipeline import PipelineCosts
from hase.learned import target_files
from hase.learned.composition.fitted import (
    KINDS,
    Candidate,
    Composition,
    FittedModel,
    Formula,
    Kind,
    Line,
    Mask,
    base_times_ms,
    latency_ms,
    read_composition,
    working_nodes,
)
from hase.learned.composition.host_side import host_sha256
from hase.learned.default_predictors import shipped_costs
from hase.learned.kernels.interface import TrainingConfig
from hase.learned.kernels.measured import measured_times
from hase.learned.kernels.predictors import ON_GPU, read_predictors
from hase.learned.kernels.sidecar import read_sidecar
from hase.learned.target_files import TRAIN
from hase.records.dataset_tables import read_model_table
from hase.records.host_pace import usual_probe_us
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.training.composition import formulas
from hase.training.composition.calibration import error_range_of
from hase.training.composition.formulas import latencies_ms, mape
from hase.training.composition.held_out import calibrated_interval, predict_as_learned
from hase.training.composition.measured_models import (
    MeasuredModel,
    MeasuredTracks,
    TimesOfModels,
    kernels_overlap,
    known_times,
    left_out_groups,
    measured_models,
    models_sha256,
    tracks_of,
)
from hase.training.kernels.training_set import read_training_set
from hase.utils.errors import UserError
from hase.utils.lazy import scipy
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.timing import Floats

log = get_logger("composition")
SIMPLEST_FIRST: tuple[Kind, ...] = ("sum", "critical_path", "sum_nodes", "pipeline")
PACES = (0.2, 10.0)  # of a host, as multiples of the pace of the host whose GPU comes with Hase
# How much smaller the mean error must get for each factor of e in the pace; it pulls the pace towards 1. Of the H200's 366
# models, two drawn at random give a pace that predicts all with a mean error of 2.5 % (4.1 % at the 95th percentile of 200
# draws); without this, 16 % (59 %). If the host were 1.4 times as slow, it would be 6.0 % with and 13.5 % without.
PACE_PENALTY = 0.05
GRID = 40  # paces to try before the search between two of them


def fit_target(workspace: Workspace, target: str, config: TrainingConfig, few_models: bool = False,
               forced: Kind | None = None) -> Composition:
    """Fits a target's composition from its dataset and predictors; with `few_models`, fewer constants (`try_few_models`).
    Raises UserError: nothing was measured, predictors of another dataset, or no candidate of kind `forced`."""
    sidecar = read_sidecar(workspace.predictors(target))
    rows = read_training_set(workspace, target)
    if rows.sha256 != sidecar.dataset_sha256:
        raise UserError(f"{target}: the dataset has changed since the predictors were trained; train again: {TRAIN}")
    models = measured_models(workspace, target, sidecar)
    left_out, groups = left_out_groups(models)
    if left_out == "nothing":
        log.warning("%s: one model measured; α is fitted on it, β is 0, and there is no cross-validation", target)
    predictors, measured = read_predictors(workspace.predictors(target)), measured_times(workspace, target)
    times = predict_as_learned(predictors, list(sidecar.labels), rows, models, groups, left_out, config, f"composing {target}")
    held_out = None if left_out == "nothing" else groups
    attempts = try_few_models(models, times, measured, held_out) if few_models else try_all(models, times, measured, held_out)
    latency, overlap = np.array([model.latency_ms for model in models]), kernels_overlap(models, measured)
    chosen, predicted, with_measured = choose(attempts, latency, held_out, overlap, forced)
    if chosen.kind == "critical_path" and not overlap:
        log.warning("%s: no profile shows that kernels overlap, so a run takes longer than its longest path", target)
    by_family, probe_us = left_out == "family", usual_probe_us(read_model_table(workspace, target))
    interval = error_range_of(predicted, latency, groups) if by_family else None
    return Composition(
        **chosen.formula_fields(), left_out=left_out, dataset_sha256=rows.sha256,
        models_sha256=models_sha256(workspace, target), predictors_created=sidecar.created,
        host_sha256=host_sha256(workspace.predictors(target)), candidates=tuple(attempt.candidate for attempt in attempts),
        models=tuple(FittedModel(model=model.record.model, group=model.group, measured_ms=model.latency_ms,
                                 predicted_ms=float(predicted_ms))
                     for model, predicted_ms in zip(models, predicted, strict=True)),
        interval=interval, interval_measured=error_range_of(with_measured, latency, groups) if interval else None,
        calibrated=calibrated_interval(rows, models, times, measured, predictors, config) if (
            chosen.kind == "pipeline" and by_family and not few_models) else None,
        host_io=formulas.fit_host_io(models, predicted, groups),
        cuda_graph=formulas.fit_graph_replay(models, tracks_of(models, times), groups) if chosen.kind == "pipeline" else None,
        probe_us=probe_us if math.isfinite(probe_us) else None, overlap=overlap, forced=forced is not None)


def kept_composition(workspace: Workspace, target: str, forced: Kind | None = None) -> Composition | None:
    """The composition on disk if a new fit would give the same; else None. `forced` as in `fit_target`."""
    folder = workspace.predictors(target)
    if not target_files.COMPOSITION.path(folder).is_file():
        return None
    try:
        kept, sidecar = read_composition(folder), read_sidecar(folder)
    except UserError:  # another version, or other predictors: fit again
        return None
    same = (kept.predictors_created, kept.models_sha256, kept.host_sha256) == (
        sidecar.created, models_sha256(workspace, target), host_sha256(folder))
    wanted = kept.kind == forced if kept.forced else forced is None
    return kept if same and wanted else None


class Tried(NamedTuple):
    """A candidate, and its predicted latency (ms) for each model of the fit, from predicted and from measured (`known_ms`)
    kernels. If groups are held out, the constants are fitted without the model's group."""

    candidate: Candidate
    predicted_ms: Floats
    known_ms: Floats

    def errors(self, measured_ms: Floats) -> Floats:
        """The error for each model, a ratio: the mean of those with predicted and with measured kernels."""
        return np.asarray((np.abs(self.predicted_ms / measured_ms - 1) + np.abs(self.known_ms / measured_ms - 1)) / 2)


def judge(formula: Formula, measured_ms: Floats, predicted_ms: Floats, known_ms: Floats, fitted_ms: Floats, plain_ms: Floats,
          held_out: bool) -> Tried:
    """A formula as a candidate, with its errors.

    Args:
        predicted_ms, known_ms: the latency of each model with predicted kernels, and with measured ones.
        fitted_ms: the formula's latencies of the models in the fit.
        plain_ms: the sums or longest paths themselves.
    """
    errors = np.abs(predicted_ms / measured_ms - 1)
    return Tried(Candidate(
        **formula.formula_fields(), cv_mape=float(errors.mean()) if held_out else None,
        cv_max=float(errors.max()) if held_out else None, fit_mape=mape(fitted_ms, measured_ms),
        plain_mape=mape(plain_ms, measured_ms), measured_cv_mape=mape(known_ms, measured_ms) if held_out else None),
        predicted_ms, known_ms)


def choose(attempts: Sequence[Tried], measured_ms: Floats, groups: Sequence[str] | None, overlap: bool,
           forced: Kind | None = None) -> Tried:
    """The candidate to use: the simplest one, unless a richer one is better by more than the noise of the comparison.

    Of each kind, the label with the smallest error (`Tried.errors`) competes. From the simplest on, a richer kind with a
    smaller error wins if, with measured kernels, whose predictions add no noise, it is also better by more than one standard
    error of the paired difference, in which each group counts once (after the one-standard-error rule: Breiman et al.,
    Classification and Regression Trees, 1984, section 3.4.3). If nothing was held out (no `groups`), the simplest kind is used.
    Without `overlap` of kernels, a run takes longer than its longest path. `forced` is used even if it is worse or not
    possible.
    """
    errors = [attempt.errors(measured_ms) for attempt in attempts]
    known_errors = [np.abs(attempt.known_ms / measured_ms - 1) for attempt in attempts]
    best_of_kind: dict[Kind, int] = {}
    for index in sorted(range(len(attempts)), key=lambda index: (round(float(errors[index].mean()), 6), index)):
        best_of_kind.setdefault(attempts[index].candidate.kind, index)
    if forced:
        if forced not in best_of_kind:
            raise UserError(f"composition {forced} can't be fitted here; possible are: {', '.join(sorted(best_of_kind))}")
        return attempts[best_of_kind[forced]]
    best, *richer = (best_of_kind[kind] for kind in SIMPLEST_FIRST
                     if kind in best_of_kind and (overlap or kind != "critical_path"))
    for index in richer:
        better = errors[index].mean() < errors[best].mean()
        if groups is not None and better and exceeds_noise(known_errors[best] - known_errors[index], groups):
            best = index
    return attempts[best]


def exceeds_noise(differences: Floats, groups: Sequence[str]) -> bool:
    """Whether the mean of the models' differences exceeds its standard error; each of the groups (two or more) counts once."""
    group_of_model = np.array(groups)
    means = np.array([differences[group_of_model == group].mean() for group in sorted(set(groups))])
    return bool(means.mean() > means.std(ddof=1) / np.sqrt(len(means)))


def try_all(models: Sequence[MeasuredModel], times: Mapping[str, TimesOfModels], measured: TimesOfModels,
            groups: Sequence[str] | None) -> list[Tried]:
    """A line for each label and kind of sum, and a GPU's two tracks if known for enough models. `times` are predicted without
    the model's group, by label, model and kernel id. Without `groups`, nothing is held out."""
    known = known_times(times, measured)
    attempts = try_lines(models, times, known, KINDS, groups)
    if groups is not None and set(ON_GPU) <= set(times) and formulas.can_fit(tracks := tracks_of(models, times)):
        attempts.append(try_two_tracks(tracks, tracks_of(models, known), groups))
    return attempts


def try_lines(models: Sequence[MeasuredModel], predicted: Mapping[str, TimesOfModels], known: Mapping[str, TimesOfModels],
              kinds: Sequence[Kind], groups: Sequence[str] | None) -> list[Tried]:
    """Lines for some kinds of sum; `predicted` (without the model's group), `known` (measured): by label, model, kernel id."""
    latency = np.array([model.latency_ms for model in models])
    nodes = np.array([working_nodes(model.record) for model in models], dtype=float)

    def composed(times_of_models: TimesOfModels) -> dict[Kind, Floats]:
        composed_models = [base_times_ms(model.record, times_of_models[model.record.model]) for model in models]
        return {kind: np.array([sums[kind] for sums in composed_models]) for kind in kinds}

    by_label = {label: (composed(predicted[label]), composed(known[label])) for label in predicted if label != LAUNCHES}
    return [try_line(label, kind, predicted_ms[kind], known_ms[kind], latency, nodes, groups)
            for label, (predicted_ms, known_ms) in by_label.items() for kind in kinds]


def try_line(label: str, kind: Kind, predicted_ms: Floats, known_ms: Floats, measured_ms: Floats, nodes: Floats,
             groups: Sequence[str] | None) -> Tried:
    """A line over the sums or longest paths of models. If the plain sum (α = 1, β = 0) has a smaller error on held-out models
    than lines fitted without them, it is used instead: few models can mislead a line. `predicted_ms` and `known_ms` are the
    sums with predicted and with measured kernels."""
    counted = nodes if kind == "sum_nodes" else None
    line = formulas.fit_line(known_ms, measured_ms, counted)
    fitted = latency_ms(line, known_ms, nodes)

    def left_out(sums_ms: Floats) -> Floats:
        return fitted if groups is None else formulas.leave_out(known_ms, sums_ms, measured_ms, groups, counted)

    with_predicted, with_known = left_out(predicted_ms), left_out(known_ms)
    if groups is not None and counted is None and mape(known_ms, measured_ms) <= mape(with_known, measured_ms):
        line, fitted, with_predicted, with_known = Line(1.0, 0.0), known_ms, predicted_ms, known_ms
    return judge(Formula(label=label, kind=kind, **line._asdict()), measured_ms, with_predicted, with_known, fitted, known_ms,
                 groups is not None)


def try_two_tracks(predicted: Sequence[MeasuredTracks], known: Sequence[MeasuredTracks], groups: Sequence[str]) -> Tried:
    """A GPU's two tracks, at the host's usual pace. `predicted` has the models with kernels predicted without their group,
    `known` with measured kernels if available, to see the error of the composition alone."""
    costs = formulas.fit_pipeline(predicted)
    without_group, known_without_group = (formulas.left_out_ms(models, groups).usual_ms for models in (predicted, known))
    return _judge_two_tracks(costs, known, without_group, latencies_ms(predicted, costs), True, known_without_group)


def _judge_two_tracks(costs: PipelineCosts, known: Sequence[MeasuredTracks], predicted_ms: Floats, fitted_ms: Floats,
                      held_out: bool, known_ms: Floats) -> Tried:
    """`judge` for a GPU's two tracks; `known` has the models with measured kernels."""
    return judge(Formula(label=GPU_LABEL, kind="pipeline", alpha=1.0, beta_ms=0.0, costs=costs),
                 np.array([model.latency_ms for model in known]), predicted_ms, known_ms, fitted_ms,
                 np.array([model.tracks.gpu_ms.sum() for model in known]), held_out)


def try_few_models(models: Sequence[MeasuredModel], times: Mapping[str, TimesOfModels], measured: TimesOfModels,
                   groups: Sequence[str] | None) -> list[Tried]:
    """As `try_all`, for a handful of models: a GPU's two tracks, or for each label a line over the sum."""
    known = known_times(times, measured)
    if set(ON_GPU) <= set(times):
        return [_few_two_tracks(tracks_of(models, times), tracks_of(models, known), groups)]
    return try_lines(models, times, known, ("sum",), groups)


def _few_two_tracks(predicted: Sequence[MeasuredTracks], known: Sequence[MeasuredTracks],
                    groups: Sequence[str] | None) -> Tried:
    """A GPU's two tracks with the costs of the GPU that comes with Hase, at this host's pace."""
    shipped = shipped_costs()
    costs = shipped.at_pace(fit_pace(known, shipped))

    def left_out(models: Sequence[MeasuredTracks]) -> Floats:
        def without(kept: Mask, held_out: Mask) -> Floats:
            pace = fit_pace(list(compress(known, kept)), shipped)
            return latencies_ms(list(compress(models, held_out)), shipped.at_pace(pace))

        return latencies_ms(models, costs) if groups is None else formulas.each_left_out(groups, without)

    return _judge_two_tracks(costs, known, left_out(predicted), latencies_ms(known, costs), groups is not None, left_out(known))


def fit_pace(models: Sequence[MeasuredTracks], costs: PipelineCosts) -> float:
    """The host's pace, as a multiple of the times in `costs`, with the least mean error of the models' latencies. Models
    limited by the GPU do not show the pace, and leave it at 1."""
    latency = np.array([model.latency_ms for model in models])

    def error(pace: float) -> float:
        return mape(latencies_ms(models, costs.at_pace(pace)), latency) + PACE_PENALTY * abs(float(np.log(pace)))

    grid = np.geomspace(*PACES, GRID)
    best = int(np.argmin([error(float(pace)) for pace in grid]))
    bracket = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
    return float(scipy.optimize.minimize_scalar(error, bounds=bracket, method="bounded").x)
