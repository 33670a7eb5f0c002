"""Profiles a GraphSAGE layer in seven stages on the processing units of this machine (CPU, GPU, NPU, NVIDIA's GPU).

Writes to extras/graph_stages/ in the workspace:
  exported_models/   the stages as ONNX models and OpenVINO's IR: dynamic for CPU and GPU, for each size for NPUs (--export)
  results/raw_measurements.json   times of each stage on each unit; the same command continues where it was stopped (--measure)
  results/lookup_table.json, bandwidth_table.json, profiling_report.txt and others, made from these times (--analyze)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from hase.extras.graph_stages.measuring.analysis import analyze
from hase.extras.graph_stages.measuring.layer import GRAPH_KINDS, STAGES, GraphSize, GraphSource, read_cases
from hase.extras.graph_stages.measuring.models import Exported, export_stages, has_openvino, stage_model_files
from hase.extras.graph_stages.measuring.profiling import Profile, measure_profile
from hase.extras.graph_stages.measuring.records import UnitReport
from hase.extras.graph_stages.measuring.units import (
    CPU_RUNTIMES,
    INSTALL,
    KINDS,
    OPENVINO,
    ORT,
    TORCH,
    StageTask,
    choose_units,
    find_units,
    runtime_version,
)
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.paths import ROOT, Workspace

CASES = ROOT / "extras" / "graph_stages" / "test_cases.json"
EXAMPLES = """
python extras/graph_stages/profile_stages.py --all
python extras/graph_stages/profile_stages.py --export --measure --units CPU --cpu-runtime torch --threads 4
python extras/graph_stages/profile_stages.py --all --edges cora.txt --undirected --features 1433  # needs a list of edges
python extras/graph_stages/profile_stages.py --analyze --plain-regression
"""
log = get_logger("profiler")


def graphs_to_measure(args: argparse.Namespace) -> tuple[GraphSource, list[tuple[GraphSize, str]]]:
    """The source of the graphs, and the size and name of each."""
    sizes = read_cases(args.cases, args.features, args.hidden)
    if args.edges is None:
        return GraphSource(kind=args.graph, seed=args.seed), [(size, args.graph) for size in sizes]
    source = GraphSource(kind="", path=str(args.edges.absolute()), undirected=args.undirected, seed=args.seed)
    graph = source.graph(0, 0)
    return source, [(sizes[0].model_copy(update={"nodes": graph.nodes, "edges": graph.edges}), graph.name)]


def export_dynamic_models(workspace: Workspace, sizes: list[GraphSize], seed: int) -> Exported:
    """Writes the 14 models for CPU and GPU, which take graphs of any size."""
    return export_stages(workspace.stage_models, [model for model in stage_model_files(sizes, seed) if not model.form.static])


def export_npu_static_models(workspace: Workspace, sizes: list[GraphSize], seed: int) -> Exported:
    """Writes the models for an NPU: 7 per graph size."""
    return export_stages(workspace.stage_models, [model for model in stage_model_files(sizes, seed) if model.form.static])


def export_all_models(workspace: Workspace, sizes: list[GraphSize], seed: int) -> None:
    """Writes all models, and logs how many."""
    exported = export_dynamic_models(workspace, sizes, seed) + export_npu_static_models(workspace, sizes, seed)
    log.info("%d ONNX models written, %d kept; %d IR models written, %d kept; %.0f MB in %s", exported.onnx_written,
             exported.onnx_kept, exported.ir_written, exported.ir_kept, exported.megabytes, workspace.stage_models)
    if not has_openvino():
        log.warning("no IR models were written: OpenVINO is not installed; %s", INSTALL)


def units_to_measure(args: argparse.Namespace) -> tuple[list[UnitReport], list[UnitReport]]:
    """Every unit that was looked for, and those to measure; logs why others are left out."""
    reports = find_units(args.cpu_runtime)
    chosen = choose_units(reports, args.units)
    for unit in reports:
        if unit in chosen:
            log.info("%s: %s, by %s %s in %s", unit.name, unit.device_name, unit.runtime, runtime_version(unit.runtime),
                     unit.inference_precision)
        else:
            log.warning("%s is not measured: %s", unit.name, unit.why or "--units leaves it out")
    return reports, chosen


def stage_tasks(args: argparse.Namespace, workspace: Workspace, chosen: list[UnitReport]) -> list[StageTask]:
    """Every stage on every chosen unit, by graph, unit and stage. Raises UserError if a model is missing or is not the one
    that the options ask for.
    """
    source, graphs = graphs_to_measure(args)
    tasks = [StageTask(size=size, source=source, graph=graph, unit=unit.name, stage=stage.id, runtime=unit.runtime,
                       runtime_version=runtime_version(unit.runtime), threads=args.threads if unit.name == "CPU" else 0,
                       warmup=args.warmup, runs=args.runs, models=str(workspace.stage_models))
             for size, graph in graphs for unit in chosen for stage in STAGES]
    for task in tasks:
        is_written = task.file.has_ir if task.runtime == OPENVINO else task.file.has_onnx
        if task.runtime in (OPENVINO, ORT) and not is_written(task.folder):
            raise UserError(f"{task.folder}: {task.file.stem} is missing, or was exported with other widths or another seed; "
                            "add --export to the same command")
    return tasks


def measure_all_latencies(args: argparse.Namespace, workspace: Workspace) -> list[dict[str, Any]]:
    """Measures what was not measured yet; returns a row per measurement, also of earlier ones."""
    reports, chosen = units_to_measure(args)
    profile = Profile(stage_tasks(args, workspace, chosen), reports, args.warmup, args.runs, args.seed, args.retry_failed)
    raw = measure_profile(workspace, profile)
    failed = [record for record in raw.records if record.status != "ok"]
    if len(failed) == len(raw.records):
        raise UserError(f"no stage could be measured; the first: {failed[0].error}")
    if failed:
        log.warning("%d of %d stages failed; --retry-failed measures them again", len(failed), len(raw.records))
    return [{"nodes": record.nodes, "edges": record.edges, "unit": record.unit,
             "stage": f"{record.stage} {record.stage_name}", "by": f"{record.runtime} on {record.ran_on}",
             **{f"{name}_ms": value for name, value in record.statistics.items()}, "status": record.status}
            for record in raw.records]


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--all", action="store_true", help="export, measure and analyze")
    parser.add_argument("--export", action="store_true", help="write the models that do not exist yet")
    parser.add_argument("--measure", action="store_true", help="measure what was not measured yet")
    parser.add_argument("--analyze", action="store_true", help="write the tables and the report from the measurements")
    parser.add_argument("--cases", type=Path, default=CASES, metavar="FILE",
                        help="JSON with the sizes of the graphs (default: extras/graph_stages/test_cases.json)")
    parser.add_argument("--graph", choices=tuple(GRAPH_KINDS), default="uniform", help="how edges are drawn (default: uniform)")
    parser.add_argument("--edges", type=Path, metavar="FILE", help="a graph of your own: the numbers of two nodes on each line")
    parser.add_argument("--undirected", action="store_true", help="each line of --edges stands for both directions")
    parser.add_argument("--features", type=cli.count, metavar="N", help="values per node, in place of those in --cases")
    parser.add_argument("--hidden", type=cli.count, metavar="N",
                        help="values per node after the layer, in place of those in --cases")
    parser.add_argument("--units", type=lambda text: text.upper().split(","), default=[], metavar="NAMES",
                        help=f"{', '.join(KINDS)} or OpenVINO's names such as GPU.1, separated by commas (default: all)")
    parser.add_argument("--cpu-runtime", choices=CPU_RUNTIMES,
                        help=f"what runs stages on the CPU (default: {OPENVINO}; without it {TORCH})")
    parser.add_argument("--threads", type=cli.count, default=0, metavar="N", help="of the CPU (default: the runtime's choice)")
    parser.add_argument("--warmup", type=cli.count, default=10, metavar="N", help="runs before a measurement (default: 10)")
    parser.add_argument("--runs", type=cli.count, default=50, metavar="N", help="runs in a measurement (default: 50)")
    parser.add_argument("--seed", type=cli.whole, default=0, metavar="N", help="of graphs, features and weights (default: 0)")
    parser.add_argument("--plain-regression", action="store_true",
                        help="with --analyze: write the regression's bandwidth also where it means nothing, and mark it")
    parser.add_argument("--retry-failed", action="store_true", help="measure stages again that failed earlier")
    args = parser.parse_args()
    if not (args.all or args.export or args.measure or args.analyze):
        parser.error("say what to do: --all, or one or more of --export, --measure and --analyze")
    if args.plain_regression and not (args.all or args.analyze):
        parser.error("--plain-regression goes with --analyze or --all")
    workspace = cli.start(args)
    rows: list[dict[str, Any]] = []
    if args.all or args.export:
        export_all_models(workspace, [size for size, _ in graphs_to_measure(args)[1]], args.seed)
    if args.all or args.measure:
        rows = measure_all_latencies(args, workspace)
    if args.all or args.analyze:
        rows = analyze(workspace, args.plain_regression)
    cli.print_rows(rows, args.json)


if __name__ == "__main__":
    cli.run(main, kept="what was measured")
