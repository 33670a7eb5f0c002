"""Phase 4.7: how much machines of one target disagree, by the kernels and models that two of them measured.

Reads the datasets in benchmark/dataset (by default of every target). Prints each dataset's machines, and for each pair of
them how the idle times of the one stand to those of the other, label by label. Writes nothing.

The collector has several machines measure some of the same kernels (`ties` in benchmark/config.yaml), or all of them
(`each_machine: true`). Times are compared where both were taken in the same way: alone, in a carrier, or in models.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmark.records.files import DatasetHeader, collected_targets, load_header, read_journal
from benchmark.records.tables import model_sessions
from utils import cli
from utils.logger import get_logger

if TYPE_CHECKING:
    from benchmark.records.blocks import Block

log = get_logger("ties")
CLOSE = 0.05  # a ratio within 1 ± this counts as the same
EXAMPLES = """
python benchmark/machine_ties.py
python benchmark/machine_ties.py --target nvidia-h200-cuda-ort1.31-all --workspace out/h200 --json
"""
Times = dict[tuple[str, str, str], dict[str, float]]  # ms by what was timed (subject, label, where) and id


def idle_times(blocks: Iterable[Block]) -> dict[str, Times]:
    """The median of each idle measurement that went well, by machine: kernels' times by label and by where they were taken,
    and models' latencies, where these tell of the model and not of its host."""
    idle = [block for block in blocks if not block.level]
    samples: dict[str, dict[tuple[str, str, str], dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list)))
    for block in idle:
        for m in block.measurements:
            if m.subject == "kernel" and m.status == "ok":
                samples[block.machine]["kernels", m.label, m.place][m.id] += m.samples_ms
    for session in model_sessions(idle):
        if session.tells:
            samples[session.block.machine]["models", "latency", "whole"][session.model] += session.labels["latency"].samples_ms
    return {machine: {what: {name: float(np.median(found)) for name, found in by_id.items()}
                      for what, by_id in of_machine.items()} for machine, of_machine in samples.items()}


def compare(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, Any] | None:
    """Statistics of other / one over what both timed, where it took any time; None where there is nothing such."""
    ratios = np.array([other[name] / one[name] for name in one if one[name] > 0 and other.get(name, 0.0) > 0])
    if not len(ratios):
        return None
    lower, median, upper = np.percentile(ratios, [25, 50, 75])
    return {"count": len(ratios), "median": float(median), "lower_quartile": float(lower), "upper_quartile": float(upper),
            "within_5_%": 100 * float((np.abs(ratios - 1) <= CLOSE).mean())}


def tie_rows(times: Mapping[str, Times]) -> list[dict[str, Any]]:
    """A row for each pair of machines and each thing that both timed: how the second's times stand to the first's."""
    rows = []
    for one, other in itertools.combinations(times, 2):
        for what in sorted(set(times[one]) & set(times[other])):
            found = compare(times[one][what], times[other][what])
            if found:
                subject, label, where = what
                rows.append({"machine": one, "other": other, "what": subject, "label": label, "where": where, **found})
    return rows


def machine_rows(header: DatasetHeader, times: Mapping[str, Times]) -> list[dict[str, Any]]:
    """A row for each machine of a dataset: what it is, and how many kernels and models it timed idle."""
    return [{"machine": uuid, "device": machine.device_name, "driver": machine.driver, **{
        subject: len({name for what, by_id in times.get(uuid, {}).items() if what[0] == subject for name in by_id})
        for subject in ("kernels", "models")}} for uuid, machine in header.machines.items()]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", help="name of a dataset in benchmark/dataset (default: all)")
    args = parser.parse_args()
    workspace = cli.start(args)
    results: dict[str, dict[str, Sequence[dict[str, Any]]]] = {}
    for target in [args.target] if args.target else collected_targets(workspace):
        folder = workspace.dataset(target)
        header = load_header(folder)
        times = idle_times(read_journal(folder))
        machines, ties = machine_rows(header, times), tie_rows(times)
        results[target] = {"machines": machines, "ties": ties}
        if not args.json:
            cli.print_table(machines, f"{target}: machines")
            cli.print_table(ties, f"{target}: idle times of the other over those of the machine")
        if not ties:
            log.info("%s: nothing was measured on two machines", target)
    if args.json:
        cli.print_json(results)
    return 0


if __name__ == "__main__":
    cli.run(main)
