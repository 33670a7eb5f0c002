"""Chooses the target of a prediction and reads what was learned for it, which a process keeps until the files change."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hase.inference.core.from_data_sheet import base_target, carried_predictors, gpu_of_target, learned, sheet_range
from hase.learned.composition.fitted import Composition, read_composition
from hase.learned.composition.host_side import NOTHING_MEASURED, HostSide, read_host_side
from hase.learned.data_sheet.correction import Correction, read_correction
from hase.learned.data_sheet.saved import Range
from hase.learned.kernels.predictors import Predictors, read_predictors
from hase.learned.kernels.uncertainty import Uncertainty, read_uncertainty
from hase.learned.sharing.mps import LearnedMps, learned_mps
from hase.learned.sharing.serving import ServingHost, read_serving
from hase.learned.sharing.slices import Sharing, read_sharing
from hase.records.kernel_record import ModelRecord
from hase.runtimes import local_target, runtime_named
from hase.utils.errors import UserError
from hase.utils.files import cached
from hase.utils.fingerprint import CUDNN, FROM_SHEET, Target, has_cuda, package_version, slug
from hase.utils.model_graphs import MOST_LOADED_BYTES
from hase.utils.paths import SHIPPED, SIDECAR, Workspace

if TYPE_CHECKING:
    from hase.learned.kernels.sidecar import Sidecar
    from hase.records.gpu_catalogue import Gpu

MAKE_PREDICTORS = (
    "python benchmark/collector.py", "python training/train_kernel_model.py", "python training/fit_composition.py")
Learned = tuple[  # of a folder
    Predictors, Composition, HostSide, Sharing | None, LearnedMps | None, ServingHost | None, Uncertainty]
FLOATING = ("float16", "bfloat16", "float32", "float64")
_fitted: dict[tuple[Any, ...], Learned] = {}


@dataclass(frozen=True)
class Fitted:
    """What was learned for one target, and how the target was chosen.

    Attributes:
        uncertainty: how far off the times of kernels may be of which nothing was learned.
        host: the host's side of a CUDA session.
        sharing: how the target's GPU takes turns between processes; None where that was not learned.
        mps: how kernels of several processes run on it through MPS; None likewise.
        serving: how the pace of a host that serves requests changes; None likewise.
        other_cudnn: whether this machine has the target's device, but another minor version of cuDNN than was measured.
        notices: what the reader should know about the choice and the versions.
        measured_on: the machine and the versions that were measured, in words; "" where this machine is the target.
        sheet_range: how far off times are that were carried over from another card; None for a card that was measured.
    """

    target: Target
    predictors: Predictors
    composition: Composition
    uncertainty: Uncertainty
    host: HostSide = NOTHING_MEASURED
    sharing: Sharing | None = None
    mps: LearnedMps | None = None
    serving: ServingHost | None = None
    other_cudnn: bool = False
    notices: tuple[str, ...] = ()
    measured_on: str = ""
    sheet_range: Range | None = None


@functools.cache
def local_targets() -> tuple[Target, ...]:
    """The targets that this machine is: its GPU, if it has one, then its CPU."""
    return tuple(local_target(device) for device in (("cuda", "cpu") if has_cuda() else ("cpu",)))


def predictor_folders(workspace: Workspace) -> dict[str, Path]:
    """The folder of every target for which something was learned: in the workspace, or else shipped with Hase."""
    roots = (SHIPPED, workspace.predictors(""))
    return {path.parent.name: path.parent for root in roots for path in sorted(root.glob(f"*/{SIDECAR}"))}


def choose_target(workspace: Workspace, name: str | None) -> tuple[str, tuple[str, ...]]:
    """The target's name, and notices about the choice.

    Args:
        workspace: its predictors are offered, and those that ship with Hase.
        name: the target's name in upper or lower case, or a part of it: the start of one target's name only or, if it starts
            none, a part of one target's name only (`h200`). Without a name, this machine if there are predictors for it; else
            the only target in the workspace; else the only one that ships.

    Raises:
        UserError: no predictors, none or several for `name`, or several of other devices to choose from.
    """
    folders = predictor_folders(workspace)
    if name is not None:
        return _named(name, sorted(folders), workspace), ()
    local_names = [target.name for target in local_targets()]
    for target in local_names:
        if target in folders:
            return target, ()
    in_workspace = sorted(target for target, folder in folders.items() if folder.parent != SHIPPED)
    shipped = sorted(target for target, folder in folders.items() if folder.parent == SHIPPED)
    offer = f"; or predict for a target that Hase ships, with --target: {', '.join(shipped)}" if shipped else ""
    if not in_workspace and len(shipped) == 1:
        return shipped[0], (f"no predictors for this machine ({local_names[0]}): predicted for {shipped[0]}, the only target "
                            "that comes with Hase (--measure-missing has the model's kernels measured here instead)",)
    if not in_workspace:
        raise UserError(f"no predictors for this machine ({local_names[0]}) in {workspace.predictors('')}; make them with: "
                        f"{'; '.join(MAKE_PREDICTORS)}; or have the kernels of one model measured, in seconds: "
                        f"--measure-missing{offer}")
    if len(in_workspace) > 1:
        raise UserError(f"no predictors for this machine ({local_names[0]}); choose a target with --target: "
                        f"{', '.join(in_workspace)}{offer}")
    return in_workspace[0], (f"predictors of another device are used, {in_workspace[0]}: this machine is {local_names[0]}",)


def _named(name: str, targets: Sequence[str], workspace: Workspace) -> str:
    """The one of `targets` that `name` stands for.

    Raises:
        UserError: `name` is part of the name of none of them, or of several.
    """
    part = name.lower()
    matching = [name] if name in targets else [target for target in targets if part and target.lower().startswith(part)] or [
        target for target in targets if part and part in target.lower()]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UserError(f"target {name}: several targets have this in their names: {', '.join(matching)}; give more of "
                        "the name")
    is_this_machine = part and any(part in local.name.lower() for local in local_targets())
    raise UserError(f"target {name}: no predictors for it in {workspace.predictors('')} or shipped with Hase "
                    f"(there: {', '.join(targets) or 'none'})" + (
                        f"; it is this machine: have the model's kernels measured, in seconds, with --measure-missing, or make "
                        f"predictors with: {'; '.join(MAKE_PREDICTORS)}" if is_this_machine else ""))


def is_here(target: Target) -> bool:
    """Whether this machine is the target."""
    flavour = target.flavour
    candidates = local_targets()
    runtime = runtime_named(flavour.runtime)
    if runtime.takes_setting and runtime.version() and (flavour.device == "cpu" or has_cuda()):
        candidates = (local_target(flavour.device, flavour.runtime, flavour.optimization, target.threads, target.cores),)
    return target.name in {local.name for local in candidates}


def refuse_other_device(target: Target, workspace: Workspace) -> None:
    """Checks that a target that nobody named is this machine.

    Raises:
        UserError: it is not; the message says how to name it.
    """
    if is_here(target):
        return
    device = slug(target.device_name)
    of_device = [name for name in predictor_folders(workspace) if name.startswith(device)]
    raise UserError(f"no predictors for this machine ({local_targets()[0].name}): add "
                    f"target=\"{device if len(of_device) == 1 else target.name}\" to predict for {target.name}, or have the "
                    "model's kernels measured here first: inference.measure_missing(model)")


def other_cudnn(sidecar: Sidecar) -> tuple[str, str] | None:
    """The minor versions of cuDNN that was measured and of this machine's, where it is the target and they differ; else
    None."""
    flavour = sidecar.target.flavour
    depends = flavour.device == "cuda" and runtime_named(flavour.runtime).uses_cudnn
    if not depends or not sidecar.machines or not is_here(sidecar.target):
        return None
    then, now = (minor(version) for version in (sidecar.machines[-1].versions.get("cudnn", ""), package_version(CUDNN)))
    return (then, now) if then and now and then != now else None


def version_notice(sidecar: Sidecar) -> str:
    """A notice about versions that differ here from those that were measured, if this machine is the target; else empty."""
    if differ := other_cudnn(sidecar):
        return (f"measured with cuDNN {differ[0]}, here is {differ[1]}: convolutions may run other kernels and take other "
                "times, so the interval is widened")
    return ""


def measured_on(sidecar: Sidecar) -> str:
    """The machine and the versions that were measured, in words; "" where this machine is the target."""
    measured = sidecar.machines[-1] if sidecar.machines else None
    if measured is None or is_here(sidecar.target):
        return ""
    flavour = sidecar.target.flavour
    runtime = runtime_named(flavour.runtime)
    about = [f"{runtime.title} {measured.versions.get(runtime.package) or flavour.runtime_version}"]
    about += [f"cuDNN {measured.versions['cudnn']}"] if runtime.uses_cudnn and measured.versions.get("cudnn") else []
    return f"{measured.device_name} with {', '.join(about)}, driver {measured.driver}"


def minor(version: str) -> str:
    """`9.19` of `9.19.0.56`."""
    return ".".join(version.split(".")[:2])


def fitted_for(workspace: Workspace, name: str | None = None, estimators: Sequence[Path] = ()) -> Fitted:
    """What was learned for the target `name` (or for the one that `choose_target` finds).

    Args:
        workspace: its predictors are offered, and those that ship with Hase.
        name: the target's name, or a part of it; without a name, this machine or the only target with predictors.
        estimators: the user's files and folders in which the code of admitted estimators may lie.

    Raises:
        UserError: no predictors, none or several for `name`, several of other devices to choose from, or their files can't be
            read.
    """
    if gpu := gpu_of_target(name):
        base = _named(base_target(), sorted(predictor_folders(workspace)), workspace)
        return carried_over(fitted_for(workspace, base, estimators), gpu, read_correction(workspace, gpu))
    name, notices = choose_target(workspace, name)
    folder = predictor_folders(workspace)[name]
    files = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))  # not what is just being written
    key = (str(folder), tuple(map(str, estimators)),
           *((entry.name, about.st_size, about.st_mtime_ns) for entry in files if (about := _about(entry))))

    def load() -> Learned:
        predictors = read_predictors(folder, tuple(estimators))
        composition = read_composition(folder, predictors.sidecar.dataset_sha256)
        return (predictors, composition, read_host_side(folder), read_sharing(folder), learned_mps(folder),
                read_serving(folder), read_uncertainty(folder))

    predictors, composition, host, sharing, mps, serving, uncertainty = cached(_fitted, key, load, limit=4)
    sidecar = predictors.sidecar
    versions = version_notice(sidecar)
    return Fitted(sidecar.target, predictors, composition, uncertainty, host, sharing, mps, serving,
                  other_cudnn=other_cudnn(sidecar) is not None,
                  notices=(*notices, versions) if versions else notices, measured_on=measured_on(sidecar))


def carried_over(measured: Fitted, gpu: Gpu, correction: Correction | None = None) -> Fitted:
    """What was learned of the H200, for a card of which nothing was measured, or only the kernels of `correction`."""
    target = measured.target.model_copy(update={"device_name": f"{gpu.slug}{FROM_SHEET}"})
    found, ratios = sheet_range(gpu), learned()[1]
    basis, of_whom = f"from the data sheet: never measured on {gpu.name}", "kernels of cards that were left out"
    if correction:
        found, ratios = Range(low=correction.low, high=correction.high), correction.ratios(ratios, gpu)
        basis = f"from the data sheet, corrected by {len(correction.measured_ms):,} kernels that were measured on {gpu.name}"
        of_whom = "sums of a few measured kernels, each left out,"
    about = (f"{basis}. Times are carried over from {measured.target.device_name}, with its host; {of_whom} "
             f"took {found.low:.2g} to {found.high:.2g} times as long as predicted")
    predictors = carried_predictors(measured.predictors, target, gpu, ratios,
                                    correction.measured_ms if correction else {})
    return replace(measured, target=target, predictors=predictors, sharing=None, mps=None, serving=None, other_cudnn=False,
                   notices=(*measured.notices, about), sheet_range=found)


def mismatches(record: ModelRecord, target: Target, dtypes: Sequence[str]) -> list[str]:
    """How a record differs from what the target's predictors hold for: the runtime's minor version, element types.

    Args:
        record: the model.
        target: the predictors' target.
        dtypes: element types of the kernels on which the predictors were trained.
    """
    graph, trained = record.flavour, target.flavour
    differences = []
    if graph.runtime_version != trained.runtime_version:
        differences.append(f"the graph is of {graph.runtime} {graph.runtime_version}, the predictors hold for "
                           f"{trained.runtime_version}")
    unseen = sorted({kernel.dtype for kernel in record.kernels.values()} & set(FLOATING) - set(dtypes))
    if unseen:
        differences.append(f"it computes in {', '.join(unseen)}, the predictors hold for {', '.join(dtypes)}")
    return differences


def _about(path: Path) -> os.stat_result | None:
    """What the system says of a file; None where it was replaced since it was listed."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def check_target(record: ModelRecord, target: Target, dtypes: Sequence[str], force: bool) -> list[str]:
    """Checks a record against what the target's predictors hold for; returns warnings about small differences.

    Args:
        record: the model.
        target: the predictors' target.
        dtypes: element types of the kernels on which the predictors were trained.
        force: warn instead of refusing.

    Raises:
        UserError: another device's or runtime's graph; or, unless forced, another minor version of the runtime, or another
            element type.
    """
    graph, trained = record.flavour, target.flavour
    if (graph.device, graph.runtime) != (trained.device, trained.runtime):
        raise UserError(f"{record.model}: the record is of a {graph.device} graph of {graph.runtime}, the predictors of target "
                        f"{target.name} hold for {trained.device} and {trained.runtime}")
    refusals = mismatches(record, target, dtypes)
    if refusals and not force:
        raise UserError(f"{record.model}: {'; '.join(refusals)}; measure and train for it, or use --force")
    warnings = [f"forced: {refusal}" for refusal in refusals]
    if graph.instruction_set != trained.instruction_set:
        warnings.append(f"the graph is shaped for {graph.instruction_set or 'another CPU'}, "
                        f"the target is an {trained.instruction_set} CPU: layouts may differ")
    return warnings


def holds_for(record: ModelRecord, fitted: Fitted) -> tuple[str, ...]:
    """What a prediction holds for, in words: the machine that was measured, unless it is this one, and how the graph was
    made, if without the target's provider."""
    said = [fitted.measured_on] if fitted.measured_on else []
    if record.derived:
        loads_much = record.weight_bytes > MOST_LOADED_BYTES and has_cuda()
        why = "the GPU would have to load all its weights" if loads_much else f"no {record.flavour.device} device is here"
        said.append(f"a graph that is derived with the CPU provider, since {why}")
    return tuple(said)
