"""A fixed piece of work that shows what the machine is worth at this moment.

It multiplies two matrices, and then transposes and negates the product several times, so that it is slow both when
arithmetic is and when threads are slow to pass data to each other. The second matters on virtual machines: where the
host puts two virtual processors decides whether they share a cache, and memory-bound models differ by half between the
two states, while a product alone shows nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

from benchmark.measuring.effort import Effort
from benchmark.runtimes.ort.runner import Runner, bind, random_feed
from utils.lazy import onnx
from utils.ort_sessions import open_nodes

SIDE = {"cpu": 512, "cuda": 4096}  # of the matrices: two milliseconds on a CPU, one on a GPU
EXCHANGES = 4  # transposes
IDLE_EFFORT = Effort(warmup=2, warmup_s=0.02, budget_s=0.03, least_runs=15, most_runs=15)
LOADED_EFFORT = Effort(warmup=2, warmup_s=0.02, budget_s=0.3, least_runs=15, most_runs=300)
PAUSE_S = 0.5
NAME = "canary"


@cache
def canary(device: str) -> Runner:
    """The canary as an open session on `cpu` or `cuda`."""
    side = [SIDE[device]] * 2
    nodes, last = [onnx.helper.make_node("MatMul", ["a", "b"], ["c"])], "c"
    for number in range(EXCHANGES):
        nodes += [onnx.helper.make_node("Transpose", [last], [f"t{number}"], perm=[1, 0]),
                  onnx.helper.make_node("Neg", [f"t{number}"], [f"n{number}"])]
        last = f"n{number}"
    session = open_nodes(nodes, ["a", "b"], side, device, NAME)
    return Runner(session=session, name=NAME, device=device, io="device",
                  run_once=bind(session, random_feed(session), device, "device"))


def canary_ms(device: str) -> float:
    """The median of a few runs of the canary, in milliseconds."""
    return canary(device).time_as(IDLE_EFFORT).statistics.median_ms


def wait_until_steady(probe: Callable[[], float], reference_ms: float, tolerance: float, patience_s: float) -> float:
    """Probes until the machine is as fast as it can be, or patience ends; the last reading (ms).

    Args:
        probe: gives the canary's time.
        reference_ms: the canary on the machine at its best; 0 where that is not known.
        tolerance: how much slower still counts as steady, a ratio.
        patience_s: how long to wait at most.
    """
    until = time.monotonic() + patience_s
    reading = probe()
    while reference_ms and reading > reference_ms * (1 + tolerance) and time.monotonic() < until:
        time.sleep(PAUSE_S)
        reading = probe()
    return reading
