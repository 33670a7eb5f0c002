"""Whether ONNX Runtime ran a model's kernels one after another, and how fast a run could be if they overlapped.

Reads a profile that ONNX Runtime wrote (--profile), or runs a model under its profiler (--model). Prints how much the events
of nodes overlap and how long the device pauses between them. Then it compares the critical path, the longest chain of
dependent kernels, with the sum of all kernels. The graph of a profile is in a file that dag_critical_path.py wrote (--dag), or
it is that of the kernel record with the same nodes (--record, or the first one in ort_analysis/ort_kernel_record that
fits). Writes nothing.

On CUDA the event of a node is the host's time to dispatch it; the GPU works through one stream, in that order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from hase.benchmark.ort.profile import NodeEvent, ProfiledRun, kernel_times_ms, profile_model, read_profile
from hase.graph_model.simulation.dag import (
    MAKE_DAG,
    DagFile,
    calculate_latency,
    dag_file,
    dag_of,
    longest_path,
    read_dag,
    record_paths,
)
from hase.ort_analysis.graph.analysis import record_of
from hase.ort_analysis.isolated.analysis import check_opens
from hase.records.kernel_record import REMAKE
from hase.records.kernel_record_files import read_model_record
from hase.records.measurement import Effort
from hase.records.operators import CONTROL_FLOW
from hase.utils import cli
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.fingerprint import resolve_device
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

Floats = npt.NDArray[np.float64]
log = get_logger("overlap")
ROUNDING_US = 1.5  # profiles hold whole microseconds, so neighbours may seem to overlap by this much
WARMUP_RUNS = 3
EXAMPLES = """
python overlap_simulator.py --model resnet18.onnx --dim batch=1
python overlap_simulator.py --profile profile.json  # needs a profile that ONNX Runtime wrote of a model with a record
python overlap_simulator.py --profile profile.json --dag graph_model/model_DAG/*/resnet18.json  # needs such a profile
"""


class Overlap(Frozen):
    """Whether the kernels of a profile overlapped; times are means over its runs.

    Attributes:
        serial: no kernel began before the previous one had ended.
        busy_ms, gap_ms: time in which at least one kernel ran, and time between kernels in which none ran.
        overlap_ms: time in which two kernels ran at once, beyond rounding.
        overlap_share, gap_share: of `run_ms`, ratios.
        overlapping: the nodes that began while another ran.
    """

    runs: int
    kernels: int
    providers: tuple[str, ...]
    serial: bool
    busy_ms: float
    overlap_ms: float
    gap_ms: float
    run_ms: float
    overlap_share: float
    gap_share: float
    overlapping: tuple[str, ...]


class PathNode(Frozen):
    """A kernel on the critical path and its share of the path's length (a ratio)."""

    node: str
    type: str
    latency_ms: float
    share: float


class CriticalPath(Frozen):
    """The limits by the graph: sum_ms if kernels run one after another; path_ms if all independent ones run at once.

    `possible_speedup` is sum_ms / path_ms; 1 if every kernel waits for the previous one. `path` has the kernels in order.
    """

    sum_ms: float
    path_ms: float
    possible_speedup: float
    kernels: int
    path: tuple[PathNode, ...]


def innermost(nodes: Iterable[NodeEvent]) -> list[NodeEvent]:
    """The events by start time, without those inside a control-flow node, whose own event spans them."""
    kept: list[NodeEvent] = []
    inside_until = float("-inf")
    for node in sorted(nodes, key=lambda node: (node.start_us, -node.duration_us)):
        if node.end_us <= inside_until + ROUNDING_US and node.start_us < inside_until:
            continue
        kept.append(node)
        if node.op_type in CONTROL_FLOW:  # its event spans those of the nodes inside
            inside_until = node.end_us
    return kept


def overlap_of(runs: Sequence[ProfiledRun]) -> Overlap:
    """Overlap and pauses of the kernels in at least one run."""
    busy_us = overlap_us = gap_us = run_us = 0.0
    overlapping: dict[str, None] = {}
    for run in runs:
        run_us += run.end_us - run.start_us
        end_us = None
        for node in innermost(run.nodes):
            if end_us is None or node.start_us >= end_us - ROUNDING_US:
                gap_us += max(node.start_us - end_us, 0.0) if end_us is not None else 0.0
                busy_us += node.duration_us
                end_us = max(node.end_us, end_us or 0.0)
                continue
            overlapping[node.node] = None
            overlap_us += min(end_us, node.end_us) - node.start_us
            busy_us += max(node.end_us - end_us, 0.0)
            end_us = max(end_us, node.end_us)
    divisor = 1000.0 * len(runs)  # from µs of all runs to ms of one
    return Overlap(
        runs=len(runs), kernels=len({node.node for run in runs for node in run.nodes}), serial=not overlapping,
        providers=tuple(sorted({node.provider for run in runs for node in run.nodes})), busy_ms=busy_us / divisor,
        overlap_ms=overlap_us / divisor, gap_ms=gap_us / divisor, run_ms=run_us / divisor,
        overlap_share=overlap_us / run_us if run_us else 0.0, gap_share=gap_us / run_us if run_us else 0.0,
        overlapping=tuple(overlapping))


def critical_path(graph: DagFile, latency_ms: Mapping[str, float]) -> CriticalPath:
    """The critical path of a model's graph, given the time of each node. Raises UserError: a node without a time."""
    dag = dag_of(graph)
    total = calculate_latency(dag, latency_ms, "sum")
    length, path = longest_path(dag, latency_ms)
    return CriticalPath(
        sum_ms=total, path_ms=length, possible_speedup=total / length if length else 1.0, kernels=len(dag),
        path=tuple(PathNode(node=node, type=dag.nodes[node]["type"], latency_ms=latency_ms[node],
                            share=latency_ms[node] / length if length else 0.0) for node in path))


def node_times_ms(runs: Sequence[ProfiledRun]) -> dict[str, float]:
    """Each node's time in ms: the median over the runs, so that a slow first run does not count."""
    return {node: median(samples) for node, samples in kernel_times_ms(list(runs)).items()}


def whole_times_ms(graph: DagFile, times_ms: Mapping[str, float]) -> dict[str, float]:
    """Each node's total time in a run, ms. A node with a body counts as 0, since its body's nodes count."""
    return {node.name: 0.0 if node.type in CONTROL_FLOW else node.runs * times_ms[node.name]
            for node in graph.nodes if node.name in times_ms}


def with_names_of(graph: DagFile, runs: Sequence[ProfiledRun]) -> list[ProfiledRun] | None:
    """The runs with the graph's node names; None if the runs are of another graph.

    Hase itself names unnamed nodes, and those whose names ONNX Runtime numbers differently each time. So events with unknown
    names are matched, in order, with the graph's nodes that have no event. If that is no valid order of the graph, since both
    number their nodes, all events are matched with the graph's nodes in order.
    """
    known, seen = {node.name for node in graph.nodes}, {event.node for run in runs for event in run.nodes}
    return _named_in_order(graph, runs, known & seen) or _named_in_order(graph, runs, set())


def _named_in_order(graph: DagFile, runs: Sequence[ProfiledRun], kept: Set[str]) -> list[ProfiledRun] | None:
    """Names the events that are not in `kept` after the other nodes of the graph, in order. None if their number or operators
    differ, or a node would run before one that it needs.
    """
    others = [node.name for node in graph.nodes if node.name not in kept]
    named = []
    for run in runs:
        renamed = [event for event in run.nodes if event.node not in kept]
        if len(renamed) != len(others) or not all(
                name == event.node or name.startswith((f"{event.op_type}_", f"{event.node}_"))
                for event, name in zip(renamed, others, strict=True)):
            return None
        names = iter(others)
        events = [event if event.node in kept else replace(event, node=next(names)) for event in run.nodes]
        first_us = {event.node: event.start_us for event in reversed(events)}  # loops run their nodes more than once
        if any(first_us.get(edge.producer, 0.0) > first_us.get(edge.consumer, float("inf")) for edge in graph.edges):
            return None
        named.append(replace(run, nodes=tuple(events)))
    return named


def graph_of_profile(runs: Sequence[ProfiledRun], dag: Path | None, record: Path | None,
                     workspace: Workspace) -> tuple[DagFile, list[ProfiledRun]] | None:
    """The graph of a profile's model, and the runs with the names of its nodes. None, with a warning, if no graph is found.

    The graph comes from the user's file (`dag` or `record`), else from the record in the workspace that fits.

    Raises:
        UserError: the file can't be read, or has other nodes.
    """
    if dag or record:
        graph = read_dag(dag) if dag else dag_file(read_model_record(record or Path()))
        if named := with_names_of(graph, runs):
            return graph, named
        raise UserError(f"{dag or record}: its nodes are not those of the profile; give the file of the model and flavour "
                        "that was profiled, or let --model profile it")
    for path in record_paths(workspace):
        graph = dag_file(read_model_record(path))
        if named := with_names_of(graph, runs):
            return graph, named
    log.warning("no kernel record has this profile's nodes, so its graph and critical path are unknown; make the record of the "
                "model that was profiled (%s), or use --model", REMAKE)
    return None


def print_report(overlap: Overlap, path: CriticalPath | None, rows: int) -> None:
    """Prints the findings as tables, with a sentence that explains them."""
    cli.print_table([{
        "kernels": overlap.kernels, "runs": overlap.runs, "run_ms": overlap.run_ms, "busy_ms": overlap.busy_ms,
        "overlap_ms": overlap.overlap_ms, "overlap_%": 100 * overlap.overlap_share, "gap_ms": overlap.gap_ms,
        "gap_%": 100 * overlap.gap_share}], "one run")
    print("Kernels ran one after another." if overlap.serial else
          f"{len(overlap.overlapping)} kernels ran while another did: {', '.join(overlap.overlapping[:5])}"
          + (" …" if len(overlap.overlapping) > 5 else ""))
    if path is None:
        return
    print(f"Critical path: {len(path.path)} of {path.kernels} kernels, {path.path_ms:.4g} ms of {path.sum_ms:.4g} ms; if all "
          f"independent kernels ran at once, they would take {path.possible_speedup:.3g} times less.")
    longest = sorted(path.path, key=lambda node: -node.latency_ms)[:rows]
    cli.print_table([{"node": node.node, "type": node.type, "latency_ms": node.latency_ms, "share_%": 100 * node.share}
                     for node in longest], "kernels that dominate the critical path")


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--profile", type=Path, metavar="FILE", help="a JSON profile that ORT wrote")
    source.add_argument("--model", type=Path, help="an ONNX file to run; a bare name is also looked for in model_zoo")
    graphs = parser.add_mutually_exclusive_group()
    graphs.add_argument("--record", type=Path, metavar="FILE", help="the kernel record of the profile's model")
    graphs.add_argument("--dag", type=Path, metavar="FILE", help=f"the graph of the profile's model ({MAKE_DAG})")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where --model runs (default: auto)")
    parser.add_argument("--loops", type=cli.count, default=10, help="profiled runs of --model (default: 10)")
    parser.add_argument("--rows", type=cli.whole, default=10, help="kernels to list (default: 10)")
    cli.add_dim(parser)
    cli.add_static(parser)
    args = parser.parse_args()
    if args.model and (args.record or args.dag):
        parser.error("--record and --dag go with --profile; the graph of a --model is known")
    workspace = cli.start(args)
    graph: DagFile | None
    if args.model:
        dims = cli.one_size_dims(args.dim)
        effort = Effort(warmup=WARMUP_RUNS, least_runs=args.loops, most_runs=args.loops)
        model, device = workspace.find_model(args.model), resolve_device(args.device)
        check_opens(model, device, dims, args.static)
        runs, optimized, _ = profile_model(model, device, dims, effort, static=args.static)
        graph = dag_file(record_of(optimized))
    else:
        runs = read_profile(args.profile)
        graph, runs = graph_of_profile(runs, args.dag, args.record, workspace) or (None, runs)
    overlap = overlap_of(runs)
    path = critical_path(graph, whole_times_ms(graph, node_times_ms(runs))) if graph else None
    if args.json:
        result: dict[str, Any] = {"overlap": overlap.model_dump(mode="json"),
                                  "critical_path": path.model_dump(mode="json") if path else None}
        cli.print_json(result)
    else:
        print_report(overlap, path, args.rows)
    return 0


if __name__ == "__main__":
    cli.run(main)
