"""Writes what follows from the measurements: the tables for planners, a report for people, and a plot of each stage's time over
its bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hase.extras.graph_stages.analysis import LookupKey, LookupRecord, Regression, fit_stages, lookup_table, write_lookup
from hase.extras.graph_stages.layer import STAGES
from hase.extras.graph_stages.records import RawMeasurements, StageRecord, raw_path, read_raw
from hase.utils import files
from hase.utils.lazy import matplotlib, sklearn
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

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
    """The whole text. `skipped` says why there is no regression; "" where there is one."""
    parts = [_setting(raw), _ran(raw), _regressions(fits, skipped), _times(table), _left_out(table)]
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


def _ran(raw: RawMeasurements) -> Iterator[str]:
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


def _left_out(table: Mapping[LookupKey, LookupRecord]) -> Iterator[str]:
    failed = {key: record.reason for key, record in table.items() if record.total_time is None}
    if failed:
        yield "Failed"
        yield from (f"  {key}: {reason}" for key, reason in failed.items())


def draw(records: Sequence[StageRecord], fits: Mapping[tuple[str, int], Regression], path: Path) -> None:
    """One panel for each unit. A line that is no bandwidth is dashed."""
    units = list(dict.fromkeys(unit for unit, _ in fits))
    if not units:
        return
    matplotlib.use("Agg")
    figure, panels = matplotlib.pyplot.subplots(1, len(units), figsize=(1 + 6 * len(units), 5), squeeze=False,
                                                layout="constrained")
    for axes, unit in zip(panels[0], units, strict=True):
        for (fitted_unit, stage), fit in fits.items():
            if fitted_unit == unit:
                of_stage = [record for record in records if (record.unit, record.stage) == (unit, stage)]
                _draw_stage(axes, [record for record in of_stage if record.samples_ms], fit)
        axes.set(title=unit, xscale="log", yscale="log", xlabel="bytes of inputs and outputs (MB)", ylabel="latency (ms)")
        axes.grid(color="0.9")
        axes.legend(fontsize="small")
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)
    matplotlib.pyplot.close(figure)


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
    """What follows from measurements: the table of times, a regression for each unit and stage, and why there is none at all
    ("" where there is)."""

    table: dict[LookupKey, LookupRecord]
    fits: dict[str, Regression]
    skipped: str


def estimate_bandwidth_and_compute_time(raw: RawMeasurements, plain: bool = False) -> Analysis:
    """Bandwidths by regression, and the times of computing and moving that follow. There are none without scikit-learn, or
    where it can't be loaded.

    Args:
        raw: the measurements.
        plain: whether the formula's number is given, and marked, where a bandwidth means nothing.

    Raises:
        UserError: a size was measured on several graphs.
    """
    skipped = _without_regression()
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
    """Writes all that follows from the raw measurements beside them, and returns a row for each unit and stage. `plain`: see
    `estimate_bandwidth_and_compute_time`.

    Raises:
        UserError: there are no measurements, or they are damaged.
    """
    folder, raw = workspace.stage_results, read_raw(raw_path(workspace))
    analysis = estimate_bandwidth_and_compute_time(raw, plain)
    save_results(folder, analysis)
    generate_report(folder, raw, analysis)
    if doubtful := sum(fit.plain for fit in analysis.fits.values()):
        log.warning("%d bandwidths mean nothing, as the reasons in %s say, and are written all the same (--plain-regression)",
                    doubtful, REGRESSION)
    log.info("%d records of times, %d bandwidths (%d null): %s", len(analysis.table), len(analysis.fits),
             sum(fit.bandwidth is None for fit in analysis.fits.values()), folder)
    return [row(fit) for fit in analysis.fits.values()]


def _without_regression() -> str:
    """Why there is no regression; "" where there is one."""
    try:
        _ = sklearn.linear_model.LinearRegression
    except (ImportError, AttributeError, OSError, ValueError) as error:  # what a package raises that is there in part
        if isinstance(error, ModuleNotFoundError) and error.name == "sklearn":
            return NO_SKLEARN
        reason = " ".join(str(error).split())[:SHOWN]
        return (f"scikit-learn can't be loaded ({reason}): the regression was skipped "
                "(pip install --force-reinstall scikit-learn)")
    return ""


def row(fit: Regression) -> dict[str, Any]:
    """A regression as a row of a table."""
    unknown = fit.slope_low is None or fit.slope_high is None
    within = None if unknown else f"{_per_mb(fit.slope_low)} to {_per_mb(fit.slope_high)}"
    return {"unit": fit.unit, "stage": fit.stage, "sizes": fit.points, "ms per MB": _per_mb(fit.slope_ms_per_byte),
            "95 % interval": within, "intercept (ms)": fit.intercept_ms, "R²": fit.r2, "bandwidth (MB/s)": fit.bandwidth,
            "reason": fit.reason}


def _per_mb(slope: float | None) -> str | None:
    return None if slope is None else f"{slope * 1024**2:.4g}"
