"""Reads the figures in docs/figures.yaml, which the README and the pages of docs/ quote.

A page quotes a figure between `<!-- fig:NAME -->` and `<!-- /fig -->`, which Markdown does not show. docs/accuracy.md also has
a table of all figures, with command and commit. recipes/write_pages.py writes both.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.paths import ROOT
from hase.utils.text import markdown_table

FIGURES = ROOT / "docs" / "figures.yaml"
QUOTED = re.compile(r"(?<=<!-- fig:)(\w+)( -->)(.*?)(?=<!-- /fig -->)", re.DOTALL)
TABLE = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- /figures -->)", re.DOTALL)


class Figure(Frozen):
    """A measured number that pages quote; `value` is as shown, `measured` is commit and date."""

    value: str
    unit: str
    what: str
    command: str
    measured: str

    @property
    def shown(self) -> str:
        return f"{self.value} {self.unit}".rstrip()

    @property
    def command_shown(self) -> str:
        """The command as code, unless it is plain words."""
        return self.command if self.command in ("the same", "measured once") else f"`{self.command}`"


def read_figures(path: Path = FIGURES) -> dict[str, Figure]:
    """The figures by name."""
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: Figure(**{key: str(value) for key, value in entry.items()}) for name, entry in loaded.items()}


def figure_pages() -> list[Path]:
    """The pages that may quote figures."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]


def filled(text: str, figures: dict[str, Figure]) -> str:
    """A page's text with current values. Raises UserError if it quotes an unknown figure."""
    if missing := {name for name, *_ in QUOTED.findall(text)} - figures.keys():
        raise UserError(f"no figure {', '.join(sorted(missing))} in {FIGURES}")
    text = QUOTED.sub(lambda found: f"{found[1]}{found[2]}{figures[found[1]].shown}", text)
    return TABLE.sub(lambda _: f"{table(figures)}\n", text)


def table(figures: dict[str, Figure]) -> str:
    """All figures, one per row."""
    return markdown_table([{"figure": figure.shown, "what": figure.what, "command": figure.command_shown,
                            "measured": figure.measured} for figure in figures.values()])
