"""Times kernels and models under a runtime: the collector's units of measurement, and the processes that measure them.

The tracers are separate from the worker, which times whole runs: once CUPTI has traced a process, it launches kernels more
slowly. All start before there is anything to measure: a GPU's process takes seconds to load CUDA, torch and CUPTI, and
meanwhile the caller can look for work.
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
from hase.benchmark.collecting.work import CARRIER_BYTES, Item, KernelItem, ModelItem, carriers, energy_batches, of_like_work
from hase.benchmark.load.mps import gpu_shared
from hase.benchmark.load.stress import Stress
from hase.benchmark.measuring.actors import Measurer, Start, started
from hase.benchmark.measuring.bench import Bench, Steadiness, busy_share
from hase.benchmark.measuring.pending import chunks
from hase.benchmark.measuring.run_times import Effort
from hase.benchmark.metrics.source import MetricSource
from hase.records.backgrounds import Background
from hase.records.measurement import ENERGY, GPU_LABEL, IN_MODEL_LABELS, KERNELS, Measurement, Place, Status, now
from hase.records.probe_reading import ProbeReading
from hase.runtimes import runtime_named
from hase.runtimes.protocol import Reply, Request, Setting, Worker
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target
from hase.utils.locks import measuring
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.temporary import temporary_folder
from hase.utils.worker_process import WorkerFailed

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
        """The largest memory of one carrier's kernels, or of all that the tracers prepare at a time."""
        return self.config.carrier_mib << 20 if self.config.carrier_mib else CARRIER_BYTES[self.device]

    @property
    def variants(self) -> tuple[str, ...]:
        return () if self.level else self.config.variants_on(self.device)

    def time(self, items: Sequence[Item]) -> list[Measurement]:
        """Every label of some kernels and models."""
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
            measurements += [m for alike in of_like_work(sound) for group in carriers(alike, self.carrier_bytes)
                             for m in self.time_carrier(group, self.in_model_labels, self.workers.worker)]
        if GPU_LABEL in self.labels:
            measurements += self.trace_kernels(sound)
        return with_inputs(measurements, items)

    def time_alone(self, item: KernelItem) -> list[Measurement]:
        """Label `run`: a kernel in a session of its own."""
        reply, status = ask(self.workers.worker, Request(
            do="alone", device=self.device, paths=(str(item.path),), effort=self.config.kernel.effort(),
            provider_options=self.target.provider_options))
        return measurements_of(reply, status, "kernel", item.id, "run", "alone", "alone")

    def time_carrier(self, items: Sequence[KernelItem], labels: tuple[str, ...], worker: Worker) -> list[Measurement]:
        """Some labels of a group of kernels, in a carrier. A group that fails is halved until the kernel at fault is alone."""
        reply, status = ask(worker, Request(
            do="carrier", device=self.device, paths=tuple(str(item.path) for item in items), labels=labels,
            effort=self.config.kernel.effort(), provider_options=self.target.provider_options,
            turns="" if worker is self.workers.worker else self.workers.tracers.turns))
        if status == "interrupted":  # by no kernel's fault
            return [m for item in items
                    for m in measurements_of(reply, status, "kernel", item.id, labels[0], "carrier", "carrier")]
        if status != "ok" and len(items) > 1:
            half = len(items) // 2
            return self.time_carrier(items[:half], labels, worker) + self.time_carrier(items[half:], labels, worker)
        return measurements_of(reply, status, "kernel", items[0].id, labels[0], "carrier", "carrier")

    def trace_kernels(self, items: Sequence[KernelItem]) -> list[Measurement]:
        """Label `gpu` of some kernels, in carriers that the tracers share."""
        tracers = self.workers.tracers
        share = -(-len(items) // tracers.count)
        groups = [group for part in chunks(items, max(share, 1))
                  for group in carriers(part, self.carrier_bytes / tracers.count)]
        tasks = [partial(self.time_carrier, group, (GPU_LABEL,)) for group in groups]
        return [m for part in tracers.each(tasks) for m in part]

    def measure_energy(self, items: Sequence[KernelItem]) -> list[Measurement]:
        """Label `energy` of a batch of kernels."""
        reply, status = ask(self.workers.worker, Request(
            do="kernels_energy", device=self.device, paths=tuple(str(item.path) for item in items),
            effort=self.config.kernel.effort(), provider_options=self.target.provider_options, energy_s=self.config.energy_s))
        return measurements_of(reply, status, KERNELS, f"{len(items)} from {items[0].id}", ENERGY, "alone", "alone")

    def time_model(self, item: ModelItem) -> list[Measurement]:
        """A whole model and, if the config says so, its kernels in it."""
        in_model = self.in_model_labels if item.labels and self.config.model_labels else ()
        request = self._of_model(item, "model", in_model).model_copy(update={
            "host": GPU_LABEL in self.labels and not self.level, "host_io": "host_io" in self.variants,
            "watch_host": "" if self.device != "cuda" else "all" if self.level else "quiet",
            "energy_s": 0.0 if self.level else self.config.energy_s})

        def of_model(label: str, reply: Reply, status: Status) -> list[Measurement]:
            return measurements_of(reply, status, "model", item.id, label, item.id, "alone")

        measurements = of_model("latency", *ask(self.workers.worker, request))
        if request.host and self.config.model_labels and measurements[0].status == "ok":
            on_gpu = request.model_copy(update={"do": "model_gpu"})
            [traced] = self.workers.tracers.each([lambda tracer: ask(tracer, on_gpu)])
            measurements += of_model(GPU_LABEL, *traced)
        if "cuda_graph" in self.variants and measurements[0].status == "ok":
            measurements += of_model("cuda_graph", *ask(self.workers.worker, request.model_copy(update={"do": "model_graph"})))
        return measurements

    def time_kernels_in(self, item: ModelItem) -> list[Measurement]:
        """The in-model labels of the requested kernels of a model; none if it can't be profiled."""
        reply, status = ask(self.workers.worker, self._of_model(item, "model_labels", self.in_model_labels))
        if status != "ok":
            log.warning("%s: its kernels can't be measured in it: %s (%s)", item.id, reply.error, status)
            return []
        return [m for m in reply.measurements if m.id in item.only]

    def _of_model(self, item: ModelItem, do: str, labels: tuple[str, ...]) -> Request:
        return Request.model_validate({
            "do": do, "device": self.device, "paths": (str(item.path),), "record": str(item.record_path),
            "dims": item.record.dims, "static": item.record.static, "labels": labels,
            "inputs": str(item.inputs.absolute()) if item.inputs else "", "effort": self.config.model.effort(),
            "provider_options": self.target.provider_options})


def with_inputs(measurements: Sequence[Measurement], items: Sequence[Item]) -> list[Measurement]:
    """The measurements of some kernels and models; those of kernels whose time depends on values, and of models with such a
    kernel, say what inputs they had."""
    models = [item for item in items if isinstance(item, ModelItem)]
    kernels = [*(item.kernel for item in items if not isinstance(item, ModelItem)),
               *(kernel for item in models for kernel in item.record.kernels.values())]
    by_values = {("kernel", kernel.id) for kernel in kernels if kernel.time_by_values} | {
        ("model", item.id) for item in models if any(kernel.time_by_values for kernel in item.record.kernels.values())}
    given = {item.id for item in models if item.inputs}
    return [m.model_copy(update={"inputs": "given" if m.context in given else "standardised"})
            if (m.subject, m.id) in by_values else m for m in measurements]


def ask(worker: Worker, request: Request) -> tuple[Reply, Status]:
    """A worker's reply and a status; a worker that fails is replaced at the next request."""
    started = now()
    try:
        reply = worker.ask(request)
    except WorkerFailed as error:
        return Reply(error=str(error), started=started, ended=now()), error.status
    return reply, "interrupted" if reply.interrupted else "failed" if reply.error else "ok"


def may_share_host(config: CollectorConfig, device: str, items: Sequence[Item]) -> bool:
    """Whether a block may be measured while another GPU of its host is, too: only if nothing but the GPU's own times of kernels
    is taken in it (docs/cluster.md says why). Everything else depends on how fast the host is."""
    return (device == "cuda" and config.labels_on(device) == (GPU_LABEL,) and not config.energy_of_kernels
            and all(isinstance(item, KernelItem) for item in items))


def measurements_of(reply: Reply, status: Status, subject: str, name: str, label: str, context: str,
                    place: Place) -> list[Measurement]:
    """The measurements of a reply; for a failure, a single measurement that says so, made from the other arguments."""
    if status == "ok":
        return list(reply.measurements)
    log.warning("%s: %s (%s)", name, reply.error, status)
    return [Measurement(subject=subject, id=name, label=label, context=context, place=place, status=status, error=reply.error,
                        started=reply.started, ended=reply.ended)]


def open_bench(config: CollectorConfig, device: str, machine_uuid: str, source: MetricSource, workers: Workers) -> Bench:
    """What the collector measures with on `cpu` or `cuda`.

    Raises:
        UserError: the config's windows are too short for the source.
    """
    return Bench(device, machine_uuid, partial(_canary_ms, workers.worker, device), source, config.window_s,
                 partial(_probe, config, device, workers.worker),
                 busy=busy_share if device == "cpu" else None, steadiness=steadiness_of(config))


def steadiness_of(config: CollectorConfig) -> Steadiness:
    """How steady the config wants a machine to be."""
    return Steadiness(drift=config.canary_drift, attempts=config.attempts, attempts_under_load=config.attempts_under_load,
                      patience_s=config.patience_s)


def _canary_ms(worker: Worker, device: str, loaded: bool) -> tuple[float, ...]:
    try:
        return worker.canary_ms(device, loaded)
    except WorkerFailed as error:
        raise UserError(f"the canary, a fixed piece of work, does not run: {error}") from None


def _probe(config: CollectorConfig, device: str, worker: Worker) -> ProbeReading | None:
    """How long tiny work waits for other work on the GPU. None on a CPU, under a runtime that can't probe, if the config turns
    the probe off, and if only idle levels are measured, so that there is nothing to compare.

    Raises:
        UserError: the probe itself does not run.
    """
    can_probe = device == "cuda" and runtime_named(config.runtime).probes_sharing
    if not can_probe or not config.probe_s or not any(config.levels):
        return None
    reply, status = ask(worker, Request(do="sharing_probe", device=device, effort=Effort(budget_s=config.probe_s)))
    if status != "ok":
        raise UserError(f"the sharing probe does not run: {reply.error}")
    return reply.probe


R = TypeVar("R")


class Tracers:
    """`count` workers. Use as a context manager: they end with the block.

    Attributes:
        turns: the folder of their locks; "" for a single worker.
    """

    def __init__(self, count: int, timeout_s: float) -> None:
        self.count, self._timeout_s = count, timeout_s
        self._stack = ExitStack()
        self._workers: list[Worker] = []
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self.turns = ""

    def __enter__(self) -> Tracers:
        if self.count > 1:
            self.turns = str(self._stack.enter_context(temporary_folder()))
        for _ in range(self.count):
            self._workers.append(self._stack.enter_context(Worker(self._timeout_s)))
            self._idle.put(self._workers[-1])
        # These threads stay alive: a process ends with the thread that started it.
        self._threads = self._stack.enter_context(ThreadPoolExecutor(self.count))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def prepare(self, request: Request) -> None:
        """Starts every process, as a worker's `prepare` does."""
        for worker in self._workers:
            worker.prepare(request)

    def wait(self) -> None:
        """Waits until all are ready."""
        for worker in self._workers:
            worker.wait()

    def each(self, tasks: Sequence[Callable[[Worker], R]]) -> list[R]:
        """The results of the tasks, in order. As many run at a time as there are workers; each has a worker to itself."""
        def with_worker(task: Callable[[Worker], R]) -> R:
            worker = self._idle.get()
            try:
                return task(worker)
            finally:
                self._idle.put(worker)

        return list(self._threads.map(with_worker, tasks))


class Workers(NamedTuple):
    """The processes that measure: the worker takes every label but `gpu`, which is for the tracers."""

    worker: Worker
    tracers: Tracers

    def wait(self) -> None:
        """Waits until all processes are ready, because one that still loads would disturb what another measures."""
        self.worker.wait()
        self.tracers.wait()


@contextmanager
def start_workers(config: CollectorConfig, device: str, labels: Sequence[str],
                  setting: Setting | None = None) -> Iterator[Workers]:
    """Starts the processes for some labels on `cpu` or `cuda`, which share it as the config says; they end with the block.
    `setting` is that of the worker, for a runtime that has such.

    Raises:
        UserError: another process measures on this device, or it can't be shared in this way.
    """
    request = Request(do="prepare", device=device, effort=Effort())
    sharing = config.gpu_sharing(device)
    with (measuring(device), gpu_shared(sharing) if device == "cuda" else nullcontext(),
          Worker(config.timeout_s, config.runtime, setting) as worker,
          Tracers(config.tracers, config.timeout_s) as tracers):
        worker.prepare(request)
        if GPU_LABEL in labels:
            tracers.prepare(request.model_copy(update={"labels": (GPU_LABEL,)}))
        yield Workers(worker, tracers)


def start_loads(config: CollectorConfig, device: str, workspace: Workspace, workers: Workers) -> Start:
    """A function that starts a load of the config as soon as all processes that measure are ready."""
    @contextmanager
    def start(level: float, background: Background | None) -> Iterator[Stress]:
        workers.wait()
        with started(level, background, device, workspace, config.stress.settle_s,
                     config.gpu_sharing(device).co_runner_environment()) as stressor:
            yield stressor

    return start


def measurer(config: CollectorConfig, target: Target, machine_uuid: str, source: MetricSource, workers: Workers,
             workspace: Workspace) -> Measurer[Item]:
    """What measures blocks of kernels and models on the target's device of this machine.

    Raises:
        UserError: the config's windows are too short for the source.
    """
    device = target.flavour.device

    def time_units(items: Sequence[Item], level: float) -> list[Measurement]:
        return KernelUnits(config, target, workers, level).time(items)

    return Measurer(open_bench(config, device, machine_uuid, source, workers), time_units,
                    start_loads(config, device, workspace, workers))
