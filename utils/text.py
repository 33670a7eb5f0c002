"""Formats values, names and warnings for people: table cells, shortened lists, grouped warnings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def cell(value: Any) -> str:
    """The text of a table cell: four significant digits (or all before the point) for floats, a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)


def first_and_count(names: Sequence[str]) -> str:
    """The first name, and the number of others: `a and 2 more`."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def distinct(texts: Iterable[str]) -> list[str]:
    """The first of each group of equal texts; texts that differ only in numbers and kernel names count as equal."""
    firsts: dict[str, str] = {}
    for text in texts:
        firsts.setdefault(_without_numbers(text), text)
    return list(firsts.values())


def names_by_warning(warnings: Iterable[tuple[str, Iterable[str]]]) -> dict[str, list[str]]:
    """The names that each warning concerns, by its text, from names and their warnings. Warnings that differ only in numbers
    and kernel names are joined."""
    texts, names = defaultdict[str, dict[str, None]](dict), defaultdict[str, dict[str, None]](dict)  # used as ordered sets
    for name, texts_of_name in warnings:
        for text in texts_of_name:
            texts[_without_numbers(text)][text] = None
            names[_without_numbers(text)][name] = None
    return {first + (f" (and {len(others)} like it)" if others else ""): list(names[pattern])
            for pattern, (first, *others) in texts.items()}


def _without_numbers(text: str) -> str:
    """A text without numbers and kernel names such as `Conv_3x3_in1x64_fp32_0c2d`; `float16` and `Col2Im` stay."""
    return re.sub(r"\w+_[\w.-]*\d[\w.-]*|\d[\d.,]*", "#", text)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of the rows, with the columns of the first one. Floats have one decimal; missing values are a dash."""
    columns = list(rows[0]) if rows else []
    lines = [columns, ["---"] * len(columns), *([_markdown_cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _markdown_cell(value: Any) -> str:
    return "–" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)
