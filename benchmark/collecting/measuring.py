"""Measures blocks of kernels and models."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmark.collecting.config import CollectorConfig
from benchmark.collecting.crew import Crew
from benchmark.collecting.planning import chunks
from benchmark.collecting.work import KernelItem, ModelItem, carriers
from benchmark.load.probe_reading import ProbeReading
from benchmark.load.stress import Stress
from benchmark.measuring.canary import IDLE_EFFORT, LOADED_EFFORT, wait_until_steady
from benchmark.measuring.effort import Effort
from benchmark.measuring.worker_client import Worker, WorkerFailed
from benchmark.metrics.source import MetricSource, Window, values
from benchmark.records.blocks import Block
from benchmark.records.labels import BELOW_BEST, GPU_LABEL, IN_MODEL_LABELS
from benchmark.records.measurement import Measurement, Place, Status, now
from benchmark.runtimes.protocol import Reply, Request
from utils.errors import UserError
from utils.fingerprint import Target
from utils.logger import get_logger

log = get_logger("collector")


@dataclass
class Collector:
    """Measures blocks of work on one target."""

    config: CollectorConfig
    target: Target
    folder: Path
    crew: Crew
    source: MetricSource
    uuid: str
    level: float = 0.0
    background_name: str = ""
    best_canary_ms: float = 0.0

    @property
    def provider(self) -> str:
        return self.target.flavour.device

    def canary_ms(self) -> float:
        """The canary's time now: the median of a few runs; under load the mean of more, since the load comes in bursts.

        Raises:
            UserError: not even the canary runs.
        """
        try:
            reply = self.crew.worker.ask(Request(do="canary", device=self.provider,
                                                 effort=LOADED_EFFORT if self.level else IDLE_EFFORT))
        except WorkerFailed as error:
            raise UserError(f"the canary, a fixed piece of work, does not run: {error}") from None
        samples = reply.measurements[0].samples_ms
        if self.level:
            return float(np.mean(samples))
        found = float(np.median(samples))
        self.best_canary_ms = min(found, self.best_canary_ms or found)
        return found

    def steady_canary_ms(self) -> float:
        """The canary's time, at an idle level after waiting for the machine to be as fast as it was at its best."""
        if self.level:
            return self.canary_ms()
        return wait_until_steady(self.canary_ms, self.best_canary_ms, self.config.canary_drift + BELOW_BEST,
                                 self.config.patience_s)

    @property
    def labels(self) -> tuple[str, ...]:
        return self.config.labels_on(self.provider)

    @property
    def in_model_labels(self) -> tuple[str, ...]:
        return tuple(label for label in self.labels if label in IN_MODEL_LABELS)

    @property
    def variants(self) -> tuple[str, ...]:
        return () if self.level else self.config.variants_on(self.provider)

    def ask(self, request: Request, worker: Worker | None = None) -> tuple[Reply, Status]:
        """A worker's reply and a status; a worker that fails is replaced at the next request."""
        started = now()
        try:
            reply = (worker or self.crew.worker).ask(request)
        except WorkerFailed as error:
            return Reply(error=str(error), started=started, ended=now()), error.status
        return reply, "failed" if reply.error else "ok"

    def time_alone(self, item: KernelItem) -> list[Measurement]:
        reply, status = self.ask(Request(do="alone", device=self.provider, paths=(str(item.path),),
                                         effort=self.config.kernel.effort(), provider_options=self.target.provider_options))
        return measurements_of(reply, status, "kernel", item.kernel.id, "run", "alone", "alone")

    def time_carrier(self, items: Sequence[KernelItem], labels: tuple[str, ...], worker: Worker) -> list[Measurement]:
        """Some labels of a group, in a carrier. A group that fails is halved until the one kernel at fault is alone."""
        reply, status = self.ask(Request(
            do="carrier", device=self.provider, paths=tuple(str(item.path) for item in items), labels=labels,
            effort=self.config.kernel.effort(), provider_options=self.target.provider_options,
            turns="" if worker is self.crew.worker else self.crew.tracers.turns), worker)
        if status != "ok" and len(items) > 1:
            half = len(items) // 2
            return self.time_carrier(items[:half], labels, worker) + self.time_carrier(items[half:], labels, worker)
        return measurements_of(reply, status, "kernel", items[0].kernel.id, labels[0], "carrier", "carrier")

    def time_model(self, item: ModelItem) -> list[Measurement]:
        in_model = self.in_model_labels if item.labels and self.config.model_labels else ()
        request = Request(
            do="model", device=self.provider, paths=(str(item.path),), record=str(item.record_path),
            dims=item.record.dims, static=item.record.static, labels=in_model, effort=self.config.model.effort(),
            host=GPU_LABEL in self.labels and not self.level, host_io="host_io" in self.variants,
            watch_host=self.provider == "cuda" and not self.level, provider_options=self.target.provider_options)
        name = item.record.model

        def of_model(label: str, reply: Reply, status: Status) -> list[Measurement]:
            return measurements_of(reply, status, "model", name, label, name, "alone")

        found = of_model("latency", *self.ask(request))
        if request.host and self.config.model_labels and not self.level and found[0].status == "ok":
            on_gpu = request.model_copy(update={"do": "model_gpu"})
            [traced] = self.crew.tracers.each([lambda tracer: self.ask(on_gpu, tracer)])
            found += of_model(GPU_LABEL, *traced)
        if "cuda_graph" in self.variants and found[0].status == "ok":
            as_graph = request.model_copy(update={"do": "model_graph"})
            found += of_model("cuda_graph", *self.ask(as_graph))
        return found

    def time_kernels_in(self, item: ModelItem) -> list[Measurement]:
        """The in-model labels of those of a model's kernels that are asked for; none where it can't be profiled."""
        reply, status = self.ask(Request(
            do="model_labels", device=self.provider, paths=(str(item.path),), record=str(item.record_path),
            dims=item.record.dims, static=item.record.static, labels=self.in_model_labels, effort=self.config.model.effort(),
            provider_options=self.target.provider_options))
        if status != "ok":
            log.warning("%s: its kernels can't be measured in it: %s (%s)", item.record.model, reply.error, status)
            return []
        return [m for m in reply.measurements if m.id in item.only]

    def measure(self, kernels: Sequence[KernelItem], models: Sequence[ModelItem]) -> list[Measurement]:
        """Every label of some kernels and models."""
        found = [m for item in models for m in (self.time_kernels_in(item) if item.only else self.time_model(item))]
        if "run" in self.labels:
            found += [m for item in kernels for m in self.time_alone(item)]
        at_fault = {m.id for m in found if m.status != "ok"}
        sound = [item for item in kernels if item.kernel.id not in at_fault]
        if self.in_model_labels:
            found += [m for group in carriers(sound, self.provider)
                      for m in self.time_carrier(group, self.in_model_labels, self.crew.worker)]
        if GPU_LABEL in self.labels:
            found += self.trace_kernels(sound)
        return found

    def trace_kernels(self, items: Sequence[KernelItem]) -> list[Measurement]:
        """Label `gpu` of some kernels, in carriers that the tracers share out."""
        tracers = self.crew.tracers
        share = -(-len(items) // tracers.count)
        groups = [group for part in chunks(items, max(share, 1))
                  for group in carriers(part, self.provider, tracers.count)]
        tasks = [partial(self.time_carrier, group, (GPU_LABEL,)) for group in groups]
        return [m for part in tracers.each(tasks) for m in part]

    def probe(self) -> ProbeReading | None:
        """How long tiny work waits for what else runs; None on a CPU, where the config says so, and where it has no load to
        compare an idle device with.

        Raises:
            UserError: not even the probe runs.
        """
        if self.provider == "cpu" or not self.config.probe_s or not any(self.config.levels):
            return None
        reply, status = self.ask(Request(do="sharing_probe", device=self.provider,
                                         effort=Effort(budget_s=self.config.probe_s)))
        if status != "ok":
            raise UserError(f"the sharing probe does not run: {reply.error}")
        return reply.probe

    def close(self, window: Window) -> dict[str, float]:
        """The means over a window of runs; none where the runs were over too soon for the window to be valid."""
        if time.monotonic() - window.began_s < self.source.minimum_window_s:
            return {}
        return values(self.source.stop(window))

    def block(self, key: str, kernels: Sequence[KernelItem], models: Sequence[ModelItem],
              stressor: Stress) -> Block:
        """One block, measured until its canaries agree or the attempts are used up; the steadiest attempt is kept."""
        best: Block | None = None
        attempts = self.config.attempts_under_load if self.level else self.config.attempts
        for attempt in range(1, attempts + 1):
            background = values(self.source.window(self.config.window_s))
            probe = self.probe()
            before = self.steady_canary_ms()
            token = self.source.start()
            measurements = self.measure(kernels, models)
            during = self.close(token)
            made = Block(level=self.level, background_name=self.background_name, key=key, background=background, during=during,
                         canary_before_ms=before, canary_after_ms=self.canary_ms(),
                         canary_best_ms=0.0 if self.level else self.best_canary_ms, attempts=attempt,
                         stress=stressor.reached(), probe=probe, machine=self.uuid, measurements=tuple(measurements))
            if best is None or made.drift < best.drift:
                best = made
            if made.drift <= self.config.canary_drift:
                return made
            log.info("%s at %s: the machine was unsteady by %.0f %% (canary %.3f to %.3f ms)%s", key,
                     load_in_words(*made.load), 100 * made.drift, before, made.canary_after_ms,
                     "; measuring again" if attempt < attempts else "")
        if best is None:
            raise RuntimeError("a block was given no attempt")
        return best.model_copy(update={"attempts": attempts})


def measurements_of(reply: Reply, status: Status, subject: str, name: str, label: str, context: str,
                    place: Place) -> list[Measurement]:
    """The measurements of a reply; of one that failed, a single measurement that says so, with the other arguments."""
    if status == "ok":
        return list(reply.measurements)
    log.warning("%s: %s (%s)", name, reply.error, status)
    return [Measurement(subject=subject, id=name, label=label, context=context, place=place, status=status, error=reply.error,
                        started=reply.started, ended=reply.ended)]


def load_in_words(level: float, background_name: str) -> str:
    """`level 0`, `level 0.3, compute`."""
    return f"level {level:g}" + (f", {background_name}" if background_name else "")


def best_canary_ms(blocks: Iterable[Block]) -> float:
    """The shortest the canary took in some blocks; 0 where there are none."""
    return min((min(block.canary_before_ms, block.canary_after_ms) for block in blocks), default=0.0)
