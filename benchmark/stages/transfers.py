"""Times of copies between the host's memory and a unit's own: `results/transfer_table.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from benchmark.stages.records import statistics
from measuring.run_times import time_warm_runs_ms
from utils import files
from utils.frozen import Frozen

VERSION = 1
TRANSFERS = "transfer_table.json"
REMAKE = "python benchmark/profile_stages.py --measure"
STEPS = 9  # numbers of bytes, evenly spaced on a logarithmic scale
FEWEST_BYTES = 4096
Direction: TypeAlias = Literal["to_device", "to_host"]
DIRECTIONS: tuple[Direction, ...] = ("to_device", "to_host")


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


class Copy(Frozen):
    """A copy to time: its direction, and its bytes, a multiple of 4."""

    direction: Direction
    bytes: int


class TransferTable(Frozen):
    """All copies of one machine."""

    version: int = VERSION
    records: tuple[TransferRecord, ...]

    @cached_property
    def medians_ms(self) -> dict[tuple[str, Direction], list[tuple[int, float]]]:
        """By memory and direction, numbers of bytes in rising order and the median times of their copies."""
        points: dict[tuple[str, Direction], dict[int, float]] = {}
        for one in self.records:
            points.setdefault((one.memory, one.direction), {})[one.bytes] = statistics(one.samples_ms)["median"]
        return {key: sorted(found.items()) for key, found in points.items()}

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


def sizes_of_copies(largest: int) -> list[int]:
    """Numbers of bytes to measure: up to the largest tensor, whole float32 values."""
    return sorted({4 * round(one / 4) for one in np.geomspace(FEWEST_BYTES, max(largest, 2 * FEWEST_BYTES), STEPS)})


def copies_to_time(largest: int) -> list[Copy]:
    """Both directions at each number of bytes."""
    return [Copy(direction=direction, bytes=moved) for moved in sizes_of_copies(largest) for direction in DIRECTIONS]


def time_copy(copy: Copy, to_device: Callable[[Any], Any], to_host: Callable[[Any], Any], warmup: int,
              runs: int) -> list[float]:
    """Times in ms of copies of an array, each to its end.

    Args:
        copy: which.
        to_device: copies an array to the device, and returns when that is done.
        to_host: copies what `to_device` returned to a new array.
        warmup, runs: copies before and in the measurement.
    """
    array = np.random.default_rng(0).random(copy.bytes // 4, np.float32)
    run = partial(to_device, array) if copy.direction == "to_device" else partial(to_host, to_device(array))
    return time_warm_runs_ms(run, warmup, runs)


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
