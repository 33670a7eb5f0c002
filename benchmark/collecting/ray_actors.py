"""Actors on a Ray cluster: one per GPU, or one per host for CPUs.

Each takes the same device lock as a collector without Ray, and measures with the same `Measurer`. Ray repeats nothing by itself
(no restarts, no retries): the driver plans again what a lost actor had not finished, and only the driver writes. This
repository's code is sent to the nodes; the packages that it needs must be installed there.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.devices import FoundDevice, open_device
from hase.benchmark.collecting.plans import Item, KernelItem, ModelItem
from hase.benchmark.collecting.units import measurer, start_workers
from hase.benchmark.measuring.blocks import Attempt, Measurer
from hase.benchmark.measuring.driver import Actor, Actors, Finished
from hase.records.measurement import Background, Block
from hase.runtimes import runtime_named
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.files import shared_folder
from hase.utils.lazy import onnx, ray
from hase.utils.locks import WAIT_VARIABLE, InUse, wait_for_locks
from hase.utils.logger import get_logger
from hase.utils.model_files import external_files, may_name_files
from hase.utils.paths import Workspace
from hase.utils.ray_cluster import check_packages, connected
from hase.utils.text import first_and_count

log = get_logger("collector")
SENT_FOLDERS = ("utils", "records", "runtimes", "model_zoo", "ort_analysis", "kernel_model", "benchmark")  # of this repository
START_S = 120.0  # limit for an actor's start; it waits while others use its node
IN_USE_S = 10.0  # how long an actor waits for a device that the actor of a killed driver may still hold
LOOK_EVERY_S = 1.0  # how often a waiting driver checks whether to stop
THREADS_VARIABLE = "OMP_NUM_THREADS"  # set by Ray, which would change the measurements
PIECE_BYTES = 32 << 20  # per sent piece of a file; several fit into a small object store
T = TypeVar("T")


class ActorReply(NamedTuple):
    """An actor's answer."""

    value: Any
    error: str  # why there is no value, for the user; else ""
    messages: tuple[tuple[int, str], ...]  # level and text of what it logged meanwhile


class CompressedBlock(NamedTuple):
    """A measured block as compressed JSON, so that it fits into the reply; None if time was over."""

    block: bytes | None
    seconds: float


class _Messages(logging.Handler):
    """Collects warnings and errors until they are taken."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.levelno, record.getMessage()))

    def take(self) -> tuple[tuple[int, str], ...]:
        """Everything since the last call."""
        taken, self._records = tuple(self._records), []
        return taken


class RemoteMeasurer:
    """The actor's side: a Ray process that measures one device; `folder` is shared by all actors of a machine."""

    def __init__(self, device: str, name: str, folder: str, threads: str | None) -> None:
        os.environ.pop(THREADS_VARIABLE, None)
        if threads is not None:
            os.environ[THREADS_VARIABLE] = threads
        self._device, self._name = device, name
        self._messages = _Messages()
        logging.getLogger("hase").addHandler(self._messages)
        self._open, self._load_open = ExitStack(), ExitStack()
        self._folder = self._open.enter_context(shared_folder(folder))
        self._measurer: Measurer[Item] | None = None

    def describe(self, config: CollectorConfig) -> ActorReply:
        """Answers with the `FoundDevice`."""
        return self._reply(lambda: open_device(config, self._device, self._name)[0])

    def open(self, config: CollectorConfig, wait: bool) -> ActorReply:
        """Takes the device's lock and starts the measuring processes."""
        def opened() -> None:
            if wait:
                wait_for_locks()
            device, source = open_device(config, self._device, self._name)
            until_s = time.monotonic() + IN_USE_S
            while True:
                try:
                    workers = self._open.enter_context(start_workers(config, self._device, config.labels_on(self._device)))
                    break
                except InUse:
                    if time.monotonic() > until_s:
                        raise
                time.sleep(LOOK_EVERY_S)
            self._measurer = measurer(config, device.target, device.machine.uuid, source, workers, Workspace(self._folder))

        return self._reply(opened)

    def load(self, level: float, background: Background | None, best_canary_ms: float, left_s: float,
             sent: Sequence[SentFile]) -> ActorReply:
        """Puts the device under a load; no block begins after `left_s` seconds."""
        return self._reply(lambda: self._load_open.enter_context(self._ready.loaded(
            level, self._with_local_files(background, sent), best_canary_ms, time.monotonic() + left_s)))

    def measure(self, attempt: Attempt[Item], sent: Sequence[SentFile]) -> ActorReply:
        """Makes one attempt at a block; answers with a `CompressedBlock`."""
        def measured() -> CompressedBlock:
            planned = attempt.planned
            units = [self._with_local_files(item, sent) for item in planned.units]
            local = attempt._replace(planned=planned._replace(units=units))
            began_s = time.monotonic()
            block = self._ready.measure(local)
            seconds = time.monotonic() - began_s
            return CompressedBlock(zlib.compress(block.model_dump_json().encode()) if block else None, seconds)

        return self._reply(measured)

    def unload(self) -> ActorReply:
        """Ends the load."""
        return self._reply(self._load_open.close)

    def close(self) -> ActorReply:
        """Ends everything, and removes its files from the machine."""
        self._load_open.close()
        return self._reply(self._open.close)

    @property
    def _ready(self) -> Measurer[Item]:
        if self._measurer is None:
            raise RuntimeError("the actor was not opened")
        return self._measurer

    def _with_local_files(self, item: T, sent: Sequence[SentFile]) -> T:
        """An item with its files on this machine; missing ones are fetched now, so that no transfer disturbs a measurement."""
        paths = receive(self._folder, sent, ray.get)
        return at_paths(item, lambda path: paths.get(str(path), path))

    def _reply(self, work: Callable[[], Any]) -> ActorReply:
        try:
            value, error = work(), ""
        except UserError as raised:
            value, error = None, str(raised)
        return ActorReply(value, error, self._messages.take())


@contextmanager
def ray_devices(address: str, config: CollectorConfig) -> Iterator[RayDevices]:
    """Devices of the Ray cluster at `address` (HOST:PORT or `auto`), for `collect`; the actors end with the block."""
    check_packages()
    if runtime_named(config.runtime).takes_setting or config.replay:
        raise UserError("--ray measures ONNX Runtime alone, with metrics that each machine reads itself: leave --ray out, or "
                        "have runtime: ort and no replay in the config")
    with connected(address, SENT_FOLDERS):
        yield RayDevices(config)


class RayDevices:
    """The devices of the cluster that this process is connected to. Raises UserError if none can be measured."""

    def __init__(self, config: CollectorConfig) -> None:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        device = config.device
        if device == "auto":
            device = "cuda" if any(node["Resources"].get("GPU") for node in nodes) else "cpu"
        folder, threads = secrets.token_hex(8), os.environ.get(THREADS_VARIABLE)
        actor_handles: dict[str, tuple[Any, str]] = {}  # by name: the actor, and its node
        for node in nodes:
            for number in range(int(node["Resources"].get("GPU", 0)) if device == "cuda" else 1):
                name = f"{node['NodeManagerHostname']}/{node['NodeID'][:6]}" + (f"/GPU {number}" if device == "cuda" else "")
                if resources := _resources(node, device):
                    actor_handles[name] = (ray.remote(RemoteMeasurer).options(max_restarts=0, max_task_retries=0, **resources)
                                      .remote(device, name, folder, threads), node["NodeID"])
        if not actor_handles:
            raise UserError(f"the Ray cluster has no {'GPU' if device == 'cuda' else 'node with CPUs'} to measure")
        self._handles, self._devices = actor_handles, dict[str, FoundDevice]()
        self.answers({name: handle.describe.remote(config) for name, (handle, _) in actor_handles.items()},
                     self._devices.__setitem__, START_S)
        self.found: Sequence[FoundDevice] = list(self._devices.values())
        log.info("%d actor%s on Ray: %s", len(self.found), "s" * (len(self.found) != 1), first_and_count(list(self._devices)))
        if len({device.machine.uuid for device in self.found}) > 1 and config.each_machine:
            log.info("each of the machines measures everything (each_machine: true)")
        if any(config.levels) and len({self._handles[name][1] for name in self._devices}) < len(self._devices):
            raise UserError("levels above 0: loads of several GPUs of one host would disturb each other; measure levels [0.0], "
                            "or give Ray one GPU of each host (ray start --num-gpus=1)")

    @contextmanager
    def actors(self, config: CollectorConfig, workspace: Workspace) -> Iterator[Actors[Item]]:
        """The actors, with their devices locked; `workspace` belongs to the driver."""
        wait = bool(os.environ.get(WAIT_VARIABLE))
        opened: list[str] = []
        self.answers({name: self._handles[name][0].open.remote(config, wait) for name in self._devices},
                     lambda name, _: opened.append(name))
        actors = RayActors(self, opened)
        yield actors
        self.answers({actor.name: self.handle(actor.name).close.remote() for actor in actors.members}, lambda name, _: None,
                     START_S, needed=False)

    def handle(self, name: str) -> Any:
        """Ray's handle of an actor."""
        return self._handles[name][0]

    def actor(self, name: str) -> Actor:
        """An actor as the driver sees it."""
        return Actor(name, self._devices[name].machine.uuid, self._handles[name][1])

    def answers(self, references: Mapping[str, Any], take: Callable[[str, Any], object], timeout_s: float | None = None,
                needed: bool = True) -> None:
        """Passes each actor's answer to `take`, and warns about missing ones.

        Raises UserError if one is `needed` and none comes.
        """
        ready = _wait(list(references.values()), len(references), timeout_s)
        taken, last = 0, UserError("no actor")
        for name, reference in references.items():
            try:
                if reference not in ready:
                    raise UserError(f"it did not answer within {timeout_s:.0f} s; other work of the cluster may use its node")
                take(name, answer(name, reference))
                taken += 1
            except UserError as error:
                last = error
                log.warning("%s is left out: %s", name, error)
        if needed and not taken:
            raise last


def _resources(node: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The share of a node that an actor claims; empty for a node without CPUs. All actors of a node together claim all of it,
    so that Ray runs nothing else there."""
    cpus, gpus = node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0)
    if device == "cpu" and not cpus:
        return {}
    share = {"num_cpus": cpus} if device == "cpu" else {"num_gpus": 1, "num_cpus": math.floor(cpus / gpus)}
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return {**share, "scheduling_strategy": strategy}


def _wait(references: list[Any], count: int, timeout_s: float | None = None) -> list[Any]:
    """The references that are ready, as soon as `count` are or time is over."""
    until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        ready, _ = ray.wait(references, num_returns=count, timeout=LOOK_EVERY_S)
        if len(ready) >= count or time.monotonic() > until_s:
            return list(ready)


def answer(name: str, reference: Any) -> Any:
    """The value that an actor answers; its messages are logged. Raises UserError if it gives an error or has ended."""
    try:
        reply: ActorReply = ray.get(reference)
    except ray.exceptions.RayTaskError:
        raise  # a bug, which keeps its traceback
    except ray.exceptions.RayError as error:
        raise UserError(f"its process or its node has ended ({type(error).__name__})") from None
    for level, text in reply.messages:
        log.log(level, "%s: %s", name, text)
    if reply.error:
        raise UserError(reply.error)
    return reply.value


class RayActors:
    """The actors of a cluster (see `hase.benchmark.measuring.driver.Actors`)."""

    blocks_each = 2

    def __init__(self, devices: RayDevices, names: Sequence[str]) -> None:
        self._devices = devices
        self.members = [devices.actor(name) for name in names]
        self._sender = Sender(ray.put)
        self._own_node = ray.get_runtime_context().get_node_id()
        self._begun: dict[Any, tuple[Actor, Attempt[Item], tuple[SentFile, ...]]] = {}

    @contextmanager
    def loaded(self, level: float, background: Background | None, best_canary_ms: Mapping[str, float],
               stop_at_s: float) -> Iterator[None]:
        left_s = stop_at_s - time.monotonic()
        loads = {actor: self._items_for(actor, [background]) for actor in self.members}
        self._wait_for_all({actor: self._devices.handle(actor.name).load.remote(
            level, load, best_canary_ms.get(actor.machine, 0.0), left_s, sent)
            for actor, ([load], sent) in loads.items()}, needed=True)
        yield  # if the block raises, the driver ends, and its actors with it
        self._wait_for_all({actor: self._devices.handle(actor.name).unload.remote() for actor in self.members}, needed=False)

    def begin(self, actor: Actor, attempt: Attempt[Item]) -> None:
        units, sent = self._items_for(actor, attempt.planned.units)
        at_actor = attempt._replace(planned=attempt.planned._replace(units=units))
        self._begun[self._devices.handle(actor.name).measure.remote(at_actor, sent)] = (actor, attempt, sent)

    def wait(self) -> Sequence[Finished[Item]]:
        finished = []
        for reference in _wait(list(self._begun), 1):
            if reference not in self._begun:  # its actor was lost a moment ago
                continue
            actor, attempt, sent = self._begun.pop(reference)
            try:
                measured: CompressedBlock = answer(actor.name, reference)
            except UserError as error:
                self._begun = {begun_reference: entry for begun_reference, entry in self._begun.items() if entry[0] != actor}
                finished.append(Finished(actor, attempt, None, lost=error))
                continue
            self._sender.arrived(actor.host, sent, (file for _, _, files in self._begun.values() for file in files))
            block = Block.model_validate_json(zlib.decompress(measured.block)) if measured.block else None
            finished.append(Finished(actor, attempt, block, measured.seconds))
        return finished

    def _items_for(self, actor: Actor, items: Sequence[T]) -> tuple[list[T], tuple[SentFile, ...]]:
        """Items with paths valid for an actor, and files to send with them: none if it shares the driver's files."""
        here = [at_paths(item, lambda path: path.absolute()) for item in items]
        return here, () if actor.host == self._own_node else self._sender.files_for(actor.host, here)  # type: ignore[arg-type]

    def _wait_for_all(self, references: Mapping[Actor, Any], needed: bool) -> None:
        """Waits for the answers of members, and drops members without one. Raises UserError if one is needed and none comes."""
        answered: list[str] = []
        self._devices.answers({actor.name: reference for actor, reference in references.items()},
                              lambda name, _: answered.append(name), needed=needed)
        self.members[:] = [actor for actor in self.members if actor.name in answered]


# files of kernels and models that are sent to another machine ------------------------------------------------------------
# A file is identified by the hash of its content, and sent in pieces through Ray's object store. A machine has one folder for
# all its actors; a file that is there is not sent again.


class SentFile(NamedTuple):
    """A file that a machine should have."""

    path: str  # its path at the driver
    sha256: str  # of its content
    folder: str  # name of the folder shared with the files that belong to it
    name: str  # its path in that folder
    pieces: tuple[Any, ...] = ()  # references to its content; none if the machine has it


def files_of(item: Item | Background | None) -> list[list[Path]]:
    """Files of a kernel, model or load, in groups that must be in one folder; unreadable files are left out."""
    if isinstance(item, KernelItem):
        groups = [_with_weights(item.path)]
    elif isinstance(item, ModelItem):
        groups = [_with_weights(item.path), [item.record_path], [item.inputs] if item.inputs else []]
    else:
        groups = [_with_weights(item.model)] if item is not None and item.model else []
    return [found for group in groups if (found := [path for path in group if path.is_file()])]


def _with_weights(model: Path) -> list[Path]:
    """A model's file and its weight files."""
    try:
        if not may_name_files(model):
            return [model]
        return [model, *external_files(model, onnx.load(model, load_external_data=False), missing_ok=True)]
    except UserError:
        return [model]


def at_paths(item: T, path_of: Callable[[Path], Path]) -> T:
    """A kernel, model or load with other file paths."""
    if isinstance(item, KernelItem):
        return replace(item, path=path_of(item.path))
    if isinstance(item, ModelItem):
        return replace(item, path=path_of(item.path), record_path=path_of(item.record_path),
                       inputs=path_of(item.inputs) if item.inputs else None)
    if isinstance(item, Background) and item.model:
        return item.model_copy(update={"model": path_of(item.model)})
    return item


class Sender:
    """Prepares files for machines; its function puts a piece into the object store and returns a reference."""

    def __init__(self, put: Callable[[bytes], Any]) -> None:
        self._put = put
        self._at_machine: dict[str, set[str]] = {}  # by machine, the hashes of the files that it has
        self._pieces: dict[str, tuple[Any, ...]] = {}  # by hash, while a machine may still fetch them

    def files_for(self, machine: str, items: Iterable[Item | Background | None]) -> tuple[SentFile, ...]:
        """The files of some items, with the pieces that a machine does not have yet."""
        sent: list[SentFile] = []
        for group in (group for item in items for group in files_of(item)):
            hashes = [files.cached_sha256(path) for path in group]
            folder = hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
            for path, sha256 in zip(group, hashes, strict=True):
                present = sha256 in self._at_machine.get(machine, ())
                if not present and sha256 not in self._pieces:
                    self._pieces[sha256] = tuple(self._put(piece) for piece in pieces(path))
                sent.append(SentFile(str(path), sha256, folder, str(path.relative_to(group[0].parent)),
                                     () if present else self._pieces[sha256]))
        return tuple(sent)

    def arrived(self, machine: str, sent: Sequence[SentFile], still_sent: Iterable[SentFile]) -> None:
        """Notes that a machine has some files. The store may drop the pieces of all but those `still_sent`."""
        self._at_machine.setdefault(machine, set()).update(file.sha256 for file in sent)
        wanted = {file.sha256 for file in still_sent}
        self._pieces = {sha256: references for sha256, references in self._pieces.items() if sha256 in wanted}


def pieces(path: Path) -> Iterable[bytes]:
    """The content of a file in pieces; an empty file has one empty piece."""
    with path.open("rb") as file:
        piece = file.read(PIECE_BYTES)
        yield piece
        while piece := file.read(PIECE_BYTES):
            yield piece


def receive(folder: Path, sent: Sequence[SentFile], get: Callable[[Any], bytes]) -> Mapping[str, Path]:
    """Fetches missing files into a folder; returns the path of each by its path at the driver.

    Raises UserError if a file's content has changed, or it is neither here nor sent.
    """
    paths: dict[str, Path] = {}
    for file in sent:
        content, path = folder / file.sha256, folder / file.folder / file.name
        if not content.exists():
            _fetch(content, file, get)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{os.getpid()}")
            os.link(content, temporary)
            temporary.rename(path)  # two actors may do so at once
            temporary.unlink(missing_ok=True)  # if both are one file, a rename does nothing
        paths[file.path] = path
    return paths


def _fetch(content: Path, file: SentFile, get: Callable[[Any], bytes]) -> None:
    if not file.pieces:
        raise UserError(f"{file.path}: it was removed from {content.parent} while it was needed there; run again")
    digest = hashlib.sha256()
    with files.replacing(content) as temporary, temporary.open("wb") as out:
        for piece in file.pieces:
            data = get(piece)
            digest.update(data)
            out.write(data)
        if digest.hexdigest() != file.sha256:
            raise UserError(f"{file.path}: it was changed while it was sent; run again")
