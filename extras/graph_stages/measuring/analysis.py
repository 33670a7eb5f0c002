"""Analyses the measured stages: how times grow with bytes, the table for planners, a report and a plot.

Regression fits latency = slope · bytes + intercept. The copy to the unit and the unit's own reading and writing both grow with
bytes, so a line cannot separate them. A "transfer" by regression is therefore all time proportional to bytes, and its bandwidth
is the rate at which the stage gets its data through, copies included.

Arithmetic cannot be separated either where operations grow as bytes do: a matrix product of fixed width lies on as good a line
as a copy. For those stages (`operations`) the bandwidth is compared with that of stages that only move data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from hase.extras.graph_stages.measuring.layer import STAGES, GraphSize
from hase.extras.graph_stages.measuring.records import RawMeasurements, StageRecord, read_raw
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError, first_problem
from hase.utils.lazy import matplotlib, scipy, sklearn
from hase.utils.logger import get_logger
from hase.utils.pages.charts import save_figure
from hase.utils.paths import Workspace

LEAST_R2 = 0.8  # below, the time does not follow the bytes
CONFIDENCE = 0.95  # of the interval of a slope
LEAST_POINTS = 3  # two points lie on every line
ARITHMETIC_SHARE = 0.5  # a stage is bound by arithmetic if moving its bytes takes less than this share of its time
PRODUCTS = (5, 6)  # the stages that multiply matrices
NOTHING_LEFT = "slope · bytes is at least the whole time: the stage only moves data, or the line lies above this size"
LOOKUP = "lookup_table.json"
REMAKE = "python extras/graph_stages/profile_stages.py --analyze"


@dataclass(frozen=True)
class Regression:
    """The line latency = slope · bytes + intercept for one stage (from 1) on one unit, by least squares.

    The slope's 95 % confidence interval (Student's t, points − 2 degrees of freedom) covers noise, not curvature.
    """

    unit: str
    stage: int
    points: int
    slope_ms_per_byte: float | None = None
    slope_low: float | None = None
    slope_high: float | None = None
    intercept_ms: float | None = None
    r2: float | None = None
    bandwidth: float | None = None  # in MB/s, 1000 / slope / 1024²; None if it is not meaningful
    reason: str = ""  # why the bandwidth is None or not meaningful; else ""
    plain: bool = False  # whether the bandwidth is given even if it is not meaningful

    def transfer_ms(self, moved_bytes: int, total_ms: float) -> float | None:
        """The part of a time proportional to bytes, at most all of it (unless `plain`); None without a bandwidth."""
        if self.bandwidth is None or self.slope_ms_per_byte is None:
            return None
        transfer_ms = self.slope_ms_per_byte * moved_bytes
        return transfer_ms if self.plain else min(transfer_ms, total_ms)

    def by_the_formula(self) -> Regression:
        """The same regression, with a bandwidth for every slope."""
        if self.bandwidth is not None or not self.slope_ms_per_byte:
            return self
        return replace(self, bandwidth=1000 / self.slope_ms_per_byte / 1024**2, plain=True)


def operations(stage: int, size: GraphSize) -> int:
    """Floating-point operations of the stages that multiply matrices; 0 for the others, which do at most one per value."""
    return 2 * size.nodes * size.features * size.hidden if stage in PRODUCTS else 0


def fit_line(unit: str, stage: int, moved_bytes: Sequence[int], latencies_ms: Sequence[float]) -> Regression:
    """Fits a stage's line, and decides whether its slope is a bandwidth."""
    x, y = np.asarray(moved_bytes, float), np.asarray(latencies_ms, float)
    empty = Regression(unit, stage, len(x))
    if len(set(moved_bytes)) < LEAST_POINTS:
        return replace(empty, reason=f"{len(set(moved_bytes))} different numbers of bytes; a line needs {LEAST_POINTS}")
    scale = x.max()
    model = sklearn.linear_model.LinearRegression().fit(x[:, None] / scale, y)
    slope, intercept = float(model.coef_[0]) / scale, float(model.intercept_)
    residuals = y - slope * x - intercept
    error = float(np.sqrt((residuals ** 2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum()))
    margin = error * float(scipy.stats.t.ppf(0.5 + CONFIDENCE / 2, len(x) - 2))
    low, high, r2 = slope - margin, slope + margin, float(model.score(x[:, None] / scale, y))
    reason = _no_bandwidth(low, high, r2)
    return replace(empty, slope_ms_per_byte=slope, slope_low=low, slope_high=high, intercept_ms=intercept, r2=r2,
                   bandwidth=None if reason else 1000 / slope / 1024**2, reason=reason)


def _no_bandwidth(low: float, high: float, r2: float) -> str:
    """Why a slope with this interval and R² is not trusted; "" if it is."""
    if high < 0:
        return "larger sizes take less time"
    if low <= 0:
        return "the slope's 95 % interval includes 0: the time does not depend on the bytes"
    if r2 < LEAST_R2:
        return f"R² {r2:.2f} is below {LEAST_R2}: the time does not follow the bytes"
    return ""


def fit_stages(records: Iterable[StageRecord]) -> list[Regression]:
    """A regression per unit and stage that has times, in order of first appearance."""
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
    """Drops the bandwidth if moving the bytes as fast as another stage on the unit takes only a small part of the time."""
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
    """Bytes moved per millisecond."""
    return (record.bytes_in + record.bytes_out) / record.statistics["median"]


class LookupKey(NamedTuple):
    """Size, unit and stage of a record; as text `{nodes},{edges},{unit},{stage}`. Stages count from 1."""

    nodes: int
    edges: int
    unit: str
    stage: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


class LookupRecord(Frozen):
    """Times in ms; None if unknown, and then `reason` says why.

    Attributes:
        total_time, std, median_time: of runs with inputs and outputs in the host's memory.
        transfer_time: the part that moves data; `transfer_by` says how it was found. `measured`: total minus the mean over runs
            with the data in the unit's own memory. `regression`: slope · bytes, which includes the unit's own reading and
            writing. `plain regression`: the same, although the bandwidth is not meaningful (see `reason`).
        compute_time: total minus transfer; 0 if all time is proportional to bytes, as in a stage that only moves data.
        resident_median_time: with the data in the unit's own memory. Plans use medians, since a few slow runs distort a mean.
        runtime, ran_on: what really ran it; "" if unknown, as in a table from elsewhere.
        reason: why values are missing or not meaningful, or why no time is left for computing.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")  # tables of other tools may have more fields

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
    """The table of all records, including failed ones. Raises UserError if a size was measured on several graphs."""
    table: dict[LookupKey, LookupRecord] = {}
    graphs: dict[LookupKey, str] = {}
    for record in records:
        key = LookupKey(record.nodes, record.edges, record.unit, record.stage)
        if key in table:
            raise UserError(f"{key}: measured twice, on the graphs {graphs[key]} and {record.graph}; measure them in two "
                            "workspaces (--workspace)")
        table[key], graphs[key] = _lookup_record(record, fits.get((record.unit, record.stage)), no_fit), record.graph
    return table


def _lookup_record(record: StageRecord, fit: Regression | None, no_fit: str) -> LookupRecord:
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
    """The table in a results folder."""
    path = folder / LOOKUP
    if not path.exists():
        raise UserError(f"{path}: no such file; make it with: {REMAKE}")
    try:
        table = TypeAdapter(dict[str, LookupRecord]).validate_python(files.read_json(path))
    except ValidationError as error:
        raise UserError(f"{path}: damaged at {first_problem(error)}; make it anew: {REMAKE}") from None
    return {_key(path, text): record for text, record in table.items()}


def _key(path: Path, text: str) -> LookupKey:
    try:
        nodes, edges, unit, stage = text.split(",")
        return LookupKey(int(nodes), int(edges), unit, int(stage))
    except ValueError:
        raise UserError(f"{path}: the key {text!r} is not nodes,edges,unit,stage; make the table anew: {REMAKE}") from None


# report and plot ---------------------------------------------------------------------------------------------------------

MEANING = """\
Bandwidth: 1000 / slope / 1024² MB/s, of latency = slope · bytes + intercept over all sizes. Bytes are those of a stage's inputs
and outputs. All that grows with them is in the slope: copies to and from the unit, and the unit's own reading and writing.
Regression alone can't tell these apart. transfer_by in lookup_table.json says "measured" where runs with the data in the unit's
own memory were timed as well: there the transfer is the difference of the two. compute_time = total_time - transfer_time. It is
0 where slope · bytes is the whole time, as in stage 1, which gathers rows and computes nothing."""
PLAIN = """\
* --plain-regression: the formula's number, though the reason beside it says that it means nothing."""
DOUBTFUL = "doubtful"  # the entry of bandwidth_table.json that names such numbers, with the reasons
BANDWIDTH, REGRESSION = "bandwidth_table.json", "regression_table.json"
REPORT, PLOT = "profiling_report.txt", "regression.png"
NO_SKLEARN = "scikit-learn is not installed: the regression was skipped (pip install scikit-learn)"
SHOWN = 200  # characters of an error
log = get_logger("stages")


def report(raw: RawMeasurements, table: Mapping[LookupKey, LookupRecord], fits: Sequence[Regression], skipped: str) -> str:
    """The text of the report. `skipped` says why there is no regression; "" if there is one."""
    parts = [_setting(raw), _units(raw), _regressions(fits, skipped), _times(table), _failures(table)]
    return "\n\n".join("\n".join(part) for part in (list(lines) for lines in parts) if part) + "\n"


def _setting(raw: RawMeasurements) -> Iterator[str]:
    yield "Stages of a GraphSAGE layer: times on the units of one machine"
    yield "=" * 62
    yield f"machine: {', '.join(f'{key} {value}' for key, value in raw.machine.items() if not isinstance(value, (dict, list)))}"
    yield f"versions: {', '.join(f'{key} {value}' for key, value in raw.versions.items())}"
    sizes = sorted({(record.nodes, record.edges) for record in raw.records})
    widths = sorted({(record.features, record.hidden) for record in raw.records})
    yield f"sizes (nodes/edges): {', '.join(f'{nodes}/{edges}' for nodes, edges in sizes)}"
    yield f"widths: {', '.join(f'{features} features to {hidden}' for features, hidden in widths)}; graphs: " + ", ".join(
        sorted({record.graph for record in raw.records}))
    yield f"runs: {raw.warmup} to warm up, {raw.runs} timed; seed {raw.seed}"


def _units(raw: RawMeasurements) -> Iterator[str]:
    yield "Units"
    for unit in raw.units:
        if not unit.present:
            yield f"  {unit.name}: not measured: {unit.why}"
            continue
        records = [record for record in raw.records if record.unit == unit.name]
        ran = Counter(f"{record.runtime} on {record.ran_on}, {record.precision} weights, computing in "
                      f"{record.inference_precision}" for record in records if record.samples_ms)
        yield f"  {unit.name} ({unit.device_name}): {len(records)} records"
        yield from (f"    {count} by {what}" for what, count in ran.items())
        why = Counter((record.stage, record.fallback) for record in records if record.fallback)
        yield from (f"    stage {stage} fell back at {count} sizes: {reason}" for (stage, reason), count in why.items())


def _regressions(fits: Sequence[Regression], skipped: str) -> Iterator[str]:
    yield "Bandwidth by regression"
    if skipped:
        yield f"  {skipped}"
        return
    yield f"  {'unit':<8}{'stage':<24}{'sizes':>6}{'ms per MB (95 % interval)':>34}{'intercept ms':>14}{'R²':>7}{'MB/s':>9}"
    for fit in fits:
        name = f"{fit.stage} {STAGES[fit.stage - 1].name}"
        if fit.slope_ms_per_byte is None or fit.slope_low is None or fit.slope_high is None:
            yield f"  {fit.unit:<8}{name:<24}{fit.points:>6}  none: {fit.reason}"
            continue
        slope, low, high = (f"{1024**2 * value:.4g}" for value in (fit.slope_ms_per_byte, fit.slope_low, fit.slope_high))
        bandwidth = f"{fit.bandwidth:.0f}{'*' * fit.plain}" if fit.bandwidth else "null"
        numbers = f"{f'{slope} ({low} to {high})':>34}{fit.intercept_ms:>14.4g}{fit.r2:>7.2f}{bandwidth:>9}"
        yield f"  {fit.unit:<8}{name:<24}{fit.points:>6}{numbers}" + (f"  {fit.reason}" if fit.reason else "")
    yield ""
    yield MEANING
    if any(fit.plain for fit in fits):
        yield PLAIN


def _times(table: Mapping[LookupKey, LookupRecord]) -> Iterator[str]:
    yield "Times by unit and stage over all sizes, in ms"
    yield f"  {'unit':<8}{'stage':<24}{'least':>10}{'mean':>10}{'most':>10}{'of it computing':>18}"
    grouped: dict[tuple[str, int], list[LookupRecord]] = {}
    for key, record in table.items():
        if record.total_time is not None:
            grouped.setdefault((key.unit, key.stage), []).append(record)
    for (unit, stage), records in grouped.items():
        totals = [record.total_time or 0.0 for record in records]
        known = [record.compute_time for record in records if record.compute_time is not None]
        is_plain = any(record.transfer_by == "plain regression" for record in records)
        computing = f"{sum(known) / len(known):.4g}{'*' * is_plain}" if known else "not known"
        yield (f"  {unit:<8}{f'{stage} {STAGES[stage - 1].name}':<24}{min(totals):>10.4g}{sum(totals) / len(totals):>10.4g}"
               f"{max(totals):>10.4g}{computing:>18}")


def _failures(table: Mapping[LookupKey, LookupRecord]) -> Iterator[str]:
    failed = {key: record.reason for key, record in table.items() if record.total_time is None}
    if failed:
        yield "Failed"
        yield from (f"  {key}: {reason}" for key, reason in failed.items())


def draw(records: Sequence[StageRecord], fits: Mapping[tuple[str, int], Regression], path: Path) -> None:
    """Plots one panel per unit; a line that is not a bandwidth is dashed."""
    units = list(dict.fromkeys(unit for unit, _ in fits))
    if not units:
        return
    matplotlib.use("Agg")
    figure, panels = matplotlib.pyplot.subplots(1, len(units), figsize=(1 + 6 * len(units), 5), squeeze=False,
                                                layout="constrained")
    for axes, unit in zip(panels[0], units, strict=True):
        for (fitted_unit, stage), fit in fits.items():
            if fitted_unit == unit:
                stage_records = [record for record in records if (record.unit, record.stage) == (unit, stage)]
                _draw_stage(axes, [record for record in stage_records if record.samples_ms], fit)
        axes.set(title=unit, xscale="log", yscale="log", xlabel="bytes of inputs and outputs (MB)", ylabel="latency (ms)")
        axes.grid(color="0.9")
        axes.legend(fontsize="small")
    save_figure(figure, path, dpi=120)


def _draw_stage(axes: matplotlib.pyplot.Axes, records: Sequence[StageRecord], fit: Regression) -> None:
    moved = np.array([record.bytes_in + record.bytes_out for record in records], float)
    label = f"{fit.stage} {records[0].stage_name}: " + (f"{fit.bandwidth:.0f} MB/s{'*' * fit.plain}" if fit.bandwidth
                                                       else "no bandwidth")
    (points,) = axes.plot(moved / 1024**2, [record.statistics["mean"] for record in records], "o", markersize=4, label=label)
    if fit.slope_ms_per_byte is None or fit.intercept_ms is None:
        return
    line = np.geomspace(moved.min(), moved.max(), 50)
    times = fit.slope_ms_per_byte * line + fit.intercept_ms
    style = "-" if fit.bandwidth and not fit.plain else "--"
    axes.plot(line[times > 0] / 1024**2, times[times > 0], style, color=points.get_color(), linewidth=1)


class Analysis(NamedTuple):
    """The table of times, a regression per unit and stage, and why there is none at all ("" if there is)."""

    table: dict[LookupKey, LookupRecord]
    fits: dict[str, Regression]
    skipped: str


def estimate_bandwidth_and_compute_time(raw: RawMeasurements, plain: bool = False) -> Analysis:
    """Bandwidths and times for computing and moving data; none without scikit-learn. `plain`: see `Regression`."""
    skipped = _why_no_regression()
    fits = {} if skipped else {(fit.unit, fit.stage): fit.by_the_formula() if plain else fit for fit in fit_stages(raw.records)}
    measured = dict.fromkeys((record.unit, record.stage) for record in raw.records)
    return Analysis(lookup_table(raw.records, fits, skipped or "no run succeeded"), {
        f"{unit}_stage{stage}": fits.get((unit, stage)) or Regression(unit, stage, 0, reason=skipped or "no run succeeded")
        for unit, stage in measured}, skipped)


def save_results(folder: Path, analysis: Analysis) -> None:
    """Writes lookup_table.json, bandwidth_table.json and regression_table.json."""
    write_lookup(folder, analysis.table)
    doubtful = {key: fit.reason for key, fit in analysis.fits.items() if fit.plain}
    files.write_json(folder / BANDWIDTH, {key: fit.bandwidth for key, fit in analysis.fits.items()}
                     | ({DOUBTFUL: doubtful} if doubtful else {}))
    files.write_json(folder / REGRESSION, {key: asdict(fit) for key, fit in analysis.fits.items()})


def generate_report(folder: Path, raw: RawMeasurements, analysis: Analysis) -> None:
    """Writes profiling_report.txt, and regression.png where there are regressions."""
    files.write_text(folder / REPORT, report(raw, analysis.table, list(analysis.fits.values()), analysis.skipped))
    if analysis.skipped:
        log.warning("%s", analysis.skipped)
    else:
        draw(raw.records, {(fit.unit, fit.stage): fit for fit in analysis.fits.values() if fit.points}, folder / PLOT)


def analyze(workspace: Workspace, plain: bool = False) -> list[dict[str, Any]]:
    """Analyses the raw measurements, writes the results beside them, and returns a row per unit and stage."""
    folder = workspace.stage_results
    raw = read_raw(folder)
    analysis = estimate_bandwidth_and_compute_time(raw, plain)
    save_results(folder, analysis)
    generate_report(folder, raw, analysis)
    if doubtful := sum(fit.plain for fit in analysis.fits.values()):
        log.warning("%d bandwidths mean nothing, as the reasons in %s say, and are written all the same (--plain-regression)",
                    doubtful, REGRESSION)
    log.info("%d records of times, %d bandwidths (%d null): %s", len(analysis.table), len(analysis.fits),
             sum(fit.bandwidth is None for fit in analysis.fits.values()), folder)
    return [row(fit) for fit in analysis.fits.values()]


def _why_no_regression() -> str:
    """Why there is no regression; "" if there is one."""
    try:
        _ = sklearn.linear_model.LinearRegression
    except (ImportError, AttributeError, OSError, ValueError) as error:  # errors of a package that is only partly installed
        if isinstance(error, ModuleNotFoundError) and error.name == "sklearn":
            return NO_SKLEARN
        reason = " ".join(str(error).split())[:SHOWN]
        return (f"scikit-learn can't be loaded ({reason}): the regression was skipped "
                "(pip install --force-reinstall scikit-learn)")
    return ""


def row(fit: Regression) -> dict[str, Any]:
    """A regression as a row of a table."""
    unknown = fit.slope_low is None or fit.slope_high is None
    interval = None if unknown else f"{_per_mb(fit.slope_low)} to {_per_mb(fit.slope_high)}"
    return {"unit": fit.unit, "stage": fit.stage, "sizes": fit.points, "ms per MB": _per_mb(fit.slope_ms_per_byte),
            "95 % interval": interval, "intercept (ms)": fit.intercept_ms, "R²": fit.r2, "bandwidth (MB/s)": fit.bandwidth,
            "reason": fit.reason}


def _per_mb(slope: float | None) -> str | None:
    return None if slope is None else f"{slope * 1024**2:.4g}"
