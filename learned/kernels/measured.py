"""Measured idle times of kernels, for look-up: from a dataset, and as a file of which a process reads only a few lines."""

from __future__ import annotations

import bisect
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from hase.learned.kernels.saved_form import write_hashed
from hase.learned.target_files import TRAIN_AGAIN
from hase.records.dataset_files import read_header, run_ms
from hase.records.dataset_tables import UNFINISHED, read_kernel_table
from hase.records.measurement import DRIFT_ADMITTED, LABELS, LAUNCHES, Milliseconds, drift_key, inputs_key, parse_unsteady
from hase.utils.errors import UserError, first_problem
from hase.utils.lazy import pandas as pd
from hase.utils.paths import Workspace
from hase.utils.timing import Floats

TIMES_COMPRESSION = 6  # level of gzip for measured times; low, since the user waits for it
INDEX_AFTER = 2000  # searches for kernels after which an index of line starts is worth its 20 ms
T = TypeVar("T")
KERNEL_SCHEMA = TypeAdapter(dict[str, Milliseconds])  # by label
FILE_SCHEMA = TypeAdapter(dict[str, dict[str, Milliseconds]])  # by kernel and label


class MeasuredTimes(Mapping[str, dict[str, float]]):
    """Idle times (ms) by kernel id and label from sorted JSON, of which only lines that are looked up are parsed."""

    def __init__(self, text: bytes, path: Path | None = None) -> None:
        """The times in JSON `text`; `path` is its file, for errors."""
        self._text, self._path = text, path
        self._searches = 0
        self._starts: list[int] = []  # of the lines; built at the INDEX_AFTER-th search

    def __getitem__(self, kernel: str) -> dict[str, float]:
        text, key = self._text, _line_start(kernel)
        if self._searches >= INDEX_AFTER:
            return self._by_index(kernel, key)
        self._searches += 1
        low, high = text.find(b"\n") + 1, text.rfind(b"\n") + 1  # the lines to search
        while low < high:
            start = max(text.rfind(b"\n", low, (low + high) // 2) + 1, low)
            end = text.index(b"\n", start)
            line = text[start:end]
            if line.startswith(key):
                return self._checked(KERNEL_SCHEMA, line[len(key):].removesuffix(b","), kernel)
            low, high = (end + 1, high) if line < key else (low, start)
        raise KeyError(kernel)

    def _by_index(self, kernel: str, key: bytes) -> dict[str, float]:
        """Looks up a kernel in an index of line starts, which is built once; for many look-ups."""
        text = self._text
        if not self._starts:
            self._starts = (np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == ord("\n")) + 1).tolist()
        starts = self._starts
        line = bisect.bisect_left(range(len(starts)), key, key=lambda index: text[starts[index]:starts[index] + len(key)])
        if line == len(starts) or not text.startswith(key, starts[line]):
            raise KeyError(kernel)
        start = starts[line]
        return self._checked(KERNEL_SCHEMA, text[start + len(key):text.index(b"\n", start)].removesuffix(b","), kernel)

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole())

    def __len__(self) -> int:
        return max(self._text.count(b"\n") - 1, 0)

    def whole(self) -> dict[str, dict[str, float]]:
        """Parses all times at once."""
        return self._checked(FILE_SCHEMA, self._text)

    def _checked(self, schema: TypeAdapter[T], text: bytes, *kernel: str) -> T:
        try:
            return schema.validate_json(text)
        except ValidationError as error:
            raise UserError(f"{self._path or 'measured times'}: damaged at {first_problem(error, *kernel)}; "
                            f"{TRAIN_AGAIN}") from None

    @staticmethod
    def text(times: Mapping[str, Mapping[str, float]]) -> bytes:
        """The JSON that this class reads."""
        lines = sorted(_line_start(kernel) + json.dumps(dict(by_label), separators=(",", ":")).encode()
                       for kernel, by_label in times.items())
        return b"\n".join([b"{", *([b",\n".join(lines)] if lines else []), b"}"])


def _line_start(kernel: str) -> bytes:
    return json.dumps(kernel).encode() + b":"


def write_measured(folder: Path, measured: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    """Writes the times to look up; returns the file's name and its SHA-256."""
    data = gzip.compress(MeasuredTimes.text(measured), TIMES_COMPRESSION, mtime=0)
    return write_hashed(folder, "measured", "json.gz", data)


def measured_times(workspace: Workspace, target: str) -> dict[str, dict[str, float]]:
    """Idle times (ms) by kernel id and label, for look-up: the median over the machines that measured a kernel. Only steady
    measurements count, or else the steadiest, whose drift (a ratio) is then under `drift_key` of the label. `inputs_key` is 1
    if the time depends on values and the inputs were realistic. Kernels of held-out families and without the dataset's first
    label are included, since nothing is learned from a look-up."""
    header, table = read_header(workspace.dataset(target)), read_kernel_table(workspace, target)
    idle = table[table["Status"].isin(["ok", UNFINISHED]) & (table["Level"] == 0)]
    measured: dict[str, dict[str, float]] = {}
    times_ms = _times(idle, header.target.flavour.device)
    drifts = _drifts(idle, times_ms)
    for label, times in times_ms.items():
        rows = pd.DataFrame({"id": idle["Kernel_ID"].to_numpy(), "time": times, "drift": drifts[label]}).dropna()
        steadiest = rows[rows["drift"] == rows.groupby("id")["drift"].transform("min")]
        for name, time_ms, drift in steadiest.groupby("id").median().itertuples():
            measured.setdefault(str(name), {})[label] = float(time_ms)
            if drift:
                measured[str(name)][drift_key(label)] = float(drift)
    inputs = idle.reindex(columns=["Kernel_ID", "Inputs"]).dropna()
    for name, labels in inputs[inputs["Inputs"] != ""].itertuples(index=False):
        for label in (part.partition(":")[0] for part in labels.split("|")):
            if label in measured.get(str(name), {}):
                measured[str(name)][inputs_key(label)] = 1.0
    return measured


def times_under(label: str, measured: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The nonzero times under one label, by kernel id, from those of `measured_times`."""
    return {name: labels[label] for name, labels in measured.items() if labels.get(label, 0.0) > 0}


def _times(table: pd.DataFrame, device: str) -> dict[str, Floats]:
    """The measured times (ms) by label."""
    times = {"run": run_ms(table, device)}
    for label in LABELS:
        if label != "run" and f"{label}_ms" in table.columns and table[f"{label}_ms"].notna().any():
            column = table[f"{label}_ms"].to_numpy(dtype=float)
            times[label] = np.where(column > 0, column, np.nan)  # nothing to learn from a kernel without work
    if "gpu_launches" in table.columns:
        launches = table["gpu_launches"].to_numpy(dtype=float)
        times[LAUNCHES] = np.where(launches > 0, launches, np.nan)
    return {label: times_ms for label, times_ms in times.items() if np.isfinite(times_ms).any()}


def _drifts(table: pd.DataFrame, labels: Iterable[str]) -> dict[str, Floats]:
    """By label, the drift of the unsteady blocks that the rows' times come from; 0 for the others. Older tables have no column
    Unsteady: their column Drift is the canary's for all labels of a row."""
    labels = [label for label in labels if label != LAUNCHES]  # numbers of launches do not depend on how steady the machine is
    drifts = {label: np.zeros(len(table)) for label in (*labels, LAUNCHES)}
    if "Unsteady" not in table.columns:
        drift = table["Drift"].to_numpy(dtype=float) if "Drift" in table.columns else np.zeros(len(table))
        return drifts | {label: np.where(drift > DRIFT_ADMITTED, drift, 0.0) for label in labels}
    unsteady = table["Unsteady"].fillna("").to_numpy(dtype=str)
    for row in np.flatnonzero(unsteady != ""):
        for label, ratio in parse_unsteady(unsteady[row]).items():
            if label in drifts:
                drifts[label][row] = ratio
    return drifts
