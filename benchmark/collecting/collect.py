"""Measures what is missing of a dataset."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmark.collecting.config import CollectorConfig
from benchmark.collecting.crew import Crew, start_crew
from benchmark.collecting.measuring import Collector, best_canary_ms, load_in_words
from benchmark.collecting.planning import choose_ties, plan
from benchmark.collecting.work import KernelItem, ModelItem, Planned, Work, find_work
from benchmark.load.backgrounds import COMPUTE
from benchmark.load.stress import stress
from benchmark.records.dataset_writer import DatasetWriter
from benchmark.records.files import DatasetHeader, DatasetKernel, header_path, load_header, read_kernels
from utils import cli
from utils.errors import UserError
from utils.fingerprint import Target, local_target, machine, resolve_device
from utils.locks import sole_writer
from utils.logger import get_logger
from utils.paths import Workspace

log = get_logger("collector")
TABLES_EVERY_S = 30.0  # at least; and never more than a tenth of the time goes into writing them
# Where somebody waits for a few kernels; their blocks stand between canaries as all do, and are measured again if these part.
QUICK_WINDOW_S = 0.2  # of metrics: training takes their median over all idle blocks
QUICK_BLOCK = 64  # kernels: those of most models
QUICK_PATIENCE_S = 3.0


def collect(workspace: Workspace, config: CollectorConfig) -> dict[str, Any]:
    """Measures all that is still missing and returns the totals. A dataset that is there keeps its labels, where `config` names
    none.

    Raises:
        UserError: nothing to measure, a metric that is not there, a dataset of another target, or one that another process
            writes, or another process measures on this device.
    """
    provider = resolve_device(config.device)
    if config.device == "auto" and provider == "cpu":
        log.info("no NVIDIA GPU here: measuring the CPU")
    target = local_target(provider)
    if not config.labels and header_path(workspace.dataset(target.name)).exists():
        config = config.model_copy(update={"labels": load_header(workspace.dataset(target.name)).labels})
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
    target = local_target(resolve_device(config.device))
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
    target = local_target(resolve_device(config.device))
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
    if header_path(folder).exists():
        header = load_header(folder)
        if absent := [label for label in config.labels if label not in header.labels]:
            raise UserError(f"{folder}: this dataset was collected without label {', '.join(absent)} (it has "
                            f"{', '.join(header.labels)}); move it away, or use another --workspace")
        config = config.model_copy(update={"labels": header.labels, "metrics": header.metrics, "held_out": header.held_out})
    there = {entry.kernel.id: entry for entry in read_kernels(folder, {entry.kernel.id for entry in kernels})}
    described = tuple(entry.with_owners_of(there.get(entry.kernel.id)) for entry in kernels)
    items = tuple(KernelItem(built / f"{entry.kernel.id}.onnx", entry.kernel) for entry in kernels)
    return config, target, Work(items, (), described)


def collect_work(workspace: Workspace, config: CollectorConfig, target: Target, work: Work, crew: Crew,
                 planned: Sequence[Planned] | None = None) -> dict[str, Any]:
    """Measures what of `work` is still missing in the dataset of `target`, which this machine is, and returns the totals.

    With `planned`, exactly these blocks are measured.
    """
    provider = target.flavour.device
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
                                                 held_out_backgrounds=config.held_out_backgrounds if backgrounds else (),
                                                 groups={item.record.model: item.record.group for item in work.models}),
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
