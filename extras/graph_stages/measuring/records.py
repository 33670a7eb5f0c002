"""Files of measured stages (`results/raw_measurements.json`), and of copies between the memories of the host and of a unit
(`results/transfer_table.json`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import computed_field, model_validator

from hase.extras.graph_stages.measuring.layer import STAGES, GraphSize, LayerStage
from hase.records.measurement import Status
from hase.utils import files
from hase.utils.config import Frozen

VERSION = 1
REMAKE = "python extras/graph_stages/profile_stages.py --measure"
RAW = "raw_measurements.json"
COMPUTED_FIELDS = ("statistics", "resident_statistics")
TRANSFERS = "transfer_table.json"
Direction: TypeAlias = Literal["to_device", "to_host"]
DIRECTIONS: tuple[Direction, ...] = ("to_device", "to_host")


class UnitReport(Frozen):
    """A processing unit, whether this machine has it, and how it was measured."""

    name: str  # OpenVINO's (`CPU`, `GPU`, `GPU.1`, `NPU`), or `CUDA` for an NVIDIA GPU
    present: bool
    why: str = ""  # the reason that it cannot be measured here; "" if it can
    device_name: str = ""
    runtime: str = ""  # that was tried first for its stages: `openvino`, `ort` or `torch`
    inference_precision: str = ""  # of the computation: `f32` or `f16`


class StageRecord(Frozen):
    """Times of one stage on one unit at one size.

    `samples_ms` are one per run, with inputs and outputs in the host's memory, so copies to and from the unit are included.
    `resident_samples_ms` are the same in the unit's own memory; empty if not measured, as on a CPU, which has no copies.
    """

    nodes: int
    edges: int
    features: int
    hidden: int
    graph: str  # source of the edges: `uniform`, `power_law`, or a file name
    unit: str
    stage: int
    stage_name: str
    runtime: str  # what really ran it
    ran_on: str  # where: `CPU` if PyTorch replaced another unit
    fallback: str = ""  # why the unit's own runtime did not run it; "" if it did
    precision: str  # of the weights in the model's file, `FP32` or `FP16`; inputs and outputs are FP32
    inference_precision: str  # of the computation, `f32` or `f16`; `tf32` is never used
    threads: int = 0  # on the CPU; 0 is the runtime's default
    bytes_in: int
    bytes_out: int
    samples_ms: tuple[float, ...] = ()
    resident_samples_ms: tuple[float, ...] = ()
    model: str = ""  # name of the file that ran; "" for PyTorch
    status: Status = "ok"
    error: str = ""

    @model_validator(mode="before")
    @classmethod
    def _without_statistics(cls, data: Any) -> Any:
        """Ignores the statistics in the file, which are there for other readers; they are computed from the samples."""
        return {key: value for key, value in data.items() if key not in COMPUTED_FIELDS} if isinstance(data, dict) else data

    @property
    def size(self) -> GraphSize:
        return GraphSize(nodes=self.nodes, edges=self.edges, features=self.features, hidden=self.hidden)

    @property
    def definition(self) -> LayerStage:
        return STAGES[self.stage - 1]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def statistics(self) -> dict[str, float]:
        """Statistics of `samples_ms`, in ms; empty if the stage failed."""
        return statistics(self.samples_ms)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def resident_statistics(self) -> dict[str, float]:
        return statistics(self.resident_samples_ms)


class RawMeasurements(Frozen):
    """All records of one machine, ordered by size, unit and stage."""

    version: int = VERSION
    machine: dict[str, Any]
    versions: dict[str, str]
    warmup: int  # runs of each stage before its measurement
    runs: int  # and in it
    seed: int  # of the graphs, their features and the weights
    units: tuple[UnitReport, ...]  # every unit that was looked for, including absent ones
    records: tuple[StageRecord, ...]


def statistics(samples_ms: Sequence[float]) -> dict[str, float]:
    """`mean`, `std` (n − 1 degrees of freedom), `min`, `max` and `median` of samples, in ms; empty without samples."""
    if not samples_ms:
        return {}
    values = np.asarray(samples_ms)
    std = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(values.mean()), "std": std, "min": float(values.min()), "max": float(values.max()),
            "median": float(np.median(values))}


def read_raw(folder: Path) -> RawMeasurements:
    """Reads the measured stages in a results folder."""
    return files.read_record(folder / RAW, RawMeasurements, VERSION, REMAKE)


class TransferRecord(Frozen):
    """Times of complete copies of one size between a unit's `memory` and the host's, which is pageable (numpy arrays)."""

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
        """Pairs of bytes (ascending) and the median time of copying them, by memory and direction."""
        points: dict[tuple[str, Direction], dict[int, float]] = {}
        for record in self.records:
            points.setdefault((record.memory, record.direction), {})[record.bytes] = statistics(record.samples_ms)["median"]
        return {key: sorted(medians.items()) for key, medians in points.items()}

    def copy_ms(self, memory: str, direction: Direction, moved_bytes: int) -> float:
        """The time of a copy: linear between measured sizes, constant below them, and in proportion to the bytes above."""
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
    """Reads the copies in a results folder; None if none were measured, as when all units share the host's memory."""
    path = folder / TRANSFERS
    return files.read_record(path, TransferTable, VERSION, REMAKE) if path.exists() else None
