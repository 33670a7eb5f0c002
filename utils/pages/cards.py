"""Answers in a notebook: a card or a table as HTML that takes its colours from what is around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from hase.utils import cli

CARD = ("display:inline-block;border:1px solid rgba(127,127,127,.35);border-radius:8px;padding:10px 14px;max-width:640px;"
        "font-family:system-ui,sans-serif;font-size:13px;line-height:1.4;text-align:left;white-space:normal")
FAINT = "opacity:.65;font-size:12px"
NUMBER = "font-size:18px;font-weight:600"
FIELD = "display:inline-block;vertical-align:top;margin:6px 22px 0 0"
DOUBT = "#b7791f"  # readable on white and on black
NOTED = 3  # notes that a card shows
CELL = "padding:2px 10px;text-align:{};white-space:nowrap"


class Field(NamedTuple):
    """A number of a card; `note`: below it."""

    name: str
    value: str
    note: str = ""


def card(title: str, subtitle: str, fields: Sequence[Field], notes: Sequence[str] = (), doubt: str = "") -> str:
    """A card.

    Args:
        title, subtitle: what the answer is about, and what it holds for.
        fields: its numbers.
        notes: what the reader should know; the first NOTED are shown.
        doubt: a word that stands out; "" for none.
    """
    numbers = "".join(f'<span style="{FIELD}"><span style="{FAINT}">{escape(field.name)}</span><br>'
                      f'<span style="{NUMBER}">{escape(field.value)}</span><br>'
                      f'<span style="{FAINT}">{escape(field.note)}</span></span>' for field in fields)
    mark = f' <span style="color:{DOUBT};font-weight:600">{escape(doubt)}</span>' if doubt else ""
    more = [f"and {len(notes) - NOTED} more"] if len(notes) > NOTED else []
    below = "".join(f"<br>{escape(note)}" for note in [*notes[:NOTED], *more])
    warned = f'<div style="{FAINT};margin-top:6px">Before you rely on it:{below}</div>' if below else ""
    return (f'<div style="{CARD}"><b>{escape(title)}</b>{mark}<br><span style="{FAINT}">{escape(subtitle)}</span>'
            f"<div>{numbers}</div>{warned}</div>")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table with the columns of the first one."""
    if not rows:
        return "<p>nothing</p>"
    head = "".join(f'<th style="{CELL.format("left")}">{escape(column)}</th>' for column in rows[0])
    body = "".join(f"<tr>{''.join(_cell(row[column]) for column in rows[0])}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    side = "right" if isinstance(value, (int, float)) and not isinstance(value, bool) else "left"
    return f'<td style="{CELL.format(side)}">{escape(cli.cell(value))}</td>'
