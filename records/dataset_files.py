"""The files of a dataset: their paths, and how they are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path

from pydantic import Field, ValidationError
from pydantic_core import from_json

from records.backgrounds import Background
from records.blocks import Block
from records.environment import Environment
from records.journal import read_blocks
from records.kernel_costs import recosted
from records.kernel_record import Kernel, ModelRecord
from records.labels import COLLECT, DATASET_VERSION, DEFAULT_LABELS
from utils import files
from utils.errors import UserError
from utils.fingerprint import Machine, Target
from utils.frozen import Frozen
from utils.paths import Workspace, targets_in
from utils.safe_names import FileName


class DatasetKernel(Frozen):
    """A kernel of the dataset, and where it comes from.

    Attributes:
        models: that hold it, by record name.
        groups: of these models, and of those that hold the kernel near whose shapes it was sampled, sorted; none for a kernel
            that was drawn freely.
        sampled: whether it was sampled.
    """

    kernel: Kernel
    models: tuple[str, ...]
    groups: tuple[FileName, ...]
    sampled: bool = False

    @classmethod
    def held_by(cls, kernel: Kernel, records: Iterable[ModelRecord]) -> DatasetKernel:
        """A kernel that those of `records` hold in which it is."""
        holders = [record for record in records if kernel.id in record.kernels]
        return cls(kernel=kernel, models=tuple(record.model for record in holders),
                   groups=tuple(sorted({record.group for record in holders})))

    def with_owners_of(self, other: DatasetKernel | None) -> DatasetKernel:
        """The same kernel, of which both descriptions hold."""
        if other is None:
            return self
        return self.model_copy(update={"models": tuple(dict.fromkeys((*other.models, *self.models))),
                                       "groups": tuple(sorted({*other.groups, *self.groups})),
                                       "sampled": other.sampled or self.sampled})

    @property
    def owners(self) -> str:
        """What column Models says to people: the models, or else `sampled:` and each group near whose shapes it was sampled."""
        return "|".join(self.models or ([f"sampled:{group}" for group in self.groups or ("",)] if self.sampled else []))


class DatasetHeader(Frozen):
    """`dataset.json`: what all rows of a dataset have in common, the machines by uuid, and the backgrounds by name."""

    version: int = DATASET_VERSION
    target: Target
    metrics: tuple[str, ...]
    machines: dict[str, Machine]
    held_out: tuple[str, ...] = ()  # groups of models measured for evaluation only: they are in no fit
    groups: dict[str, FileName] = {}  # of the models that hold kernels or were measured, by record name
    collections: dict[str, FileName] = {}  # of those among them that have one
    labels: tuple[str, ...] = DEFAULT_LABELS  # of every kernel; without the first one it counts as not measured
    backgrounds: dict[str, Background] = {}  # a block under load that names none is of the first
    held_out_backgrounds: tuple[str, ...] = ()  # measured for evaluation only: their rows are in no fit
    energy: bool = Field(False, exclude_if=lambda energy: not energy)  # whether the energy of models was measured
    environment: Environment | None = Field(None, exclude_if=lambda found: found is None)  # of kernels under TVM

    @cached_property
    def families(self) -> dict[str, frozenset[str]]:
        """The groups of the models of each collection."""
        found: dict[str, set[str]] = {}
        for model, collection in self.collections.items():
            found.setdefault(collection, set()).update({self.groups[model]} if model in self.groups else ())
        return {collection: frozenset(groups) for collection, groups in found.items()}

    def collections_of(self, described: DatasetKernel) -> frozenset[str]:
        """The collections of the models that hold a kernel, and those with a group near whose shapes it was sampled."""
        near = set(described.groups) if described.sampled else set()
        return frozenset({self.collections[model] for model in described.models if model in self.collections} | {
            collection for collection, groups in self.families.items() if groups & near})


def header_path(folder: Path) -> Path:
    return folder / "dataset.json"


def journal_path(folder: Path) -> Path:
    return folder / "measurements.jsonl"


def kernels_path(folder: Path) -> Path:
    """`kernels.jsonl`: one DatasetKernel per line, for every id in the table."""
    return folder / "kernels.jsonl"


def kernel_table_path(folder: Path) -> Path:
    return folder / "kernel_latency.csv"


def model_table_path(folder: Path) -> Path:
    return folder / "model_latency.csv"


def collected_targets(workspace: Workspace) -> list[str]:
    """Every target that has a dataset.

    Raises:
        UserError: none has.
    """
    return targets_in(workspace.dataset(""), header_path(Path()).name, f"no datasets; measure one with: {COLLECT}")


def read_header(folder: Path) -> DatasetHeader:
    """The header of the dataset in `folder`; `UserError` where there is none."""
    if not header_path(folder).is_file():
        raise UserError(f"{folder}: no dataset of target {folder.name}; measure it with: {COLLECT}")
    return files.read_record(header_path(folder), DatasetHeader, DATASET_VERSION, COLLECT)


def read_journal(folder: Path) -> list[Block]:
    """Every finished block, in the order measured.

    Raises:
        UserError: a line is no block of this version.
    """
    return read_blocks(journal_path(folder))


def kernel_lines(folder: Path) -> dict[str, str]:
    """The lines of `kernels.jsonl` as text, by kernel id.

    Raises:
        UserError: a line describes no kernel.
    """
    try:
        return {str(from_json(line)["kernel"]["id"]): line for line in files.read_lines(kernels_path(folder))}
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{kernels_path(folder)}: damaged ({error}); measure anew: {COLLECT}") from None


def read_kernels(folder: Path, ids: Collection[str] | None = None) -> list[DatasetKernel]:
    """Every kernel of the dataset with the models that hold it, or only those with some ids, which is faster.

    Operations and bytes are counted anew, so that training counts them in the same way as prediction.

    Raises:
        UserError: a line describes no kernel.
    """
    try:
        found = [DatasetKernel.model_validate_json(line) for name, line in kernel_lines(folder).items()
                 if ids is None or name in ids]
    except ValidationError as error:
        raise UserError(f"{kernels_path(folder)}: damaged ({error.errors()[0]['msg']}); measure anew: {COLLECT}") from None
    return [described.model_copy(update={"kernel": recosted(described.kernel)}) for described in found]
