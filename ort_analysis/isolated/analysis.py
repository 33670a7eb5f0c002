"""Analyses models in a child process with limits, and writes their records.

A damaged or hostile model can crash ONNX or a runtime, hang it, or fill the memory. So this process never parses a model: a
child does (`hase.ort_analysis.isolated.worker`) and replies with a record. The child is reused for the next model, and
restarted if it ended.

Replies are cached (`hase.utils.cache_folder`), so that the next command may not need the child. The key contains everything
that a reply depends on: the file's content, sizes and times of its weight files, the question, the versions of ONNX Runtime and
ONNX, this machine's CPU and GPU, and Hase's own code for it.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import platform
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hase.ort_analysis.isolated.messages import AS_THE_FILE_SAYS, AnalysisReply, AnalysisTask
from hase.records.kernel_record import Interface, ModelOrigin, ModelRecord
from hase.runtimes import runtime_named
from hase.utils import cli
from hase.utils.cache_folder import cache_folder, code_version, entry_key, read_entry, write_entry
from hase.utils.errors import UserError
from hase.utils.files import cached_sha256, signature, temporary_folder
from hase.utils.fingerprint import DEFAULT_RUNTIME, Flavour, gpu_facts, instruction_set, ort_version, package_version
from hase.utils.logger import progress
from hase.utils.model_files import check_plain_file, may_name_files
from hase.utils.paths import Workspace
from hase.utils.processes import CRASHED, TooMuchMemory, WorkerFailed, WorkerProcess

if TYPE_CHECKING:
    import onnx

ModelAtSize = tuple[Path, dict[str, int]]  # a model's file, and the sizes of its dynamic dimensions
MODULE = "hase.ort_analysis.isolated.worker"

# No file may cost more than a minute and 4 GiB unless it is that large itself. The limits are a bit lower, since the process is
# checked only from time to time.
LIMIT_S, LIMIT_S_PER_GIB = 50.0, 50.0  # for a file of no size, and for each GiB of it and of its weights
LIMIT_MIB, LIMIT_SIZES = 3584.0, 8.0  # for a small file, and as a multiple of a large one's size: weights are copied
KEPT_MIB = 1024.0  # a child that still holds more than this after a model is replaced
LIMITS = "HASE_LIMITS"  # in the environment: a factor for both limits
NAMELESS = "the model in memory"
KEPT = ("record", "sizes", "weights", "interface")  # questions asked repeatedly about a file


class Analyst:
    """Analyses models, one at a time, in a child process. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: WorkerProcess[AnalysisTask, AnalysisReply] = WorkerProcess(MODULE, AnalysisReply, LIMIT_S, LIMIT_MIB)
        self._pid = os.getpid()
        self._has_served = False

    def stop(self) -> None:
        """Ends the child; the next task starts another. In a fork of the process that started it, does nothing."""
        if self._pid == os.getpid():
            self._child.stop()
            self._has_served = False

    def prepare(self) -> None:
        """Starts the child if it is idle, so that it loads packages while the caller does something else."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._child.alive:
                    self._child.prepare(AnalysisTask(do="prepare"))
            finally:
                self._lock.release()

    def ask(self, task: AnalysisTask, size_gib: float, limit_s: float) -> AnalysisReply:
        """The child's reply to a task. Limits grow with the model and its weights; `limit_s` is for a small one."""
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
            if self._child.memory_use_mib() > KEPT_MIB:
                self.stop()
        return reply


def _factor() -> float:
    """The user's factor for the limits."""
    text = os.environ.get(LIMITS, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise UserError(f"{LIMITS}={text}: not a positive number; it says how many times as much time and memory as usual the "
                        "analysis of a model may take")
    return factor


def _reason(error: WorkerFailed) -> str:
    """Why the child failed, as a message for the user."""
    if error.status == "timeout" or isinstance(error, TooMuchMemory):
        return (f"its analysis was ended: {error}; if you trust this model, {LIMITS}=4 in the environment gives it four times "
                "as much time and memory")
    return CRASHED


_analyst = Analyst()
_graphs_folder: Path | None = None  # where the children cache optimised graphs
_inherited: list[Analyst] = []  # of the process that this one was forked from; never dropped, which would end their children


def _after_fork() -> None:
    global _analyst
    _inherited.append(_analyst)
    _analyst = Analyst()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _analyst.stop())


def prepare(models: Iterable[Path | None]) -> None:
    """Starts the child for the first model, unless all models are files that were analysed before. None stands for a model in
    memory."""
    if not all(model and is_known(model) for model in models):
        _analyst.prepare()


@contextmanager
def optimized_once() -> Iterator[None]:
    """Caches optimised graphs of models with dynamic dimensions while the block runs."""
    global _graphs_folder
    if _graphs_folder is not None:
        yield
        return
    with temporary_folder() as folder:
        _graphs_folder = folder
        try:
            yield
        finally:
            _graphs_folder = None


def record_of(model: Path | onnx.ModelProto, flavour: Flavour, dims: Mapping[str, int], static: bool,
              weights: Sequence[Path] = (), no_weights: bool = False, half: bool = False) -> ModelRecord:
    """The record of a model, made in the child. `weights` are its weight files (`weight_files`), which may be missing with
    `no_weights`. `half` treats an ONNX model's floats as half precision."""
    task = partial(AnalysisTask, do="record", folder=Path.cwd(), runtime=flavour.runtime, flavour=flavour, dims=dict(dims),
                   static=static, kept=_graphs_folder, no_weights=no_weights, half=half)
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
    """The checked weight files of the ONNX file `model`. The child is asked only if there may be any."""
    if not may_name_files(model):
        return []
    return list(_ask(AnalysisTask(do="weights", folder=Path.cwd(), model=model, no_weights=no_weights)).files)


def interface_of(model: Path) -> Interface:
    """The inputs and outputs that the ONNX file `model` declares."""
    check_plain_file(model)
    interface = _ask(AnalysisTask(do="interface", folder=Path.cwd(), model=model)).interface
    if interface is None:
        raise RuntimeError("the child sent no interface")
    return interface


def own_sizes(model: Path, dims: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """All combinations of those `dims` that are dynamic in the file `model`; at least one, perhaps empty."""
    names = own_names(model, dims)
    return cli.combinations({name: sizes for name, sizes in dims.items() if name in names})


def own_names(model: Path, names: Iterable[str]) -> frozenset[str]:
    """The `names` that are names of sizes in the file `model`."""
    if not (requested := tuple(names)):
        return frozenset()
    check_plain_file(model)
    return frozenset(_ask(AnalysisTask(do="sizes", folder=Path.cwd(), model=model, names=requested)).names)


def graph_of(model: Path, device: str, dims: Mapping[str, int], static: bool, no_weights: bool = False) -> dict[str, Any]:
    """The graph that ONNX Runtime runs, as `hase.ort_analysis.graph.parsing.graph_document` describes it."""
    return _ask(AnalysisTask(do="graph", folder=Path.cwd(), model=model, device=device, dims=dict(dims), static=static,
                     no_weights=no_weights), weight_files(model, no_weights)).graph


def check_opens(model: Path, device: str, dims: Mapping[str, int], static: bool) -> None:
    """Checks that ONNX Runtime can load a model, before this process loads it to run it."""
    task = AnalysisTask(do="opens", folder=Path.cwd(), model=model, device=device, dims=dict(dims), static=static)
    _ask(task, weight_files(model))


def _ask(task: AnalysisTask, weights: Sequence[Path] = (), analyst: Analyst | None = None) -> AnalysisReply:
    """The reply to a task about a model with these weight files, from the cache or the child."""
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
    """The bytes of a file on disk, fewer than its size if it is sparse; 0 if unreadable, since the child reports that."""
    try:
        stat = path.stat()
    except OSError:
        return 0
    return min(stat.st_size, 512 * getattr(stat, "st_blocks", stat.st_size))


def analyze_all(workspace: Workspace, runtime: str, work: Sequence[ModelAtSize], device: str, jobs: int, static: bool = False,
                origin: ModelOrigin = AS_THE_FILE_SAYS, no_weights: bool = False) -> list[list[ModelRecord] | UserError]:
    """Writes records of models with `jobs` children; returns each model's records or error. A model that crashes the runtime
    affects no other."""
    analysts = [Analyst() for _ in range(min(jobs, len(work)))]
    idle: queue.SimpleQueue[Analyst] = queue.SimpleQueue()
    for analyst in analysts:
        idle.put(analyst)

    def analyze(model: Path, dims: Mapping[str, int]) -> list[ModelRecord] | UserError:
        analyst = idle.get()
        try:
            task = AnalysisTask(do="write", folder=Path.cwd(), model=model, runtime=runtime, workspace=workspace.root,
                                device=device, dims=dict(dims), static=static, origin=origin, no_weights=no_weights)
            return list(_ask(task, weight_files(model, no_weights), analyst).records)
        except UserError as error:
            return error
        finally:
            idle.put(analyst)

    threads = ThreadPoolExecutor(len(analysts) or 1)
    try:
        pending = [threads.submit(analyze, model, dims) for model, dims in work]
        return [future.result() for future in (progress(pending, "analysing") if len(pending) > 1 else pending)]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for analyst in analysts:
            analyst.stop()
        threads.shutdown()


def is_known(model: Path) -> bool:
    """Whether an earlier command asked about this unchanged file."""
    return (signed := signature(model)) is not None and read_entry(_digest_key(signed)) is not None


def reply_key(task: AnalysisTask, weights: Sequence[Path]) -> str | None:
    """The cache key of a reply; None if it is not cached."""
    if task.do not in KEPT or task.in_memory or task.runtime not in ("", DEFAULT_RUNTIME) or cache_folder() is None:
        return None
    model = task.folder / task.model
    if (digest := _digest(model)) is None:
        return None
    name_in_key = str(model) if task.do == "weights" else model.name  # the reply names files
    question = task.model_dump(mode="json", exclude={"folder", "model", "kept"})
    return entry_key("reply", name_in_key, digest, sorted(question.items()),
                  [(path.name, *signed[1:2], *signed[3:4]) for path in weights if (signed := signature(task.folder / path))],
                  _versions_and_code())


def kept_reply(key: str | None, task: AnalysisTask) -> AnalysisReply | None:
    """The cached reply under a key; None if missing, or if a file that it names no longer exists."""
    if key is None or (data := read_entry(key)) is None:
        return None
    try:
        reply = AnalysisReply.model_validate_json(data)
    except ValidationError:  # from a Hase with other records, though nothing else in the key differs
        return None
    return reply if all(_is_where_found(task.folder / path, task) for path in reply.files) else None


def _is_where_found(weights: Path, task: AnalysisTask) -> bool:
    """Whether a weight file is still in its model's folder, or may be missing."""
    if not weights.exists():
        return task.no_weights
    model = task.folder / task.model
    return weights.is_file() and any(weights.resolve().is_relative_to(folder)
                                     for folder in (model.parent.resolve(), model.resolve().parent))


def keep_reply(key: str | None, reply: AnalysisReply) -> None:
    """Caches a reply, unless it reports a failure."""
    if key is not None and reply.failure is None:
        write_entry(key, reply.model_dump_json().encode())


def _digest(model: Path) -> str | None:
    """The SHA-256 of a file, computed only if it changed since the last command; None if unreadable."""
    before = signature(model)
    if before is None or not model.is_file():
        return None
    key = _digest_key(before)
    if cached := read_entry(key):
        return cached.decode("ascii", "replace")
    try:
        digest = cached_sha256(model)
    except OSError:
        return None
    if before == signature(model):
        write_entry(key, digest.encode())
    return digest


def _digest_key(signed: Sequence[object]) -> str:
    return entry_key("digest", *signed)


@functools.cache
def _versions_and_code() -> tuple[object, ...]:
    """What all replies depend on, whatever the model and question."""
    return (ort_version(), package_version("onnx"), platform.python_version(), platform.platform(), instruction_set(),
            sorted(gpu_facts().items()), code_version("ort_analysis", "records", "runtimes", "utils"))
