"""The files of a dataset: header, kernels, journal and tables. Reads them, and checks that the tables match the journal."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, ValidationError
from pydantic_core import from_json

from hase.records.devices import Environment
from hase.records.kernel_costs import with_current_costs
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.measurement import (
    COLLECT,
    DATASET_VERSION,
    DEFAULT_LABELS,
    GPU_LABEL,
    LABELS,
    Background,
    Block,
    journal_line,
    read_blocks,
)
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError, first_problem
from hase.utils.fingerprint import Machine, Target
from hase.utils.lazy import pandas as pd
from hase.utils.paths import FileName, Workspace, targets_in
from hase.utils.sharing_mode import SLICES

if TYPE_CHECKING:
    import numpy.typing as npt

COPIES_VERSION = 1
MEASURE_COPIES = "python recipes/cuda_kernels/measure_copies.py"


class DatasetKernel(Frozen):
    """A kernel of the dataset and its origin."""

    kernel: Kernel
    models: tuple[str, ...]  # record names of models that contain it
    # sorted; of these models, and of models near whose kernels it was sampled. Empty if it was drawn freely
    groups: tuple[FileName, ...]
    sampled: bool = False

    @classmethod
    def held_by(cls, kernel: Kernel, records: Iterable[ModelRecord]) -> DatasetKernel:
        """A kernel whose models are those `records` that contain it."""
        holders = [record for record in records if kernel.id in record.kernels]
        return cls(kernel=kernel, models=tuple(record.model for record in holders),
                   groups=tuple(sorted({record.group for record in holders})))

    def with_owners_of(self, description: DatasetKernel | None) -> DatasetKernel:
        """The same kernel with the models and groups of both descriptions."""
        if description is None:
            return self
        return self.model_copy(update={"models": tuple(dict.fromkeys((*description.models, *self.models))),
                                       "groups": tuple(sorted({*description.groups, *self.groups})),
                                       "sampled": description.sampled or self.sampled})

    @property
    def owners(self) -> str:
        """The text in column Models: the models, or for a sampled kernel `sampled:` and each group near whose kernels it was
        sampled."""
        return "|".join(self.models or ([f"sampled:{group}" for group in self.groups or ("",)] if self.sampled else []))


class DatasetHeader(Frozen):
    """`dataset.json`: what all rows have in common. Machines are by UUID, backgrounds by name."""

    version: int = DATASET_VERSION
    target: Target
    metrics: tuple[str, ...]
    machines: dict[str, Machine]
    held_out: tuple[str, ...] = ()  # groups of models measured for evaluation only: they are in no fit
    groups: dict[str, FileName] = {}  # groups of models with kernels or measurements, by record name
    collections: dict[str, FileName] = {}  # collections of those models that have one
    labels: tuple[str, ...] = DEFAULT_LABELS  # labels of every kernel; without the first it counts as unmeasured
    backgrounds: dict[str, Background] = {}  # the first one is that of blocks that name none
    held_out_backgrounds: tuple[str, ...] = ()  # measured for evaluation only: their rows are in no fit
    energy: bool = Field(False, exclude_if=lambda energy: not energy)  # whether the energy of models was measured
    sharing: str = Field(SLICES, exclude_if=lambda sharing: sharing == SLICES)  # how processes shared the GPU: `GpuSharing`
    environment: Environment | None = Field(None, exclude_if=lambda environment: environment is None)  # of kernels under TVM

    @cached_property
    def families(self) -> dict[str, frozenset[str]]:
        """The model groups of each collection."""
        groups_of: dict[str, set[str]] = {}
        for model, collection in self.collections.items():
            groups_of.setdefault(collection, set()).update({self.groups[model]} if model in self.groups else ())
        return {collection: frozenset(groups) for collection, groups in groups_of.items()}

    def collections_of(self, described: DatasetKernel) -> frozenset[str]:
        """The collections of the models that contain a kernel, and of the groups near whose kernels it was sampled."""
        near = set(described.groups) if described.sampled else set()
        return frozenset({self.collections[model] for model in described.models if model in self.collections} | {
            collection for collection, groups in self.families.items() if groups & near})


class FileDigest(Frozen):
    """A file's size in bytes, without a last line that was cut short, and the SHA-256 of the whole file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """The digest of a file; NO_FILE if there is none."""
        return cls(bytes=files.complete_bytes(path), sha256=files.cached_sha256(path)) if path.is_file() else NO_FILE


NO_FILE = FileDigest(bytes=0, sha256="")


class TableDigests(Frozen):
    """`tables.json`: digests by file name, of the two tables and of the journal and kernels that they were made from."""

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
    """Every target that has a dataset."""
    return targets_in(workspace.dataset(""), header_path(Path()).name, f"no datasets; measure one with: {COLLECT}")


def read_header(folder: Path) -> DatasetHeader:
    """The header of the dataset in `folder`; a `UserError` if there is none."""
    if not header_path(folder).is_file():
        raise UserError(f"{folder}: no dataset of target {folder.name}; measure it with: {COLLECT}")
    return files.read_record(header_path(folder), DatasetHeader, DATASET_VERSION, COLLECT)


def read_journal(folder: Path) -> list[Block]:
    """Every finished block, in the order measured."""
    path = journal_path(folder)
    blocks = read_blocks(path)
    before = read_digests(folder).get(path.name, NO_FILE).bytes
    if (now := files.complete_bytes(path) if path.is_file() else 0) < before:
        raise UserError(f"{path}: blocks are missing: it has {now} bytes, and had {before} when the tables were made of it; "
                        f"restore it, or remove {digests_path(folder)} to go on with what is left")
    return blocks


def write_journal(folder: Path, blocks: Iterable[Block]) -> None:
    """Writes a journal, replacing an older one; its tables become invalid."""
    digests_path(folder).unlink(missing_ok=True)
    files.write_text(journal_path(folder), "".join(f"{journal_line(block)}\n" for block in blocks))


def write_digests(folder: Path) -> None:
    """Writes `tables.json` with the current digests; called after the tables were written."""
    paths = (journal_path(folder), kernels_path(folder), kernel_table_path(folder), model_table_path(folder))
    files.write_json(digests_path(folder), TableDigests(files={path.name: FileDigest.of(path) for path in paths}))


def read_digests(folder: Path) -> dict[str, FileDigest]:
    """The contents of `tables.json`; empty if it is missing or damaged."""
    try:
        return files.read_record(digests_path(folder), TableDigests, DATASET_VERSION, COLLECT).files
    except UserError:
        return {}


def digests_match(folder: Path, *paths: Path) -> bool:
    """Whether these files have the digests in `tables.json`."""
    digests = read_digests(folder)
    return all(digests.get(path.name) == FileDigest.of(path) for path in paths)


def kernel_lines(folder: Path) -> dict[str, str]:
    """The lines of `kernels.jsonl` without their digests, by kernel id."""
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
    """The kernels of the dataset with the models that contain them, or only those with some `ids`, which is faster. Operations
    and bytes are recomputed, so that training counts them as prediction does."""
    try:
        kernels = [DatasetKernel.model_validate_json(line) for name, line in kernel_lines(folder).items()
                   if ids is None or name in ids]
    except ValidationError as error:
        raise UserError(f"{kernels_path(folder)}: damaged at {first_problem(error)}; measure anew: {COLLECT}") from None
    return [described.model_copy(update={"kernel": with_current_costs(described.kernel)}) for described in kernels]


def read_table(path: Path) -> pd.DataFrame:
    """`kernel_latency.csv` or `model_latency.csv`, checked: positive finite times, and the user's columns. Column Background is
    always there as text: "" for an idle device, or if the file has no such column."""
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
        raise UserError(f"{path}: column Level has a value that is not a number; make the dataset anew: {COLLECT}")
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
    """Whether a kernel's time under a load is its mean (on a CPU) and not its median.

    On a CPU the load takes a part of each kernel's time, and the median of short runs misses a load that comes and goes. On a
    GPU, a kernel that runs alone sometimes waits for a whole time slice of the other process. A model waits for that once, not
    once per kernel: means of kernels do not add up, and medians err less.
    """
    return level > 0 and device == "cpu"


def run_ms(table: pd.DataFrame, device: str) -> npt.NDArray[np.float64]:
    """The time for label `run` in each row of a kernel table; NaN if it was not measured. It is the median, because disturbed
    runs change the mean; but the mean where `means_add_up`."""
    mean = table["Latency_ms"].to_numpy(dtype=float)
    if "run_median_ms" not in table.columns:
        return mean
    median = table["run_median_ms"].to_numpy(dtype=float)
    by_mean = np.array([means_add_up(level, device) for level in table["Level"]], dtype=bool)
    return np.where(np.isfinite(median) & ~by_mean, median, mean)


def idle_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a model table with a successful measurement on an idle device."""
    return table[(table["Status"] == "ok") & (table["Level"] == 0)]


class CopyTimes(Frozen):
    """Latencies (ms) of small graphs with copies; all their tensors have the same size, `bytes`."""

    bytes: int
    # by the name of the graph. `one`, `gpu`: one and two nodes on the GPU; `cpu`: one node on the CPU; `to_host`: GPU, then
    # CPU; `to_gpu`: CPU, then GPU; `through_one`, `through_four`: a node on the GPU, then one or four times a node on the CPU
    # and one on the GPU
    samples_ms: dict[str, tuple[float, ...]]


class WaitTimes(Frozen):
    """Latencies (ms) of graphs of nodes with a data-dependent output size, at each of which the host waits for the GPU."""

    operator: str
    elements: int  # of the nodes' first input (sixteen per box of NonMaxSuppression)
    samples_ms: dict[str, tuple[float, ...]]  # by the number of nodes


class MeasuredCopies(Frozen):
    """`copies.json`: the times of copies and waits that one machine measured for a target."""

    version: int = COPIES_VERSION
    target: str
    machine: Machine
    copies: tuple[CopyTimes, ...]
    waits: tuple[WaitTimes, ...]


def copies_path(dataset: Path) -> Path:
    """The path of `copies.json` for a target's dataset folder."""
    return dataset / "copies.json"


def read_copies(dataset: Path) -> MeasuredCopies | None:
    """The measured copies of a target, or None."""
    path = copies_path(dataset)
    return files.read_record(path, MeasuredCopies, COPIES_VERSION, MEASURE_COPIES) if path.is_file() else None
