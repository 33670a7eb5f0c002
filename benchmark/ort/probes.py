"""Fixed pieces of work that show how fast this machine is now: the canary, and the host's probe with the host's pace.

The canary shows how fast the device is, the host's probe how fast the host dispatches work to a GPU.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache

from hase.benchmark.measuring.quiet_host import HostProbe, first_look, watched_readings_s
from hase.benchmark.ort.runner import Runner, bind, device_binding, dispatcher, random_feed
from hase.records.host_pace import MachinePace
from hase.utils.errors import UserError
from hase.utils.fingerprint import boot_id, has_cuda, machine
from hase.utils.lazy import onnx
from hase.utils.ort_sessions import open_nodes
from hase.utils.timing import summarize

# The canary multiplies two matrices, and then transposes and negates the product several times. So it is slow when arithmetic
# is slow, and also when threads are slow to pass data to each other. The second matters on virtual machines: it depends on the
# host whether two virtual processors share a cache. Memory-bound models differ by half between the two states, while a matrix
# product alone shows nothing.
NAME = "canary"
SIDE = {"cpu": 512, "cuda": 4096}  # of the matrices: two milliseconds on a CPU, one on a GPU
EXCHANGES = 4  # transposes
PROBE_NODES = 60  # of the host's probe: about 0.2 ms
FIRST_LOOK_S = 0.3  # how long a new host's probe is read at first
PACE_SECONDS = 2.0  # of readings, for the host's pace


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


@cache
def host_probe(device: str) -> HostProbe:
    """The host probe of this process, which has learned what is normal. `device` is `cuda`, or `cpu` in tests."""
    nodes = [onnx.helper.make_node("Relu", [f"x{place}"], [f"x{place + 1}"]) for place in range(PROBE_NODES)]
    session = open_nodes(nodes, ["x0"], [1, 16, 14, 14], device, "probe")
    return first_look(dispatcher(session, device_binding(session, random_feed(session), device)), FIRST_LOOK_S)


def check_gpu() -> None:
    """Checks that this machine has a GPU.

    Raises:
        UserError: it has none.
    """
    if not has_cuda():
        raise UserError("the host's pace is that of dispatching work to a GPU: measuring it needs a GPU, and this machine has "
                        "none that the driver can talk to; a CPU target's host is the target itself, so it needs no pace")


def measure_pace(device: str = "cuda", seconds: float = PACE_SECONDS) -> MachinePace:
    """The current pace of this machine's host.

    Args:
        device: `cuda`; `cpu` in tests.
        seconds: duration of the readings; opening the probe takes longer the first time.

    Raises:
        UserError: there is no GPU.
    """
    if device == "cuda":
        check_gpu()
    readings, watch = watched_readings_s(host_probe(device), seconds)
    timing = summarize([1e3 * reading for reading in readings])
    return MachinePace(probe_us=round(1e3 * timing.median_ms, 2), spread=round(timing.spread, 4), readings=timing.runs,
                       stalls_per_s=round(len(watch.stalls_s) / watch.dispatched_s, 3),
                       stalls_ms=tuple(round(1e3 * stall, 2) for stall in watch.stalls_s),
                       taken=datetime.now(UTC), boot_id=boot_id(), device=device,
                       machine=machine(device))
