"""Measured times of the same kernels on several cards, in one file: public tables, and kernels of Hase's own."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hase.learned.data_sheet.work import DTYPES, KINDS, Floats, Work, peaks_flop_s
from hase.records.gpu_catalogue import Gpu, gpu_named
from hase.utils.errors import UserError
from hase.utils.lazy import pandas as pd

LEAST_SHARE = 0.9  # of the time that a card takes at its peak: what is shorter can't be
ABOUT = ("kind", "dtype", "operator", "shape", "flops", "moved_bytes", "outputs", "launches", "split")
COLUMNS = ("table", *ABOUT, "gpu", "ms")


class Table(NamedTuple):
    """The same kernels on several cards.

    Attributes:
        name: of the table.
        operators: of its kernels, by their names.
        splits: the source's own split of each kernel, "" where it has none.
        work: of its kernels.
        ms: by the card's short name, a time for each kernel; NaN where it was not measured.
    """

    name: str
    operators: list[str]
    splits: list[str]
    work: Work
    ms: dict[str, Floats]


def read_tables(path: Path) -> list[Table]:
    """The tables in a file of COLUMNS: a line for each kernel on each card. Times that can't be are left out.

    Raises:
        UserError: the file is missing or lacks a column, or a card is not in the catalogue.
    """
    try:
        rows = pd.read_csv(path, keep_default_na=False, dtype={"table": "category", "gpu": "category"})
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no table of kernels on several cards ({error}); make it with recipes/gpus/derive_tables.py"
                        ) from None
    if missing := [column for column in COLUMNS if column not in rows]:
        raise UserError(f"{path}: lacks the columns {', '.join(missing)}")
    for name in rows["gpu"].unique():
        card(str(name))
    return [_table(str(name), of_table) for name, of_table in rows.groupby("table", sort=True, observed=True)]


def _table(name: str, rows: pd.DataFrame) -> Table:
    table = _as_written(name, rows)
    for gpu, wrong in impossible(table).items():
        table.ms[gpu][wrong] = np.nan
    return table


def _as_written(name: str, rows: pd.DataFrame) -> Table:
    times = rows.pivot_table(index=list(ABOUT), columns="gpu", values="ms", aggfunc="median", observed=True)
    about = times.index.to_frame(index=False)
    flops, moved_bytes, outputs = (about[column].to_numpy(float) for column in ("flops", "moved_bytes", "outputs"))
    work = Work(flops, moved_bytes, outputs,
                np.array([KINDS.index(kind) for kind in about["kind"]], dtype=int),
                np.array([DTYPES.index(dtype) for dtype in about["dtype"]], dtype=int), about["launches"].to_numpy(float))
    return Table(name, about["operator"].tolist(), about["split"].tolist(), work,
                 {str(gpu): times[gpu].to_numpy(float, copy=True) for gpu in times.columns})


def impossible(table: Table) -> dict[str, npt.NDArray[np.bool_]]:
    """Which times of each card are shorter than its sheet allows: such labels are wrong."""
    return {name: too_short(table.work, ms, card(name)) for name, ms in table.ms.items()}


def too_short(work: Work, ms: Floats, gpu: Gpu) -> npt.NDArray[np.bool_]:
    """Which times (ms) of kernels are shorter than the card's sheet allows."""
    return np.asarray(ms * 1e-3 < LEAST_SHARE * work.flops / peaks_flop_s(work, gpu))


def card(name: str) -> Gpu:
    """The card that a table calls by this name.

    Raises:
        UserError: it is not in the catalogue.
    """
    gpu = gpu_named(name)
    if gpu is None:
        raise UserError(f"{name}: not in the catalogue of GPUs (records/gpus.yaml)")
    return gpu
