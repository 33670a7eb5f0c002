"""What follows from the measurements of a stage: how its time grows with the bytes that it reads and writes, and
`results/lookup_table.json` with its times, for planners.

Regression fits latency = slope · bytes + intercept. A line through times at several sizes can't tell a copy to the unit from
the unit's own reading and writing: both grow with bytes. So a "transfer" by regression is all time proportional to bytes, and
its bandwidth is the one at which the stage gets its data through, copies and all. Nor can it tell either from arithmetic, where
operations grow as bytes do: a product of matrices of a fixed width lies on as good a line as a copy does. For those stages
(`operations`) the bandwidth is compared with that of stages that only move data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from hase.extras.graph_stages.graphs import GraphSize
from hase.extras.graph_stages.records import StageRecord
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.lazy import scipy, sklearn

LEAST_R2 = 0.8
CONFIDENCE = 0.95
LEAST_POINTS = 3  # two points lie on every line
ARITHMETIC_SHARE = 0.5  # of the time at most that moving the bytes takes where a stage is bound by arithmetic
PRODUCTS = (5, 6)  # the stages that multiply matrices
NOTHING_LEFT = "slope · bytes is at least the whole time: the stage only moves data, or the line lies above this size"
LOOKUP = "lookup_table.json"
REMAKE = "python extras/graph_stages/profile_stages.py --analyze"


@dataclass(frozen=True)
class Regression:
    """latency = slope · bytes + intercept for one stage on one unit.

    Attributes:
        unit, stage: as in the records; stages count from 1.
        points: how many sizes it rests on.
        slope_ms_per_byte, intercept_ms: by least squares; None where there are too few points.
        slope_low, slope_high: the slope's 95 % confidence interval (Student's t, points − 2 degrees of freedom). It holds for
            noise, not for a curve that is no line.
        r2: the share of the variance that the line explains.
        bandwidth: in MB/s, 1000 / slope / 1024²; None where it means nothing.
        reason: why the bandwidth is None or, with `plain`, means nothing; else "".
        plain: whether the bandwidth is given although it means nothing.
    """

    unit: str
    stage: int
    points: int
    slope_ms_per_byte: float | None = None
    slope_low: float | None = None
    slope_high: float | None = None
    intercept_ms: float | None = None
    r2: float | None = None
    bandwidth: float | None = None
    reason: str = ""
    plain: bool = False

    def transfer_ms(self, moved_bytes: int, total_ms: float) -> float | None:
        """The part of a time that is proportional to bytes, at most all of it; None where there is no bandwidth. With `plain`
        it is what the formula gives, which may be negative or more than the time."""
        if self.bandwidth is None or self.slope_ms_per_byte is None:
            return None
        transfer_ms = self.slope_ms_per_byte * moved_bytes
        return transfer_ms if self.plain else min(transfer_ms, total_ms)

    def by_the_formula(self) -> Regression:
        """With a bandwidth wherever there is a slope."""
        if self.bandwidth is not None or not self.slope_ms_per_byte:
            return self
        return replace(self, bandwidth=1000 / self.slope_ms_per_byte / 1024**2, plain=True)


def operations(stage: int, size: GraphSize) -> int:
    """Floating-point operations of the stages that multiply matrices; 0 for the others, which do at most one for each value."""
    return 2 * size.nodes * size.features * size.hidden if stage in PRODUCTS else 0


def fit_line(unit: str, stage: int, moved_bytes: Sequence[int], latencies_ms: Sequence[float]) -> Regression:
    """Fits a stage's line, and judges whether its slope is a bandwidth."""
    x, y = np.asarray(moved_bytes, float), np.asarray(latencies_ms, float)
    empty = Regression(unit, stage, len(x))
    if len(set(moved_bytes)) < LEAST_POINTS:
        return replace(empty, reason=f"{len(set(moved_bytes))} different numbers of bytes; a line needs {LEAST_POINTS}")
    scale = x.max()
    model = sklearn.linear_model.LinearRegression().fit(x[:, None] / scale, y)
    slope, intercept = float(model.coef_[0]) / scale, float(model.intercept_)
    left = y - slope * x - intercept
    error = float(np.sqrt((left ** 2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum()))
    margin = error * float(scipy.stats.t.ppf(0.5 + CONFIDENCE / 2, len(x) - 2))
    low, high, r2 = slope - margin, slope + margin, float(model.score(x[:, None] / scale, y))
    reason = _no_bandwidth(low, high, r2)
    return replace(empty, slope_ms_per_byte=slope, slope_low=low, slope_high=high, intercept_ms=intercept, r2=r2,
                   bandwidth=None if reason else 1000 / slope / 1024**2, reason=reason)


def _no_bandwidth(low: float, high: float, r2: float) -> str:
    """Why a slope with this interval and R² is not to be trusted; "" if it is."""
    if high < 0:
        return "larger sizes take less time"
    if low <= 0:
        return "the slope's 95 % interval includes 0: the time does not depend on the bytes"
    if r2 < LEAST_R2:
        return f"R² {r2:.2f} is below {LEAST_R2}: the time does not follow the bytes"
    return ""


def fit_stages(records: Iterable[StageRecord]) -> list[Regression]:
    """A regression for each unit and stage with times, in the order in which they appear."""
    grouped: dict[tuple[str, int], list[StageRecord]] = {}
    for record in records:
        if record.samples_ms:
            grouped.setdefault((record.unit, record.stage), []).append(record)
    return [_unless_arithmetic(_fit_group(*key, group), group, grouped) for key, group in grouped.items()]


def _fit_group(unit: str, stage: int, group: Sequence[StageRecord]) -> Regression:
    if len(ran := sorted({f"{record.runtime} on {record.ran_on}" for record in group})) > 1:
        return Regression(unit, stage, len(group), reason=f"its sizes ran differently: {', '.join(ran)}")
    return fit_line(unit, stage, [record.bytes_in + record.bytes_out for record in group],
                    [record.statistics["mean"] for record in group])


def _unless_arithmetic(fit: Regression, group: Sequence[StageRecord],
                       grouped: Mapping[tuple[str, int], Sequence[StageRecord]]) -> Regression:
    """Without the bandwidth, if moving the bytes as fast as another stage of the unit does takes but a small part of the time.

    Both are taken at their largest sizes.
    """
    largest = max(group, key=lambda record: record.bytes_in + record.bytes_out)
    flops, moved = operations(fit.stage, largest.size), largest.bytes_in + largest.bytes_out
    rates = {stage: max((record.bytes_in + record.bytes_out, _per_ms(record)) for record in records)[1]
             for (unit, stage), records in grouped.items() if unit == fit.unit and not operations(stage, records[0].size)}
    if not flops or not fit.bandwidth or not rates:
        return fit
    fastest = max(rates, key=lambda stage: rates[stage])
    share = _per_ms(largest) / rates[fastest]
    if share >= ARITHMETIC_SHARE:
        return fit
    return replace(fit, bandwidth=None, reason=(
        f"bound by arithmetic: {flops / moved:.0f} operations per byte, and stage {fastest} moves as many bytes in {share:.0%} "
        "of the time"))


def _per_ms(record: StageRecord) -> float:
    """Bytes that it moves in a millisecond."""
    return (record.bytes_in + record.bytes_out) / record.statistics["median"]


class LookupKey(NamedTuple):
    """What a record is of. As text `{nodes},{edges},{unit},{stage}`, stages count from 1."""

    nodes: int
    edges: int
    unit: str
    stage: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


class LookupRecord(Frozen):
    """Times in ms; None where they are not known, and `reason` says why.

    Attributes:
        total_time: mean of the runs with inputs and outputs in the host's memory.
        std: of the runs, around that mean.
        transfer_time: the part that moves data; `transfer_by` says how it is known. `measured`: total less the mean of the runs
            with the data in the unit's own memory. `regression`: slope · bytes, which also has the unit's own reading and
            writing in it. `plain regression`: the same though the bandwidth means nothing, as `reason` says.
        compute_time: total less transfer. 0 where all of the time is proportional to the bytes, as in a stage that only moves
            data.
        median_time: of the runs that total_time is the mean of.
        resident_median_time: of those with the data in the unit's own memory. Plans are made of medians, since a few slow runs
            spoil a mean.
        runtime, ran_on: what really ran it. "": the table does not say, as one from elsewhere.
        reason: why values are missing or mean nothing, or why nothing is left for computing.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")  # tables of other tools may say more

    compute_time: float | None
    transfer_time: float | None
    total_time: float | None
    std: float | None
    transfer_by: Literal["measured", "regression", "plain regression", ""] = ""
    median_time: float | None = None
    resident_median_time: float | None = None
    runtime: str = ""
    ran_on: str = ""
    reason: str = ""


def lookup_table(records: Iterable[StageRecord], fits: Mapping[tuple[str, int], Regression],
                 no_fit: str) -> dict[LookupKey, LookupRecord]:
    """The table of all records, failed ones too.

    Args:
        records: the measurements.
        fits: by unit and stage.
        no_fit: why there is no regression where `fits` has none.

    Raises:
        UserError: a size was measured on several graphs, which the table's keys can't tell apart.
    """
    table: dict[LookupKey, LookupRecord] = {}
    graphs: dict[LookupKey, str] = {}
    for record in records:
        key = LookupKey(record.nodes, record.edges, record.unit, record.stage)
        if key in table:
            raise UserError(f"{key}: measured twice, on the graphs {graphs[key]} and {record.graph}; measure them in two "
                            "workspaces (--workspace)")
        table[key], graphs[key] = _looked_up(record, fits.get((record.unit, record.stage)), no_fit), record.graph
    return table


def _looked_up(record: StageRecord, fit: Regression | None, no_fit: str) -> LookupRecord:
    facts: dict[str, Any] = {"runtime": record.runtime, "ran_on": record.ran_on}
    if not record.samples_ms:
        return LookupRecord(compute_time=None, transfer_time=None, total_time=None, std=None,
                            reason=f"{record.status}: {record.error}", **facts)
    total_ms, std_ms = record.statistics["mean"], record.statistics["std"]
    facts |= {"median_time": record.statistics["median"], "resident_median_time": record.resident_statistics.get("median")}
    if record.resident_samples_ms:
        compute_ms = min(record.resident_statistics["mean"], total_ms)
        return LookupRecord(compute_time=compute_ms, transfer_time=total_ms - compute_ms, total_time=total_ms, std=std_ms,
                            transfer_by="measured", **facts)
    transfer_ms = fit.transfer_ms(record.bytes_in + record.bytes_out, total_ms) if fit else None
    if transfer_ms is None:
        return LookupRecord(compute_time=None, transfer_time=None, total_time=total_ms, std=std_ms,
                            reason=fit.reason if fit else no_fit, **facts)
    plain = fit is not None and fit.plain
    reason = fit.reason if fit and plain else NOTHING_LEFT if transfer_ms == total_ms else ""
    return LookupRecord(compute_time=total_ms - transfer_ms, transfer_time=transfer_ms, total_time=total_ms, std=std_ms,
                        transfer_by="plain regression" if plain else "regression", reason=reason, **facts)


def write_lookup(folder: Path, table: Mapping[LookupKey, LookupRecord]) -> Path:
    path = folder / LOOKUP
    files.write_json(path, {str(key): record.model_dump() for key, record in table.items()})
    return path


def read_lookup(folder: Path) -> dict[LookupKey, LookupRecord]:
    """The table in a folder of results.

    Raises:
        UserError: it is missing or damaged.
    """
    path = folder / LOOKUP
    if not path.exists():
        raise UserError(f"{path}: no such file; make it with: {REMAKE}")
    try:
        table = TypeAdapter(dict[str, LookupRecord]).validate_python(files.read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: damaged at {where}: {first['msg']}; make it anew: {REMAKE}") from None
    return {_key(path, text): record for text, record in table.items()}


def _key(path: Path, text: str) -> LookupKey:
    try:
        nodes, edges, unit, stage = text.split(",")
        return LookupKey(int(nodes), int(edges), unit, int(stage))
    except ValueError:
        raise UserError(f"{path}: the key {text!r} is not nodes,edges,unit,stage; make the table anew: {REMAKE}") from None
