"""The kernels and models to measure for a target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hase.kernel_model.building.kernel_models import carrier_bytes
from hase.kernel_model.sampling.seeds import read_seeds
from hase.records.dataset_files import DatasetKernel
from hase.records.kernel_record import Kernel, KernelIndex, ModelRecord
from hase.records.kernel_record_files import index_path, read_index, record_path, records_in
from hase.runtimes import runtime_named
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target
from hase.utils.paths import Workspace, as_file_name, model_files

LEAST_WORK, WORK_BITS = 1 << 15, 2  # operations and bytes: kernels with less, and within a factor of four, are alike
CARRIER_BYTES = {"cpu": 512 << 20, "cuda": 16 << 30}  # largest memory of one carrier's kernels, unless the config says it
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
        """Its operations and bytes together, for an order by size."""
        return self.kernel.flops + self.kernel.bytes_read + self.kernel.bytes_written


@dataclass(frozen=True)
class ModelItem:
    """A model to measure.

    Attributes:
        labels: whether its kernels are measured in it.
        only: if not empty, only these kernels are measured, by id, and not the model itself.
        inputs: a file with values of its inputs; None: made-up ones.
    """

    path: Path
    record_path: Path
    record: ModelRecord
    labels: bool
    only: frozenset[str] = frozenset()
    inputs: Path | None = None

    @property
    def id(self) -> str:
        return self.record.model


Item = KernelItem | ModelItem


@dataclass(frozen=True)
class Work:
    """Everything to measure for one flavour.

    Attributes:
        described: the kernels, with the models that hold them.
        groups, collections: of these models and of those to measure, by record name.
    """

    kernels: tuple[KernelItem, ...]
    models: tuple[ModelItem, ...]
    described: tuple[DatasetKernel, ...]
    groups: Mapping[str, str] = field(default_factory=dict)
    collections: Mapping[str, str] = field(default_factory=dict)


def find_work(workspace: Workspace, target: Target, held_out: Sequence[str], *, needs_kernels: bool = True) -> Work:
    """The kernels and models of the target's flavour, without the kernels that only held-out groups hold.

    Where only the index of the flavour is there, and no record, it is the kernels alone; where there is no index, those of no
    model.

    Raises:
        UserError: no kernels were built although `needs_kernels`, or the model file of a record is missing.
    """
    folder, runtime = workspace.kernel_onnx / target.flavour.name, runtime_named(target.flavour.runtime)
    path, seeds = index_path(workspace, target.flavour), read_seeds(folder)
    index = read_index(path) if path.exists() or not seeds else KernelIndex(flavour=target.flavour, groups={}, kernels={})
    fitted = {entry.kernel.id: [model for model in entry.models if index.groups[model] not in held_out]
              for entry in index.entries()}
    kernels = {kernel.id: kernel for kernel in index.all_kernels()}
    described = [DatasetKernel(kernel=kernels[name], models=tuple(models),
                               groups=tuple(sorted({index.groups[model] for model in models})))
                 for name, models in fitted.items() if models]
    items = []
    for path in sorted(folder.glob(f"*{runtime.kernel_suffix}")):
        models = fitted.get(path.stem, [])
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
                                      labels=record.group not in held_out))
    return Work(tuple(items), tuple(models_found), tuple(described), index.groups, index.collections)


def energy_batches(items: Sequence[KernelItem], device: str) -> list[list[KernelItem]]:
    """Of each operator and element type, the kernels with the most operations and bytes, as many as fit into memory together;
    no batch where these are few, since a single kernel's energy can't be measured."""
    by_class: dict[tuple[str, str], list[KernelItem]] = {}
    for item in sorted(items, key=lambda item: -item.work):
        if item.kernel.moves_data:
            by_class.setdefault((item.kernel.op_type, item.kernel.dtype), []).append(item)
    return [batch for of_class in by_class.values()
            if len(batch := next(carriers(of_class[:MOST_IN_BATCH], CARRIER_BYTES[device]))) >= LEAST_IN_BATCH]


def of_like_work(items: Sequence[KernelItem]) -> list[list[KernelItem]]:
    """Kernels in groups that take about as long as each other. What a profiler adds to each node's time is learned from what it
    adds to a carrier's, and beside a kernel of some milliseconds that is lost in noise."""
    groups: dict[int, list[KernelItem]] = {}
    for item in items:
        groups.setdefault(max(item.work, LEAST_WORK).bit_length() // WORK_BITS, []).append(item)
    return [groups[key] for key in sorted(groups)]


def carriers(items: Sequence[KernelItem], most_bytes: float) -> Iterator[list[KernelItem]]:
    """Groups of kernels, each for one carrier: one operator-set version per domain, and no more memory than `most_bytes`,
    unless a single kernel takes more."""
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
