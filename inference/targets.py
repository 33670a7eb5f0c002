"""Which target a prediction is for, and what was learned for it; kept in a process until the files change."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ort_analysis.records import ModelRecord
from utils.errors import UserError
from utils.files import cached
from utils.fingerprint import Target, has_cuda, local_target
from utils.paths import Workspace

if TYPE_CHECKING:
    from training.composition import Composition
    from training.predictor_files import Predictors

MAKE_PREDICTORS = (
    "python benchmark/collector.py", "python training/train_kernel_model.py", "python training/fit_composition.py")
SIDECAR = "predictors.json"  # written last by training: a folder without it holds nothing that counts
FLOATING = ("float16", "bfloat16", "float32", "float64")
_fitted: dict[tuple[Any, ...], Fitted] = {}


@dataclass(frozen=True)
class Fitted:
    """What was learned for one target, and what to know about its being chosen."""

    target: Target
    predictors: Predictors
    composition: Composition
    notices: tuple[str, ...] = ()


@functools.cache
def local_targets() -> tuple[Target, ...]:
    """The targets that this machine is: its GPU where it has one, then its CPU."""
    return tuple(local_target(provider) for provider in (("cuda", "cpu") if has_cuda() else ("cpu",)))


def choose_target(workspace: Workspace, name: str | None) -> tuple[str, tuple[str, ...]]:
    """The target's name, and notices about the choice.

    Without a name: this machine's own, if there are predictors for it; else the only one that has any.

    Raises:
        UserError: no predictors, none for `name`, or several of other devices to choose from.
    """
    folder = workspace.predictors("")
    there = sorted(path.parent.name for path in folder.glob(f"*/{SIDECAR}"))
    if not there:
        raise UserError(f"no predictors in {folder}; make them with: {'; '.join(MAKE_PREDICTORS)}")
    if name is not None:
        if name not in there:
            raise UserError(f"target {name}: no predictors for it in {folder} (there: {', '.join(there)})")
        return name, ()
    own = [target.name for target in local_targets()]
    for target in own:
        if target in there:
            return target, ()
    if len(there) > 1:
        raise UserError(f"no predictors for this machine ({own[0]}); choose a target with --target: {', '.join(there)}")
    return there[0], (f"predictors of another device are used, {there[0]}: this machine is {own[0]}",)


def fitted_for(workspace: Workspace, name: str | None = None) -> Fitted:
    """What was learned for the target `name` (or for the one that `choose_target` finds).

    Raises:
        UserError: as `choose_target`, and where the files can't be read.
    """
    name, notices = choose_target(workspace, name)
    folder = workspace.predictors(name)
    key = (str(folder), *sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in folder.iterdir()))

    def load() -> Fitted:
        from training.composition import load_composition
        from training.predictor_files import load_predictors

        predictors = load_predictors(folder)
        return Fitted(predictors.sidecar.target, predictors, load_composition(folder), notices)

    return cached(_fitted, key, load, limit=4)


def check_fit(record: ModelRecord, target: Target, dtypes: Sequence[str], force: bool) -> list[str]:
    """Warnings about a record that the target's predictors hold for only in part.

    Args:
        record: the model.
        target: the predictors'.
        dtypes: element types of the kernels that the predictors were trained on.
        force: warn instead of refusing.

    Raises:
        UserError: another provider's graph; or, unless forced, another ORT minor version or element type.
    """
    graph, trained = record.flavour, target.flavour
    if graph.execution_provider != trained.execution_provider:
        raise UserError(f"{record.model}: the record is of a {graph.execution_provider} graph, the predictors of target "
                        f"{target.name} hold for {trained.execution_provider}")
    refusals, warnings = [], []
    if graph.ort_version != trained.ort_version:
        refusals.append(f"the graph is of ONNX Runtime {graph.ort_version}, the predictors hold for {trained.ort_version}")
    unseen = sorted({kernel.dtype for kernel in record.kernels.values()} & set(FLOATING) - set(dtypes))
    if unseen:
        refusals.append(f"it computes in {', '.join(unseen)}, the predictors hold for {', '.join(dtypes)}")
    if refusals and not force:
        raise UserError(f"{record.model}: {'; '.join(refusals)}; measure and train for it, or use --force")
    warnings += [f"forced: {refusal}" for refusal in refusals]
    if graph.instruction_set != trained.instruction_set:
        warnings.append(f"the graph is shaped for {graph.instruction_set or 'another CPU'}, "
                        f"the target is an {trained.instruction_set} CPU: layouts may differ")
    if record.derived:
        warnings.append(f"no {graph.execution_provider} device here: its graph is derived with the CPU provider")
    return warnings
