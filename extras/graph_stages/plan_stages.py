"""Plans on which unit each stage of a graph network should run, and ranks the plans by predicted latency or throughput.

Reads lookup_table.json of profile_stages.py, and transfer_table.json if a unit has a memory of its own. Ranks 28 candidate
plans for each unit other than home (one contiguous block of stages moves there: our reading of the user's document, which
gives only the number), staying at home, and the best of all assignments. With --nodes and --edges it prints the plans at that
size; without, a table of sizes and their best plans, for switching plans by size. Times between measured sizes are
interpolated. The stages of a run follow one another. Throughput is that of many runs in a row: the busiest processor limits it.

--time-chains times stages and copies as parts of chains, on each unit after each unit, and writes chain_times.jsonl and
chain_copies.jsonl into the first folder of results. Plans are better with it, since a stage that ran alone found its inputs in
the caches.

--run runs all these plans on this machine, which must be the one that was measured, at each size that was measured, with inputs
and outputs in the host's memory, and compares them. It writes plan_runs.jsonl into the first folder of results; the same
command goes on where it was stopped.

With both, plans and chains run in turns at each size. That shows what the predictions themselves are worth: a machine whose
pace changes from minute to minute changes it for both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from hase.extras.graph_stages.planning.chains import CHAINS, append_chains, time_in_chains, timed_sizes
from hase.extras.graph_stages.planning.ranked_plans import (
    RUNS,
    UNSTEADY,
    PlanRun,
    home_latency_ms,
    home_unit,
    interpolation_error,
    left_out_rows,
    open_stages,
    plan_table,
    plans_to_run,
    ranked_plans,
    read_runs,
    run_plans,
    run_with_chains,
    size_rows,
    stage_tasks,
    summary,
    with_current_predictions,
)
from hase.extras.graph_stages.planning.tables import Size, StageTables, read_tables
from hase.utils import cli, files
from hase.utils.locks import measuring, sole_writer
from hase.utils.logger import get_logger
from hase.utils.processes import keep_freed_memory
from hase.utils.timing import error_statistics

EXAMPLES = """
python extras/graph_stages/plan_stages.py --nodes 4000 --edges 6000
python extras/graph_stages/plan_stages.py --results extras/graph_stages/results --objective throughput --out plan_table.json
python extras/graph_stages/plan_stages.py --results openvino=out/openvino --results torch=out/torch --home CPU-openvino
python extras/graph_stages/plan_stages.py --left-out
python extras/graph_stages/plan_stages.py --time-chains
python extras/graph_stages/plan_stages.py --time-chains --run
python extras/graph_stages/plan_stages.py --run --sizes 1000/1000 10000/10000
"""
log = get_logger("plan_stages")


def labelled_folder(text: str) -> tuple[str, Path]:
    """Parses an option that is a folder, or NAME=FOLDER."""
    label, _, folder = text.rpartition("=")
    return label, Path(folder)


def size_option(text: str) -> Size:
    """Parses an option NODES/EDGES."""
    try:
        nodes, edges = map(cli.count, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NODES/EDGES, such as 4000/6000") from None
    return nodes, edges


def print_plans_at_size(tables: StageTables, args: argparse.Namespace) -> None:
    """Prints the plans at one size."""
    home = home_unit(tables, args.home)
    setting = tables.setting((args.nodes, args.edges), args.extrapolate)
    plans = ranked_plans(setting, home, args.objective)
    for reason in setting.left_out:
        log.warning("left out: %s", reason)
    error = interpolation_error(tables) if setting.basis == "interpolated" else None
    if error is not None:
        log.info("interpolated: times of stages at sizes left out are off by %.1f %% on average", 100 * error)
    if setting.basis == "extrapolated":
        log.warning("%d/%d lies outside the sizes measured: these times are guesses", args.nodes, args.edges)
    if args.json:
        cli.print_json({"nodes": args.nodes, "edges": args.edges, "basis": setting.basis, "interpolation_error": error,
                        "home": home, "objective": args.objective, "plans": [
                            {"kind": plan.kind, "units": plan.cost.assignment, "latency_ms": plan.cost.latency_ms,
                             "std_ms": plan.cost.std_ms, "transfer_ms": plan.cost.transfer_ms, "busy_ms": plan.cost.busy_ms,
                             "throughput_per_s": plan.cost.throughput_per_s} for plan in plans[:args.top]]})
        return
    cli.print_table([plan.row(home_latency_ms(plans)) for plan in plans[:args.top]],
                    f"{args.nodes} nodes, {args.edges} edges ({setting.basis}), home is {home}, by {args.objective}")


def print_best_plans(tables: StageTables, args: argparse.Namespace) -> None:
    """Prints the best plan of each size, and writes it to --out."""
    rows = plan_table(tables, args.sizes or tables.sizes, home_unit(tables, args.home), args.objective, args.extrapolate)
    if args.out and args.out.suffix == ".json":
        files.write_json(args.out, rows)
    elif args.out:
        files.write_csv(args.out, list(rows[0]), ({**row, "units": " ".join(row["units"])} for row in rows))
    cli.print_rows(rows if args.json else [{name: value for name, value in row.items() if name != "units"} for row in rows],
                   args.json, f"the best plan at each size, by {args.objective}")


def print_interpolation_errors(tables: StageTables, as_json: bool) -> None:
    """Prints how well interpolation predicts sizes that were left out."""
    rows = left_out_rows(tables)
    if not rows:
        log.warning("no size lies between others: nothing to leave out")
        return
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(row["unit"], []).append(row)
    unit_rows = [{"unit": unit, **error_statistics([row["interpolated_ms"] for row in group],
                                                   [row["measured_ms"] for row in group]).model_dump()}
                 for unit, group in grouped.items()]
    if as_json:
        cli.print_json({"units": unit_rows, "rows": rows})
    else:
        cli.print_table(unit_rows, "interpolated times of sizes left out against measured ones")


def time_chains(tables: StageTables, folders: list[tuple[str, Path]], args: argparse.Namespace) -> None:
    """Times stages in chains at the sizes that lack such times."""
    tasks, folder = stage_tasks(folders), folders[0][1]
    with sole_writer(folder), measuring("cpu"):
        done = timed_sizes(folder)
        left = [size for size in tables.sizes if size not in done]
        for number, size in enumerate(left, 1):
            log.info("%d nodes, %d edges (%d of %d)", *size, number, len(left))
            opened, tensors = open_stages(tasks, size)
            append_chains(folder, time_in_chains(size, tables.units, opened, tensors, args.warmup, args.runs, args.rounds))
    log.info("%d sizes timed in chains, %d timed before: %s", len(left), len(done), folder / CHAINS)


def run_and_compare(tables: StageTables, folders: list[tuple[str, Path]], args: argparse.Namespace) -> None:
    """Runs the plans and compares them; with --time-chains, plans and chains alternate."""
    tasks, home, folder = stage_tasks(folders), home_unit(tables, args.home), folders[0][1]
    sizes = args.sizes or tables.sizes
    # with times in chains, and alone; the best plans of both run in turns with all others
    tables_of_both = tables, read_tables(folders, not args.alone)
    tables_alone = tables_of_both[0 if args.alone else 1]
    with sole_writer(folder), measuring("cpu"):
        earlier_runs, sizes_timed = read_runs(folder / RUNS), timed_sizes(folder)
        for number, size in enumerate(sizes, 1):
            if args.time_chains and size not in sizes_timed:
                log.info("%d nodes, %d edges (%d of %d): plans and chains", *size, number, len(sizes))
                times, runs = run_with_chains(tables_alone, tasks, size, home, args.warmup, args.runs, args.rounds)
                append_chains(folder, times)
                files.append_records(folder / RUNS, runs)
            elif left := plans_to_run(tables_of_both, size, home, earlier_runs):
                log.info("%d nodes, %d edges (%d of %d): %d plans", *size, number, len(sizes), len(left))
                files.append_records(folder / RUNS, run_plans(left, tasks, size, args.warmup, args.runs, args.rounds))
    compare(read_tables(folders, args.alone), [run for run in read_runs(folder / RUNS) if run.size in sizes], args.json)


def compare(tables: StageTables, runs: list[PlanRun], as_json: bool) -> None:
    """Prints the errors of the predictions, and the loss of the chosen plans against the best (regret)."""
    rows = size_rows(with_current_predictions(tables, runs))
    if unsteady := sum(row["repeat"] > UNSTEADY for row in rows):
        log.warning("the machine was unsteady at %d of %d sizes: the same plan differed by more than %.0f %% between rounds; "
                    "errors and regret there say little", unsteady, len(rows), 100 * UNSTEADY)
    if as_json:
        cli.print_json({"summary": summary(rows), "sizes": rows})
    else:
        cli.print_table(rows, "predicted against measured latencies of plans")
        cli.print_table([summary(rows)], "over all sizes")


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--results", type=labelled_folder, action="append", default=[], metavar="[NAME=]DIR",
                        help="folder with the tables; of several, NAME is added to the names of a folder's units "
                             "(default: extras/graph_stages/results)")
    parser.add_argument("--home", metavar="UNIT", help="where plans begin and end (default: CPU)")
    parser.add_argument("--nodes", type=cli.count, help="of the graph to plan for")
    parser.add_argument("--edges", type=cli.count, help="of it")
    parser.add_argument("--sizes", type=size_option, nargs="+", metavar="NODES/EDGES",
                        help="of the table, or to run plans at (default: those measured)")
    parser.add_argument("--objective", choices=("latency", "throughput"), default="latency", help="default: latency")
    parser.add_argument("--extrapolate", action="store_true", help="allow guesses at sizes outside those measured")
    parser.add_argument("--top", type=cli.count, default=10, metavar="N", help="show so many plans (default: 10)")
    parser.add_argument("--out", type=cli.out_file, metavar="FILE", help="write the table of sizes: a .json or .csv")
    parser.add_argument("--left-out", action="store_true", help="compare measured times with interpolated ones")
    parser.add_argument("--run", action="store_true", help="run the plans here, and compare")
    parser.add_argument("--time-chains", action="store_true", help="time stages here as parts of chains")
    parser.add_argument("--alone", action="store_true", help="plan with stages timed alone, although chains were timed")
    for name, default, what in (("warmup", 3, "runs before those of a round"), ("runs", 5, "of a plan in a round"),
                                ("rounds", 4, "turns of each plan")):
        parser.add_argument(f"--{name}", type=cli.count, default=default, metavar="N",
                            help=f"for --run and --time-chains: {what} (default: {default})")
    args = parser.parse_args()
    if (args.nodes is None) != (args.edges is None):
        parser.error("--nodes and --edges go together")
    if args.nodes and (args.out or args.sizes):
        parser.error("--out and --sizes are of the table of sizes: leave out --nodes and --edges")
    if sum(map(bool, (args.nodes, args.run or args.time_chains, args.left_out))) > 1:
        parser.error("--run and --time-chains, --left-out, and --nodes with --edges exclude one another")
    if args.out and args.out.suffix not in (".json", ".csv"):
        parser.error(f"--out {args.out}: a .json or .csv")
    workspace = cli.start(args)
    folders = args.results or [("", workspace.stage_results)]
    tables = read_tables(folders, args.alone)
    if args.run or args.time_chains:
        keep_freed_memory()
    if args.run:
        run_and_compare(tables, folders, args)
    elif args.time_chains:
        time_chains(tables, folders, args)
    elif args.left_out:
        print_interpolation_errors(tables, args.json)
    elif args.nodes:
        print_plans_at_size(tables, args)
    else:
        print_best_plans(tables, args)


if __name__ == "__main__":
    cli.run(main, kept="the sizes that were run")
