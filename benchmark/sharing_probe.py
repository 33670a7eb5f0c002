"""Phase 4.8: measures on the spot how long work on the device waits for other processes, with a fifth of a second of tiny work.

Live metrics say how busy a GPU is, and hide how long the other processes' bursts are, which is what one waits for when a
GPU is shared in time slices. So for half of the time a piece of work far shorter than any burst runs back to back, and for
the other half one of a third of a millisecond, which waits for longer: another process goes on queueing while it runs
(beside a model in a loop, on an H200, the tiny piece waits 0.5 ms and the long one 0.8).

Reads nothing and writes nothing but, with --out, the raw reading: when each run began and how long it took. Shown are runs,
median, 95th percentile, and `waited`: the share of the time that went into runs that had to wait.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from benchmark.affinity import off_the_workers_cores
from benchmark.ort_kernel_runner import Runner, bind, now, random_feed
from benchmark.probe_reading import ProbedRuns, ProbeReading
from utils import cli, files
from utils.errors import UserError
from utils.fingerprint import machine, resolve_provider
from utils.logger import get_logger
from utils.ort_sessions import model_errors, open_nodes
from utils.sharing_mode import check_sharing_mode, sharing_mode
from utils.timing import summarize

if TYPE_CHECKING:
    import onnx

EXAMPLES = """
  python benchmark/sharing_probe.py --device cuda
  python benchmark/sharing_probe.py --seconds 0.5 --device cuda --out reading.json
  python benchmark/sharing_probe.py --device cpu --json
"""
SECONDS = 0.2  # half of it for each piece; five periods of 20 ms
LEAST_RUNS = 5  # of each piece, however long they take
WARMUP = 5
TINY_SIDE = 64  # of the tiny piece's tensor; 16 µs on an idle H200
LONG_SIDE = {"cpu": 192, "cuda": 2048}  # of the long piece's matrices
LONG_PRODUCTS = 6  # one after another: 0.33 ms on an H200

log = get_logger("sharing_probe")


class SharingProbe:
    """Both pieces of work as open sessions, inputs and outputs on the device; kept, it can be read again and again."""

    def __init__(self, execution_provider: str = "cuda") -> None:
        """Opens and warms up the sessions on `cuda` or `cpu` (`auto`: the GPU where there is one).

        Raises:
            UserError: there is no such device, or it has no memory left.
        """
        from onnx import helper

        self._provider = resolve_provider(execution_provider)
        self._machine_uuid = machine(self._provider).uuid
        products = [helper.make_node("MatMul", [f"x{place}", "w"], [f"x{place + 1}"]) for place in range(LONG_PRODUCTS)]
        self._tiny = self._opened([helper.make_node("Relu", ["x0"], ["x1"])], ["x0"], TINY_SIDE, "the probe's tiny work")
        self._long = self._opened(products, ["x0", "w"], LONG_SIDE[self._provider], "the probe's long work")

    def _opened(self, nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], side: int, name: str) -> Runner:
        session = open_nodes(nodes, inputs, [side, side], self._provider, name)
        with model_errors(name):
            run_once = bind(session, random_feed(session), self._provider, "device")
        runner = Runner(session=session, name=name, execution_provider=self._provider, io="device", run_once=run_once)
        runner.warm_up(WARMUP)
        return runner

    def read(self, seconds: float = SECONDS) -> ProbeReading:
        """Runs the tiny piece for half of `seconds`, then the long one, LEAST_RUNS of each at least.

        Raises:
            UserError: `seconds` is not positive, or the device fails.
        """
        if not 0.0 < seconds < float("inf"):
            raise UserError(f"the sharing probe can't run for {seconds:g} s; give it a positive time, e.g. {SECONDS:g}")
        sharing = sharing_mode() if self._provider == "cuda" else None
        with off_the_workers_cores():
            started, began = now(), time.perf_counter()
            tiny, long = (_back_to_back(piece, began, seconds / 2) for piece in (self._tiny, self._long))
        return ProbeReading(machine_uuid=self._machine_uuid, execution_provider=self._provider, sharing=sharing,
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
def _kept(execution_provider: str) -> SharingProbe:
    return SharingProbe(execution_provider)


def probe(execution_provider: str = "cuda", seconds: float = SECONDS) -> ProbeReading:
    """A reading by this process's own probe, which is opened on first use and then kept; see `SharingProbe`."""
    return _kept(resolve_provider(execution_provider)).read(seconds)


def rows(reading: ProbeReading) -> list[dict[str, Any]]:
    """The reading as a table, a row for each piece of work."""
    found = []
    for piece, runs in (("tiny", reading.tiny), ("long", reading.long)):
        statistics = summarize(runs.latencies_ms)
        found.append({"work": piece, "runs": statistics.runs, "median_ms": statistics.median_ms, "p95_ms": statistics.p95_ms,
                      "waited": reading.waited[piece]})
    return found


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--seconds", type=cli.positive, default=SECONDS, metavar="S",
                        help=f"for both pieces of work together (default: {SECONDS:g})")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: the GPU where there is one")
    parser.add_argument("--out", type=cli.out_file, metavar="FILE", help="write the raw reading as JSON")
    args = parser.parse_args()
    cli.start(args)
    reading = probe(args.device, args.seconds)
    if reading.sharing is not None:
        try:
            check_sharing_mode(reading.sharing)
        except UserError as error:
            log.warning("%s", error)
    if args.out:
        files.write_json(args.out, reading)
    if args.json:
        cli.print_json(reading)
    else:
        cli.print_table(rows(reading), f"{reading.machine_uuid}, {reading.sharing or 'CPU'}")
    return 0


if __name__ == "__main__":
    cli.run(main)
