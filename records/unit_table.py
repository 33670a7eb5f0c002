"""The blocks of any journal as one table: one row per unit, load and machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from records.blocks import Block
from records.measurement import Measurement
from utils import files


def unit_rows(blocks: Iterable[Block]) -> list[dict[str, Any]]:
    """One row per unit, load and machine.

    `<label>_ms` is the median of a label's samples, `<quantity>` the mean of a quantity's, and a metric's column its mean in
    the window before the block. A unit that failed has a row with its status and error, and no times.
    """
    found: dict[tuple[str, str, float, str, str], list[tuple[Block, Measurement]]] = defaultdict(list)
    for block in blocks:
        for m in block.measurements:
            found[m.subject, m.id, *block.load, block.machine].append((block, m))
    return [_row(key, parts) for key, parts in found.items()]


def _row(key: tuple[str, str, float, str, str], parts: list[tuple[Block, Measurement]]) -> dict[str, Any]:
    row: dict[str, Any] = dict(zip(("Subject", "Unit", "Level", "Background", "Machine"), key, strict=True))
    samples: dict[str, list[float]] = defaultdict(list)
    quantities: dict[str, list[float]] = defaultdict(list)
    for _, m in parts:
        samples[f"{m.label}_ms"] += m.samples_ms
        for name, values in m.quantities.items():
            quantities[name] += values
    row |= {name: round(float(np.median(values)), 6) for name, values in samples.items() if values}
    row |= {name: round(float(np.mean(values)), 6) for name, values in quantities.items() if values}
    block, failures = parts[-1][0], [m for _, m in parts if m.status != "ok"]
    return row | block.background | {
        "Runs": max(map(len, samples.values())), "Canary_ms": (block.canary_before_ms + block.canary_after_ms) / 2,
        "Drift": round(block.drift, 4), "Started": min(m.started for _, m in parts), "Ended": max(m.ended for _, m in parts),
        "Status": failures[0].status if failures else "ok", "Error": "; ".join(sorted({m.error for m in failures}))}


def write_units(path: Path, blocks: Iterable[Block]) -> None:
    """Writes the table as CSV; what a row lacks is an empty cell."""
    rows = unit_rows(blocks)
    files.write_csv(path, list(dict.fromkeys(name for row in rows for name in row)), rows)
