"""Blocks of measurements, the journal that keeps them, and a table with one row per unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from hase.records.measurement import (
    BELOW_BEST,
    BUSY_ADMITTED,
    CPU_BUSY,
    DATASET_VERSION,
    DRIFT_ADMITTED,
    Measurement,
    Milliseconds,
)
from hase.records.probe_reading import ProbeReading
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.logger import get_logger

log = get_logger("collector")


class Block(Frozen):
    """What the collector measures between two runs of the canary: one line of the journal, kept or lost as a whole.

    Attributes:
        level: share of the time that the stressor was asked to be busy, 0–1.
        background_name: what it was busy with, by its name in the dataset's header; "" on an idle device.
        key: the block's name within its level and background.
        background: mean of each metric over a window with the stressor alone, by DCGM field name.
        during: the same over a window around the block's own runs; empty if they were too short for a valid window.
        background_s, during_s: how long the two windows lasted, in seconds; 0 if there was none, or if it is not
            known.
        canary_before_ms, canary_after_ms: the canary's times around the block.
        canary_best_ms: its shortest time so far on this machine when idle; 0 under load, where it varies.
        drift_admitted: the largest drift of a steady block when it was measured.
        attempts: how often the block has been measured, with this time. All attempts are kept, and the `steadiest` counts.
        stress: what the stressor reports to have reached.
        probe: how long tiny work waited for other work just before the block's own runs; None if that was not read.
    """

    version: int = DATASET_VERSION
    level: float
    background_name: str = ""
    key: str
    background: dict[str, float]
    during: dict[str, float]
    background_s: float = 0.0
    during_s: float = 0.0
    canary_before_ms: Milliseconds
    canary_after_ms: Milliseconds
    canary_best_ms: Milliseconds = 0.0
    drift_admitted: float = DRIFT_ADMITTED
    attempts: int
    stress: dict[str, float] = {}
    probe: ProbeReading | None = None
    machine: str
    measurements: tuple[Measurement, ...]

    @property
    def load(self) -> tuple[float, str]:
        """What it was measured under: level and background."""
        return self.level, self.background_name

    @cached_property
    def drift(self) -> float:
        """How unsteady the machine was, a ratio. It is the largest of four:

        the difference of the two canaries; how much slower than at its best the canary was, beyond BELOW_BEST; the difference
        between the halves of a whole model's latencies (or host times), which are taken before and after its profile; and the
        share of a CPU's time that other work took although the device was to be idle, beyond BUSY_ADMITTED. Where that goes on
        all the time, each canary is as slow as the best.
        """
        canaries = abs(self.canary_after_ms / self.canary_before_ms - 1.0) if self.canary_before_ms else 0.0
        slowest = max(self.canary_before_ms, self.canary_after_ms)
        excess = slowest / self.canary_best_ms - 1.0 - BELOW_BEST if self.canary_best_ms else 0.0
        busy = self.busy if self.busy > BUSY_ADMITTED else 0.0
        return max([canaries, excess, busy, *(halves_drift(m.samples_ms) for m in self.measurements
                                              if m.label == "latency" or (m.subject, m.label) == ("model", "host"))])

    @property
    def busy(self) -> float:
        """The share of a CPU's time, 0–1, that work took just before the block while no load was to run; 0 under a load, and
        where it was not measured."""
        return 0.0 if self.level else self.background.get(CPU_BUSY, 0.0)

    @property
    def unsteady(self) -> bool:
        """Whether it was kept although the machine was unsteady."""
        return self.drift > self.drift_admitted


def halves_drift(samples: Sequence[float]) -> float:
    """The difference between the medians of the second and the first half of `samples`, as a ratio; 0 for fewer than four."""
    half = len(samples) // 2
    return abs(float(np.median(samples[half:]) / np.median(samples[:half])) - 1.0) if half >= 2 else 0.0


Measured = tuple[Block, Measurement]  # a measurement, and the block that it was taken in


def steadiest(measured: Sequence[Measured]) -> list[Measured]:
    """Those of several measurements of one thing that count: all from steady blocks, else those from the steadiest block. So
    what is measured again replaces what was measured while the machine was unsteady."""
    steady = [(block, m) for block, m in measured if not block.unsteady]
    least = min((block.drift for block, _ in measured), default=0.0)
    return steady or [(block, m) for block, m in measured if block.drift == least]


def counting(blocks: Iterable[Block]) -> dict[str, Measurement]:
    """Of each thing that was measured, by id, the measurement that counts: one that went well, from the steadiest block."""
    measured: dict[str, list[Measured]] = defaultdict(list)
    for block in blocks:
        for m in block.measurements:
            measured[m.id].append((block, m))
    return {name: max(parts, key=lambda part: (part[1].status == "ok", -part[0].drift))[1] for name, parts in measured.items()}


def unsteady_labels(drifts: Mapping[str, float]) -> str:
    """What column Unsteady says: each label that rests on an unsteady block, with the block's drift, `run:3.45|gpu:0.0712`."""
    return "|".join(f"{label}:{drift:.4g}" for label, drift in sorted(drifts.items()))


def labels_unsteady(text: str) -> dict[str, float]:
    """What `unsteady_labels` wrote: the drift of each label."""
    return {label: float(drift) for part in filter(None, text.split("|")) for label, _, drift in [part.partition(":")]}


class Journal:
    """Blocks in the order measured; this one keeps them in memory alone."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self.blocks = list(blocks)

    def append(self, block: Block) -> None:
        """Adds a block."""
        self.blocks.append(block)


class JournalFile(Journal):
    """A journal in a file. It begins with the blocks that are there; a block is added to the file at once.

    Raises:
        UserError: a line of the file is no block of this version.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(read_blocks(path))
        self.path = path

    def append(self, block: Block) -> None:
        append_block(self.path, block)
        super().append(block)


def append_block(path: Path, block: Block) -> None:
    """Adds a block to a journal's file and forces it to disk."""
    files.append_line(path, journal_line(block))


def journal_line(block: Block) -> str:
    """A block as a line of a journal, with the line's digest."""
    return files.line_with_digest(block.model_dump_json())


def read_blocks(path: Path) -> list[Block]:
    """The blocks of a journal's file, in the order measured; none where there is no file. A torn last line is left out.

    A line that stands again counts once, with a warning: a file may have been restored by appending to it.

    Raises:
        UserError: a line that is damaged, or no block of this version.
    """
    blocks: dict[str, Block] = {}  # by their lines without digests
    lines = files.read_lines(path)
    for number, line in enumerate(lines, 1):
        try:
            text = files.line_without_digest(line)
            if text not in blocks:
                blocks[text] = Block.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(f"{path}, line {number}: not a block of version {DATASET_VERSION} "
                            f"({where}: {first['msg']}); remove the line or start a new dataset") from None
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; remove the line or start a new dataset") from None
    if repeated := len(lines) - len(blocks):
        log.warning("%s: %d lines stand there twice, as after a restore that appended; each block counts once", path, repeated)
    return list(blocks.values())


def unit_rows(blocks: Iterable[Block]) -> list[dict[str, Any]]:
    """One row per unit, load and machine.

    `<label>_ms` is the median of a label's samples, `<quantity>` the mean of a quantity's, and a metric's column its mean in
    the window before the block. Of a label that several blocks measured, the `steadiest` count. A unit that failed has a
    row with its status and error, and no times.
    """
    measured: dict[tuple[str, str, float, str, str], list[Measured]] = defaultdict(list)
    for block in blocks:
        for m in block.measurements:
            measured[m.subject, m.id, *block.load, block.machine].append((block, m))
    return [_row(key, parts) for key, parts in measured.items()]


def _row(key: tuple[str, str, float, str, str], all_parts: list[Measured]) -> dict[str, Any]:
    row: dict[str, Any] = dict(zip(("Subject", "Unit", "Level", "Background", "Machine"), key, strict=True))
    samples: dict[str, list[float]] = defaultdict(list)
    quantities: dict[str, list[float]] = defaultdict(list)
    by_label: dict[str, list[Measured]] = defaultdict(list)
    for block, m in all_parts:
        by_label[m.label].append((block, m))
    parts = [part for of_label in by_label.values() for part in steadiest(of_label)]
    for _, m in parts:
        samples[f"{m.label}_ms"] += m.samples_ms
        for name, values in m.quantities.items():
            quantities[name] += values
    row |= {name: round(float(np.median(values)), 6) for name, values in samples.items() if values}
    row |= {name: round(float(np.mean(values)), 6) for name, values in quantities.items() if values}
    block, failures = parts[-1][0], [m for _, m in parts if m.status != "ok"]
    return row | block.background | {
        "Runs": max(map(len, samples.values())), "Canary_ms": (block.canary_before_ms + block.canary_after_ms) / 2,
        "Drift": round(block.drift, 4),
        "Unsteady": unsteady_labels({m.label: block.drift for block, m in parts if block.unsteady}),
        "Started": min(m.started for _, m in parts), "Ended": max(m.ended for _, m in parts),
        "Status": failures[0].status if failures else "ok", "Error": "; ".join(sorted({m.error for m in failures}))}


def write_units(path: Path, blocks: Iterable[Block]) -> None:
    """Writes the table as CSV; what a row lacks is an empty cell."""
    rows = unit_rows(blocks)
    files.write_csv(path, list(dict.fromkeys(name for row in rows for name in row)), rows)
