"""The outcomes of each case of a campaign, and the counts that every campaign reports."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
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
        case: what was tried.
        message: of an error or a fault.
        answers: numbers, where the case asks for some.
        remark: for the last case of a campaign, what else the campaign found.
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


@dataclass
class Tally:
    """The counts of some cases, by what came of them."""

    tried: str
    counts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    largest_mib: float = 0.0
    remark: str = ""

    def add(self, outcome: Outcome) -> None:
        self.counts[outcome.what] += 1
        self.slowest_s, self.largest_mib = max(self.slowest_s, outcome.seconds), max(self.largest_mib, outcome.peak_mib)
        self.remark = outcome.remark or self.remark

    def row(self) -> dict[str, Any]:
        """A line of the report."""
        return {"tried": self.tried, "cases": self.counts.total(), **{what: self.counts[what] for what in (
            "answer", "error", *FAULTS)}, "slowest (s)": self.slowest_s, "most memory (MiB)": self.largest_mib,
            "remark": self.remark}


def counted(outcomes: Iterable[tuple[str, Outcome]]) -> list[Tally]:
    """The counts of a campaign by what is tried; faults are printed on stderr as they come."""
    tallies: dict[str, Tally] = {}
    for tried, outcome in outcomes:
        tallies.setdefault(tried, Tally(tried)).add(outcome)
        if outcome.fault:
            print(outcome, file=sys.stderr, flush=True)
    return list(tallies.values())


def titled(tried: str, outcomes: Iterable[Outcome]) -> Iterator[tuple[str, Outcome]]:
    """The outcomes of a part of a campaign, each with what the part tries."""
    return ((tried, outcome) for outcome in outcomes)
