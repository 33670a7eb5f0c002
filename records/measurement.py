"""Measurements, the blocks that contain them, their journal, and background loads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from hase.records.probe_reading import ProbeReading
from hase.utils import files
from hase.utils.config import Config, Frozen
from hase.utils.errors import UserError, first_problem
from hase.utils.logger import get_logger
from hase.utils.paths import FileName

LONGEST_MS = 1e12  # 30 years: a longer time is damage
Milliseconds = Annotated[float, Field(ge=0, le=LONGEST_MS)]
ModelMilliseconds = Annotated[float, Field(ge=1e-9, le=LONGEST_MS)]  # of a whole run: at least a picosecond
Placement = Literal["alone", "carrier", "in_model"]
Status = Literal["ok", "failed", "crashed", "timeout", "interrupted"]
InputValues = Literal["", "standardised", "given"]
DATASET_VERSION = 2
Label = Literal["run", "kernel_time", "node_span", "unprofiled", "gpu"]
LABELS: tuple[Label, ...] = get_args(Label)
UNPROFILED, GPU_LABEL = LABELS[3:]
LAUNCHES = "launches"  # learned like a label: the number of CUDA kernels and copies that a kernel of a model launches
IN_MODEL_LABELS = LABELS[1:4]  # a kernel's time inside a model; taken in models and carriers
DEFAULT_LABELS = LABELS[:3]  # every device has these, and every kernel gets them by default
COLLECT = "python benchmark/collector.py"
DRIFT_ADMITTED = 0.05  # the largest drift of a steady block, a ratio, unless a config sets it
BELOW_BEST = 0.05  # how much slower than its best the canary may be, beyond the admitted drift
CPU_BUSY = "DCGM_FI_DEV_CPU_UTIL_TOTAL"  # the metric: the share of all processors' time that something runs
BUSY_ADMITTED = 0.25  # the largest on an idle CPU before a steady block: a choice; a quiet machine's services take up to 0.15
MAX_KERNEL_NAMES = 64  # names of CUDA kernels in a measurement
Variant = Literal["host_io", "cuda_graph"]  # further ways to run a whole model: numpy in and out; captured and replayed
VARIANTS: tuple[Variant, ...] = get_args(Variant)
KERNELS = "kernels"  # subject of a batch of kernels whose energy is measured together
ENERGY = "energy"  # label of a whole model: what a run takes of the device's energy
# How many times as long the runs for the energy may take as those for the latency: a device that works for long gets warm. If
# they take longer, other work ran meanwhile.
SLOWDOWN_ADMITTED = 1.3
DISTURBANCE_ADMITTED = 0.12  # how far the host probe may exceed a good reading; on a disturbed host it does by 0.4
BackgroundKind = Literal["compute", "memory", "mixed", "model"]
BackgroundQueue = Literal["synchronised", "deep"]
BACKGROUND_KINDS: tuple[BackgroundKind, ...] = get_args(BackgroundKind)
BACKGROUND_QUEUES: tuple[BackgroundQueue, ...] = get_args(BackgroundQueue)
LONGEST_PERIOD_MS = 1000.0  # signals are handled between two periods
log = get_logger("collector")


def now() -> str:
    """The current time in UTC, ISO 8601 with microseconds."""
    return datetime.now(UTC).isoformat()


class Measurement(Frozen):
    """Raw samples of one unit under one label."""

    subject: str  # the kind of unit, e.g. `kernel` or `model`
    id: FileName  # the unit's name within its kind: a kernel's id, a model record's name
    # what was timed. For a kernel one of LABELS; for a whole model `latency`, `host` (dispatch alone, without waiting for the
    # GPU), `gpu`, `energy`, or one of VARIANTS
    label: str
    context: str  # `alone`, `carrier`, or the name of the model in which the unit ran
    place: Placement  # `alone` (its own session), `carrier` (a graph of many kernels, with caches as in a model) or `in_model`
    samples_ms: tuple[Milliseconds, ...] = ()  # one per run
    # further samples by name and unit, e.g. `energy_j` or `power_w`; not necessarily one per run
    quantities: dict[str, tuple[float, ...]] = {}
    facts: dict[str, str | int | float] = {}  # what the unit is and how it ran, if no description elsewhere has its id
    members: tuple[str, ...] = Field((), exclude_if=lambda members: not members)
    launches: int | None = None  # label `gpu`: kernels, copies and fills on the GPU per run
    cuda_kernels: tuple[str, ...] = ()  # label `gpu` of a kernel: their names in order (see `kernel_names`)
    # label `gpu` of a kernel on several streams: all launches waited for the GPU, as in a model whose host is ahead. Otherwise
    # the overlap depends on the host
    queued: bool = Field(False, exclude_if=lambda queued: not queued)
    # for a model on an idle GPU, how much other work slowed the host down, a ratio (quiet_host)
    disturbance: float | None = None
    probe_us: float | None = None  # for a model on a GPU, the time of the host probe meanwhile
    # for units whose time depends on values (`time_by_values`): `standardised` random numbers, or `given` by the user; "" for
    # other units, and before this was recorded
    inputs: InputValues = Field("", exclude_if=lambda inputs: not inputs)
    # `error` explains any but `ok`, and for label `energy` what is wrong with the reading. `interrupted`: the machine lacked
    # something (disk space, memory, open files), or the process lost its device or was ended. It says nothing about the unit,
    # which is measured again; no journal keeps it
    status: Status = "ok"
    error: str = ""
    # started, ended: UTC, ISO 8601
    started: str = ""
    ended: str = ""

    @model_validator(mode="after")
    def _went_well_with_samples(self) -> Self:
        if self.status == "ok" and not self.samples_ms and self.subject in ("kernel", "model"):  # tables take their medians
            raise ValueError(f"{self.subject} {self.id} has status ok and no samples of label {self.label}")
        return self


def kernel_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names of the CUDA kernels of one kernel, in order; if there are more than MAX_KERNEL_NAMES, each name once. A grouped
    convolution may launch 24,000, the same six again and again."""
    return tuple(names) if len(names) <= MAX_KERNEL_NAMES else tuple(dict.fromkeys(names))


def drift_key(label: str) -> str:
    """The key of the drift (a ratio) of the unsteady block in which a time of `label` was measured."""
    return f"{label} drift"


def inputs_key(label: str) -> str:
    """The key that marks (with 1) a time of `label` that depends on values and was measured with realistic inputs."""
    return f"{label} inputs"


class Effort(Frozen):
    """How long to measure one unit."""

    warmup: int = 2  # untimed runs at first
    warmup_s: float = 0.0  # their minimum duration in seconds: threads that slept need time to spread over the cores
    budget_s: float = 0.05  # seconds of timed runs
    # least_runs, most_runs: limits of the number of timed runs
    least_runs: int = 5
    most_runs: int = 50

    def part(self, parts: int) -> Effort:
        """One of `parts` equal parts of this effort, rounded up."""
        return self.model_copy(update={"budget_s": self.budget_s / parts, "least_runs": math.ceil(self.least_runs / parts),
                                       "most_runs": math.ceil(self.most_runs / parts)})

    def runs(self, one_run_s: float) -> int:
        """The number of runs within the budget if one takes `one_run_s` seconds."""
        return max(self.least_runs, min(self.most_runs, int(self.budget_s / max(one_run_s, 1e-6))))


class Background(Config):
    """A kind of background load. Its level is the share of time in which it keeps the device busy, up to 1."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    # `compute` multiplies matrices, `memory` copies within the device's memory, `mixed` alternates both, `model` runs an ONNX
    # model in a loop with its tensors on the device
    kind: BackgroundKind = "compute"
    # `synchronised` waits for each burst before the next; `deep` queues bursts up to 8 ms ahead of the GPU. Below level 1 the
    # queue is empty at the end of each share. On a CPU, which has no such queue, `deep` is an error
    queue: BackgroundQueue = "synchronised"
    # approximate length of a burst on a GPU, at least one whole product or copy. A model's burst is one run; on a CPU a step
    # takes tens of microseconds
    burst_ms: float = Field(0.5, gt=0, le=100)
    # below level 1, the time from the start of one share to the next. A share should hold several runs of a model; on a CPU
    # ONNX Runtime's threads also spin after a run, so a model takes more than its share
    period_ms: float = Field(20.0, gt=0, le=LONGEST_PERIOD_MS)
    processes: int = Field(1, ge=1, le=8, exclude_if=lambda processes: processes == 1)
    # for kind `model`, the ONNX file; a name without a folder is also looked for among the exported models
    model: Path | None = Field(None, validate_default=True)
    # sizes of its dynamic dimensions; by default the size that the file suggests, else 1
    dims: dict[str, Annotated[int, Field(ge=1)]] = {}

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name.lower() in ("na", "nan", "none", "null"):
            raise ValueError("a table would read this name as an empty cell")
        return name

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: Path | None, given: ValidationInfo) -> Path | None:
        kind = given.data.get("kind", "model" if model else "compute")
        if kind == "model" and model is None:
            raise ValueError("kind model needs one, an ONNX file")
        if kind != "model" and model is not None:
            raise ValueError(f"a model is run by kind model, not by kind {kind}")
        return model

    @field_validator("dims")
    @classmethod
    def _check_dims(cls, dims: dict[str, int], given: ValidationInfo) -> dict[str, int]:
        if dims and given.data.get("model", True) is None:
            raise ValueError("these are sizes of a model's dimensions, and there is no model")
        return dims

    def check_on(self, device: str) -> None:
        """Raises `UserError` if the device (`cpu` or `cuda`) can't run this background."""
        if device == "cpu" and self.queue == "deep":
            raise UserError(f"background {self.name}: queue deep: only a GPU has a queue to fill, and this is a CPU target; "
                            "leave queue out")


COMPUTE = Background(name="compute")


class Block(Frozen):
    """Measurements between two runs of the canary: one line of the journal, kept or lost as a whole."""

    version: int = DATASET_VERSION
    level: float  # requested busy share of the stressor, 0–1
    background_name: str = ""  # the stressor's work, by its name in the dataset's header; "" on an idle device
    key: str
    background: dict[str, float]  # mean of each metric over a window with the stressor alone, by DCGM field name
    during: dict[str, float]  # mean of each metric around the block's own runs; empty if they were too short for a valid window
    # background_s, during_s: length of the two windows in seconds; 0 if absent or unknown
    background_s: float = 0.0
    during_s: float = 0.0
    # canary_before_ms, canary_after_ms: the canary's times around the block
    canary_before_ms: Milliseconds
    canary_after_ms: Milliseconds
    canary_best_ms: Milliseconds = 0.0  # its shortest time so far on this idle machine; 0 under load, where it varies
    drift_admitted: float = DRIFT_ADMITTED  # the largest drift of a steady block at that time
    attempts: int  # how often the block has been measured, including this time. All attempts are kept; the `steadiest` counts
    stress: dict[str, float] = {}  # what the stressor reports as reached
    probe: ProbeReading | None = None  # how long tiny work waited for other work just before the block's runs; None if not read
    machine: str
    measurements: tuple[Measurement, ...]

    @property
    def load(self) -> tuple[float, str]:
        """The load: level and background."""
        return self.level, self.background_name

    @property
    def canary_ms(self) -> float:
        return (self.canary_before_ms + self.canary_after_ms) / 2

    @cached_property
    def drift(self) -> float:
        """How unsteady the machine was, as a ratio: the largest of four.

        - the difference between the two times of the canary;
        - how much slower than its best the canary was, beyond BELOW_BEST;
        - the difference between the halves of a whole model's latencies (or host times), taken before and after its profile;
        - the CPU share of other work on a device that should be idle, if more than BUSY_ADMITTED (if that work never stops,
          every canary is slow).
        """
        canaries = abs(self.canary_after_ms / self.canary_before_ms - 1.0) if self.canary_before_ms else 0.0
        slowest = max(self.canary_before_ms, self.canary_after_ms)
        excess = slowest / self.canary_best_ms - 1.0 - BELOW_BEST if self.canary_best_ms else 0.0
        busy = self.busy if self.busy > BUSY_ADMITTED else 0.0
        return max([canaries, excess, busy, *(halves_drift(m.samples_ms) for m in self.measurements
                                              if m.label == "latency" or (m.subject, m.label) == ("model", "host"))])

    @property
    def busy(self) -> float:
        """The CPU share of other work, 0–1, just before a block without load; 0 under a load, or if not measured."""
        return 0.0 if self.level else self.background.get(CPU_BUSY, 0.0)

    @property
    def unsteady(self) -> bool:
        """Whether the machine was too unsteady; the block is kept all the same."""
        return self.drift > self.drift_admitted


def halves_drift(samples: Sequence[float]) -> float:
    """The difference between the medians of the two halves of `samples`, as a ratio; 0 for fewer than four samples."""
    half = len(samples) // 2
    return abs(float(np.median(samples[half:]) / np.median(samples[:half])) - 1.0) if half >= 2 else 0.0


BlockMeasurement = tuple[Block, Measurement]  # a measurement, and the block that it was taken in


def steadiest(measured: Sequence[BlockMeasurement]) -> list[BlockMeasurement]:
    """The measurements that count: all from steady blocks; without any, those of the steadiest block. So a repeated measurement
    replaces one from an unsteady machine."""
    steady = [(block, m) for block, m in measured if not block.unsteady]
    least = min((block.drift for block, _ in measured), default=0.0)
    return steady or [(block, m) for block, m in measured if block.drift == least]


def best_measurements(blocks: Iterable[Block]) -> dict[str, Measurement]:
    """The best measurement of each unit, by its id: a successful one from the steadiest block."""
    measured: dict[str, list[BlockMeasurement]] = defaultdict(list)
    for block in blocks:
        for m in block.measurements:
            measured[m.id].append((block, m))
    return {name: max(parts, key=lambda part: (part[1].status == "ok", -part[0].drift))[1] for name, parts in measured.items()}


def format_unsteady(drifts: Mapping[str, float]) -> str:
    """The text of column Unsteady: labels from unsteady blocks, with their drift, `run:3.45|gpu:0.0712`."""
    return "|".join(f"{label}:{drift:.4g}" for label, drift in sorted(drifts.items()))


def parse_unsteady(text: str) -> dict[str, float]:
    """The drift of each label in a text of column Unsteady."""
    return {label: float(drift) for part in filter(None, text.split("|")) for label, _, drift in [part.partition(":")]}


class Journal:
    """Blocks in the order in which they were measured, in memory only."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self.blocks = list(blocks)

    def append(self, block: Block) -> None:
        """Adds a block."""
        self.blocks.append(block)


class JournalFile(Journal):
    """A journal in a file, including the blocks already there; new blocks are written at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(read_blocks(path))
        self.path = path

    def append(self, block: Block) -> None:
        append_block(self.path, block)
        super().append(block)


def append_block(path: Path, block: Block) -> None:
    """Adds a block to a journal file and forces it to disk."""
    files.append_line(path, journal_line(block))


def journal_line(block: Block) -> str:
    """A block as a journal line with a digest."""
    return files.line_with_digest(block.model_dump_json())


def read_blocks(path: Path) -> list[Block]:
    """The blocks of a journal file, in the order in which they were measured; none without a file. An unfinished last line is
    omitted. A repeated line counts once, with a warning: a file may have been restored by appending to it."""
    blocks: dict[str, Block] = {}  # by their lines without digests
    lines = files.read_lines(path)
    for number, line in enumerate(lines, 1):
        try:
            text = files.line_without_digest(line)
            if text not in blocks:
                blocks[text] = Block.model_validate_json(text)
        except ValidationError as error:
            raise UserError(f"{path}, line {number}: not a block of version {DATASET_VERSION} ({first_problem(error)}); "
                            "remove "
                            "the line or start a new dataset") from None
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; remove the line or start a new dataset") from None
    if repeated := len(lines) - len(blocks):
        log.warning("%s: %d lines stand there twice, as after a restore that appended; each block counts once", path, repeated)
    return list(blocks.values())


def unit_rows(blocks: Iterable[Block]) -> list[dict[str, Any]]:
    """One row per unit, load and machine.

    `<label>_ms` is the median of a label's samples, `<quantity>` the mean of a quantity's, and a metric's column its mean in
    the window before the block. If several blocks measured a label, the `steadiest` count. A failed unit has a row with status
    and error, and no times.
    """
    measured: dict[tuple[str, str, float, str, str], list[BlockMeasurement]] = defaultdict(list)
    for block in blocks:
        for m in block.measurements:
            measured[m.subject, m.id, *block.load, block.machine].append((block, m))
    return [_unit_row(key, parts) for key, parts in measured.items()]


def _unit_row(key: tuple[str, str, float, str, str], measured: list[BlockMeasurement]) -> dict[str, Any]:
    row: dict[str, Any] = dict(zip(("Subject", "Unit", "Level", "Background", "Machine"), key, strict=True))
    samples: dict[str, list[float]] = defaultdict(list)
    quantities: dict[str, list[float]] = defaultdict(list)
    labels = dict.fromkeys(m.label for _, m in measured)
    parts = [part for label in labels for part in steadiest([(block, m) for block, m in measured if m.label == label])]
    for _, m in parts:
        samples[f"{m.label}_ms"] += m.samples_ms
        for name, values in m.quantities.items():
            quantities[name] += values
    row |= {name: round(float(np.median(values)), 6) for name, values in samples.items() if values}
    row |= {name: round(float(np.mean(values)), 6) for name, values in quantities.items() if values}
    block, failures = parts[-1][0], [m for _, m in parts if m.status != "ok"]
    return row | block.background | {
        "Runs": max(map(len, samples.values())), "Canary_ms": block.canary_ms,
        "Drift": round(block.drift, 4),
        "Unsteady": format_unsteady({m.label: block.drift for block, m in parts if block.unsteady}),
        "Started": min(m.started for _, m in parts), "Ended": max(m.ended for _, m in parts),
        "Status": failures[0].status if failures else "ok", "Error": "; ".join(sorted({m.error for m in failures}))}


def write_units(path: Path, blocks: Iterable[Block]) -> None:
    """Writes the table of `unit_rows` as CSV; a value that a row lacks is an empty cell."""
    rows = unit_rows(blocks)
    files.write_csv(path, list(dict.fromkeys(name for row in rows for name in row)), rows)
