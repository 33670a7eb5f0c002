"""Measures the kernels of a model that were never measured, or only while the machine was unsteady.

It runs on a machine that is the target. The collector measures the kernels and adds them to the target's dataset. Predictions
look their times up from then on; predictors stay as they are until the next training.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hase.benchmark.collecting.collect import collect_in_models, collect_kernels
from hase.benchmark.collecting.config import CollectorConfig, SettingConfig
from hase.benchmark.collecting.plans import ModelItem
from hase.benchmark.collecting.units import Workers, start_workers
from hase.benchmark.ort.runner import read_inputs
from hase.inference.prediction.batch import structure_of
from hase.inference.prediction.sources import (
    Source,
    checked_dims,
    checked_target,
    checked_workspace,
    other_branches_record,
    source_record,
)
from hase.inference.prediction.targets import (
    MAKE_PREDICTORS,
    Fitted,
    check_target,
    fitted_for,
    is_here,
    local_targets,
    predictor_folders,
)
from hase.learned import target_files
from hase.learned.default_predictors import default_composition, save_default, untrained
from hase.learned.kernels.measured import measured_times
from hase.learned.kernels.predictors import ON_GPU, leaves_gpu_idle
from hase.learned.kernels.sidecar import copy_predictors, renew_measured
from hase.learned.kernels.uncertainty import NOTHING_LEARNED
from hase.records.dataset_files import DatasetKernel, header_path, read_journal
from hase.records.dataset_tables import read_kernel_table
from hase.records.kernel_costs import is_control_flow
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.measurement import DEFAULT_LABELS, IN_MODEL_LABELS
from hase.runtimes import runtime_named
from hase.runtimes.protocol import RuntimeSetting
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.files import temporary_folder, write_json
from hase.utils.fingerprint import DEFAULT_RUNTIME, Flavour, Target
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger
from hase.utils.paths import ROOT, Workspace
from hase.utils.text import first_and_count

if TYPE_CHECKING:
    from hase.learned.composition.fitted import Composition

log = get_logger("predict")
# ONNX Runtime's message for a kernel that it opens, but can't run with any inputs.
REFUSAL = re.compile("Status Message: (?P<words>.*(not (yet )?(implemented|supported)|only supports?|unsupported).*)",
                     re.IGNORECASE)
CONFIG = ROOT / "benchmark" / "config.yaml"


@dataclass(frozen=True)
class Filled:
    """Result of measuring a model's missing kernels.

    Attributes:
        measured: number of kernels measured now, including those that failed; it took `measuring_s`.
        seconds: total time, with building the kernels, waiting for workers and writing the results.
        left: ids of kernels that still have no measured time.
        unsteady: ids of kernels that were only ever measured while the machine was unsteady.
    """

    measured: int
    measuring_s: float
    seconds: float
    left: tuple[str, ...]
    unsteady: tuple[str, ...] = ()

    def log(self) -> None:
        """Logs what was measured."""
        if self.measured:
            log.info("measured %d kernels in %.1f s; %.1f s in all", self.measured, self.measuring_s, self.seconds)
        else:
            log.info("nothing to measure: all kernels were measured before, or failed")
        if self.unsteady:
            log.warning("the machine was unsteady while it measured %s; repeat the command when nothing else runs",
                        first_and_count(self.unsteady))
        if self.left:
            log.warning("%d kernels could not be measured and stay predicted: %s", len(self.left), ", ".join(self.left))


def looked_up(composition: Composition) -> tuple[str, ...]:
    """The labels that a composition needs for each kernel: its own and, in a pipeline, the launches."""
    return ON_GPU if composition.kind == "pipeline" else (composition.label,)


def missing_kernels(fitted: Fitted, records: Sequence[ModelRecord]) -> dict[str, Kernel]:
    """The kernels (by id) whose time must be predicted. A node with a body (If, Loop) counts as the kernels of its body."""
    measured = fitted.predictors.measured
    return {name: kernel for record in records for name, kernel in record.kernels.items()
            if not is_control_flow(kernel) and any(label not in measured.get(name, {}) and not leaves_gpu_idle(kernel, label)
                   for label in looked_up(fitted.composition))}


def unsteady_kernels(fitted: Fitted, records: Sequence[ModelRecord]) -> dict[str, Kernel]:
    """The kernels (by id) that were only measured while the target was unsteady."""
    return {name: kernel for record in records for name, kernel in record.kernels.items()
            if any(fitted.predictors.measured_drift(kernel, label) for label in looked_up(fitted.composition))}


def kernels_by_values(fitted: Fitted, records: Sequence[ModelRecord], given: bool) -> dict[str, Kernel]:
    """The kernels (by id) whose time depends on values, if not yet measured with realistic ones; with `given` inputs, all."""
    return {name: kernel for record in records for name, kernel in record.kernels.items()
            if fitted.target.flavour.device == "cpu" and kernel.time_by_values
            and (given or not fitted.predictors.inputs_realistic(kernel, fitted.composition.label))}


def build(kernels: Mapping[str, Kernel], flavour: Flavour, workspace: Workspace) -> set[str]:
    """Builds the missing kernels of a workspace; returns the ids of those that it then holds."""
    built, folder, runtime = set(), workspace.kernel_onnx / flavour.name, runtime_named(flavour.runtime)
    for name, kernel in kernels.items():
        if not (folder / f"{name}{runtime.kernel_suffix}").exists():
            try:
                if runtime.build_kernel is None:
                    raise UserError(f"{name}: {runtime.title} can't build a kernel from its record: {runtime.build_with}")
                runtime.build_kernel(kernel, folder)
            except UserError as error:
                log.warning("%s", error)
                continue
        built.add(name)
    return built


def measure_missing(source: Source, sizes: Sequence[Mapping[str, int]] = ({},), *, target: str | None = None,
                    workspace: Workspace | str | Path | None = None, config: CollectorConfig | None = None, force: bool = False,
                    static: bool = False, inputs: Path | None = None) -> Filled:
    """Measures the kernels of a model that have no steady measurement on the target; `predict` then looks them up.

    Args:
        sizes: the combinations of dynamic dimensions that will be predicted.
        workspace: shipped predictors are copied into it, and a missing dataset is created.
        config: how to measure; by default benchmark/config.yaml. Its device, levels and labels are ignored, and an existing
            dataset keeps its metrics and held-out groups.
        inputs: a file with values of the model's inputs, as numpy.savez writes them; None: standard normal random numbers.

    Raises:
        UserError: this machine is not the target, the model or `inputs` can't be used or run there, or the dataset lacks the
            label that is needed.
    """
    workspace, target, sizes = checked_workspace(workspace), checked_target(target), [checked_dims(dims) for dims in sizes]
    if isinstance(source, (str, Path)):
        workspace.find_model(Path(source))  # reports a mistyped name before anything starts
    fitted = nothing_learned(workspace, target) or fitted_for(workspace, target)
    name, flavour = fitted.target.name, fitted.target.flavour
    if not is_here(fitted.target):
        raise UserError(f"kernels of target {name} can only be measured on such a machine, and this one is "
                        f"{' and '.join(local.name for local in local_targets())}; leave --measure-missing out, or "
                        "predict there")
    on_cpu, new_dataset = flavour.device == "cpu", not header_path(workspace.dataset(name)).exists()
    config = (config or read_config(CONFIG, CollectorConfig)).model_copy(update={
        "device": flavour.device, "runtime": flavour.runtime, "setting": setting_of(fitted.target),
        "labels": (*DEFAULT_LABELS, fitted.composition.label) if new_dataset and fitted.composition.assumed and on_cpu else
                  (fitted.composition.label,)})
    setting = RuntimeSetting.of(fitted.target, workspace.kernel_onnx)
    with (sole_writer(workspace.dataset(name)),
          start_workers(config, flavour.device, config.labels, setting) as workers):  # start while the model is analysed
        records = _records(source, sizes, fitted, workspace, force, static)
        if inputs:
            check_inputs(inputs, source, records)
        wanted = (unsteady_kernels(fitted, records) | kernels_by_values(fitted, records, bool(inputs))
                  | missing_kernels(fitted, records))
        if not wanted:
            return Filled(0, 0.0, 0.0, ())
        began, measured, measuring_s = time.monotonic(), 0, 0.0
        if on_cpu and fitted.composition.label in IN_MODEL_LABELS:
            measured, measuring_s = _measure_in_model(source, records, wanted, fitted, workspace, config, workers, inputs)
            done = _measured_in_model(workspace, fitted) if measured else frozenset()
            wanted = {kernel_id: kernel for kernel_id, kernel in wanted.items() if kernel_id not in done}
        with sole_writer(workspace.kernel_onnx):
            built = build(wanted, flavour, workspace)
        kernels = [DatasetKernel.held_by(kernel, records) for kernel in wanted.values() if kernel.id in built]
        if kernels:
            alone_count, alone_s = _measure(kernels, fitted, workspace, config, workers)
            measured, measuring_s = measured + alone_count, measuring_s + alone_s
    left, unsteady = (tuple(selected(fitted_for(workspace, name), records)) for selected in (missing_kernels, unsteady_kernels))
    _check_refusals(records[0].model, left, workspace.dataset(name))
    return Filled(measured, measuring_s, time.monotonic() - began, left, unsteady)


def is_record(source: Source) -> bool:
    """Whether only the record of a model is given."""
    return isinstance(source, ModelRecord) or (isinstance(source, (str, Path)) and Path(source).suffix == ".json")


def check_inputs(inputs: Path, source: Source, records: Sequence[ModelRecord]) -> None:
    """Raises UserError if a user's inputs do not fit the model, or its kernels can't be measured inside it."""
    flavour = records[0].flavour
    if is_record(source):
        raise UserError(f"{records[0].model}: a record can't be run; give the model file with --inputs")
    if (flavour.device, flavour.runtime) != ("cpu", DEFAULT_RUNTIME):
        raise UserError("--inputs: only on a CPU under ONNX Runtime are kernels measured inside their model; leave it out here")
    for record in records:
        read_inputs(inputs, record.inputs)


def _check_refusals(model: str, kernels: Collection[str], dataset: Path) -> None:
    """Raises UserError, with the runtime's message, if the runtime can never run one of these kernels."""
    if not kernels or not header_path(dataset).is_file():
        return
    for measurement in (measurement for block in read_journal(dataset) for measurement in block.measurements):
        if measurement.id in kernels and (refusal := REFUSAL.search(measurement.error)):
            raise UserError(f"{model}: can't run on {dataset.name}: {measurement.id}: {refusal.group('words')}; export the "
                            "model for this device")


def setting_of(target: Target) -> SettingConfig:
    """The collector's setting under which this machine is the target."""
    if not runtime_named(target.flavour.runtime).takes_setting:
        return SettingConfig()
    return SettingConfig(level=target.flavour.optimization, threads=target.threads, cores=target.cores)


def nothing_learned(workspace: Workspace, target: str | None) -> Fitted | None:
    """Default constants (learned/default_predictors.py) for a machine without predictors; writes nothing.

    None if predictors exist for `target` (without a name: for this machine), or this machine is not the target. Raises
    UserError: this machine has a GPU, and no GPU composition comes with Hase.
    """
    trained, candidates = predictor_folders(workspace), local_targets()
    if target is not None:
        candidates = tuple(local for local in candidates
                           if target in local.name and not any(target in name for name in trained))
    if not candidates or any(local.name in trained for local in candidates):
        return None
    local_target = candidates[0]
    log.warning("nothing was learned of this machine (%s): the model's kernels are measured and put together with default "
                "constants; a training replaces them (%s)", local_target.name, "; ".join(MAKE_PREDICTORS))
    return Fitted(local_target, untrained(workspace.predictors(local_target.name), local_target),
                  default_composition(local_target.flavour.device), NOTHING_LEARNED)


def _records(source: Source, sizes: Sequence[Mapping[str, int]], fitted: Fitted, workspace: Workspace,
             force: bool, static: bool) -> list[ModelRecord]:
    """The model's checked record at each size; two records where the size does not decide which branch of an If runs."""
    flavour = fitted.target.flavour
    model = workspace.find_model(Path(source)) if isinstance(source, (str, Path)) else source
    records = [source_record(model, flavour, dims, static) for dims in sizes]
    records += filter(None, [other_branches_record(model, record, static) for record in records])
    for record in records:
        check_target(record, fitted, structure_of(record).dtypes, force)
        if record.flavour != flavour:
            raise UserError(f"{record.model}: the record is of a {record.flavour.name} graph, and only kernels of "
                            f"{flavour.name} can be measured here; give the model file instead")
    return records


def _measure(kernels: Sequence[DatasetKernel], fitted: Fitted, workspace: Workspace, config: CollectorConfig,
             workers: Workers) -> tuple[int, float]:
    """Measures built kernels and adds them to the lookup; returns their number and the seconds it took."""
    totals = collect_kernels(workspace, config, kernels, workers)
    _add_to_predictors(fitted, workspace)
    return totals["measured_kernels"], totals["measuring_s"]


def _measure_in_model(source: Source, records: Sequence[ModelRecord], wanted: Mapping[str, Kernel], fitted: Fitted,
                      workspace: Workspace, config: CollectorConfig, workers: Workers,
                      inputs: Path | None) -> tuple[int, float]:
    """Measures kernels inside the model, at each of its sizes; returns the same as `_measure`.

    A model that is given by its record alone can't be measured. Kernels that can't be measured are skipped with a warning.
    """
    if is_record(source):
        return 0, 0.0
    described = [DatasetKernel.held_by(kernel, records) for kernel in wanted.values()]
    with temporary_folder() as folder:
        path = workspace.find_model(Path(source)) if isinstance(source, (str, Path)) else folder / "model.onnx"
        if not isinstance(source, (str, Path, ModelRecord)):
            path.write_bytes(source if isinstance(source, bytes) else source.SerializeToString())
        items, to_measure = [], set(wanted)
        for index, record in enumerate(records):
            if in_record := to_measure & set(record.kernels):
                write_json(folder / f"{index}.json", record)
                items.append(ModelItem(path, folder / f"{index}.json", record, measures_kernels=True,
                                       only=frozenset(in_record), inputs=inputs))
                to_measure -= in_record
        totals = collect_in_models(workspace, config, items, described, workers)
    if totals["measured_kernels"]:
        _add_to_predictors(fitted, workspace)
    return totals["measured_kernels"], totals["measuring_s"]


def _measured_in_model(workspace: Workspace, fitted: Fitted) -> frozenset[str]:
    """Ids of kernels that were measured inside a model. No measurement from elsewhere replaces these times."""
    table = read_kernel_table(workspace, fitted.target.name)
    in_model = table["Context"].fillna("").str.contains(f"{fitted.composition.label}:in_model", regex=False)
    return frozenset(table["Kernel_ID"][in_model & (table["Level"] == 0)])


def _add_to_predictors(fitted: Fitted, workspace: Workspace) -> None:
    """Adds the measured times to the lookup of the workspace's predictors."""
    name, folder = fitted.target.name, workspace.predictors(fitted.target.name)
    with sole_writer(workspace.predictors("")):
        if fitted.composition.assumed and not target_files.PREDICTORS.path(folder).is_file():
            save_default(folder, fitted.predictors)
        elif fitted.predictors.folder != folder:
            log.warning("%s: the predictors of %s that come with Hase are copied to this folder, and the measured times are "
                        "added; a training in this workspace would replace them by those of its own dataset", folder, name)
            copy_predictors(fitted.predictors.folder, folder)
        renew_measured(folder, measured_times(workspace, name))
