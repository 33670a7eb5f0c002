"""Actors on a Ray cluster: one for each GPU, or for each host where CPUs are measured.

Each takes the same lock of its device as a collector without Ray, and measures with the same `Measurer`. Ray never repeats
anything by itself (no restarts, no retries): what a lost actor had not finished is planned again by the driver, which alone
writes. The code of this repository travels to the nodes; the packages that it needs are to be installed there.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.devices import Device, open_device
from hase.benchmark.collecting.files_by_content import Sender, SentFile, at_paths, receive
from hase.benchmark.collecting.units import measurer, start_workers
from hase.benchmark.collecting.work import Item
from hase.benchmark.measuring.actors import Actor, Actors, Finished, Measurer, Task
from hase.records.backgrounds import Background
from hase.records.blocks import Block
from hase.runtimes import runtime_named
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.lazy import ray
from hase.utils.locks import WAIT_VARIABLE, InUse, wait_for_locks
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.ray_cluster import check_packages, connected
from hase.utils.temporary import shared_folder

log = get_logger("collector")
CODE = ("hase/__init__.py", "utils", "records", "runtimes", "model_zoo", "ort_analysis", "kernel_model", "benchmark")
START_S = 120.0  # for an actor to start; where others use its device's node, it does not
IN_USE_S = 10.0  # for an actor of a driver that was killed to end
LOOK_EVERY_S = 1.0  # so long the driver waits before it looks whether it is to stop
THREADS_VARIABLE = "OMP_NUM_THREADS"  # in the environment: Ray sets it, and so would change what is measured
T = TypeVar("T")


class Reply(NamedTuple):
    """What an actor answers.

    Attributes:
        value: the answer.
        error: why there is none, for the user; "" where there is one.
        messages: level and text of what it logged meanwhile.
    """

    value: Any
    error: str
    messages: tuple[tuple[int, str], ...]


class Measured(NamedTuple):
    """A block that was measured, as compressed JSON so that it travels within the reply; None where the time was over."""

    block: bytes | None
    seconds: float


class _Messages(logging.Handler):
    """Keeps warnings and errors until they are taken."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append((record.levelno, record.getMessage()))

    def take(self) -> tuple[tuple[int, str], ...]:
        """What was kept since the last time."""
        kept, self._kept = tuple(self._kept), []
        return kept


class RemoteMeasurer:
    """The actor's own side: a process of Ray that measures one device.

    Args:
        device: `cpu` or `cuda`.
        name: for messages.
        folder: the name of the folder for files that all actors of a machine share.
        threads: the driver's value of THREADS_VARIABLE.
    """

    def __init__(self, device: str, name: str, folder: str, threads: str | None) -> None:
        os.environ.pop(THREADS_VARIABLE, None)
        if threads is not None:
            os.environ[THREADS_VARIABLE] = threads
        self._device, self._name = device, name
        self._messages = _Messages()
        logging.getLogger("hase").addHandler(self._messages)
        self._open, self._under = ExitStack(), ExitStack()
        self._folder = self._open.enter_context(shared_folder(folder))
        self._measurer: Measurer[Item] | None = None

    def describe(self, config: CollectorConfig) -> Reply:
        """The `Device`."""
        return self._reply(lambda: open_device(config, self._device, self._name)[0])

    def open(self, config: CollectorConfig, wait: bool) -> Reply:
        """Takes the device's lock and starts the processes that measure."""
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
             sent: Sequence[SentFile]) -> Reply:
        """Puts the device under a load; no block begins after `left_s` seconds."""
        return self._reply(lambda: self._under.enter_context(self._ready.loaded(
            level, self._here(background, sent), best_canary_ms, time.monotonic() + left_s)))

    def measure(self, task: Task[Item], sent: Sequence[SentFile]) -> Reply:
        """One attempt at a block: `Measured`."""
        def measured() -> Measured:
            planned = task.planned
            here = task._replace(planned=planned._replace(units=[self._here(item, sent) for item in planned.units]))
            began_s = time.monotonic()
            block = self._ready.measure(here)
            seconds = time.monotonic() - began_s
            return Measured(zlib.compress(block.model_dump_json().encode()) if block else None, seconds)

        return self._reply(measured)

    def unload(self) -> Reply:
        """Ends the load."""
        return self._reply(self._under.close)

    def close(self) -> Reply:
        """Ends everything, and removes what is left on the machine."""
        self._under.close()
        return self._reply(self._open.close)

    @property
    def _ready(self) -> Measurer[Item]:
        if self._measurer is None:
            raise RuntimeError("the actor was not opened")
        return self._measurer

    def _here(self, item: T, sent: Sequence[SentFile]) -> T:
        """An item whose files lie on this machine: those that were sent are fetched first, so that nothing is fetched while
        something is measured."""
        places = receive(self._folder, sent, ray.get)
        return at_paths(item, lambda path: places.get(str(path), path))

    def _reply(self, work: Callable[[], Any]) -> Reply:
        try:
            value, error = work(), ""
        except UserError as raised:
            value, error = None, str(raised)
        return Reply(value, error, self._messages.take())


@contextmanager
def ray_devices(address: str, config: CollectorConfig) -> Iterator[RayDevices]:
    """The devices of a Ray cluster, for `collect`. Its actors end with the block.

    Args:
        address: of the cluster, HOST:PORT, or `auto`.
        config: of the collector.

    Raises:
        UserError: the package ray is missing, there is no such cluster, or it has no device that could be measured.
    """
    check_packages()
    if runtime_named(config.runtime).takes_setting or config.replay:
        raise UserError("--ray measures ONNX Runtime alone, with metrics that each machine reads itself: leave --ray out, or "
                        "have runtime: ort and no replay in the config")
    with connected(address, CODE):
        yield RayDevices(config)


class RayDevices:
    """The devices of the cluster that this process is connected to (see benchmark/collecting/devices.py).

    Raises:
        UserError: none could be measured.
    """

    def __init__(self, config: CollectorConfig) -> None:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        device = config.device
        if device == "auto":
            device = "cuda" if any(node["Resources"].get("GPU") for node in nodes) else "cpu"
        folder, threads = secrets.token_hex(8), os.environ.get(THREADS_VARIABLE)
        handles: dict[str, tuple[Any, str]] = {}  # by name: the actor, and its node
        for node in nodes:
            for number in range(int(node["Resources"].get("GPU", 0)) if device == "cuda" else 1):
                place = f"{node['NodeManagerHostname']}/{node['NodeID'][:6]}" + (f"/GPU {number}" if device == "cuda" else "")
                if resources := _resources(node, device):
                    handles[place] = (ray.remote(RemoteMeasurer).options(max_restarts=0, max_task_retries=0, **resources)
                                      .remote(device, place, folder, threads), node["NodeID"])
        if not handles:
            raise UserError(f"the Ray cluster has no {'GPU' if device == 'cuda' else 'node with CPUs'} to measure")
        self._handles, self._devices = handles, dict[str, Device]()
        self.answers({place: handle.describe.remote(config) for place, (handle, _) in handles.items()},
                     self._devices.__setitem__, START_S)
        self.found: Sequence[Device] = list(self._devices.values())
        log.info("%d actor%s on Ray: %s", len(self.found), "s" * (len(self.found) != 1), cli.first_of(list(self._devices)))
        if len({device.machine.uuid for device in self.found}) > 1 and config.each_machine:
            log.info("each of the machines measures everything (each_machine: true)")
        if any(config.levels) and len({self._handles[place][1] for place in self._devices}) < len(self._devices):
            raise UserError("levels above 0: loads of several GPUs of one host would disturb each other; measure levels [0.0], "
                            "or give Ray one GPU of each host (ray start --num-gpus=1)")

    @contextmanager
    def actors(self, config: CollectorConfig, workspace: Workspace) -> Iterator[Actors[Item]]:
        """The actors, with their devices' locks taken (see `Devices`); `workspace` is the driver's alone."""
        wait = bool(os.environ.get(WAIT_VARIABLE))
        opened: list[str] = []
        self.answers({place: self._handles[place][0].open.remote(config, wait) for place in self._devices},
                     lambda place, _: opened.append(place))
        actors = RayActors(self, opened)
        yield actors
        self.answers({actor.name: self.handle(actor.name).close.remote() for actor in actors.members}, lambda place, _: None,
                     START_S, needed=False)

    def handle(self, place: str) -> Any:
        """Ray's handle of an actor."""
        return self._handles[place][0]

    def actor(self, place: str) -> Actor:
        """An actor as the driver knows it."""
        return Actor(place, self._devices[place].machine.uuid, self._handles[place][1])

    def answers(self, references: Mapping[str, Any], take: Callable[[str, Any], object], timeout_s: float | None = None,
                needed: bool = True) -> None:
        """Waits for the answers of some actors, by place, and has each taken. Actors that give none are named in a warning.

        Args:
            references: to the answers.
            take: gets a place and its answer.
            timeout_s: how long to wait; None: for ever.
            needed: whether at least one answer is needed.

        Raises:
            UserError: one is needed and there is none; it is the last actor's error.
        """
        ready = _wait(list(references.values()), len(references), timeout_s)
        taken, last = 0, UserError("no actor")
        for place, reference in references.items():
            try:
                if reference not in ready:
                    raise UserError(f"it did not answer within {timeout_s:.0f} s; other work of the cluster may use its node")
                take(place, answer(place, reference))
                taken += 1
            except UserError as error:
                last = error
                log.warning("%s is left out: %s", place, error)
        if needed and not taken:
            raise last


def _resources(node: Mapping[str, Any], device: str) -> dict[str, Any]:
    """What an actor for a device of a node claims: together, the actors of a node claim all of it, so that Ray runs nothing
    else there. Empty where the node lets nothing run on its CPUs."""
    cpus, gpus = node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0)
    if device == "cpu" and not cpus:
        return {}
    share = {"num_cpus": cpus} if device == "cpu" else {"num_gpus": 1, "num_cpus": math.floor(cpus / gpus)}
    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return {**share, "scheduling_strategy": there}


def _wait(references: list[Any], count: int, timeout_s: float | None = None) -> list[Any]:
    """Those of some references that are ready, as soon as `count` are or the time is over."""
    until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        ready, _ = ray.wait(references, num_returns=count, timeout=LOOK_EVERY_S)
        if len(ready) >= count or time.monotonic() > until_s:
            return list(ready)


def answer(place: str, reference: Any) -> Any:
    """The value that an actor answers. What it logged is logged.

    Raises:
        UserError: it gives an error for the user, or it has ended.
    """
    try:
        reply: Reply = ray.get(reference)
    except ray.exceptions.RayTaskError:
        raise  # a bug, which keeps its traceback
    except ray.exceptions.RayError as error:
        raise UserError(f"its process or its node has ended ({type(error).__name__})") from None
    for level, text in reply.messages:
        log.log(level, "%s: %s", place, text)
    if reply.error:
        raise UserError(reply.error)
    return reply.value


class RayActors:
    """The actors of a cluster (see `hase.benchmark.measuring.actors.Actors`)."""

    tasks_each = 2

    def __init__(self, devices: RayDevices, places: Sequence[str]) -> None:
        self._devices = devices
        self.members = [devices.actor(place) for place in places]
        self._sender = Sender(ray.put)
        self._own_node = ray.get_runtime_context().get_node_id()
        self._begun: dict[Any, tuple[Actor, Task[Item], tuple[SentFile, ...]]] = {}

    @contextmanager
    def loaded(self, level: float, background: Background | None, best_canary_ms: Mapping[str, float],
               stop_at_s: float) -> Iterator[None]:
        left_s = stop_at_s - time.monotonic()
        of_background = {actor: self._for(actor, [background]) for actor in self.members}
        self._all({actor: self._devices.handle(actor.name).load.remote(
            level, load, best_canary_ms.get(actor.machine, 0.0), left_s, sent)
            for actor, ([load], sent) in of_background.items()}, needed=True)
        yield  # where the block raises, the driver ends, and its actors with it
        self._all({actor: self._devices.handle(actor.name).unload.remote() for actor in self.members}, needed=False)

    def begin(self, actor: Actor, task: Task[Item]) -> None:
        units, sent = self._for(actor, task.planned.units)
        at_actor = task._replace(planned=task.planned._replace(units=units))
        self._begun[self._devices.handle(actor.name).measure.remote(at_actor, sent)] = (actor, task, sent)

    def wait(self) -> Sequence[Finished[Item]]:
        finished = []
        for reference in _wait(list(self._begun), 1):
            if reference not in self._begun:  # of an actor that was found lost just now
                continue
            actor, task, sent = self._begun.pop(reference)
            try:
                measured: Measured = answer(actor.name, reference)
            except UserError as error:
                self._begun = {begun: of for begun, of in self._begun.items() if of[0] != actor}
                finished.append(Finished(actor, task, None, lost=error))
                continue
            self._sender.arrived(actor.host, sent, (file for _, _, files in self._begun.values() for file in files))
            block = Block.model_validate_json(zlib.decompress(measured.block)) if measured.block else None
            finished.append(Finished(actor, task, block, measured.seconds))
        return finished

    def _for(self, actor: Actor, items: Sequence[T]) -> tuple[list[T], tuple[SentFile, ...]]:
        """Items as an actor gets them, and the files that are sent with them: none where it has the driver's own."""
        here = [at_paths(item, lambda path: path.absolute()) for item in items]
        return here, () if actor.host == self._own_node else self._sender.files_for(actor.host, here)  # type: ignore[arg-type]

    def _all(self, references: Mapping[Actor, Any], needed: bool) -> None:
        """Waits for the answers of members; those that give none are members no longer.

        Raises:
            UserError: none gives one, and one is needed.
        """
        answered: list[str] = []
        self._devices.answers({actor.name: reference for actor, reference in references.items()},
                              lambda place, _: answered.append(place), needed=needed)
        self.members[:] = [actor for actor in self.members if actor.name in answered]
