"""Metrics windows: the means of a device's metrics over some seconds."""

from __future__ import annotations

import time
from typing import NamedTuple

from measuring.metrics.source import MetricSource, Window, values


class MetricsWindow(NamedTuple):
    """The mean of each metric by name, and how long the window lasted in seconds."""

    means: dict[str, float]
    seconds: float


NO_WINDOW = MetricsWindow({}, 0.0)


def read_window(source: MetricSource | None, seconds: float) -> MetricsWindow:
    """The means over the next `seconds`; NO_WINDOW at once where there is no source."""
    if source is None:
        return NO_WINDOW
    opened = source.start()
    time.sleep(seconds)
    return close_window(source, opened)


def open_window(source: MetricSource | None) -> Window | None:
    """Opens a window, for `close_window`."""
    return None if source is None else source.start()


def close_window(source: MetricSource | None, opened: Window | None) -> MetricsWindow:
    """The means since the window was opened; NO_WINDOW where it was too short to be valid, or where there is no source."""
    if source is None or opened is None:
        return NO_WINDOW
    seconds = time.monotonic() - opened.began_s
    return NO_WINDOW if seconds < source.minimum_window_s else MetricsWindow(values(source.stop(opened)), seconds)
