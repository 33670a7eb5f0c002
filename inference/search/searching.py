"""Goes through the candidates of a space, in one process, several, or on a Ray cluster, and goes on where an interrupted search
stopped."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from hase.inference.core.predictor import BATCH, batches
from hase.inference.search.best import Best, Front, admitted
from hase.inference.search.evaluating import Candidate, Question, evaluated, evaluator, is_model, named
from hase.inference.search.on_ray import evaluated_on_ray
from hase.inference.search.results import PartFile, check_suffix, write_table
from hase.inference.search.spaces import Choice, space_of
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.processes import in_processes

log = get_logger("search")


class Found(NamedTuple):
    """What a search found.

    Attributes:
        best: the candidates with the highest scores that keep to the limits, the best one first.
        front: those of which none is as fast and has as high a score, the fastest one first.
        searched, admitted, failed: numbers of candidates: all, those that keep to the limits, and those with an error.
        first_error: of a candidate; "" where none has one.
    """

    best: list[Candidate]
    front: list[Candidate]
    searched: int
    admitted: int
    failed: int
    first_error: str


class _Tally:
    """What was found so far."""

    def __init__(self, top: int, least_chance: float) -> None:
        self._best, self._front, self._least_chance = Best(top, least_chance), Front(least_chance), least_chance
        self.searched = self._admitted = self._failed = 0
        self._first_error = ""

    def add(self, candidate: Candidate) -> None:
        self._best.add(candidate)
        self._front.add(candidate)
        self.searched += 1
        self._admitted += admitted(candidate, self._least_chance)
        self._failed += bool(candidate.error)
        self._first_error = self._first_error or candidate.error or ""

    def found(self) -> Found:
        return Found(self._best.candidates, self._front.candidates, self.searched, self._admitted, self._failed,
                     self._first_error)


def search(question: Question, top: int, out: Path | None = None, processes: int | None = None,
           ray_address: str | None = None) -> Found:
    """Searches a space.

    Args:
        question: what is asked of each candidate.
        top: how many of the best are wanted.
        out: the table of all candidates, CSV or Parquet. What an interrupted search with the same question left is taken over.
        processes: that share the work; by default this one alone, or on Ray, one for each CPU of the cluster.
        ray_address: of the Ray cluster that does the work (`hase.utils.ray_cluster.connected`); None: this machine does it.

    Raises:
        UserError: the space, the predictors, `out` or the cluster can't be used.
    """
    for notice in evaluator(question).notices:
        log.warning(notice)
    space = space_of(question.space, Workspace(question.workspace), question.most, question.seed)
    tally, left, part = _Tally(top, question.limits.least_chance), space.choices(), None
    if out is not None:
        check_suffix(out)
        part = PartFile(out, question)
        part.begin()
        last = None
        for candidate in part.candidates():
            tally.add(candidate)
            last = candidate
        if last is not None:
            _pass_over(left, tally.searched, last, part)
            log.info("%d candidates were searched before; going on from there", tally.searched)
    total = None if space.total is None else -(-(space.total - tally.searched) // BATCH)
    if ray_address is None:
        stream = _evaluated(question, left, processes or 1)
    else:
        stream = evaluated_on_ray(evaluator(question), tally.searched, BATCH, ray_address, processes)
    with closing(stream):
        for batch in cli.progress(batches(stream, BATCH), f"batches of {BATCH} candidates", total):
            candidates = [candidate._replace(number=number) for number, candidate in enumerate(batch, tally.searched)]
            for candidate in candidates:
                tally.add(candidate)
            if part is not None:
                part.add(candidates)
    found = tally.found()
    if out is not None and part is not None:
        write_table(out, part.candidates(), found.best, found.front)
        part.remove()
    return found


def _evaluated(question: Question, choices: Iterator[Choice], processes: int) -> Generator[Candidate]:
    task = partial(evaluated, question)
    if processes > 1:
        yield from in_processes(task, batches(choices, BATCH), processes)
    else:
        for batch in batches(choices, BATCH):
            yield from task(batch)


def _pass_over(choices: Iterator[Choice], count: int, last: Candidate, part: PartFile) -> None:
    """Takes the choices that were searched before.

    Raises:
        UserError: the space gives others now.
    """
    passed = next(islice(choices, count - 1, None), None)
    if passed is None or (not is_model(passed) and named(passed) != last.model):
        raise UserError(f"{part.path}: the space gives other candidates now than when that search began; remove the file, or "
                        "choose another --out")
