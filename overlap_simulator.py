"""Phase 6.2: whether ORT ran a model's kernels one after another, and what a run could take if they need not wait.

Reads a profile that ORT wrote (--profile), or runs a model under ORT's profiler (--model). Prints how much node events
overlap and how long the device's queue stands still between them; then, from the graph, the critical path: the chain of
kernels that no overlap could shorten, against their sum. The graph of a profile is that of the kernel record whose nodes
it names (--record, or the first one in ort_analysis/ort_kernel_record that fits). Writes nothing.

On CUDA a node's event is the time that the host takes to dispatch it; the GPU works through one stream, in that order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from graph_model.dag_critical_path import build_dag, calculate_latency, longest_path, record_paths
from ort_analysis.kernel_costs import calls_library, is_control_flow
from ort_analysis.records import REMAKE, Frozen, Kernel, ModelRecord, load_record
from utils import cli
from utils.errors import UserError
from utils.fingerprint import resolve_provider
from utils.logger import get_logger
from utils.trace_events import PREDICTED, Span, document, process_events

if TYPE_CHECKING:
    from benchmark.ort_profile import NodeEvent, ProfiledRun

Floats = npt.NDArray[np.float64]
Kinds = npt.NDArray[np.int_] | npt.NDArray[np.bool_]  # NodeKind of each node
log = get_logger("overlap")
ROUNDING_US = 1.5  # ORT writes start and duration in whole microseconds: neighbours may seem to overlap by this much
CONTROL_FLOW = ("If", "Loop", "Scan")  # their events span those of the nodes inside
WARMUP_RUNS = 3
MOST_STAGES = 48  # of a simulated run on a shared GPU: twice as many change its mean by less than 1 %, and take twice as long
SHARED_RUNS = (200, 10)  # fewer callers leave the 95th percentile to chance
LOOPED_RUNS = 30  # of a model in a loop, whose turns are then known
BETWEEN_RUNS_MS = 0.02  # of a caller: what it takes between a run's end and the next one's start
TINY_MS = 1e-6
EXAMPLES = """
python overlap_simulator.py --model resnet18.onnx --dim batch=1
python overlap_simulator.py --profile onnxruntime_profile.json --record ort_analysis/ort_kernel_record/cpu/resnet18.json --json
"""


class Overlap(Frozen):
    """How the kernels of a profile lie in time; means over its runs.

    Attributes:
        serial: no kernel began before the one ahead of it had ended.
        busy_ms: time of a run in which at least one kernel ran.
        overlap_ms: time that kernels spent beside others, beyond rounding.
        gap_ms: time between kernels in which none ran.
        run_ms: the whole run.
        overlap_share, gap_share: of run_ms, ratios.
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
    """What the graph allows: kernels one after another take sum_ms, with everything independent side by side path_ms.

    Attributes:
        possible_speedup: sum_ms / path_ms; 1 where every kernel waits for the one before.
        path: the kernels on it, in order.
    """

    sum_ms: float
    path_ms: float
    possible_speedup: float
    kernels: int
    path: tuple[PathNode, ...]


class NodeKind(IntEnum):
    """What a node means to the host that dispatches it: it only renames a tensor, it moves data by a kernel of ONNX Runtime's
    own, or by one that cuDNN or cuBLAS is called for."""

    VIEW = 0
    OWN = 1
    LIBRARY = 2


def node_kind(kernel: Kernel, on_gpu: bool = True) -> NodeKind:
    """The kind of a node; no node that the CPU provider runs calls a GPU's library."""
    if not kernel.moves_data:
        return NodeKind.VIEW
    return NodeKind.LIBRARY if on_gpu and calls_library(kernel) else NodeKind.OWN


class PipelineCosts(Frozen):
    """What a run costs on the host, which dispatches node after node, and between it and the GPU, which follows; all ms.

    Attributes:
        node_ms, view_ms, launch_ms: the host's time for a node that moves data, for one that only renames a tensor, and
            for each launch.
        library_ms: what a node that calls cuDNN or cuBLAS for its work costs the host besides; 0 in files that do not know it.
        start_ms: the host's time before the first node.
        gap_ms: how long the GPU stands still between the work of two launches.
        lead_ms: from the end of a node's dispatch to the start of its work on an idle GPU; negative, since its first
            launch comes before its dispatch ends.
        end_ms: from the end of both tracks to the caller's knowing of it.
    """

    node_ms: float
    view_ms: float
    launch_ms: float
    start_ms: float
    gap_ms: float
    lead_ms: float
    end_ms: float
    library_ms: float = 0.0

    def at_pace(self, pace: float) -> PipelineCosts:
        """The costs where the host takes `pace` times as long for all it does; only the GPU's pauses stay."""
        return PipelineCosts(
            node_ms=pace * self.node_ms, view_ms=pace * self.view_ms, launch_ms=pace * self.launch_ms,
            start_ms=pace * self.start_ms, gap_ms=self.gap_ms, lead_ms=pace * self.lead_ms, end_ms=pace * self.end_ms,
            library_ms=pace * self.library_ms)


def _own_ms(launches: Floats, kinds: Kinds, costs: PipelineCosts) -> Floats:
    """The host's time for the dispatch of each node."""
    of_kind = np.array([costs.view_ms, costs.node_ms, costs.node_ms + costs.library_ms])  # in the order of NodeKind
    return of_kind[kinds.astype(int)] + costs.launch_ms * launches


def dispatched_ms(launches: Floats, kinds: Kinds, costs: PipelineCosts) -> Floats:
    """When the host has dispatched each node, in ms from the start of the run.

    Args:
        launches: of each node, in order.
        kinds: of each node; a mask of those that move data says the same where none calls a library.
        costs: of the target.
    """
    return costs.start_ms + np.cumsum(_own_ms(launches, kinds, costs))


class OffGpu(NamedTuple):
    """What the nodes of a run do besides giving the GPU work: those that the CPU provider runs, and copies.

    Attributes:
        host_ms: how long each keeps the host busy, beyond what its dispatch costs.
        waits: whether the host waits at a node until the GPU has done all that it was given; so does a copy to the host.
    """

    host_ms: Floats
    waits: npt.NDArray[np.bool_]


def dispatched_off_gpu_ms(gpu_ms: Floats, launches: Floats, kinds: Kinds, costs: PipelineCosts,
                          off_gpu: OffGpu) -> Floats:
    """As `dispatched_ms`, where the host also computes, copies, and waits for the GPU; arguments as of `pipeline_ms`."""
    own = _own_ms(launches, kinds, costs) + off_gpu.host_ms
    work = gpu_ms + costs.gap_ms * launches
    at, host, gpu = np.empty(len(own)), costs.start_ms, -np.inf
    for place, (takes, gives, count, waits) in enumerate(zip(own.tolist(), work.tolist(), launches.tolist(),
                                                             off_gpu.waits.tolist(), strict=True)):
        host += takes
        if count > 0:
            gpu = max(gpu, host + costs.lead_ms) + gives
        if waits:
            host = max(host, gpu)
        at[place] = host
    return at


def pipeline_ms(gpu_ms: Floats, launches: Floats, kinds: Kinds, costs: PipelineCosts,
                off_gpu: OffGpu | None = None) -> float:
    """A run's latency where the host dispatches node after node and the GPU does their work in that order.

    The GPU begins a node's work when the node is dispatched and the work before it is done, so that it ends with the
    latest of: some node's dispatch and all the work from there on.

    Args:
        gpu_ms: the GPU's own time of each node, in order.
        launches: of each node; one without any leaves the GPU nothing to do.
        kinds: of each node.
        costs: of the target.
        off_gpu: what nodes of the CPU provider and copies do; None where the run has none.
    """
    at = (dispatched_ms(launches, kinds, costs) if off_gpu is None
          else dispatched_off_gpu_ms(gpu_ms, launches, kinds, costs, off_gpu))
    if not len(at):
        return costs.start_ms + costs.end_ms
    working = launches > 0
    work = np.where(working, gpu_ms + costs.gap_ms * launches, 0.0)
    left = np.cumsum(work[::-1])[::-1]  # from each node on
    ends = (at + costs.lead_ms + left)[working]
    return float(max(at[-1], ends.max(initial=0.0)) + costs.end_ms)


class NodeSpan(NamedTuple):
    """When the host dispatches a node and when the GPU works on it, in ms from the start of a run; the latter None for a node
    that leaves the GPU nothing to do."""

    host: tuple[float, float]
    gpu: tuple[float, float] | None


def timeline(gpu_ms: Floats, launches: Floats, kinds: Kinds, costs: PipelineCosts,
             off_gpu: OffGpu | None = None) -> list[NodeSpan]:
    """The two tracks node by node; what `pipeline_ms` gives is the end of the later one (with its gap), and costs.end_ms.

    With a fitted lead that is longer than the first dispatch, the GPU's track begins before 0, as in that formula.

    Arguments are those of `pipeline_ms`.
    """
    spans, host, gpu = [], costs.start_ms, -np.inf
    at = (dispatched_ms(launches, kinds, costs) if off_gpu is None
          else dispatched_off_gpu_ms(gpu_ms, launches, kinds, costs, off_gpu))
    for dispatched, time, count in zip(at.tolist(), gpu_ms, launches, strict=True):
        work = None
        if count > 0:
            begins = max(gpu, dispatched + costs.lead_ms)
            gpu = begins + float(time) + costs.gap_ms * float(count)
            work = begins, begins + float(time)
        spans.append(NodeSpan((host, dispatched), work))
        host = dispatched
    return spans


class OtherWork(NamedTuple):
    """What else runs on a GPU that processes share in time slices, as one of them meets it.

    Attributes:
        busy_ms, quiet_ms: how long it has work and none, in turn; it never pauses where quiet_ms is 0.
        waits_ms: how long another process waits for the GPU while it is busy, from many such waits; none are drawn where it
            is empty.
    """

    busy_ms: float
    quiet_ms: float
    waits_ms: Floats

    @property
    def cycle_ms(self) -> float:
        """From the beginning of one busy phase to the next."""
        return self.busy_ms + self.quiet_ms

    @property
    def busy_share(self) -> float:
        """For what share of the time it is busy; a ratio."""
        return self.busy_ms / self.cycle_ms


class _Stages(NamedTuple):
    """What a run queues on the GPU, by node or by group of nodes: when the work of each can begin at the earliest (ms from the
    start of the run), how long it takes the GPU, and when the host is done."""

    ready_ms: Floats
    work_ms: Floats
    dispatched_ms: float


def _queued(gpu_ms: Floats, launches: Floats, kinds: Kinds, costs: PipelineCosts) -> _Stages:
    """The nodes that leave the GPU something to do, each by itself."""
    at, working = dispatched_ms(launches, kinds, costs), launches > 0
    ready = np.maximum(at + costs.lead_ms, 0.0)  # no launch comes before its run, whatever lead was fitted
    return _Stages(ready[working], (gpu_ms + costs.gap_ms * launches)[working],
                   float(at[-1]) if len(at) else costs.start_ms)


def _stages(gpu_ms: Floats, launches: Floats, kinds: Kinds, costs: PipelineCosts) -> _Stages:
    """At most MOST_STAGES groups of neighbouring nodes. A group begins as late as its last node's dispatch demands, so that
    the GPU's pauses within it come before it."""
    ready, work, dispatched = _queued(gpu_ms, launches, kinds, costs)
    done = np.cumsum(work)
    slack = ready - (done - work)  # the start of all work that would make a node wait for its dispatch just not
    begins = np.unique(np.linspace(0, len(work), min(len(work), MOST_STAGES), endpoint=False).astype(int))
    latest = np.maximum.reduceat(slack, begins) if len(work) else slack
    return _Stages(latest + (done - work)[begins], np.add.reduceat(work, begins) if len(work) else work, dispatched)


def shared_runs_ms(gpu_ms: Floats, launches: Floats, kinds: Kinds, costs: PipelineCosts, slice_ms: float,
                   other: OtherWork, generator: np.random.Generator, shape: tuple[int, int] = SHARED_RUNS) -> Floats:
    """Latencies (ms) of runs one after another on a GPU that another process uses too, in time slices.

    The two never run side by side. The other one gets the GPU while this run has no work for it, and when it has had the
    GPU for `slice_ms`; it then keeps it for one of its waits. The host goes on dispatching meanwhile, so that part of a wait
    is hidden where the host is the slower track. Of an H200: see `training/fit_sharing.py`.

    Args:
        gpu_ms, launches, kinds, costs: as `pipeline_ms` takes them.
        slice_ms: how long a process has the GPU before another's turn.
        other: what else runs.
        generator: draws waits, and where in its phases the other one is.
        shape: how many callers are simulated, each on its own, and how many runs each makes; the first one of each only
            brings it into step.

    Returns:
        latencies, shape (runs − 1, callers).
    """
    callers, runs = shape
    stages = _stages(gpu_ms, launches, kinds, costs)
    phase = generator.uniform(0.0, other.cycle_ms, callers)
    waits = other.waits_ms if len(other.waits_ms) else np.zeros(1)

    def busy(when: Floats) -> npt.NDArray[np.bool_]:
        return (phase + when) % other.cycle_ms < other.busy_ms if other.quiet_ms else when < np.inf

    begin, free, used = np.zeros(callers), -generator.uniform(0.0, 1.0, callers), np.zeros(callers)
    latencies = np.empty((runs, callers))
    for run in range(runs):
        for ready, work in zip(stages.ready_ms.tolist(), stages.work_ms.tolist(), strict=True):
            wait = generator.choice(waits, callers)
            start = np.maximum(free, begin + ready)
            gap = start - free
            lost = (gap > 0) & busy(start)
            start = start + np.where(lost, wait - np.mod(gap, np.maximum(wait, TINY_MS)), 0.0)
            used, left, now = np.where(gap > 0, 0.0, used), np.full(callers, work), start
            while (over := used + left > slice_ms).any():
                room = slice_ms - used
                now = np.where(over, now + room, now)
                now = np.where(over & busy(now), now + generator.choice(waits, callers), now)
                left, used = np.where(over, left - room, left), np.where(over, 0.0, used)
            free, used = now + left, used + left
        end = np.maximum(begin + stages.dispatched_ms, free) + costs.end_ms
        latencies[run] = end - begin
        begin = end + BETWEEN_RUNS_MS
    return latencies[1:]


def gpu_work_ms(gpu_ms: Floats, launches: Floats, kinds: Kinds, costs: PipelineCosts) -> float:
    """What a run takes the GPU, the pauses between launches with it; arguments as `pipeline_ms` takes them."""
    return float(_queued(gpu_ms, launches, kinds, costs).work_ms.sum())


def turns_ms(gpu_ms: Floats, launches: Floats, kinds: Kinds, costs: PipelineCosts, longest_ms: float,
             away_ms: float, runs: int = LOOPED_RUNS) -> Floats:
    """How long a model that runs in a loop has the GPU at a time, where another process has it in between.

    A turn ends when all that was dispatched is done, as at the end of each run, or after `longest_ms`. The host goes on
    dispatching while the other process has its turn, so that the next one is the longer for it.

    Args:
        gpu_ms, launches, kinds, costs: as `pipeline_ms` takes them.
        longest_ms: after which the GPU is taken away; positive.
        away_ms: the other process's turn, and the switching.
        runs: how many are simulated after a first one, which only brings the two into step.

    Returns:
        the turns, in order; none of a model that leaves the GPU nothing to do.
    """
    ready, work, dispatched_all = _queued(gpu_ms, launches, kinds, costs)
    turns: list[float] = []
    begin = free = used = 0.0
    for run in range(runs + 1):
        for dispatched, left in zip(ready.tolist(), work.tolist(), strict=True):
            if used and begin + dispatched > free:
                turns.append(used)
                free, used = free + away_ms, 0.0
            free = max(free, begin + dispatched)
            while used + left > longest_ms:
                turns.append(longest_ms)
                free, left, used = free + longest_ms - used + away_ms, left - (longest_ms - used), 0.0
            free, used = free + left, used + left
        begin = max(begin + dispatched_all, free) + costs.end_ms + BETWEEN_RUNS_MS
        if used:
            turns.append(used)
            free, used = free + away_ms, 0.0
        if run == 0:
            turns.clear()
    return np.array(turns)


def chrome_trace(names: Sequence[str], spans: Sequence[NodeSpan]) -> dict[str, Any]:
    """A timeline in Chrome's trace-event format (see utils/trace_events.py): a track for the host, one for the GPU.

    Times begin with the earliest span or the start of the run.
    """
    earliest = min([0.0, *(when[0] for span in spans for when in span if when is not None)])

    def track(place: int) -> list[Span]:
        return [Span(name, 1000 * (when[0] - earliest), 1000 * (when[1] - when[0]))
                for name, span in zip(names, spans, strict=True) if (when := span[place]) is not None]

    return document(process_events(1, PREDICTED, {"host": track(0), "GPU": track(1)}))


def innermost(nodes: Iterable[NodeEvent]) -> list[NodeEvent]:
    """The events in order of start, without those inside a control-flow node, which its own event spans."""
    kept: list[NodeEvent] = []
    inside_until = float("-inf")
    for node in sorted(nodes, key=lambda node: (node.start_us, -node.duration_us)):
        if node.end_us <= inside_until + ROUNDING_US and node.start_us < inside_until:
            continue
        kept.append(node)
        if node.op_type in CONTROL_FLOW:
            inside_until = node.end_us
    return kept


def overlap_of(runs: Sequence[ProfiledRun]) -> Overlap:
    """Whether and how long kernels ran side by side, and how long none did; at least one run."""
    busy = overlapped = gaps = whole = 0.0
    overlapping: dict[str, None] = {}
    for run in runs:
        whole += run.end_us - run.start_us
        end = None
        for node in innermost(run.nodes):
            if end is None or node.start_us >= end - ROUNDING_US:
                gaps += max(node.start_us - end, 0.0) if end is not None else 0.0
                busy += node.duration_us
                end = max(node.end_us, end or 0.0)
                continue
            overlapping[node.node] = None
            overlapped += min(end, node.end_us) - node.start_us
            busy += max(node.end_us - end, 0.0)
            end = max(end, node.end_us)
    count = 1000.0 * len(runs)  # µs of all runs to ms of one
    return Overlap(
        runs=len(runs), kernels=len({node.node for run in runs for node in run.nodes}), serial=not overlapping,
        providers=tuple(sorted({node.provider for run in runs for node in run.nodes})), busy_ms=busy / count,
        overlap_ms=overlapped / count, gap_ms=gaps / count, run_ms=whole / count,
        overlap_share=overlapped / whole if whole else 0.0, gap_share=gaps / whole if whole else 0.0,
        overlapping=tuple(overlapping))


def critical_path(record: ModelRecord, latency_ms: Mapping[str, float]) -> CriticalPath:
    """The critical path of a record's graph, given the time of each node.

    Raises:
        UserError: a node without a time.
    """
    dag = build_dag(record)
    total = calculate_latency(dag, latency_ms, "sum")
    length, path = longest_path(dag, latency_ms)
    return CriticalPath(
        sum_ms=total, path_ms=length, possible_speedup=total / length if length else 1.0, kernels=len(dag),
        path=tuple(PathNode(node=node, type=dag.nodes[node]["type"], latency_ms=latency_ms[node],
                            share=latency_ms[node] / length if length else 0.0) for node in path))


def node_times_ms(runs: Sequence[ProfiledRun]) -> dict[str, float]:
    """Each node's time in ms: the median over the runs, so that a slow first run does not count."""
    from benchmark.ort_profile import kernel_times_ms

    return {node: median(samples) for node, samples in kernel_times_ms(list(runs)).items()}


def whole_times_ms(record: ModelRecord, times_ms: Mapping[str, float]) -> dict[str, float]:
    """Each node's time as often as it runs; a node that holds a body takes none besides its body's nodes."""
    return {node.name: 0.0 if is_control_flow(record.kernel_of(node)) else node.runs * times_ms[node.name]
            for node in record.nodes if node.name in times_ms}


def matching_record(paths: Iterable[Path], nodes: set[str]) -> ModelRecord | None:
    """The first record that names exactly `nodes`."""
    for path in paths:
        record = load_record(path)
        if {node.name for node in record.nodes} == nodes:
            return record
    return None


def print_report(overlap: Overlap, path: CriticalPath | None, rows: int) -> None:
    """The findings as tables, with a sentence that says what they mean."""
    cli.print_table([{
        "kernels": overlap.kernels, "runs": overlap.runs, "run_ms": overlap.run_ms, "busy_ms": overlap.busy_ms,
        "overlap_ms": overlap.overlap_ms, "overlap_%": 100 * overlap.overlap_share, "gap_ms": overlap.gap_ms,
        "gap_%": 100 * overlap.gap_share}], "one run")
    print("Kernels ran one after another." if overlap.serial else
          f"{len(overlap.overlapping)} kernels ran beside others: {', '.join(overlap.overlapping[:5])}"
          + (" …" if len(overlap.overlapping) > 5 else ""))
    if path is None:
        return
    print(f"Critical path: {len(path.path)} of {path.kernels} kernels, {path.path_ms:.4g} ms of {path.sum_ms:.4g} ms; if all "
          f"that is independent ran side by side, kernels would take {path.possible_speedup:.3g} times less.")
    longest = sorted(path.path, key=lambda node: -node.latency_ms)[:rows]
    cli.print_table([{"node": node.node, "type": node.type, "latency_ms": node.latency_ms, "share_%": 100 * node.share}
                     for node in longest], "kernels that dominate the critical path")


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--profile", type=Path, metavar="FILE", help="a JSON profile that ORT wrote")
    source.add_argument("--model", type=Path, help="an ONNX file to run; a bare name is also looked for in model_zoo")
    parser.add_argument("--record", type=Path, metavar="FILE", help="the kernel record of the profile's model")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where --model runs (default: auto)")
    parser.add_argument("--loops", type=cli.count, default=10, help="profiled runs of --model (default: 10)")
    parser.add_argument("--rows", type=cli.whole, default=10, help="kernels to list (default: 10)")
    cli.add_dim(parser)
    cli.add_static(parser)
    args = parser.parse_args()
    if args.model and args.record:
        parser.error("--record goes with --profile; a model's graph is known")
    workspace = cli.start(args)
    record: ModelRecord | None
    if args.model:
        dims = cli.one_size_dims(args.dim)
        from benchmark.model_profile import profile_model
        from benchmark.protocol import Effort
        from ort_analysis.fusion_detector import record_of

        effort = Effort(warmup=WARMUP_RUNS, least_runs=args.loops, most_runs=args.loops)
        runs, graph, _ = profile_model(workspace.find_model(args.model), resolve_provider(args.device), dims, effort,
                                    static=args.static)
        record = record_of(graph)
    else:
        from benchmark.ort_profile import read_profile

        runs = read_profile(args.profile)
        named = set(node_times_ms(runs))
        record = matching_record([args.record] if args.record else record_paths(workspace), named)
        if record is None and args.record:
            raise UserError(f"{args.record}: its nodes are not those of {args.profile}; give the record of the model and "
                            "flavour that was profiled, or let --model profile it")
        if record is None:
            log.warning("no kernel record names this profile's nodes, so its graph and critical path are unknown; make the "
                        "record (%s) and profile the graph that ORT saves, or use --model", REMAKE)
    overlap = overlap_of(runs)
    path = critical_path(record, whole_times_ms(record, node_times_ms(runs))) if record else None
    if args.json:
        result: dict[str, Any] = {"overlap": overlap.model_dump(mode="json"),
                                  "critical_path": path.model_dump(mode="json") if path else None}
        cli.print_json(result)
    else:
        print_report(overlap, path, args.rows)
    return 0


if __name__ == "__main__":
    cli.run(main)
