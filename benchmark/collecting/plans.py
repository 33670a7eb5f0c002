"""Plans a collection: finds the kernels and models of a target, and the blocks still to be measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.measuring.blocks import PlannedBlock
from hase.benchmark.measuring.driver import BlockPlan, block_key, choose_ties, chunks, pending, shuffled
from hase.kernel_model.building.kernel_models import carrier_bytes
from hase.kernel_model.sampling.draws import read_seeds
from hase.kernel_model.sampling.usefulness import KernelError, useful_kernels
from hase.records.dataset_files import DatasetKernel
from hase.records.dataset_tables import model_sessions
from hase.records.kernel_record import Kernel, KernelIndex, ModelRecord
from hase.records.kernel_record_files import index_path, read_index, record_path, records_in
from hase.records.measurement import GPU_LABEL, IN_MODEL_LABELS, Block, Measurement
from hase.runtimes import runtime_named
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target
from hase.utils.paths import Workspace, as_file_name, model_files

LEAST_WORK, WORK_BITS = 1 << 15, 2  # operations and bytes: below this, or within a factor of four, kernels are similar
# Most memory of the kernels of one carrier (a model that runs many kernels one after another), unless the config has a limit.
CARRIER_BYTES = {"cpu": 512 << 20, "cuda": 16 << 30}
LEAST_IN_BATCH, MOST_IN_BATCH = 4, 16  # kernels whose energy is measured together


@dataclass(frozen=True)
class KernelItem:
    """A built kernel to measure."""

    path: Path
    kernel: Kernel

    @property
    def id(self) -> str:
        return self.kernel.id

    @property
    def work(self) -> int:
        """Operations plus bytes, to order by size."""
        return self.kernel.flops + self.kernel.bytes_read + self.kernel.bytes_written


@dataclass(frozen=True)
class ModelItem:
    """A model to measure."""

    path: Path
    record_path: Path
    record: ModelRecord
    measures_kernels: bool  # whether its kernels are measured in it, too
    only: frozenset[str] = frozenset()  # if not empty, only these kernels are measured, by id, and not the model itself
    inputs: Path | None = None  # a file with values of its inputs; None: generated ones

    @property
    def id(self) -> str:
        return self.record.model


Item = KernelItem | ModelItem


@dataclass(frozen=True)
class CollectionWork:
    """Everything to measure for one flavour, with the family and collection of each model by record name."""

    kernels: tuple[KernelItem, ...]
    models: tuple[ModelItem, ...]
    described: tuple[DatasetKernel, ...]  # the kernels, with the models that hold them
    groups: Mapping[str, str] = field(default_factory=dict)
    collections: Mapping[str, str] = field(default_factory=dict)


def find_work(workspace: Workspace, target: Target, held_out: Sequence[str], *, needs_kernels: bool = True) -> CollectionWork:
    """Kernels and models of the target's flavour, without kernels that only held-out groups hold."""
    folder, runtime = workspace.kernel_onnx / target.flavour.name, runtime_named(target.flavour.runtime)
    path, seeds = index_path(workspace, target.flavour), read_seeds(folder)  # of sampled kernels
    index = read_index(path) if path.exists() or not seeds else KernelIndex(flavour=target.flavour, groups={}, kernels={})
    models_of = {entry.kernel.id: [model for model in entry.models if index.groups[model] not in held_out]
                 for entry in index.entries()}
    kernels = {kernel.id: kernel for kernel in index.all_kernels()}
    described = [DatasetKernel(kernel=kernels[name], models=tuple(models),
                               groups=tuple(sorted({index.groups[model] for model in models})))
                 for name, models in models_of.items() if models]
    items = []
    for path in sorted(folder.glob(f"*{runtime.kernel_suffix}")):
        models = models_of.get(path.stem, [])
        if path.stem in seeds and not models:
            groups = tuple(name for name in seeds[path.stem] if name not in held_out)
            if seeds[path.stem] and not groups:
                continue
            kernels[path.stem] = runtime.read_kernel(path)
            described.append(DatasetKernel(kernel=kernels[path.stem], models=(), groups=groups, sampled=True))
        elif not models:
            continue
        items.append(KernelItem(path, kernels[path.stem]))
    if needs_kernels and not items:
        raise UserError(f"{folder}: no kernels built for {target.flavour.name}; build them with: {runtime.build_with}")
    paths = model_files([workspace.models], runtime.model_suffixes)
    by_stem = {as_file_name(path.stem): path for path in paths}
    models_found = []
    for record in records_in(workspace, target.flavour):
        model_path = by_stem.get(record.file_stem)
        if model_path is None:
            raise UserError(f"{workspace.models}: the model of record {record.model} is gone; export it again with "
                            "model_zoo/torchvision_exporter.py, or remove the record")
        models_found.append(ModelItem(model_path, record_path(workspace, target.flavour, record.model), record,
                                      measures_kernels=record.group not in held_out))
    return CollectionWork(tuple(items), tuple(models_found), tuple(described), index.groups, index.collections)


def energy_batches(items: Sequence[KernelItem], device: str) -> list[list[KernelItem]]:
    """The largest kernels per operator and type, as many as fit into memory. Batches of few kernels are left out, since their
    energy is too small to measure."""
    by_class: dict[tuple[str, str], list[KernelItem]] = {}
    for item in sorted(items, key=lambda item: -item.work):
        if item.kernel.moves_data:
            by_class.setdefault((item.kernel.op_type, item.kernel.dtype), []).append(item)
    return [batch for kernels in by_class.values()
            if len(batch := next(carriers(kernels[:MOST_IN_BATCH], CARRIER_BYTES[device]))) >= LEAST_IN_BATCH]


def by_similar_work(items: Sequence[KernelItem]) -> list[list[KernelItem]]:
    """Groups kernels of similar duration. What the profiler adds to their times follows from runs of a carrier with and without
    it; the noise of a long kernel in the carrier would hide that."""
    groups: dict[int, list[KernelItem]] = {}
    for item in items:
        groups.setdefault(max(item.work, LEAST_WORK).bit_length() // WORK_BITS, []).append(item)
    return [groups[key] for key in sorted(groups)]


def carriers(items: Sequence[KernelItem], most_bytes: float) -> Iterator[list[KernelItem]]:
    """Groups of kernels for one carrier each: one operator-set version per domain, and at most `most_bytes` of memory."""
    group: list[KernelItem] = []
    used, opsets = 0, dict[str, int]()
    for item in items:
        kernel = item.kernel
        if group and (used + carrier_bytes(kernel) > most_bytes
                      or opsets.get(kernel.domain, kernel.opset) != kernel.opset):
            yield group
            group, used, opsets = [], 0, {}
        group.append(item)
        used += carrier_bytes(kernel)
        opsets[kernel.domain] = kernel.opset
    if group:
        yield group


def sessions_missing(models: Sequence[ModelItem], blocks: Iterable[Block], wanted: int, variants: Sequence[str]) -> list[int]:
    """How many of the `wanted` sessions each model still needs; none if it failed. Only undisturbed sessions with all variants
    count."""
    failed, counted = set[str](), Counter[str]()
    for session in model_sessions(blocks):
        if "latency" in session.labels and session.labels["latency"].status != "ok":
            failed.add(session.model)
        counted[session.model] += set(variants) <= set(session.labels) and session.undisturbed
    return [0 if item.id in failed else max(wanted - counted[item.id], 0) for item in models]


def takes_label(measurement: Measurement, label: str) -> bool:
    """Whether a measurement is of a kernel's `label` in a block of kernels, alone or in a carrier, not in a model."""
    return (measurement.subject, measurement.label) == ("kernel", label) and measurement.place != "in_model"


def _kernel_blocks(kernels: Sequence[KernelItem], size: int) -> list[PlannedBlock[Item]]:
    return [PlannedBlock(f"{len(chunk)} kernels from {chunk[0].kernel.type}", chunk) for chunk in chunks(kernels, size)]


def plan(work: CollectionWork, blocks: Iterable[Block], block_kernels: int, first_label: str = "run", block_models: int = 1,
         variants: Sequence[str] = (), sessions: int = 1) -> list[PlannedBlock[Item]]:
    """The blocks still to be measured. A kernel is done once a block of kernels has measured `first_label`, or failed to.
    `sessions_missing` decides for models; all first sessions come before second ones."""
    blocks = list(blocks)
    kernels = pending(work.kernels, blocks, lambda m: takes_label(m, first_label))
    kernel_blocks = _kernel_blocks(shuffled(kernels), block_kernels)
    missing = sessions_missing(work.models, blocks, sessions, variants)
    planned: list[PlannedBlock[Item]] = []
    for session in range(max(missing, default=0) or 1):
        models = [item for item, left in zip(work.models, missing, strict=True) if left > session]
        model_blocks: list[PlannedBlock[Item]] = [PlannedBlock(block_key(chunk), chunk)
                                                  for chunk in chunks(models, block_models)]
        planned += shuffled([*model_blocks, *([] if session else kernel_blocks)], session + 1)  # mixes models and kernels
    return planned


def with_shared_hosts(load_plan: BlockPlan[Item], config: CollectorConfig, device: str) -> BlockPlan[Item]:
    """The same plan; another GPU of the host may measure beside a block whose times are all the GPU's own (docs/cluster.md)."""
    may_share = device == "cuda" and config.labels_on(device) == (GPU_LABEL,) and not config.energy_of_kernels

    def marked(blocks: Sequence[PlannedBlock[Item]]) -> list[PlannedBlock[Item]]:
        return [block._replace(shares_host=may_share and all(isinstance(item, KernelItem) for item in block.units))
                for block in blocks]

    return BlockPlan({machine: marked(blocks) for machine, blocks in load_plan.own.items()}, marked(load_plan.shared))


def plan_load(config: CollectorConfig, work: CollectionWork, device: str, machines: Sequence[str], level: float,
              blocks: Sequence[Block]) -> BlockPlan[Item]:
    """The blocks of `work` still to be measured at a level; `blocks` are those of this load from all machines."""
    first_label = config.labels_on(device)[0]
    measured_by = {uuid: [block for block in blocks if block.machine == uuid] for uuid in machines}
    wanted = work if config.takes_kernels(level) else CollectionWork((), work.models, ())

    def blocks_left(part: CollectionWork, measured: Sequence[Block]) -> list[PlannedBlock[Item]]:
        return plan(part, measured, config.block_kernels, first_label, config.block_models,
                    () if level else config.model_labels_on(device), 1 if level else config.sessions)

    if config.each_machine:
        return BlockPlan({uuid: blocks_left(wanted, measured) for uuid, measured in measured_by.items()})
    if level:
        return BlockPlan({}, blocks_left(wanted, blocks))
    ties = choose_ties(work.kernels, blocks, machines, config.ties, lambda m: takes_label(m, first_label))
    tied = {item.id for items in ties.values() for item in items}
    own = {uuid: plan(CollectionWork(tuple(items), (), ()), measured_by[uuid], config.block_kernels, first_label)
           for uuid, items in ties.items()}
    untied = replace(wanted, kernels=tuple(item for item in wanted.kernels if item.id not in tied))
    return BlockPlan(own, blocks_left(untied, blocks))


def plan_by_usefulness(config: CollectorConfig, work: CollectionWork, device: str, machines: Sequence[str], level: float,
                       blocks: Sequence[Block], errors: Sequence[KernelError] = ()) -> BlockPlan[Item]:
    """Like `plan_load`, for a collector that may have to stop early.

    Models and their kernels come first, in mixed order, then sampled kernels by usefulness (from the held-out `errors` of a
    training, if any). There are no ties, and a kernel whose time a model gives is not measured in a block of kernels.
    """
    if not config.each_machine:
        return BlockPlan({}, _by_usefulness(config, work, device, level, blocks, errors))
    own = {uuid: _by_usefulness(config, work, device, level, [block for block in blocks if block.machine == uuid], errors)
           for uuid in machines}
    return BlockPlan(own)


def _by_usefulness(config: CollectorConfig, work: CollectionWork, device: str, level: float, counted: Sequence[Block],
                   errors: Sequence[KernelError]) -> list[PlannedBlock[Item]]:
    """The blocks in the order of `plan_by_usefulness`, without those in `counted`."""
    first_label = config.labels_on(device)[0]
    missing = sessions_missing(work.models, counted, 1, () if level else config.model_labels_on(device))
    models = [item for item, left in zip(work.models, missing, strict=True) if left]
    from_models = {name for item in models for name in item.record.kernels
                   if config.model_labels and item.measures_kernels and first_label in IN_MODEL_LABELS}
    sampled = {entry.kernel.id for entry in work.described if entry.sampled}
    unmeasured = pending(work.kernels, counted, lambda m: (m.subject, m.label) == ("kernel", first_label))
    held_by_models = [item for item in unmeasured if item.id not in sampled | from_models]
    samples = {item.id: item for item in unmeasured if item.id in sampled}
    known = [item.kernel for item in work.kernels if item.id not in samples]
    ordered = useful_kernels([item.kernel for item in samples.values()], known, len(samples), np.random.default_rng(0), errors)
    first: list[PlannedBlock[Item]] = [PlannedBlock(block_key(chunk), chunk) for chunk in chunks(models, config.block_models)]
    return (shuffled([*first, *_kernel_blocks(shuffled(held_by_models), config.block_kernels)])
            + _kernel_blocks([samples[kernel.id] for kernel in ordered], config.block_kernels))
