"""What error to expect of predictions: of what was held out of training, and of the models that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from inference import predict
from records.kernel_record_files import read_model_record, record_path
from training.composition.fitted import Composition, read_composition
from training.kernels.sidecar import Sidecar, read_sidecar
from utils.paths import Workspace

HELD_OUT = {"family": "models, each family held out", "model": "models, each held out",
            "nothing": "models (one alone can't be held out)"}


def expected_errors(workspace: Workspace, target: str) -> list[dict[str, Any]]:
    """One row for each kind of prediction, errors in per cent; None where nothing could be held out."""
    folder = workspace.predictors(target)
    sidecar, composition = read_sidecar(folder), read_composition(folder)
    return [_kernels(sidecar, composition), _models(composition), _measured(workspace, sidecar, composition)]


def _row(predicted: str, errors: Sequence[float]) -> dict[str, Any]:
    return {"predicted": predicted, "count": len(errors), "mean_error_%": 100 * mean(errors) if errors else None,
            "median_error_%": 100 * median(errors) if errors else None}


def _kernels(sidecar: Sidecar, composition: Composition) -> dict[str, Any]:
    found = sidecar.labels[composition.label].errors[0]
    return {"predicted": "kernels, each held out", "count": found.kernels, "mean_error_%": 100 * found.mape,
            "median_error_%": 100 * found.median}


def _models(composition: Composition) -> dict[str, Any]:
    """Models whose kernels are all predicted by a training without them."""
    held_out = composition.models if composition.left_out != "nothing" else ()
    return _row(f"{HELD_OUT[composition.left_out]}, with predicted kernels",
                [abs(model.predicted_ms / model.measured_ms - 1) for model in held_out])


def _measured(workspace: Workspace, sidecar: Sidecar, composition: Composition) -> dict[str, Any]:
    """The models that were measured, as they are predicted now: with their kernels looked up, and constants fitted to them."""
    errors = []
    for model in composition.models:
        record = read_model_record(record_path(workspace, sidecar.target.flavour, model.model))
        found = predict(record, target=sidecar.target.name, workspace=workspace)
        errors.append(abs(found.latency_ms / model.measured_ms - 1))
    return _row("your models, with measured kernels (these fitted the constants)", errors)
