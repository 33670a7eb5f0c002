"""What a dataset holds: how many kernels of each operator and size were measured idle, how well, and which loads and models."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hase.records.dataset_files import DatasetHeader, DatasetKernel, idle_rows, run_ms
from hase.records.dataset_tables import UNFINISHED
from hase.records.operators import operator_row
from hase.utils.frozen import Frozen

if TYPE_CHECKING:
    import pandas as pd

SIZE_BYTES = (1e4, 1e5, 1e6, 1e7, 1e8)  # that a kernel reads and writes: where one class ends and the next begins
SIZES = ("below 10 kB", "to 100 kB", "to 1 MB", "to 10 MB", "to 100 MB", "above")


class OperatorCoverage(Frozen):
    """The kernels of one operator.

    Attributes:
        operator: ONNX's name; kernels count with whatever is fused into them.
        kernels: that the dataset describes.
        measured: of these, the ones with a time on the idle device.
        failed: of these, the ones of which every idle measurement failed.
        unsteady: of those measured, the ones whose every measurement was marked as unsteady.
        in_models: of the described ones, those that a model holds; the others were sampled.
        by_size: of those measured, by the bytes that they read and write: the classes are `DatasetCoverage.sizes`.
        least_ms, most_ms: idle times, of the dataset's first label; None where nothing was measured.
    """

    operator: str
    kernels: int
    measured: int
    failed: int
    unsteady: int
    in_models: int
    by_size: tuple[int, ...]
    least_ms: float | None
    most_ms: float | None


class LoadCoverage(Frozen):
    """What was measured at one load.

    Attributes:
        level: share of the time for which the stressor was busy; 0 is idle.
        background: the stressor's work, by its name in the dataset; "" is idle, or the only one.
        kernels, models: how many were measured well.
    """

    level: float
    background: str
    kernels: int
    models: int


class DatasetCoverage(Frozen):
    """What a dataset holds. Version 1 is the first.

    Attributes:
        target: of the dataset.
        kernels, measured: described, and with a time on the idle device.
        models: that were measured idle; without their sizes.
        families: groups of these models.
        sizes: the classes of sizes, in words.
        operators: the one with the most measured kernels first.
        loads: by level and background, idle first.
    """

    version: int = 1
    target: str
    kernels: int
    measured: int
    models: int
    families: int
    sizes: tuple[str, ...] = SIZES
    operators: tuple[OperatorCoverage, ...]
    loads: tuple[LoadCoverage, ...]


def coverage_of(header: DatasetHeader, kernels: Iterable[DatasetKernel], times: pd.DataFrame,
                models: pd.DataFrame) -> DatasetCoverage:
    """What a dataset holds.

    Args:
        header: of the dataset.
        kernels: that it describes.
        times, models: its two tables, as `dataset_tables` reads them.
    """
    idle = times[times["Level"] == 0]
    ok = idle[idle["Status"] == "ok"]
    label = header.labels[0]  # without it a kernel counts as not measured
    ok = ok.assign(ms=run_ms(ok, header.target.flavour.device) if label == "run" else ok[f"{label}_ms"])
    ok = ok[np.isfinite(ok["ms"])]
    typical_ms: dict[str, float] = ok.groupby("Kernel_ID")["ms"].median().to_dict()
    marked = ok["Unsteady"].fillna("") if "Unsteady" in ok.columns else ok["Kernel_ID"].map(lambda _: "")
    steady = set(ok["Kernel_ID"][marked == ""])
    tried = set(idle["Kernel_ID"][idle["Status"] != UNFINISHED])
    of_operator: dict[str, list[DatasetKernel]] = {}
    for described in kernels:
        name = described.kernel.op_type
        of_operator.setdefault(operator_row(name).base or name, []).append(described)
    operators = [_operator(name, members, typical_ms, steady, tried) for name, members in of_operator.items()]
    measured_models = idle_rows(models)
    return DatasetCoverage(
        target=header.target.name, kernels=sum(row.kernels for row in operators),
        measured=sum(row.measured for row in operators), models=measured_models["Model"].nunique(),
        families=measured_models["Groups"].nunique(), operators=tuple(sorted(operators, key=lambda row: -row.measured)),
        loads=tuple(_loads(times, models)))


def _operator(name: str, members: Sequence[DatasetKernel], typical_ms: dict[str, float], steady: set[str],
              tried: set[str]) -> OperatorCoverage:
    ids = {described.kernel.id for described in members}
    by_size = [0] * len(SIZES)
    for described in members:
        if described.kernel.id in typical_ms:
            by_size[bisect_right(SIZE_BYTES, described.kernel.bytes_read + described.kernel.bytes_written)] += 1
    known_ms = [typical_ms[name] for name in ids & typical_ms.keys()]
    return OperatorCoverage(
        operator=name, kernels=len(ids), measured=len(known_ms), failed=len((ids & tried) - typical_ms.keys()),
        unsteady=len((ids & typical_ms.keys()) - steady), in_models=sum(bool(described.models) for described in members),
        by_size=tuple(by_size), least_ms=min(known_ms, default=None), most_ms=max(known_ms, default=None))


def _loads(times: pd.DataFrame, models: pd.DataFrame) -> list[LoadCoverage]:
    """What was measured well at each level and under each background."""
    counts: dict[tuple[float, str], list[int]] = {}
    for place, (table, key) in enumerate(((times, "Kernel_ID"), (models, "Model"))):
        ok = table[table["Status"] == "ok"]
        for level, background in {(float(level), str(name)) for level, name in zip(ok["Level"], ok["Background"], strict=True)}:
            counts.setdefault((level, background), [0, 0])[place] = ok[key][
                (ok["Level"] == level) & (ok["Background"] == background)].nunique()
    return [LoadCoverage(level=level, background=background, kernels=counted[0], models=counted[1])
            for (level, background), counted in sorted(counts.items())]
