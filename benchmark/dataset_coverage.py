"""What a dataset holds: kernels by operator and by size, how many failed or are unsteady, and the loads and models measured.

Reads the dataset of a target in benchmark/dataset. Prints one row for each operator, with the numbers of its measured kernels
by the bytes that a kernel reads and writes. An operator or a size with few kernels is where predictions are least sure. Writes
nothing, except with --html a page to look at.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from hase.records.dataset_coverage import DatasetCoverage, OperatorCoverage, coverage_of
from hase.records.dataset_files import DatasetHeader, collected_targets, read_header, read_kernels
from hase.records.dataset_tables import read_kernel_table, read_model_table
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.pages.page import Fact, Grid, Page, Section, Table
from hase.utils.pages.rendering import write_page

MOST = 30  # operators of the page's grid
FEW = 5  # kernels of an operator: with fewer it is named on the page
EXAMPLES = """
python benchmark/dataset_coverage.py
python benchmark/dataset_coverage.py --target nvidia-h200-cuda-ort1.31-all --workspace out/h200 --html page.html
"""


def row_of(operator: OperatorCoverage, sizes: tuple[str, ...]) -> dict[str, Any]:
    """An operator as a row of a table."""
    return {"operator": operator.operator, "kernels": operator.kernels, "measured": operator.measured,
            "failed": operator.failed, "unsteady": operator.unsteady, "in models": operator.in_models,
            **dict(zip(sizes, operator.by_size, strict=True)), "shortest (ms)": operator.least_ms,
            "longest (ms)": operator.most_ms}


def coverage_page(coverage: DatasetCoverage, header: DatasetHeader) -> Page:
    """The page of what a dataset holds."""
    operators, machine = coverage.operators, list(header.machines.values())[-1] if header.machines else None
    device = machine.device_name if machine else coverage.target
    failed, unsteady = (sum(getattr(row, name) for row in operators) for name in ("failed", "unsteady"))
    few = [row.operator for row in operators if row.measured < FEW]
    shown = [row for row in operators if row.measured]
    answer = (f"{coverage.measured} kernels of {len(shown)} operators were measured on {device}, and {coverage.models} models "
              f"of {coverage.families} families.")
    more = [f"Fewer than {FEW} kernels were measured of {cli.first_of(few)}: there predictions are least sure."] if few else []
    facts = [Fact("measured kernels", cli.cell(coverage.measured), "", f"of {coverage.kernels} described"),
             Fact("failed", str(failed), "", "no idle measurement went well", "bad" if failed else ""),
             Fact("unsteady", str(unsteady), "", "measured while the machine was unsteady", "doubtful" if unsteady else ""),
             Fact("models", str(coverage.models), "", f"of {coverage.families} families")]
    most = shown[:MOST]
    which = "" if len(most) == len(shown) else f" of the {MOST} operators that have the most"
    grid = Grid(f"Measured kernels{which}", "operator", "bytes that a kernel reads and writes",
                [row.operator for row in most], coverage.sizes, [[count or None for count in row.by_size] for row in most])
    loads = [{"level": load.level, "background": load.background or ("idle" if not load.level else "the stressor's default"),
              "kernels": load.kernels, "models": load.models} for load in coverage.loads]
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items()) if machine else ""
    return Page("Dataset", coverage.target, answer, more, facts,
                [Section("By operator and size", [grid] if shown else [],
                         "Kernels of the idle device. An empty field is a size that no prediction can look up or learn from."),
                 Section("By operator", [Table([row_of(row, coverage.sizes) for row in operators], bar="measured", most=30)]),
                 Section("By load", [Table(loads)])], {},
                {"target": coverage.target,
                 "machines": ", ".join(dict.fromkeys(one.device_name for one in header.machines.values())),
                 **({"measured with": versions} if versions else {}), "labels": ", ".join(header.labels),
                 "metrics": ", ".join(header.metrics) or "none",
                 "held out of all fits": ", ".join(header.held_out) or "nothing"})


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", help="whose dataset (default: the only one that there is)")
    cli.add_html(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    targets = collected_targets(workspace)
    if not args.target and len(targets) > 1:
        raise UserError(f"several datasets: {', '.join(targets)}; say which with --target")
    target = args.target or targets[0]
    folder = workspace.dataset(target)
    header = read_header(folder)
    coverage = coverage_of(header, read_kernels(folder), read_kernel_table(workspace, target),
                           read_model_table(workspace, target))
    if args.html:
        write_page(coverage_page(coverage, header), args.html)
    if args.json:
        cli.print_json(coverage)
    else:
        cli.print_table([row_of(row, coverage.sizes) for row in coverage.operators],
                        f"{target}: {coverage.measured} kernels and {coverage.models} models measured idle")
    return 0


if __name__ == "__main__":
    cli.run(main)
