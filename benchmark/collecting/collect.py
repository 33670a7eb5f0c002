"""Measures what a dataset still lacks: plans the blocks of kernels and models, and has them measured."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.devices import Devices, FoundDevice, LocalDevice, check_alike
from hase.benchmark.collecting.plans import (
    CollectionWork,
    Item,
    KernelItem,
    ModelItem,
    find_work,
    plan_by_usefulness,
    plan_load,
    with_shared_hosts,
)
from hase.benchmark.collecting.units import Workers, steadiness_of
from hase.benchmark.measuring.blocks import PlannedBlock
from hase.benchmark.measuring.driver import Actors, BlockPlan, Driver
from hase.kernel_model.sampling.usefulness import KernelError, read_errors
from hase.records.dataset_files import DatasetHeader, DatasetKernel, header_path, read_header, read_kernels
from hase.records.dataset_writer import DatasetWriter
from hase.records.measurement import Block
from hase.runtimes import runtime_named
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target, resolve_device
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("collector")
# Settings for a user who waits for a few kernels. As always, a block whose canaries differ is measured again.
QUICK_WINDOW_S = 0.2  # of metrics; training takes their median over all idle blocks
QUICK_BLOCK = 64  # kernels: as many as most models have
QUICK_PATIENCE_S = 3.0


def collect(workspace: Workspace, config: CollectorConfig, minutes: float | None = None, remeasure: bool = False,
            devices: Devices | None = None) -> dict[str, Any]:
    """Measures everything that is missing and returns the totals; `devices` is by default this machine's.

    With `minutes`, models and their kernels come first, then the most useful sampled kernels, and no block begins after that
    time. With `remeasure`, idle measurements from unsteady times are repeated. An existing dataset keeps its labels if `config`
    names none. Raises UserError if there is nothing to measure or the dataset is of another target.
    """
    stop_at_s = math.inf if minutes is None else time.monotonic() + 60 * minutes
    devices = devices or LocalDevice(config)
    check_alike(devices.found)
    target = devices.found[0].target
    if not config.labels and header_path(workspace.dataset(target.name)).exists():
        config = config.model_copy(update={"labels": read_header(workspace.dataset(target.name)).labels})
    if not all(device.measures_energy for device in devices.found):
        config = config.model_copy(update={"energy_s": 0.0})
    work = find_work(workspace, target, config.held_out, needs_kernels=any(map(config.takes_kernels, config.levels)))
    with sole_writer(workspace.dataset(target.name)), devices.actors(config, workspace) as actors:
        return collect_work(workspace, config, devices.found, work, actors, stop_at_s=stop_at_s, remeasure=remeasure)


def collect_kernels(workspace: Workspace, config: CollectorConfig, kernels: Sequence[DatasetKernel],
                    workers: Workers) -> dict[str, Any]:
    """Measures kernels that no machine of this target has measured on a steady idle device; returns the totals.

    A user waits for them, so windows are short, patience is low and blocks are large (QUICK_…). An existing dataset keeps its
    labels, metrics, held-out groups and models; a new one follows `config`.
    """
    target = config.target(resolve_device(config.device))
    with sole_writer(workspace.dataset(target.name)):
        config, work = _quick_work(workspace, config, target, kernels)
        local = LocalDevice(config)
        return collect_work(workspace, config, local.found, work, local.actor_with(workers, config, workspace), remeasure=True)


def collect_in_models(workspace: Workspace, config: CollectorConfig, models: Sequence[ModelItem],
                      kernels: Sequence[DatasetKernel], workers: Workers) -> dict[str, Any]:
    """Measures kernels inside models that hold them (`ModelItem.only`), in their real order and cache state; returns totals."""
    target = config.target(resolve_device(config.device))
    with sole_writer(workspace.dataset(target.name)):
        config, work = _quick_work(workspace, config, target, kernels)
        local = LocalDevice(config)
        return collect_work(workspace, config, local.found, CollectionWork((), (), work.described),
                            local.actor_with(workers, config, workspace), [PlannedBlock(item.id, [item]) for item in models])


def _quick_work(workspace: Workspace, config: CollectorConfig, target: Target,
                kernels: Sequence[DatasetKernel]) -> tuple[CollectorConfig, CollectionWork]:
    """Config and work of a collection that a user waits for. Raises UserError if the dataset lacks a label of `config`."""
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
    return config, CollectionWork(items, (), described)


def collect_work(workspace: Workspace, config: CollectorConfig, devices: Sequence[FoundDevice], work: CollectionWork,
                 actors: Actors[Item], planned: Sequence[PlannedBlock[Item]] | None = None, stop_at_s: float = math.inf,
                 remeasure: bool = False) -> dict[str, Any]:
    """Measures the part of `work` that the dataset of the devices' target still lacks; returns the totals.

    With `planned`, exactly these blocks are measured, on the first device. With `stop_at_s` (`time.monotonic`) the most useful
    blocks come first. With `remeasure`, idle measurements from unsteady times count as missing.
    """
    target, device = devices[0].target, devices[0].target.flavour.device
    writer = open_dataset(workspace, config, target, devices, work)
    errors = () if math.isinf(stop_at_s) else known_errors(workspace, target)
    driver = Driver(actors, writer, steadiness_of(config), stop_at_s)
    for level, background in config.loads():
        measured = driver.measured(level, background)
        if remeasure and not level:  # under a load the canary varies anyway
            measured = [with_known_inputs(block, work) for block in measured if not block.unsteady]
        machines = list(dict.fromkeys(actor.machine for actor in actors.members))
        if planned is not None:
            plan = BlockPlan({devices[0].machine.uuid: planned})
        elif math.isinf(stop_at_s):
            plan = plan_load(config, work, device, machines, level, measured)
        else:
            plan = plan_by_usefulness(config, work, device, machines, level, measured, errors)
        driver.measure(level, background, with_shared_hosts(plan, config, device))
    totals = driver.finish()
    writer.write_tables()
    kernel_rows, model_rows = writer.count_rows()
    kernels = {item.id for item in totals.units if isinstance(item, KernelItem)} | {
        m.id for block in totals.blocks for m in block.measurements if m.subject == "kernel"}
    return {"target": target.name, "dataset": str(writer.folder), "measured_kernels": len(kernels),
            "measuring_s": round(totals.measuring_s, 1), "took_s": round(totals.took_s, 1), "kernel_rows": kernel_rows,
            "model_rows": model_rows, "unsteady_blocks": totals.unsteady_blocks, "left": totals.left,
            "lost_actors": len(totals.lost),
            "failed": sorted({m.id for block in writer.blocks for m in block.measurements if m.status != "ok"}
                             | totals.interrupted.keys())}


def known_errors(workspace: Workspace, target: Target) -> tuple[KernelError, ...]:
    """Errors of a target's predictors on kernels they were not trained on; empty before the first training."""
    path = workspace.kernel_errors(target.name)
    return read_errors(path).kernels if path.is_file() else ()


def with_known_inputs(block: Block, work: CollectionWork) -> Block:
    """Removes measurements of kernels whose time depends on values, if the block does not record their inputs."""
    by_values = {entry.kernel.id for entry in work.described if entry.kernel.time_by_values}
    return block.model_copy(update={"measurements": tuple(
        m for m in block.measurements if m.inputs or m.subject != "kernel" or m.id not in by_values)})


def open_dataset(workspace: Workspace, config: CollectorConfig, target: Target, devices: Sequence[FoundDevice],
                 work: CollectionWork) -> DatasetWriter:
    """Opens or begins a target's dataset. Raises UserError if its metrics, labels, held-out groups or backgrounds differ."""
    device, folder = target.flavour.device, workspace.dataset(target.name)
    backgrounds = config.backgrounds_on(device)
    for background in backgrounds.values():
        if background.model:
            workspace.find_model(background.model)
    header = DatasetHeader(target=target, metrics=devices[0].metrics, held_out=config.held_out, labels=config.labels_on(device),
                           machines={entry.machine.uuid: entry.machine for entry in devices}, backgrounds=backgrounds,
                           held_out_backgrounds=config.held_out_backgrounds if backgrounds else (),
                           groups=dict(work.groups), collections=dict(work.collections), energy=bool(config.energy_s),
                           environment=config.environment(target), sharing=config.sharing)
    writer = DatasetWriter(folder, header, work.described)
    log.info("%s: %d kernels and %d models at levels %s%s into %s", target.name, len(work.kernels), len(work.models),
             ", ".join(map(str, config.levels)), f" of {', '.join(backgrounds)}" if backgrounds else "", folder)
    return writer
