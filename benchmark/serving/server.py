"""A process that serves one model of a set; requests arrive at given moments in one queue, first in, first out.

It has three tasks, one JSON line each (sent by `ModelServer`): open the model, run it until warm, and serve. When free, it runs
all waiting requests, up to the model's `batch`. Each run has exactly that size, with padding: when sizes change, cuDNN rebuilds
its plans, which takes up to two seconds (docs/sharing.md).
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
from hase.benchmark.serving.sets import BATCH, PaceReading, ServedModel, ServedRuns
from hase.ort_analysis.graph.nodes import shared_caches
from hase.ort_analysis.graph.source import read_source
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.ort_sessions import model_errors, open_session
from hase.utils.processes import WorkerProcess, serve_lines
from hase.utils.timing import pause

WARM_RUNS = 3  # the first one allocates memory and chooses algorithms
ALONE_S = 0.3  # length of timed runs while the other models wait
PACE_S = 0.2  # how long the host's probe is read before the requests, and again after them
SPIN_S = 200e-6  # final part of a wait, in which the process spins
MODULE = "hase.benchmark.serving.server"


class Opening(Frozen):
    """A model to open."""

    model: Path
    dims: dict[str, int]  # sizes of its dynamic dimensions except `batch`
    batch: int  # size of a run
    device: str
    provider_options: dict[str, str]  # of the CUDA provider


class Serving(Frozen):
    """Requests to serve with the open model."""

    arrivals_s: tuple[float, ...]  # when requests arrive, in seconds after `begin_s`, ascending
    begin_s: float  # on the clock of `time.monotonic`, which the processes of a machine share
    seconds: float  # after `begin_s`, until the last run may begin


class ServerTask(Frozen):
    """A task: open a model, serve, or (if both are None) run it until warm."""

    opening: Opening | None = None
    serving: Serving | None = None


class ModelServer(WorkerProcess[ServerTask, ServedRuns]):
    """A process that serves a model; `environment` is added to this process's."""

    def __init__(self, model: Path, served: ServedModel, timeout_s: float, environment: Mapping[str, str]) -> None:
        super().__init__(MODULE, ServedRuns, timeout_s, environment=environment)
        self.model, self._served = model, served

    def open(self, device: str, provider_options: Mapping[str, str]) -> ServedRuns:
        """Opens the model. All tasks raise errors as `WorkerProcess.ask` does."""
        return self.ask(ServerTask(opening=Opening(model=self.model, dims=self._served.dims, batch=self._served.batch,
                                                   device=device, provider_options=dict(provider_options))))

    def warm_up(self) -> ServedRuns:
        """Runs the model until it is warm. First runs time cuDNN's algorithms, so nothing else should run."""
        return self.ask(ServerTask())

    def serve(self, arrivals_s: Sequence[float], begin_s: float, seconds: float) -> ServedRuns:
        return self.ask(ServerTask(serving=Serving(arrivals_s=tuple(arrivals_s), begin_s=begin_s, seconds=seconds)))


def open_model(opening: Opening) -> Runner:
    """The model in a session, with inputs of size `batch`. Raises UserError if it has no dimension `batch`."""
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
    """Waits for a moment of `time.monotonic`; spins at the end, since a sleep ends late."""
    pause(moment_s - time.monotonic() - SPIN_S)
    while time.monotonic() < moment_s:
        pass


def serve(run: Callable[[], object], batch: int, serving: Serving) -> ServedRuns:
    """Serves requests, up to `batch` in a run, until all are answered or time is over; the rest is left."""
    arrivals_s, begin_s = serving.arrivals_s, serving.begin_s
    starts_s, ends_s, counts = list[float](), list[float](), list[int]()
    answered = 0
    while answered < len(arrivals_s):
        wait_until(begin_s + arrivals_s[answered])
        start_s = time.monotonic() - begin_s
        if start_s >= serving.seconds:
            break
        waiting = bisect_right(arrivals_s, start_s) - answered
        count = max(1, min(waiting, batch))  # by rounding, the first may seem to arrive after the wait
        run()
        ends_s.append(time.monotonic() - begin_s)
        starts_s.append(start_s)
        counts.append(count)
        answered += count
    return ServedRuns(starts_s=tuple(starts_s), ends_s=tuple(ends_s), counts=tuple(counts))


def pace_now(device: str) -> PaceReading | None:
    """The host's probe in this process; None on a CPU, which is its own host."""
    if device != "cuda":
        return None
    readings, watch = watched_readings_s(host_probe(device), PACE_S)
    return PaceReading(probe_us=1e6 * median(readings), dispatched_s=watch.dispatched_s,
                       stalls_ms=tuple(1e3 * stall for stall in watch.stalls_s))


class _Server:
    """The serving side: the model, once it is open."""

    def __init__(self) -> None:
        self._runner: Runner | None = None
        self._batch = 0

    def answer(self, line: bytes) -> str:
        """Answers a task; both are JSON."""
        task = ServerTask.model_validate_json(line)
        try:
            return self._perform(task).model_dump_json()
        except UserError as error:
            return ServedRuns(error=str(error)).model_dump_json()
        except MemoryError as error:
            return ServedRuns(error=str(error) or "no memory left").model_dump_json()

    def _perform(self, task: ServerTask) -> ServedRuns:
        if task.opening is not None:
            self._runner, self._batch = open_model(task.opening), task.opening.batch
            return ServedRuns()
        if self._runner is None:
            raise RuntimeError("a task before a model is open")
        if task.serving is None:
            self._runner.warm_up(WARM_RUNS)
            alone_ms = median(self._runner.time(warmup=0, budget_s=ALONE_S).samples_ms)
            reply = ServedRuns(alone_ms=alone_ms, pace=pace_now(self._runner.device))
            gc.collect()
            gc.disable()  # from here on it must not interrupt a run
            return reply
        with model_errors(self._runner.name):
            reply = serve(self._runner.run_once, self._batch, task.serving)
        return reply.model_copy(update={"pace": pace_now(self._runner.device)})


if __name__ == "__main__":
    serve_lines(_Server().answer)
