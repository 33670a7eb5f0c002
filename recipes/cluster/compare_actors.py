"""How much faster two actors on Ray measure than one, each pinned to a core of this machine, and whether their times agree.

Makes small models and their kernels in --out, and measures them in turn, as often as --rounds says: without Ray, by one actor
on Ray, and by two. Prints for each the kernels a second, and the share of the time in which its actors measured: what one actor
lacks beside the collector without Ray is Ray's own share. Then it prints by how much the kernels' medians differ between two
rounds of one actor (a second measurement), and between one actor and two. Other work on the machine changes all of it; the log
says how much there is.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from measuring.pending import idle_units, median_times
from recipes.cluster.nodes_here import nodes_here
from records.dataset_files import read_journal
from utils import cli, files
from utils.errors import UserError
from utils.locks import FOLDER_VARIABLE
from utils.logger import get_logger
from utils.paths import ROOT, Workspace
from utils.ray_cluster import check_packages

log = get_logger("collector")
CONFIG = """
device: cpu
levels: [0.0]
labels: [run, kernel_time]
each_machine: false
ties: 0
window_s: 0.2
block_kernels: 16
patience_s: 0
attempts: 1
"""
EXAMPLES = """
python recipes/cluster/compare_actors.py
python recipes/cluster/compare_actors.py --models 6 --rounds 2 --json
"""
WAYS = {"without Ray": 0, "one actor on Ray": 1, "two actors on Ray": 2}  # and the nodes of each
ONE, TWO = "one actor on Ray", "two actors on Ray"
Medians = dict[tuple[str, str], float]  # ms, by label and kernel


def collect(prepared: Path, address: str, core: int) -> tuple[dict[str, Any], Medians]:
    """Measures everything in a copy of a workspace; returns the collector's totals, and the medians of its kernels.

    Args:
        prepared: the workspace.
        address: of the Ray cluster; "" without Ray, on one core alone.
        core: that one.

    Raises:
        UserError: the collector fails.
    """
    with tempfile.TemporaryDirectory(dir=prepared.parent) as folder:
        root = Path(folder) / "workspace"
        shutil.copytree(prepared, root)
        command = [sys.executable, "benchmark/collector.py", "--workspace", str(root), "--config", str(root / "collector.yaml"),
                   "--json", "--quiet", *(["--ray", address] if address else [])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {FOLDER_VARIABLE: folder},
                              preexec_fn=None if address else partial(os.sched_setaffinity, 0, {core}))
        if done.returncode:
            raise UserError(done.stderr.strip())
        totals: dict[str, Any] = json.loads(done.stdout)
        [times] = median_times(idle_units(read_journal(Workspace(root).dataset(totals["target"])))).values()
        return totals, {(label, name): time_ms for (subject, label, place), by_id in times.items() if subject == "kernel"
                        and place != "in_model" for name, time_ms in by_id.items()}


def difference(first: Medians, second: Medians) -> float:
    """The median of the relative differences between two measurements of the same kernels."""
    return float(np.median([abs(second[what] / time_ms - 1.0) for what, time_ms in first.items() if time_ms > 0]))


def speed_rows(totals: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each way: kernels a second (median of the rounds), and the share of the actors' time in which they measured."""
    speeds = {way: float(np.median([of["kernel_rows"] / of["took_s"] for of in rounds])) for way, rounds in totals.items()}
    return [{"way": way, "kernels": rounds[0]["kernel_rows"], "kernels_per_s": speeds[way],
             "times_one_actor": speeds[way] / speeds[ONE],
             "measuring": float(np.median([of["measuring_s"] / of["took_s"] for of in rounds])) / max(WAYS[way], 1)}
            for way, rounds in totals.items()]


def difference_rows(medians: dict[str, list[Medians]]) -> list[dict[str, Any]]:
    """By how much kernels' medians differ: between two rounds of one actor, and between rounds of one and of two."""
    again = [difference(*pair) for pair in itertools.combinations(medians[ONE], 2)]
    between = [difference(*pair) for pair in itertools.product(medians[ONE], medians[TWO])]
    return [{"kernels_medians": what, "pairs": len(found), "median_difference_%": 100 * float(np.median(found)),
             "least_%": 100 * min(found), "most_%": 100 * max(found)}
            for what, found in (("one actor, measured again", again), ("two actors against one", between))]


def compare(folder: Path, models: int, rounds: int, cores: Sequence[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of `speed_rows` and `difference_rows`."""
    prepared = folder / "prepared"
    shutil.rmtree(folder, ignore_errors=True)
    kills = import_module("recipes.fuzz.kills")  # it loads onnx, which --help does without
    kills.with_models(prepared, models)
    files.write_text(prepared / "collector.yaml", CONFIG)
    for command in kills.analysing(prepared):
        subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    totals, medians = defaultdict[str, list[dict[str, Any]]](list), defaultdict[str, list[Medians]](list)
    with (nodes_here(folder / "one", [cores[:1]]) as one, nodes_here(folder / "two", [cores[:1], cores[1:2]]) as two):
        addresses = dict(zip(WAYS, ("", one.address, two.address), strict=True))
        for number in range(rounds):
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                of_round, medians_ms = collect(prepared, addresses[way], cores[0])
                totals[way].append(of_round)
                medians[way].append(medians_ms)
                log.info("round %d, %s: %.1f s (load of this machine: %.1f)", number + 1, way, of_round["took_s"],
                         os.getloadavg()[0])
    return speed_rows({way: totals[way] for way in WAYS}), difference_rows(medians)


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--models", type=cli.count, default=12, metavar="N", help="small models to make (default: 12)")
    parser.add_argument("--rounds", type=cli.count, default=3, metavar="N", help="at least 2 (default: 3)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "cluster", metavar="DIR", help="where files are made")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds: a second measurement needs at least 2")
    cli.start(args)
    check_packages()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise UserError("two actors need two cores, and this process may use one")
    speeds, differences = compare(args.out.resolve(), args.models, args.rounds, cores)
    if args.json:
        cli.print_json({"speeds": speeds, "differences": differences})
    else:
        cli.print_table(speeds, "speed")
        cli.print_table(differences, "agreement")
    return 0


if __name__ == "__main__":
    cli.run(main)
