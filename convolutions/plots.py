"""Plots of convolution algorithms: time over input size, energy over time, and the layers of a model under each algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from convolutions.choice import named
from convolutions.table import Case, own_choice
from utils import files
from utils.lazy import matplotlib

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MOST_LAYERS = 12  # with a colour of their own in a breakdown; the others are added up
ENERGY = "energy_per_inference_j"
BEST, OTHERS = "best of each", "the others"


def draw_times(overall: pd.DataFrame, path: Path, title: str) -> None:
    """Time over input size, a line for each algorithm; those that need a fallback are dashed.

    Args:
        overall: rows of one model, device, batch and data type, with the columns of `*_overall.csv`.
    """
    matplotlib.use("Agg")
    figure, axes = matplotlib.pyplot.subplots(figsize=(9, 5), layout="constrained")
    for name, rows in overall[overall["mean"].notna()].sort_values("input_size").groupby("algorithm", sort=True):
        mixed = bool(rows["layers_not_supported"].any())
        spread = rows["std"].to_numpy(dtype=float)
        axes.errorbar(rows["input_size"], rows["mean"], yerr=spread, fmt="o--" if mixed else "o-", markersize=3, capsize=2,
                      label=f"{name}{' (partly the library’s choice)' if mixed else ''}")
    axes.set(xlabel="input size (pixels)", ylabel="time of a run (ms)", title=title, yscale="log")
    axes.grid(color="0.9", which="both")
    figure.legend(loc="outside right upper", fontsize="small")
    _save(figure, path)


def draw_energy(overall: pd.DataFrame, path: Path, title: str) -> None:
    """Energy of a run over its time, a line for each algorithm from the smallest input to the largest.

    Args:
        overall: as for `draw_times`, with an energy in each row.
    """
    matplotlib.use("Agg")
    figure, axes = matplotlib.pyplot.subplots(figsize=(9, 5), layout="constrained")
    for name, rows in overall.sort_values("input_size").groupby("algorithm", sort=True):
        (line,) = axes.plot(rows["mean"], rows[ENERGY], "o-", markersize=3, label=name)
        for size, *point in rows[["input_size", "mean", ENERGY]].itertuples(index=False):
            axes.annotate(f"{size:.0f}", (point[0], point[1]), (3, 3), textcoords="offset points", fontsize=6,
                          color=line.get_color())
    axes.set(xlabel="time of a run (ms)", ylabel="energy of a run (J)", title=title, xscale="log", yscale="log")
    axes.grid(color="0.9", which="both")
    figure.legend(loc="outside right upper", fontsize="small")
    _save(figure, path)


def draw_layers(cases: Sequence[Case], path: Path, title: str) -> None:
    """A bar for each algorithm that runs every layer of one run of a model, and one for the best of each layer; the layers that
    take most of the time are parts of their own."""
    matplotlib.use("Agg")
    names = sorted(set.intersection(*(set(case.times_ms) for case in cases)))
    bars = {name: [case.times_ms[name] for case in cases] for name in names}
    if own_choice(cases[0].gpu) not in names and all(case.own_ms is not None for case in cases):
        bars["own choice"] = [case.own_ms or 0.0 for case in cases]
    bars[BEST] = [case.best_ms for case in cases]
    weight = np.array(list(bars.values())).max(axis=0)
    shown = sorted(np.argsort(-weight)[:MOST_LAYERS])
    figure, axes = matplotlib.pyplot.subplots(figsize=(9, 5), layout="constrained")
    left = np.zeros(len(bars))
    colours = matplotlib.pyplot.get_cmap("tab20")
    parts = [(cases[place].layer, np.array([times[place] for times in bars.values()])) for place in shown]
    rest = np.array([sum(times) for times in bars.values()]) - sum((part for _, part in parts), np.zeros(len(bars)))
    for number, (layer, times) in enumerate([*parts, (OTHERS, rest)] if len(cases) > len(shown) else parts):
        axes.barh(list(bars), times, left=left, label=layer, color="0.8" if layer == OTHERS else colours(number % 20))
        left += times
    axes.invert_yaxis()
    axes.set(xlabel="time of all convolutions (ms)", title=title)
    axes.grid(color="0.9", axis="x")
    axes.set_axisbelow(True)
    figure.legend(loc="outside right upper", fontsize="small")
    _save(figure, path)


def draw_all(overall: pd.DataFrame, runs: dict[tuple[str, str, int, int, str, bool], list[Case]], folder: Path) -> list[Path]:
    """Draws each model's times and energy, and the layers of its largest input, into `folder`; returns the files."""
    drawn = []
    for key, rows in overall.groupby(["gpu", "model", "batch", "dtype"]):
        gpu, model, batch, dtype = (str(part) for part in key)
        if rows["mean"].notna().any():
            drawn.append(folder / f"{model}_{gpu}_b{batch}_{dtype}_times.png")
            draw_times(rows, drawn[-1], f"{model}, batch {batch}, {dtype}, on {gpu}")
        if (known := rows[ENERGY].notna()).any():
            drawn.append(folder / f"{model}_{gpu}_b{batch}_{dtype}_energy.png")
            draw_energy(rows[known], drawn[-1], f"{model}, batch {batch}, {dtype}, on {gpu}; at each point the input size")
    largest: dict[tuple[str, ...], tuple[str, str, int, int, str, bool]] = {}
    for group in runs:  # in the order of the input size
        facts = named(group)
        largest[tuple(str(facts[name]) for name in ("gpu", "model", "batch", "dtype"))] = group
    for (gpu, model, batch, dtype), group in largest.items():
        size = named(group)["input_size"]
        drawn.append(folder / f"{model}_{gpu}_b{batch}_{dtype}_{size}_layers.png")
        draw_layers(runs[group], drawn[-1], f"{model} at {size}x{size}, batch {batch}, {dtype}, on {gpu}")
    return drawn


def _save(figure: Figure, path: Path) -> None:
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)
    matplotlib.pyplot.close(figure)
