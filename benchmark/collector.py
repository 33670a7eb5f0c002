"""Phase 4.3: the dataset: every kernel and every model, at every level and kind of load, with the device's metrics.

Reads kernel_model/kernel_onnx/<flavour> (each kernel is timed alone, and among others in a carrier), the models' records
and files (each model is timed whole and its kernels in it), and benchmark/config.yaml. Writes
benchmark/dataset/<target>/: measurements.jsonl as it goes, and kernel_latency.csv and model_latency.csv from it.

Levels are the outermost loop, and backgrounds (what the stressor is busy with) the next. Work goes in blocks: a window of
metrics with the stressor alone, a canary, the block's runs with a second window around them, the canary again; a block whose
canaries part is measured again. A block is written as one line, so a run that is killed resumes with no row lost or doubled:
start the same command again.

Several machines of one target may share the work (`each_machine: false`): what one measured, the others leave out, but for
the `ties`, a few of its kernels that they measure too. benchmark/machine_ties.py says what these tell.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmark import dataset
from benchmark.backgrounds import COMPUTE
from benchmark.canary import IDLE_EFFORT, LOADED_EFFORT, wait_until_steady
from benchmark.collector_config import CollectorConfig
from benchmark.crew import Crew, start_crew
from benchmark.dataset import Block, DatasetHeader, DatasetKernel, Measurement
from benchmark.dataset_writer import DatasetWriter
from benchmark.metrics import MetricSource, Window, values
from benchmark.ort_kernel_runner import now
from benchmark.probe_reading import ProbeReading
from benchmark.protocol import Effort, Reply, Request
from benchmark.stressor import Stress, stress
from benchmark.worker_client import Worker, WorkerFailed
from kernel_model.carrier import carrier_bytes
from kernel_model.kernel_builder import built_kernel
from kernel_model.kernel_sampler import read_seeds
from ort_analysis.records import (
    Kernel,
    ModelRecord,
    family,
    index_path,
    load_index,
    load_records,
    record_path,
)
from utils import cli
from utils.config import load_config
from utils.errors import UserError
from utils.fingerprint import Target, local_target, machine, resolve_provider
from utils.locks import sole_writer
from utils.logger import get_logger
from utils.paths import ROOT, Workspace, model_files

log = get_logger("collector")
CARRIER_BYTES = {"cpu": 512 << 20, "cuda": 16 << 30}  # memory that the kernels of one carrier may take
CARRIER_WEIGHTS = 1 << 30  # bytes of weights of one carrier: they lie in its file, which may not reach 2 GiB
TABLES_EVERY_S = 30.0  # at least; and never more than a tenth of the time goes into writing them
# Where somebody waits for a few kernels; their blocks stand between canaries as all do, and are measured again if these part.
QUICK_WINDOW_S = 0.2  # of metrics: training takes their median over all idle blocks
QUICK_BLOCK = 64  # kernels: those of most models
QUICK_PATIENCE_S = 3.0
EXAMPLES = """
python benchmark/collector.py
python benchmark/collector.py --config my.yaml --workspace out/demo
"""


@dataclass(frozen=True)
class KernelItem:
    """A built kernel to measure."""

    path: Path
    kernel: Kernel


@dataclass(frozen=True)
class ModelItem:
    """A model to measure, and whether its kernels are measured in it; with `only`, nothing but these kernels, by id."""

    path: Path
    record_path: Path
    record: ModelRecord
    labels: bool
    only: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Work:
    """Everything to measure for one flavour."""

    kernels: tuple[KernelItem, ...]
    models: tuple[ModelItem, ...]
    described: tuple[DatasetKernel, ...]


Planned = tuple[str, list[KernelItem], list[ModelItem]]  # a block to be measured: its name, kernels, models


def find_work(workspace: Workspace, target: Target, held_out: Sequence[str]) -> Work:
    """The kernels and models of the target's flavour. Kernels that only held-out families hold are left out.

    Raises:
        UserError: no kernels were built, or a record's model file is gone.
    """
    folder = workspace.kernel_onnx / target.flavour.name
    index = load_index(index_path(workspace, target.flavour))
    models_of = {entry.kernel.id: entry.models for of_type in index.kernels.values() for entry in of_type.values()}
    seeds = read_seeds(folder)
    fitted = {name: [model for model in models if family(model) not in held_out] for name, models in models_of.items()}
    described = [DatasetKernel(kernel=entry.kernel, models=tuple(fitted[name])) for of_type in index.kernels.values()
                 for name, entry in of_type.items() if fitted[name]]
    kernels = {kernel.id: kernel for kernel in index.all_kernels()}
    items = []
    for path in sorted(folder.glob("*.onnx")):
        models = fitted.get(path.stem, [])
        if path.stem in seeds and not models:
            families = [name for name in seeds[path.stem] if name not in held_out]
            if seeds[path.stem] and not families:
                continue
            kernels[path.stem] = built_kernel(path)
            described.append(DatasetKernel(kernel=kernels[path.stem], models=dataset.sampled_from(families)))
        elif not models:
            continue
        items.append(KernelItem(path, kernels[path.stem]))
    if not items:
        raise UserError(f"{folder}: no kernels built for {target.flavour.name}; build them with: "
                        "python kernel_model/kernel_builder.py")
    by_stem = {path.stem: path for path in model_files([workspace.models])}
    models_found = []
    for record in load_records(workspace, target.flavour):
        model_path = by_stem.get(record.model.partition("@")[0])
        if model_path is None:
            raise UserError(f"{workspace.models}: the model of record {record.model} is gone; export it again with "
                            "model_zoo/torchvision_exporter.py, or remove the record")
        models_found.append(ModelItem(model_path, record_path(workspace, target.flavour, record.model), record,
                                      labels=family(record.model) not in held_out))
    return Work(tuple(items), tuple(models_found), tuple(described))


def carriers(items: Sequence[KernelItem], execution_provider: str, side_by_side: int = 1) -> Iterator[list[KernelItem]]:
    """Groups of kernels for one carrier each: one operator-set version a domain, and so little memory that `side_by_side` of
    them fit."""
    group: list[KernelItem] = []
    used, weights, opsets = 0, 0, dict[str, int]()
    for item in items:
        kernel = item.kernel
        if group and (used + carrier_bytes(kernel) > CARRIER_BYTES[execution_provider] / side_by_side
                      or weights + kernel.weight_bytes > CARRIER_WEIGHTS
                      or opsets.get(kernel.domain, kernel.opset) != kernel.opset):
            yield group
            group, used, weights, opsets = [], 0, 0, {}
        group.append(item)
        used += carrier_bytes(kernel)
        weights += kernel.weight_bytes
        opsets[kernel.domain] = kernel.opset
    if group:
        yield group


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
        return self.target.flavour.execution_provider

    def canary_ms(self) -> float:
        """The canary's time now: the median of a few runs; under load the mean of more, since the load comes in bursts.

        Raises:
            UserError: not even the canary runs.
        """
        try:
            reply = self.crew.worker.ask(Request(do="canary", execution_provider=self.provider,
                                                 effort=LOADED_EFFORT if self.level else IDLE_EFFORT))
        except WorkerFailed as error:
            raise UserError(f"the canary, a fixed piece of work, does not run: {error}") from None
        samples = reply.samples[0].samples_ms
        if self.level:
            return float(np.mean(samples))
        found = float(np.median(samples))
        self.best_canary_ms = min(found, self.best_canary_ms or found)
        return found

    def steady_canary_ms(self) -> float:
        """The canary's time, at an idle level after waiting for the machine to be as fast as it was at its best."""
        if self.level:
            return self.canary_ms()
        return wait_until_steady(self.canary_ms, self.best_canary_ms, self.config.canary_drift + dataset.BELOW_BEST,
                                 self.config.patience_s)

    @property
    def labels(self) -> tuple[str, ...]:
        return self.config.labels_on(self.provider)

    @property
    def in_model_labels(self) -> tuple[str, ...]:
        return tuple(label for label in self.labels if label in dataset.IN_MODEL_LABELS)

    @property
    def variants(self) -> tuple[str, ...]:
        return () if self.level else self.config.variants_on(self.provider)

    def ask(self, request: Request, worker: Worker | None = None) -> tuple[Reply, str]:
        """A worker's reply and a status; a worker that fails is replaced at the next request."""
        started = now()
        try:
            reply = (worker or self.crew.worker).ask(request)
        except WorkerFailed as error:
            return Reply(error=str(error), started=started, ended=now()), error.status
        return reply, "failed" if reply.error else "ok"

    def time_alone(self, item: KernelItem) -> list[Measurement]:
        reply, status = self.ask(Request(do="alone", execution_provider=self.provider, paths=(str(item.path),),
                                         effort=self.config.kernel.effort(), provider_options=self.target.provider_options))
        return self._measurements("kernel", item.kernel.id, "run", "alone", reply, status)

    def time_carrier(self, items: Sequence[KernelItem], labels: tuple[str, ...], worker: Worker) -> list[Measurement]:
        """Some labels of a group, in a carrier. A group that fails is halved until the one kernel at fault is alone."""
        reply, status = self.ask(Request(
            do="carrier", execution_provider=self.provider, paths=tuple(str(item.path) for item in items), labels=labels,
            effort=self.config.kernel.effort(), provider_options=self.target.provider_options,
            turns="" if worker is self.crew.worker else self.crew.tracers.turns), worker)
        if status != "ok" and len(items) > 1:
            half = len(items) // 2
            return self.time_carrier(items[:half], labels, worker) + self.time_carrier(items[half:], labels, worker)
        return self._measurements("kernel", items[0].kernel.id, labels[0], "carrier", reply, status)

    def time_model(self, item: ModelItem) -> list[Measurement]:
        in_model = self.in_model_labels if item.labels and self.config.model_labels else ()
        request = Request(
            do="model", execution_provider=self.provider, paths=(str(item.path),), record=str(item.record_path),
            dims=item.record.dims, static=item.record.static, labels=in_model, effort=self.config.model.effort(),
            host=dataset.GPU_LABEL in self.labels and not self.level, host_io="host_io" in self.variants,
            watch_host=self.provider == "cuda" and not self.level, provider_options=self.target.provider_options)
        name = item.record.model
        found = self._measurements("model", name, "latency", name, *self.ask(request))
        if request.host and self.config.model_labels and not self.level and found[0].status == "ok":
            on_gpu = request.model_copy(update={"do": "model_gpu"})
            [traced] = self.crew.tracers.each([lambda tracer: self.ask(on_gpu, tracer)])
            found += self._measurements("model", name, dataset.GPU_LABEL, name, *traced)
        if "cuda_graph" in self.variants and found[0].status == "ok":
            as_graph = request.model_copy(update={"do": "model_graph"})
            found += self._measurements("model", name, "cuda_graph", name, *self.ask(as_graph))
        return found

    def time_kernels_in(self, item: ModelItem) -> list[Measurement]:
        """The in-model labels of those of a model's kernels that are asked for; none where it can't be profiled."""
        reply, status = self.ask(Request(
            do="model_labels", execution_provider=self.provider, paths=(str(item.path),), record=str(item.record_path),
            dims=item.record.dims, static=item.record.static, labels=self.in_model_labels, effort=self.config.model.effort(),
            provider_options=self.target.provider_options))
        if status != "ok":
            log.warning("%s: its kernels can't be measured in it: %s (%s)", item.record.model, reply.error, status)
            return []
        found = self._measurements("kernel", item.record.model, "", item.record.model, reply, status)
        return [m for m in found if m.id in item.only]

    @staticmethod
    def _measurements(subject: str, name: str, label: str, context: str, reply: Reply, status: str) -> list[Measurement]:
        """A reply as measurements; one that failed as a single measurement that says so."""
        if status != "ok":
            log.warning("%s: %s (%s)", name, reply.error, status)
            return [Measurement(subject=subject, id=name, label=label, context=context, status=status, error=reply.error,
                                started=reply.started, ended=reply.ended)]
        return [Measurement(subject="model" if subject == "model" and found.id == name else "kernel", id=found.id,
                            label=found.label, context=context, samples_ms=found.samples_ms, launches=found.launches,
                            cuda_kernels=found.cuda_kernels, disturbance=found.disturbance, probe_us=found.probe_us,
                            started=reply.started, ended=reply.ended)
                for found in reply.samples]

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
        if dataset.GPU_LABEL in self.labels:
            found += self.trace_kernels(sound)
        return found

    def trace_kernels(self, items: Sequence[KernelItem]) -> list[Measurement]:
        """Label `gpu` of some kernels, in carriers that the tracers share out."""
        tracers = self.crew.tracers
        share = -(-len(items) // tracers.count)
        groups = [group for part in chunks(items, max(share, 1))
                  for group in carriers(part, self.provider, tracers.count)]
        tasks = [partial(self.time_carrier, group, (dataset.GPU_LABEL,)) for group in groups]
        return [m for part in tracers.each(tasks) for m in part]

    def probe(self) -> ProbeReading | None:
        """How long tiny work waits for what else runs; None on a CPU, where the config says so, and where it has no load to
        compare an idle device with.

        Raises:
            UserError: not even the probe runs.
        """
        if self.provider == "cpu" or not self.config.probe_s or not any(self.config.levels):
            return None
        reply, status = self.ask(Request(do="sharing_probe", execution_provider=self.provider,
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


def load_in_words(level: float, background_name: str) -> str:
    """`level 0`, `level 0.3, compute`."""
    return f"level {level:g}" + (f", {background_name}" if background_name else "")


def chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(items), size):
        yield items[begin:begin + size]


def best_canary_ms(blocks: Iterable[Block]) -> float:
    """The shortest the canary took in some blocks; 0 where there are none."""
    return min((min(block.canary_before_ms, block.canary_after_ms) for block in blocks), default=0.0)


def sessions_missing(models: Sequence[ModelItem], there: Iterable[Block], wanted: int, variants: Sequence[str]) -> list[int]:
    """For each model, how many of the `wanted` sessions are still to be opened: none for one that failed; otherwise those count
    that hold all variants and tell of the model and not of its host."""
    failed, counted = set[str](), Counter[str]()
    for session in dataset.model_sessions(there):
        if "latency" in session.labels and session.labels["latency"].status != "ok":
            failed.add(session.model)
        counted[session.model] += set(variants) <= set(session.labels) and session.tells
    return [0 if item.record.model in failed else max(wanted - counted[item.record.model], 0) for item in models]


def plan(work: Work, there: Iterable[Block], block_kernels: int, first_label: str = "run",
         block_models: int = 1, variants: Sequence[str] = (),
         sessions: int = 1) -> list[Planned]:
    """The blocks still to be measured where `there` are measured: a name, kernels, models.

    A kernel is measured once it has label `first_label` (or failed to get it) from a block of kernels, a model once
    `sessions_missing` says so. A model's second session comes after all models' first, and so on.
    """
    there = list(there)
    timed = {m.id for block in there for m in block.measurements
             if m.label == first_label and m.context in ("alone", "carrier")}
    kernels = [item for item in work.kernels if item.kernel.id not in timed]
    shuffled = [kernels[i] for i in np.random.default_rng(0).permutation(len(kernels))]  # no type at one time of day only
    of_kernels: list[Planned] = [
        (f"{len(chunk)} kernels from {chunk[0].kernel.type}", list(chunk), []) for chunk in chunks(shuffled, block_kernels)]
    missing = sessions_missing(work.models, there, sessions, variants)
    planned: list[Planned] = []
    for turn in range(max(missing, default=0) or 1):
        models = [item for item, left in zip(work.models, missing, strict=True) if left > turn]
        of_turn: list[Planned] = [
            (cli.first_of([item.record.model for item in chunk]), [], list(chunk))
            for chunk in chunks(models, block_models)]
        of_turn += of_kernels if not turn else []
        planned += [of_turn[i] for i in np.random.default_rng(turn + 1).permutation(len(of_turn))]  # models and kernels in turn
    return planned


def choose_ties(kernels: Sequence[KernelItem], there: Iterable[Block], uuid: str, first_label: str,
                count: int) -> list[KernelItem]:
    """The kernels to measure on machine `uuid` although others have, so that `count` of its kernels tie it to them.

    Those that most machines have measured come first, so that the same ones tie all; then the order is that of their ids'
    hashes: chosen whenever, they are the same, and of no type above others. One that failed here is not tried again.
    """
    machines: dict[str, set[str]] = defaultdict(set)
    for block in there:
        for m in block.measurements:
            if m.label == first_label and m.where != "in_model" and (m.status == "ok" or block.machine == uuid):
                machines[m.id].add(block.machine)
    elsewhere = [item for item in kernels if machines[item.kernel.id] - {uuid}]
    new = [item for item in elsewhere if uuid not in machines[item.kernel.id]]
    new.sort(key=lambda item: (-len(machines[item.kernel.id]), hashlib.sha256(item.kernel.id.encode()).digest()))
    return new[:max(0, count - (len(elsewhere) - len(new)))]


def collect(workspace: Workspace, config: CollectorConfig) -> dict[str, Any]:
    """Measures all that is still missing and returns the totals. A dataset that is there keeps its labels, where `config` names
    none.

    Raises:
        UserError: nothing to measure, a metric that is not there, a dataset of another target, or one that another process
            writes, or another process measures on this device.
    """
    provider = resolve_provider(config.device)
    if config.device == "auto" and provider == "cpu":
        log.info("no NVIDIA GPU here: measuring the CPU")
    target = local_target(provider)
    if not config.labels and dataset.header_path(workspace.dataset(target.name)).exists():
        config = config.model_copy(update={"labels": dataset.load_header(workspace.dataset(target.name)).labels})
    work = find_work(workspace, target, config.held_out)
    with (sole_writer(workspace.dataset(target.name)),
          start_crew(config, provider, config.labels_on(provider)) as crew):
        return collect_work(workspace, config, target, work, crew)


def collect_kernels(workspace: Workspace, config: CollectorConfig, kernels: Sequence[DatasetKernel],
                    crew: Crew) -> dict[str, Any]:
    """Measures those of some kernels that no machine of this target has, idle, and returns the totals.

    Somebody waits for them: windows and patience are no longer, and blocks no smaller, than QUICK_… says.

    A dataset that is there keeps its labels, all of which the kernels get, its metrics and its held-out families; where there
    is none, one begins as `config` says.

    Args:
        workspace: whose dataset; it holds the built kernels.
        config: its labels are those that are needed.
        kernels: with the models that hold them; what the dataset says of their owners already stays.
        crew: for the device and the labels of `config`.

    Raises:
        UserError: a metric that is not there, or a dataset without the labels that are needed, or one that another process
            writes.
    """
    target = local_target(resolve_provider(config.device))
    with sole_writer(workspace.dataset(target.name)):
        return collect_work(workspace, *_quick(workspace, config, target, kernels), crew)


def collect_in_models(workspace: Workspace, config: CollectorConfig, models: Sequence[ModelItem],
                      kernels: Sequence[DatasetKernel], crew: Crew) -> dict[str, Any]:
    """Measures kernels in models that hold them, idle, as ONNX Runtime's profile tells them apart: in the order and with the
    caches that they really have. Nothing is noted down of the models themselves.

    Args:
        models: with the kernels that are measured in each (`only`).
        kernels: these, with the models that hold them.

    The other arguments, the totals and the errors are those of `collect_kernels`.
    """
    target = local_target(resolve_provider(config.device))
    with sole_writer(workspace.dataset(target.name)):
        config, target, work = _quick(workspace, config, target, kernels)
        return collect_work(workspace, config, target, Work((), (), work.described), crew,
                            [(item.record.model, [], [item]) for item in models])


def _quick(workspace: Workspace, config: CollectorConfig, target: Target,
           kernels: Sequence[DatasetKernel]) -> tuple[CollectorConfig, Target, Work]:
    """What `collect_kernels` measures of `target`, and how.

    Raises:
        UserError: the dataset was collected without the labels that are needed.
    """
    folder, built = workspace.dataset(target.name), workspace.kernel_onnx / target.flavour.name
    config = config.model_copy(update={
        "levels": (0.0,), "variants": (), "each_machine": False, "ties": 0, "window_s": min(config.window_s, QUICK_WINDOW_S),
        "block_kernels": max(config.block_kernels, QUICK_BLOCK), "patience_s": min(config.patience_s, QUICK_PATIENCE_S)})
    if dataset.header_path(folder).exists():
        there = dataset.load_header(folder)
        if absent := [label for label in config.labels if label not in there.labels]:
            raise UserError(f"{folder}: this dataset was collected without label {', '.join(absent)} (it has "
                            f"{', '.join(there.labels)}); move it away, or use another --workspace")
        config = config.model_copy(update={"labels": there.labels, "metrics": there.metrics, "held_out": there.held_out})
    owners = {entry.kernel.id: entry.models for entry in dataset.read_kernels(folder, {entry.kernel.id for entry in kernels})}
    described = tuple(DatasetKernel(kernel=entry.kernel, models=tuple(dict.fromkeys(
        (*owners.get(entry.kernel.id, ()), *entry.models)))) for entry in kernels)
    items = tuple(KernelItem(built / f"{entry.kernel.id}.onnx", entry.kernel) for entry in kernels)
    return config, target, Work(items, (), described)


def collect_work(workspace: Workspace, config: CollectorConfig, target: Target, work: Work, crew: Crew,
                 planned: Sequence[Planned] | None = None) -> dict[str, Any]:
    """Measures what of `work` is still missing in the dataset of `target`, which this machine is, and returns the totals.

    With `planned`, exactly these blocks are measured.
    """
    provider = target.flavour.execution_provider
    here, source = machine(provider), config.open_source(provider)
    if config.window_s < source.minimum_window_s:
        raise UserError(f"window_s {config.window_s:g}: {source.name} needs at least {source.minimum_window_s:g} s")
    backgrounds = config.backgrounds_on(provider)
    for described in backgrounds.values():
        if described.model:
            workspace.find_model(described.model)
    folder, labels, variants = workspace.dataset(target.name), config.labels_on(provider), config.variants_on(provider)
    writer = DatasetWriter(folder, DatasetHeader(target=target, metrics=tuple(source.fields), held_out=config.held_out,
                                                 labels=labels, machines={here.uuid: here}, backgrounds=backgrounds,
                                                 held_out_backgrounds=config.held_out_backgrounds if backgrounds else ()),
                           work.described)
    log.info("%s: %d kernels and %d models at levels %s%s into %s", target.name, len(work.kernels), len(work.models),
             ", ".join(map(str, config.levels)), f" of {', '.join(backgrounds)}" if backgrounds else "", folder)
    measured: set[str] = set()
    unsteady, measuring_s, tables_due = 0, 0.0, time.monotonic() + TABLES_EVERY_S
    for level, background in config.loads():
        load = (level, background.name if background else "")
        there = [block for block in writer.blocks if block.load == load]
        own = [block for block in there if block.machine == here.uuid]
        wanted = work if config.kernel_levels is None or level in config.kernel_levels else Work((), work.models, ())
        todo = plan(wanted, own if config.each_machine else there, config.block_kernels, labels[0], config.block_models,
                    () if level else variants, 1 if level else config.sessions)
        if planned is not None:
            todo = list(planned)
        elif not (config.each_machine or level):
            ties = choose_ties(work.kernels, there, here.uuid, labels[0], config.ties)
            todo = plan(Work(tuple(ties), (), ()), own, config.block_kernels, labels[0]) + todo
        if not todo:
            continue
        crew.wait()
        with stress(level, background or COMPUTE, provider, workspace=workspace) as stressor:
            time.sleep(config.stress.settle_s if level else 0.0)
            collector = Collector(config, target, folder, crew, source, here.uuid, *load, best_canary_ms(own))
            for key, kernels, models in cli.track(todo, load_in_words(*load)):
                began = time.monotonic()
                block = collector.block(key, kernels, models, stressor)
                measuring_s += time.monotonic() - began
                unsteady += block.drift > config.canary_drift
                measured |= {item.kernel.id for item in kernels} | {m.id for m in block.measurements if m.subject == "kernel"}
                writer.append(block)
                if time.monotonic() > tables_due:
                    began = time.monotonic()
                    writer.write_tables()
                    tables_due = time.monotonic() + max(TABLES_EVERY_S, 9 * (time.monotonic() - began))
    writer.write_tables()
    kernel_rows, model_rows = writer.count_rows()
    failed = sorted({m.id for block in writer.blocks for m in block.measurements if m.status != "ok"})
    if unsteady:
        log.warning("%d blocks kept although the machine was unsteady by more than %.0f %%",
                    unsteady, 100 * config.canary_drift)
    return {"target": target.name, "dataset": str(folder), "measured_kernels": len(measured),
            "measuring_s": round(measuring_s, 1), "kernel_rows": kernel_rows, "model_rows": model_rows,
            "unsteady_blocks": unsteady, "failed": failed}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--config", type=Path, default=ROOT / "benchmark" / "config.yaml",
                        help="default: benchmark/config.yaml")
    args = parser.parse_args()
    workspace = cli.start(args)
    result = collect(workspace, load_config(args.config, CollectorConfig))
    if args.json:
        cli.print_json(result)
    else:
        cli.print_table([{**result, "failed": len(result["failed"])}])
    if result["failed"]:
        log.error("%d failed and are rows that say so: %s", len(result["failed"]), ", ".join(result["failed"]))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    cli.run(main, kept="what was measured")
