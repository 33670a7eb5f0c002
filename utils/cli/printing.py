"""Prints results: tables, JSON and progress; and tables in Markdown."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from hase.utils import logger
from hase.utils.lazy import rich

FRAME = 1  # characters: the frame of a table
PADDING = 3  # lines and blanks per column
FOLDED = 16  # smallest width of a column of words
_GROWING_COLUMN = 10  # smallest width of a column in a table that is printed line by line
_QUIET_SECONDS = 15.0  # between two progress lines if stderr is not a terminal


def first_of(names: Sequence[str]) -> str:
    """The first name, and the number of others: `a and 2 more`."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def distinct(texts: Iterable[str]) -> list[str]:
    """The first of those texts that differ in nothing but numbers and names of kernels."""
    first: dict[str, str] = {}
    for text in texts:
        first.setdefault(_without_numbers(text), text)
    return list(first.values())


def warned_of(warnings: Iterable[tuple[str, Iterable[str]]]) -> dict[str, list[str]]:
    """Whom each warning concerns, by its text.

    Warnings that are one to `distinct` have the text of the first, and how many others there are.

    Args:
        warnings: names, each with the texts of its warnings; a name may come several times.
    """
    texts, names = dict[str, dict[str, None]](), dict[str, dict[str, None]]()
    for name, of_name in warnings:
        for text in of_name:
            texts.setdefault(_without_numbers(text), {})[text] = None
            names.setdefault(_without_numbers(text), {})[name] = None
    return {first + (f" (and {len(others)} like it)" if others else ""): list(names[alike])
            for alike, (first, *others) in texts.items()}


def _without_numbers(text: str) -> str:
    """A text without numbers, and without names such as `Conv_3x3_in1x64_fp32_0c2d`; `float16` and `Col2Im` stay apart from
    others."""
    return re.sub(r"\w+_[\w.-]*\d[\w.-]*|\d[\d.,]*", "#", text)


def print_json(value: Any) -> None:
    """Prints one JSON document; pydantic models are dumped by field name."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    print(json.dumps(value, indent=2, default=str))


def cell(value: Any) -> str:
    """A table cell: four significant digits for floats, a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)


def print_table(rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
    """Prints rows as a table on a terminal, and as tab-separated lines with a header in a pipe.

    On a narrow terminal words are folded; if that is not enough, the columns are printed as several tables. Numbers are never
    broken.
    """
    if not rows:
        return
    columns = list(rows[0])
    if not sys.stdout.isatty():
        print("\t".join(columns))
        for row in rows:
            print("\t".join(cell(row.get(column)) for column in columns))
        return
    console = rich.console.Console()
    cells = {column: [cell(row.get(column)) for row in rows] for column in columns}
    numeric = {column: all(_is_number(row.get(column)) for row in rows) for column in columns}
    parts = [columns] if column_widths(cells, numeric, console.width) else _split(cells, numeric, console.width)
    for number, part in enumerate(parts):
        shown = {column: cells[column] for column in part}
        table = rich.table.Table(title=title or None if number == 0 else None, title_justify="left", header_style="bold")
        for column, width in (column_widths(shown, numeric, console.width) or dict.fromkeys(part)).items():
            table.add_column(column, justify="right" if numeric[column] else "left", overflow="fold", width=width)
        for line in zip(*shown.values(), strict=True):
            table.add_row(*line)
        console.print(table)


def _is_number(value: Any) -> bool:
    """Whether a cell holds numbers, perhaps with units, and no words: such a cell is never broken."""
    return not isinstance(value, str) or not re.search(r"[^\W\d_]{4}", value)


def column_widths(cells: Mapping[str, Sequence[str]], numeric: Mapping[str, bool], room: int) -> dict[str, int | None]:
    """The width of each column in a table that is `room` characters wide. Numbers get what they need, headings break between
    words, and folded columns of words share the rest. Empty if there is not enough room.

    Args:
        cells: the cells of each column.
        numeric: by column, whether its cells must not be broken.
    """
    needed = {name: max(len(text) for text in [*name.split(), *column]) for name, column in cells.items()}
    widths = {name: width if numeric[name] else min(width, FOLDED) for name, width in needed.items()}
    left = room - FRAME - sum(width + PADDING for width in widths.values())
    if left < 0:
        return {}
    for most in (needed, {name: max(width, len(name)) for name, width in needed.items()}):  # cells first, then headings
        while left > 0 and (short := [name for name, width in most.items() if widths[name] < width]):
            widths[min(short, key=lambda name: widths[name])] += 1
            left -= 1
    return dict(widths)


def _split(cells: Mapping[str, Sequence[str]], numeric: Mapping[str, bool], room: int) -> list[list[str]]:
    """The columns of several tables that are printed one below the other; each begins with the first column, the row's name."""
    first, *others = cells
    parts: list[list[str]] = [[first]]
    for column in others:
        longer = [*parts[-1], column]
        if len(parts[-1]) > 1 and not column_widths({name: cells[name] for name in longer}, numeric, room):
            parts.append([first])
        parts[-1].append(column)
    return parts


def print_line(row: Mapping[str, Any], heading: bool = False) -> None:
    """Prints one row of a growing table at once; with `heading`, the column names before it. In a pipe, tabs separate the
    cells."""
    names, cells = list(row), [cell(value) for value in row.values()]
    widths = [max(len(name), len(text), _GROWING_COLUMN) for name, text in zip(names, cells, strict=True)]
    for line in (names, cells) if heading else (cells,):
        if sys.stdout.isatty():
            line = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
        print(("  " if sys.stdout.isatty() else "\t").join(line), flush=True)


def print_rows(rows: Sequence[Mapping[str, Any]], as_json: bool, title: str = "") -> None:
    """Prints rows as one JSON document, or as a table."""
    if as_json:
        print_json(rows)
    else:
        print_table(rows, title)


T = TypeVar("T")


def progress(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yields `items` and shows a progress bar with the time left on stderr: a line every 15 s if that is not a terminal, and
    nothing with --quiet."""
    if logger.is_quiet():
        yield from items
        return
    if total is None:
        total = len(items) if hasattr(items, "__len__") else None  # type: ignore[arg-type]
    if sys.stderr.isatty():
        console = rich.console.Console(stderr=True)
        yield from rich.progress.track(items, description, total=total, console=console, transient=True)
        return
    log = logger.get_logger("progress")
    began = logged = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - logged > _QUIET_SECONDS and done:
            logged = now
            eta = f", {(now - began) / done * (total - done):.0f} s left" if total else ""
            log.info("%s: %d%s%s", description, done, f" of {total}" if total else "", eta)
        yield item


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table in Markdown, with the columns of the first row. Floats have one decimal; what is not known is a dash."""
    columns = list(rows[0]) if rows else []
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)
