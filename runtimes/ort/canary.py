"""The canary as an ONNX Runtime session.

It multiplies two matrices, and then transposes and negates the product several times. So it is slow when arithmetic is slow,
and also when threads are slow to pass data to each other. The second matters on virtual machines: it depends on the host
whether two virtual processors share a cache. Memory-bound models differ by half between the two states, while a matrix
product alone shows nothing.
"""

from __future__ import annotations

from functools import cache

from runtimes.ort.runner import Runner, bind, random_feed
from utils.lazy import onnx
from utils.ort_sessions import open_nodes

SIDE = {"cpu": 512, "cuda": 4096}  # of the matrices: two milliseconds on a CPU, one on a GPU
EXCHANGES = 4  # transposes
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
