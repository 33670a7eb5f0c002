"""Keeps the device busy for a share of the time, so that latency under load can be measured.

`--intensity` is that share: in every period the stressor works for intensity × period and sleeps for the rest. On a GPU it
multiplies matrices or copies within the GPU's memory (torch CUDA, in bursts of about 0.5 ms). On a CPU, one process per logical
processor does the same (numpy, one thread each, with bursts spread over the period). Or it runs an ONNX model in a loop (ONNX
Runtime, tensors on the device; on a CPU in one process with ONNX Runtime's own threads). `--queue deep` keeps a GPU's queue
filled 8 ms ahead instead of waiting for each burst; a CPU has no such queue, so that is an error. The stressor runs until its
time is over, a signal ends it, or its parent process ends. Then it reports the load that was reached, by the device's metrics.

Reads no files; writes only its report, on stdout. With --json each line is one event:
`ready` (the load is up), `load` (every --report-every seconds), `end`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import psutil

from hase.benchmark.load.burners import burn_core, bursts, cuda_work
from hase.benchmark.metrics.source import MetricSource, values
from hase.benchmark.metrics.sources import open_source
from hase.records.measurement import BACKGROUND_KINDS, BACKGROUND_QUEUES, COMPUTE, LONGEST_PERIOD_MS, Background
from hase.utils import cli
from hase.utils.config import validate
from hase.utils.errors import UserError
from hase.utils.fingerprint import resolve_device
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.processes import die_with_parent, stop_event
from hase.utils.text import cell
from hase.utils.timing import pause

EXAMPLES = """
python benchmark/stressor.py --kind compute --intensity 0.6 --duration 10
python benchmark/stressor.py --kind model --model resnet18.onnx --dim batch=4 --period-ms 200 --intensity 0.5 --duration 10
python benchmark/stressor.py --kind memory --queue deep --intensity 1 --device cuda --report-every 1 --json  # needs a GPU
"""
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")

log = get_logger("stressor")


class Burner(ABC):
    """A load on a device."""

    @abstractmethod
    def turn(self, seconds: float) -> None:
        """Keeps the load up for about `seconds`. Raises UserError if it failed."""

    @abstractmethod
    def busy_s(self) -> float:
        """Seconds for which this load has kept the device busy so far (on a CPU: per processor)."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """Ends the load."""


class GpuBurner(Burner):
    """Runs bursts from this process."""

    def __init__(self, background: Background, intensity: float) -> None:
        self._bursts = bursts(cuda_work(background), intensity, background.period_ms / 1e3)
        self._busy_s = 0.0

    def turn(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._busy_s += next(self._bursts)

    def busy_s(self) -> float:
        return self._busy_s


class CpuBurner(Burner):
    """One process per usable logical processor; a single one for a model, which has its own threads."""

    def __init__(self, background: Background, intensity: float) -> None:
        os.environ.update(ONE_THREAD)  # before a worker loads numpy
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        processes, period_s = 1 if background.model else self._cores, background.period_ms / 1e3
        context = multiprocessing.get_context("spawn")
        self._busy_s = 0.0
        self._workers, waiting = [], []
        for number in range(processes):
            ready, sender = context.Pipe(duplex=False)
            worker = context.Process(target=burn_core, daemon=True,
                                     args=(background, intensity, period_s * number / processes, sender))
            worker.start()
            sender.close()
            self._workers.append(worker)
            waiting.append(ready)
        try:
            reasons = [ready.recv() for ready in waiting]
        except EOFError:
            reasons = ["a worker of the stressor ended before it began: see the message above"]
        except KeyboardInterrupt:
            self.close()
            raise
        if reason := max(reasons):  # "" from a worker that is ready
            self.close()
            raise UserError(reason)

    def turn(self, seconds: float) -> None:
        pause(seconds)
        if not all(worker.is_alive() for worker in self._workers):
            raise UserError("a worker of the stressor has ended (killed for memory?): the load is not the requested one")

    def busy_s(self) -> float:
        with contextlib.suppress(psutil.NoSuchProcess):  # `turn` reports a worker that has ended
            times = [psutil.Process(worker.pid).cpu_times() for worker in self._workers]
            self._busy_s = sum(process_times.user + process_times.system for process_times in times) / self._cores
        return self._busy_s

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()  # it ignores SIGTERM, and has nothing to clean up
        for worker in self._workers:
            worker.join()


class Meter:
    """Measures the load since its creation: the stressor's share of time (`duty`) and the device's metrics."""

    def __init__(self, burner: Burner, source: MetricSource) -> None:
        self._burner, self._source = burner, source
        self._began, self._busy_s, self._window = time.monotonic(), burner.busy_s(), source.start()

    def read(self) -> dict[str, float]:
        """Seconds, duty, and metrics by DCGM field name (none if the window is too short)."""
        seconds = time.monotonic() - self._began
        load = {"seconds": round(seconds, 3), "duty": round((self._burner.busy_s() - self._busy_s) / seconds, 4)}
        if seconds < self._source.minimum_window_s:
            return load
        return load | {field: round(value, 4) for field, value in values(self._source.stop(self._window)).items()}


def background_of(args: argparse.Namespace, workspace: Workspace) -> Background:
    """The background that the arguments describe. Raises UserError if they contradict each other."""
    fields = {"name": args.kind, "kind": args.kind, "queue": args.queue, "burst_ms": args.burst_ms, "period_ms": args.period_ms,
              "model": args.model and workspace.find_model(args.model), "dims": cli.one_size_dims(args.dim)}
    return validate(fields, Background, "the load asked for")


def run(args: argparse.Namespace, background: Background) -> dict[str, float]:
    """Keeps the device busy as the arguments say, and returns the load over the whole time."""
    parent = os.getppid()
    die_with_parent(signal.SIGTERM)
    device = resolve_device(args.device)
    source = open_source(device)
    if args.report_every is not None and args.report_every < source.minimum_window_s:
        raise UserError(f"--report-every {args.report_every:g}: {source.name} needs {source.minimum_window_s:g} s at least")
    background.check_on(device)
    if args.intensity == 0.0:
        log.info("intensity 0: nothing to do")
        return {"seconds": 0.0, "duty": 0.0}
    burner = (GpuBurner if device == "cuda" else CpuBurner)(background, args.intensity)
    stop = stop_event()  # until here a signal ends it without a report
    try:
        overall = Meter(burner, source)
        began = time.monotonic()
        say(args, "ready", {"pid": os.getpid(), "device": device, "kind": background.kind, "queue": background.queue,
                            "intensity": args.intensity})
        with reporting(args, burner, source):
            while not stop.is_set() and os.getppid() == parent:
                left = float("inf") if args.duration is None else began + args.duration - time.monotonic()
                if left <= 0:
                    break
                burner.turn(min(left, max(background.period_ms / 1e3, 0.05)))
            return overall.read()
    finally:
        burner.close()


@contextlib.contextmanager
def reporting(args: argparse.Namespace, burner: Burner, source: MetricSource) -> Iterator[None]:
    """Reports the load every `--report-every` seconds in a thread, since reading metrics takes time."""
    over = threading.Event()

    def report() -> None:
        meter = Meter(burner, source)
        while not over.wait(args.report_every):
            try:
                say(args, "load", meter.read())
            except BrokenPipeError:  # the reader is gone
                return
            except UserError as error:
                log.warning("%s", error)
            meter = Meter(burner, source)

    reporter = threading.Thread(target=report, daemon=True)
    if args.report_every is not None:
        reporter.start()
    try:
        yield
    finally:
        over.set()
        if args.report_every is not None:
            reporter.join()


def say(args: argparse.Namespace, event: str, facts: dict[str, Any]) -> None:
    """Reports an event, as a JSON line on stdout or a line of the log."""
    if args.json:
        print(json.dumps({"event": event} | facts), flush=True)
    else:
        log.info("%s: %s", event, ", ".join(f"{name} {cell(value)}" for name, value in facts.items()))


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--intensity", type=_share, required=True, metavar="0-1", help="share of the time to be busy")
    parser.add_argument("--kind", choices=BACKGROUND_KINDS, default=COMPUTE.kind,
                        help=f"kind of work (default: {COMPUTE.kind})")
    parser.add_argument("--queue", choices=BACKGROUND_QUEUES, default=COMPUTE.queue,
                        help="synchronised: each burst is waited for; deep: a GPU's queue is kept filled 8 ms ahead "
                             f"(default: {COMPUTE.queue})")
    parser.add_argument("--model", type=Path, metavar="FILE", help="for kind model: the ONNX file; a bare name is also looked "
                                                                   "for in model_zoo")
    cli.add_dim(parser)
    parser.add_argument("--duration", type=cli.positive, metavar="S", help="seconds (default: until a signal)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: the GPU if there is one")
    parser.add_argument("--burst-ms", type=cli.positive, default=COMPUTE.burst_ms, metavar="MS",
                        help=f"approximate length of a burst on a GPU (default: {COMPUTE.burst_ms:g})")
    parser.add_argument("--period-ms", type=cli.positive, default=COMPUTE.period_ms, metavar="MS",
                        help=f"a share and its pause together, {LONGEST_PERIOD_MS:g} at most (default: {COMPUTE.period_ms:g})")
    parser.add_argument("--report-every", type=cli.positive, metavar="S", help="report the load every S seconds")
    args = parser.parse_args()
    workspace = cli.start(args)
    load = run(args, background_of(args, workspace))
    if args.json:
        say(args, "end", load)
    else:
        cli.print_table([{"asked for": args.intensity} | load], "load reached")
    return 0


if __name__ == "__main__":
    cli.run(main)
