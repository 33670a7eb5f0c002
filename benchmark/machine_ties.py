"""How much machines of one target disagree, by the kernels and models that two of them measured.

Reads the datasets in benchmark/dataset (by default of every target). Prints the machines of each dataset, and for each pair
of machines the ratio of the idle times of the second to those of the first, label by label. Writes nothing.

The collector has several machines measure some of the same kernels (`ties` in benchmark/config.yaml), or all of them
(`each_machine: true`). Times are compared if both were taken in the same place: alone, in a carrier, or in models.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hase.benchmark.measuring.pending import TimedUnit, Times, idle_units, median_times, tie_rows
from hase.records.dataset_files import DatasetHeader, collected_targets, read_header, read_journal
from hase.records.dataset_tables import model_sessions
from hase.utils import cli
from hase.utils.logger import get_logger

if TYPE_CHECKING:
    from hase.records.blocks import Block

log = get_logger("ties")
EXAMPLES = """
python benchmark/machine_ties.py
python benchmark/machine_ties.py --target nvidia-h200-cuda-ort1.31-all --workspace out/h200 --json
"""


def idle_times(blocks: Sequence[Block]) -> dict[str, Times]:
    """The median of each idle measurement that succeeded, by machine: kernels by label and place, and models' latencies if no
    other work disturbed their host."""
    idle = [block for block in blocks if not block.level]
    kernels = (unit._replace(kind=("kernels", *unit.kind[1:])) for unit in idle_units(idle) if unit.kind[0] == "kernel")
    models = (TimedUnit(session.block.machine, ("models", "latency", "whole"), session.model,
                        session.labels["latency"].samples_ms) for session in model_sessions(idle) if session.undisturbed)
    return median_times(itertools.chain(kernels, models))


def machine_rows(header: DatasetHeader, times: Mapping[str, Times]) -> list[dict[str, Any]]:
    """One row per machine of a dataset: what it is, and how many kernels and models it timed on an idle device."""
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
        header = read_header(folder)
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
