"""The dataset of one target: the collector's journal of raw samples, and the two tables derived from it.

`measurements.jsonl` is the truth: one line a finished block, appended and forced to disk. `kernel_latency.csv` and
`model_latency.csv` are derived from it. History of the schemas: version 1 is the first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json

from benchmark.backgrounds import Background
from benchmark.probe_reading import ProbeReading
from ort_analysis.kernel_costs import recosted
from ort_analysis.records import Frozen, Kernel
from utils import files
from utils.errors import UserError
from utils.fingerprint import Machine, Target
from utils.paths import Workspace, targets_in
from utils.safe_names import FileName

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd

DATASET_VERSION = 1
GPU_LABEL, UNPROFILED = "gpu", "unprofiled"
IN_MODEL_LABELS = ("kernel_time", "node_span", UNPROFILED)  # that tell what a kernel takes in a model: taken in models
LABELS = ("run", *IN_MODEL_LABELS, GPU_LABEL)
DEFAULT_LABELS = LABELS[:3]  # those that every device has, and every kernel gets unless more are asked for
COLLECT = "python benchmark/collector.py"
BELOW_BEST = 0.05  # how much slower than its best the canary may be beyond what drift is admitted
UNFINISHED = "unfinished"  # status of a kernel whose first label was not (yet) taken, only others
VARIANTS = ("host_io", "cuda_graph")  # further ways to run a whole model: numpy in and out; captured and replayed
DISTURBANCE_ADMITTED = 0.12  # by which a probe of the host may exceed a good reading; beside a disturbed host it does by 0.4
GOOD_PROBE = 0.25  # quantile of the readings of the probe that surely are of an undisturbed host: others only slow it down
HOST_IDLES = 0.7  # a model whose host needs less of its latency is held up by the GPU, however disturbed the host is
MODEL_TIMES = ("median_ms", "host_ms", "gpu_ms", *(f"{name}_ms" for name in VARIANTS))  # of a whole model, in its table
SAMPLED = "sampled:"  # in column Models: no model holds this kernel; a family that seeded it follows, if any did


class Measurement(Frozen):
    """Raw samples of one kernel or model under one label.

    Attributes:
        subject: `kernel` or `model`.
        id: the kernel's id, or the model record's name.
        label: one of LABELS; for a whole model `latency`, `host` (dispatch alone, without waiting for the GPU), `gpu`, or one
            of VARIANTS.
        context: where it ran: `alone` (its own session), `carrier` (a graph of many kernels, so that caches are met as
            in a model) or a model's name.
        samples_ms: one a run.
        launches: label `gpu`: kernels, copies and fills on the GPU in a run.
        cuda_kernels: label `gpu` of a kernel: their names in order.
        disturbance: of a model on an idle GPU: by how much other work slowed the host down meanwhile, a ratio (quiet_host).
        probe_us: the same: what the probe of the host took meanwhile.
        status: `ok`, `failed`, `crashed` or `timeout`; `error` says why.
        started, ended: UTC, ISO 8601.
    """

    subject: str
    id: FileName
    label: str
    context: str
    samples_ms: tuple[float, ...] = ()
    launches: int | None = None
    cuda_kernels: tuple[str, ...] = ()
    disturbance: float | None = None
    probe_us: float | None = None
    status: str = "ok"
    error: str = ""
    started: str = ""
    ended: str = ""

    @property
    def where(self) -> str:
        """The kind of its context: `alone`, `carrier` or `in_model`."""
        return self.context if self.context in ("alone", "carrier") else "in_model"


class Block(Frozen):
    """What the collector measures between two canaries; one line of the journal, kept or lost as a whole.

    Attributes:
        level: share of time that the stressor was asked to be busy, 0–1.
        background_name: what it was busy with, by its name in the dataset's header; "" where it was idle, and in a journal from
            before backgrounds had names.
        key: names the block's work within its level and background, for resuming.
        background: metric means over a window with the stressor alone, by DCGM field name.
        during: the same over a window of the block's own runs; empty where they were over too soon to tell.
        canary_before_ms, canary_after_ms: the canary's times around the block.
        canary_best_ms: the shortest it took on this machine at this level so far; 0 under load, where it varies.
        attempts: how often the block was measured until canaries agreed (or attempts ran out).
        stress: what the stressor reported to have reached.
        probe: how long tiny work waited for what else ran, just before the block's own runs; None where that was not read.
    """

    version: int = DATASET_VERSION
    level: float
    background_name: str = ""
    key: str
    background: dict[str, float]
    during: dict[str, float]
    canary_before_ms: float
    canary_after_ms: float
    canary_best_ms: float = 0.0
    attempts: int
    stress: dict[str, float] = {}
    probe: ProbeReading | None = None
    machine: str
    measurements: tuple[Measurement, ...]

    @property
    def load(self) -> tuple[float, str]:
        """What it was measured under: level and background."""
        return self.level, self.background_name

    @property
    def drift(self) -> float:
        """How unsteady the machine was, as a ratio, the largest of: how far the canaries part; how far they are from the
        best, less what is admitted; how far the halves of a whole model's latencies part (or of its host times), which are
        taken before and after its profile."""
        canaries = abs(self.canary_after_ms / self.canary_before_ms - 1.0) if self.canary_before_ms else 0.0
        slowest = max(self.canary_before_ms, self.canary_after_ms)
        excess = slowest / self.canary_best_ms - 1.0 - BELOW_BEST if self.canary_best_ms else 0.0
        return max([canaries, excess, *(halves_drift(m.samples_ms) for m in self.measurements
                                          if m.label == "latency" or (m.subject, m.label) == ("model", "host"))])


def halves_drift(samples: Sequence[float]) -> float:
    """How far the median of the second half of `samples` is from the first's, as a ratio; 0 for fewer than four."""
    half = len(samples) // 2
    return abs(float(np.median(samples[half:]) / np.median(samples[:half])) - 1.0) if half >= 2 else 0.0


class DatasetKernel(Frozen):
    """A kernel of the dataset, and the models (by record name) that hold it, or what `sampled_from` says."""

    kernel: Kernel
    models: tuple[str, ...]


def sampled_from(families: Sequence[str]) -> tuple[str, ...]:
    """What stands for models at a kernel of none: each family that holds the kernel that seeded it, or that no family does."""
    return tuple(f"{SAMPLED}{name}" for name in families or ("",))


class DatasetHeader(Frozen):
    """`dataset.json`: what all rows of a dataset have in common, the machines by uuid, and the backgrounds by name."""

    version: int = DATASET_VERSION
    target: Target
    metrics: tuple[str, ...]
    machines: dict[str, Machine]
    held_out: tuple[str, ...] = ()  # model families measured for evaluation only: in no fit
    labels: tuple[str, ...] = DEFAULT_LABELS  # that every kernel is to have, the first above all
    backgrounds: dict[str, Background] = {}  # blocks under load that name none are of the first
    held_out_backgrounds: tuple[str, ...] = ()  # measured for evaluation only: their rows are in no fit


def header_path(folder: Path) -> Path:
    return folder / "dataset.json"


def journal_path(folder: Path) -> Path:
    return folder / "measurements.jsonl"


def kernels_path(folder: Path) -> Path:
    """`kernels.jsonl`: a DatasetKernel for every id in the table, one a line."""
    return folder / "kernels.jsonl"


def kernel_table_path(folder: Path) -> Path:
    return folder / "kernel_latency.csv"


def model_table_path(folder: Path) -> Path:
    return folder / "model_latency.csv"


def collected_targets(workspace: Workspace) -> list[str]:
    """Every target that has a dataset.

    Raises:
        UserError: none has.
    """
    return targets_in(workspace.dataset(""), header_path(Path()).name, f"no datasets; measure one with: {COLLECT}")


def load_header(folder: Path) -> DatasetHeader:
    """The header of the dataset in `folder`; `UserError` where there is none."""
    if not header_path(folder).is_file():
        raise UserError(f"{folder}: no dataset of target {folder.name}; measure it with: {COLLECT}")
    return files.read_record(header_path(folder), DatasetHeader, DATASET_VERSION, COLLECT)


def read_journal(folder: Path) -> list[Block]:
    """Every finished block, in the order measured; one under load that names no background is of the dataset's first.

    Raises:
        UserError: a line that is no block of this version.
    """
    backgrounds = load_header(folder).backgrounds if header_path(folder).exists() else {}
    unnamed = {"background_name": next(iter(backgrounds), "")}
    blocks = []
    for number, line in enumerate(files.read_lines(journal_path(folder)), 1):
        try:
            block = Block.model_validate_json(line)
            blocks.append(block if block.background_name or not block.level else block.model_copy(update=unnamed))
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"{journal_path(folder)}, line {number}: not a block of version {DATASET_VERSION} "
                            f"({first['loc']}: {first['msg']}); remove the line or start a new dataset") from None
    return blocks


def kernel_lines(folder: Path) -> dict[str, str]:
    """The lines of `kernels.jsonl` as they stand, by kernel id.

    Raises:
        UserError: a line that describes no kernel.
    """
    try:
        return {str(from_json(line)["kernel"]["id"]): line for line in files.read_lines(kernels_path(folder))}
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{kernels_path(folder)}: damaged ({error}); measure anew: {COLLECT}") from None


def read_kernels(folder: Path, ids: Collection[str] | None = None) -> list[DatasetKernel]:
    """Every kernel of the dataset, with the models that hold it, or those of some ids, which is faster than all. Operations and
    bytes are counted anew, so that what is learned fits what will be predicted.

    Raises:
        UserError: a line that is none.
    """
    try:
        found = [DatasetKernel.model_validate_json(line) for name, line in kernel_lines(folder).items()
                 if ids is None or name in ids]
    except ValidationError as error:
        raise UserError(f"{kernels_path(folder)}: damaged ({error.errors()[0]['msg']}); measure anew: {COLLECT}") from None
    return [described.model_copy(update={"kernel": recosted(described.kernel)}) for described in found]


def input_shape(kernel: Kernel) -> str:
    """The shapes of a kernel's inputs as text, `16x64x56x56;64x64x3x3`; an input left out is an empty part."""
    return ";".join("x".join(map(str, tensor.shape)) for tensor in kernel.inputs)


GPU_COLUMNS = ("gpu_launches", "gpu_kernels")
KERNEL_COLUMNS = ("Level", "Background", "Machine", "Context", "Models", "Canary_ms", "Drift", "Runs", "Started", "Ended",
                  "Status", "Error")


def kernel_columns(metrics: Iterable[str], labels: Sequence[str] = DEFAULT_LABELS) -> list[str]:
    """The columns of `kernel_latency.csv`: the user's first, then the other labels, medians, windows and provenance."""
    metrics = list(metrics)
    return [
        "Kernel_ID", "OpType", "Input_Shape", *metrics, "Latency_ms",
        *(f"{label}_ms" for label in LABELS if label != "run" and label in labels), "run_median_ms",
        *(GPU_COLUMNS if GPU_LABEL in labels else ()), *(f"{metric}_during" for metric in metrics), *KERNEL_COLUMNS,
    ]


def model_columns(metrics: Iterable[str], labels: Sequence[str] = DEFAULT_LABELS) -> list[str]:
    """The columns of `model_latency.csv`."""
    metrics = list(metrics)
    return ["Model", "Level", "Background", *metrics, "Latency_ms", "median_ms", "p95_ms", "std_ms", "Runs",
            *(("host_ms", "gpu_ms", "gpu_launches") if GPU_LABEL in labels else ()), *(f"{name}_ms" for name in VARIANTS),
            "Canary_ms", "Drift", "Disturbance", "Probe_us", *(f"{metric}_during" for metric in metrics), "Machine", "Started",
            "Ended", "Status", "Error"]


def _metrics(block: Block) -> dict[str, float]:
    """Both windows of a block as columns."""
    return block.background | {f"{name}_during": value for name, value in block.during.items()}


def means_add_up(level: float, execution_provider: str) -> bool:
    """Whether kernels' times under a load are to be their means: on a CPU.

    There the load takes a part of each kernel's time, and the median of short runs sees nothing of a load that comes and
    goes. On a GPU a kernel run alone now and then waits for a whole time slice of the other process, which a model waits
    for once, not once a kernel: means of kernels do not add up, medians err less.
    """
    return level > 0 and execution_provider == "cpu"


def typical(samples: Sequence[float], level: float, execution_provider: str) -> float:
    """The figure of a label's samples: their median, or their mean where `means_add_up`."""
    return float(np.mean(samples) if means_add_up(level, execution_provider) else np.median(samples))


def kernel_rows(blocks: Iterable[Block], described: dict[str, DatasetKernel],
                first_label: str = "run", execution_provider: str = "cpu") -> list[dict[str, Any]]:
    """One row a kernel, level and background (and machine). Labels of one kernel from several contexts are joined:

    in-model times win over a carrier's, and a label's figure is the `typical` of its samples. `Latency_ms` is the mean of
    label `run`, as the user defined it.

    Args:
        blocks: the journal.
        described: the dataset's kernels by id.
        first_label: the label without which a row is unfinished.
        execution_provider: the target's.
    """
    found: dict[tuple[str, tuple[float, str], str], list[tuple[Block, Measurement]]] = defaultdict(list)
    for block in blocks:
        for measurement in block.measurements:
            if measurement.subject == "kernel":
                found[measurement.id, block.load, block.machine].append((block, measurement))
    rows = []
    for (kernel_id, (level, background), machine), parts in found.items():
        if kernel_id not in described:
            raise UserError(f"kernel {kernel_id} is measured but not described in kernels.jsonl: the dataset is damaged")
        kernel = described[kernel_id].kernel
        row: dict[str, Any] = {"Kernel_ID": kernel_id, "OpType": kernel.type, "Input_Shape": input_shape(kernel),
                               "Level": level, "Background": background, "Machine": machine,
                               "Models": "|".join(described[kernel_id].models)}
        failures = [m for _, m in parts if m.status != "ok"]
        by_label: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for _, m in parts:
            if m.status == "ok":
                by_label[m.label][m.where] += m.samples_ms
        contexts = []
        for label, contexts_of_label in by_label.items():
            context = next(c for c in ("in_model", "carrier", "alone") if c in contexts_of_label)
            samples = contexts_of_label[context]
            contexts.append(f"{label}:{context}")
            if label == "run":
                row["Latency_ms"] = round(float(np.mean(samples)), 6)
                row["run_median_ms"] = round(float(np.median(samples)), 6)
                row["Runs"] = len(samples)
            else:
                row[f"{label}_ms"] = round(typical(samples, level, execution_provider), 6)
        traced = [m for _, m in parts if m.launches is not None]
        if traced:
            row |= {"gpu_launches": traced[-1].launches, "gpu_kernels": "|".join(traced[-1].cuda_kernels)}
        block = next((b for b, m in parts if m.label == first_label), parts[0][0])
        row |= _metrics(block) | {
            "Context": "|".join(sorted(contexts)), "Canary_ms": (block.canary_before_ms + block.canary_after_ms) / 2,
            "Drift": round(block.drift, 4),
            "Started": min(m.started for _, m in parts), "Ended": max(m.ended for _, m in parts),
            "Status": failures[0].status if failures else "ok" if first_label in by_label else UNFINISHED,
            "Error": "; ".join(sorted({m.error for m in failures})),
        }
        rows.append(row)
    return rows


class ModelSession(NamedTuple):
    """What one block measured of a whole model in sessions opened for it: its measurements by label."""

    model: str
    block: Block
    labels: dict[str, Measurement]

    @property
    def tells(self) -> bool:
        """Whether there is a latency, and it tells of the model alone."""
        latency, host = self.labels.get("latency"), self.labels.get("host")
        if latency is None or latency.status != "ok":
            return False
        host_ms = float(np.median(host.samples_ms)) if host and host.status == "ok" else math.nan
        disturbance = math.nan if latency.disturbance is None else latency.disturbance
        return tells_of_model(float(np.median(latency.samples_ms)), host_ms, disturbance)


def model_sessions(blocks: Iterable[Block]) -> list[ModelSession]:
    """Every time that a block measured a whole model, in order."""
    found = []
    for block in blocks:
        labels: dict[str, dict[str, Measurement]] = defaultdict(dict)
        for m in block.measurements:
            if m.subject == "model":
                labels[m.id][m.label] = m
        found += [ModelSession(model, block, of_model) for model, of_model in labels.items()]
    return found


def tells_of_model(latency_ms: float, host_ms: float, disturbance: float) -> bool:
    """Whether a latency tells of the model alone: the host was undisturbed (see quiet_host), or does not hold the GPU up.

    Args:
        latency_ms: the model's.
        host_ms: the host's time of a run; NaN where it is not known.
        disturbance: of the host meanwhile, a ratio; NaN where it was not watched.
    """
    return not disturbance > DISTURBANCE_ADMITTED or host_ms <= HOST_IDLES * latency_ms


def model_rows(sessions: Iterable[ModelSession]) -> list[dict[str, Any]]:
    """A row for each session that timed a model: statistics of its whole latency, and the medians of its other labels."""
    from utils.timing import summarize

    rows = []
    for model, block, labels in sessions:
        if "latency" not in labels:
            continue
        m = labels["latency"]
        row: dict[str, Any] = {"Model": model, "Level": block.level, "Background": block.background_name,
                               "Machine": block.machine, "Started": m.started, "Ended": m.ended, "Status": m.status,
                               "Error": m.error, "Drift": round(block.drift, 4),
                               "Canary_ms": (block.canary_before_ms + block.canary_after_ms) / 2}
        row |= _metrics(block)
        if m.status == "ok":
            s = summarize(m.samples_ms)
            row |= {"Latency_ms": round(s.mean_ms, 6), "median_ms": round(s.median_ms, 6), "p95_ms": round(s.p95_ms, 6),
                    "std_ms": round(s.std_ms, 6), "Runs": s.runs, "Disturbance": m.disturbance, "Probe_us": m.probe_us}
        for label, other in labels.items():
            if label != "latency" and other.status == "ok":
                row[f"{label}_ms"] = round(float(np.median(other.samples_ms)), 6)
                if other.launches is not None:
                    row["gpu_launches"] = other.launches
        rows.append(row)
    return rows


def load_table(path: Path) -> pd.DataFrame:
    """`kernel_latency.csv` or `model_latency.csv`, checked: times positive and finite, the user's columns there.

    Column Background is text, and there in every table: "" where the device was idle, or where the table has no such column.

    Raises:
        UserError: no file, a column missing, or a NaN or non-positive time in a row whose status is ok (row named).
    """
    import pandas as pd

    try:
        table = pd.read_csv(path, keep_default_na=True, na_values=[""], low_memory=False,  # a column is read as one type
                            dtype={"Background": str})
    except FileNotFoundError:
        raise UserError(f"{path}: no such dataset; measure one with: {COLLECT}") from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a CSV dataset ({error})") from None
    key = "Kernel_ID" if "Kernel_ID" in table.columns or "Model" not in table.columns else "Model"
    needed = [key, "Latency_ms", "Level", "Status"] + (["OpType", "Input_Shape", "Models"] if key == "Kernel_ID" else [])
    missing = [column for column in needed if column not in table.columns]
    if missing:
        raise UserError(f"{path}: column {', '.join(missing)} missing; make the dataset anew: {COLLECT}")
    if pd.to_numeric(table["Level"], errors="coerce").isna().any():
        raise UserError(f"{path}: column Level holds what is no number; make the dataset anew: {COLLECT}")
    ok = table[table["Status"] == "ok"]
    others = ("run_median_ms", "median_ms", *(f"{label}_ms" for label in LABELS))
    for column in ["Latency_ms", *(name for name in others if name in table.columns)]:
        values = pd.to_numeric(ok[column], errors="coerce")
        required = ok[column].notna()  # a label may not have been taken …
        if column == "Latency_ms":  # … but where `run` was, as the row's context says, its figure is there
            context = ok["Context"] if "Context" in ok.columns else ok["Status"].map(lambda _: None)
            required |= context.isna() | context.astype(str).str.contains("run:")
        too_small = values < 0 if column == f"{GPU_LABEL}_ms" else values <= 0  # some kernels leave the GPU nothing to do
        bad = ok[too_small | np.isinf(values) | (values.isna() & required)]
        if len(bad):
            row = bad.index[0]
            raise UserError(f"{path}, line {row + 2}: {column} is {table.at[row, column]!s} for {table.at[row, key]!s}; "
                            f"a time is a positive number (remove the row, or measure it anew: {COLLECT})")
    return table.assign(Background=table["Background"].fillna("") if "Background" in table.columns else "")


def load_kernel_table(workspace: Workspace, target: str) -> pd.DataFrame:
    """The kernel table of a target, checked."""
    return load_table(kernel_table_path(workspace.dataset(target)))


def load_model_table(workspace: Workspace, target: str) -> pd.DataFrame:
    """The model table of a target, checked."""
    return load_table(model_table_path(workspace.dataset(target)))


def run_ms(table: pd.DataFrame, execution_provider: str) -> npt.NDArray[np.float64]:
    """Label `run` of each row of a kernel table: the median where it is there, since the mean follows single disturbed runs,
    but the mean for levels at which means add up (see `means_add_up`); NaN where the label was not taken."""
    mean = table["Latency_ms"].to_numpy(dtype=float)
    if "run_median_ms" not in table.columns:
        return mean
    median = table["run_median_ms"].to_numpy(dtype=float)
    by_mean = np.array([means_add_up(level, execution_provider) for level in table["Level"]], dtype=bool)
    return np.where(np.isfinite(median) & ~by_mean, median, mean)


def idle_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a model table that were measured, on an idle device."""
    return table[(table["Status"] == "ok") & (table["Level"] == 0)]


def good_probe_us(table: pd.DataFrame) -> float:
    """What the probe of the host takes beside models of a table where other work surely does not slow it down, in
    microseconds: a low quantile of the readings; NaN where none was recorded."""
    return float(idle_rows(table).reindex(columns=["Probe_us"])["Probe_us"].quantile(GOOD_PROBE))


def usual_probe_us(table: pd.DataFrame) -> float:
    """What the probe usually takes while the host is undisturbed: the median of the readings that are not far above a good one;
    NaN where none was recorded."""
    readings = idle_rows(table).reindex(columns=["Probe_us"])["Probe_us"]
    return float(readings[readings <= good_probe_us(table) * (1 + DISTURBANCE_ADMITTED)].median())


def paced_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The idle rows of a model table, with column `median_ms` the latency, `host_ms`, `gpu_ms` and those of VARIANTS (ms, NaN
    where it does not tell); `pace`: how many times longer than usual the host took meanwhile (`usual_probe_us`), a ratio, 1
    where that was not recorded; and `tells`: whether the latency tells of the model and not of its host.

    Where the probe was recorded, it says how disturbed the host was, since `Disturbance` is relative to what one worker read;
    elsewhere host times beside a disturbed host are left out.
    """
    idle = idle_rows(table)
    if "median_ms" not in idle.columns:
        idle = idle.assign(median_ms=idle["Latency_ms"])
    idle = idle.reindex(columns=["Model", "Machine", "Disturbance", "Probe_us", *MODEL_TIMES])
    pace, disturbance = idle["Probe_us"] / usual_probe_us(table), idle["Probe_us"] / good_probe_us(table) - 1.0
    idle = idle.assign(Disturbance=disturbance.fillna(idle["Disturbance"]), pace=pace.fillna(1.0))
    of_known_pace = pace.notna() | ~(idle["Disturbance"] > DISTURBANCE_ADMITTED)
    tells = [tells_of_model(*figures) for figures in idle[["median_ms", "host_ms", "Disturbance"]].to_numpy(dtype=float)]
    return idle.assign(tells=np.array(tells, dtype=bool), host_ms=idle["host_ms"].where(of_known_pace))


def idle_models(table: pd.DataFrame, with_disturbed: bool = False) -> pd.DataFrame:
    """What a model table tells of each model on an idle device, by name: medians over its sessions of the times and the pace
    of `paced_rows`; latencies that a disturbed host held up are left out unless `with_disturbed`."""
    rows = paced_rows(table)
    return (rows if with_disturbed else rows[rows["tells"]]).groupby("Model", sort=True)[[*MODEL_TIMES, "pace"]].median()
