"""Fixed pieces of work: the canary, the host's probe with the host's pace, and the sharing probe.

The canary shows how fast the device is now. The host's probe shows how fast the host dispatches work to a GPU, and the sharing
probe how much of the GPU another process takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache

from measuring.quiet_host import HostProbe, first_look, off_the_workers_cores, readings_s
from records.host_pace import MachinePace
from records.probe_reading import ProbedRuns, ProbeReading
from runtimes.ort.runner import Runner, bind, device_binding, dispatcher, now, random_feed
from utils.errors import UserError
from utils.fingerprint import boot_id, has_cuda, machine, resolve_device
from utils.lazy import onnx
from utils.ort_sessions import model_errors, open_nodes
from utils.sharing_mode import sharing_mode
from utils.timing import summarize

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
PROBE_SECONDS = 0.2  # of the sharing probe, half of it for each piece; five periods of 20 ms
LEAST_RUNS = 5  # at least, of each piece
WARMUP = 5
TINY_SIDE = 64  # of the tiny piece's tensor; 16 µs on an idle H200
LONG_SIDE = {"cpu": 192, "cuda": 2048}  # of the long piece's matrices
LONG_PRODUCTS = 6  # one after another: 0.33 ms on an H200


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
    timing = summarize([1e3 * reading for reading in readings_s(host_probe(device), seconds)])
    return MachinePace(probe_us=round(1e3 * timing.median_ms, 2), spread=round(timing.spread, 4), readings=timing.runs,
                       taken=datetime.now(UTC), boot_id=boot_id(), device=device,
                       machine=machine(device))


class SharingProbe:
    """Both pieces of work as open sessions with inputs and outputs on the device, for any number of measurements."""

    def __init__(self, device: str = "cuda") -> None:
        """Opens and warms up the sessions on `cuda` or `cpu` (`auto`: the GPU if there is one).

        Raises:
            UserError: there is no such device, or its memory is full.
        """
        self._provider = resolve_device(device)
        self._machine_uuid = machine(self._provider).uuid
        products = [onnx.helper.make_node("MatMul", [f"x{place}", "w"], [f"x{place + 1}"]) for place in range(LONG_PRODUCTS)]
        self._tiny = self._opened([onnx.helper.make_node("Relu", ["x0"], ["x1"])], ["x0"], TINY_SIDE, "the probe's tiny work")
        self._long = self._opened(products, ["x0", "w"], LONG_SIDE[self._provider], "the probe's long work")

    def _opened(self, nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], side: int, name: str) -> Runner:
        session = open_nodes(nodes, inputs, [side, side], self._provider, name)
        with model_errors(name):
            run_once = bind(session, random_feed(session), self._provider, "device")
        runner = Runner(session=session, name=name, device=self._provider, io="device", run_once=run_once)
        runner.warm_up(WARMUP)
        return runner

    def read(self, seconds: float = PROBE_SECONDS) -> ProbeReading:
        """Runs the tiny piece for half of `seconds`, then the long one; at least LEAST_RUNS of each.

        Raises:
            UserError: `seconds` is not positive, or the device fails.
        """
        if not 0.0 < seconds < float("inf"):
            raise UserError(f"the sharing probe can't run for {seconds:g} s; give it a positive time, e.g. {PROBE_SECONDS:g}")
        sharing = sharing_mode() if self._provider == "cuda" else None
        with off_the_workers_cores():
            started, began = now(), time.perf_counter()
            tiny, long = (_back_to_back(piece, began, seconds / 2) for piece in (self._tiny, self._long))
        return ProbeReading(machine_uuid=self._machine_uuid, device=self._provider, sharing=sharing,
                            started=started, seconds=seconds, tiny=tiny, long=long)


def _back_to_back(piece: Runner, began_s: float, seconds: float) -> ProbedRuns:
    """Runs of `piece` for `seconds` from now; `began_s` is when the reading began, by `time.perf_counter`."""
    until, starts_ms, latencies_ms = time.perf_counter() + seconds, list[float](), list[float]()
    with model_errors(piece.name):
        while len(starts_ms) < LEAST_RUNS or time.perf_counter() < until:
            starts_ms.append(round(1e3 * (time.perf_counter() - began_s), 6))
            latencies_ms.append(round(1e3 * piece.run_s(), 6))
    return ProbedRuns(starts_ms=tuple(starts_ms), latencies_ms=tuple(latencies_ms))


@cache
def _kept(device: str) -> SharingProbe:
    return SharingProbe(device)


def probe(device: str = "cuda", seconds: float = PROBE_SECONDS) -> ProbeReading:
    """A measurement with this process's probe, which is opened at first use and then kept; see `SharingProbe`."""
    return _kept(resolve_device(device)).read(seconds)
