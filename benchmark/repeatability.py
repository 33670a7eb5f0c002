"""How much a second measurement differs from the first. No predictor can be more accurate than that.

Reads the dataset of this machine with its kernels and models. Measures a random sample of them again, at each level and
background of the dataset, and compares medians. Prints the difference; writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Sequence
from typing import Any

import numpy as np

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.devices import LocalDevice
from hase.benchmark.collecting.units import steadiness_of
from hase.benchmark.collecting.work import Item, find_work
from hase.benchmark.load.loads import measure_by
from hase.benchmark.measuring.pending import Plan, Planned, chunks
from hase.records.blocks import Block, Journal
from hase.records.dataset_files import read_header, read_journal
from hase.records.measurement import COLLECT
from hase.utils import cli
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, Workspace
from hase.utils.timing import error_statistics

IN_MODEL = "kernel_time"  # the label of kernels in models
SHORT_MS = 0.02  # shorter kernels are not in the second row: their times are mostly overhead
EXAMPLES = """
python benchmark/repeatability.py
python benchmark/repeatability.py --workspace out/demo --config recipes/demo/collector.yaml --count 200
"""


def differences(first_ms: dict[str, float], second_ms: dict[str, float], least_ms: float = 0.0) -> dict[str, Any]:
    """Statistics of |second − first| / first over what both hold and takes `least_ms` or more; None for each figure if there is
    nothing such."""
    names = [name for name in second_ms if first_ms.get(name, 0.0) > max(least_ms, 0.0)]
    if not names:
        return {"count": 0, "mean_%": None, "median_%": None, "within_10_%": None}
    errors = error_statistics([second_ms[name] for name in names], [first_ms[name] for name in names])
    return {"count": errors.count, "mean_%": 100 * errors.mape, "median_%": 100 * errors.median,
            "within_10_%": 100 * errors.within_10}


def repeat(workspace: Workspace, config: CollectorConfig, count: int, seed: int) -> list[dict[str, Any]]:
    """Per level and background, a row for kernels alone (label `run`), for kernels in models, and for whole models.

    Raises:
        UserError: there is no dataset of this machine.
    """
    here = LocalDevice(config)
    target, uuid = here.device.target, here.device.machine.uuid
    folder = workspace.dataset(target.name)
    blocks = [block for block in read_journal(folder) if block.machine == uuid]
    if not blocks:
        raise UserError(f"{folder}: no measurements of this machine; measure first: {COLLECT}")
    work = find_work(workspace, target, config.held_out)
    chosen = [work.kernels[i] for i in np.random.default_rng(seed).permutation(len(work.kernels))[:count]]
    parts: list[Sequence[Item]] = [[item] for item in work.models] + [*chunks(chosen, config.block_kernels)]
    planned = [Planned(f"repeat {number}", items) for number, items in enumerate(parts)]
    backgrounds, rows = read_header(folder).backgrounds, []
    with here.actors(config, workspace) as actors:
        for level, name in sorted({block.load for block in blocks}):
            of_load = [block for block in blocks if block.load == (level, name)]
            background = backgrounds.get(name, config.stress.backgrounds[0]) if level else None
            again = measure_by(actors, lambda load, measured: Plan({uuid: planned}), Journal(of_load), steadiness_of(config),
                               [(level, background)])
            rows += [{"level": level, "background": name, **row} for row in compared(of_load, again.blocks)]
    return rows


def compared(first: Sequence[Block], second: Sequence[Block]) -> list[dict[str, Any]]:
    """The differences of kernels, of kernels of SHORT_MS and more, of kernels in models, and of whole models."""
    first_ms, second_ms = medians(first), medians(second)
    rows = [("kernels", "run", 0.0), ("kernels of 20 µs and more", "run", SHORT_MS),
            ("kernels in models", IN_MODEL, 0.0), ("kernels in models, of 20 µs and more", IN_MODEL, SHORT_MS),
            ("models", "latency", 0.0)]
    return [{"what": what, **differences(first_ms[label], second_ms[label], least_ms)} for what, label, least_ms in rows]


def medians(blocks: Sequence[Block]) -> dict[str, dict[str, float]]:
    """By label, the medians (ms) of the last measurement of each kernel or model: alone, in models, and of whole models."""
    medians_ms: dict[str, dict[str, float]] = {"run": {}, IN_MODEL: {}, "latency": {}}
    for block in blocks:
        for m in block.measurements:
            if m.status == "ok" and m.label in medians_ms and m.place != "carrier":
                medians_ms[m.label][m.id] = float(np.median(m.samples_ms))
    return medians_ms


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    cli.add_config(parser, ROOT / "benchmark" / "config.yaml", "block_kernels=48",
                   "the collector's config that the dataset was measured with")
    parser.add_argument("--count", type=cli.count, default=200, help="kernels to measure again (default: 200)")
    parser.add_argument("--seed", type=cli.whole, default=0, help="which ones")
    args = parser.parse_args()
    workspace = cli.start(args)
    rows = repeat(workspace, read_config(args.config, CollectorConfig, args.changes), args.count, args.seed)
    cli.print_rows(rows, args.json, "a second measurement against the first")
    return 0


if __name__ == "__main__":
    cli.run(main)
