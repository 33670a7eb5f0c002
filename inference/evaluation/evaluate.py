"""Measures models, or reads their measurements, and predicts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inference.core.conditions import check_run_mode
from inference.core.host_pace import USUAL, counts
from inference.core.run_modes import AS_USUAL, RunMode
from inference.core.targets import MAKE_PREDICTORS, Fitted, fitted_for, is_here, local_targets, predictor_folders
from inference.evaluation.comparison import Evaluation, compare, summarise
from inference.evaluation.evaluated_models import EvaluatedModel, Failures, models_in_dataset, models_of, predict_model
from inference.evaluation.here import LoadsHere, MeasuredHere, MeasuringPlan, measure_all
from records.dataset_files import header_path, read_header
from records.kernel_record import ModelRecord
from records.kernel_record_files import read_model_records
from training.energy.learned import energy_path
from utils.errors import UserError
from utils.paths import ROOT, Workspace


def name_missing(records: Mapping[str, ModelRecord], found: set[str], folder: Path, failures: Failures) -> None:
    """Adds a failure for each model that has a record but no measurement in the dataset in `folder`."""
    for name in sorted(set(records) - found):
        failures.add(name, UserError(f"{name}: {folder} holds no good measurement of it; measure it with: "
                                     "python benchmark/collector.py"))


def held_out_of_fits(workspace: Workspace, target: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Groups and backgrounds that the target's dataset keeps out of every fit; none if there is no dataset."""
    folder = workspace.dataset(target)
    if not header_path(folder).exists():
        return (), ()
    header = read_header(folder)
    return header.held_out, header.held_out_backgrounds


def evaluate(workspace: Workspace, models: Sequence[Path], *, dims: Mapping[str, Sequence[int]] | None = None,
             target: str | None = None, recorded: bool = False, run_mode: RunMode | None = None,
             loads: LoadsHere | None = None, plan: MeasuringPlan | None = None, force: bool = False,
             static: bool = False) -> Evaluation:
    """Predicts and measures `models` (or reads recorded measurements). If a model fails, the others go on.

    Args:
        loads: what else runs meanwhile; None: nothing.
        plan: how models are measured.
        static: whether dynamic dimensions are fixed before ONNX Runtime optimises a model, for prediction and run.

    Raises:
        UserError: there are no predictors, the target is another machine and `recorded` is off, the load is not known, or no
            model could be evaluated.
    """
    paths = workspace.find_models(models)  # checked first: a name may be mistyped
    fitted, run_mode, loads = fitted_for(workspace, target), run_mode or AS_USUAL, loads or LoadsHere()
    check_run_mode(run_mode, fitted.composition, fitted.target.name)
    name, flavour = fitted.target.name, fitted.target.flavour
    failures = Failures()
    if recorded:
        found = MeasuredHere(recorded_models(workspace, paths, dims or {}, fitted, run_mode, failures, static), "recorded")
        with_energy = energy_path(predictor_folders(workspace)[name]).is_file()
        for model in found.models:  # recorded samples are of a host at about its usual pace
            model.host_pace = USUAL if counts(fitted.composition, run_mode) else None
            predict_model(model, name, run_mode, workspace, force, failures, with_energy)
    else:
        if not is_here(fitted.target):
            here = [local.name for local in local_targets()]
            raise UserError(f"target {name} is not this machine ({', '.join(here)}), where models are to be measured; compare "
                            "with the measurements in its dataset (--recorded), or have predictors of this machine made: "
                            f"{'; '.join(MAKE_PREDICTORS)}")
        loads.check(fitted, run_mode, workspace)
        ready = models_of(paths, dims or {}, flavour, failures, static)
        found = measure_all(ready, fitted, run_mode, loads, plan or MeasuringPlan(), workspace, force, failures) if ready else (
            MeasuredHere())
    held_out = held_out_of_fits(workspace, name)
    comparisons = tuple(compared for model in found.models if (compared := compare(model, *held_out)))
    if not comparisons:
        raise UserError("no model could be evaluated" + (f": {', '.join(failures)} failed" if failures else
                        f": the dataset of {name} holds no measurement of them" if recorded else ""))
    return Evaluation(
        target=name, composition=composition_facts(fitted), source="recorded" if recorded else "measured",
        way=run_mode.description,
        load=found.load, comparisons=comparisons, summaries=summarise(comparisons), failures=dict(failures),
        warnings=tuple(found.notices))


def recorded_models(workspace: Workspace, paths: Sequence[Path], dims: Mapping[str, Sequence[int]], fitted: Fitted,
                    run_mode: RunMode, failures: Failures, static: bool) -> list[EvaluatedModel]:
    """The models in `paths`, or all models, for which the target's dataset has measurements.

    Raises:
        UserError: there is no dataset, or no record of a model.
    """
    folder = workspace.dataset(fitted.target.name)
    if not header_path(folder).exists():
        shipped = ROOT / "recipes" / "h200" / f"{fitted.target.name}.tar.xz"
        raise UserError(f"{folder}: no dataset of target {fitted.target.name} to compare with; " + (
            f"unpack the one that comes with Hase: python recipes/h200/dataset_archives.py unpack --workspace {workspace.root}"
            if shipped.exists() else
            "measure it on such a machine: python benchmark/collector.py"))
    records = recorded_records(workspace, paths, dims, fitted, failures, static)
    models = models_in_dataset(folder, records, fitted.predictors.sidecar.metrics, run_mode.label)
    if paths:  # without paths, models that the dataset lacks are not asked for
        name_missing(records, {model.record.model for model in models}, folder, failures)
    return models


def composition_facts(fitted: Fitted) -> dict[str, Any]:
    """How kernel times add up to model times: the facts of the composition."""
    used = fitted.composition
    return {"label": used.label, "kind": used.kind, "alpha": used.alpha, "beta_ms": used.beta_ms, "node_ms": used.node_ms}


def recorded_records(workspace: Workspace, paths: Sequence[Path], dims: Mapping[str, Sequence[int]], fitted: Fitted,
                     failures: Failures, static: bool) -> dict[str, ModelRecord]:
    """Records by name: of the models in `paths`, else all records of the target's flavour."""
    flavour = fitted.target.flavour
    if paths:
        models = models_of(paths, dims, flavour, failures, static)
        return {model.record.model: model.record for model in models}
    return {record.model: record for record in read_model_records(workspace, flavour)}
