"""Label `unprofiled`: the time of nodes in a model, without what ONNX Runtime's profiler adds.

The profiler adds 2 to 9 microseconds to each node's time (more for more inputs and outputs), which is most of the time of a
small node. Its share is known only for a whole run: the same session is also run without the profiler. The difference is
taken off the nodes' times in equal parts, so that a model's nodes add up to its latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from records.kernel_costs import CONTROL_FLOW
from runtimes.ort.profile import ProfiledRun, kernel_times_ms

LEAST_SHARE = 0.1  # least share of a node's profiled time that is left
HALVINGS = 50  # of the range in which the profiler's part lies: more than a double can resolve


def unprofiled_ms(runs: Sequence[ProfiledRun], nodes_ms: float) -> dict[str, list[float]]:
    """The time of each node without the profiler, in each profiled run (ms). Nodes that hold bodies are omitted: their times
    are those of the bodies.

    Args:
        runs: of one session.
        nodes_ms: the time of all nodes but those that hold bodies, together, in a run without the profiler.
    """
    holders = {event.node for run in runs for event in run.nodes if event.op_type in CONTROL_FLOW}
    times = {node: found for node, found in kernel_times_ms(list(runs)).items() if node not in holders}
    executed = Counter(event.node for run in runs for event in run.nodes)
    added_ms = profiler_ms({node: median(found) for node, found in times.items()},
                           {node: executed[node] / len(runs) for node in times}, nodes_ms)
    return {node: [without(time, added_ms) for time in found] for node, found in times.items()}


def profiler_ms(times_ms: Mapping[str, float], executed: Mapping[str, float], nodes_ms: float) -> float:
    """What the profiler adds to each execution of a node (ms), never less than 0: without it the nodes add up to `nodes_ms`.

    Args:
        times_ms: of an execution of each node, profiled.
        executed: how often each node runs in a run of the model.
        nodes_ms: as for `unprofiled_ms`.
    """
    low, high = 0.0, max(times_ms.values(), default=0.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        total = sum(executed[node] * without(time, middle) for node, time in times_ms.items())
        low, high = (middle, high) if total > nodes_ms else (low, middle)
    return low


def without(time_ms: float, added_ms: float) -> float:
    """A profiled time without the profiler's part; at least LEAST_SHARE of it is left."""
    return max(time_ms - added_ms, LEAST_SHARE * time_ms)
