"""How good the candidates of a search are: by the space's own function, by a table of the user's, or by their size."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from hase.utils.errors import UserError

OWN, FLOPS, WEIGHTS = "own", "flops", "weights"
TABLE = ".csv"
NAME, SCORE = "model", "score"  # the columns that count; a table of an earlier search has them


def read_scores(path: Path) -> Mapping[str, float]:
    """The scores in a table, by the candidate's name. Rows without a score count as missing.

    Raises:
        UserError: it can't be read, lacks a column, or has a score that is no number, or two for one candidate.
    """
    scores: dict[str, float] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            table = csv.DictReader(lines)
            if missing := [column for column in (NAME, SCORE) if column not in (table.fieldnames or ())]:
                raise UserError(f"{path}: has no column {' and no column '.join(missing)}; a table of scores has a row per "
                                f"candidate, with the columns {NAME} and {SCORE}")
            for row in table:
                if row[SCORE]:
                    score = checked(row[SCORE], f"{path}, line {table.line_num}")
                    if scores.setdefault(row[NAME], score) != score:
                        raise UserError(f"{path}, line {table.line_num}: {row[NAME]} has another score above")
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: no table of scores: {error}") from None
    return scores


def score_in(scores: Mapping[str, float], name: str, table: str) -> float:
    """The score of a candidate in a table, by its name, or by that of its file.

    Args:
        table: its name, for the message.

    Raises:
        UserError: it has none.
    """
    for called in (name, Path(name).name):
        if called in scores:
            return scores[called]
    raise UserError(f"{name}: has no score in {table}")


def checked(score: object, what: str) -> float:
    """A score as a number.

    Raises:
        UserError: it is none, or not finite.
    """
    try:
        number = float(score)  # type: ignore[arg-type]  # the user's function may return anything
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{what}: the score {score!r} is no finite number")
    return number
