"""The models whose energy was measured, with the work of their runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from records.dataset_files import idle_rows, read_journal, read_kernels, read_model_table
from records.kernel_costs import is_control_flow
from records.kernel_record import REMAKE, Kernel, ModelRecord
from records.kernel_record_files import read_model_record, record_path
from records.measurement import ENERGY, KERNELS
from training.composition.cuda_nodes import is_off_gpu
from training.composition.fitted import Composition
from training.energy.fitting import MeasuredEnergy
from training.energy.learned import MEASURE
from training.energy.work import Part, work_of_run
from training.kernels.predictors import Predictors
from training.kernels.settings import LAUNCHES
from utils.errors import UserError
from utils.lazy import pandas as pd
from utils.logger import get_logger
from utils.paths import Workspace

log = get_logger("energy")


def parts_of(record: ModelRecord, predictors: Predictors, label: str) -> list[Part]:
    """The kernels of a model that the target's device runs, with their times (ms) and launches; measured ones are looked up."""
    on_gpu = predictors.sidecar.target.flavour.device == "cuda"
    return parts([(record.kernel_of(node), node.runs) for node in record.nodes
                  if not is_control_flow(record.kernel_of(node))
                  and not (on_gpu and is_off_gpu(record.kernel_of(node), node.provider))], predictors, label)


def parts(there: Sequence[tuple[Kernel, float]], predictors: Predictors, label: str) -> list[Part]:
    """Kernels and how often they run, with their times (ms) and launches."""
    kernels = [kernel for kernel, _ in there]
    times_ms = predictors.predict(kernels, {}, label).latency_ms
    launches = (predictors.predict(kernels, {}, LAUNCHES).latency_ms if LAUNCHES in predictors.labels
                else [float(kernel.moves_data) for kernel in kernels])
    return [Part(kernel, runs, time_ms, count)
            for (kernel, runs), time_ms, count in zip(there, times_ms, launches, strict=True)]


def measured_energies(workspace: Workspace, target: str, predictors: Predictors,
                      composition: Composition) -> list[MeasuredEnergy]:
    """The models whose energy was measured soundly on an idle device, of no held-out family.

    Raises:
        UserError: the dataset has no energy, or none that is sound.
    """
    table = idle_rows(read_model_table(workspace, target))
    if "energy_j" not in table.columns:
        raise UserError(f"{workspace.dataset(target)}: no energy was measured; collect with {MEASURE}")
    table = table[table["energy_j"].notna()]
    doubtful = table["energy_doubts"].fillna("") != ""
    for name, doubts in table[doubtful][["Model", "energy_doubts"]].itertuples(index=False):
        log.warning("%s: its energy is not used: %s", name, doubts)
    found = []
    for name, rows in table[~doubtful].groupby("Model", sort=True):
        path = record_path(workspace, predictors.sidecar.target.flavour, str(name))
        if not path.is_file():
            log.warning("%s: its energy is not used, since it has no record (%s); make one with: %s", name, path, REMAKE)
            continue
        record = read_model_record(path)
        if record.group not in predictors.sidecar.held_out:
            medians = rows[["energy_j", "power_w", "idle_w", f"{ENERGY}_ms", "counter_j"]].apply(pd.to_numeric).median()
            found.append(_measured(record, medians, predictors, composition))
    found += measured_batches(workspace, target, predictors, composition.label)
    if not found:
        raise UserError(f"{workspace.dataset(target)}: no model with a sound energy; collect with {MEASURE}")
    return found


def measured_batches(workspace: Workspace, target: str, predictors: Predictors, label: str) -> list[MeasuredEnergy]:
    """The batches of kernels whose energy was measured soundly on an idle device, without those that hold kernels of a held-out
    family."""
    folder = workspace.dataset(target)
    batches = [m for block in read_journal(folder) if not block.level for m in block.measurements
               if (m.subject, m.label, m.status, m.error) == (KERNELS, ENERGY, "ok", "")]
    described = {one.kernel.id: one for one in read_kernels(folder, {name for m in batches for name in m.members})}
    found, held_out = [], set(predictors.sidecar.held_out)
    for m in batches:
        members = [described[name] for name in m.members]
        if any(held_out & set(member.groups) for member in members):
            continue
        values, [run_ms] = {name: value for name, (value,) in m.quantities.items()}, m.samples_ms
        work = work_of_run(parts([(member.kernel, 1.0) for member in members], predictors, label), run_ms)
        found.append(MeasuredEnergy(
            m.id, m.id, values["energy_j"], values["power_w"], values["idle_w"], run_ms, work, is_model=False,
            agreement=values["energy_j"] / values["counter_j"] if values.get("counter_j") else None))
    return found


def _measured(record: ModelRecord, medians: Mapping[str, float], predictors: Predictors,
              composition: Composition) -> MeasuredEnergy:
    of_run, run_ms = parts_of(record, predictors, composition.label), float(medians[f"{ENERGY}_ms"])
    left_out = None
    known = {model.model: model for model in composition.models}.get(record.model)
    if known is not None and composition.left_out == "family":
        # the kernels' times err as the latency does
        ratio = known.predicted_ms / known.measured_ms
        left_out = work_of_run([part._replace(time_ms=ratio * part.time_ms) for part in of_run], known.predicted_ms)
    counter_j = float(medians["counter_j"])
    return MeasuredEnergy(
        record.model, record.group, float(medians["energy_j"]), float(medians["power_w"]), float(medians["idle_w"]), run_ms,
        work_of_run(of_run, run_ms), left_out, None if math.isnan(counter_j) else float(medians["energy_j"]) / counter_j)
