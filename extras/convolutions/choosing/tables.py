"""Reads the measured tables of layers as cases for choosing an algorithm, and plots them."""

from __future__ import annotations

import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hase.extras.convolutions.profiling.algorithms import DEFAULT, GUESS, ConvShape
from hase.model_zoo.exporting.torch_models import group_of
from hase.utils.errors import UserError
from hase.utils.files import temporary_folder
from hase.utils.lazy import matplotlib
from hase.utils.lazy import pandas as pd
from hase.utils.pages.charts import save_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


MEASURE = "python extras/convolutions/run_profile.py --model vgg16 --algorithm guess"
MOST_LAYERS = 12  # that have a colour of their own in a plot; the others are added up
ENERGY = "energy_per_inference_j"
BEST, OTHERS = "best of each", "the others"
Group = tuple[str, str, int, int, str, bool]
COLUMNS = ("gpu", "model", "input_size", "batch", "dtype", "tf32")  # the fields of a Group, which is a run of a model


@dataclass(frozen=True)
class LayerCase:
    """One call of a convolution in a model at one input size, with its time under each algorithm."""

    gpu: str
    model: str
    layer: str
    input_size: int
    shape: ConvShape
    tf32: bool
    times_ms: dict[str, float]
    library_choice: str = ""  # the algorithm that the library itself chose; "" if that was not measured
    library_ms: float | None = None  # the time under it
    refused: frozenset[str] = frozenset()

    @property
    def family(self) -> str:
        """The model family; a family is held out as a whole."""
        return group_of(self.model)

    @property
    def best(self) -> str:
        """The fastest algorithm."""
        return min(self.times_ms, key=lambda name: (self.times_ms[name], name))

    @property
    def best_ms(self) -> float:
        return self.times_ms[self.best]


def library_algorithm(gpu: str) -> str:
    """The name under which the library's own choice is measured: cuDNN's on a GPU, torch's on a CPU."""
    return DEFAULT if gpu == "cpu" else GUESS


@contextmanager
def unpacked(results: Path) -> Iterator[Path]:
    """The folder with the tables: `results` itself, or the unpacked contents if it is an archive."""
    if not results.is_file():
        yield results
        return
    with temporary_folder() as folder:
        try:
            with tarfile.open(results) as archive:
                archive.extractall(folder, filter="data")
        except (tarfile.TarError, EOFError) as error:
            raise UserError(f"{results}: no archive of tables ({error}); "
                            "recipes/convolutions/publish_table.py makes one") from None
        yield folder


def read_table(folder: Path, kind: str) -> pd.DataFrame:
    """All tables `*_<kind>.csv` below `folder` (`overall` or `layers`); of several stages the last one counts."""
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


def read_cases(folder: Path) -> list[LayerCase]:
    """Every layer that at least one algorithm ran, with the median time under each algorithm."""
    table = read_table(folder, "layers")
    table = table[table["in_channels"].notna()]
    rows: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for row in table.itertuples(index=False):
        rows[row.gpu, row.model, row.input_size, row.batch, row.dtype, row.tf32, row.layer].append(row)
    cases = [_case(group) for group in rows.values()]
    return [case for case in cases if case.times_ms]


def _case(rows: list[Any]) -> LayerCase:
    first = rows[0]
    times_ms: dict[str, float] = {}
    library_choice, library_ms = "", None
    refused = frozenset(row.algorithm for row in rows if row.status != "ok")
    for row in rows:
        if pd.isna(row.median_ms):
            continue
        if row.algorithm == library_algorithm(first.gpu):
            library_choice, library_ms = row.ran, float(row.median_ms)
        # a layer that ran by fallback says nothing of the algorithm; on a GPU torch's interface and `guess` are no algorithms
        if row.status == "ok" and row.ran == row.algorithm and (row.algorithm != DEFAULT or first.gpu == "cpu"):
            times_ms[row.algorithm] = float(row.median_ms)
    shape = ConvShape(
        batch=int(first.batch), in_channels=int(first.in_channels), out_channels=int(first.out_channels),
        height=int(first.height), width=int(first.width), kernel=_pair(first.kernel_size), stride=_pair(first.stride),
        padding=_pair(first.padding), dilation=_pair(first.dilation), groups=int(first.groups), bias=False, dtype=first.dtype)
    return LayerCase(first.gpu, first.model, first.layer, int(first.input_size), shape, bool(first.tf32), times_ms,
                library_choice, library_ms, refused)


def _pair(text: str) -> tuple[int, int]:
    height, width = text.split("x")
    return int(height), int(width)


def group_key(case: LayerCase) -> Group:
    """The run of a model that a case belongs to; the fields are COLUMNS."""
    return case.gpu, case.model, case.input_size, case.shape.batch, case.shape.dtype, case.tf32


def named(key: Group) -> dict[str, Any]:
    """A group as table columns."""
    return dict(zip(COLUMNS, key, strict=True))


def by_run(cases: Iterable[LayerCase]) -> dict[Group, list[LayerCase]]:
    """Groups cases by run of a model."""
    runs: dict[Group, list[LayerCase]] = defaultdict(list)
    for case in cases:
        runs[group_key(case)].append(case)
    return dict(sorted(runs.items()))


# plots -------------------------------------------------------------------------------------------------------------------

@contextmanager
def plot(path: Path) -> Iterator[Axes]:
    """The axes to draw on within the block; then the plot gets its legend, and is written."""
    matplotlib.use("Agg")
    figure, axes = matplotlib.pyplot.subplots(figsize=(9, 5), layout="constrained")
    yield axes
    figure.legend(loc="outside right upper", fontsize="small")
    save_figure(figure, path, dpi=120)


def draw_times(overall: pd.DataFrame, path: Path, title: str) -> None:
    """Plots time over input size for one model and setting, a line per algorithm; dashed ones need a fallback."""
    with plot(path) as axes:
        for name, rows in overall[overall["mean"].notna()].sort_values("input_size").groupby("algorithm", sort=True):
            mixed = bool(rows["layers_not_supported"].any())
            spread = rows["std"].to_numpy(dtype=float)
            axes.errorbar(rows["input_size"], rows["mean"], yerr=spread, fmt="o--" if mixed else "o-", markersize=3, capsize=2,
                          label=f"{name}{' (partly the library’s choice)' if mixed else ''}")
        axes.set(xlabel="input size (pixels)", ylabel="time of a run (ms)", title=title, yscale="log")
        axes.grid(color="0.9", which="both")


def draw_energy(overall: pd.DataFrame, path: Path, title: str) -> None:
    """Plots energy of a run over its time, one line per algorithm from smallest to largest input."""
    with plot(path) as axes:
        for name, rows in overall.sort_values("input_size").groupby("algorithm", sort=True):
            (line,) = axes.plot(rows["mean"], rows[ENERGY], "o-", markersize=3, label=name)
            for size, time_ms, energy_j in rows[["input_size", "mean", ENERGY]].itertuples(index=False):
                axes.annotate(f"{size:.0f}", (time_ms, energy_j), (3, 3), textcoords="offset points", fontsize=6,
                              color=line.get_color())
        axes.set(xlabel="time of a run (ms)", ylabel="energy of a run (J)", title=title, xscale="log", yscale="log")
        axes.grid(color="0.9", which="both")


def draw_layers(cases: Sequence[LayerCase], path: Path, title: str) -> None:
    """Plots a bar per algorithm that runs all layers, and one for the best of each layer, split into the slowest layers."""
    names = sorted(set.intersection(*(set(case.times_ms) for case in cases)))
    bars = {name: [case.times_ms[name] for case in cases] for name in names}
    if library_algorithm(cases[0].gpu) not in names and all(case.library_ms is not None for case in cases):
        bars["library's choice"] = [case.library_ms or 0.0 for case in cases]
    bars[BEST] = [case.best_ms for case in cases]
    weight = np.array(list(bars.values())).max(axis=0)
    shown = sorted(np.argsort(-weight)[:MOST_LAYERS])
    left = np.zeros(len(bars))
    parts = [(cases[index].layer, np.array([times[index] for times in bars.values()])) for index in shown]
    rest = np.array([sum(times) for times in bars.values()]) - sum((part for _, part in parts), np.zeros(len(bars)))
    with plot(path) as axes:
        colours = matplotlib.pyplot.get_cmap("tab20")
        for number, (layer, times) in enumerate([*parts, (OTHERS, rest)] if len(cases) > len(shown) else parts):
            axes.barh(list(bars), times, left=left, label=layer, color="0.8" if layer == OTHERS else colours(number % 20))
            left += times
        axes.invert_yaxis()
        axes.set(xlabel="time of all convolutions (ms)", title=title)
        axes.grid(color="0.9", axis="x")
        axes.set_axisbelow(True)


def draw_all(overall: pd.DataFrame, runs: dict[Group, list[LayerCase]], folder: Path) -> list[Path]:
    """Plots times and energy of each model, and the layers at its largest input; returns the files."""
    paths = []
    for key, rows in overall.groupby(["gpu", "model", "batch", "dtype"]):
        gpu, model, batch, dtype = (str(part) for part in key)
        if rows["mean"].notna().any():
            paths.append(folder / f"{model}_{gpu}_b{batch}_{dtype}_times.png")
            draw_times(rows, paths[-1], f"{model}, batch {batch}, {dtype}, on {gpu}")
        if (known := rows[ENERGY].notna()).any():
            paths.append(folder / f"{model}_{gpu}_b{batch}_{dtype}_energy.png")
            draw_energy(rows[known], paths[-1], f"{model}, batch {batch}, {dtype}, on {gpu}; at each point the input size")
    largest: dict[tuple[str, ...], Group] = {}
    for group in runs:  # in the order of the input size
        facts = named(group)
        largest[tuple(str(facts[name]) for name in ("gpu", "model", "batch", "dtype"))] = group
    for (gpu, model, batch, dtype), group in largest.items():
        size = named(group)["input_size"]
        paths.append(folder / f"{model}_{gpu}_b{batch}_{dtype}_{size}_layers.png")
        draw_layers(runs[group], paths[-1], f"{model} at {size}x{size}, batch {batch}, {dtype}, on {gpu}")
    return paths

