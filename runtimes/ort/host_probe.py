"""The host probe as an ONNX Runtime session: a fixed graph that is all dispatch."""

from __future__ import annotations

from functools import cache

from measuring.quiet_host import HostProbe, first_look
from runtimes.ort.runner import device_binding, dispatcher, random_feed
from utils.lazy import onnx
from utils.ort_sessions import open_nodes

PROBE_NODES = 60  # about 0.2 ms
FIRST_LOOK_S = 0.3  # how long a new probe is read at first


@cache
def host_probe(device: str) -> HostProbe:
    """The host probe of this process, which has learned what is normal. `device` is `cuda`, or `cpu` in tests."""
    nodes = [onnx.helper.make_node("Relu", [f"x{place}"], [f"x{place + 1}"]) for place in range(PROBE_NODES)]
    session = open_nodes(nodes, ["x0"], [1, 16, 14, 14], device, "probe")
    return first_look(dispatcher(session, device_binding(session, random_feed(session), device)), FIRST_LOOK_S)
