"""Makes the HTML file of a page: template, style, script, the plots' data and ECharts, all in one."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.lazy import jinja2
from hase.utils.pages.page import COLOURS, OTHER, Bars, Chart, Grid, Page, Part, Piece, Plot, Table, Timeline, TreeMap
from hase.utils.pages.scales import Scale, scale_of, scales_of
from hase.utils.pages.svg import drawing_of
from hase.utils.paths import ROOT

MOST_BYTES = 2_000_000  # of a page, ECharts included
FOLDER = Path(__file__).parent
ECHARTS = FOLDER / "echarts" / "echarts.min.js"
PACKAGES = ("onnxruntime", "onnxruntime-gpu", "onnx", "numpy", "xgboost-cpu", "xgboost")  # whose versions a page names
LEAST_RATIO = 2.0  # between the numbers of the lightest and the darkest cell of a grid
DIGITS = 6  # of the numbers in plots


def write_page(page: Page, path: Path) -> None:
    """Writes a page as one HTML file, with the command that is running as the one that makes it again.

    Raises:
        UserError: it would be larger than MOST_BYTES.
    """
    html = html_of(page, command_line(), datetime.now(UTC).astimezone())
    if (size := len(html.encode())) > MOST_BYTES:
        raise UserError(f"{path}: the page would have {size / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}: ask for less at "
                        "once")
    files.write_text(path, html)


def html_of(page: Page, command: str, made: datetime) -> str:
    """The page as HTML; `command` makes it again."""
    plots: list[dict[str, Any]] = []

    def place(plot: Plot) -> int:
        plots.append(payload(plot, page.colours))
        return len(plots) - 1

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True,
                                     lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"cell": cell, "bar": bar_width, "colour": lambda name: colour_of(str(name), page.colours)}
    environment.globals |= {"place": place, "drawing": drawing_of, "what": what, "interval": interval_of,
                            "shades": shades_of}
    body = environment.get_template("page.html").render(
        page=page, command=command, made=made, versions=versions(), script_of=read, colours=_legend(page))
    data = json.dumps(plots, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return body.replace("@@PLOTS@@", data).replace("@@ECHARTS@@", read("echarts/echarts.min.js") if plots else "")


def read(name: str) -> str:
    """The text of a file beside this one."""
    return (FOLDER / name).read_text(encoding="utf-8")


def _legend(page: Page) -> list[tuple[str, int]]:
    """What has a colour on the page, and its number."""
    return [(name, place) for place, name in enumerate(page.colours[:COLOURS])] + [(OTHER, -1)]


def command_line() -> str:
    """The command that is running, as one types it in the repository."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script
    return shlex.join(["python", str(name), *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Versions of this machine's Python and of the packages that a page rests on."""
    found = {"Python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def what(piece: Piece) -> str:
    """The kind of a piece, for the template."""
    return {"Table": "table", "Shares": "shares", "Grid": "grid"}.get(type(piece).__name__, "plot")


def cell(value: Any) -> str:
    """A cell of a table: as the command line prints it; a missing one is empty."""
    return "" if value is None else cli.cell(value)


def bar_width(value: Any, table: Table) -> float:
    """How long the bar of a cell is, in per cent of the longest."""
    longest = max((number for row in table.rows if (number := _number(row[table.bar])) is not None), default=0.0)
    return 100 * (_number(value) or 0.0) / longest if longest else 0.0


def shades_of(grid: Grid) -> list[list[float]]:
    """How dark the cells of a grid are, from 0 to 1."""
    positive = [value for row in grid.cells for value in row if value]
    least, most = min(positive, default=1.0), max(positive, default=1.0)
    span = math.log(max(most / least, LEAST_RATIO))
    return [[math.log(value / least) / span if value else 0.0 for value in row] for row in grid.cells]


def interval_of(between: tuple[float, float, float]) -> list[float]:
    """Where low end, value and high end of an interval stand on a line from 0 to 100, with a margin."""
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


def payload(plot: Plot, colours: Sequence[str]) -> dict[str, Any]:
    """A plot as the page's script reads it."""
    if isinstance(plot, TreeMap):
        return {"kind": plot.kind, "title": plot.title, "unit": plot.unit, "whole": _nested(plot.whole, colours)}
    if isinstance(plot, Timeline):
        names: dict[str, int] = {}
        tracks = {name: [[_short(span.begins), _short(span.ends), names.setdefault(span.name, len(names)),
                          colour_of(span.group, colours)] for span in spans] for name, spans in plot.tracks.items()}
        return {"kind": plot.kind, "title": plot.title, "tracks": tracks, "names": list(names)}
    document: dict[str, Any] = _rounded(asdict(plot))
    if isinstance(plot, Chart):
        document["series"] = [_rounded(series._asdict()) for series in plot.series]
        document["limits"] = [limit._asdict() for limit in plot.limits]
        document["x"], document["y"] = map(_scale, scales_of(plot))
    elif isinstance(plot, Bars):
        document["bars"] = [_rounded(bar._asdict()) for bar in plot.bars]
        document["limit"] = plot.limit._asdict() if plot.limit else None
        document["axis"] = _scale(scale_of(plot))
    return document


def _scale(scale: Scale) -> dict[str, Any]:
    return _rounded(scale._asdict())


def _nested(part: Part, colours: Sequence[str]) -> dict[str, Any]:
    document: dict[str, Any] = {"name": part.name, "value": _short(part.total)}
    if part.parts:
        return document | {"children": [_nested(child, colours) for child in part.parts.values()]}
    return document | {"colour": colour_of(part.group, colours), "note": part.note}


def _rounded(value: Any) -> Any:
    """The same with shorter numbers; NaN and infinity, which JSON has not, become None."""
    if isinstance(value, float):
        return _short(value)
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


def _short(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
