"""A process that serves one model of a set: requests arrive at given moments, and wait in one queue, first in, first out.

It answers two tasks, one JSON line each (`ModelServer` asks them): to open the model, and to serve. Whenever it is free it runs
all requests that wait, up to the model's `batch`. A run has the next power of two as its size: it is padded.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmark.serving.config import BATCH, ServedModel
from measuring.worker_process import WorkerProcess
from runtimes.ort.graph.nodes import shared_caches
from runtimes.ort.graph.source import read_source
from runtimes.ort.runner import Runner, bind, random_feed
from utils.errors import UserError
from utils.frozen import Frozen
from utils.ort_sessions import model_errors, open_session
from utils.processes import serve_lines
from utils.timing import pause

WARM_RUNS = 3  # of each size; the first one allocates memory and chooses algorithms
SPIN_S = 200e-6  # before a moment the process no longer sleeps, which ends late
MODULE = "benchmark.serving.server"


class Opening(Frozen):
    """What to open.

    Attributes:
        model: the file.
        dims: the sizes of its dynamic dimensions but `batch`.
        batch: the most requests in a run.
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
    """One of both."""

    opening: Opening | None = None
    serving: Serving | None = None


class Reply(Frozen):
    """The runs while the model was served, in order; none after it was opened.

    Attributes:
        error: why it failed; "" if it did not.
        starts_s, ends_s: of each run, in seconds after `begin_s`.
        counts: the requests in each run.
    """

    error: str = ""
    starts_s: tuple[float, ...] = ()
    ends_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()


class ModelServer(WorkerProcess[Task, Reply]):
    """A process that serves a model.

    Args:
        model: the file.
        served: how.
        timeout_s: for opening, and for serving.
        environment: variables of its environment that this process's lacks.
    """

    def __init__(self, model: Path, served: ServedModel, timeout_s: float, environment: Mapping[str, str]) -> None:
        super().__init__(MODULE, Reply, timeout_s, environment=environment)
        self.model, self._served = model, served

    def open(self, device: str, provider_options: Mapping[str, str]) -> Reply:
        """Opens the model and runs each size until it is warm. See `WorkerProcess.ask` for errors, also of `serve`."""
        return self.ask(Task(opening=Opening(model=self.model, dims=self._served.dims, batch=self._served.batch, device=device,
                                             provider_options=dict(provider_options))))

    def serve(self, arrivals_s: Sequence[float], begin_s: float, seconds: float) -> Reply:
        return self.ask(Task(serving=Serving(arrivals_s=tuple(arrivals_s), begin_s=begin_s, seconds=seconds)))


def bucket_of(requests: int) -> int:
    """The size of the run that takes so many requests: the next power of two."""
    return 1 << (requests - 1).bit_length()


def buckets(batch: int) -> list[int]:
    """The sizes of all runs of a model, ascending."""
    return [1 << power for power in range(bucket_of(batch).bit_length())]


def open_buckets(opening: Opening) -> dict[int, Runner]:
    """The model in one session that takes every size, with the inputs of each size in place, warm.

    Raises:
        UserError: the model can't be opened or run, or has no dimension `batch`.
    """
    one = read_source(opening.model, {**opening.dims, BATCH: 1})
    name = opening.model.stem
    session = open_session(one.loadable, opening.device, provider_options=opening.provider_options,
                           name=str(opening.model))
    runners = {}
    for size in reversed(buckets(opening.batch)):  # the largest first, so that memory is allocated once
        source = replace(one, dims={**one.dims, BATCH: size})
        feed = random_feed(session, source.dims, source.steering, source.graph_only.graph)
        shared = shared_caches(source.graph_only.graph, source.dims)
        with model_errors(name):  # the device's memory may be full
            run = bind(session, feed, opening.device, "device", shared)
        runners[size] = Runner(session, name, opening.device, "device", run, feed, shared)
        runners[size].warm_up(WARM_RUNS)
    return runners


def wait_until(moment_s: float) -> None:
    """Waits for a moment on the clock of `time.monotonic`, and spins at last."""
    pause(moment_s - time.monotonic() - SPIN_S)
    while time.monotonic() < moment_s:
        pass


def serve(runs: Mapping[int, Callable[[], object]], batch: int, serving: Serving) -> Reply:
    """Serves requests until all are answered, or until the time is over; what then still waits is left.

    Args:
        runs: a function for each size, which returns when the run is done.
        batch: the most requests in a run.
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
        runs[bucket_of(count)]()
        ends_s.append(time.monotonic() - begin_s)
        starts_s.append(start_s)
        counts.append(count)
        answered += count
    return Reply(starts_s=tuple(starts_s), ends_s=tuple(ends_s), counts=tuple(counts))


class _Served:
    """What this process serves, after it was told to open it."""

    def __init__(self) -> None:
        self._runners: dict[int, Runner] = {}
        self._batch = 0

    def answer(self, line: bytes) -> str:
        """The reply to a task, both as JSON."""
        task = Task.model_validate_json(line)
        try:
            if task.opening is not None:
                self._runners, self._batch = open_buckets(task.opening), task.opening.batch
                gc.collect()
                gc.disable()  # from here on it must not interrupt a run
                return Reply().model_dump_json()
            if task.serving is None:
                raise RuntimeError("a task without work")
            with model_errors(self._runners[1].name):
                runs = {size: runner.run_once for size, runner in self._runners.items()}
                return serve(runs, self._batch, task.serving).model_dump_json()
        except UserError as error:
            return Reply(error=str(error)).model_dump_json()
        except MemoryError as error:
            return Reply(error=str(error) or "no memory left").model_dump_json()


def main() -> None:
    serve_lines(_Served().answer)


if __name__ == "__main__":
    main()
