"""Measures the stages on the units of this machine, and keeps `raw_measurements.json` up to date."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from hase.benchmark.measuring.blocks import Bench, PlannedBlock, Steadiness
from hase.benchmark.measuring.driver import measure_loads, pending
from hase.extras.graph_stages.measuring.layer import TENSORS
from hase.extras.graph_stages.measuring.records import (
    RAW,
    TRANSFERS,
    RawMeasurements,
    StageRecord,
    TransferRecord,
    UnitReport,
    write_transfers,
)
from hase.extras.graph_stages.measuring.units import OPENVINO, PACKAGES, TORCH, StageTask, runtime_version
from hase.extras.graph_stages.measuring.worker import RESIDENT, StageRequest, copies_to_time, failed_measurement
from hase.records.measurement import Block, Journal, JournalFile, Measurement, best_measurements
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import Machine, machine, package_version
from hase.utils.locks import measuring, sole_writer
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.processes import WorkerFailed, WorkerProcess

JOURNAL = "measurements.jsonl"
WORKER = "hase.extras.graph_stages.measuring.worker"
CANARY_STAGE = 5  # a matrix product, whose time depends least on where edges point
TIMEOUT_S = 600.0  # for one stage; an NPU's compiler may take minutes
log = get_logger("profiler")
Worker = WorkerProcess[StageRequest, Measurement]


@dataclass(frozen=True)
class Profile:
    """The stages to measure on each unit of this machine, by size, unit and stage; `reports` includes absent units."""

    tasks: Sequence[StageTask]
    reports: Sequence[UnitReport]
    warmup: int
    runs: int
    seed: int
    retry: bool = False

    @property
    def units(self) -> list[str]:
        """The names of the units that are measured."""
        return list(dict.fromkeys(task.unit for task in self.tasks))


class StageJournal(JournalFile):
    """The journal of stages; it writes `raw_measurements.json` after each block."""

    def __init__(self, workspace: Workspace, profile: Profile, here: Machine) -> None:
        super().__init__(workspace.stage_results / JOURNAL)
        self._raw, self._profile, self._here = workspace.stage_results / RAW, profile, here

    def append(self, block: Block) -> None:
        super().append(block)
        self.write_raw()

    def write_raw(self) -> RawMeasurements:
        """Writes and returns what is measured so far of the profile."""
        measured = best_measurements(block for block in self.blocks if block.machine == self._here.uuid)
        raw = RawMeasurements(
            machine=self._here.model_dump(), versions=installed(), warmup=self._profile.warmup, runs=self._profile.runs,
            seed=self._profile.seed, units=tuple(self._profile.reports),
            records=tuple(record_of(task, measured[task.id]) for task in self._profile.tasks if task.id in measured))
        files.write_json(self._raw, raw)
        return raw


class UnitJournal(Journal):
    """A journal of one unit, which passes its blocks on to the common one: canary times of two units can't be compared."""

    def __init__(self, common: Journal) -> None:
        super().__init__()
        self._common = common

    def append(self, block: Block) -> None:
        self._common.append(block)
        super().append(block)


def installed() -> dict[str, str]:
    """Versions of Python and of the packages that run stages; missing packages are left out."""
    versions = {"python": platform.python_version(), "numpy": package_version("numpy")}
    return versions | {name: version for name in PACKAGES if (version := runtime_version(name))}


def record_of(task: StageTask, measured: Measurement) -> StageRecord:
    """Converts a measurement to a record of `raw_measurements.json`."""
    ran_by_runtime = measured.facts["runtime"] == task.runtime != TORCH
    model = (task.file.ir if task.runtime == OPENVINO else task.file.onnx)(task.folder).name if ran_by_runtime else ""
    return StageRecord.model_validate(measured.facts | {
        "samples_ms": measured.samples_ms, "resident_samples_ms": measured.quantities.get(RESIDENT, ()), "model": model,
        "status": measured.status, "error": measured.error})


def measure_profile(workspace: Workspace, profile: Profile) -> RawMeasurements:
    """Measures what the journal lacks. Raises UserError if a unit's canary does not run or another process measures."""
    with ExitStack() as stack:
        stack.enter_context(sole_writer(workspace.stage_results))
        stack.enter_context(measuring("cpu"))
        if "CUDA" in profile.units:
            stack.enter_context(measuring("cuda"))
        this_machine = machine("cuda" if "CUDA" in profile.units else "cpu")
        journal = StageJournal(workspace, profile, this_machine)
        progress = Progress(sum(len(blocks_left(profile, name, journal.blocks, this_machine.uuid)) for name in profile.units))
        worker = stack.enter_context(Worker(WORKER, Measurement, TIMEOUT_S))
        for name in profile.units:
            measure_unit(name, profile, journal, worker, progress, this_machine)
        if "CUDA" in profile.units and (progress.done or not (workspace.stage_results / TRANSFERS).exists()):
            write_transfers(workspace.stage_results, measure_copies("CUDA", profile, worker))
        return journal.write_raw()


def measure_unit(name: str, profile: Profile, journal: StageJournal, worker: Worker, progress: Progress, here: Machine) -> None:
    """Measures all sizes on one unit; one stage at the first size is its canary."""
    first = next(task for task in profile.tasks if task.unit == name and task.stage == CANARY_STAGE)

    def canary_ms(loaded: bool) -> Sequence[float]:
        try:
            measured = worker.ask(StageRequest(do="canary", task=first))
        except WorkerFailed as error:
            raise UserError(f"{name}: {error}; leave it out with --units") from None
        if measured.status != "ok":
            raise UserError(f"{name}: {measured.error}; leave it out with --units")
        return measured.samples_ms

    def time_units(tasks: Sequence[StageTask], level: float) -> list[Measurement]:
        measured = [time_stage(task, worker) for task in tasks]
        log_measured(measured, tasks, progress)
        return measured

    bench = Bench("cuda" if name == "CUDA" else "cpu", here.uuid, canary_ms, steadiness=Steadiness(patience_s=3.0))
    measure_loads(bench, lambda load, measured: blocks_left(profile, name, journal.blocks, here.uuid), time_units,
                  UnitJournal(journal))


def measure_copies(name: str, profile: Profile, worker: Worker) -> list[TransferRecord]:
    """Times copies between the host's memory and a unit's own, up to the largest tensor of all sizes."""
    task = next(task for task in profile.tasks if task.unit == name and task.stage == CANARY_STAGE)
    largest = max(tensor.bytes(task.size) for task in profile.tasks for tensor in TENSORS.values())
    records = []
    for copy in copies_to_time(largest):
        try:
            measured = worker.ask(StageRequest(do="copy", task=task, copied=copy))
        except WorkerFailed as error:
            raise UserError(f"copies to and from {name}: {error}") from None
        if measured.status != "ok":
            raise UserError(f"copies to and from {name}: {measured.error}")
        if measured.samples_ms:
            records.append(TransferRecord(memory=name, direction=copy.direction, bytes=copy.bytes,
                                          samples_ms=measured.samples_ms))
    log.info("%s: %d copies between the host's memory and its own", name, len(records))
    return records


def blocks_left(profile: Profile, name: str, measured: Iterable[Block], machine_uuid: str) -> list[PlannedBlock[StageTask]]:
    """The blocks still to be measured on a unit: one per size, with its stages."""
    measured_here = [block for block in measured if block.machine == machine_uuid]
    left = pending([task for task in profile.tasks if task.unit == name], measured_here,
                   lambda m: m.status == "ok" or not profile.retry)
    sizes = dict.fromkeys((task.size, task.graph) for task in left)
    return [PlannedBlock(f"{name}_{graph}_{size.name}", [task for task in left if (task.size, task.graph) == (size, graph)])
            for size, graph in sizes]


def time_stage(task: StageTask, worker: Worker) -> Measurement:
    """Times one stage in the worker; PyTorch runs it if its runtime crashes the process."""
    try:
        return worker.ask(StageRequest(do="measure", task=task))
    except WorkerFailed as error:
        if task.runtime == TORCH or error.status == "interrupted":
            return failed_measurement(task, error.status, str(error))
        reason = f"{task.runtime}: {error}"
    try:
        by_torch = worker.ask(StageRequest(do="measure", task=task.model_copy(update={"runtime": TORCH})))
    except WorkerFailed as error:
        return failed_measurement(task, error.status, f"{reason}; {TORCH}: {error}")
    return by_torch.model_copy(update={"id": task.id, "facts": by_torch.facts | {"fallback": reason}})


class Progress:
    """How many blocks are done, and how long the rest will take."""

    def __init__(self, blocks: int) -> None:
        self._blocks, self._began_s = blocks, time.monotonic()
        self.done: set[str] = set()  # the ids of the first tasks of blocks

    def count(self, first: str) -> str:
        """Counts a block by the id of its first task, and returns what is left in words. A repeated block counts once."""
        self.done.add(first)
        done = len(self.done)
        left_s = (time.monotonic() - self._began_s) / done * (self._blocks - done)
        return f"{done} of {self._blocks}, about {left_s:.0f} s left"


def log_measured(measured: Sequence[Measurement], tasks: Sequence[StageTask], progress: Progress) -> None:
    """Logs a line on the measurement, and one for each stage that failed or ran by another runtime."""
    task, total_ms = tasks[0], sum(sum(m.samples_ms) / len(m.samples_ms) for m in measured if m.samples_ms)
    log.info("%s, %d nodes, %d edges: %d stages, %.3f ms together (%s)", task.unit, task.size.nodes, task.size.edges,
             len(measured), total_ms, progress.count(task.id))
    for m in measured:
        name = f"{m.facts['unit']}, stage {m.facts['stage']} {m.facts['stage_name']}"
        if m.status != "ok":
            log.warning("%s: %s", name, m.error)
        elif m.facts["fallback"]:
            log.warning("%s ran by PyTorch on %s: %s", name, m.facts["ran_on"], m.facts["fallback"])
