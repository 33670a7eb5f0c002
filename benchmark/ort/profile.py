"""ONNX Runtime's profile of a model: runs, nodes, and the in-model labels derived from them.

ORT truncates times to whole microseconds. Half a microsecond is added to every duration, so that the mean over many runs is
right. Node events are named `<node>_kernel_time`; each run ends with a `model_run` event.

The profiler adds 2 to 9 microseconds per node (more for more inputs and outputs), which is most of a small node's time. Its
share is known only for a whole run, since the same session also runs without the profiler. The difference is subtracted from
the nodes in equal parts, so that they add up to the model's latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hase.benchmark.measuring.quiet_host import off_the_workers_cores
from hase.benchmark.ort.runner import bind, random_feed
from hase.ort_analysis.graph.bodies import steering_inputs
from hase.ort_analysis.graph.nodes import shared_caches
from hase.ort_analysis.graph.parsing import ParsedGraph, parse_to_run
from hase.records.kernel_record import BRANCHES, Kernel
from hase.records.measurement import UNPROFILED, Effort, Measurement, Placement
from hase.records.operators import CONTROL_FLOW
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.files import temporary_folder
from hase.utils.ort_sessions import model_errors, open_session
from hase.utils.timing import TimeSpan, time_runs_ms, warm_up

TRUNCATION_US = 0.5
SUFFIX = "_kernel_time"
LEAST_SHARE = 0.1  # of a node's profiled time, which remains when the profiler's part is subtracted
MOST_ADDED_MS = 0.03  # by the profiler to a node: 5 to 20 µs in carriers of small kernels, on two hosts with Xeons
HALVINGS = 50  # of the range of the profiler's part: more than a double can resolve


@dataclass(frozen=True)
class NodeEvent(TimeSpan):
    """One node in one run; times in microseconds since the session began."""

    node: str
    op_type: str
    provider: str
    start_us: float
    duration_us: float


@dataclass(frozen=True)
class ProfiledRun:
    """The nodes of one run in start order, and the start and end of the run (microseconds)."""

    start_us: float
    end_us: float
    nodes: tuple[NodeEvent, ...]


def read_profile(path: Path) -> list[ProfiledRun]:
    """The runs in a profile written by ORT. Raises UserError if it is not a profile or has no node events."""
    data = files.read_json(path)
    if not isinstance(data, list):
        raise UserError(f"{path}: not an ONNX Runtime profile (a list of events is expected)")
    runs, nodes = [], []
    for event in data:
        if event.get("cat") == "Node" and event.get("name", "").endswith(SUFFIX):
            args = event.get("args", {})
            nodes.append(NodeEvent(
                node=event["name"].removesuffix(SUFFIX), op_type=args.get("op_name", ""), provider=args.get("provider", ""),
                start_us=float(event["ts"]), duration_us=float(event["dur"]) + TRUNCATION_US))
        elif event.get("cat") == "Session" and event.get("name") == "model_run":
            start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            runs.append((start, end))
    if not nodes or not runs:
        raise UserError(f"{path}: a profile without node events; run the session at least once with profiling on")
    nodes.sort(key=lambda node: node.start_us)
    profiled = []
    for start, end in sorted(runs):
        inside = tuple(node for node in nodes if start <= node.start_us <= end)
        profiled.append(ProfiledRun(start_us=start, end_us=end, nodes=inside))
    return profiled


def kernel_times_ms(runs: list[ProfiledRun]) -> dict[str, list[float]]:
    """Each node's own duration per run in ms (label `kernel_time`); the mean if it executes several times in a run."""
    return _mean_by_run([[(node.node, node.duration_us / 1000) for node in run.nodes] for run in runs])


def node_spans_ms(runs: list[ProfiledRun]) -> dict[str, list[float]]:
    """The time from a node's start to the next one's, or the run's end, in ms (label `node_span`); the mean as in
    `kernel_times_ms`."""
    spans = []
    for run in runs:
        ends = [node.start_us for node in run.nodes[1:]] + [run.end_us]
        spans.append([(node.node, max(end - node.start_us, TRUNCATION_US) / 1000)
                      for node, end in zip(run.nodes, ends, strict=True)])
    return _mean_by_run(spans)


def _mean_by_run(runs: Sequence[Sequence[tuple[str, float]]]) -> dict[str, list[float]]:
    """Each node's mean time in every run that executed it."""
    means: dict[str, list[float]] = {}
    for run in runs:
        times: dict[str, list[float]] = {}
        for node, time in run:
            times.setdefault(node, []).append(time)
        for node, times_ms in times.items():
            means.setdefault(node, []).append(sum(times_ms) / len(times_ms))
    return means


class ModelProfile(NamedTuple):
    """Profiled runs of a model, and the graph that ran; node names agree."""

    runs: list[ProfiledRun]
    graph: ParsedGraph
    plain_ms: list[float]  # times of runs of the same session without the profiler; empty if they were not asked for


def plain_runs_ms(run: Callable[[], Any], profiled: list[bool], device: str) -> list[float]:
    """Times of runs (ms) after profiling has ended: as many as counted during it."""
    with off_the_workers_cores(device):
        run()
        return time_runs_ms(run, sum(profiled))


def profile_runs(run: Callable[[], Any], effort: Effort, device: str) -> list[bool]:
    """Runs a profiled session; returns for each run whether it counts (warm-up does not)."""
    with off_the_workers_cores(device):
        warmed, one_run_s = warm_up(run, effort.warmup + 1, effort.warmup_s)
        counted = effort.runs(one_run_s)
        for _ in range(counted):
            run()
    return [False] * warmed + [True] * counted


def counted_runs(profile: str, counted: list[bool]) -> list[ProfiledRun]:
    """The runs that count, from the profile that ORT wrote; its file is removed."""
    path = Path(profile)
    runs = [run for run, keep in zip(read_profile(path), counted, strict=True) if keep]
    path.unlink()
    return runs


def steering_of(graph: ParsedGraph) -> dict[str, int | bool]:
    """Values of a model's inputs with which its Loops and Ifs run as the graph assumes."""
    taken = {f"{node}.{guess.taken}": 1 for node, guess in graph.guessed.items() if guess.taken in BRANCHES}
    return steering_inputs(graph.source.graph_only.graph, taken | graph.source.dims)


def profile_model(model: Path, device: str, dims: Mapping[str, int], effort: Effort,
                  provider_options: Mapping[str, str] | None = None, static: bool = False,
                  plain: bool = False, inputs: Path | None = None) -> ModelProfile:
    """Runs a model under the profiler, and with `plain` also without it. `static`: `dims` are fixed before ONNX Runtime
    optimises the model."""
    with temporary_folder() as folder:
        optimized = folder / "optimized.onnx"
        graph = parse_to_run(optimized, model, device, dims, static)
        session = open_session(optimized, device, optimize="none", name=str(model),
                               profile_prefix=folder / "model", provider_options=provider_options)
        feed = random_feed(session, graph.source.dims, steering_of(graph), graph.source.graph_only.graph, inputs)
        with model_errors(str(model)):
            run = bind(session, feed, device, "device", shared_caches(graph.source.graph_only.graph, graph.source.dims))
            counted = profile_runs(run, effort, device)
            profile = session.end_profiling()
            return ModelProfile(counted_runs(profile, counted), graph, plain_runs_ms(run, counted, device) if plain else [])


def unprofiled_ms(runs: Sequence[ProfiledRun], nodes_ms: float) -> dict[str, list[float]]:
    """Time of each node without the profiler, in each run (ms); `nodes_ms` is the total. Nodes with bodies are omitted."""
    nodes_with_bodies = {event.node for run in runs for event in run.nodes if event.op_type in CONTROL_FLOW}
    times = {node: times_ms for node, times_ms in kernel_times_ms(list(runs)).items() if node not in nodes_with_bodies}
    executed = Counter(event.node for run in runs for event in run.nodes)
    added_ms = profiler_ms({node: median(times_ms) for node, times_ms in times.items()},
                           {node: executed[node] / len(runs) for node in times}, nodes_ms)
    return {node: [without(time, added_ms) for time in times_ms] for node, times_ms in times.items()}


def labels_of(runs: list[ProfiledRun], ids: Mapping[str, str], context: str, place: Placement,
              nodes_ms: float | None = None) -> list[Measurement]:
    """Labels `kernel_time`, `node_span` and, with `nodes_ms`, `unprofiled` by kernel id; `ids` are by node name."""
    measurements, by_label = [], {"kernel_time": kernel_times_ms(runs), "node_span": node_spans_ms(runs)}
    if nodes_ms is not None:
        by_label[UNPROFILED] = unprofiled_ms(runs, nodes_ms)
    for label, times in by_label.items():
        by_kernel: dict[str, list[float]] = {}
        for node, samples in times.items():
            if node in ids:
                by_kernel.setdefault(ids[node], []).extend(samples)
        measurements += [Measurement(subject="kernel", id=kernel, label=label, context=context, place=place,
                                     samples_ms=tuple(round(s, 6) for s in samples))
                         for kernel, samples in by_kernel.items()]
    return measurements


def profiler_ms(times_ms: Mapping[str, float], executed: Mapping[str, float], nodes_ms: float) -> float:
    """What the profiler adds to each execution of a node (ms), so that the nodes without it add up to `nodes_ms`. It is 0 to
    MOST_ADDED_MS. `times_ms` are profiled, per execution; `executed` counts each node's executions per run."""
    low, high = 0.0, min(MOST_ADDED_MS, max(times_ms.values(), default=0.0))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        total = sum(executed[node] * without(time, middle) for node, time in times_ms.items())
        low, high = (middle, high) if total > nodes_ms else (low, middle)
    return low


def without(time_ms: float, added_ms: float) -> float:
    """A profiled time minus the profiler's part, but at least LEAST_SHARE of it."""
    return max(time_ms - added_ms, LEAST_SHARE * time_ms)


# trips of loops ----------------------------------------------------------------------------------------------------------

# What a trip of a node with bodies costs besides the body's nodes. On a CPU it was read off loops of one and of four Adds of
# eight numbers (ONNX Runtime 1.31, two cores of a Xeon): 0.3 to 0.7 µs per trip. On an NVIDIA H200 it was fitted manually: 24
# trips of a Scan, an If, and 12 and 10 trips of Loops whose body makes the condition on the GPU. The host reads such a
# condition after each trip, and so waits for the GPU. A Loop whose body leaves the condition alone, as torch exports a `for`,
# costs next to nothing besides its body (12 to 31 trips of four decoders and a sampler of points).
CPU_TRIP_MS = {"Loop": 0.0006, "Scan": 0.0004, "If": 0.0005}
CUDA_TRIP_MS = {"Loop": 0.001, "Scan": 0.017, "If": 0.001}
GUESSED_ON_CUDA = ("Scan",)  # the others were confirmed by further models
CONDITION_MS = 0.018  # for a Loop that reads its condition from the GPU, without waiting
RANGE = (0.5, 2.0)  # assumed limits of a trip's time, relative to these constants


def trip_ms(kernel: Kernel, device: str, reads_condition: bool = False) -> float:
    """The host's time per trip of a node with bodies, in ms; longer if it reads a Loop's condition from the GPU."""
    if device != "cuda":
        return CPU_TRIP_MS[kernel.op_type]
    return CUDA_TRIP_MS[kernel.op_type] + (CONDITION_MS if reads_condition else 0.0)
