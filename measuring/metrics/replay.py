"""Replays metrics from a file: for tests, and to reproduce the load of another machine.

The file has one JSON object per line: `time_s` (seconds, ascending, any start) and values by DCGM field name, old or new, in
the unit of the name (`measuring/metrics/dcgm_names.py`); null is a blank:

    {"time_s": 0.0, "DCGM_FI_PROF_SM_ACTIVE": 0.41, "DCGM_FI_DEV_GPU_UTIL_RATIO": 0.97}
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from measuring.metrics.dcgm_names import NAMES, in_unit
from measuring.metrics.source import MetricSource, Window
from utils.errors import UserError

TIME = "time_s"
LONE_GAP_S = 1.0  # when the only sample of a file comes


class ReplaySource(MetricSource):
    """Replays the samples of a file from when the source is made; the first comes after the time between the first two.

    Attributes:
        times_s: when each sample comes, in seconds since the source was made.
    """

    minimum_window_s = 0.0

    def __init__(self, path: Path, fields: Sequence[str] | None = None, step_s: float | None = None) -> None:
        """Replays `path` by its timestamps, or with `step_s` seconds between samples.

        Raises:
            UserError: no such file, a line is not a sample, or the file lacks a field.
        """
        self.name = f"the replay of {path.name}"
        self._path = path
        stamps_s, self._values = _load(path)
        gap_s = stamps_s[1] - stamps_s[0] if len(stamps_s) > 1 else LONE_GAP_S
        self.times_s = [(i + 1) * step_s if step_s else stamp_s - stamps_s[0] + gap_s for i, stamp_s in enumerate(stamps_s)]
        super().__init__(list(dict.fromkeys(field for reading in self._values for field in reading)), fields)
        self._began_s = time.monotonic()

    def _read(self) -> None:
        """Nothing to read: the whole file was read at the start."""

    def _readings(self, before: Window, after: Window) -> dict[str, list[float]]:
        begin_s, end_s = before.began_s - self._began_s, after.began_s - self._began_s
        if begin_s >= self.times_s[-1]:
            raise UserError(f"{self._path}: the replay is over: its last reading came after {self.times_s[-1]:g} s")
        found: dict[str, list[float]] = {}
        for reading in self._values[bisect_right(self.times_s, begin_s):bisect_right(self.times_s, end_s)]:
            for field, value in reading.items():
                found.setdefault(field, []).append(value)
        return found


def _load(path: Path) -> tuple[list[float], list[dict[str, float]]]:
    """The timestamps of the samples, and their values by the names and in the units of FIELDS."""
    if not path.exists():
        raise UserError(f"{path}: no such file to replay")
    stamps_s: list[float] = []
    found: list[dict[str, float]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            reading = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not valid JSON ({error}); a reading is an object on a line of its own") from None
        if not isinstance(reading, dict) or not isinstance(reading.get(TIME), int | float):
            raise UserError(f'{where}: not a reading: an object with "{TIME}" and values by DCGM field name is expected')
        stamps_s.append(reading.pop(TIME))
        if len(stamps_s) > 1 and stamps_s[-1] <= stamps_s[-2]:
            raise UserError(f"{where}: {TIME} {stamps_s[-1]:g} is not later than that of the reading before")
        found.append({})
        for name, value in reading.items():
            if name not in NAMES:
                raise UserError(f"{where}: {name}: no metric that Hase knows; it knows {', '.join(NAMES)}")
            if not isinstance(value, int | float | None):
                raise UserError(f"{where}: {name}: {value!r} is not a number")
            found[-1][NAMES[name].field] = math.nan if value is None else in_unit(name, value)
    if not found:
        raise UserError(f"{path}: no reading to replay")
    return stamps_s, found
