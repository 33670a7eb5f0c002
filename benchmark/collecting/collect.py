"""Measures what a dataset still lacks: which blocks of kernels and models, and in which order."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.devices import Device, Devices, LocalDevice, check_alike
from hase.benchmark.collecting.units import Workers, may_share_host, steadiness_of
from hase.benchmark.collecting.work import Item, KernelItem, ModelItem, Work, find_work
from hase.benchmark.load.loads import measure_by
from hase.benchmark.measuring.actors import Actors
from hase.benchmark.measuring.pending import Plan, Planned, choose_ties, chunks, first_names, in_blocks, pending, shuffled
from hase.kernel_model.sampling.kernel_errors import KernelError, read_errors
from hase.kernel_model.sampling.usefulness import useful_kernels
from hase.records.blocks import Block
from hase.records.dataset_files import DatasetHeader, DatasetKernel, header_path, read_header, read_kernels
from hase.records.dataset_tables import model_sessions
from hase.records.dataset_writer import DatasetWriter
from hase.records.measurement import IN_MODEL_LABELS, Measurement
from hase.runtimes import runtime_named
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target, resolve_device
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("collector")
# For a user who waits for a few kernels. As always, a block whose canaries differ is measured again.
QUICK_WINDOW_S = 0.2  # of metrics; training takes their median over all idle blocks
QUICK_BLOCK = 64  # kernels: as many as most models have
QUICK_PATIENCE_S = 3.0


def collect(workspace: Workspace, config: CollectorConfig, minutes: float | None = None, remeasure: bool = False,
            devices: Devices | None = None) -> dict[str, Any]:
    """Measures everything that is still missing and returns the totals.

    If `config` names no labels, an existing dataset keeps its own. With `minutes`, the models and their kernels come first,
    then the most useful of the sampled kernels, and no block begins when that time is over. With `remeasure`, what was measured
    on the idle device while it was unsteady is measured again. By default the device of this machine is measured.

    Raises:
        UserError: there is nothing to measure; a metric is missing; the dataset is of another target; another process writes
            the dataset or measures on this device.
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
    """Measures kernels that no machine of this target has measured on an idle device while it was steady; returns the totals.

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
        config, work = _quick(workspace, config, target, kernels)
        here = LocalDevice(config)
        return collect_work(workspace, config, here.found, work, here.actor_with(workers, config, workspace), remeasure=True)


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
        config, work = _quick(workspace, config, target, kernels)
        here = LocalDevice(config)
        return collect_work(workspace, config, here.found, Work((), (), work.described),
                            here.actor_with(workers, config, workspace), [Planned(item.id, [item]) for item in models])


def _quick(workspace: Workspace, config: CollectorConfig, target: Target,
           kernels: Sequence[DatasetKernel]) -> tuple[CollectorConfig, Work]:
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
    return config, Work(items, (), described)


def collect_work(workspace: Workspace, config: CollectorConfig, devices: Sequence[Device], work: Work, actors: Actors[Item],
                 planned: Sequence[Planned[Item]] | None = None, stop_at_s: float = math.inf,
                 remeasure: bool = False) -> dict[str, Any]:
    """Measures the part of `work` that the dataset of the devices' target still lacks; returns the totals.

    With `planned`, exactly these blocks are measured, on the first device. With `stop_at_s`, a time of `time.monotonic`, no
    block begins after it, and the most useful blocks come first. With `remeasure`, what was measured on the idle device while
    it was unsteady counts as not measured.
    """
    target, device = devices[0].target, devices[0].target.flavour.device
    writer = open_dataset(workspace, config, target, devices, work)
    errors = () if math.isinf(stop_at_s) else known_errors(workspace, target)

    def plan_of(load: tuple[float, str], measured: Sequence[Block]) -> Plan[Item]:
        if planned is not None:
            return Plan({devices[0].machine.uuid: planned})
        if remeasure and not load[0]:  # under a load the canary varies anyway
            measured = [with_known_inputs(block, work) for block in measured if not block.unsteady]
        machines = list(dict.fromkeys(actor.machine for actor in actors.members))
        if math.isinf(stop_at_s):
            return plan_load(config, work, device, machines, load[0], measured)
        return plan_by_usefulness(config, work, device, machines, load[0], measured, errors)

    totals = measure_by(actors, plan_of, writer, steadiness_of(config), config.loads(), stop_at_s,
                        lambda block: may_share_host(config, device, block.units))
    writer.write_tables()
    kernel_rows, model_rows = writer.count_rows()
    kernels = {item.id for item in totals.units if isinstance(item, KernelItem)} | {
        m.id for block in totals.blocks for m in block.measurements if m.subject == "kernel"}
    return {"target": target.name, "dataset": str(writer.folder), "measured_kernels": len(kernels),
            "measuring_s": round(totals.measuring_s, 1), "took_s": round(totals.took_s, 1), "kernel_rows": kernel_rows,
            "model_rows": model_rows,
            "unsteady_blocks": totals.unsteady_blocks, "left": totals.left, "lost_actors": len(totals.lost),
            "failed": sorted({m.id for block in writer.blocks for m in block.measurements if m.status != "ok"}
                             | totals.interrupted.keys())}


def known_errors(workspace: Workspace, target: Target) -> tuple[KernelError, ...]:
    """The errors of a target's predictors on kernels that they did not see; none if nothing was trained yet."""
    path = workspace.kernel_errors(target.name)
    return read_errors(path).kernels if path.is_file() else ()


def with_known_inputs(block: Block, work: Work) -> Block:
    """A block without what it says of kernels whose time depends on values, where it does not say what inputs they had."""
    by_values = {entry.kernel.id for entry in work.described if entry.kernel.time_by_values}
    return block.model_copy(update={"measurements": tuple(
        m for m in block.measurements if m.inputs or m.subject != "kernel" or m.id not in by_values)})


def open_dataset(workspace: Workspace, config: CollectorConfig, target: Target, devices: Sequence[Device],
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
    header = DatasetHeader(target=target, metrics=devices[0].metrics, held_out=config.held_out, labels=config.labels_on(device),
                           machines={found.machine.uuid: found.machine for found in devices}, backgrounds=backgrounds,
                           held_out_backgrounds=config.held_out_backgrounds if backgrounds else (),
                           groups=dict(work.groups), collections=dict(work.collections), energy=bool(config.energy_s),
                           environment=config.environment(target), sharing=config.sharing)
    writer = DatasetWriter(folder, header, work.described)
    log.info("%s: %d kernels and %d models at levels %s%s into %s", target.name, len(work.kernels), len(work.models),
             ", ".join(map(str, config.levels)), f" of {', '.join(backgrounds)}" if backgrounds else "", folder)
    return writer


def sessions_missing(models: Sequence[ModelItem], blocks: Iterable[Block], wanted: int, variants: Sequence[str]) -> list[int]:
    """For each model, the number of sessions that are still to be opened, out of `wanted`.

    A model that failed needs none. Otherwise a session counts if it holds all variants and no other work disturbed it.
    """
    failed, counted = set[str](), Counter[str]()
    for session in model_sessions(blocks):
        if "latency" in session.labels and session.labels["latency"].status != "ok":
            failed.add(session.model)
        counted[session.model] += set(variants) <= set(session.labels) and session.undisturbed
    return [0 if item.id in failed else max(wanted - counted[item.id], 0) for item in models]


def takes_label(measurement: Measurement, label: str) -> bool:
    """Whether a measurement is what a block of kernels gives: a kernel's `label`, taken alone or in a carrier."""
    return (measurement.subject, measurement.label) == ("kernel", label) and measurement.place != "in_model"


def _block_name(kernels: Sequence[KernelItem]) -> str:
    return f"{len(kernels)} kernels from {kernels[0].kernel.type}"


def plan(work: Work, blocks: Iterable[Block], block_kernels: int, first_label: str = "run", block_models: int = 1,
         variants: Sequence[str] = (), sessions: int = 1) -> list[Planned[Item]]:
    """The blocks that are still to be measured, given those that exist.

    A kernel is measured once it has label `first_label` from a block of kernels, or failed to get it. A model is measured
    once `sessions_missing` says so. Second sessions of models come after all first sessions, and so on.
    """
    blocks = list(blocks)
    of_kernels = in_blocks(pending(work.kernels, blocks, lambda m: takes_label(m, first_label)), block_kernels, _block_name)
    missing = sessions_missing(work.models, blocks, sessions, variants)
    planned: list[Planned[Item]] = []
    for turn in range(max(missing, default=0) or 1):
        models = [item for item, left in zip(work.models, missing, strict=True) if left > turn]
        of_turn: list[Planned[Item]] = [Planned(first_names(chunk), chunk) for chunk in chunks(models, block_models)]
        of_turn += of_kernels if not turn else []
        planned += shuffled(of_turn, turn + 1)  # mixes models and kernels
    return planned


def plan_load(config: CollectorConfig, work: Work, device: str, machines: Sequence[str], level: float,
              blocks: Sequence[Block]) -> Plan[Item]:
    """The blocks of `work` that machines still have to measure at a level, as the config says.

    Args:
        config: of the collector.
        work: everything to measure.
        device: `cpu` or `cuda`.
        machines: those that measure, by their identifiers.
        level: of the load.
        blocks: all blocks of this load, of every machine.
    """
    first_label = config.labels_on(device)[0]
    measured_by = {uuid: [block for block in blocks if block.machine == uuid] for uuid in machines}
    wanted = work if config.takes_kernels(level) else Work((), work.models, ())

    def todo(part: Work, measured: Sequence[Block]) -> list[Planned[Item]]:
        return plan(part, measured, config.block_kernels, first_label, config.block_models,
                    () if level else config.model_labels_on(device), 1 if level else config.sessions)

    if config.each_machine:
        return Plan({uuid: todo(wanted, measured) for uuid, measured in measured_by.items()})
    if level:
        return Plan({}, todo(wanted, blocks))
    ties = choose_ties(work.kernels, blocks, machines, config.ties, lambda m: takes_label(m, first_label))
    tied = {item.id for items in ties.values() for item in items}
    own = {uuid: plan(Work(tuple(items), (), ()), measured_by[uuid], config.block_kernels, first_label)
           for uuid, items in ties.items()}
    return Plan(own, todo(replace(wanted, kernels=tuple(item for item in wanted.kernels if item.id not in tied)), blocks))


def plan_by_usefulness(config: CollectorConfig, work: Work, device: str, machines: Sequence[str], level: float,
                       blocks: Sequence[Block], errors: Sequence[KernelError] = ()) -> Plan[Item]:
    """As `plan_load`, for a collector that may have to stop before it is done: the models and their kernels come first, in
    mixed order, then the sampled kernels, the most useful ones first. There are no ties.

    A kernel of a model is not measured in a block of kernels if the model gives its time.

    Args:
        errors: what a training wrote of the kernels that it held out; none before the first training.
    """
    if not config.each_machine:
        return Plan({}, _by_usefulness(config, work, device, level, blocks, errors))
    return Plan({uuid: _by_usefulness(config, work, device, level, [block for block in blocks if block.machine == uuid], errors)
                 for uuid in machines})


def _by_usefulness(config: CollectorConfig, work: Work, device: str, level: float, counted: Sequence[Block],
                   errors: Sequence[KernelError]) -> list[Planned[Item]]:
    """The blocks of which `counted` ones are measured, in the order of `plan_by_usefulness`."""
    first_label = config.labels_on(device)[0]
    missing = sessions_missing(work.models, counted, 1, () if level else config.model_labels_on(device))
    models = [item for item, left in zip(work.models, missing, strict=True) if left]
    from_models = {name for item in models for name in item.record.kernels
                   if config.model_labels and item.labels and first_label in IN_MODEL_LABELS}
    sampled = {entry.kernel.id for entry in work.described if entry.sampled}
    todo = pending(work.kernels, counted, lambda m: (m.subject, m.label) == ("kernel", first_label))
    held_by_models = [item for item in todo if item.id not in sampled | from_models]
    samples = {item.id: item for item in todo if item.id in sampled}
    known = [item.kernel for item in work.kernels if item.id not in samples]
    ordered = useful_kernels([item.kernel for item in samples.values()], known, len(samples), np.random.default_rng(0), errors)
    of_kernels = in_blocks(held_by_models, config.block_kernels, _block_name)
    first: list[Planned[Item]] = [Planned(first_names(chunk), chunk) for chunk in chunks(models, config.block_models)]
    return shuffled([*first, *of_kernels]) + [Planned(_block_name(chunk), chunk) for chunk in chunks(
        [samples[kernel.id] for kernel in ordered], config.block_kernels)]
