"""Makes the HTML file of a page (template, style, script, data and ECharts in one), and cards for notebooks."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from hase.utils import files
from hase.utils.commands import command_line
from hase.utils.errors import UserError
from hase.utils.fingerprint import package_version
from hase.utils.lazy import jinja2
from hase.utils.pages.charts import chart_svg
from hase.utils.pages.page import (
    COLOURS,
    OTHER,
    Chart,
    Grid,
    Page,
    PageTable,
    Piece,
    Plot,
    Shares,
    Timeline,
    TreeMap,
    TreeMapPart,
    bars_scale,
    chart_scales,
)
from hase.utils.text import cell

MOST_BYTES = 2_000_000  # of a page, ECharts included
FOLDER = Path(__file__).parent  # holds the template, style and script
PACKAGES = ("onnxruntime", "onnxruntime-gpu", "onnx", "numpy", "xgboost-cpu", "xgboost")  # packages whose versions a page shows
LEAST_RATIO = 2.0  # of the darkest cell's number to the lightest one's: with less, the darkest is not fully dark
DIGITS = 6  # of the numbers in plots
CARD = ("display:inline-block;border:1px solid rgba(127,127,127,.35);border-radius:8px;padding:10px 14px;max-width:640px;"
        "font-family:system-ui,sans-serif;font-size:13px;line-height:1.4;text-align:left;white-space:normal")
FAINT = "opacity:.65;font-size:12px"
NUMBER = "font-size:18px;font-weight:600"
FIELD = "display:inline-block;vertical-align:top;margin:6px 22px 0 0"
DOUBT = "#b7791f"  # readable on white and on black
CARD_NOTES = 3  # notes that a card shows
SHOWN_WARNINGS = 3  # of a page; the others are folded
BREAKS = re.compile(r"(--[a-z][\w-]*)|(?<=[,_/])(?=\w)|(?=@)")  # where a long name may go on in the next line
CELL = "padding:2px 10px;text-align:{};white-space:nowrap"


def write_page(page: Page, path: Path) -> None:
    """Writes a page as one HTML file that names the current command as its source."""
    html = page_html(page, command_line(), datetime.now(UTC).astimezone())
    if (size := len(html.encode())) > MOST_BYTES:
        raise UserError(f"{path}: the page would have {size / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}; ask for fewer "
                        "models or sizes at once")
    files.write_text(path, html)


def page_html(page: Page, command: str, made: datetime) -> str:
    """The page as HTML; `command` is the command that produces it."""
    plots: list[dict[str, Any]] = []

    def plot_index(plot: Plot) -> int:
        plots.append(plot_data(plot, page.colours))
        return len(plots) - 1

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True,
                                     lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"cell": page_cell, "alike": grouped_warnings, "bar": bar_percent,
                            "name_parts": lambda text: [part for part in BREAKS.split(text) if part],
                            "colour": lambda name: colour_of(str(name), page.colours)}
    environment.globals |= {"plot_index": plot_index, "plot_svg": chart_svg, "piece_kind": piece_kind,
                            "interval": interval_positions, "shades": grid_shades}
    legend = [(name, colour_of(name, page.colours)) for name in (*page.colours[:COLOURS], OTHER)]
    versions = {"Python": platform.python_version()} | {name: number for name in PACKAGES if (number := package_version(name))}
    body = environment.get_template("page.html").render(
        page=page, shown_warnings=SHOWN_WARNINGS, command=command, made=made, versions=versions, asset=asset, legend=legend)
    data = json.dumps(plots, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return body.replace("@@PLOTS@@", data).replace("@@ECHARTS@@", asset("echarts/echarts.min.js") if plots else "")


def asset(name: str) -> str:
    """The text of a file beside this one."""
    return (FOLDER / name).read_text(encoding="utf-8")


def piece_kind(piece: Piece) -> str:
    """The kind of a piece, as the template calls it."""
    return {PageTable: "table", Shares: "shares", Grid: "grid"}.get(type(piece), "plot")


def page_cell(value: Any) -> str:
    """A table cell, formatted as on the command line; empty for a missing value."""
    return "" if value is None else cell(value)


def grouped_warnings(warnings: Mapping[str, Sequence[str]]) -> list[list[tuple[str, Sequence[str]]]]:
    """Warnings with the names that each concerns, in groups of those that differ only in names and numbers. Groups about rough
    estimates come first.
    """
    groups: dict[tuple[str, ...], list[tuple[str, Sequence[str]]]] = {}
    for text, names in warnings.items():
        words = tuple(word for word in text.split() if re.search("[a-z]", word) and not re.search("[A-Z0-9]", word))
        groups.setdefault(words, []).append((text, names))
    return sorted(groups.values(), key=lambda group: "rough estimate" not in group[0][0])


def bar_percent(value: Any, table: PageTable) -> float:
    """The length of a cell's bar, in per cent of the longest."""
    longest = max((number for row in table.rows if (number := _number(row.get(table.bar))) is not None), default=0.0)
    return 100 * (_number(value) or 0.0) / longest if longest else 0.0


def grid_shades(grid: Grid) -> list[list[float]]:
    """How dark the cells of a grid are, from 0 to 1."""
    positive = [value for row in grid.cells for value in row if value]
    least, most = min(positive, default=1.0), max(positive, default=1.0)
    span = math.log(max(most / least, LEAST_RATIO))
    return [[math.log(value / least) / span if value else 0.0 for value in row] for row in grid.cells]


def interval_positions(between: tuple[float, float, float]) -> list[float]:
    """Positions of an interval's low end, value and high end on a line from 0 to 100, with a margin."""
    low, value, high = between
    span = (high - low) or 1.0
    return [6.0, 6.0 + 88 * (value - low) / span, 94.0]


def _number(value: Any) -> float | None:
    """The number in a cell: itself, or the first in its text."""
    if isinstance(value, (int, float)):
        return float(value)
    found = re.match(r"[-+]?\d+\.?\d*", str(value or ""))
    return float(found[0]) if found else None


def colour_of(group: str, colours: Sequence[str]) -> int:
    """The number of a group's colour on a page; −1 for OTHER."""
    return colours.index(group) if group in colours[:COLOURS] else -1


def plot_data(plot: Plot, colours: Sequence[str]) -> dict[str, Any]:
    """A plot as JSON for the page's script."""
    if isinstance(plot, TreeMap):
        return {"kind": plot.kind, "title": plot.title, "unit": plot.unit, "whole": _nested(plot.whole, colours)}
    if isinstance(plot, Timeline):
        names: dict[str, int] = {}
        tracks = {name: [[_short(span.begins), _short(span.ends), names.setdefault(span.name, len(names)),
                          colour_of(span.group, colours)] for span in spans] for name, spans in plot.tracks.items()}
        return {"kind": plot.kind, "title": plot.title, "tracks": tracks, "names": list(names)}
    scales = dict(zip("xy", chart_scales(plot), strict=True)) if isinstance(plot, Chart) else {"axis": bars_scale(plot)}
    return {name: _plain(value) for name, value in (asdict(plot) | scales).items()}


def _nested(part: TreeMapPart, colours: Sequence[str]) -> dict[str, Any]:
    document: dict[str, Any] = {"name": part.name, "value": _short(part.total)}
    if part.parts:
        return document | {"children": [_nested(child, colours) for child in part.parts.values()]}
    return document | {"colour": colour_of(part.group, colours), "note": part.note}


def _plain(value: Any) -> Any:
    """The value as plain data with shorter numbers; NaN and infinity, which JSON lacks, become None."""
    if isinstance(value, float):
        return _short(value)
    if hasattr(value, "_asdict"):  # a NamedTuple
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def _short(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


class CardField(NamedTuple):
    """A number on a card, with a note below it."""

    name: str
    value: str
    note: str = ""


def card_html(title: str, subtitle: str, fields: Sequence[CardField], notes: Sequence[str] = (), doubt: str = "") -> str:
    """A card for a notebook.

    Args:
        title, subtitle: what the answer is about, and its conditions.
        notes: warnings, of which the first CARD_NOTES are shown.
        doubt: words that stand out; "" for none.
    """
    numbers = "".join(f'<span style="{FIELD}"><span style="{FAINT}">{escape(field.name)}</span><br>'
                      f'<span style="{NUMBER}">{escape(field.value)}</span><br>'
                      f'<span style="{FAINT}">{escape(field.note)}</span></span>' for field in fields)
    mark = f' <span style="color:{DOUBT};font-weight:600">{escape(doubt)}</span>' if doubt else ""
    more = [f"and {len(notes) - CARD_NOTES} more"] if len(notes) > CARD_NOTES else []
    below = "".join(f"<br>{escape(note)}" for note in [*notes[:CARD_NOTES], *more])
    warned = f'<div style="{FAINT};margin-top:6px">Before you rely on it:{below}</div>' if below else ""
    return (f'<div style="{CARD}"><b>{escape(title)}</b>{mark}<br><span style="{FAINT}">{escape(subtitle)}</span>'
            f"<div>{numbers}</div>{warned}</div>")


def table_html(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table with the columns of the first one."""
    if not rows:
        return "<p>nothing</p>"
    head = "".join(f'<th style="{CELL.format("left")}">{escape(column)}</th>' for column in rows[0])
    body = "".join(f"<tr>{''.join(_cell(row[column]) for column in rows[0])}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    side = "right" if isinstance(value, (int, float)) and not isinstance(value, bool) else "left"
    return f'<td style="{CELL.format(side)}">{escape(cell(value))}</td>'
