"""The results of run_profile.py as times of layers, by algorithm."""

from __future__ import annotations

import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convolutions.algorithms import DEFAULT, GUESS
from convolutions.shapes import ConvShape
from model_zoo.exporting.torch_models import group_of
from utils.errors import UserError
from utils.lazy import pandas as pd
from utils.temporary import temporary_folder

MEASURE = "python convolutions/run_profile.py --model vgg16 --algorithm guess"


@dataclass(frozen=True)
class Case:
    """One call of a convolution in a model at one input size: what each algorithm takes.

    Attributes:
        gpu: short name of the device.
        model, layer, input_size: where it stands.
        shape: of the convolution.
        tf32: whether TF32 was allowed.
        times_ms: of each algorithm that could run it.
        refused: the algorithms that could not.
        own: the algorithm that the library itself chose; "" where that was not measured.
        own_ms: its time under the library's choice.
    """

    gpu: str
    model: str
    layer: str
    input_size: int
    shape: ConvShape
    tf32: bool
    times_ms: dict[str, float]
    own: str = ""
    own_ms: float | None = None
    refused: frozenset[str] = frozenset()

    @property
    def family(self) -> str:
        """The model's family, which is held out together."""
        return group_of(self.model)

    @property
    def best(self) -> str:
        """The fastest algorithm."""
        return min(self.times_ms, key=lambda name: (self.times_ms[name], name))

    @property
    def best_ms(self) -> float:
        return self.times_ms[self.best]


def own_choice(gpu: str) -> str:
    """What stands for the library's own choice: cuDNN's on a GPU, torch's on a CPU."""
    return DEFAULT if gpu == "cpu" else GUESS


@contextmanager
def unpacked(results: Path) -> Iterator[Path]:
    """The folder with the tables: `results` itself, or what is in it if it is an archive.

    Raises:
        UserError: it is a file, but no archive.
    """
    if not results.is_file():
        yield results
        return
    with temporary_folder() as folder:
        try:
            with tarfile.open(results) as archive:
                archive.extractall(folder, filter="data")
        except (tarfile.TarError, EOFError) as error:
            raise UserError(f"{results}: no archive of tables ({error}); recipes/convolutions/pack.py makes one") from None
        yield folder


def read_table(folder: Path, kind: str) -> pd.DataFrame:
    """All tables `*_<kind>.csv` below `folder`; what several stages measured counts once, that of the last stage.

    Args:
        kind: `overall` or `layers`.

    Raises:
        UserError: there is none, or one is damaged.
    """
    paths = sorted(folder.glob(f"**/*_{kind}.csv"))
    if not paths:
        raise UserError(f"{folder}: no results of convolution algorithms; measure some with: {MEASURE}")
    tables = []
    for path in paths:
        try:
            tables.append(pd.read_csv(path, keep_default_na=False, na_values=[""]))
        except (ValueError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not a table of run_profile.py ({error}); remove its folder and measure again") from None
    table = pd.concat(tables, ignore_index=True)
    keys = ["gpu", "model", "algorithm", "input_size", "batch", "dtype", "tf32", *(["layer"] if kind == "layers" else [])]
    if missing := [name for name in keys if name not in table.columns]:
        raise UserError(f"{folder}: tables without the column {missing[0]}; they are of another version, measure again")
    return table.drop_duplicates(keys, keep="last")


def read_cases(folder: Path) -> list[Case]:
    """Every layer that at least one algorithm ran, with the times (medians) of all that ran it.

    Raises:
        UserError: see `read_table`.
    """
    table = read_table(folder, "layers")
    table = table[table["in_channels"].notna()]
    rows: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for row in table.itertuples(index=False):
        rows[row.gpu, row.model, row.input_size, row.batch, row.dtype, row.tf32, row.layer].append(row)
    found = [_case(group) for group in rows.values()]
    return [case for case in found if case.times_ms]


def _case(rows: list[Any]) -> Case:
    first = rows[0]
    times_ms: dict[str, float] = {}
    own, own_ms = "", None
    refused = frozenset(row.algorithm for row in rows if row.status != "ok")
    for row in rows:
        if pd.isna(row.median_ms):
            continue
        if row.algorithm == own_choice(first.gpu):
            own, own_ms = row.ran, float(row.median_ms)
        # layers by fallback are no measurement of the algorithm; on a GPU torch's interface and `guess` are not algorithms
        if row.status == "ok" and row.ran == row.algorithm and (row.algorithm != DEFAULT or first.gpu == "cpu"):
            times_ms[row.algorithm] = float(row.median_ms)
    shape = ConvShape(
        batch=int(first.batch), in_channels=int(first.in_channels), out_channels=int(first.out_channels),
        height=int(first.height), width=int(first.width), kernel=_pair(first.kernel_size), stride=_pair(first.stride),
        padding=_pair(first.padding), dilation=_pair(first.dilation), groups=int(first.groups), bias=False, dtype=first.dtype)
    return Case(first.gpu, first.model, first.layer, int(first.input_size), shape, bool(first.tf32), times_ms, own, own_ms,
                refused)


def _pair(text: str) -> tuple[int, int]:
    height, width = text.split("x")
    return int(height), int(width)


def families(cases: Iterable[Case]) -> list[str]:
    """The families of models, sorted."""
    return sorted({case.family for case in cases})
