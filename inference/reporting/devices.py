"""The page of a model on several devices side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hase.inference.reporting.common import about
from hase.utils import cli
from hase.utils.pages.page import COLOURS, Axis, Bar, Bars, Chart, Limit, Page, Section, Series, Table
from hase.utils.pages.scales import axis_for

if TYPE_CHECKING:
    from hase.inference.core.targets import Fitted

COST = "a million items"
MEASURED = "measured card"


def device_chart(rows: Sequence[Mapping[str, Any]], limit_ms: float | None) -> Chart:
    """Latency with its interval against the cost of a million items, or against throughput where there are no prices. Lines of
    cards that were never measured are dashed, and what does not fit is a cross."""
    across = COST if any(COST in row for row in rows) else "items/s"
    series = []
    for device in dict.fromkeys(row["device"] for row in rows):
        points = sorted((row for row in rows if row["device"] == device and row.get(across)), key=lambda row: row[across])
        if points:
            x, y, low, high = ([row[name] for row in points] for name in (across, "latency (ms)", "low (ms)", "high (ms)"))
            series.append(Series(device, x, y, low, high, [f"{device}, batch {row['batch']}" for row in points],
                                 line=len(points) > 1, dash="" if points[0]["from"] == MEASURED else "dashed",
                                 marked=[place for place, row in enumerate(points) if row["fits"] == "no"]))
    return Chart("Latency, with its interval", Axis("cost of a million items" if across == COST else across, log=True),
                 axis_for("ms", [y for one in series for y in one.y]), series,
                 [Limit(f"{limit_ms:g} ms", limit_ms)] if limit_ms else [])


def devices_page(model: Path, rows: Sequence[Mapping[str, Any]], devices: Mapping[str, Fitted],
                 warned: Mapping[str, Sequence[str]], limit_ms: float | None) -> Page:
    """The page of a model on several devices.

    Args:
        model: its file.
        rows: of `compare_devices.py`, the best first.
        devices: what predicts for each, by name.
        warned: the devices that each warning concerns.
        limit_ms: an objective.
    """
    first, *others = rows
    cost = f", for {cli.cell(first[COST])} a million items" if COST in first else ""
    answer = (f"{model.stem}: {first['device']} is {'cheapest' if cost else 'fastest'} of {len(devices)}, with "
              f"{first['latency (ms)']:.4g} ms at batch {first['batch']}{cost}.")
    more = [f"Nine of ten such predictions lie between {first['low (ms)']:.4g} and {first['high (ms)']:.4g} ms."]
    if others and first["device"] != others[0]["device"] and others[0]["low (ms)"] < first["high (ms)"]:
        more.append(f"Its interval overlaps that of the next, {others[0]['device']}, so which is faster is not sure.")
    unmeasured = [name for name in devices if any(row["device"] == name and row["from"] != MEASURED for row in rows)]
    if unmeasured:
        more.append(f"{cli.first_of(unmeasured)}: predicted from the data sheet; no kernel was measured there.")
    bars = [Bar(_called(row, rows), row["latency (ms)"], row["low (ms)"], row["high (ms)"],
                f"{row['from']}{', more memory than it has' if row['fits'] == 'no' else ''}") for row in rows]
    limit = Limit(f"{limit_ms:g} ms", limit_ms) if limit_ms else None
    plots = [device_chart(rows, limit_ms)] if len(rows) > len(devices) and len(devices) <= COLOURS else [
        Bars("Latency, with its interval", axis_for("ms", [bar.value for bar in bars]), bars, limit)]
    return Page("Devices compared", f"{model.stem} on {len(devices)} devices", answer, [" ".join(more)], (),
                [Section("Side by side", [*plots, Table(rows, "All devices", most=30)])], about(warned, len(devices)),
                {"model": str(model), **{name: fitted.target.name for name, fitted in devices.items()}, "other work": "none"})


def _called(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    return row["device"] + (f", batch {row['batch']}" if len({other["batch"] for other in rows}) > 1 else "")
