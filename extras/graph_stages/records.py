"""What was measured of each stage on each unit, `results/raw_measurements.json`, and of copies between the host's memory and a
unit's own, `results/transfer_table.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import computed_field, model_validator

from hase.extras.graph_stages.graphs import GraphSize
from hase.extras.graph_stages.layer import STAGES, Stage
from hase.records.measurement import Status
from hase.utils import files
from hase.utils.frozen import Frozen
from hase.utils.paths import Workspace

VERSION = 1
REMAKE = "python extras/graph_stages/profile_stages.py --measure"
RAW = "raw_measurements.json"
DERIVED = ("statistics", "resident_statistics")
TRANSFERS = "transfer_table.json"
Direction: TypeAlias = Literal["to_device", "to_host"]
DIRECTIONS: tuple[Direction, ...] = ("to_device", "to_host")


class UnitReport(Frozen):
    """A processing unit that was looked for.

    Attributes:
        name: OpenVINO's own (`CPU`, `GPU`, `GPU.1`, `NPU`), or `CUDA` for an NVIDIA GPU.
        present: whether it can be measured here.
        why: why it can't; "" where it can.
        device_name: in full.
        runtime: what runs its stages first: `openvino`, `ort` or `torch`. A stage that it can't run may run by another
            (`StageRecord.fallback`).
        inference_precision: in which the unit computes: `f32` or `f16`.
    """

    name: str
    present: bool
    why: str = ""
    device_name: str = ""
    runtime: str = ""
    inference_precision: str = ""


class StageRecord(Frozen):
    """Times of one stage on one unit at one size.

    Attributes:
        nodes, edges, features, hidden: the size, see `GraphSize`.
        graph: where the edges come from: `uniform`, `power_law`, or the name of a file.
        unit: see `UnitReport.name`.
        stage, stage_name: 1 to 7, and the name in STAGES.
        runtime: what really ran it.
        ran_on: the device that really ran it: the unit's name, but `CPU` where PyTorch stood in for another unit.
        fallback: why another runtime ran it than the unit's own; "" where none did.
        precision: of the weights in the model's file, `FP32` or `FP16`; inputs and outputs are FP32.
        inference_precision: in which it computed, `f32` or `f16`; `tf32` is never used.
        threads: on the CPU; 0 stands for the runtime's own choice.
        bytes_in, bytes_out: of inputs and outputs.
        samples_ms: one per run; inputs and outputs lie in the host's memory, so copies to and from the unit are part of them.
        resident_samples_ms: the same with inputs and outputs in the unit's own memory; empty where that was not measured. On
            a CPU nothing is copied, so `samples_ms` hold.
        model: the file that ran, by its name; "" for PyTorch.
        status, error: as in every measurement.
    """

    nodes: int
    edges: int
    features: int
    hidden: int
    graph: str
    unit: str
    stage: int
    stage_name: str
    runtime: str
    ran_on: str
    fallback: str = ""
    precision: str
    inference_precision: str
    threads: int = 0
    bytes_in: int
    bytes_out: int
    samples_ms: tuple[float, ...] = ()
    resident_samples_ms: tuple[float, ...] = ()
    model: str = ""
    status: Status = "ok"
    error: str = ""

    @model_validator(mode="before")
    @classmethod
    def _without_statistics(cls, data: Any) -> Any:
        """The file has the statistics for its readers; here they are computed from the samples."""
        return {key: value for key, value in data.items() if key not in DERIVED} if isinstance(data, dict) else data

    @property
    def size(self) -> GraphSize:
        return GraphSize(nodes=self.nodes, edges=self.edges, features=self.features, hidden=self.hidden)

    @property
    def definition(self) -> Stage:
        return STAGES[self.stage - 1]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def statistics(self) -> dict[str, float]:
        """Of `samples_ms`, in ms; empty where it failed."""
        return statistics(self.samples_ms)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def resident_statistics(self) -> dict[str, float]:
        """Of `resident_samples_ms`, in ms."""
        return statistics(self.resident_samples_ms)


class RawMeasurements(Frozen):
    """All records of one machine, in the order of sizes, units and stages.

    Attributes:
        machine: its name and hardware (`hase.utils.fingerprint.Machine`).
        versions: of Python and of the libraries that ran stages.
        warmup, runs: how often each stage ran before and in its measurement.
        seed: of the graphs, their features and the weights.
        units: every unit that was looked for, those that are absent too.
    """

    version: int = VERSION
    machine: dict[str, Any]
    versions: dict[str, str]
    warmup: int
    runs: int
    seed: int
    units: tuple[UnitReport, ...]
    records: tuple[StageRecord, ...]


def statistics(samples_ms: Sequence[float]) -> dict[str, float]:
    """`mean`, `std` (of the sample, n − 1), `min`, `max` and `median`, in the samples' unit; empty for no samples."""
    if not samples_ms:
        return {}
    values = np.asarray(samples_ms)
    std = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(values.mean()), "std": std, "min": float(values.min()), "max": float(values.max()),
            "median": float(np.median(values))}


def raw_path(workspace: Workspace) -> Path:
    return workspace.stage_results / RAW


def read_raw(path: Path) -> RawMeasurements:
    """The measurements of a file.

    Raises:
        UserError: it is missing or damaged.
    """
    return files.read_record(path, RawMeasurements, VERSION, REMAKE)


class TransferRecord(Frozen):
    """Times of copies of so many bytes.

    Attributes:
        memory: whose, by the unit's name.
        direction: from or to the host's memory, which is pageable: ordinary numpy arrays.
        bytes: of one copy.
        samples_ms: one per copy, to its end.
    """

    memory: str
    direction: Direction
    bytes: int
    samples_ms: tuple[float, ...]


class TransferTable(Frozen):
    """All copies of one machine."""

    version: int = VERSION
    records: tuple[TransferRecord, ...]

    @cached_property
    def medians_ms(self) -> dict[tuple[str, Direction], list[tuple[int, float]]]:
        """By memory and direction, numbers of bytes in rising order and the median times of their copies."""
        points: dict[tuple[str, Direction], dict[int, float]] = {}
        for record in self.records:
            points.setdefault((record.memory, record.direction), {})[record.bytes] = statistics(record.samples_ms)["median"]
        return {key: sorted(medians.items()) for key, medians in points.items()}

    def copy_ms(self, memory: str, direction: Direction, moved_bytes: int) -> float:
        """The time of a copy: between the numbers of bytes measured on a line, below them as long as the smallest, above them
        in proportion to the largest.

        Raises:
            KeyError: copies of that memory were not measured.
        """
        if (memory, direction) not in self.medians_ms:
            raise KeyError(memory)
        moved, times_ms = zip(*self.medians_ms[memory, direction], strict=True)
        if moved_bytes > moved[-1]:
            return float(times_ms[-1] * moved_bytes / moved[-1])
        return float(np.interp(moved_bytes, moved, times_ms))


def write_transfers(folder: Path, records: Iterable[TransferRecord]) -> Path:
    path = folder / TRANSFERS
    files.write_json(path, TransferTable(records=tuple(records)))
    return path


def read_transfers(folder: Path) -> TransferTable | None:
    """The copies in a folder of results; None where none were measured, as on a machine whose units share the host's memory.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / TRANSFERS
    return files.read_record(path, TransferTable, VERSION, REMAKE) if path.exists() else None
