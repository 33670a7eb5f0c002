"""Pages and charts that compare: devices, two models, latencies over the load, and shares of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hase.inference.compare.model_differences import difference_sentences
from hase.inference.prediction.answers import PERCENTILE
from hase.inference.reporting.runs import about, device_name, folded_run, operators_by_time, sentence, target_basis
from hase.utils.pages.page import (
    COLOURS,
    Bar,
    Bars,
    Chart,
    ChartAxis,
    ChartSeries,
    Fact,
    Limit,
    Page,
    PageSection,
    PageTable,
    axis_for,
)
from hase.utils.sharing_mode import SLICES, SetSharing
from hase.utils.text import cell, first_and_count

if TYPE_CHECKING:
    from hase.inference.compare.model_differences import ComparedModel, ModelDifference
    from hase.inference.prediction.run import PredictedRun
    from hase.inference.prediction.targets import Fitted
    from hase.inference.sharing.shared_models import LoadCurve, Pair


COST = "a million items"
MEASURED = "measured card"
LINES = (("p99", "p99_ms"), ("p95", "p95_ms"), ("mean", "mean_ms"), ("p50", "p50_ms"))  # highest first
WITH_BAND = "p95"  # only this line gets its interval drawn: four bands would overlap


def device_chart(rows: Sequence[Mapping[str, Any]], limit_ms: float | None) -> Chart:
    """Latency with its interval against the cost of a million items; without prices over the batch, or against throughput if
    there is one batch. Lines join the batches of a device in order. Dashed lines are cards that were never measured; crosses
    do not fit in memory.
    """
    batches = sorted({row["batch"] for row in rows if row["batch"]})
    across = COST if any(COST in row for row in rows) else "batch" if len(batches) > 1 else "items/s"
    turns = across == COST and len(batches) > 1  # a larger batch may cost more or less
    series = []
    for device in dict.fromkeys(row["device"] for row in rows):
        points = sorted((row for row in rows if row["device"] == device and row.get(across)), key=lambda row: row["batch"])
        if points:
            x, y, low, high = ([row[name] for row in points] for name in (across, "latency (ms)", "low (ms)", "high (ms)"))
            series.append(ChartSeries(device, x, y, low, high, [f"{device}, batch {row['batch']}" for row in points],
                                 line=len(points) > 1, dash="" if points[0]["from"] == MEASURED else "dashed",
                                 marked=[index for index, row in enumerate(points) if row["fits"] == "no"],
                                 beside=[str(row["batch"]) for row in points] if turns else [], whiskers=turns))
    title, axis = {COST: ("Latency against cost", "cost of a million items"), "batch": ("Latency over the batch", "batch")}.get(
        across, ("Latency against throughput", across))
    return Chart(f"{title}, with its interval" + "; numbers at points are batches" * turns,
                 ChartAxis(axis, log=True), axis_for("ms", [y for one in series for y in one.y]), series,
                 [Limit(f"{limit_ms:g} ms", limit_ms)] if limit_ms else [], batches if across == "batch" else [])


def devices_page(model: Path, rows: Sequence[Mapping[str, Any]], devices: Mapping[str, Fitted],
                 warned: Mapping[str, Sequence[str]], limit_ms: float | None) -> Page:
    """The page of a model on several devices; `rows` are those of `compare_devices.py`, best first."""
    first, *rest = rows
    cost = f", for {cell(first[COST])} a million items" if COST in first else ""
    answer = (f"{model.stem}: {first['device']} is {'cheapest' if cost else 'fastest'} of {len(devices)}, with "
              f"{first['latency (ms)']:.4g} ms at batch {first['batch']}{cost}.")
    sentences = [f"In nine of ten such cases the latency lies between {first['low (ms)']:.4g} and {first['high (ms)']:.4g} ms."]
    if rest and first["device"] != rest[0]["device"] and rest[0]["low (ms)"] < first["high (ms)"]:
        sentences.append(f"Its interval overlaps that of the next, {rest[0]['device']}, so which is faster is not sure.")
    unmeasured = [name for name in devices if any(row["device"] == name and row["from"] != MEASURED for row in rows)]
    if unmeasured:
        sentences.append(f"{first_and_count(unmeasured)}: predicted from the data sheet; no kernel was measured there.")
    bars = [Bar(_row_name(row, rows), row["latency (ms)"], row["low (ms)"], row["high (ms)"],
                f"{row['from']}{', more memory than it has' if row['fits'] == 'no' else ''}") for row in rows]
    limit = Limit(f"{limit_ms:g} ms", limit_ms) if limit_ms else None
    plots = [device_chart(rows, limit_ms)] if len(rows) > len(devices) and len(devices) <= COLOURS else [
        Bars("Latency, with its interval", axis_for("ms", [bar.value for bar in bars]), bars, limit)]
    return Page("Devices compared", f"{model.stem} on {len(devices)} devices", answer, [" ".join(sentences)], (),
                [PageSection("Side by side", [*plots, PageTable(rows, "All devices", most=30)])], about(warned, len(devices)),
                {"model": str(model), **{name: fitted.target.name for name, fitted in devices.items()}, "other work": "none"})


def _row_name(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    return row["device"] + (f", batch {row['batch']}" if len({other["batch"] for other in rows}) > 1 else "")


def difference_rows(difference: ModelDifference) -> list[dict[str, Any]]:
    """A row for each operator and one for the time outside kernels, largest difference first."""
    a, b, total_ms = difference.a, difference.b, difference.difference_ms
    rows = [(row.difference_ms, {
        "operator": row.operator, "runs A": f"{row.a.runs:g}", "runs B": f"{row.b.runs:g}", "A (ms)": row.a.time_ms,
        "B (ms)": row.b.time_ms, "B - A (ms)": row.difference_ms, "share": _percent(row.share),
        "measured A": _percent(row.a.measured_share if row.a.runs else None),
        "measured B": _percent(row.b.measured_share if row.b.runs else None), "what explains it": row.explanation})
        for row in difference.operators]
    outside_ms = difference.outside_kernels_ms
    rows.append((outside_ms, {
        "operator": "outside kernels", "runs A": None, "runs B": None, "A (ms)": a.outside_kernels_ms,
        "B (ms)": b.outside_kernels_ms, "B - A (ms)": outside_ms,
        "share": _percent(outside_ms / total_ms if total_ms else None),
        "measured A": None, "measured B": None, "what explains it": f"{a.nodes:g} nodes in A, {b.nodes:g} in B"}))
    return [row for _, row in sorted(rows, key=lambda pair: -abs(pair[0]))]


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{round(100 * share)}%"


def difference_page(difference: ModelDifference, runs: Sequence[PredictedRun], files: Sequence[Path],
                    warned: Mapping[str, Sequence[str]]) -> Page:
    """The page of two models A and B; `warned` maps each warning to the models that it concerns."""
    a, b = difference.a, difference.b
    names = next(pair for pair in ((files[0].stem, files[1].stem), (a.model, b.model), ("A", "B")) if pair[0] != pair[1])
    more_ms = abs(difference.difference_ms)
    answer = (f"{names[1]} takes {b.latency_ms:.4g} ms, " + (
        f"{more_ms:.4g} ms {'longer' if difference.difference_ms > 0 else 'less'} than {names[0]}." if more_ms else
        f"as long as {names[0]}."))
    unsure = ["Their intervals overlap, so which is faster is not sure."] if more_ms and difference.intervals_overlap else []
    sentences = [*unsure, *map(sentence, difference_sentences(difference, names)[1:])]
    rows = difference_rows(difference)
    latencies = [Bar(one.model, one.latency_ms, *one.interval_ms, "a rough estimate" if one.rough_estimate else "")
                 for one in (a, b)]
    shift = [Bar(row["operator"], row["B - A (ms)"], note=row["what explains it"]) for row in rows if row["B - A (ms)"]]
    return Page(
        "Two models compared", f"{a.model} and {b.model}", answer, sentences,
        [_fact("A", a), _fact("B", b), _ratio(difference)],
        [PageSection("Latency, with its interval", [Bars("Latency", axis_for("ms", [a.latency_ms, b.latency_ms]), latencies)]),
         PageSection("Operator by operator", [Bars(f"How much longer {names[1]} takes", ChartAxis("ms", zero=True), shift[:12]),
                                          PageTable(rows, "All of the difference", most=30)],
                 f"A = {a.model}, B = {b.model}. The rows add up to the difference of the latencies. A negative number means "
                 "that B takes less."),
         *(folded_run(f"{name}: {one.model}", run, file)
           for name, one, run, file in zip("AB", (a, b), runs, files, strict=True))],
        about(warned, 2),
        {"A": _named_with_sizes(a), "B": _named_with_sizes(b), **target_basis(runs[0].fitted),
         "run": "replayed as a CUDA graph" if difference.cuda_graph else "node by node",
         "other work": "none"}, operators_by_time([run.prediction for run in runs]))


def _fact(name: str, one: ComparedModel) -> Fact:
    low, high = one.interval_ms
    return Fact(f"{name}: {one.model}", f"{one.latency_ms:.4g}", "ms", f"90 % between {low:.4g} and {high:.4g}",
                "doubtful" if one.rough_estimate else "", (low, one.latency_ms, high))


def _named_with_sizes(one: ComparedModel) -> str:
    return ", ".join([one.file, *(f"{name}={size}" for name, size in one.dims.items())])


def _ratio(difference: ModelDifference) -> Fact:
    overlap = difference.intervals_overlap
    return Fact("B over A", f"{difference.ratio:.3g}", "times", f"the intervals {'' if overlap else 'do not '}overlap",
                "doubtful" if overlap else "")


def curve_chart(curve: LoadCurve, limit_ms: float | None = None) -> Chart:
    """Percentiles over the load, with a line at `limit_ms`."""
    shares = [100 * point.busy_share for point in curve.points]
    series = []
    for name, field in LINES:
        values = [getattr(point, field) for point in curve.points]
        lows, highs = zip(*map(curve.interval_ms, values), strict=True) if name == WITH_BAND else ((), ())
        series.append(ChartSeries(name, shares, values, lows, highs, dash="dashed" if name == "mean" else ""))
    limits = [Limit(f"{limit_ms:g} ms", limit_ms)] if limit_ms else []
    return Chart(f"Latency over the load, with the 90 % interval of {WITH_BAND}",
                 ChartAxis("time for which other work is busy (%)"),
                 axis_for("ms", [value for one in series for value in one.y]), series, limits)


def load_page(curve: LoadCurve, fitted: Fitted, limit_ms: float | None = None) -> Page:
    """The page of a load curve; `limit_ms`: an objective for its 95th percentile."""
    idle, busy, device = curve.points[0], curve.points[-1], device_name(fitted)
    answer = (f"{curve.model}: {'about ' if curve.rough_estimate else ''}{idle.mean_ms:.4g} ms on an idle {device}, and a p95 "
              f"of {busy.p95_ms:.4g} ms beside other work that never pauses.")
    details = ["Only the share of the time varies for which other work is busy; it waits and pauses as the average of what was "
                 "measured."]
    if limit_ms:
        kept = [point.busy_share for point in curve.points if point.p95_ms <= limit_ms]
        details.insert(0, f"Its p95 keeps to {limit_ms:g} ms while other work is busy for up to {max(kept):.0%} of the time, "
                       f"among the {len(curve.points)} loads below." if kept else
                       f"Its p95 misses {limit_ms:g} ms on an idle device already.")
    if curve.rough_estimate:
        details.append("This is a rough estimate: what it rests on was not measured well enough; see the notes below.")
    facts = [Fact(f"p95, {name}", f"{point.p95_ms:.4g}", "ms", f"90 % between {low_ms:.4g} and {high_ms:.4g}",
                  between=(low_ms, point.p95_ms, high_ms))
             for name, point in (("idle", idle), ("half of the time busy", curve.points[len(curve.points) // 2]),
                                 ("always busy", busy)) for low_ms, high_ms in [curve.interval_ms(point.p95_ms)]]
    sizes = ", ".join(f"{name}={size}" for name, size in curve.dims.items())
    return Page("Latency over load", curve.model, answer, [" ".join(details)], facts,
                [PageSection("Over the load", [curve_chart(curve, limit_ms), PageTable(curve.rows, most=30)])],
                dict.fromkeys(curve.warnings, ()),
                {"model": curve.model, **({"sizes": sizes} if sizes else {}), **target_basis(fitted),
                 **({"estimated operators": first_and_count(curve.estimated_operators)} if curve.estimated_operators else {})})


def share_chart(pairs: Sequence[Pair]) -> Chart:
    """The latencies of two models over the first one's share of the threads: mean with interval, and 95th percentile.

    `pairs` are the same two models under different ways of sharing: those with shares are points, the others are lines at the
    first model's mean.
    """
    ways = [(SetSharing.parse(pair.sharing), pair) for pair in pairs]
    shared = sorted(((way.percent_of(0), pair) for way, pair in ways if len(way.percents) > 1), key=lambda point: point[0])
    shares = [float(share) for share, _ in shared]
    series = []
    same_model = len({model.model for model in pairs[0].models}) == 1
    for index, model in enumerate(pairs[0].models):
        name = f"{model.model}, {('first', 'second')[index]}" if same_model else model.model
        points = [pair.models[index] for _, pair in shared]
        lows, highs = ([point.mean_interval_ms[end] for point in points] for end in (0, 1))
        series += [ChartSeries(f"{name}: mean", shares, [point.under_load.mean_ms for point in points], lows, highs),
                   ChartSeries(f"{name}: p95", shares, [point.under_load.percentile_ms(PERCENTILE) for point in points],
                          dash="dashed")]
    limits = [Limit(f"the first, {'in time slices' if pair.sharing == SLICES else f'through {pair.sharing}'}",
                    pair.models[0].under_load.mean_ms) for way, pair in ways if len(way.percents) == 1]
    values = [value for one in series for value in one.y] + [limit.y for limit in limits]
    return Chart("Latency over the share of the threads", ChartAxis("the first model's share of the threads (%)"),
                 axis_for("ms", values), series, limits)
