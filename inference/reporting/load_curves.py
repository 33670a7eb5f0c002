"""The page of a load curve: a model's latency from an idle GPU to one that is always busy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hase.inference.reporting.common import device_name, target_basis
from hase.utils import cli
from hase.utils.pages.page import Axis, Chart, Fact, Limit, Page, Section, Series, Table
from hase.utils.pages.scales import axis_for

if TYPE_CHECKING:
    from hase.inference.core.targets import Fitted
    from hase.inference.sharing.shared_models import LoadCurve

LINES = (("p99", "p99_ms"), ("p95", "p95_ms"), ("mean", "mean_ms"), ("p50", "p50_ms"))  # the highest first
WITH_BAND = "p95"  # the line whose interval is drawn: four bands would cover each other


def curve_chart(curve: LoadCurve, limit_ms: float | None = None) -> Chart:
    """Percentiles over the load; with a line at `limit_ms`."""
    shares = [100 * point.busy_share for point in curve.points]
    series = []
    for name, field in LINES:
        values = [getattr(point, field) for point in curve.points]
        lows, highs = zip(*map(curve.interval_ms, values), strict=True) if name == WITH_BAND else ((), ())
        series.append(Series(name, shares, values, lows, highs, dash="dashed" if name == "mean" else ""))
    limits = [Limit(f"{limit_ms:g} ms", limit_ms)] if limit_ms else []
    return Chart(f"Latency over the load, with the 90 % interval of {WITH_BAND}", Axis("time for which other work is busy (%)"),
                 axis_for("ms", [value for one in series for value in one.y]), series, limits)


def load_page(curve: LoadCurve, fitted: Fitted, limit_ms: float | None = None) -> Page:
    """The page of a load curve; `limit_ms`: an objective for its 95th percentile."""
    idle, busy, device = curve.points[0], curve.points[-1], device_name(fitted)
    answer = (f"{curve.model}: {'about ' if curve.rough_estimate else ''}{idle.mean_ms:.4g} ms on an idle {device}, and a p95 "
              f"of {busy.p95_ms:.4g} ms beside other work that never pauses.")
    more = ["Only the share of the time varies for which other work is busy; it waits and pauses as the average of what was "
            "measured."]
    if limit_ms:
        kept = [point.busy_share for point in curve.points if point.p95_ms <= limit_ms]
        more.insert(0, f"Its p95 keeps to {limit_ms:g} ms while other work is busy for up to {max(kept):.0%} of the time, "
                       f"among the {len(curve.points)} loads below." if kept else
                       f"Its p95 misses {limit_ms:g} ms on an idle device already.")
    if curve.rough_estimate:
        more.append("This is a rough estimate: what it rests on was not measured well enough; see the notes below.")
    facts = [Fact(f"p95, {name}", f"{point.p95_ms:.4g}", "ms", f"90 % between {low_ms:.4g} and {high_ms:.4g}",
                  between=(low_ms, point.p95_ms, high_ms))
             for name, point in (("idle", idle), ("half of the time busy", curve.points[len(curve.points) // 2]),
                                 ("always busy", busy)) for low_ms, high_ms in [curve.interval_ms(point.p95_ms)]]
    sizes = ", ".join(f"{name}={size}" for name, size in curve.dims.items())
    return Page("Latency over load", curve.model, answer, [" ".join(more)], facts,
                [Section("Over the load", [curve_chart(curve, limit_ms), Table(curve.rows, most=30)])],
                dict.fromkeys(curve.warnings, ()),
                {"model": curve.model, **({"sizes": sizes} if sizes else {}), **target_basis(fitted),
                 **({"estimated operators": cli.first_of(curve.estimated_operators)} if curve.estimated_operators else {})})
