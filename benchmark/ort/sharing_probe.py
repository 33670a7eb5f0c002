"""The sharing probe: two fixed pieces of work that show how much of the GPU another process takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

from hase.benchmark.measuring.quiet_host import off_the_workers_cores
from hase.benchmark.ort.runner import Runner, bind, now, random_feed
from hase.records.probe_reading import ProbedRuns, ProbeReading
from hase.utils.errors import UserError
from hase.utils.fingerprint import machine, resolve_device
from hase.utils.lazy import onnx
from hase.utils.ort_sessions import model_errors, open_nodes
from hase.utils.sharing_mode import sharing_mode

PROBE_SECONDS = 0.2  # of the sharing probe, half of it for each piece; five periods of 20 ms
LEAST_RUNS = 5  # at least, of each piece
WARMUP = 5
TINY_SIDE = 64  # of the tiny piece's tensor; 16 µs on an idle H200
LONG_SIDE = {"cpu": 192, "cuda": 2048}  # of the long piece's matrices
LONG_PRODUCTS = 6  # one after another: 0.33 ms on an H200


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
        with off_the_workers_cores(self._provider):
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
