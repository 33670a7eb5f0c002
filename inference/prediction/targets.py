"""Chooses the target of a prediction and reads its predictors, cached until their files change."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hase.learned import target_files
from hase.learned.composition.fitted import Composition, read_composition
from hase.learned.composition.host_side import NOTHING_MEASURED, HostSide, read_host_side
from hase.learned.data_sheet.ratios import CardRatios, Correction, SheetModel, SheetRange, read_correction, read_sheet
from hase.learned.data_sheet.work import work_of
from hase.learned.kernels.predictors import Predictors, leaves_gpu_idle, read_predictors
from hase.learned.kernels.uncertainty import NOTHING_LEARNED, Uncertainty
from hase.learned.sharing import LearnedMps, ServingHost, Sharing, read_mps
from hase.records.devices import GpuDataSheet, catalogue, gpu_named, named_or_in_file
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.runtimes import local_target, runtime_named
from hase.utils.errors import UserError
from hase.utils.files import cached, signature
from hase.utils.fingerprint import CUDNN, FROM_SHEET, Target, has_cuda, package_version, slug
from hase.utils.model_graphs import MOST_LOADED_BYTES
from hase.utils.paths import SHIPPED, Workspace

if TYPE_CHECKING:
    from hase.learned.kernels.sidecar import Sidecar

MAKE_PREDICTORS = (
    "python benchmark/collector.py", "python training/train_kernel_model.py", "python training/fit_composition.py")
Learned = tuple[  # what the files of a predictors' folder hold
    Predictors, Composition, HostSide, Sharing | None, LearnedMps | None, ServingHost | None, Uncertainty]
FLOATING = ("float16", "bfloat16", "float32", "float64")
_fitted: dict[tuple[Any, ...], Learned] = {}
NO_CUDA = {  # why there are no predictions, by the start of a name that users give as a card's
    "mi": "AMD's cards run ROCm or MIGraphX", "gaudi": "Intel's cards have providers of their own", "tpu": "TPUs do not run it",
    "trt": "TensorRT compiles kernels of its own", "tensorrt": "TensorRT compiles kernels of its own"}
THIS = "this"  # the name of this machine
NEW_GENERATION = 1.5  # factor on the log uncertainty if no table has the card's generation: a choice


@dataclass
class CardPredictors(Predictors):
    """Predictors of a card that was never measured, from its data sheet: `--gpu l40s`.

    Kernel times on the H200 (`base`), measured or predicted, are scaled to the card (`gpu`) by `ratios`, except times measured
    on it (`seen_ms`, by kernel id). Launches, the host and the composition stay those of the H200 and its host.
    """

    ratios: CardRatios | None = None
    base: GpuDataSheet | None = None
    gpu: GpuDataSheet | None = None
    seen_ms: Mapping[str, float] = field(default_factory=dict)

    def _time(self, kernels: Mapping[str, Kernel], load: tuple[float, ...], label: str,
              look_up: bool) -> dict[str, tuple[float, str]]:
        times = super()._time(kernels, load, label, look_up)
        if label != GPU_LABEL or self.ratios is None or self.base is None or self.gpu is None:
            return {name: (time, "predicted" if origin == "measured" else origin) for name, (time, origin) in times.items()}
        working = {name: kernel for name, kernel in kernels.items()
                   if not leaves_gpu_idle(kernel, label) and times[name][0] > 0}
        if working:
            counts = super()._time(working, load, LAUNCHES, look_up)
            work = work_of(list(working.values()), [counts[name][0] for name in working])
            scaled_ms = self.ratios.times_ms(work, np.array([times[name][0] for name in working]), self.base, self.gpu)
            times |= {name: (time, "predicted" if times[name][1] == "measured" else times[name][1])
                      for name, time in zip(working, scaled_ms.tolist(), strict=True)}
        return times | ({name: (self.seen_ms[name], "measured") for name in kernels if name in self.seen_ms} if look_up else {})

    def measured_drift(self, kernel: Kernel, label: str) -> float:
        return 0.0 if kernel.id in self.seen_ms else super().measured_drift(kernel, label)


@functools.cache
def sheet_models() -> tuple[SheetModel, CardRatios]:
    """What was learned to scale times from one card to another."""
    return read_sheet()


def gpu_of_target(target: str | None) -> GpuDataSheet | None:
    """The card whose data sheet a target's name stands for; None for other targets. Raises UserError: unknown, or bad file."""
    if target is None or FROM_SHEET not in target:
        return None
    name = target.partition(FROM_SHEET)[0]
    if gpu := named_or_in_file(name):
        return gpu
    cards = ", ".join(gpu.slug for gpu in catalogue())
    raise UserError(f"{name}: no such card is known{_suggestion(name, ())}; give one of {cards}, or a YAML file with its data "
                    "sheet (a list `gpus:` like that of records/gpus.yaml)")


def device_named(name: str, workspace: Workspace) -> str:
    """The target of a device that a user names: with predictors, or `NAME-from-data-sheet`.

    A name is a target's (or a part of it that only one has), a card's of records/gpus.yaml in any spelling, a YAML file with
    one's own cards, or `this` machine.

    Raises:
        UserError: unknown, or a part of several targets' names; the message suggests similar names.
    """
    targets = sorted(predictor_folders(workspace))
    if FROM_SHEET in name or name in targets:
        return name
    if name == THIS:
        return next((local.name for local in local_targets() if local.name in targets), local_targets()[0].name)
    if name.endswith((".yaml", ".yml")):
        return f"{name}{FROM_SHEET}"
    if gpu := gpu_named(name):
        measured = [target for target in targets if target.startswith(f"{slug(gpu.name)}-")]
        return _match_target(slug(gpu.name), targets, workspace) if measured else f"{gpu.slug}{FROM_SHEET}"
    return _match_target(name, targets, workspace)


def _suggestion(name: str, targets: Sequence[str]) -> str:
    """Why there is no such device, or which similar ones there are; "" if nothing is known of it."""
    if why := next((reason for start, reason in NO_CUDA.items() if slug(name).startswith(start)), None):
        return f": predictions are for ONNX Runtime with CUDA, and {why}"
    known = dict.fromkeys((*targets, THIS, *(alias for gpu in catalogue() for alias in (gpu.slug, *gpu.aka))))
    similar = difflib.get_close_matches(slug(name), known, 2)
    return f" (did you mean {' or '.join(similar)}?)" if similar else ""


def scale_predictors(measured: Predictors, target: Target, gpu: GpuDataSheet, ratios: CardRatios,
                     seen_ms: Mapping[str, float] | None = None) -> CardPredictors:
    """Predictors for the card `gpu`, scaled from those of a measured card. `seen_ms`: kernel times measured on `gpu`, by id."""
    values = {entry.name: getattr(measured, entry.name) for entry in fields(Predictors) if not entry.name.startswith("_")}
    values["sidecar"] = measured.sidecar.model_copy(update={"target": target, "machines": ()})
    scaled = CardPredictors(**values, ratios=ratios, base=gpu_named(measured.sidecar.target.device_name), gpu=gpu,
                            seen_ms=seen_ms or {})
    scaled._models = measured._models  # shared, so that boosters are read only once
    return scaled


def sheet_range(gpu: GpuDataSheet, model: SheetModel | None = None) -> SheetRange:
    """The uncertainty of times that are scaled to a card.

    Smaller if ONNX Runtime's kernels were measured at its compute capability, larger if its generation is in no table.
    """
    model = model or sheet_models()[0]
    known, own = ([card for name in names if (card := gpu_named(name))] for names in (model.cards, model.own))
    found = model.alike if any(card.compute_capability == gpu.compute_capability for card in own) else model.unlike
    if any(card.generation == gpu.generation for card in known):
        return found
    return SheetRange(low=found.low**NEW_GENERATION, high=found.high**NEW_GENERATION)


@dataclass(frozen=True)
class Fitted:
    """Everything learned for one target (predictors, composition, sharing), and how the target was chosen."""

    target: Target
    predictors: Predictors
    composition: Composition
    uncertainty: Uncertainty  # how far off the times of unknown kernels may be
    host: HostSide = NOTHING_MEASURED  # the host's side of a CUDA session
    sharing: Sharing | None = None  # how processes take turns on the target's GPU
    mps: LearnedMps | None = None  # how kernels of several processes run through MPS
    serving: ServingHost | None = None  # how the pace of a host changes while it serves requests
    other_cudnn: bool = False  # this machine has the target's device, but another minor version of cuDNN than was measured
    notices: tuple[str, ...] = ()  # notes for the user about the choice and the versions
    measured_on: str = ""  # the machine and the versions that were measured, in words; "" where this machine is the target
    sheet_range: SheetRange | None = None  # the uncertainty of times scaled from another card; None for a measured card


@functools.cache
def local_targets() -> tuple[Target, ...]:
    """The targets that this machine is: its GPU, if it has one, then its CPU."""
    return tuple(local_target(device) for device in (("cuda", "cpu") if has_cuda() else ("cpu",)))


def predictor_folders(workspace: Workspace) -> dict[str, Path]:
    """The predictors' folder of every target: in the workspace, or else shipped with Hase."""
    roots = (SHIPPED, workspace.predictors(""))
    return {path.parent.name: path.parent for root in roots for path in sorted(root.glob(f"*/{target_files.PREDICTORS.name}"))}


def choose_target(workspace: Workspace, name: str | None) -> tuple[str, tuple[str, ...]]:
    """Chooses the target of a prediction: its full name, and notices about the choice.

    Candidates are in the workspace, or ship with Hase.
    `name` is a target's name, in any case, or a part of it that only one name has: its start or, if no name starts so, any part
    (`h200`). Without a name: this machine, if it has predictors; else the only target in the workspace; else the only one that
    ships.

    Raises:
        UserError: no predictors, none or several for `name`, or several of other devices to choose from.
    """
    folders = predictor_folders(workspace)
    if name is not None:
        return _match_target(name, sorted(folders), workspace), ()
    local_names = [target.name for target in local_targets()]
    for target in local_names:
        if target in folders:
            return target, ()
    in_workspace = sorted(target for target, folder in folders.items() if folder.parent != SHIPPED)
    shipped = sorted(target for target, folder in folders.items() if folder.parent == SHIPPED)
    offer = f"; or predict for a target that Hase ships, with --on: {', '.join(shipped)}" if shipped else ""
    if not in_workspace and len(shipped) == 1:
        return shipped[0], (f"no predictors for this machine ({local_names[0]}): predicted for {shipped[0]}, the only target "
                            "that comes with Hase (--measure-missing has the model's kernels measured here instead)",)
    if not in_workspace:
        raise UserError(f"no predictors for this machine ({local_names[0]}) in {workspace.predictors('')}; make them with: "
                        f"{'; '.join(MAKE_PREDICTORS)}; or have the kernels of one model measured, in seconds: "
                        f"--measure-missing{offer}")
    if len(in_workspace) > 1:
        raise UserError(f"no predictors for this machine ({local_names[0]}); choose a target with --on: "
                        f"{', '.join(in_workspace)}{offer}")
    return in_workspace[0], (f"predictors of another device are used, {in_workspace[0]}: this machine is {local_names[0]}",)


def _match_target(name: str, targets: Sequence[str], workspace: Workspace) -> str:
    """The one of `targets` that `name` stands for. Raises UserError: none, or several."""
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
                    f"(there: {', '.join(targets) or 'none'}), and no GPU of records/gpus.yaml{_suggestion(name, targets)}" + (
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
    """Raises UserError unless the target is this machine; for callers that named no target."""
    if is_here(target):
        return
    device = slug(target.device_name)
    of_device = [name for name in predictor_folders(workspace) if name.startswith(device)]
    raise UserError(f"no predictors for this machine ({local_targets()[0].name}): add "
                    f"target=\"{device if len(of_device) == 1 else target.name}\" to predict for {target.name}, or have the "
                    "model's kernels measured here first: inference.measure_missing(model)")


def other_cudnn(sidecar: Sidecar) -> tuple[str, str] | None:
    """The minor versions of cuDNN (measured, here) if this machine is the target and they differ; else None."""
    flavour = sidecar.target.flavour
    depends = flavour.device == "cuda" and runtime_named(flavour.runtime).uses_cudnn
    if not depends or not sidecar.machines or not is_here(sidecar.target):
        return None
    then, now = (".".join(version.split(".")[:2])  # `9.19` of `9.19.0.56`
                 for version in (sidecar.machines[-1].versions.get("cudnn", ""), package_version(CUDNN)))
    return (then, now) if then and now and then != now else None


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


def fitted_for(workspace: Workspace, name: str | None = None, estimators: Sequence[Path] = ()) -> Fitted:
    """Chooses the target `name` (see `choose_target`) and reads everything learned for it. `estimators`: folders with the code
    of admitted estimators.

    Raises:
        UserError: as `choose_target`, or the predictors can't be read.
    """
    name = name and device_named(name, workspace)
    if gpu := gpu_of_target(name):
        base = _match_target(sheet_models()[0].base, sorted(predictor_folders(workspace)), workspace)
        return scale_to_card(fitted_for(workspace, base, estimators), gpu, read_correction(workspace, gpu))
    name, notices = choose_target(workspace, name)
    folder = predictor_folders(workspace)[name]
    files = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))  # hidden files are being written
    key = (str(folder), tuple(map(str, estimators)), *map(signature, files))

    def load() -> Learned:
        predictors = read_predictors(folder, tuple(estimators))
        composition = read_composition(folder, predictors.sidecar.dataset_sha256)
        return (predictors, composition, read_host_side(folder), target_files.SHARING.read(folder), read_mps(folder),
                target_files.SERVING.read(folder), target_files.UNCERTAINTY.read(folder) or NOTHING_LEARNED)

    predictors, composition, host, sharing, mps, serving, uncertainty = cached(_fitted, key, load, limit=4)
    sidecar = predictors.sidecar
    if cudnn := other_cudnn(sidecar):
        notices = (*notices, f"measured with cuDNN {cudnn[0]}, here is {cudnn[1]}: convolutions may run other kernels and take "
                             "other times, so the interval is widened")
    return Fitted(sidecar.target, predictors, composition, uncertainty, host, sharing, mps, serving,
                  other_cudnn=cudnn is not None, notices=notices, measured_on=measured_on(sidecar))


def scale_to_card(measured: Fitted, gpu: GpuDataSheet, correction: Correction | None = None) -> Fitted:
    """What was learned for the H200, scaled to a card that was not measured, or only with the kernels of `correction`."""
    target = measured.target.model_copy(update={"device_name": f"{gpu.slug}{FROM_SHEET}"})
    found, ratios = sheet_range(gpu), sheet_models()[1]
    basis, of_whom = f"from the data sheet: never measured on {gpu.name}", "kernels of cards that were left out"
    if correction:
        found, ratios = SheetRange(low=correction.low, high=correction.high), correction.ratios(ratios, gpu)
        basis = f"from the data sheet, corrected by {len(correction.measured_ms):,} kernels that were measured on {gpu.name}"
        of_whom = "sums of a few measured kernels, each left out,"
    about = (f"{basis}. Times are carried over from {measured.target.device_name}, with its host; {of_whom} "
             f"took {found.low:.2g} to {found.high:.2g} times as long as predicted")
    predictors = scale_predictors(measured.predictors, target, gpu, ratios, correction.measured_ms if correction else {})
    return replace(measured, target=target, predictors=predictors, sharing=None, mps=None, serving=None, other_cudnn=False,
                   notices=(*measured.notices, about), sheet_range=found)


def mismatches(record: ModelRecord, target: Target, computed: Collection[str], dtypes: Sequence[str]) -> list[str]:
    """Differences between a record and its target's predictors: the runtime's minor version, and element types.

    `computed` are the element types that the model computes in, `dtypes` those of the training kernels.
    """
    graph, trained = record.flavour, target.flavour
    differences = []
    if graph.runtime_version != trained.runtime_version:
        differences.append(f"the graph is of {graph.runtime} {graph.runtime_version}, the predictors hold for "
                           f"{trained.runtime_version}")
    if unseen := sorted(set(computed) - set(dtypes)):
        differences.append(f"it computes in {', '.join(unseen)}, the predictors hold for {', '.join(dtypes)}")
    return differences


def check_target(record: ModelRecord, fitted: Fitted, computed: Collection[str], force: bool) -> list[str]:
    """Checks that a target's predictors are valid for a record; returns warnings about small differences.

    Raises:
        UserError: another device's or runtime's graph; or, unless forced, another minor version of the runtime, or another
            element type.
    """
    target, graph = fitted.target, record.flavour
    trained = target.flavour
    if (graph.device, graph.runtime) != (trained.device, trained.runtime):
        raise UserError(f"{record.model}: the record is of a {graph.device} graph of {graph.runtime}, the predictors of target "
                        f"{target.name} hold for {trained.device} and {trained.runtime}")
    refusals = mismatches(record, target, computed, fitted.predictors.sidecar.dtypes)
    if refusals and not force:
        raise UserError(f"{record.model}: {'; '.join(refusals)}; measure and train for it, or use --force")
    warnings = [f"forced: {refusal}" for refusal in refusals]
    if graph.instruction_set != trained.instruction_set:
        warnings.append(f"the graph is shaped for {graph.instruction_set or 'another CPU'}, "
                        f"the target is an {trained.instruction_set} CPU: layouts may differ")
    return warnings


def holds_for(record: ModelRecord, fitted: Fitted) -> tuple[str, ...]:
    """What a prediction is valid for, in words: the measured machine unless it is this one, and how the graph was made."""
    words = [fitted.measured_on] if fitted.measured_on else []
    if record.derived:
        loads_much = record.weight_bytes > MOST_LOADED_BYTES and has_cuda()
        why = "the GPU would have to load all its weights" if loads_much else f"no {record.flavour.device} device is here"
        words.append(f"a graph that is derived with the CPU provider, since {why}")
    return tuple(words)
