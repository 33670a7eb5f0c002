"""What an answer says of admitted estimators (docs/estimators.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from inference.core.answers import UsedEstimator
from inference.core.kernels_in_model import KernelInModel, Placed, runs_of_kernels

if TYPE_CHECKING:
    from inference.core.conditions import Conditions
    from records.kernel_record import ModelRecord
    from training.admission.admitted import Admitted


def entries_used(record: ModelRecord, known: Mapping[Placed, KernelInModel],
                 conditions: Conditions) -> list[tuple[Admitted, tuple[str, ...]]]:
    """The admitted estimators that predicted kernels of a model, each with the kernel types."""
    admitted = conditions.fitted.predictors.admitted
    if admitted is None:
        return []
    by_type, used = admitted.of(conditions.used.label), dict[str, set[str]]()
    for key in runs_of_kernels(record):
        kernel, found = record.kernels[key[0]], known[key]
        constant = found.uncertainty is not None and found.uncertainty.reason == "control flow"
        if (entry := by_type.get(kernel.type)) and kernel.moves_data and found.provenance == "predicted" and not (
                found.on_host or constant):
            used.setdefault(entry.name, set()).add(kernel.type)
    return [(entry, tuple(sorted(used[name]))) for name, entry in sorted({one.name: one for one in by_type.values()}.items())
            if name in used]


def used_estimators(record: ModelRecord, known: Mapping[Placed, KernelInModel],
                    conditions: Conditions) -> tuple[UsedEstimator, ...]:
    return tuple(UsedEstimator(name=entry.name, source=entry.source, types=types, mape=entry.errors.mape, forced=entry.forced)
                 for entry, types in entries_used(record, known, conditions))


def estimator_warnings(record: ModelRecord, known: Mapping[Placed, KernelInModel], conditions: Conditions) -> tuple[str, ...]:
    """A sentence about each, and one where the dataset has changed since its check."""
    trained_on, found = conditions.fitted.predictors.sidecar.dataset_sha256, []
    for entry, types in entries_used(record, known, conditions):
        found.append(entry.model_copy(update={"types": types}).said)
        if outdated := entry.outdated(conditions.fitted.target.name, trained_on):
            found.append(outdated)
    return tuple(found)
