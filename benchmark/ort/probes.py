"""Fixed pieces of work that show how fast this machine is now.

The canary shows the speed of the device, the host's probe how fast the host dispatches work to a GPU (its pace), and the
sharing probe how much of the GPU another process takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache

from hase.benchmark.measuring.quiet_host import HostProbe, first_look, off_the_workers_cores, watched_readings_s
from hase.benchmark.ort.runner import Runner, bind, device_binding, dispatcher, random_feed
from hase.records.host_pace import MachinePace
from hase.records.measurement import now
from hase.records.probe_reading import ProbedRuns, ProbeReading
from hase.utils.errors import UserError
from hase.utils.fingerprint import boot_id, has_cuda, machine, resolve_device
from hase.utils.lazy import onnx
from hase.utils.ort_sessions import model_errors, open_nodes
from hase.utils.sharing_mode import sharing_mode
from hase.utils.timing import summarize, turns

# The canary multiplies two matrices, and then transposes and negates the product several times. So it is slow when arithmetic
# is slow, and also when threads are slow to pass data to each other. The second matters on virtual machines, where the host
# decides whether two virtual processors share a cache. Whether they do changes the time of memory-bound models by half, but
# not that of a matrix product.
CANARY = "canary"
CANARY_SIDE = {"cpu": 512, "cuda": 4096}  # of the matrices: two milliseconds on a CPU, one on a GPU
EXCHANGES = 4  # transposes
PROBE_NODES = 60  # of the host's probe: about 0.2 ms
FIRST_LOOK_S = 0.3  # length of the first reading of a new host probe
PACE_SECONDS = 2.0  # length of the readings for the host's pace


def opened(nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], side: int, device: str, name: str) -> Runner:
    """Opens a graph of square matrices, with inputs and outputs on the device."""
    session = open_nodes(nodes, inputs, [side, side], device, name)
    with model_errors(name):
        run_once = bind(session, random_feed(session), device, "device")
    return Runner(session=session, name=name, device=device, io="device", run_once=run_once)


@cache
def canary(device: str) -> Runner:
    """The canary as an open session on `cpu` or `cuda`."""
    nodes, last = [onnx.helper.make_node("MatMul", ["a", "b"], ["c"])], "c"
    for number in range(EXCHANGES):
        nodes += [onnx.helper.make_node("Transpose", [last], [f"t{number}"], perm=[1, 0]),
                  onnx.helper.make_node("Neg", [f"t{number}"], [f"n{number}"])]
        last = f"n{number}"
    return opened(nodes, ["a", "b"], CANARY_SIDE[device], device, CANARY)


@cache
def host_probe(device: str) -> HostProbe:
    """The host probe of this process, after it has learned what is normal; `device` is `cpu` only in tests."""
    nodes = [onnx.helper.make_node("Relu", [f"x{number}"], [f"x{number + 1}"]) for number in range(PROBE_NODES)]
    session = open_nodes(nodes, ["x0"], [1, 16, 14, 14], device, "probe")
    return first_look(dispatcher(session, device_binding(session, random_feed(session), device)), FIRST_LOOK_S)


def check_gpu() -> None:
    """Raises UserError if this machine has no GPU."""
    if not has_cuda():
        raise UserError("the host's pace is that of dispatching work to a GPU: measuring it needs a GPU, and this machine has "
                        "none that the driver can talk to; a CPU target's host is the target itself, so it needs no pace")


def measure_pace(device: str = "cuda", seconds: float = PACE_SECONDS) -> MachinePace:
    """Current pace of this machine's host, from readings for `seconds`. The first call takes longer; `cpu` is for tests."""
    if device == "cuda":
        check_gpu()
    readings, watch = watched_readings_s(host_probe(device), seconds)
    timing = summarize([1e3 * reading for reading in readings])
    return MachinePace(probe_us=round(1e3 * timing.median_ms, 2), spread=round(timing.spread, 4), readings=timing.runs,
                       stalls_per_s=round(len(watch.stalls_s) / watch.dispatched_s, 3),
                       stalls_ms=tuple(round(1e3 * stall, 2) for stall in watch.stalls_s),
                       taken=datetime.now(UTC), boot_id=boot_id(), device=device,
                       machine=machine(device))


# the sharing probe -------------------------------------------------------------------------------------------------------

PROBE_SECONDS = 0.2  # length of a reading, half of it for each piece of work; five periods of 20 ms
LEAST_RUNS = 5  # of each piece
WARMUP = 5
TINY_SIDE = 64  # of the tiny piece's tensor; 16 µs on an idle H200
LONG_SIDE = {"cpu": 192, "cuda": 2048}  # of the long piece's matrices
LONG_PRODUCTS = 6  # in sequence: 0.33 ms on an H200


class SharingProbe:
    """A tiny and a long piece of work as open sessions with tensors on the device, for any number of readings."""

    def __init__(self, device: str = "cuda") -> None:
        """Opens and warms up the sessions on `cuda` or `cpu` (`auto`: the GPU if there is one)."""
        self._device = resolve_device(device)
        self._machine_uuid = machine(self._device).uuid
        products = [onnx.helper.make_node("MatMul", [f"x{number}", "w"], [f"x{number + 1}"]) for number in range(LONG_PRODUCTS)]
        relu = [onnx.helper.make_node("Relu", ["x0"], ["x1"])]
        self._tiny = opened(relu, ["x0"], TINY_SIDE, self._device, "the probe's tiny work")
        self._long = opened(products, ["x0", "w"], LONG_SIDE[self._device], self._device, "the probe's long work")
        for piece in (self._tiny, self._long):
            piece.warm_up(WARMUP)

    def read(self, seconds: float = PROBE_SECONDS) -> ProbeReading:
        """Runs the tiny piece for half of `seconds`, then the long one; each at least LEAST_RUNS times."""
        if not 0.0 < seconds < float("inf"):
            raise UserError(f"the sharing probe can't run for {seconds:g} s; give it a positive time, e.g. {PROBE_SECONDS:g}")
        sharing = sharing_mode() if self._device == "cuda" else None
        with off_the_workers_cores(self._device):
            started, began = now(), time.perf_counter()
            tiny, long = (_back_to_back(piece, began, seconds / 2) for piece in (self._tiny, self._long))
        return ProbeReading(machine_uuid=self._machine_uuid, device=self._device, sharing=sharing,
                            started=started, seconds=seconds, tiny=tiny, long=long)


def _back_to_back(piece: Runner, began_s: float, seconds: float) -> ProbedRuns:
    """Runs `piece` for `seconds` from now; the reading began at `began_s` (`time.perf_counter`)."""
    starts_ms, latencies_ms = list[float](), list[float]()
    with model_errors(piece.name):
        for _ in turns(LEAST_RUNS, seconds):
            starts_ms.append(round(1e3 * (time.perf_counter() - began_s), 6))
            latencies_ms.append(round(1e3 * piece.run_s(), 6))
    return ProbedRuns(starts_ms=tuple(starts_ms), latencies_ms=tuple(latencies_ms))


@cache
def _kept(device: str) -> SharingProbe:
    return SharingProbe(device)


def probe(device: str = "cuda", seconds: float = PROBE_SECONDS) -> ProbeReading:
    """Measures with this process's `SharingProbe`, which is opened at first use and kept."""
    return _kept(resolve_device(device)).read(seconds)
