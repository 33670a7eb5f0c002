"""Reads a dataset's tables and checks them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from records.dataset_files import kernel_table_path, model_table_path
from records.labels import COLLECT, GPU_LABEL, LABELS
from utils.errors import UserError
from utils.lazy import pandas as pd
from utils.paths import Workspace

if TYPE_CHECKING:
    import numpy.typing as npt

def means_add_up(level: float, device: str) -> bool:
    """Whether a kernel's time under a load is its mean and not its median: on a CPU.

    There the load takes a part of each kernel's time, and the median of short runs does not show a load that comes and goes.
    On a GPU, a kernel that runs alone sometimes waits for a whole time slice of the other process. A model waits for that
    once, not once per kernel: means of kernels do not add up, and medians err less.
    """
    return level > 0 and device == "cpu"


def read_table(path: Path) -> pd.DataFrame:
    """`kernel_latency.csv` or `model_latency.csv`, checked: times positive and finite, the user's columns there.

    Column Background is text, and there in every table: "" where the device was idle, or where the table has no such column.

    Raises:
        UserError: no file, a column missing, or a NaN or non-positive time in a row whose status is ok (row named).
    """
    try:
        table = pd.read_csv(path, keep_default_na=True, na_values=[""], low_memory=False,  # a column is read as one type
                            dtype={"Background": str, "Groups": str})
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
    others = ("run_median_ms", "median_ms", *(f"{label}_ms" for label in LABELS))
    for column in ["Latency_ms", *(name for name in others if name in table.columns)]:
        values = pd.to_numeric(ok[column], errors="coerce")
        required = ok[column].notna()  # a label need not have been taken …
        if column == "Latency_ms":  # … but if runs were counted, their figure must be there
            required |= pd.to_numeric(ok["Runs"], errors="coerce") > 0 if "Runs" in ok.columns else True
        too_small = values < 0 if column == f"{GPU_LABEL}_ms" else values <= 0  # some kernels leave the GPU nothing to do
        bad = ok[too_small | np.isinf(values) | (values.isna() & required)]
        if len(bad):
            row = bad.index[0]
            raise UserError(f"{path}, line {row + 2}: {column} is {table.at[row, column]!s} for {table.at[row, key]!s}; "
                            f"a time is a positive number (remove the row, or measure it anew: {COLLECT})")
    return table.assign(Background=table["Background"].fillna("") if "Background" in table.columns else "")


def read_kernel_table(workspace: Workspace, target: str) -> pd.DataFrame:
    """The kernel table of a target, checked."""
    return read_table(kernel_table_path(workspace.dataset(target)))


def read_model_table(workspace: Workspace, target: str) -> pd.DataFrame:
    """The model table of a target, checked."""
    return read_table(model_table_path(workspace.dataset(target)))


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
