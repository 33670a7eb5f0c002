"""Shows what a dataset holds: its kernels by operator and size, the machines that measured it, and how repeatable it is.

Reads the dataset of a target in benchmark/dataset. By default prints one row for each operator: how many kernels were measured,
by the bytes that they read and write, and how many failed or are unsteady. Predictions are least sure where there are few.

With --machines, prints the machines of each dataset, and for each pair of machines the ratio of the idle times of the second to
those of the first, label by label. The collector has several machines measure some of the same kernels (`ties` in
benchmark/config.yaml), or all of them (`each_machine: true`). Times are compared if both were taken in the same place: alone,
in a carrier, or in models.

With --repeat N, measures N kernels of this machine's dataset and all its models again, at each level and background, and prints
how much their medians differ: no predictor can be more accurate than that. Writes nothing, except with --html a page.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.devices import LocalDevice
from hase.benchmark.collecting.plans import Item, find_work
from hase.benchmark.collecting.units import steadiness_of
from hase.benchmark.measuring.blocks import PlannedBlock
from hase.benchmark.measuring.driver import BlockPlan, Driver, chunks
from hase.records.dataset_files import DatasetHeader, collected_targets, read_header, read_journal, read_kernels
from hase.records.dataset_tables import DatasetCoverage, dataset_coverage, model_sessions, read_kernel_table, read_model_table
from hase.records.measurement import COLLECT, Block, Journal
from hase.utils import cli
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.pages.page import Fact, Grid, Page, PageSection, PageTable
from hase.utils.pages.rendering import write_page
from hase.utils.paths import ROOT, Workspace
from hase.utils.text import cell, first_and_count
from hase.utils.timing import error_statistics

MOST_OPERATORS = 30  # of the page's grid and of its table before the reader asks for all
FEW_KERNELS = 5  # an operator with fewer is named on the page
CLOSE = 0.05  # a ratio within 1 ± this counts as the same
SHORT_MS = 0.02  # shorter kernels are left out of a second row: their times are mostly overhead
IN_MODEL = "kernel_time"  # the label of kernels in models that is repeated
Times = dict[tuple[str, str, str], dict[str, float]]  # by subject, label and place: ms by id

log = get_logger("dataset")
EXAMPLES = """
python benchmark/dataset.py
python benchmark/dataset.py --target nvidia-h200-cuda-ort1.31-all --workspace out/h200 --html page.html
python benchmark/dataset.py --machines --json
python benchmark/dataset.py --repeat 200 --workspace out/demo --config recipes/demo/collector.yaml
"""


# contents ----------------------------------------------------------------------------------------------------------------


def coverage_rows(coverage: DatasetCoverage) -> list[dict[str, Any]]:
    """The operators as table rows."""
    return [{"operator": row.operator, "kernels": row.kernels, "measured": row.measured, "failed": row.failed,
             "unsteady": row.unsteady, "in models": row.in_models, **dict(zip(coverage.sizes, row.by_size, strict=True)),
             "shortest (ms)": row.least_ms, "longest (ms)": row.most_ms} for row in coverage.operators]


def coverage_page(coverage: DatasetCoverage, header: DatasetHeader) -> Page:
    """A page on the contents of a dataset."""
    operators, machine = coverage.operators, list(header.machines.values())[-1] if header.machines else None
    device = machine.device_name if machine else coverage.target
    failed, unsteady = (sum(getattr(row, name) for row in operators) for name in ("failed", "unsteady"))
    few = [row.operator for row in operators if row.measured < FEW_KERNELS]
    measured = [row for row in operators if row.measured]
    answer = (f"{coverage.measured} kernels of {len(measured)} operators were measured on {device}, and {coverage.models} "
              f"models of {coverage.families} families.")
    unsure = f"Fewer than {FEW_KERNELS} kernels were measured of {first_and_count(few)}: there predictions are least sure."
    facts = [Fact("measured kernels", cell(coverage.measured), "", f"of {coverage.kernels} described"),
             Fact("failed", str(failed), "", "no idle measurement went well", "bad" if failed else ""),
             Fact("unsteady", str(unsteady), "", "measured while the machine was unsteady", "doubtful" if unsteady else ""),
             Fact("models", str(coverage.models), "", f"of {coverage.families} families")]
    shown = measured[:MOST_OPERATORS]
    which = "" if len(shown) == len(measured) else f" of the {MOST_OPERATORS} operators that have the most"
    grid = Grid(f"Measured kernels{which}", "operator", "bytes that a kernel reads and writes",
                [row.operator for row in shown], coverage.sizes, [[count or None for count in row.by_size] for row in shown])
    loads = [{"level": load.level, "background": load.background or ("idle" if not load.level else "the stressor's default"),
              "kernels": load.kernels, "models": load.models} for load in coverage.loads]
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items()) if machine else ""
    return Page("Dataset", coverage.target, answer, [unsure] if few else [], facts,
                [PageSection("By operator and size", [grid] if shown else [],
                         "Kernels of the idle device. An empty field is a size that no prediction can look up or learn from."),
                 PageSection("By operator", [PageTable(coverage_rows(coverage), bar="measured", most=MOST_OPERATORS)]),
                 PageSection("By load", [PageTable(loads)])], {},
                {"target": coverage.target,
                 "machines": ", ".join(dict.fromkeys(one.device_name for one in header.machines.values())),
                 **({"measured with": versions} if versions else {}), "labels": ", ".join(header.labels),
                 "metrics": ", ".join(header.metrics) or "none",
                 "held out of all fits": ", ".join(header.held_out) or "nothing"})


def show_coverage(workspace: Workspace, args: argparse.Namespace) -> None:
    targets = collected_targets(workspace)
    if not args.target and len(targets) > 1:
        raise UserError(f"there are several datasets: choose one with --target: {', '.join(targets)}")
    target = args.target or targets[0]
    folder = workspace.dataset(target)
    header = read_header(folder)
    coverage = dataset_coverage(header, read_kernels(folder), read_kernel_table(workspace, target),
                           read_model_table(workspace, target))
    if args.html:
        write_page(coverage_page(coverage, header), args.html)
    if args.json:
        cli.print_json(coverage)
    else:
        cli.print_table(coverage_rows(coverage),
                        f"{target}: {coverage.measured} kernels and {coverage.models} models measured idle")


# machines ----------------------------------------------------------------------------------------------------------------


def idle_times(blocks: Sequence[Block]) -> dict[str, Times]:
    """Medians (ms) of idle measurements, by machine: of kernels by label and place, and of models on an undisturbed host."""
    idle = [block for block in blocks if not block.level]
    samples: dict[str, dict[tuple[str, str, str], dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list)))
    for block in idle:
        for m in block.measurements:
            if m.status == "ok" and m.subject == "kernel":
                samples[block.machine]["kernels", m.label, m.place][m.id] += m.samples_ms
    for session in model_sessions(idle):
        if session.undisturbed:
            samples[session.block.machine]["models", "latency", "whole"][session.model] += session.labels["latency"].samples_ms
    return {machine: {subject: {name: float(np.median(samples_ms)) for name, samples_ms in by_id.items()}
                      for subject, by_id in by_subject.items()} for machine, by_subject in samples.items()}


def machine_rows(header: DatasetHeader, times: Mapping[str, Times]) -> list[dict[str, Any]]:
    """One row per machine of a dataset: what it is, and how many kernels and models it timed while idle."""
    return [{"machine": uuid, "device": machine.device_name, "driver": machine.driver, **{
        subject: len({name for timed, by_id in times.get(uuid, {}).items() if timed[0] == subject for name in by_id})
        for subject in ("kernels", "models")}} for uuid, machine in header.machines.items()]


def ratio_columns(first_ms: Mapping[str, float], second_ms: Mapping[str, float]) -> dict[str, Any] | None:
    """Statistics of second / first over everything that has both times; None if there is nothing."""
    ratios = np.array([second_ms[name] / time_ms for name, time_ms in first_ms.items()
                       if time_ms > 0 and second_ms.get(name, 0.0) > 0])
    if not len(ratios):
        return None
    lower, median, upper = np.percentile(ratios, [25, 50, 75])
    return {"count": len(ratios), "median": float(median), "lower_quartile": float(lower), "upper_quartile": float(upper),
            "within_5_%": 100 * float((np.abs(ratios - 1) <= CLOSE).mean())}


def tie_rows(times: Mapping[str, Times]) -> list[dict[str, Any]]:
    """One row per pair of machines and kind of time that both have: the ratio of the second's times to the first's."""
    return [{"machine": first, "other": second, "what": subject, "label": label, "where": place, **statistics}
            for first, second in itertools.combinations(times, 2)
            for subject, label, place in sorted(set(times[first]) & set(times[second]))
            if (statistics := ratio_columns(times[first][subject, label, place], times[second][subject, label, place]))]


def show_machines(workspace: Workspace, args: argparse.Namespace) -> None:
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


# a second measurement ----------------------------------------------------------------------------------------------------


def repeat(workspace: Workspace, config: CollectorConfig, count: int, seed: int) -> list[dict[str, Any]]:
    """Measures `count` kernels and all models again; returns, by level and background, rows of how much the times differ."""
    local = LocalDevice(config)
    target, uuid = local.device.target, local.device.machine.uuid
    folder = workspace.dataset(target.name)
    blocks = [block for block in read_journal(folder) if block.machine == uuid]
    if not blocks:
        raise UserError(f"{folder}: no measurements of this machine; measure first: {COLLECT}")
    work = find_work(workspace, target, config.held_out)
    chosen = [work.kernels[i] for i in np.random.default_rng(seed).permutation(len(work.kernels))[:count]]
    parts: list[Sequence[Item]] = [[item] for item in work.models] + [*chunks(chosen, config.block_kernels)]
    plan = BlockPlan({uuid: [PlannedBlock(f"repeat {number}", items) for number, items in enumerate(parts)]})
    backgrounds, rows = read_header(folder).backgrounds, []
    with local.actors(config, workspace) as actors:
        for level, name in sorted({block.load for block in blocks}):
            first = [block for block in blocks if block.load == (level, name)]
            background = backgrounds.get(name, config.stress.backgrounds[0]) if level else None
            driver = Driver[Item](actors, Journal(first), steadiness_of(config))
            driver.measure(level, background, plan)
            rows += [{"level": level, "background": name, **row} for row in repeat_rows(first, driver.finish().blocks)]
    return rows


def repeat_rows(first: Sequence[Block], second: Sequence[Block]) -> list[dict[str, Any]]:
    """How much two measurements differ: kernels alone (label `run`), kernels in models, and whole models."""
    first_ms, second_ms = medians_ms(first), medians_ms(second)
    rows = [("kernels", "run", 0.0), ("kernels of 20 µs and more", "run", SHORT_MS),
            ("kernels in models", IN_MODEL, 0.0), ("kernels in models, of 20 µs and more", IN_MODEL, SHORT_MS),
            ("models", "latency", 0.0)]
    return [{"what": what, **error_columns(first_ms[label], second_ms[label], least_ms)} for what, label, least_ms in rows]


def medians_ms(blocks: Sequence[Block]) -> dict[str, dict[str, float]]:
    """The median of the last measurement of each kernel or model, by label."""
    medians: dict[str, dict[str, float]] = {"run": {}, IN_MODEL: {}, "latency": {}}
    for block in blocks:
        for m in block.measurements:
            if m.status == "ok" and m.label in medians and m.place != "carrier":
                medians[m.label][m.id] = float(np.median(m.samples_ms))
    return medians


def error_columns(first_ms: dict[str, float], second_ms: dict[str, float], least_ms: float) -> dict[str, Any]:
    """Statistics of |second − first| / first over everything in both that took longer than `least_ms`."""
    names = [name for name in second_ms if first_ms.get(name, 0.0) > least_ms]
    if not names:
        return {"count": 0, "mean_%": None, "median_%": None, "within_10_%": None}
    errors = error_statistics([second_ms[name] for name in names], [first_ms[name] for name in names])
    return {"count": errors.count, "mean_%": 100 * errors.mape, "median_%": 100 * errors.median,
            "within_10_%": 100 * errors.within_10}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", help="whose dataset (default: the only one that there is; with --machines, all)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--machines", action="store_true", help="compare the machines that measured it")
    shown.add_argument("--repeat", type=cli.count, metavar="N", help="measure N kernels and all models again, and compare")
    cli.add_config(parser, ROOT / "benchmark" / "config.yaml", "block_kernels=48",
                   "with --repeat, the collector's config that the dataset was measured with")
    parser.add_argument("--seed", type=cli.whole, default=0, help="which kernels to repeat (default: 0)")
    cli.add_html(parser)
    args = parser.parse_args()
    if args.html and (args.machines or args.repeat):
        parser.error("--html shows what a dataset holds: leave --machines and --repeat out")
    if args.repeat and args.target:
        parser.error("--repeat measures this machine's own dataset: leave --target out")
    workspace = cli.start(args)
    if args.repeat:
        rows = repeat(workspace, read_config(args.config, CollectorConfig, args.changes), args.repeat, args.seed)
        cli.print_rows(rows, args.json, "a second measurement against the first")
    elif args.machines:
        show_machines(workspace, args)
    else:
        show_coverage(workspace, args)
    return 0


if __name__ == "__main__":
    cli.run(main)
