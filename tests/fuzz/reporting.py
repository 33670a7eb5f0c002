"""The outcomes of each case of a campaign, and the counts that every campaign reports."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

HANG_S = 60.0
MOST_MIB = 4096.0
FAULTS = ("traceback", "crash", "hang", "memory", "another answer")  # the last: a changed answer, or one that is nonsense
SHOWN_CHARACTERS = 1500  # of a fault's message, from its end


@dataclass
class Outcome:
    """The outcome of one case.

    Attributes:
        what: `answer`, `error` (one for the user), or one of FAULTS.
        answers: numbers, where the case asks for some.
        remark: for the last case of a part, what else the campaign found.
    """

    what: str
    case: str
    message: str = ""
    answers: tuple[float, ...] = ()
    seconds: float = 0.0
    peak_mib: float = 0.0
    remark: str = ""

    @property
    def fault(self) -> bool:
        return self.what in FAULTS

    def __str__(self) -> str:
        return f"{self.what}: {self.case}: {self.message.strip()[-SHOWN_CHARACTERS:]}"


Parts = Iterator[tuple[str, Iterable[Outcome]]]  # of a campaign: what each tries, and its outcomes as they come


def counted(parts: Parts) -> list[dict[str, Any]]:
    """A line of the report for each part of a campaign; faults are printed on stderr as they come."""
    rows = []
    for tried, outcomes in parts:
        row: dict[str, Any] = {"tried": tried, "cases": 0, **dict.fromkeys(("answer", "error", *FAULTS), 0),
                               "slowest (s)": 0.0, "most memory (MiB)": 0.0, "remark": ""}
        for outcome in outcomes:
            row["cases"] += 1
            row[outcome.what] += 1
            row["slowest (s)"] = max(row["slowest (s)"], outcome.seconds)
            row["most memory (MiB)"] = max(row["most memory (MiB)"], outcome.peak_mib)
            row["remark"] = outcome.remark or row["remark"]
            if outcome.fault:
                print(outcome, file=sys.stderr, flush=True)
        rows.append(row)
    return rows
