"""A dataset's two tables: their rows and columns, how they are made of the journal, and how they are read."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hase.records.blocks import Block, Measured, steadiest, unsteady_labels
from hase.records.dataset_files import (
    DatasetHeader,
    DatasetKernel,
    are_as_noted,
    digests_path,
    journal_path,
    kernel_table_path,
    kernels_path,
    means_add_up,
    model_table_path,
    note_tables,
    read_header,
    read_journal,
    read_kernels,
    read_table,
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
    Inputs,
    Measurement,
    Place,
)
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.timing import summarize

if TYPE_CHECKING:
    import pandas as pd

log = get_logger("collector")
PATIENCE_S, PAUSE_S = 5.0, 0.1  # while another process writes the tables
BEST_PLACES: tuple[Place, ...] = ("in_model", "carrier", "alone")  # of a kernel's measurements; the first is best
BEST_INPUTS: tuple[Inputs, ...] = ("given", "standardised", "")  # the same
UNFINISHED = "unfinished"  # status of a kernel that has labels, but not (yet) the first


def input_shape(kernel: Kernel) -> str:
    """The shapes of a kernel's inputs as text, `16x64x56x56;64x64x3x3`; an omitted input is an empty part."""
    return ";".join("x".join(map(str, tensor.shape)) for tensor in kernel.inputs)


GPU_COLUMNS = ("gpu_launches", "gpu_kernels")
ENERGY_QUANTITIES = ("energy_j", "counter_j", "power_w", "idle_w", "window_s", "runs")  # of a model's label `energy`
ENERGY_COLUMNS = ("energy_ms", *ENERGY_QUANTITIES[:4], "energy_s", "energy_runs", "energy_doubts")
KERNEL_COLUMNS = ("Level", "Background", "Machine", "Context", "Models", "Canary_ms", "Drift", "Unsteady", "Inputs", "Runs",
                  "Started", "Ended", "Status", "Error", "Groups")


def kernel_columns(metrics: Iterable[str], labels: Sequence[str] = DEFAULT_LABELS) -> list[str]:
    """The columns of `kernel_latency.csv`: first those of every dataset, then other labels, medians, windows and where a row is
    from."""
    metrics = list(metrics)
    return [
        "Kernel_ID", "OpType", "Input_Shape", *metrics, "Latency_ms",
        *(f"{label}_ms" for label in LABELS if label != "run" and label in labels), "run_median_ms",
        *(GPU_COLUMNS if GPU_LABEL in labels else ()), *(f"{metric}_during" for metric in metrics), *KERNEL_COLUMNS,
    ]


def model_columns(metrics: Iterable[str], labels: Sequence[str] = DEFAULT_LABELS, energy: bool = False) -> list[str]:
    """The columns of `model_latency.csv`; with those of the energy, if the dataset has it."""
    metrics = list(metrics)
    return ["Model", "Level", "Background", *metrics, "Latency_ms", "median_ms", "p95_ms", "std_ms", "Runs",
            *(("host_ms", "gpu_ms", "gpu_launches") if GPU_LABEL in labels else ()),
            *(f"{name}_ms" for name in VARIANTS), *(ENERGY_COLUMNS if energy else ()),
            "Canary_ms", "Drift", "Unsteady", "Disturbance", "Probe_us", *(f"{metric}_during" for metric in metrics),
            "Machine", "Started", "Ended", "Status", "Error", "Groups"]


def _metrics(block: Block) -> dict[str, float]:
    """Both windows of a block as columns."""
    return block.background | {f"{name}_during": value for name, value in block.during.items()}


def typical(samples: Sequence[float], level: float, device: str) -> float:
    """The figure for a label's samples: their median, or their mean if `means_add_up`."""
    return float(np.mean(samples) if means_add_up(level, device) else np.median(samples))


def kernel_rows(blocks: Iterable[Block], described: dict[str, DatasetKernel],
                first_label: str = "run", device: str = "cpu") -> list[dict[str, Any]]:
    """One row a kernel, level and background (and machine). Labels of one kernel from several contexts are joined:

    in-model times win over a carrier's, and a label's figure is the `typical` of its samples. Where several blocks measured it,
    the `steadiest` count, and column Unsteady names the labels that rest on none that was steady. Where a time depends on
    values, inputs that were given win over made-up ones; column Inputs names them by label. `Latency_ms` is the mean of label
    `run`, as the user defined it.

    Args:
        blocks: the journal.
        described: the dataset's kernels by id.
        first_label: the label without which a row is unfinished.
        device: the target's.
    """
    measured: dict[tuple[str, tuple[float, str], str], list[Measured]] = defaultdict(list)
    of_kernels = [(block, m) for block in blocks for m in block.measurements if m.subject == "kernel"]
    for of_block, m in without_superseded(of_kernels):
        measured[m.id, of_block.load, of_block.machine].append((of_block, m))
    rows = []
    for (kernel_id, (level, background), machine), parts in measured.items():
        if kernel_id not in described:
            raise UserError(f"kernel {kernel_id} is measured but not described in kernels.jsonl: the dataset is damaged")
        kernel = described[kernel_id].kernel
        row: dict[str, Any] = {"Kernel_ID": kernel_id, "OpType": kernel.type, "Input_Shape": input_shape(kernel),
                               "Level": level, "Background": background, "Machine": machine,
                               "Models": described[kernel_id].owners, "Groups": "|".join(described[kernel_id].groups)}
        failures = [m for _, m in parts if m.status != "ok"]
        counted = _counted(parts)
        for label, of_label in counted.items():
            samples = [sample for _, m in of_label for sample in m.samples_ms]
            if label == "run":
                row["Latency_ms"] = round(float(np.mean(samples)), 6)
                row["run_median_ms"] = round(float(np.median(samples)), 6)
                row["Runs"] = len(samples)
            else:
                row[f"{label}_ms"] = round(typical(samples, level, device), 6)
        traced = [m for _, m in parts if m.launches is not None]
        if traced:
            row |= {"gpu_launches": traced[-1].launches, "gpu_kernels": "|".join(traced[-1].cuda_kernels)}
        firsts = {label: of_label[0] for label, of_label in counted.items()}
        block = firsts.get(first_label, parts[0])[0]
        row |= _metrics(block) | {
            "Context": "|".join(sorted(f"{label}:{m.place}" for label, (_, m) in firsts.items())),
            "Canary_ms": (block.canary_before_ms + block.canary_after_ms) / 2,
            "Drift": round(block.drift, 4),
            "Unsteady": unsteady_labels({label: block.drift for label, (block, _) in firsts.items() if block.unsteady}),
            "Inputs": "|".join(sorted(f"{label}:{m.inputs}" for label, (_, m) in firsts.items() if m.inputs)),
            "Started": min(m.started for _, m in parts), "Ended": max(m.ended for _, m in parts),
            "Status": failures[0].status if failures else "ok" if first_label in counted else UNFINISHED,
            "Error": "; ".join(sorted({m.error for m in failures})),
        }
        rows.append(row)
    return rows


def without_superseded(measured: Sequence[Measured]) -> list[Measured]:
    """Measurements of kernels without those of work on several streams that depend on the host, where the kernel was also
    measured `queued` under the same load, on any machine."""
    queued = {(m.id, m.label, block.load) for block, m in measured if m.queued and m.status == "ok"}
    return [(block, m) for block, m in measured if m.queued or (m.id, m.label, block.load) not in queued]


def _counted(measured: Iterable[Measured]) -> dict[str, list[Measured]]:
    """The measurements of a kernel that count for each label: of those that went well, the steadiest with the best inputs in
    the best place."""
    by_label: dict[str, dict[tuple[Place, Inputs], list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for block, m in measured:
        if m.status == "ok":
            by_label[m.label][m.place, m.inputs].append((block, m))
    best = list(itertools.product(BEST_PLACES, BEST_INPUTS))
    return {label: steadiest(next(of_label[way] for way in best if way in of_label)) for label, of_label in by_label.items()}


class ModelSession(NamedTuple):
    """What one block measured of a whole model in the sessions opened for it: its measurements by label."""

    model: str
    block: Block
    labels: dict[str, Measurement]

    @property
    def inputs(self) -> Inputs:
        """What inputs the model had (see `Measurement`)."""
        return min((m.inputs for m in self.labels.values()), key=BEST_INPUTS.index)

    @property
    def went_well(self) -> bool:
        """Whether there is a latency."""
        return "latency" in self.labels and self.labels["latency"].status == "ok"

    @property
    def undisturbed(self) -> bool:
        """Whether there is a latency, and no busy host changed it."""
        if not self.went_well:
            return False
        latency, host = self.labels["latency"], self.labels.get("host")
        host_ms = float(np.median(host.samples_ms)) if host and host.status == "ok" else math.nan
        disturbance = math.nan if latency.disturbance is None else latency.disturbance
        return is_undisturbed(float(np.median(latency.samples_ms)), host_ms, disturbance)


def model_sessions(blocks: Iterable[Block]) -> list[ModelSession]:
    """Every session in which a block measured a whole model, in order. Where its time depends on values, those with worse
    inputs than one under the same load that went well are left out."""
    sessions = []
    for block in blocks:
        labels: dict[str, dict[str, Measurement]] = defaultdict(dict)
        for m in block.measurements:
            if m.subject == "model":
                labels[m.id][m.label] = m
        sessions += [ModelSession(model, block, of_model) for model, of_model in labels.items()]
    ranks = [BEST_INPUTS.index(session.inputs) for session in sessions]
    best: dict[tuple[str, tuple[float, str]], int] = {}
    for session, rank in zip(sessions, ranks, strict=True):
        if session.went_well:
            of = session.model, session.block.load
            best[of] = min(rank, best.get(of, rank))
    return [session for session, rank in zip(sessions, ranks, strict=True)
            if rank <= best.get((session.model, session.block.load), rank)]


def energy_warnings(measured: Measurement, latency: Measurement) -> str:
    """What is wrong with a model's energy: what its measurement says, and whether its runs took much longer than those of
    its latency, since other work then ran meanwhile and took energy too. "" for a sound one."""
    warnings = [measured.error] if measured.error else []
    if latency.samples_ms and measured.samples_ms:
        slower = float(np.median(measured.samples_ms) / np.median(latency.samples_ms))
        if slower > SLOWDOWN_ADMITTED:
            warnings.append(f"its runs took {slower:.1f} times as long as for its latency")
    return "; ".join(warnings)


def energy_columns(measured: Measurement, latency: Measurement) -> dict[str, Any]:
    """What a model's row says of its energy: J of a run (by the integral of power, and by the counter), W, and s."""
    means = {name: measured.quantities[name][0] for name in ENERGY_QUANTITIES if name in measured.quantities}
    renamed = {"window_s": "energy_s", "runs": "energy_runs"}
    return {renamed.get(name, name): value for name, value in means.items()} | {
        "energy_doubts": energy_warnings(measured, latency)}


def model_rows(sessions: Iterable[ModelSession], groups: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row per session that timed a model: statistics of its latency, the medians of its other labels, and its group
    (from `groups`, by the model's name)."""
    rows = []
    for model, block, labels in sessions:
        if "latency" not in labels:
            continue
        m = labels["latency"]
        row: dict[str, Any] = {"Model": model, "Level": block.level, "Background": block.background_name,
                               "Machine": block.machine, "Started": m.started, "Ended": m.ended, "Status": m.status,
                               "Error": m.error, "Drift": round(block.drift, 4), "Groups": groups.get(model, ""),
                               "Unsteady": unsteady_labels(dict.fromkeys(labels, block.drift) if block.unsteady else {}),
                               "Canary_ms": (block.canary_before_ms + block.canary_after_ms) / 2}
        row |= _metrics(block)
        if m.status == "ok":
            s = summarize(m.samples_ms)
            row |= {"Latency_ms": round(s.mean_ms, 6), "median_ms": round(s.median_ms, 6), "p95_ms": round(s.p95_ms, 6),
                    "std_ms": round(s.std_ms, 6), "Runs": s.runs, "Disturbance": m.disturbance, "Probe_us": m.probe_us}
        for label, labelled in labels.items():
            if label != "latency" and labelled.status == "ok":
                row[f"{label}_ms"] = round(float(np.median(labelled.samples_ms)), 6)
                if label == ENERGY:
                    row |= energy_columns(labelled, m)
                if labelled.launches is not None:
                    row["gpu_launches"] = labelled.launches
        rows.append(row)
    return rows


def kernels_in(blocks: Iterable[Block]) -> set[str]:
    """The ids of the kernels that were measured in some blocks."""
    return {m.id for block in blocks for m in block.measurements if m.subject == "kernel"}


def write_tables(folder: Path, header: DatasetHeader, blocks: Sequence[Block]) -> None:
    """Makes both CSV tables from the whole journal, and notes what they were made of."""
    _write_rows(folder, header, blocks, files.write_csv)


def add_rows(folder: Path, header: DatasetHeader, blocks: Sequence[Block]) -> None:
    """Adds the rows of the journal's latest blocks to both tables, which hold those of all others."""
    _write_rows(folder, header, blocks, files.add_to_csv)


def _write_rows(folder: Path, header: DatasetHeader, blocks: Sequence[Block], write: Callable[..., None]) -> None:
    described = {entry.kernel.id: entry for entry in read_kernels(folder, kernels_in(blocks))}
    for path, columns, rows in (
            (kernel_table_path(folder), kernel_columns(header.metrics, header.labels),
             kernel_rows(blocks, described, header.labels[0], header.target.flavour.device)),
            (model_table_path(folder), model_columns(header.metrics, header.labels, header.energy),
             model_rows(model_sessions(blocks), header.groups))):
        if unknown := {name for row in rows for name in row}.difference(columns):
            raise UserError(f"{journal_path(folder)}: damaged: it has {', '.join(sorted(unknown))}, which {path.name} has no "
                            f"column for; measure anew: {COLLECT}")
        write(path, columns, rows)
    note_tables(folder)


def read_kernel_table(workspace: Workspace, target: str) -> pd.DataFrame:
    """The kernel table of a target, checked, and made anew where it is not that of the journal.

    Raises:
        UserError: there is no dataset, it is damaged, or another process writes the tables.
    """
    make_current(workspace.dataset(target))
    return read_table(kernel_table_path(workspace.dataset(target)))


def read_model_table(workspace: Workspace, target: str) -> pd.DataFrame:
    """The model table of a target, as `read_kernel_table` reads the other."""
    make_current(workspace.dataset(target))
    return read_table(model_table_path(workspace.dataset(target)))


def make_current(folder: Path) -> None:
    """Makes the tables anew, with a warning, unless they are as `tables.json` says, and journal and kernels as they were then.

    While a collector runs, the tables may lack its latest blocks: they are left to it. Tables without a journal, or without the
    kernels, can't be made; they are used as they are, with a warning, if they never had a `tables.json`.

    Raises:
        UserError: the journal or the kernels are damaged, or another process writes the tables.
    """
    tables, sources = (kernel_table_path(folder), model_table_path(folder)), (journal_path(folder), kernels_path(folder))
    if are_as_noted(folder, *tables, *sources) or not any(path.is_file() for path in (*tables, *sources)):
        return
    with ExitStack() as alone:
        try:
            alone.enter_context(sole_writer(folder))
        except UserError:
            until_s = time.monotonic() + PATIENCE_S
            while not are_as_noted(folder, *tables):
                if time.monotonic() > until_s:
                    raise
                time.sleep(PAUSE_S)
            log.warning("%s: another process measures; its latest blocks are not in the tables yet", folder)
            return
        if are_as_noted(folder, *tables, *sources):  # another process has just made them
            return
        blocks, missing = read_journal(folder), [path.name for path in sources if not path.is_file()]
        if missing and (kernels_in(blocks) or not blocks):
            if digests_path(folder).is_file():
                raise UserError(f"{folder}: the tables were changed after they were made, and can't be made anew without "
                                f"{' and '.join(missing)}; measure anew: {COLLECT}")
            log.warning("%s: its tables can't be checked without %s; they are used as they are", folder, " and ".join(missing))
            return
        log.warning("%s: the tables are not those of the journal (changed, copied, or never checked) and are made anew", folder)
        write_tables(folder, read_header(folder), blocks)
