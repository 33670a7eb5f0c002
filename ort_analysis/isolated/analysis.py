"""Takes models apart under a runtime, and writes their records. It does so in a process of its own with limits.

A model may come from anywhere, and a damaged or hostile one can take ONNX or a runtime down, keep it busy for ever, or fill the
memory. The process that asks therefore never parses a model: a child does (`hase.ort_analysis.isolated.worker`), and its reply is a
record. The child is kept for the next model, and replaced when it ends. What it found in a file is kept in the user's cache
(`hase.ort_analysis.isolated.kept_replies`), so that the next command need not start it.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hase.ort_analysis.isolated.kept_replies import is_known, keep_reply, kept_reply, reply_key
from hase.ort_analysis.isolated.messages import AS_THE_FILE_SAYS, Reply, Task
from hase.records.interface import Interface
from hase.records.kernel_record import ModelOrigin, ModelRecord
from hase.runtimes import runtime_named
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.model_files import check_plain_file, may_name_files
from hase.utils.paths import Workspace
from hase.utils.processes import CRASHED
from hase.utils.temporary import temporary_folder
from hase.utils.worker_process import TooMuchMemory, WorkerFailed, WorkerProcess

if TYPE_CHECKING:
    import onnx

ModelAtSize = tuple[Path, dict[str, int]]  # a model's file, and the sizes of its dynamic dimensions
MODULE = "hase.ort_analysis.isolated.worker"

# No file may cost more than a minute and 4 GiB unless it is that large itself. A bit less, since the process is looked at from
# time to time only.
LIMIT_S, LIMIT_S_PER_GIB = 50.0, 50.0  # for a file of no size, and for each GiB of it and of its weights
LIMIT_MIB, LIMIT_SIZES = 3584.0, 8.0  # for a small file, and as a multiple of a large one's size: weights are copied
KEPT_MIB = 1024.0  # a child that still holds more than this after a model is replaced
FACTOR = "HASE_LIMITS"  # in the environment: a factor for both limits
NAMELESS = "the model in memory"


class Analyst:
    """Has models taken apart, one at a time, in a child process. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: WorkerProcess[Task, Reply] = WorkerProcess(MODULE, Reply, LIMIT_S, LIMIT_MIB)
        self._pid = os.getpid()
        self._has_served = False

    def stop(self) -> None:
        """Ends the child; the next task starts another. A fork of the process that started the child leaves it alone."""
        if self._pid == os.getpid():
            self._child.stop()
            self._has_served = False

    def prepare(self) -> None:
        """Starts the child if it is idle, so that it loads what it needs while the caller does something else."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._child.started:
                    self._child.prepare(Task(do="prepare"))
            finally:
                self._lock.release()

    def ask(self, task: Task, size_gib: float, limit_s: float) -> Reply:
        """The child's reply to a task.

        Args:
            task: what it is to do.
            size_gib: of the model and its weights; the limits grow with it.
            limit_s: of time, for a model of no size.

        Raises:
            UserError: the model takes the child down, or reaches a limit.
        """
        factor = _factor()
        limit_s = factor * (limit_s + size_gib * LIMIT_S_PER_GIB)
        with self._lock:
            began_s = time.monotonic()
            self._child.timeout_s = limit_s
            self._child.memory_mib = factor * max(LIMIT_MIB, LIMIT_SIZES * 1024 * size_gib)
            try:
                try:
                    reply = self._child.ask(task)
                except WorkerFailed as error:
                    if error.status not in ("crashed", "interrupted") or not self._has_served:
                        raise
                    self._child.timeout_s = limit_s - (time.monotonic() - began_s)  # an earlier model may have damaged it
                    reply = self._child.ask(task)
            except WorkerFailed as error:
                self._has_served = False
                raise UserError(f"{NAMELESS if task.in_memory else task.model}: {_reason(error)}") from None
            except BaseException:  # it was interrupted: the reply must not be taken for that of the next task
                self.stop()
                raise
            self._has_served = True
            if self._child.holds_mib() > KEPT_MIB:
                self.stop()
        return reply


def _factor() -> float:
    """By how much the limits are raised.

    Raises:
        UserError: HASE_LIMITS is not a positive number.
    """
    text = os.environ.get(FACTOR, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise UserError(f"{FACTOR}={text}: not a positive number; it says how many times as much time and memory as usual the "
                        "analysis of a model may take")
    return factor


def _reason(error: WorkerFailed) -> str:
    """What a failure of the child says of the model."""
    if error.status == "timeout" or isinstance(error, TooMuchMemory):
        return (f"its analysis was ended: {error}; if you trust this model, {FACTOR}=4 in the environment gives it four times "
                "as much time and memory")
    return CRASHED


_analyst = Analyst()
_kept: Path | None = None  # where the children keep optimised graphs
_inherited: list[Analyst] = []  # of the process that this one was forked from; never dropped, which would end their children


def _after_fork() -> None:
    global _analyst
    _inherited.append(_analyst)
    _analyst = Analyst()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _analyst.stop())


def prepare(models: Iterable[Path | None]) -> None:
    """Starts the child, so that it is ready when the first model comes; unless all are files that were taken apart before.

    Args:
        models: their files; None for one in memory.
    """
    if not all(model and is_known(model) for model in models):
        _analyst.prepare()


@contextmanager
def optimized_once() -> Iterator[None]:
    """While the block runs, optimised graphs of models with dynamic dimensions are kept and used again."""
    global _kept
    if _kept is not None:
        yield
        return
    with temporary_folder() as folder:
        _kept = folder
        try:
            yield
        finally:
            _kept = None


def record_of(model: Path | onnx.ModelProto, flavour: Flavour, dims: Mapping[str, int], static: bool,
              weights: Sequence[Path] = (), no_weights: bool = False, half: bool = False) -> ModelRecord:
    """The record of a model, made in the child.

    Args:
        model: an ONNX file or another one that the runtime reads, or a model in memory.
        flavour: of the record.
        dims: sizes of its dynamic dimensions.
        static: whether they are fixed before the runtime optimises the model.
        weights: the files of a file's weights (see `weight_files`).
        no_weights: whether files of its weights may be missing.
        half: whether its floats are taken to be in half precision; of ONNX models alone.

    Raises:
        UserError: the model can't be read or analysed, or reaches a limit.
    """
    task = partial(Task, do="record", folder=Path.cwd(), runtime=flavour.runtime, flavour=flavour, dims=dict(dims),
                   static=static, kept=_kept, no_weights=no_weights, half=half)
    if isinstance(model, Path):
        return _ask(task(model=model), weights).records[0]
    with temporary_folder() as folder:
        path = folder / "model.onnx"
        try:
            path.write_bytes(model.SerializeToString())
        except ValueError as error:  # protobuf's, which has no class of its own for this
            raise UserError(f"{NAMELESS}: it can't be serialised ({error}); save it with its weights in a separate file, and "
                            "give the file") from None
        return _ask(task(model=path, in_memory=True)).records[0]


def weight_files(model: Path, no_weights: bool = False) -> list[Path]:
    """The files that hold the weights of the ONNX file `model`, each checked. The child is asked only if it may name any.

    Args:
        model: the ONNX file.
        no_weights: whether they may be missing.

    Raises:
        UserError: `model` or a file of its weights is missing or not a plain file, `model` is not an ONNX model, or a file of
            weights is outside its folder.
    """
    if not may_name_files(model):
        return []
    return list(_ask(Task(do="weights", folder=Path.cwd(), model=model, no_weights=no_weights)).files)


def interface_of(model: Path) -> Interface:
    """The inputs and outputs that the ONNX file `model` declares.

    Raises:
        UserError: it can't be read, or is damaged.
    """
    check_plain_file(model)
    interface = _ask(Task(do="interface", folder=Path.cwd(), model=model)).interface
    if interface is None:
        raise RuntimeError("the child sent no interface")
    return interface


def own_sizes(model: Path, dims: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """All combinations of sizes, of those `dims` that are dynamic in the file `model`. At least one; it may be empty.

    Raises:
        UserError: it can't be read.
    """
    names = own_names(model, dims)
    return cli.combinations({name: sizes for name, sizes in dims.items() if name in names})


def own_names(model: Path, names: Iterable[str]) -> frozenset[str]:
    """Those of the names of sizes that stand for one in the file `model`.

    Raises:
        UserError: it can't be read.
    """
    if not (asked := tuple(names)):
        return frozenset()
    check_plain_file(model)
    return frozenset(_ask(Task(do="sizes", folder=Path.cwd(), model=model, names=asked)).names)


def graph_of(model: Path, device: str, dims: Mapping[str, int], static: bool, no_weights: bool = False) -> dict[str, Any]:
    """The graph that ONNX Runtime runs, as `hase.ort_analysis.graph.parsing.document` describes it.

    Args:
        model: an ONNX file.
        device: `cpu`, `cuda` or `auto`.
        dims: sizes of its dynamic dimensions.
        static: whether they are fixed before ONNX Runtime optimises the model.
        no_weights: whether files of its weights may be missing.

    Raises:
        UserError: the model can't be read or analysed, or reaches a limit.
    """
    return _ask(Task(do="graph", folder=Path.cwd(), model=model, device=device, dims=dict(dims), static=static,
                     no_weights=no_weights), weight_files(model, no_weights)).graph


def check_opens(model: Path, device: str, dims: Mapping[str, int], static: bool) -> None:
    """Checks that ONNX Runtime loads a model, before this process loads it itself to run it.

    Args:
        model: an ONNX file.
        device: `cpu` or `cuda`.
        dims: sizes of its dynamic dimensions.
        static: whether they are fixed before ONNX Runtime optimises the model.

    Raises:
        UserError: the model can't be read or loaded, or reaches a limit.
    """
    _ask(Task(do="opens", folder=Path.cwd(), model=model, device=device, dims=dict(dims), static=static), weight_files(model))


def _ask(task: Task, weights: Sequence[Path] = (), analyst: Analyst | None = None) -> Reply:
    """The child's reply to a task about a model with these files of weights, or the kept one.

    Raises:
        UserError: the model can't be used, takes the child down, or reaches a limit.
        OSError: as the child met it.
    """
    key = reply_key(task, weights)
    if (reply := kept_reply(key, task)) is None:
        size_gib = sum(map(_stored_bytes, (task.model, *weights))) / 2**30
        limit_s = runtime_named(task.runtime).analysis_limit_s if task.runtime else LIMIT_S
        reply = (analyst or _analyst).ask(task, size_gib, limit_s)
        keep_reply(key, reply)
    for note in reply.notes:
        logging.getLogger(note.logger).log(note.level, "%s", note.text)
    if reply.failure:
        raise reply.failure.exception()
    return reply


def _stored_bytes(path: Path) -> int:
    """The bytes that a file takes on the disk: one with holes may say that it is far larger. 0 for a file that can't be read:
    the child says why."""
    try:
        stat = path.stat()
    except OSError:
        return 0
    return min(stat.st_size, 512 * getattr(stat, "st_blocks", stat.st_size))


def analyze_all(workspace: Workspace, runtime: str, work: Sequence[ModelAtSize], device: str, jobs: int, static: bool = False,
                origin: ModelOrigin = AS_THE_FILE_SAYS, no_weights: bool = False) -> list[list[ModelRecord] | UserError]:
    """Writes the records of models, `jobs` at a time.

    Args:
        workspace: where to.
        runtime: its name.
        work: the models.
        device: `cpu` or `cuda`.
        jobs: children at a time.
        static: whether sizes are fixed before the runtime optimises a model.
        origin: of all the models, where their user gives it.
        no_weights: whether files of their weights may be missing.

    Returns:
        For each model its records, or its error, in the order of `work`. If one of several models crashes the runtime, only
        that one fails.
    """
    analysts = [Analyst() for _ in range(min(jobs, len(work)))]
    idle: queue.SimpleQueue[Analyst] = queue.SimpleQueue()
    for analyst in analysts:
        idle.put(analyst)

    def analyze(model: Path, dims: Mapping[str, int]) -> list[ModelRecord] | UserError:
        analyst = idle.get()
        try:
            task = Task(do="write", folder=Path.cwd(), model=model, runtime=runtime, workspace=workspace.root, device=device,
                        dims=dict(dims), static=static, origin=origin, no_weights=no_weights)
            return list(_ask(task, weight_files(model, no_weights), analyst).records)
        except UserError as error:
            return error
        finally:
            idle.put(analyst)

    threads = ThreadPoolExecutor(len(analysts) or 1)
    try:
        pending = [threads.submit(analyze, model, dims) for model, dims in work]
        return [done.result() for done in (cli.progress(pending, "analysing") if len(pending) > 1 else pending)]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for analyst in analysts:
            analyst.stop()
        threads.shutdown()
