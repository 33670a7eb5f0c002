"""What part of a stage's time grows with the bytes that it reads and writes: latency = a · bytes + b.

A line through times at several sizes can't tell a copy to the unit from the unit's own reading and writing: both grow with
bytes. So a "transfer" by regression is all time proportional to bytes, and its bandwidth is the one at which the stage gets
its data through, copies and all. Nor can it tell either from arithmetic, where operations grow as bytes do: a product of
matrices of a fixed width lies on as good a line as a copy does. For those stages (`operations`) the bandwidth is compared with
that of stages that only move data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graph_stages.definition import GraphSize
from graph_stages.records import StageRecord
from utils.lazy import scipy, sklearn

LEAST_R2 = 0.8
CONFIDENCE = 0.95
LEAST_POINTS = 3  # two points lie on every line
ARITHMETIC_SHARE = 0.5  # of the time at most that moving the bytes takes where a stage is bound by arithmetic
PRODUCTS = (5, 6)  # the stages that multiply matrices


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
        reason: why the bandwidth is None; else "".
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

    def transfer_ms(self, moved_bytes: int, total_ms: float) -> float | None:
        """The part of a time that is proportional to bytes, at most all of it; None where there is no bandwidth."""
        if self.bandwidth is None or self.slope_ms_per_byte is None:
            return None
        return min(self.slope_ms_per_byte * moved_bytes, total_ms)


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
    fitted = replace(empty, slope_ms_per_byte=slope, slope_low=slope - margin, slope_high=slope + margin,
                     intercept_ms=intercept, r2=float(model.score(x[:, None] / scale, y)))
    if reason := _no_line(fitted):
        return replace(fitted, reason=reason)
    return replace(fitted, bandwidth=1000 / slope / 1024**2)


def _no_line(fitted: Regression) -> str:
    """Why a slope is not to be trusted; "" if it is."""
    assert fitted.r2 is not None
    assert fitted.slope_low is not None
    assert fitted.slope_high is not None
    if fitted.slope_high < 0:
        return "larger sizes take less time"
    if fitted.slope_low <= 0:
        return "the slope's 95 % interval includes 0: the time does not depend on the bytes"
    if fitted.r2 < LEAST_R2:
        return f"R² {fitted.r2:.2f} is below {LEAST_R2}: the time does not follow the bytes"
    return ""


def fit_stages(records: Iterable[StageRecord]) -> list[Regression]:
    """A regression for each unit and stage with times, in the order in which they appear."""
    grouped: dict[tuple[str, int], list[StageRecord]] = {}
    for record in records:
        if record.samples_ms:
            grouped.setdefault((record.unit, record.stage), []).append(record)
    return [_unless_arithmetic(_fit_group(*key, group), group, grouped) for key, group in grouped.items()]


def _fit_group(unit: str, stage: int, group: Sequence[StageRecord]) -> Regression:
    if len(ran := sorted({f"{one.runtime} on {one.ran_on}" for one in group})) > 1:
        return Regression(unit, stage, len(group), reason=f"its sizes ran differently: {', '.join(ran)}")
    return fit_line(unit, stage, [one.bytes_in + one.bytes_out for one in group], [one.statistics["mean"] for one in group])


def _unless_arithmetic(fit: Regression, group: Sequence[StageRecord],
                       grouped: Mapping[tuple[str, int], Sequence[StageRecord]]) -> Regression:
    """Without the bandwidth, if moving the bytes as fast as another stage of the unit does takes but a small part of the time.

    Both are taken at their largest sizes.
    """
    largest = max(group, key=lambda record: record.bytes_in + record.bytes_out)
    flops, moved = operations(fit.stage, largest.size), largest.bytes_in + largest.bytes_out
    rates = {stage: max((one.bytes_in + one.bytes_out, _per_ms(one)) for one in records)[1]
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
