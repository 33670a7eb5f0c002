"""What every source of metrics offers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmark.metrics.soundness import History, Unsound, check_together, checked
from utils.errors import UserError


@dataclass(frozen=True)
class Window:
    """An open window: when it began (seconds, monotonic) and what the source read then."""

    began_s: float
    reading: Any


class Mean(NamedTuple):
    """A field's mean over a window in the unit of FIELDS, and of how many readings; a counter's difference is one."""

    value: float
    readings: int


class MetricSource(ABC):
    """Means of metrics over windows. A new source says what it can read (`available`), what it notes when a window opens and
    when it closes (`_read`), and which readings lie between the two (`_readings`).

    Attributes:
        name: for messages.
        minimum_window_s: a shorter window is not valid.
        fields: what it reads, names of FIELDS.
    """

    name: str
    minimum_window_s: float

    def __init__(self, available: Sequence[str], fields: Sequence[str] | None) -> None:
        """Reads `fields`, or all that are `available` where none is named; `UserError` for one that is not."""
        unknown = [field for field in fields or () if field not in available]
        if unknown:
            raise UserError(f"metric {', '.join(unknown)}: {self.name} can't read it here; it has {', '.join(available)}")
        self.fields = tuple(dict.fromkeys(fields or available))
        self._history = History()

    @abstractmethod
    def _read(self) -> Any:
        """What the device shows now."""

    @abstractmethod
    def _readings(self, before: Window, after: Window) -> Mapping[str, Sequence[float]]:
        """Every field's readings between two moments, in the units of FIELDS; a counter's difference gives a single one, the
        mean. There may be further fields, to check these against where they are sound."""

    def start(self) -> Window:
        """Opens a window."""
        return Window(time.monotonic(), self._read())

    def stop(self, window: Window) -> dict[str, Mean]:
        """Closes `window`: the mean of each field since it was opened, in the units of FIELDS. May take a moment, until the
        device shows what it did up to now.

        Raises:
            Unsound: readings are blank, out of their range, frozen, or at odds with another field's.
            UserError: the window is shorter than `minimum_window_s`, or a field has no reading in it.
        """
        means = self._means(window)
        self._history.add(values(means))
        return means

    def _means(self, window: Window) -> dict[str, Mean]:
        """The mean of each field from when `window` was opened until now; raises as `stop` does."""
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
        """Readings that the fields can have; a further field that has others is left out.

        Raises:
            Unsound: one of `fields` has others.
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
    """Means without their counts."""
    return {field: mean.value for field, mean in means.items()}
