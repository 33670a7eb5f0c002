"""Makes a dataset's two tables (kernels and models) from its journal, reads them, and sums up what the dataset covers."""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hase.records.dataset_files import (
    DatasetHeader,
    DatasetKernel,
    digests_match,
    digests_path,
    idle_rows,
    journal_path,
    kernel_table_path,
    kernels_path,
    means_add_up,
    model_table_path,
    read_header,
    read_journal,
    read_kernels,
    read_table,
    run_ms,
    write_digests,
)
from hase.records.host_pace import is_undisturbed
from hase.records.kernel_record import Kernel
from hase.records.measurement import (
    COLLECT,
    DEFAULT_LABELS,
    ENERGY,
    GPU_LABEL,
    LABELS,
    SLOWDOWN_ADMITTED,
    VARIANTS,
    Block,
    BlockMeasurement,
    InputValues,
    Measurement,
    Placement,
    format_unsteady,
    steadiest,
)
from hase.records.operators import operator_row
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.timing import summarize

if TYPE_CHECKING:
    import pandas as pd


log = get_logger("collector")
PATIENCE_S, PAUSE_S = 5.0, 0.1  # while another process writes the tables
BEST_PLACES: tuple[Placement, ...] = ("in_model", "carrier", "alone")  # where a kernel was measured, the best first
BEST_INPUTS: tuple[InputValues, ...] = ("given", "standardised", "")  # kinds of inputs, the best first
UNFINISHED = "unfinished"  # status of a kernel that has labels, but not (yet) the first
GPU_COLUMNS = ("gpu_launches", "gpu_kernels")
ENERGY_COLUMN_OF = {"energy_j": "energy_j", "counter_j": "counter_j", "power_w": "power_w", "idle_w": "idle_w",
                    "window_s": "energy_s", "runs": "energy_runs"}  # by quantity of a model's label `energy`
ENERGY_COLUMNS = ("energy_ms", *ENERGY_COLUMN_OF.values(), "energy_doubts")
KERNEL_COLUMNS = ("Level", "Background", "Machine", "Context", "Models", "Canary_ms", "Drift", "Unsteady", "Inputs", "Runs",
                  "Started", "Ended", "Status", "Error", "Groups")
SIZE_BYTES = (1e4, 1e5, 1e6, 1e7, 1e8)  # read and written by a kernel: the borders between the classes
SIZES = ("below 10 kB", "to 100 kB", "to 1 MB", "to 10 MB", "to 100 MB", "above")


def input_shape(kernel: Kernel) -> str:
    """A kernel's input shapes as text, `16x64x56x56;64x64x3x3`; an omitted input is an empty part."""
    return ";".join("x".join(map(str, tensor.shape)) for tensor in kernel.inputs)


def kernel_columns(metrics: Iterable[str], labels: Sequence[str] = DEFAULT_LABELS) -> list[str]:
    """The columns of `kernel_latency.csv`: the kernel, times by label, metrics, and the origin of the row."""
    metrics = list(metrics)
    return [
        "Kernel_ID", "OpType", "Input_Shape", *metrics, "Latency_ms",
        *(f"{label}_ms" for label in LABELS if label != "run" and label in labels), "run_median_ms",
        *(GPU_COLUMNS if GPU_LABEL in labels else ()), *(f"{metric}_during" for metric in metrics), *KERNEL_COLUMNS,
    ]


def model_columns(metrics: Iterable[str], labels: Sequence[str] = DEFAULT_LABELS, energy: bool = False) -> list[str]:
    """The columns of `model_latency.csv`; those of energy only if the dataset has it."""
    metrics = list(metrics)
    return ["Model", "Level", "Background", *metrics, "Latency_ms", "median_ms", "p95_ms", "std_ms", "Runs",
            *(("host_ms", "gpu_ms", "gpu_launches") if GPU_LABEL in labels else ()),
            *(f"{name}_ms" for name in VARIANTS), *(ENERGY_COLUMNS if energy else ()),
            "Canary_ms", "Drift", "Unsteady", "Disturbance", "Probe_us", *(f"{metric}_during" for metric in metrics),
            "Machine", "Started", "Ended", "Status", "Error", "Groups"]


def _metric_cells(block: Block) -> dict[str, float]:
    """The metrics of both windows of a block, by column."""
    return block.background | {f"{name}_during": value for name, value in block.during.items()}


def kernel_table_rows(blocks: Iterable[Block], described: Mapping[str, DatasetKernel], first_label: str = "run",
                      device: str = "cpu") -> list[dict[str, Any]]:
    """One row per kernel, level, background and machine, with a kernel's labels from all contexts.

    In-model times win over a carrier's. A label's time is the median of its samples, or the mean if `means_add_up`. Of several
    blocks the `steadiest` count; column Unsteady names labels without a steady one. If a time depends on values, given inputs
    win over made-up ones; column Inputs names them by label. `Latency_ms` is the mean of label `run`, as the user defined it. A
    row without `first_label` is unfinished.
    """
    measured: dict[tuple[str, tuple[float, str], str], list[BlockMeasurement]] = defaultdict(list)
    kernel_measurements = [(block, m) for block in blocks for m in block.measurements if m.subject == "kernel"]
    for block, m in without_superseded(kernel_measurements):
        measured[m.id, block.load, block.machine].append((block, m))
    rows = []
    for (kernel_id, (level, background), machine), parts in measured.items():
        if (entry := described.get(kernel_id)) is None:
            raise UserError(f"kernel {kernel_id} is measured but not described in kernels.jsonl: the dataset is damaged; "
                            f"measure anew: {COLLECT}")
        row: dict[str, Any] = {"Kernel_ID": kernel_id, "OpType": entry.kernel.type, "Input_Shape": input_shape(entry.kernel),
                               "Level": level, "Background": background, "Machine": machine, "Models": entry.owners,
                               "Groups": "|".join(entry.groups)}
        failures, counted = [m for _, m in parts if m.status != "ok"], _counted(parts)
        typical = np.mean if means_add_up(level, device) else np.median
        for label, label_parts in counted.items():
            samples = [sample for _, m in label_parts for sample in m.samples_ms]
            if label == "run":
                row |= {"Latency_ms": round(float(np.mean(samples)), 6), "run_median_ms": round(float(np.median(samples)), 6),
                        "Runs": len(samples)}
            else:
                row[f"{label}_ms"] = round(float(typical(samples)), 6)
        if traced := [m for _, m in parts if m.launches is not None]:
            row |= {"gpu_launches": traced[-1].launches, "gpu_kernels": "|".join(traced[-1].cuda_kernels)}
        firsts = {label: label_parts[0] for label, label_parts in counted.items()}
        block = firsts.get(first_label, parts[0])[0]
        row |= _metric_cells(block) | {
            "Context": "|".join(sorted(f"{label}:{m.place}" for label, (_, m) in firsts.items())),
            "Canary_ms": block.canary_ms, "Drift": round(block.drift, 4),
            "Unsteady": format_unsteady({label: block.drift for label, (block, _) in firsts.items() if block.unsteady}),
            "Inputs": "|".join(sorted(f"{label}:{m.inputs}" for label, (_, m) in firsts.items() if m.inputs)),
            "Started": min(m.started for _, m in parts), "Ended": max(m.ended for _, m in parts),
            "Status": failures[0].status if failures else "ok" if first_label in counted else UNFINISHED,
            "Error": "; ".join(sorted({m.error for m in failures}))}
        rows.append(row)
    return rows


def without_superseded(measured: Sequence[BlockMeasurement]) -> list[BlockMeasurement]:
    """Measurements of kernels, without host-dependent ones if a kernel was also measured `queued` under the same load, on any
    machine. This concerns kernels that work on several streams."""
    queued = {(m.id, m.label, block.load) for block, m in measured if m.queued and m.status == "ok"}
    return [(block, m) for block, m in measured if m.queued or (m.id, m.label, block.load) not in queued]


def _counted(measured: Iterable[BlockMeasurement]) -> dict[str, list[BlockMeasurement]]:
    """The measurements that count for each label of a kernel: successful, of the best context and inputs, the steadiest."""
    by_label: dict[str, dict[tuple[Placement, InputValues], list[BlockMeasurement]]] = defaultdict(lambda: defaultdict(list))
    for block, m in measured:
        if m.status == "ok":
            by_label[m.label][m.place, m.inputs].append((block, m))
    best = list(itertools.product(BEST_PLACES, BEST_INPUTS))
    return {label: steadiest(next(ways[way] for way in best if way in ways)) for label, ways in by_label.items()}


class ModelSession(NamedTuple):
    """One block's measurements of a whole model in one session, by label."""

    model: str
    block: Block
    labels: dict[str, Measurement]

    @property
    def inputs(self) -> InputValues:
        """The kind of inputs (see `Measurement`)."""
        return min((m.inputs for m in self.labels.values()), key=BEST_INPUTS.index)

    @property
    def went_well(self) -> bool:
        """Whether it has a latency."""
        return "latency" in self.labels and self.labels["latency"].status == "ok"

    @property
    def undisturbed(self) -> bool:
        """Whether it has a latency that no busy host changed."""
        if not self.went_well:
            return False
        latency, host = self.labels["latency"], self.labels.get("host")
        host_ms = float(np.median(host.samples_ms)) if host and host.status == "ok" else math.nan
        disturbance = math.nan if latency.disturbance is None else latency.disturbance
        return is_undisturbed(float(np.median(latency.samples_ms)), host_ms, disturbance)


def model_sessions(blocks: Iterable[Block]) -> list[ModelSession]:
    """All sessions in which blocks measured a whole model, in order. If a model's time depends on values, sessions with worse
    inputs than a successful one under the same load are omitted."""
    sessions = []
    for block in blocks:
        labels: dict[str, dict[str, Measurement]] = defaultdict(dict)
        for m in block.measurements:
            if m.subject == "model":
                labels[m.id][m.label] = m
        sessions += [ModelSession(model, block, labelled) for model, labelled in labels.items()]
    ranks = [BEST_INPUTS.index(session.inputs) for session in sessions]
    best: dict[tuple[str, tuple[float, str]], int] = {}
    for session, rank in zip(sessions, ranks, strict=True):
        if session.went_well:
            key = session.model, session.block.load
            best[key] = min(rank, best.get(key, rank))
    return [session for session, rank in zip(sessions, ranks, strict=True)
            if rank <= best.get((session.model, session.block.load), rank)]


def energy_warnings(measured: Measurement, latency: Measurement) -> str:
    """What is wrong with a model's energy reading; "" if nothing: its own error, or that its runs took much longer than those
    of the latency, because other work ran and used energy."""
    warnings = [measured.error] if measured.error else []
    if latency.samples_ms and measured.samples_ms:
        slower = float(np.median(measured.samples_ms) / np.median(latency.samples_ms))
        if slower > SLOWDOWN_ADMITTED:
            warnings.append(f"its runs took {slower:.1f} times as long as for its latency")
    return "; ".join(warnings)


def _energy_cells(measured: Measurement, latency: Measurement) -> dict[str, Any]:
    """The energy of a model, by column: J per run (from the integral of power, and from the counter), W, and s."""
    means = measured.quantities
    return {column: means[name][0] for name, column in ENERGY_COLUMN_OF.items() if name in means} | {
        "energy_doubts": energy_warnings(measured, latency)}


def model_table_rows(sessions: Iterable[ModelSession], groups: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row per session that timed a model: latency statistics, medians of other labels, and the model's group."""
    rows = []
    for model, block, labels in sessions:
        if (latency := labels.get("latency")) is None:
            continue
        row: dict[str, Any] = {"Model": model, "Level": block.level, "Background": block.background_name,
                               "Machine": block.machine, "Started": latency.started, "Ended": latency.ended,
                               "Status": latency.status, "Error": latency.error, "Groups": groups.get(model, ""),
                               "Canary_ms": block.canary_ms, "Drift": round(block.drift, 4),
                               "Unsteady": format_unsteady(dict.fromkeys(labels, block.drift) if block.unsteady else {})}
        row |= _metric_cells(block)
        if latency.status == "ok":
            times = summarize(latency.samples_ms)
            row |= {"Latency_ms": round(times.mean_ms, 6), "median_ms": round(times.median_ms, 6),
                    "p95_ms": round(times.p95_ms, 6), "std_ms": round(times.std_ms, 6), "Runs": times.runs,
                    "Disturbance": latency.disturbance, "Probe_us": latency.probe_us}
        for label, m in labels.items():
            if label != "latency" and m.status == "ok":
                row[f"{label}_ms"] = round(float(np.median(m.samples_ms)), 6)
                if label == ENERGY:
                    row |= _energy_cells(m, latency)
                if m.launches is not None:
                    row["gpu_launches"] = m.launches
        rows.append(row)
    return rows


def measured_kernel_ids(blocks: Iterable[Block]) -> set[str]:
    """The ids of the kernels measured in some blocks."""
    return {m.id for block in blocks for m in block.measurements if m.subject == "kernel"}


def write_dataset_tables(folder: Path, header: DatasetHeader, blocks: Sequence[Block], add: bool = False) -> None:
    """Writes both CSV tables from all blocks of the journal, and the digests of their sources. With `add`, rows of new blocks
    are added to tables that already hold all others."""
    described = {entry.kernel.id: entry for entry in read_kernels(folder, measured_kernel_ids(blocks))}
    for path, columns, rows in (
            (kernel_table_path(folder), kernel_columns(header.metrics, header.labels),
             kernel_table_rows(blocks, described, header.labels[0], header.target.flavour.device)),
            (model_table_path(folder), model_columns(header.metrics, header.labels, header.energy),
             model_table_rows(model_sessions(blocks), header.groups))):
        if unknown := {name for row in rows for name in row}.difference(columns):
            raise UserError(f"{journal_path(folder)}: damaged: it has {', '.join(sorted(unknown))}, which {path.name} has no "
                            f"column for; measure anew: {COLLECT}")
        (files.add_to_csv if add else files.write_csv)(path, columns, rows)
    write_digests(folder)


def read_kernel_table(workspace: Workspace, target: str) -> pd.DataFrame:
    """The kernel table of a target, checked, and written again if it does not match the journal."""
    refresh_tables(workspace.dataset(target))
    return read_table(kernel_table_path(workspace.dataset(target)))


def read_model_table(workspace: Workspace, target: str) -> pd.DataFrame:
    """The model table of a target, checked, and written again if it does not match the journal."""
    refresh_tables(workspace.dataset(target))
    return read_table(model_table_path(workspace.dataset(target)))


def refresh_tables(folder: Path) -> None:
    """Writes the tables again, with a warning, unless tables, journal and kernels all match `tables.json`.

    While a collector runs, the tables may lack its latest blocks and are left to it. Without journal or kernels, tables can't
    be written; old ones without a `tables.json` are used unchecked, with a warning.
    """
    tables, sources = (kernel_table_path(folder), model_table_path(folder)), (journal_path(folder), kernels_path(folder))
    if digests_match(folder, *tables, *sources) or not any(path.is_file() for path in (*tables, *sources)):
        return
    with ExitStack() as lock:
        try:
            lock.enter_context(sole_writer(folder))
        except UserError:
            until_s = time.monotonic() + PATIENCE_S
            while not digests_match(folder, *tables):
                if time.monotonic() > until_s:
                    raise
                time.sleep(PAUSE_S)
            log.warning("%s: another process measures; its latest blocks are not in the tables yet", folder)
            return
        if digests_match(folder, *tables, *sources):  # another process has just made them
            return
        blocks, missing = read_journal(folder), [path.name for path in sources if not path.is_file()]
        if missing and (measured_kernel_ids(blocks) or not blocks):
            if digests_path(folder).is_file():
                raise UserError(f"{folder}: the tables were changed after they were made, and can't be made anew without "
                                f"{' and '.join(missing)}; measure anew: {COLLECT}")
            log.warning("%s: its tables can't be checked without %s; they are used as they are", folder, " and ".join(missing))
            return
        log.warning("%s: the tables are not those of the journal (changed, copied, or never checked) and are made anew", folder)
        write_dataset_tables(folder, read_header(folder), blocks)


class OperatorCoverage(Frozen):
    """The kernels of one operator.

    Attributes:
        operator: ONNX's name; kernels count whatever is fused into them.
        kernels: described by the dataset.
        measured: with a time on the idle device.
        failed: of which every idle measurement failed.
        unsteady: measured, but never while the machine was steady.
        in_models: contained in a model; the others were sampled.
        by_size: measured kernels by the bytes that they read and write, in the classes of `DatasetCoverage.sizes`.
        least_ms, most_ms: idle times of the dataset's first label; None if nothing was measured.
    """

    operator: str
    kernels: int
    measured: int
    failed: int
    unsteady: int
    in_models: int
    by_size: tuple[int, ...]
    least_ms: float | None
    most_ms: float | None


class LoadCoverage(Frozen):
    """What was measured at one load.

    Attributes:
        level: share of the time for which the stressor was busy; 0 is idle.
        background: the stressor's work, by its name in the dataset; "" is idle, or the only one.
        kernels, models: number of those measured successfully.
    """

    level: float
    background: str
    kernels: int
    models: int


class DatasetCoverage(Frozen):
    """What a dataset holds. Version 1 is the first.

    Attributes:
        target: of the dataset.
        kernels, measured: described, and with a time on the idle device.
        models: measured idle, each counted once for all its sizes.
        families: groups of these models.
        sizes: the classes of sizes, in words.
        operators: the one with the most measured kernels first.
        loads: by level and background, idle first.
    """

    version: int = 1
    target: str
    kernels: int
    measured: int
    models: int
    families: int
    sizes: tuple[str, ...] = SIZES
    operators: tuple[OperatorCoverage, ...]
    loads: tuple[LoadCoverage, ...]


def dataset_coverage(header: DatasetHeader, kernels: Iterable[DatasetKernel], times: pd.DataFrame,
                     models: pd.DataFrame) -> DatasetCoverage:
    """What a dataset holds; `times` and `models` are its two tables."""
    idle = times[times["Level"] == 0]
    ok = idle[idle["Status"] == "ok"]
    label = header.labels[0]  # without it a kernel counts as not measured
    ok = ok.assign(ms=run_ms(ok, header.target.flavour.device) if label == "run" else ok[f"{label}_ms"])
    ok = ok[np.isfinite(ok["ms"])]
    idle_ms: dict[str, float] = ok.groupby("Kernel_ID")["ms"].median().to_dict()
    steady = set((ok[ok["Unsteady"].isna()] if "Unsteady" in ok.columns else ok)["Kernel_ID"])
    tried = set(idle["Kernel_ID"][idle["Status"] != UNFINISHED])
    by_operator: dict[str, list[DatasetKernel]] = {}
    for described in kernels:
        name = described.kernel.op_type
        by_operator.setdefault(operator_row(name).base or name, []).append(described)
    operators = [_operator_coverage(name, members, idle_ms, steady, tried) for name, members in by_operator.items()]
    measured_models = idle_rows(models)
    return DatasetCoverage(
        target=header.target.name, kernels=sum(row.kernels for row in operators),
        measured=sum(row.measured for row in operators), models=measured_models["Model"].nunique(),
        families=measured_models["Groups"].nunique(), operators=tuple(sorted(operators, key=lambda row: -row.measured)),
        loads=tuple(_load_coverage(times, models)))


def _operator_coverage(name: str, members: Sequence[DatasetKernel], idle_ms: dict[str, float], steady: set[str],
                       tried: set[str]) -> OperatorCoverage:
    """The coverage of an operator's kernels `members`, by the ids that have an idle time, a steady one, or were tried."""
    ids = {described.kernel.id for described in members}
    measured = ids & idle_ms.keys()
    sizes = Counter(bisect_right(SIZE_BYTES, described.kernel.bytes_read + described.kernel.bytes_written)
                    for described in members if described.kernel.id in measured)
    times_ms = [idle_ms[kernel_id] for kernel_id in measured]
    return OperatorCoverage(
        operator=name, kernels=len(ids), measured=len(measured), failed=len((ids & tried) - measured),
        unsteady=len(measured - steady), in_models=sum(bool(described.models) for described in members),
        by_size=tuple(sizes[size] for size in range(len(SIZES))), least_ms=min(times_ms, default=None),
        most_ms=max(times_ms, default=None))


def _load_coverage(times: pd.DataFrame, models: pd.DataFrame) -> list[LoadCoverage]:
    """What was measured successfully at each level and under each background."""
    counts: list[Any] = [table[table["Status"] == "ok"].groupby(["Level", "Background"])[key].nunique().to_dict()
                         for table, key in ((times, "Kernel_ID"), (models, "Model"))]
    kernels, networks = counts
    return [LoadCoverage(level=float(level), background=str(background), kernels=kernels.get((level, background), 0),
                         models=networks.get((level, background), 0))
            for level, background in sorted(kernels.keys() | networks.keys())]
