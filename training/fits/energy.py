"""Fits the energy of runs to measured models: non-negative least squares of relative errors, with families held out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hase.learned.composition.cuda_nodes import is_off_gpu
from hase.learned.composition.fitted import Composition
from hase.learned.energy import (
    BUSY,
    BYTES,
    FULL,
    LAUNCHES,
    OPERATIONS,
    RUN,
    UNITS,
    EnergyCandidate,
    EnergyModel,
    FittedEnergy,
    Part,
    kind_of_work,
    without_type,
    without_types,
    work_of_run,
)
from hase.learned.kernels.predictors import Predictors
from hase.learned.target_files import MEASURE_ENERGY
from hase.records.dataset_files import idle_rows, read_journal, read_kernels
from hase.records.dataset_tables import read_model_table
from hase.records.kernel_costs import is_control_flow
from hase.records.kernel_record import REMAKE, Kernel, ModelRecord
from hase.records.kernel_record_files import read_model_record, record_path
from hase.records.measurement import ENERGY, KERNELS
from hase.records.measurement import LAUNCHES as LAUNCH_LABEL
from hase.training.composition.calibration import error_range_of
from hase.utils.errors import UserError
from hase.utils.lazy import pandas as pd
from hase.utils.lazy import scipy
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.text import markdown_table
from hase.utils.timing import ErrorStatistics, Floats, error_statistics

# Kinds of work that explain the energy beyond idle power, by name. `class powers` are watts while kernels of a class run; `half
# full` adds watts that depend on how far a kernel fills the device (learned/energy.py).
CANDIDATES = {
    "class powers": (RUN, BUSY),
    "work": (RUN, OPERATIONS, BYTES, LAUNCHES),
    "class powers and work": (RUN, BUSY, OPERATIONS, BYTES, LAUNCHES),
    **{f"class powers and work, half full at {half} million numbers": (RUN, BUSY, full, OPERATIONS, BYTES, LAUNCHES)
       for half, full in FULL.items()},
}
SHRINK = 1e-3  # penalty on the square of a share, so that kinds of work that always occur together share the energy
LEAST_MODELS = 5
# This quantile of the idle readings is the idle power. A device draws more for a while after it worked: H200s between two
# blocks of measurements, idle for some tenths of a second, drew 125 to 195 W (medians of six). What they draw beyond the lowest
# readings is learned with the runs.
IDLE_QUANTILE = 0.1
log = get_logger("energy")


@dataclass(frozen=True)
class MeasuredEnergy:
    """A model whose energy was measured.

    Attributes:
        power_w, idle_w: mean power while it ran, and of the idle device just before (NaN: not read).
        work: of a run that takes the measured latency, by name.
        work_left_out: the same with the latency that was predicted with the model's family held out; None if unknown.
        agreement: the integral of power divided by the device's energy counter; None without a counter.
        is_model: false for a batch of kernels; batches are in each fit, and in no error.
    """

    model: str
    group: str
    energy_j: float
    power_w: float
    idle_w: float
    run_ms: float
    work: Mapping[str, float]
    work_left_out: Mapping[str, float] | None = None
    agreement: float | None = None
    is_model: bool = True


class _FittedCandidate(NamedTuple):
    """A candidate, its coefficients, and energies (J) with families held out: from measured and from predicted latencies."""

    candidate: EnergyCandidate
    coefficients: dict[str, float]
    held_out_j: Floats | None
    held_out_with_latency_j: Floats | None


def matrix(works: Sequence[Mapping[str, float]], names: Sequence[str]) -> Floats:
    """models × names: the work of each model, element types added up."""
    works = [without_types(work) for work in works]
    return np.array([[work.get(name, 0.0) for name in names] for work in works], dtype=float).reshape(len(works), len(names))


def idle_power_w(models: Sequence[MeasuredEnergy]) -> float:
    """The idle power in all runs' energy: a low quantile of the readings."""
    return float(np.nanquantile([model.idle_w for model in models], IDLE_QUANTILE))


def fit_coefficients(models: Sequence[MeasuredEnergy], names: Sequence[str]) -> Floats:
    """The non-negative coefficients with the smallest squares of relative errors of the models' energies. Columns are scaled to
    the same mean share of the energy, so that the penalty does not depend on units."""
    energy_j = np.array([model.energy_j for model in models])
    beyond_idle = 1.0 - idle_power_w(models) * np.array([model.run_ms / 1e3 for model in models]) / energy_j
    shares = matrix([model.work for model in models], names) / energy_j[:, None]
    scale = shares.mean(axis=0)
    scale[scale == 0.0] = 1.0
    penalty = np.sqrt(SHRINK * len(models)) * np.eye(len(names))
    scaled, _ = scipy.optimize.nnls(np.vstack([shares / scale, penalty]), np.concatenate([beyond_idle, np.zeros(len(names))]))
    return np.asarray(scaled / scale, dtype=float)


def fit_energy(target: str, measured: Sequence[MeasuredEnergy], models_sha256: str,
               limit_w: float | None = None) -> EnergyModel:
    """Fits the energy of a target's runs by the candidate with the smallest error on held-out families. `measured` has models
    and batches of kernels. Raises UserError: fewer than LEAST_MODELS models."""
    models, batches = ([energy for energy in measured if energy.is_model is wanted] for wanted in (True, False))
    if len(models) < LEAST_MODELS:
        raise UserError(f"{target}: {len(models)} models with a sound measured energy; it takes {LEAST_MODELS} or more")
    fitted_candidates = [_fit_candidate(name, kinds, models, batches, limit_w) for name, kinds in CANDIDATES.items()]
    best = min(fitted_candidates, key=lambda attempt: attempt.candidate.fit_mape if attempt.candidate.cv_mape is None
               else attempt.candidate.cv_mape)
    idle_w = idle_power_w(measured)
    measured_j = np.array([model.energy_j for model in models])
    predicted_j = best.held_out_j
    left_out = interval = None
    if predicted_j is None:
        predicted_j = _predicted_j([model.work for model in models], best.coefficients, idle_w, limit_w)
    else:
        left_out = error_statistics(predicted_j.tolist(), measured_j.tolist())
        interval = error_range_of(predicted_j, measured_j, [model.group for model in models])
    with_latency_j = best.held_out_with_latency_j if best.held_out_with_latency_j is not None else np.full(len(models), np.nan)
    agreements = [model.agreement for model in measured if model.agreement is not None]
    return EnergyModel(
        target=target, limit_w=limit_w, idle_w=idle_w,
        coefficients={name: value for name, value in best.coefficients.items() if value > 0.0},
        learned_from=_work_names(measured, CANDIDATES[best.candidate.name]), kind=best.candidate.name, left_out=left_out,
        left_out_with_latency=_with_latency(models, best), interval=interval,
        agreement=float(np.mean(agreements)) if agreements else None, models_sha256=models_sha256,
        candidates=tuple(attempt.candidate for attempt in fitted_candidates), models=tuple(
            FittedEnergy(model=model.model, group=model.group, power_w=model.power_w, measured_j=model.energy_j,
                         predicted_j=float(energy_j), with_latency_j=float(with_latency) if np.isfinite(with_latency) else None,
                         agreement=model.agreement)
            for model, energy_j, with_latency in zip(models, predicted_j, with_latency_j, strict=True)))


def _work_names(models: Sequence[MeasuredEnergy], kinds: Sequence[str]) -> tuple[str, ...]:
    """The names of the models' work of some kinds, sorted."""
    return tuple(sorted({name for model in models for name, amount in model.work.items()
                         if amount and kind_of_work(name) in kinds}))


def _coefficient_names(names: Sequence[str]) -> list[str]:
    """The names of the coefficients for some names of work: all element types of a class share one."""
    return sorted({without_type(name) for name in names})


def _predicted_j(works: Sequence[Mapping[str, float]], coefficients: Mapping[str, float], idle_w: float,
                 limit_w: float | None) -> Floats:
    """Predicts the energy (J) of runs from their work."""
    names = list(coefficients)
    times_s = matrix(works, [RUN])[:, 0]
    energies_j = idle_w * times_s + matrix(works, names) @ np.array([coefficients[name] for name in names])
    return np.asarray(np.minimum(energies_j, np.inf if limit_w is None else limit_w * times_s), dtype=float)


def _fitted_predictor(models: Sequence[MeasuredEnergy], kinds: Sequence[str],
                      limit_w: float | None) -> Callable[[Sequence[Mapping[str, float]]], Floats]:
    """A function that predicts the energy of runs, fitted to these models."""
    names, idle_w = _coefficient_names(_work_names(models, kinds)), idle_power_w(models)
    coefficients = dict(zip(names, fit_coefficients(models, names).tolist(), strict=True))
    return lambda works: _predicted_j(works, coefficients, idle_w, limit_w)


def _fit_candidate(name: str, kinds: Sequence[str], models: Sequence[MeasuredEnergy], batches: Sequence[MeasuredEnergy],
                   limit_w: float | None) -> _FittedCandidate:
    """A candidate: fitted to all models and batches of kernels, and with each family of models held out in turn."""
    measured_j, fitted_to = np.array([model.energy_j for model in models]), [*models, *batches]
    names, groups = _coefficient_names(_work_names(fitted_to, kinds)), sorted({model.group for model in models})
    coefficients = dict(zip(names, fit_coefficients(fitted_to, names).tolist(), strict=True))
    fitted_j = _fitted_predictor(fitted_to, kinds, limit_w)([model.work for model in models])
    fit_mape = float(np.abs(fitted_j / measured_j - 1.0).mean())
    if len(groups) < 2:
        return _FittedCandidate(EnergyCandidate(name=name, cv_mape=None, fit_mape=fit_mape), coefficients, None, None)
    held_out_j, with_latency_j = np.zeros(len(models)), np.full(len(models), np.nan)
    for group in groups:
        predict = _fitted_predictor([energy for energy in fitted_to if energy.group != group], kinds, limit_w)
        inside = [index for index, model in enumerate(models) if model.group == group]
        held_out_j[inside] = predict([models[index].work for index in inside])
        for index in inside:
            if (work := models[index].work_left_out) is not None:
                with_latency_j[index] = predict([work])[0]
    cv_mape = float(np.abs(held_out_j / measured_j - 1.0).mean())
    candidate = EnergyCandidate(name=name, cv_mape=cv_mape, fit_mape=fit_mape)
    return _FittedCandidate(candidate, coefficients, held_out_j, with_latency_j)


def _with_latency(models: Sequence[MeasuredEnergy], fitted: _FittedCandidate) -> ErrorStatistics | None:
    """Errors with families held out from both energy and latency; None if no such latencies are known."""
    if fitted.held_out_with_latency_j is None:
        return None
    known = np.isfinite(fitted.held_out_with_latency_j)
    measured_j = np.array([model.energy_j for model in models])
    return error_statistics(fitted.held_out_with_latency_j[known].tolist(), measured_j[known].tolist()) if known.any() else None


def model_parts(record: ModelRecord, predictors: Predictors, label: str) -> list[Part]:
    """The kernels of a model on the target's device, with times (ms) and launches; measured ones are looked up."""
    on_gpu = predictors.sidecar.target.flavour.device == "cuda"
    return kernel_parts([(record.kernel_of(node), node.runs) for node in record.nodes
                         if not is_control_flow(record.kernel_of(node))
                         and not (on_gpu and is_off_gpu(record.kernel_of(node), node.provider))], predictors, label)


def kernel_parts(kernel_runs: Sequence[tuple[Kernel, float]], predictors: Predictors, label: str) -> list[Part]:
    """Kernels with their numbers of runs, times (ms) and launches."""
    kernels = [kernel for kernel, _ in kernel_runs]
    times_ms = predictors.predict(kernels, {}, label).latency_ms
    launches = (predictors.predict(kernels, {}, LAUNCH_LABEL).latency_ms if LAUNCH_LABEL in predictors.labels
                else [float(kernel.moves_data) for kernel in kernels])
    return [Part(kernel, runs, time_ms, count)
            for (kernel, runs), time_ms, count in zip(kernel_runs, times_ms, launches, strict=True)]


def measured_energies(workspace: Workspace, target: str, predictors: Predictors,
                      composition: Composition) -> list[MeasuredEnergy]:
    """The models and batches of kernels with a sound energy measurement on an idle device, without held-out families."""
    table = idle_rows(read_model_table(workspace, target))
    if "energy_j" not in table.columns:
        raise UserError(f"{workspace.dataset(target)}: no energy was measured; collect with {MEASURE_ENERGY}")
    table = table[table["energy_j"].notna()]
    doubtful = table["energy_doubts"].fillna("") != ""
    for name, doubts in table[doubtful][["Model", "energy_doubts"]].itertuples(index=False):
        log.warning("%s: its energy is not used: %s", name, doubts)
    energies = []
    for name, rows in table[~doubtful].groupby("Model", sort=True):
        path = record_path(workspace, predictors.sidecar.target.flavour, str(name))
        if not path.is_file():
            log.warning("%s: its energy is not used, since it has no record (%s); make one with: %s", name, path, REMAKE)
            continue
        record = read_model_record(path)
        if record.group not in predictors.sidecar.held_out:
            medians = rows[["energy_j", "power_w", "idle_w", f"{ENERGY}_ms", "counter_j"]].apply(pd.to_numeric).median()
            energies.append(_measured_energy(record, medians, predictors, composition))
    energies += measured_batches(workspace, target, predictors, composition.label)
    if not energies:
        raise UserError(f"{workspace.dataset(target)}: no model with a sound energy; collect with {MEASURE_ENERGY}")
    return energies


def measured_batches(workspace: Workspace, target: str, predictors: Predictors, label: str) -> list[MeasuredEnergy]:
    """The batches of kernels with a sound energy measurement on an idle device, without kernels of held-out families."""
    folder = workspace.dataset(target)
    batches = [m for block in read_journal(folder) if not block.level for m in block.measurements
               if (m.subject, m.label, m.status, m.error) == (KERNELS, ENERGY, "ok", "")]
    described = {entry.kernel.id: entry for entry in read_kernels(folder, {name for m in batches for name in m.members})}
    energies, held_out = [], set(predictors.sidecar.held_out)
    for m in batches:
        members = [described[name] for name in m.members]
        if any(held_out & set(member.groups) for member in members):
            continue
        values, [run_ms] = {name: value for name, (value,) in m.quantities.items()}, m.samples_ms
        work = work_of_run(kernel_parts([(member.kernel, 1.0) for member in members], predictors, label), run_ms)
        energies.append(MeasuredEnergy(
            m.id, m.id, values["energy_j"], values["power_w"], values["idle_w"], run_ms, work, is_model=False,
            agreement=values["energy_j"] / values["counter_j"] if values.get("counter_j") else None))
    return energies


def _measured_energy(record: ModelRecord, medians: Mapping[str, float], predictors: Predictors,
                     composition: Composition) -> MeasuredEnergy:
    run_parts, run_ms = model_parts(record, predictors, composition.label), float(medians[f"{ENERGY}_ms"])
    left_out = None
    known = {model.model: model for model in composition.models}.get(record.model)
    if known is not None and composition.left_out == "family":
        # as if the times of all kernels were wrong by the same factor as the latency
        ratio = known.predicted_ms / known.measured_ms
        left_out = work_of_run([part._replace(time_ms=ratio * part.time_ms) for part in run_parts], known.predicted_ms)
    counter_j = float(medians["counter_j"])
    return MeasuredEnergy(
        record.model, record.group, float(medians["energy_j"]), float(medians["power_w"]), float(medians["idle_w"]), run_ms,
        work_of_run(run_parts, run_ms), left_out, None if math.isnan(counter_j) else float(medians["energy_j"]) / counter_j)


# tables and the page -----------------------------------------------------------------------------------------------------

BUSY_RATIO = 2.0  # an H200 that works for more than half of the time draws more than this multiple of its idle power


def coefficient_rows(fitted: EnergyModel) -> list[dict[str, Any]]:
    """One row per coefficient, with its unit."""
    checked = [] if fitted.agreement is None else [
        {"what": "measured: integral of power over the energy counter", "value": fitted.agreement, "unit": "ratio"}]
    return [*checked, {"what": "idle power", "value": fitted.idle_w, "unit": "W"}, *(
        {"what": name, "value": value, "unit": UNITS[kind_of_work(name)]}
        for name, value in sorted(fitted.coefficients.items()))]


def error_rows(fitted: EnergyModel) -> list[dict[str, Any]]:
    """Errors of models with their family held out, for measured and for predicted latencies. The latter also separately for
    models that often leave the device idle, whose latency depends on the host, and for others."""
    def with_latency(least_w: float, below_w: float) -> ErrorStatistics | None:
        pairs = [(model.with_latency_j, model.measured_j) for model in fitted.models
                 if model.with_latency_j is not None and least_w <= model.power_w < below_w]
        return error_statistics(*(list(column) for column in zip(*pairs, strict=True))) if pairs else None

    bound_w = BUSY_RATIO * fitted.idle_w
    return [_error_row("latency as measured", fitted.left_out), _error_row("latency predicted", fitted.left_out_with_latency),
            _error_row(f"… models above {bound_w:.0f} W", with_latency(bound_w, math.inf)),
            _error_row(f"… models below {bound_w:.0f} W", with_latency(0.0, bound_w))]


def _error_row(what: str, errors: ErrorStatistics | None) -> dict[str, Any]:
    """A row of errors in per cent; empty cells without errors."""
    if errors is None:
        return {"what": f"{what}: not known"}
    return {"what": what, "count": errors.count, "MAPE": f"{errors.mape:.1%}", "median": f"{errors.median:.1%}",
            "within ±10 %": f"{errors.within_10:.0%}", "worst": f"{errors.worst:.1%}"}


def model_rows(fitted: EnergyModel) -> list[dict[str, Any]]:
    """One row per model: its mean power, its energy, and the errors of predictions without its family."""
    return [{"model": model.model, "family": model.group, "mean (W)": f"{model.power_w:.0f}",
             "measured (J)": f"{model.measured_j:.4g}", "predicted (J)": f"{model.predicted_j:.4g}",
             "error": f"{model.predicted_j / model.measured_j - 1:+.1%}", "error, latency predicted":
             None if model.with_latency_j is None else f"{model.with_latency_j / model.measured_j - 1:+.1%}"}
            for model in fitted.models]


def page(fitted: EnergyModel) -> str:
    """The page about the energy of a target."""
    agreements = [model.agreement for model in fitted.models if model.agreement is not None]
    lines = [
        "# Energy of models, measured and predicted", "",
        f"Of `{fitted.target}`, by `training/fit_energy.py --markdown FILE` (`recipes/h200/learn.sh`). "
        "[energy.md](../energy.md) says how energy is measured and predicted.", "",
        f"{len(fitted.models)} models and sizes ran for three seconds each. Idle with a session open, the device draws "
        f"{fitted.idle_w:.0f} W; the models drew {min(model.power_w for model in fitted.models):.0f} to "
        f"{max(model.power_w for model in fitted.models):.0f} W" + (
            "." if fitted.limit_w is None else f", and its power limit is {fitted.limit_w:.0f} W.")]
    if agreements:
        gaps = sorted(abs(agreement - 1.0) for agreement in agreements)
        lines += [f"The integral of power and the device's energy counter differ by {gaps[len(gaps) // 2]:.1%} (median), and "
                  f"by {gaps[-1]:.1%} at most."]
    lines += ["", "## Errors", "", "The family of each model was held out of the fit of energy. *Latency predicted*: with the "
              "family held out of the composition, too.", "",
              markdown_table([row for row in error_rows(fitted) if "count" in row]), ""]
    if fitted.interval:
        lines += [f"A 90 % interval is {fitted.interval.low:.2f} to {fitted.interval.high:.2f} times the prediction, if the "
                  "latency is right. Made from the errors of the other families, it held "
                  f"{fitted.interval.coverage:.0%} of the models.", ""]
    lines += ["## What the energy is made of", "", f"{fitted.kind[0].upper()}{fitted.kind[1:]}.", "",
              markdown_table([{**row, "value": f"{row['value']:.4g}"} for row in coefficient_rows(fitted)]), "",
              "Other combinations, and their errors on families that were held out:", "",
              markdown_table([
                  {"combination": candidate.name, "MAPE": None if candidate.cv_mape is None else f"{candidate.cv_mape:.1%}"}
                  for candidate in fitted.candidates]), "",
              "## Each model, its family held out", "", markdown_table(model_rows(fitted)), ""]
    return "\n".join(lines)
