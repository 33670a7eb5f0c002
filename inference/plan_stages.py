"""Phase 7.7: on which unit each stage of a graph network should run: plans, ranked by their predicted latency or throughput.

Reads lookup_table.json of benchmark/profile_stages.py, and transfer_table.json where a unit has a memory of its own. Ranks 28
candidate plans for each unit other than home (one contiguous block of stages moves there: our reading of the document, which
gives the number alone), staying at home, and the best of all assignments. With --nodes and --edges it prints the plans at that
size; without, a table of sizes and their best plans, for switching plans by size. Times between sizes measured are
interpolated.

Stages of a run follow one another. Throughput is that of many runs in a row: the busiest processor limits it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from inference.stages.ranking import home_latency, home_of, left_out_rows, plan_table, ranked
from inference.stages.tables import StageTables, read_tables
from utils import cli, files
from utils.logger import get_logger
from utils.timing import error_statistics

EXAMPLES = """
python inference/plan_stages.py --nodes 4000 --edges 6000
python inference/plan_stages.py --results benchmark/profiling/results --objective throughput --out plan_table.json
python inference/plan_stages.py --results openvino=out/openvino --results torch=out/torch --home CPU-openvino
python inference/plan_stages.py --left-out
"""
log = get_logger("plan_stages")


def labelled(text: str) -> tuple[str, Path]:
    """An option that is a folder, or NAME=FOLDER."""
    label, _, folder = text.rpartition("=")
    return label, Path(folder)


def size(text: str) -> tuple[int, int]:
    """An option that is NODES/EDGES."""
    try:
        nodes, edges = map(cli.count, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NODES/EDGES, such as 4000/6000") from None
    return nodes, edges


def at_one_size(tables: StageTables, args: argparse.Namespace) -> None:
    """Prints the plans at one size."""
    home = home_of(tables, args.home)
    setting = tables.setting((args.nodes, args.edges), args.extrapolate)
    plans = ranked(setting, home, args.objective)
    for reason in setting.left_out:
        log.warning("left out: %s", reason)
    if setting.basis == "extrapolated":
        log.warning("%d/%d lies outside the sizes measured: these times are guesses", args.nodes, args.edges)
    if args.json:
        cli.print_json({"nodes": args.nodes, "edges": args.edges, "basis": setting.basis, "home": home,
                        "objective": args.objective, "plans": [
                            {"kind": plan.kind, "units": plan.cost.assignment, "latency_ms": plan.cost.latency_ms,
                             "std_ms": plan.cost.std_ms, "transfer_ms": plan.cost.transfer_ms, "busy_ms": plan.cost.busy_ms,
                             "throughput_per_s": plan.cost.throughput_per_s} for plan in plans[:args.top]]})
        return
    cli.print_table([plan.row(home_latency(plans)) for plan in plans[:args.top]],
                    f"{args.nodes} nodes, {args.edges} edges ({setting.basis}), home is {home}, by {args.objective}")


def over_sizes(tables: StageTables, args: argparse.Namespace) -> None:
    """Prints, and writes to --out, the best plan of each size."""
    rows = plan_table(tables, args.sizes or tables.sizes, home_of(tables, args.home), args.objective, args.extrapolate)
    if args.out and args.out.suffix == ".json":
        files.write_json(args.out, rows)
    elif args.out:
        files.write_csv(args.out, list(rows[0]), ({**row, "units": " ".join(row["units"])} for row in rows))
    cli.print_rows(rows if args.json else [{name: value for name, value in row.items() if name != "units"} for row in rows],
                   args.json, f"the best plan at each size, by {args.objective}")


def sizes_left_out(tables: StageTables, as_json: bool) -> None:
    """Prints how well interpolation meets sizes that it did not see."""
    rows = left_out_rows(tables)
    if not rows:
        log.warning("no size lies between others: nothing to leave out")
        return
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(row["unit"], []).append(row)
    summary = [{"unit": unit, **error_statistics([row["interpolated_ms"] for row in group],
                                                 [row["measured_ms"] for row in group]).model_dump()}
               for unit, group in grouped.items()]
    if as_json:
        cli.print_json({"units": summary, "rows": rows})
    else:
        cli.print_table(summary, "interpolated times of sizes left out against measured ones")


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--results", type=labelled, action="append", default=[], metavar="[NAME=]DIR",
                        help="folder with the tables; of several, NAME is added to the names of a folder's units "
                             "(default: benchmark/profiling/results)")
    parser.add_argument("--nodes", type=cli.count, help="of the graph to plan for")
    parser.add_argument("--edges", type=cli.count, help="of it")
    parser.add_argument("--sizes", type=size, nargs="+", metavar="NODES/EDGES", help="of the table (default: those measured)")
    parser.add_argument("--home", metavar="UNIT", help="where plans begin and end (default: CPU)")
    parser.add_argument("--objective", choices=("latency", "throughput"), default="latency", help="default: latency")
    parser.add_argument("--extrapolate", action="store_true", help="allow guesses at sizes outside those measured")
    parser.add_argument("--top", type=cli.count, default=10, metavar="N", help="show so many plans (default: 10)")
    parser.add_argument("--out", type=cli.out_file, metavar="FILE", help="write the table of sizes: a .json or .csv")
    parser.add_argument("--left-out", action="store_true", help="compare measured times with interpolated ones")
    args = parser.parse_args()
    if (args.nodes is None) != (args.edges is None):
        parser.error("--nodes and --edges go together")
    if args.nodes and (args.out or args.sizes):
        parser.error("--out and --sizes are of the table of sizes: leave out --nodes and --edges")
    if args.out and args.out.suffix not in (".json", ".csv"):
        parser.error(f"--out {args.out}: a .json or .csv")
    workspace = cli.start(args)
    tables = read_tables(args.results or [("", workspace.stage_results)])
    if args.left_out:
        sizes_left_out(tables, args.json)
    elif args.nodes:
        at_one_size(tables, args)
    else:
        over_sizes(tables, args)


if __name__ == "__main__":
    cli.run(main)
