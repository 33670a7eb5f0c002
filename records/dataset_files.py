"""A dataset's files: its header, its kernels, its journal and its two tables; where they lie, how they are read, and whether
the tables are those of the journal."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, ValidationError
from pydantic_core import from_json

from hase.records.backgrounds import Background
from hase.records.blocks import Block, journal_line, read_blocks
from hase.records.environment import Environment
from hase.records.kernel_costs import recosted
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.measurement import COLLECT, DATASET_VERSION, DEFAULT_LABELS, GPU_LABEL, LABELS
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import Machine, Target
from hase.utils.frozen import Frozen
from hase.utils.lazy import pandas as pd
from hase.utils.paths import FileName, Workspace, targets_in
from hase.utils.sharing_mode import SLICES

if TYPE_CHECKING:
    import numpy.typing as npt


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

    def with_owners_of(self, description: DatasetKernel | None) -> DatasetKernel:
        """The same kernel, of which both descriptions hold."""
        if description is None:
            return self
        return self.model_copy(update={"models": tuple(dict.fromkeys((*description.models, *self.models))),
                                       "groups": tuple(sorted({*description.groups, *self.groups})),
                                       "sampled": description.sampled or self.sampled})

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
    sharing: str = Field(SLICES, exclude_if=lambda sharing: sharing == SLICES)  # how processes shared the GPU: `GpuSharing`
    environment: Environment | None = Field(None, exclude_if=lambda environment: environment is None)  # of kernels under TVM

    @cached_property
    def families(self) -> dict[str, frozenset[str]]:
        """The groups of the models of each collection."""
        groups_of: dict[str, set[str]] = {}
        for model, collection in self.collections.items():
            groups_of.setdefault(collection, set()).update({self.groups[model]} if model in self.groups else ())
        return {collection: frozenset(groups) for collection, groups in groups_of.items()}

    def collections_of(self, described: DatasetKernel) -> frozenset[str]:
        """The collections of the models that hold a kernel, and those with a group near whose shapes it was sampled."""
        near = set(described.groups) if described.sampled else set()
        return frozenset({self.collections[model] for model in described.models if model in self.collections} | {
            collection for collection, groups in self.families.items() if groups & near})


class FileDigest(Frozen):
    """A file's size in bytes, without a line that was cut short, and the SHA-256 of its contents."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """That of a file; NO_FILE where there is none."""
        return cls(bytes=files.complete_bytes(path), sha256=files.kept_sha256(path)) if path.is_file() else NO_FILE


NO_FILE = FileDigest(bytes=0, sha256="")


class TableDigests(Frozen):
    """`tables.json`: of the two tables, and of the journal and the kernels that they were made of, by the file's name."""

    version: int = DATASET_VERSION
    files: dict[FileName, FileDigest]


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


def digests_path(folder: Path) -> Path:
    """`tables.json`: a TableDigests."""
    return folder / "tables.json"


def collected_targets(workspace: Workspace) -> list[str]:
    """Every target that has a dataset.

    Raises:
        UserError: none has.
    """
    return targets_in(workspace.dataset(""), header_path(Path()).name, f"no datasets; measure one with: {COLLECT}")


def read_header(folder: Path) -> DatasetHeader:
    """The header of the dataset in `folder`.

    Raises:
        UserError: there is none, or it is damaged or of another version.
    """
    if not header_path(folder).is_file():
        raise UserError(f"{folder}: no dataset of target {folder.name}; measure it with: {COLLECT}")
    return files.read_record(header_path(folder), DatasetHeader, DATASET_VERSION, COLLECT)


def read_journal(folder: Path) -> list[Block]:
    """Every finished block, in the order measured.

    Raises:
        UserError: a line is damaged or no block of this version, or the tables were made of more than is there.
    """
    path = journal_path(folder)
    blocks = read_blocks(path)
    before = noted_digests(folder).get(path.name, NO_FILE).bytes
    if (now := files.complete_bytes(path) if path.is_file() else 0) < before:
        raise UserError(f"{path}: blocks are missing: it has {now} bytes, and had {before} when the tables were made of it; "
                        f"restore it, or remove {digests_path(folder)} to go on with what is left")
    return blocks


def write_journal(folder: Path, blocks: Iterable[Block]) -> None:
    """Writes a journal that holds some blocks, in place of an existing one. Tables that were made of that no longer count."""
    digests_path(folder).unlink(missing_ok=True)
    files.write_text(journal_path(folder), "".join(f"{journal_line(block)}\n" for block in blocks))


def note_tables(folder: Path) -> None:
    """Writes `tables.json`, after the tables were made of the journal and the kernels as they are now."""
    paths = (journal_path(folder), kernels_path(folder), kernel_table_path(folder), model_table_path(folder))
    files.write_json(digests_path(folder), TableDigests(files={path.name: FileDigest.of(path) for path in paths}))


def noted_digests(folder: Path) -> dict[str, FileDigest]:
    """What `tables.json` says; nothing where there is none, or where it is damaged."""
    try:
        return files.read_record(digests_path(folder), TableDigests, DATASET_VERSION, COLLECT).files
    except UserError:
        return {}


def are_as_noted(folder: Path, *paths: Path) -> bool:
    """Whether these files of a dataset are as `tables.json` says; no where it does not name them."""
    noted = noted_digests(folder)
    return all(noted.get(path.name) == FileDigest.of(path) for path in paths)


def kernel_lines(folder: Path) -> dict[str, str]:
    """The lines of `kernels.jsonl` as text without their digests, by kernel id.

    Raises:
        UserError: a line is damaged, or describes no kernel.
    """
    path, lines = kernels_path(folder), dict[str, str]()
    for number, line in enumerate(files.read_lines(path, appended=False), 1):
        try:
            text = files.line_without_digest(line)
            lines[str(from_json(text)["kernel"]["id"])] = text
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path}, line {number}: damaged ({error}); measure anew: {COLLECT}") from None
    return lines


def write_kernels(folder: Path, lines: Iterable[str]) -> None:
    """Writes `kernels.jsonl`; `lines` are DatasetKernels as JSON."""
    files.write_text(kernels_path(folder), "".join(f"{files.line_with_digest(line)}\n" for line in lines))


def read_kernels(folder: Path, ids: Collection[str] | None = None) -> list[DatasetKernel]:
    """Every kernel of the dataset with the models that hold it, or only those with some ids, which is faster.

    Operations and bytes are counted anew, so that training counts them in the same way as prediction.

    Raises:
        UserError: a line describes no kernel.
    """
    try:
        kernels = [DatasetKernel.model_validate_json(line) for name, line in kernel_lines(folder).items()
                   if ids is None or name in ids]
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{kernels_path(folder)}: damaged at {'.'.join(map(str, first['loc']))}: {first['msg']}; measure anew: "
                        f"{COLLECT}") from None
    return [described.model_copy(update={"kernel": recosted(described.kernel)}) for described in kernels]


def read_table(path: Path) -> pd.DataFrame:
    """`kernel_latency.csv` or `model_latency.csv`, checked: times positive and finite, the user's columns there.

    Column Background is text, and there in every table: "" where the device was idle, or where the table has no such column.

    Raises:
        UserError: no file, a column missing, or a NaN or non-positive time in a row whose status is ok (row named).
    """
    try:
        table = pd.read_csv(path, keep_default_na=True, na_values=[""], low_memory=False,  # a column is read as one type
                            dtype={"Background": str, "Groups": str, "Unsteady": str, "Inputs": str})
    except FileNotFoundError:
        raise UserError(f"{path}: no such dataset; measure one with: {COLLECT}") from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a CSV dataset ({error})") from None
    key = "Kernel_ID" if "Kernel_ID" in table.columns or "Model" not in table.columns else "Model"
    needed = [key, "Latency_ms", "Level", "Status"]
    needed += ["OpType", "Input_Shape", "Models", "Groups"] if key == "Kernel_ID" else []
    missing = [column for column in needed if column not in table.columns]
    if missing:
        raise UserError(f"{path}: column {', '.join(missing)} missing; make the dataset anew: {COLLECT}")
    if pd.to_numeric(table["Level"], errors="coerce").isna().any():
        raise UserError(f"{path}: column Level holds a value that is no number; make the dataset anew: {COLLECT}")
    ok = table[table["Status"] == "ok"]
    time_columns = ("run_median_ms", "median_ms", *(f"{label}_ms" for label in LABELS))
    for column in ["Latency_ms", *(name for name in time_columns if name in table.columns)]:
        values = pd.to_numeric(ok[column], errors="coerce")
        required = ok[column].notna()  # a label need not have been taken …
        if column == "Latency_ms":  # … but if runs were counted, their figure must be there
            required |= pd.to_numeric(ok["Runs"], errors="coerce") > 0 if "Runs" in ok.columns else True
        too_small = values < 0 if column == f"{GPU_LABEL}_ms" else values <= 0  # some kernels leave the GPU nothing to do
        bad = ok[too_small | np.isinf(values) | (values.isna() & required)]
        if len(bad):
            row = bad.index[0]
            raise UserError(f"{path}, line {row + 2}: {column} is {table.at[row, column]!s} for {table.at[row, key]!s}; "
                            "a time is a positive number; remove its line from the journal and measure it anew: "
                            f"{COLLECT}")
    return table.assign(Background=table["Background"].fillna("") if "Background" in table.columns else "")


def means_add_up(level: float, device: str) -> bool:
    """Whether a kernel's time under a load is its mean and not its median: on a CPU.

    There the load takes a part of each kernel's time, and the median of short runs does not show a load that comes and goes.
    On a GPU, a kernel that runs alone sometimes waits for a whole time slice of the other process. A model waits for that
    once, not once per kernel: means of kernels do not add up, and medians err less.
    """
    return level > 0 and device == "cpu"


def run_ms(table: pd.DataFrame, device: str) -> npt.NDArray[np.float64]:
    """Label `run` of each row of a kernel table; NaN if the label was not taken.

    It is the median, because single disturbed runs change the mean; but the mean at levels where means add up
    (`means_add_up`).
    """
    mean = table["Latency_ms"].to_numpy(dtype=float)
    if "run_median_ms" not in table.columns:
        return mean
    median = table["run_median_ms"].to_numpy(dtype=float)
    by_mean = np.array([means_add_up(level, device) for level in table["Level"]], dtype=bool)
    return np.where(np.isfinite(median) & ~by_mean, median, mean)


def idle_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a model table that were measured successfully on an idle device."""
    return table[(table["Status"] == "ok") & (table["Level"] == 0)]
