"""A process that serves one model of a set: requests arrive at given moments, and wait in one queue, first in, first out.

It answers three tasks, one JSON line each (`ModelServer` asks them): to open the model, to run it until it is warm, and to
serve. Whenever it is free it runs all requests that wait, up to the model's `batch`. Each run has exactly that size, and the
rest is padding: where a session's sizes change, cuDNN's plans are built anew, for up to two seconds (docs/sharing.md).
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from hase.benchmark.measuring.quiet_host import watched_readings_s
from hase.benchmark.ort.probes import host_probe
from hase.benchmark.ort.runner import Runner, bind, random_feed
from hase.benchmark.serving.config import BATCH, ServedModel
from hase.ort_analysis.graph.nodes import shared_caches
from hase.ort_analysis.graph.source import read_source
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.ort_sessions import model_errors, open_session
from hase.utils.processes import serve_lines
from hase.utils.timing import pause
from hase.utils.worker_process import WorkerProcess

WARM_RUNS = 3  # the first one allocates memory and chooses algorithms
ALONE_S = 0.3  # of runs that are timed while the other models wait
PACE_S = 0.2  # for which the host's probe is read, before and after the requests
SPIN_S = 200e-6  # before a moment the process no longer sleeps, which ends late
MODULE = "hase.benchmark.serving.server"


class Opening(Frozen):
    """What to open.

    Attributes:
        model: the file.
        dims: the sizes of its dynamic dimensions but `batch`.
        batch: the size of a run.
        device: `cpu` or `cuda`.
        provider_options: of the CUDA provider.
    """

    model: Path
    dims: dict[str, int]
    batch: int
    device: str
    provider_options: dict[str, str]


class Serving(Frozen):
    """What to serve with the model that is open.

    Attributes:
        arrivals_s: when requests arrive, in seconds after `begin_s`, ascending.
        begin_s: a moment on the clock of `time.monotonic`, which the processes of a machine share.
        seconds: after `begin_s`, when the last run may begin.
    """

    arrivals_s: tuple[float, ...]
    begin_s: float
    seconds: float


class Task(Frozen):
    """One of the three: what is not None, or to run the open model until it is warm."""

    opening: Opening | None = None
    serving: Serving | None = None


class PaceRead(Frozen):
    """What the host's probe read for a while: its median time (µs), for how long it dispatched, and how long each stall was."""

    probe_us: float
    dispatched_s: float
    stalls_ms: tuple[float, ...]


class Reply(Frozen):
    """The runs while the model was served, in order; none after it was opened or made warm.

    Attributes:
        error: why it failed; "" if it did not.
        starts_s, ends_s: of each run, in seconds after `begin_s`.
        counts: the requests in each run.
        alone_ms: the median of a run again and again while the other models wait; 0 after the other tasks.
        pace: what the host's probe in this process read after the task; None where it was not read.
    """

    error: str = ""
    alone_ms: float = 0.0
    pace: PaceRead | None = None
    starts_s: tuple[float, ...] = ()
    ends_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()


class ModelServer(WorkerProcess[Task, Reply]):
    """A process that serves a model.

    Args:
        model: the file.
        served: how.
        timeout_s: for each task.
        environment: variables of its environment that this process's lacks.
    """

    def __init__(self, model: Path, served: ServedModel, timeout_s: float, environment: Mapping[str, str]) -> None:
        super().__init__(MODULE, Reply, timeout_s, environment=environment)
        self.model, self._served = model, served

    def open(self, device: str, provider_options: Mapping[str, str]) -> Reply:
        """Opens the model. See `WorkerProcess.ask` for errors, also of the other tasks."""
        return self.ask(Task(opening=Opening(model=self.model, dims=self._served.dims, batch=self._served.batch, device=device,
                                             provider_options=dict(provider_options))))

    def warm_up(self) -> Reply:
        """Runs the model until it is warm. In its first runs cuDNN times its algorithms, so nothing else should run."""
        return self.ask(Task())

    def serve(self, arrivals_s: Sequence[float], begin_s: float, seconds: float) -> Reply:
        return self.ask(Task(serving=Serving(arrivals_s=tuple(arrivals_s), begin_s=begin_s, seconds=seconds)))


def open_model(opening: Opening) -> Runner:
    """The model in a session, with inputs of the size `batch` in place.

    Raises:
        UserError: the model can't be opened, or has no dimension `batch`.
    """
    source = read_source(opening.model, {**opening.dims, BATCH: opening.batch})
    name = opening.model.stem
    session = open_session(source.loadable, opening.device, provider_options=opening.provider_options,
                           name=str(opening.model))
    feed = random_feed(session, source.dims, source.steering, source.graph_only.graph)
    shared = shared_caches(source.graph_only.graph, source.dims)
    with model_errors(name):  # the device's memory may be full
        run = bind(session, feed, opening.device, "device", shared)
    return Runner(session, name, opening.device, "device", run, feed, shared)


def wait_until(moment_s: float) -> None:
    """Waits for a moment on the clock of `time.monotonic`, and spins at last."""
    pause(moment_s - time.monotonic() - SPIN_S)
    while time.monotonic() < moment_s:
        pass


def serve(run: Callable[[], object], batch: int, serving: Serving) -> Reply:
    """Serves requests until all are answered, or until the time is over; what then still waits is left.

    Args:
        run: returns when a run is done.
        batch: the most requests in it.
        serving: the requests.
    """
    arrivals_s, begin_s = serving.arrivals_s, serving.begin_s
    starts_s, ends_s, counts = list[float](), list[float](), list[int]()
    answered = 0
    while answered < len(arrivals_s):
        wait_until(begin_s + arrivals_s[answered])
        start_s = time.monotonic() - begin_s
        if start_s >= serving.seconds:
            break
        waiting = bisect_right(arrivals_s, start_s) - answered
        count = max(1, min(waiting, batch))  # by rounding, the first may seem to come later than it was waited for
        run()
        ends_s.append(time.monotonic() - begin_s)
        starts_s.append(start_s)
        counts.append(count)
        answered += count
    return Reply(starts_s=tuple(starts_s), ends_s=tuple(ends_s), counts=tuple(counts))


def pace_now(device: str) -> PaceRead | None:
    """What the host's probe reads in this process now; None on a CPU, which is its own host."""
    if device != "cuda":
        return None
    readings, watch = watched_readings_s(host_probe(device), PACE_S)
    return PaceRead(probe_us=1e6 * median(readings), dispatched_s=watch.dispatched_s,
                    stalls_ms=tuple(1e3 * stall for stall in watch.stalls_s))


class _Served:
    """What this process serves, after it was told to open it."""

    def __init__(self) -> None:
        self._runner: Runner | None = None
        self._batch = 0

    def answer(self, line: bytes) -> str:
        """The reply to a task, both as JSON."""
        task = Task.model_validate_json(line)
        try:
            return self._done(task).model_dump_json()
        except UserError as error:
            return Reply(error=str(error)).model_dump_json()
        except MemoryError as error:
            return Reply(error=str(error) or "no memory left").model_dump_json()

    def _done(self, task: Task) -> Reply:
        if task.opening is not None:
            self._runner, self._batch = open_model(task.opening), task.opening.batch
            return Reply()
        if self._runner is None:
            raise RuntimeError("a task before a model is open")
        if task.serving is None:
            self._runner.warm_up(WARM_RUNS)
            alone_ms = median(self._runner.time(warmup=0, budget_s=ALONE_S).samples_ms)
            reply = Reply(alone_ms=alone_ms, pace=pace_now(self._runner.device))
            gc.collect()
            gc.disable()  # from here on it must not interrupt a run
            return reply
        with model_errors(self._runner.name):
            reply = serve(self._runner.run_once, self._batch, task.serving)
        return reply.model_copy(update={"pace": pace_now(self._runner.device)})


def main() -> None:
    serve_lines(_Served().answer)


if __name__ == "__main__":
    main()
