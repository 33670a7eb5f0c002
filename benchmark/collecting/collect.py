"""Measures what is missing of a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmark.collecting.config import CollectorConfig
from benchmark.collecting.crew import Crew, start_crew
from benchmark.collecting.planning import plan_load
from benchmark.collecting.units import OrtUnits, open_bench
from benchmark.collecting.work import Item, KernelItem, ModelItem, Work, find_work
from benchmark.load.backgrounds import Background
from benchmark.load.stress import Stress
from benchmark.measuring.loads import Start, measure_loads, started
from benchmark.measuring.pending import Planned
from benchmark.records.blocks import Block
from benchmark.records.dataset_writer import DatasetWriter
from benchmark.records.files import DatasetHeader, DatasetKernel, header_path, read_header, read_kernels
from benchmark.records.measurement import Measurement
from utils.errors import UserError
from utils.fingerprint import Machine, Target, local_target, machine, resolve_device
from utils.locks import sole_writer
from utils.logger import get_logger
from utils.paths import Workspace

log = get_logger("collector")
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
    device = resolve_device(config.device)
    if config.device == "auto" and device == "cpu":
        log.info("no NVIDIA GPU here: measuring the CPU")
    target = local_target(device)
    if not config.labels and header_path(workspace.dataset(target.name)).exists():
        config = config.model_copy(update={"labels": read_header(workspace.dataset(target.name)).labels})
    work = find_work(workspace, target, config.held_out)
    with (sole_writer(workspace.dataset(target.name)),
          start_crew(config, device, config.labels_on(device)) as crew):
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
                            [Planned(item.id, [item]) for item in models])


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
        header = read_header(folder)
        if absent := [label for label in config.labels if label not in header.labels]:
            raise UserError(f"{folder}: this dataset was collected without label {', '.join(absent)} (it has "
                            f"{', '.join(header.labels)}); move it away, or use another --workspace")
        config = config.model_copy(update={"labels": header.labels, "metrics": header.metrics, "held_out": header.held_out})
    there = {entry.kernel.id: entry for entry in read_kernels(folder, {entry.kernel.id for entry in kernels})}
    described = tuple(entry.with_owners_of(there.get(entry.kernel.id)) for entry in kernels)
    items = tuple(KernelItem(built / f"{entry.kernel.id}.onnx", entry.kernel) for entry in kernels)
    return config, target, Work(items, (), described)


def collect_work(workspace: Workspace, config: CollectorConfig, target: Target, work: Work, crew: Crew,
                 planned: Sequence[Planned[Item]] | None = None) -> dict[str, Any]:
    """Measures what of `work` is still missing in the dataset of `target`, which this machine is, and returns the totals.

    With `planned`, exactly these blocks are measured.
    """
    device = target.flavour.device
    here, source = machine(device), config.open_source(device)
    bench = open_bench(config, device, here.uuid, source, crew)
    writer = open_dataset(workspace, config, target, here, source.fields, work)

    def blocks_of(load: tuple[float, str], there: Sequence[Block]) -> Sequence[Planned[Item]]:
        return plan_load(config, work, device, here.uuid, load[0], there) if planned is None else planned

    def time_units(items: Sequence[Item], level: float) -> list[Measurement]:
        return OrtUnits(config, target, crew, level).time(items)

    totals = measure_loads(bench, blocks_of, time_units, writer, config.loads(), start_loads(config, device, workspace, crew))
    writer.write_tables()
    kernel_rows, model_rows = writer.count_rows()
    kernels = {item.id for item in totals.units if isinstance(item, KernelItem)} | {
        m.id for block in totals.blocks for m in block.measurements if m.subject == "kernel"}
    return {"target": target.name, "dataset": str(writer.folder), "measured_kernels": len(kernels),
            "measuring_s": round(totals.measuring_s, 1), "kernel_rows": kernel_rows, "model_rows": model_rows,
            "unsteady_blocks": totals.unsteady_blocks,
            "failed": sorted({m.id for block in writer.blocks for m in block.measurements if m.status != "ok"})}


def open_dataset(workspace: Workspace, config: CollectorConfig, target: Target, here: Machine, metrics: Sequence[str],
                 work: Work) -> DatasetWriter:
    """The dataset of a target, joined with what is there.

    Raises:
        UserError: a background that the device can't have, or whose model is not there; or see `DatasetWriter`.
    """
    device, folder = target.flavour.device, workspace.dataset(target.name)
    backgrounds = config.backgrounds_on(device)
    for described in backgrounds.values():
        if described.model:
            workspace.find_model(described.model)
    header = DatasetHeader(target=target, metrics=tuple(metrics), held_out=config.held_out, labels=config.labels_on(device),
                           machines={here.uuid: here}, backgrounds=backgrounds,
                           held_out_backgrounds=config.held_out_backgrounds if backgrounds else (),
                           groups={item.id: item.record.group for item in work.models})
    writer = DatasetWriter(folder, header, work.described)
    log.info("%s: %d kernels and %d models at levels %s%s into %s", target.name, len(work.kernels), len(work.models),
             ", ".join(map(str, config.levels)), f" of {', '.join(backgrounds)}" if backgrounds else "", folder)
    return writer


def start_loads(config: CollectorConfig, device: str, workspace: Workspace, crew: Crew) -> Start:
    """What starts each of the config's loads, once all processes of the crew are ready."""
    @contextmanager
    def start(level: float, background: Background | None) -> Iterator[Stress]:
        crew.wait()
        with started(level, background, device, workspace, config.stress.settle_s) as stressor:
            yield stressor

    return start
