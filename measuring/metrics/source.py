"""The base class of all sources of metrics."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from measuring.metrics.soundness import History, Unsound, check_together, checked
from utils.errors import UserError


@dataclass(frozen=True)
class Window:
    """An open metrics window: when it began (seconds, monotonic clock) and what the source read then."""

    began_s: float
    reading: Any


class Mean(NamedTuple):
    """The mean of a field over a window in the unit of FIELDS, and the number of samples; a counter's difference counts as
    one."""

    value: float
    readings: int


class MetricSource(ABC):
    """Means of metrics over windows. A subclass gives the fields that it can read (`available`), what it reads when a window
    opens and closes (`_read`), and the samples between the two (`_readings`).

    Attributes:
        name: for messages.
        minimum_window_s: shorter windows are not valid.
        fields: the fields that it reads, names of FIELDS.
    """

    name: str
    minimum_window_s: float

    def __init__(self, available: Sequence[str], fields: Sequence[str] | None) -> None:
        """Reads `fields`, or all that are `available` if none is named; `UserError` for one that is not available."""
        unknown = [field for field in fields or () if field not in available]
        if unknown:
            raise UserError(f"metric {', '.join(unknown)}: {self.name} can't read it here; it has {', '.join(available)}")
        self.fields = tuple(dict.fromkeys(fields or available))
        self._history = History()

    @abstractmethod
    def _read(self) -> Any:
        """The device's values at this moment."""

    @abstractmethod
    def _readings(self, before: Window, after: Window) -> Mapping[str, Sequence[float]]:
        """The samples of every field between two moments, in the units of FIELDS; a counter's difference gives one, the mean.
        Other fields may be included; they are used to check these."""

    def start(self) -> Window:
        """Opens a window."""
        return Window(time.monotonic(), self._read())

    def stop(self, window: Window) -> dict[str, Mean]:
        """Closes `window` and returns the mean of each field since it was opened, in the units of FIELDS. May wait until the
        device reports its work up to now.

        Raises:
            Unsound: samples are blank, out of range, frozen, or contradict those of another field.
            UserError: the window is shorter than `minimum_window_s`, or has no sample of a field.
        """
        means = self._means(window)
        self._history.add(values(means))
        return means

    def _means(self, window: Window) -> dict[str, Mean]:
        """The mean of each field since `window` was opened; raises as `stop`."""
        now = time.monotonic()
        lasted_s = now - window.began_s
        if lasted_s < self.minimum_window_s:
            raise UserError(f"a metric window of {lasted_s * 1e3:.0f} ms is too short to be valid: "
                            f"{self.name} needs {self.minimum_window_s * 1e3:.0f} ms")
        found = self._sound(self._readings(window, Window(now, self._read())))
        for field in self.fields:
            if not found.get(field):
                raise UserError(f"metric {field}: {self.name} has no reading of it in a window of {lasted_s:.1f} s")
        check_together(found, lasted_s)
        return {field: Mean(sum(found[field]) / len(found[field]), len(found[field])) for field in self.fields}

    def _sound(self, readings: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """The samples after a check of their values; other fields with bad samples are left out.

        Raises:
            Unsound: one of `fields` has bad samples.
        """
        found = {}
        for field, seen in readings.items():
            try:
                found[field] = [checked(field, value) for value in seen]
            except Unsound:
                if field in self.fields:
                    raise
        return found

    def window(self, seconds: float) -> dict[str, Mean]:
        """The mean of each field over the next `seconds`."""
        opened = self.start()
        time.sleep(seconds)
        return self.stop(opened)


def values(means: Mapping[str, Mean]) -> dict[str, float]:
    """The means alone, without the numbers of samples."""
    return {field: mean.value for field, mean in means.items()}
