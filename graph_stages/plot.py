"""Draws each stage's time over its bytes, with the line of its regression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from graph_stages.records import StageRecord
from graph_stages.regression import Regression
from utils import files
from utils.lazy import matplotlib


def draw(records: Sequence[StageRecord], fits: Mapping[tuple[str, int], Regression], path: Path) -> None:
    """One panel for each unit. A line that is no bandwidth is dashed."""
    units = list(dict.fromkeys(unit for unit, _ in fits))
    if not units:
        return
    matplotlib.use("Agg")
    figure, panels = matplotlib.pyplot.subplots(1, len(units), figsize=(1 + 6 * len(units), 5), squeeze=False,
                                                layout="constrained")
    for axes, unit in zip(panels[0], units, strict=True):
        for (of_unit, stage), fit in fits.items():
            if of_unit == unit:
                _draw_stage(axes, [one for one in records if (one.unit, one.stage) == (unit, stage) and one.samples_ms], fit)
        axes.set(title=unit, xscale="log", yscale="log", xlabel="bytes of inputs and outputs (MB)", ylabel="latency (ms)")
        axes.grid(color="0.9")
        axes.legend(fontsize="small")
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)
    matplotlib.pyplot.close(figure)


def _draw_stage(axes: matplotlib.pyplot.Axes, records: Sequence[StageRecord], fit: Regression) -> None:
    moved = np.array([one.bytes_in + one.bytes_out for one in records], float)
    label = f"{fit.stage} {records[0].stage_name}: " + (f"{fit.bandwidth:.0f} MB/s" if fit.bandwidth else "no bandwidth")
    (points,) = axes.plot(moved / 1024**2, [one.statistics["mean"] for one in records], "o", markersize=4, label=label)
    if fit.slope_ms_per_byte is None or fit.intercept_ms is None:
        return
    line = np.geomspace(moved.min(), moved.max(), 50)
    times = fit.slope_ms_per_byte * line + fit.intercept_ms
    style = "-" if fit.bandwidth else "--"
    axes.plot(line[times > 0] / 1024**2, times[times > 0], style, color=points.get_color(), linewidth=1)
