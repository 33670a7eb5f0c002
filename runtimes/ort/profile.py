"""ONNX Runtime's profile of a session as runs of timed nodes.

ORT writes whole microseconds and cuts off the rest. Half a microsecond is added to every duration, so that the mean over
many runs is right. Node events are named `<node>_kernel_time`; each run ends with a `model_run` event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from utils import files
from utils.errors import UserError
from utils.timing import TimeSpan

TRUNCATION_US = 0.5
SUFFIX = "_kernel_time"


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
    """The nodes of one run in the order they started, and the start and end of the whole run (microseconds)."""

    start_us: float
    end_us: float
    nodes: tuple[NodeEvent, ...]


def read_profile(path: Path) -> list[ProfiledRun]:
    """The runs in a profile that ORT wrote.

    Raises:
        UserError: no such file, no profile, or one without node events.
    """
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
    made = []
    for start, end in sorted(runs):
        inside = tuple(node for node in nodes if start <= node.start_us <= end)
        made.append(ProfiledRun(start_us=start, end_us=end, nodes=inside))
    return made


def kernel_times_ms(runs: list[ProfiledRun]) -> dict[str, list[float]]:
    """Label `kernel_time`: every node's own duration in each run, in ms; the mean if a node runs more than once per run."""
    return _mean_by_run([[(node.node, node.duration_us / 1000) for node in run.nodes] for run in runs])


def node_spans_ms(runs: list[ProfiledRun]) -> dict[str, list[float]]:
    """Label `node_span`: from one node's start to the next one's, in ms; for the last node, to the run's end. The mean if a
    node runs more than once per run."""
    spans = []
    for run in runs:
        ends = [node.start_us for node in run.nodes[1:]] + [run.end_us]
        spans.append([(node.node, max(end - node.start_us, TRUNCATION_US) / 1000)
                      for node, end in zip(run.nodes, ends, strict=True)])
    return _mean_by_run(spans)


def _mean_by_run(runs: Sequence[Sequence[tuple[str, float]]]) -> dict[str, list[float]]:
    """Each node's mean time in every run in which it ran."""
    means: dict[str, list[float]] = {}
    for run in runs:
        times: dict[str, list[float]] = {}
        for node, time in run:
            times.setdefault(node, []).append(time)
        for node, found in times.items():
            means.setdefault(node, []).append(sum(found) / len(found))
    return means
