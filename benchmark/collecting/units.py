"""Times kernels and models under a runtime: the collector's units of measurement, and the processes that measure them.

Tracers are separate from the worker, which times whole runs, since a process launches kernels more slowly once CUPTI has traced
it. All processes start early: loading CUDA, torch and CUPTI takes seconds, in which the caller can look for work.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NamedTuple, TypeVar

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.plans import (
    CARRIER_BYTES,
    Item,
    KernelItem,
    ModelItem,
    by_similar_work,
    carriers,
    energy_batches,
)
from hase.benchmark.load.mps import gpu_shared
from hase.benchmark.measuring.blocks import Bench, Measurer, Steadiness, busy_share, started
from hase.benchmark.measuring.driver import chunks
from hase.benchmark.metrics.source import MetricSource
from hase.records.measurement import ENERGY, GPU_LABEL, IN_MODEL_LABELS, KERNELS, Effort, Measurement, Placement, Status, now
from hase.runtimes import runtime_named
from hase.runtimes.protocol import Reply, Request, RuntimeSetting, Worker
from hase.utils.files import temporary_folder
from hase.utils.fingerprint import Target
from hase.utils.locks import measuring
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.processes import WorkerFailed

log = get_logger("collector")


@dataclass(frozen=True)
class KernelUnits:
    """Times kernels and models of one target at one level."""

    config: CollectorConfig
    target: Target
    workers: Workers
    level: float = 0.0

    @property
    def device(self) -> str:
        return self.target.flavour.device

    @property
    def labels(self) -> tuple[str, ...]:
        return self.config.labels_on(self.device)

    @property
    def in_model_labels(self) -> tuple[str, ...]:
        return tuple(label for label in self.labels if label in IN_MODEL_LABELS)

    @property
    def carrier_bytes(self) -> int:
        """Memory limit for the kernels of one carrier, or for all that the tracers prepare at a time."""
        return self.config.carrier_mib << 20 if self.config.carrier_mib else CARRIER_BYTES[self.device]

    @property
    def variants(self) -> tuple[str, ...]:
        return () if self.level else self.config.variants_on(self.device)

    def time(self, items: Sequence[Item]) -> list[Measurement]:
        """Measures every label of some kernels and models."""
        models = [item for item in items if isinstance(item, ModelItem)]
        kernels = [item for item in items if isinstance(item, KernelItem)]
        measurements = [m for item in models for m in (self.time_kernels_in(item) if item.only else self.time_model(item))]
        if "run" in self.labels:
            measurements += [m for item in kernels for m in self.time_alone(item)]
        at_fault = {m.id for m in measurements if m.status != "ok"}
        sound = [item for item in kernels if item.id not in at_fault]
        if self.config.energy_s and self.config.energy_of_kernels and not self.level:
            measurements += [m for batch in energy_batches(sound, self.device) for m in self.measure_energy(batch)]
        if self.in_model_labels:
            measurements += [m for similar in by_similar_work(sound) for group in carriers(similar, self.carrier_bytes)
                             for m in self.time_carrier(group, self.in_model_labels, self.workers.worker)]
        if GPU_LABEL in self.labels:
            measurements += self.trace_kernels(sound)
        return with_inputs(measurements, items)

    def time_alone(self, item: KernelItem) -> list[Measurement]:
        """Times a kernel in its own session (label `run`)."""
        reply, status = ask(self.workers.worker, Request(
            do="alone", device=self.device, paths=(str(item.path),), effort=self.config.kernel.effort(),
            provider_options=self.target.provider_options))
        return measurements_in(reply, status, "kernel", item.id, "run", "alone", "alone")

    def time_carrier(self, items: Sequence[KernelItem], labels: tuple[str, ...], worker: Worker) -> list[Measurement]:
        """Measures labels of a group of kernels in a carrier. A failing group is halved until the kernel at fault is alone."""
        reply, status = ask(worker, Request(
            do="carrier", device=self.device, paths=tuple(str(item.path) for item in items), labels=labels,
            effort=self.config.kernel.effort(), provider_options=self.target.provider_options,
            turns="" if worker is self.workers.worker else self.workers.tracers.turns))
        if status == "interrupted":  # by no kernel's fault
            return [m for item in items
                    for m in measurements_in(reply, status, "kernel", item.id, labels[0], "carrier", "carrier")]
        if status != "ok" and len(items) > 1:
            half = len(items) // 2
            return self.time_carrier(items[:half], labels, worker) + self.time_carrier(items[half:], labels, worker)
        return measurements_in(reply, status, "kernel", items[0].id, labels[0], "carrier", "carrier")

    def trace_kernels(self, items: Sequence[KernelItem]) -> list[Measurement]:
        """Measures the GPU's time of kernels (label `gpu`), in carriers distributed over the tracers."""
        tracers = self.workers.tracers
        share = -(-len(items) // tracers.count)
        groups = [group for part in chunks(items, max(share, 1))
                  for group in carriers(part, self.carrier_bytes / tracers.count)]
        tasks = [partial(self.time_carrier, group, (GPU_LABEL,)) for group in groups]
        return [m for part in tracers.each(tasks) for m in part]

    def measure_energy(self, items: Sequence[KernelItem]) -> list[Measurement]:
        """Measures the energy of a batch of kernels (label `energy`)."""
        reply, status = ask(self.workers.worker, Request(
            do="kernels_energy", device=self.device, paths=tuple(str(item.path) for item in items),
            effort=self.config.kernel.effort(), provider_options=self.target.provider_options, energy_s=self.config.energy_s))
        return measurements_in(reply, status, KERNELS, f"{len(items)} from {items[0].id}", ENERGY, "alone", "alone")

    def time_model(self, item: ModelItem) -> list[Measurement]:
        """Measures a whole model and, if configured, its kernels in it."""
        in_model = self.in_model_labels if item.measures_kernels and self.config.model_labels else ()
        request = self._model_request(item, "model", in_model).model_copy(update={
            "host": GPU_LABEL in self.labels and not self.level, "host_io": "host_io" in self.variants,
            "watch_host": "" if self.device != "cuda" else "all" if self.level else "quiet",
            "energy_s": 0.0 if self.level else self.config.energy_s})

        def measured(label: str, reply: Reply, status: Status) -> list[Measurement]:
            return measurements_in(reply, status, "model", item.id, label, item.id, "alone")

        measurements = measured("latency", *ask(self.workers.worker, request))
        if request.host and self.config.model_labels and measurements[0].status == "ok":
            on_gpu = request.model_copy(update={"do": "model_gpu"})
            [traced] = self.workers.tracers.each([lambda tracer: ask(tracer, on_gpu)])
            measurements += measured(GPU_LABEL, *traced)
        if "cuda_graph" in self.variants and measurements[0].status == "ok":
            measurements += measured("cuda_graph", *ask(self.workers.worker, request.model_copy(update={"do": "model_graph"})))
        return measurements

    def time_kernels_in(self, item: ModelItem) -> list[Measurement]:
        """Times only the requested kernels of a model in it; none if it cannot be profiled."""
        reply, status = ask(self.workers.worker, self._model_request(item, "model_labels", self.in_model_labels))
        if status != "ok":
            log.warning("%s: its kernels can't be measured in it: %s (%s)", item.id, reply.error, status)
            return []
        return [m for m in reply.measurements if m.id in item.only]

    def _model_request(self, item: ModelItem, do: str, labels: tuple[str, ...]) -> Request:
        return Request.model_validate({
            "do": do, "device": self.device, "paths": (str(item.path),), "record": str(item.record_path),
            "dims": item.record.dims, "static": item.record.static, "labels": labels,
            "inputs": str(item.inputs.absolute()) if item.inputs else "", "effort": self.config.model.effort(),
            "provider_options": self.target.provider_options})


def with_inputs(measurements: Sequence[Measurement], items: Sequence[Item]) -> list[Measurement]:
    """Adds the inputs to measurements of kernels whose time depends on values, and of models with such a kernel."""
    models = [item for item in items if isinstance(item, ModelItem)]
    kernels = [*(item.kernel for item in items if not isinstance(item, ModelItem)),
               *(kernel for item in models for kernel in item.record.kernels.values())]
    by_values = {("kernel", kernel.id) for kernel in kernels if kernel.time_by_values} | {
        ("model", item.id) for item in models if any(kernel.time_by_values for kernel in item.record.kernels.values())}
    given = {item.id for item in models if item.inputs}
    return [m.model_copy(update={"inputs": "given" if m.context in given else "standardised"})
            if (m.subject, m.id) in by_values else m for m in measurements]


def ask(worker: Worker, request: Request) -> tuple[Reply, Status]:
    """A worker's reply and a status; a failed worker is replaced at the next request."""
    started = now()
    try:
        reply = worker.ask(request)
    except WorkerFailed as error:
        return Reply(error=str(error), started=started, ended=now()), error.status
    return reply, "interrupted" if reply.interrupted else "failed" if reply.error else "ok"


def measurements_in(reply: Reply, status: Status, subject: str, name: str, label: str, context: str,
                    place: Placement) -> list[Measurement]:
    """The measurements of a reply; for a failure, a single measurement with that status, made from the other arguments."""
    if status == "ok":
        return list(reply.measurements)
    log.warning("%s: %s (%s)", name, reply.error, status)
    return [Measurement(subject=subject, id=name, label=label, context=context, place=place, status=status, error=reply.error,
                        started=reply.started, ended=reply.ended)]


def open_bench(config: CollectorConfig, device: str, machine_uuid: str, source: MetricSource, worker: Worker) -> Bench:
    """Opens what the collector measures with on `cpu` or `cuda`. Raises UserError if windows are too short for the source. A
    sharing probe needs a GPU, the runtime's support, the config's consent and a level that is not idle."""
    probes = device == "cuda" and runtime_named(config.runtime).probes_sharing and config.probe_s and any(config.levels)
    probe = {"probe": partial(worker.read_sharing_probe, device, config.probe_s)} if probes else {}
    return Bench(device, machine_uuid, partial(worker.canary_ms, device), source, config.window_s,
                 busy=busy_share if device == "cpu" else None, steadiness=steadiness_of(config), **probe)


def steadiness_of(config: CollectorConfig) -> Steadiness:
    """The steadiness that the config requires."""
    return Steadiness(drift=config.canary_drift, attempts=config.attempts, attempts_under_load=config.attempts_under_load,
                      patience_s=config.patience_s)


R = TypeVar("R")


class Tracers:
    """`count` workers that trace; a context manager. `turns` is the folder of their locks ("" for one worker)."""

    def __init__(self, count: int, timeout_s: float) -> None:
        self.count, self._timeout_s = count, timeout_s
        self._stack = ExitStack()
        self.workers: list[Worker] = []
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self.turns = ""

    def __enter__(self) -> Tracers:
        if self.count > 1:
            self.turns = str(self._stack.enter_context(temporary_folder()))
        for _ in range(self.count):
            self.workers.append(self._stack.enter_context(Worker(self._timeout_s)))
            self._idle.put(self.workers[-1])
        # These threads stay alive: a process ends with the thread that started it.
        self._threads = self._stack.enter_context(ThreadPoolExecutor(self.count))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def prepare(self, request: Request) -> None:
        """Starts every process, as a worker's `prepare` does."""
        for worker in self.workers:
            worker.prepare(request)

    def each(self, tasks: Sequence[Callable[[Worker], R]]) -> list[R]:
        """Runs the tasks in parallel, one per worker at a time; returns results in order."""
        def with_worker(task: Callable[[Worker], R]) -> R:
            worker = self._idle.get()
            try:
                return task(worker)
            finally:
                self._idle.put(worker)

        return list(self._threads.map(with_worker, tasks))


class Workers(NamedTuple):
    """The measuring processes: the worker takes every label except `gpu`, which the tracers take."""

    worker: Worker
    tracers: Tracers

    @property
    def processes(self) -> list[Worker]:
        """All processes. One that is still loading would disturb what another measures."""
        return [self.worker, *self.tracers.workers]


@contextmanager
def start_workers(config: CollectorConfig, device: str, labels: Sequence[str],
                  setting: RuntimeSetting | None = None) -> Iterator[Workers]:
    """Starts the processes for some labels; they share `cpu` or `cuda` as configured, and end with the block."""
    request = Request(do="prepare", device=device, effort=Effort())
    sharing = config.gpu_sharing(device)
    with (measuring(device), gpu_shared(sharing) if device == "cuda" else nullcontext(),
          Worker(config.timeout_s, config.runtime, setting) as worker,
          Tracers(config.tracers, config.timeout_s) as tracers):
        worker.prepare(request)
        if GPU_LABEL in labels:
            tracers.prepare(request.model_copy(update={"labels": (GPU_LABEL,)}))
        yield Workers(worker, tracers)


def measurer(config: CollectorConfig, target: Target, machine_uuid: str, source: MetricSource, workers: Workers,
             workspace: Workspace) -> Measurer[Item]:
    """The measurer of blocks of kernels and models on the target's device. Raises UserError as `open_bench` does."""
    device = target.flavour.device

    def time_units(items: Sequence[Item], level: float) -> list[Measurement]:
        return KernelUnits(config, target, workers, level).time(items)

    start = partial(started, device=device, workspace=workspace, settle_s=config.stress.settle_s,
                    environment=config.gpu_sharing(device).co_runner_environment(), workers=workers.processes)
    return Measurer(open_bench(config, device, machine_uuid, source, workers.worker), time_units, start)
