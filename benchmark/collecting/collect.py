"""Measures what a dataset still lacks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmark.collecting.config import CollectorConfig
from benchmark.collecting.planning import plan_by_usefulness, plan_load
from benchmark.collecting.units import KernelUnits, open_bench
from benchmark.collecting.work import Item, KernelItem, ModelItem, Work, find_work
from benchmark.collecting.workers import Workers, start_workers
from kernel_model.sampling.kernel_errors import KernelError, read_errors
from measuring.loads import Start, measure_loads, started
from measuring.pending import Planned
from measuring.stress import Stress
from records.backgrounds import Background
from records.blocks import Block
from records.dataset_files import DatasetHeader, DatasetKernel, header_path, read_header, read_kernels
from records.dataset_writer import DatasetWriter
from records.measurement import Measurement
from runtimes import runtime_named
from runtimes.protocol import Setting
from utils.errors import UserError
from utils.fingerprint import Machine, Target, machine, resolve_device
from utils.locks import sole_writer
from utils.logger import get_logger
from utils.paths import Workspace

log = get_logger("collector")
# For a user who waits for a few kernels. As always, a block whose canaries differ is measured again.
QUICK_WINDOW_S = 0.2  # of metrics; training takes their median over all idle blocks
QUICK_BLOCK = 64  # kernels: as many as most models have
QUICK_PATIENCE_S = 3.0


def collect(workspace: Workspace, config: CollectorConfig, minutes: float | None = None) -> dict[str, Any]:
    """Measures everything that is still missing and returns the totals.

    If `config` names no labels, an existing dataset keeps its own. With `minutes`, the models and their kernels come first,
    then the most useful of the sampled kernels, and no block begins when that time is over.

    Raises:
        UserError: there is nothing to measure; a metric is missing; the dataset is of another target; another process writes
            the dataset or measures on this device.
    """
    stop_at_s = math.inf if minutes is None else time.monotonic() + 60 * minutes
    device = resolve_device(config.device)
    if config.device == "auto" and device == "cpu":
        log.info("no NVIDIA GPU here: measuring the CPU")
    target = config.target(device)
    if not config.labels and header_path(workspace.dataset(target.name)).exists():
        config = config.model_copy(update={"labels": read_header(workspace.dataset(target.name)).labels})
    work = find_work(workspace, target, config.held_out)
    with (sole_writer(workspace.dataset(target.name)),
          start_workers(config, device, config.labels_on(device),
                     Setting.of(target, workspace.kernel_onnx, config.setting.memory_limit_mib)) as workers):
        return collect_work(workspace, config, target, work, workers, stop_at_s=stop_at_s)


def collect_kernels(workspace: Workspace, config: CollectorConfig, kernels: Sequence[DatasetKernel],
                    workers: Workers) -> dict[str, Any]:
    """Measures kernels that no machine of this target has measured on an idle device, and returns the totals.

    A user waits for them: windows and patience are at most, and blocks at least, as QUICK_… says.

    An existing dataset keeps its labels (the kernels get all of them), its metrics and its held-out groups. If there is
    none, one begins as `config` says.

    Args:
        workspace: holds the dataset and the built kernels.
        config: its labels are the ones that are needed.
        kernels: with the models that hold them. Models that the dataset names already are kept.
        workers: for the device and the labels of `config`.

    Raises:
        UserError: a metric is missing; the dataset lacks a label that is needed; another process writes the dataset.
    """
    target = config.target(resolve_device(config.device))
    with sole_writer(workspace.dataset(target.name)):
        return collect_work(workspace, *_quick(workspace, config, target, kernels), workers)


def collect_in_models(workspace: Workspace, config: CollectorConfig, models: Sequence[ModelItem],
                      kernels: Sequence[DatasetKernel], workers: Workers) -> dict[str, Any]:
    """Measures kernels inside models that hold them, on an idle device, and returns the totals.

    ONNX Runtime's profile gives the time of each kernel, in the order and with the caches that it really has. The models
    themselves are not recorded.

    Args:
        workspace: holds the dataset.
        config: of the collector.
        models: with the kernels that are measured in each (`only`).
        kernels: these, with the models that hold them.
        workers: for the device and the labels of `config`.

    Raises:
        UserError: the dataset was collected without a label that is needed, or another process writes to it.
    """
    target = config.target(resolve_device(config.device))
    with sole_writer(workspace.dataset(target.name)):
        config, target, work = _quick(workspace, config, target, kernels)
        return collect_work(workspace, config, target, Work((), (), work.described), workers,
                            [Planned(item.id, [item]) for item in models])


def _quick(workspace: Workspace, config: CollectorConfig, target: Target,
           kernels: Sequence[DatasetKernel]) -> tuple[CollectorConfig, Target, Work]:
    """The config and the work of `collect_kernels`.

    Raises:
        UserError: the dataset was collected without a label that is needed.
    """
    folder, built = workspace.dataset(target.name), workspace.kernel_onnx / target.flavour.name
    config = config.model_copy(update={
        "levels": (0.0,), "variants": (), "energy_s": 0.0, "each_machine": False, "ties": 0,
        "window_s": min(config.window_s, QUICK_WINDOW_S),
        "block_kernels": max(config.block_kernels, QUICK_BLOCK), "patience_s": min(config.patience_s, QUICK_PATIENCE_S)})
    if header_path(folder).exists():
        header = read_header(folder)
        if absent := [label for label in config.labels if label not in header.labels]:
            raise UserError(f"{folder}: this dataset was collected without label {', '.join(absent)} (it has "
                            f"{', '.join(header.labels)}); move it away, or use another --workspace")
        config = config.model_copy(update={"labels": header.labels, "metrics": header.metrics, "held_out": header.held_out})
    existing = {entry.kernel.id: entry for entry in read_kernels(folder, {entry.kernel.id for entry in kernels})}
    described = tuple(entry.with_owners_of(existing.get(entry.kernel.id)) for entry in kernels)
    suffix = runtime_named(target.flavour.runtime).kernel_suffix
    items = tuple(KernelItem(built / f"{entry.kernel.id}{suffix}", entry.kernel) for entry in kernels)
    return config, target, Work(items, (), described)


def collect_work(workspace: Workspace, config: CollectorConfig, target: Target, work: Work, workers: Workers,
                 planned: Sequence[Planned[Item]] | None = None, stop_at_s: float = math.inf) -> dict[str, Any]:
    """Measures the part of `work` that the dataset of `target`, which this machine is, still lacks; returns the totals.

    With `planned`, exactly these blocks are measured. With `stop_at_s`, a time of `time.monotonic`, no block begins after it,
    and the most useful blocks come first.
    """
    device = target.flavour.device
    config = config.with_energy_on(device)
    this_machine, source = machine(device), config.open_source(device)
    bench = open_bench(config, device, this_machine.uuid, source, workers)
    writer = open_dataset(workspace, config, target, this_machine, source.fields, work)

    def blocks_of(load: tuple[float, str], measured: Sequence[Block]) -> Sequence[Planned[Item]]:
        if planned is not None:
            return planned
        if math.isinf(stop_at_s):
            return plan_load(config, work, device, this_machine.uuid, load[0], measured)
        return plan_by_usefulness(config, work, device, this_machine.uuid, load[0], measured, known_errors(workspace, target))

    def time_units(items: Sequence[Item], level: float) -> list[Measurement]:
        return KernelUnits(config, target, workers, level).time(items)

    totals = measure_loads(bench, blocks_of, time_units, writer, config.loads(),
                           start_loads(config, device, workspace, workers), stop_at_s)
    writer.write_tables()
    kernel_rows, model_rows = writer.count_rows()
    kernels = {item.id for item in totals.units if isinstance(item, KernelItem)} | {
        m.id for block in totals.blocks for m in block.measurements if m.subject == "kernel"}
    return {"target": target.name, "dataset": str(writer.folder), "measured_kernels": len(kernels),
            "measuring_s": round(totals.measuring_s, 1), "kernel_rows": kernel_rows, "model_rows": model_rows,
            "unsteady_blocks": totals.unsteady_blocks, "left": totals.left,
            "failed": sorted({m.id for block in writer.blocks for m in block.measurements if m.status != "ok"})}


def known_errors(workspace: Workspace, target: Target) -> tuple[KernelError, ...]:
    """The errors of a target's predictors on kernels that they did not see; none if nothing was trained yet."""
    path = workspace.kernel_errors(target.name)
    return read_errors(path).kernels if path.is_file() else ()


def open_dataset(workspace: Workspace, config: CollectorConfig, target: Target, this_machine: Machine, metrics: Sequence[str],
                 work: Work) -> DatasetWriter:
    """Opens the dataset of a target, or begins one.

    Raises:
        UserError: the device can't have a background, a background's model is missing, or the existing dataset is damaged, of
            another target, or was collected with other metrics, labels, held-out groups or backgrounds.
    """
    device, folder = target.flavour.device, workspace.dataset(target.name)
    backgrounds = config.backgrounds_on(device)
    for described in backgrounds.values():
        if described.model:
            workspace.find_model(described.model)
    header = DatasetHeader(target=target, metrics=tuple(metrics), held_out=config.held_out, labels=config.labels_on(device),
                           machines={this_machine.uuid: this_machine}, backgrounds=backgrounds,
                           held_out_backgrounds=config.held_out_backgrounds if backgrounds else (),
                           groups=dict(work.groups), collections=dict(work.collections), energy=bool(config.energy_s),
                           environment=config.environment(target))
    writer = DatasetWriter(folder, header, work.described)
    log.info("%s: %d kernels and %d models at levels %s%s into %s", target.name, len(work.kernels), len(work.models),
             ", ".join(map(str, config.levels)), f" of {', '.join(backgrounds)}" if backgrounds else "", folder)
    return writer


def start_loads(config: CollectorConfig, device: str, workspace: Workspace, workers: Workers) -> Start:
    """A function that starts a load of the config as soon as all processes that measure are ready."""
    @contextmanager
    def start(level: float, background: Background | None) -> Iterator[Stress]:
        workers.wait()
        with started(level, background, device, workspace, config.stress.settle_s) as stressor:
            yield stressor

    return start
