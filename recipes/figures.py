"""Reads and updates the figures in docs/figures.yaml, and writes them into the README and the pages of docs/.

A page quotes a figure between `<!-- fig:NAME -->` and `<!-- /fig -->`, which Markdown does not show. docs/accuracy.md also has
a table of all figures, with command and commit. recipes/write_pages.py writes both, and with --measured it takes the figures
themselves from what their command printed with --json.
"""

from __future__ import annotations

import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.paths import ROOT
from hase.utils.text import markdown_table

FIGURES = ROOT / "docs" / "figures.yaml"
QUOTED = re.compile(r"(?<=<!-- fig:)(\w+)( -->)(.*?)(?=<!-- /fig -->)", re.DOTALL)
FIGURE_IN_FILE = r"^({}:\n  \{{value: )([^,]+)(,.*?measured: )([^,}}]+)"  # a figure's value, and its commit and date
TABLE = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- /figures -->)", re.DOTALL)


class Figure(Frozen):
    """A measured number that pages quote; `value` is as shown, `measured` is commit and date.

    `printed` says where the command's JSON has it: keys, positions in lists, and columns that choose a row of a list.
    """

    value: str
    unit: str
    what: str
    command: str
    measured: str
    printed: tuple[str | int | dict[str, str], ...] = ()

    @property
    def shown(self) -> str:
        return f"{self.value} {self.unit}".rstrip()

    @property
    def command_shown(self) -> str:
        """The command as code, unless it is plain words."""
        return self.command if self.command in ("the same", "measured once") else f"`{self.command}`"


def read_figures() -> dict[str, Figure]:
    """The figures by name."""
    loaded = yaml.safe_load(FIGURES.read_text(encoding="utf-8"))
    return {name: Figure(**{key: value if key == "printed" else str(value) for key, value in entry.items()})
            for name, entry in loaded.items()}


def figure_pages() -> list[Path]:
    """The pages that may quote figures."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]


def fill_figures(text: str, figures: dict[str, Figure]) -> str:
    """A page's text with the figures' current values. Raises UserError if it quotes an unknown figure."""
    if missing := {name for name, *_ in QUOTED.findall(text)} - figures.keys():
        raise UserError(f"no figure {', '.join(sorted(missing))} in {FIGURES}")
    text = QUOTED.sub(lambda found: f"{found[1]}{found[2]}{figures[found[1]].shown}", text)
    table = markdown_table([{"figure": figure.shown, "what": figure.what, "command": figure.command_shown,
                             "measured": figure.measured} for figure in figures.values()])
    return TABLE.sub(lambda _: f"{table}\n", text)


def update_figures(text: str, group: str, printed: Any) -> str:
    """The file of figures with new values, from the JSON that a command `printed`. Only figures change that begin with `group`_
    and say where the JSON has them. Raises UserError if there are none, or if the JSON lacks one."""
    chosen = {name: figure for name, figure in read_figures().items() if name.startswith(f"{group}_") and figure.printed}
    if not chosen:
        raise UserError(f"{FIGURES}: no figure {group}_… says where a command printed it")
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    measured = f"{commit.stdout.strip()} ({datetime.now(tz=UTC):%Y-%m-%d})"
    for name, figure in chosen.items():
        decimals, last = len(figure.value.partition(".")[2]), str(figure.printed[-1])
        as_per_cent = figure.unit == "%" and not last.endswith("_%")
        try:
            value = f"{(100 if as_per_cent else 1) * _number_at(printed, figure.printed):.{decimals}f}"
        except (LookupError, TypeError, ValueError):
            raise UserError(f"{name}: the command's JSON has nothing at {list(figure.printed)}") from None
        text = re.sub(FIGURE_IN_FILE.format(name), rf"\g<1>{value}\g<3>{measured}", text, flags=re.MULTILINE)
    return text


def _number_at(printed: Any, path: tuple[str | int | dict[str, str], ...]) -> float:
    """The number at a path in a JSON document (see `Figure`). Raises LookupError or TypeError if it is not there."""
    for step in path:
        if isinstance(step, dict):
            printed = next((row for row in printed if all(row.get(key) == value for key, value in step.items())), None)
        else:
            printed = printed[step]
    return float(printed)
