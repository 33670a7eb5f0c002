"""Searches a space for the best candidates and the Pareto front, writes the results, and resumes an interrupted search."""

from __future__ import annotations

import bisect
import csv
import heapq
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from hase.inference.library.predictor import BATCH, batches
from hase.inference.search.evaluating import (
    SearchCandidate,
    SearchQuestion,
    choice_name,
    evaluate_choices,
    evaluator_for,
    is_model_choice,
)
from hase.inference.search.on_ray import evaluated_on_ray
from hase.inference.search.spaces import Choice, space_of
from hase.utils.errors import UserError
from hase.utils.files import append_line, line_with_digest, line_without_digest, replacing
from hase.utils.lazy import pandas as pd
from hase.utils.lazy import pyarrow
from hase.utils.logger import get_logger, progress
from hase.utils.pages.rendering import table_html
from hase.utils.paths import Workspace
from hase.utils.processes import stream_in_processes

log = get_logger("search")
Rank = tuple[float, float, int]
PART_VERSION = 1
PARQUET, CSV = ".parquet", ".csv"
ROWS_AT_A_TIME = 10_000  # size of a row group of a Parquet file
COLUMNS = (*SearchCandidate._fields, "rank", "front")


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
        best: the candidates within the limits with the highest scores, best first.
        front: those that no other beats in both latency and score, fastest first.
        admitted, failed: numbers of candidates within the limits, and with an error.
    """

    best: list[SearchCandidate]
    front: list[SearchCandidate]
    searched: int
    admitted: int
    failed: int
    first_error: str
    version: int = 1

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return self._asdict() | {name: [candidate._asdict() for candidate in getattr(self, name)] for name in ("best", "front")}

    def to_pandas(self) -> pd.DataFrame:
        """The best candidates as a table."""
        return pd.DataFrame(self.best)

    def _repr_html_(self) -> str:
        """For notebooks: the best candidates."""
        return table_html([candidate._asdict() for candidate in self.best])


class _Tally:
    """The running totals of a search."""

    def __init__(self, top: int, least_chance: float) -> None:
        self._best, self._front, self._least_chance = Best(top, least_chance), Front(least_chance), least_chance
        self.searched = self._admitted = self._failed = 0
        self._first_error = ""

    def add(self, candidate: SearchCandidate) -> None:
        self._best.add(candidate)
        self._front.add(candidate)
        self.searched += 1
        self._admitted += admitted(candidate, self._least_chance)
        self._failed += bool(candidate.error)
        self._first_error = self._first_error or candidate.error or ""

    def result(self) -> SearchResult:
        return SearchResult(self._best.candidates, self._front.candidates, self.searched, self._admitted, self._failed,
                     self._first_error)


def search(question: SearchQuestion, top: int, out: Path | None = None, processes: int | None = None,
           ray_address: str | None = None) -> SearchResult:
    """Searches a space for the best candidates and the Pareto front.

    Args:
        top: number of best candidates to keep.
        out: the table of all candidates, CSV or Parquet. An interrupted search with the same question is resumed.
        processes: by default only this one, or on Ray, one for each CPU of the cluster.
        ray_address: the Ray cluster that does the work (`hase.utils.ray_cluster.connected`); None: this machine.

    Raises:
        UserError: the space, the predictors, `out` or the cluster can't be used.
    """
    for notice in evaluator_for(question).notices:
        log.warning(notice)
    space = space_of(question.space, Workspace(question.workspace), question.most, question.seed)
    tally, choices, part_file = _Tally(top, question.limits.least_chance), space.choices(), None
    if out is not None:
        check_suffix(out)
        part_file = PartFile(out, question)
        part_file.begin()
        last = None
        for candidate in part_file.candidates():
            tally.add(candidate)
            last = candidate
        if last is not None:
            _skip_searched(choices, tally.searched, last, part_file)
            log.info("%d candidates were searched before; going on from there", tally.searched)
    total = None if space.total is None else -(-(space.total - tally.searched) // BATCH)
    if ray_address is None:
        stream = _evaluated(question, choices, processes or 1)
    else:
        stream = evaluated_on_ray(evaluator_for(question), tally.searched, BATCH, ray_address, processes)
    with closing(stream):
        for batch in progress(batches(stream, BATCH), f"batches of {BATCH} candidates", total):
            candidates = [candidate._replace(number=number) for number, candidate in enumerate(batch, tally.searched)]
            for candidate in candidates:
                tally.add(candidate)
            if part_file is not None:
                part_file.add(candidates)
    result = tally.result()
    if out is not None and part_file is not None:
        write_table(out, part_file.candidates(), result.best, result.front)
        part_file.remove()
    return result


def _evaluated(question: SearchQuestion, choices: Iterator[Choice], processes: int) -> Generator[SearchCandidate]:
    task = partial(evaluate_choices, question)
    if processes > 1:
        yield from stream_in_processes(task, batches(choices, BATCH), processes)
    else:
        for batch in batches(choices, BATCH):
            yield from task(batch)


def _skip_searched(choices: Iterator[Choice], count: int, last: SearchCandidate, part: PartFile) -> None:
    """Skips the choices that were searched before."""
    last_skipped = next(islice(choices, count - 1, None), None)
    if last_skipped is None or (not is_model_choice(last_skipped) and choice_name(last_skipped) != last.model):
        raise UserError(f"{part.path}: the space gives other candidates now than when that search began; remove the file, or "
                        "choose another --out")


class Best:
    """Collects the candidates within the limits that have the highest scores; at equal scores, the fastest."""

    def __init__(self, count: int, least_chance: float) -> None:
        self._count, self._least_chance = count, least_chance
        self._seen = 0
        self._heap: list[tuple[Rank, SearchCandidate]] = []

    def add(self, candidate: SearchCandidate) -> None:
        self._seen += 1
        if not admitted(candidate, self._least_chance):
            return
        rank = candidate.score or 0.0, -(candidate.latency_ms or 0.0), -self._seen  # at equal values, the first
        if len(self._heap) < self._count:
            heapq.heappush(self._heap, (rank, candidate))
        elif rank > self._heap[0][0]:
            heapq.heapreplace(self._heap, (rank, candidate))

    @property
    def candidates(self) -> list[SearchCandidate]:
        """The collected candidates, best first."""
        return [candidate for _, candidate in sorted(self._heap, key=lambda entry: entry[0], reverse=True)]


class Front:
    """Collects the Pareto front: candidates within the limits that no other beats in both latency and score."""

    def __init__(self, least_chance: float) -> None:
        self._least_chance = least_chance
        self._latencies: list[float] = []  # of the front, ascending like the scores
        self._front: list[SearchCandidate] = []

    def add(self, candidate: SearchCandidate) -> None:
        if not admitted(candidate, self._least_chance):
            return
        latency_ms, score = candidate.latency_ms or 0.0, candidate.score or 0.0
        index = bisect.bisect_right(self._latencies, latency_ms)
        if index and (self._front[index - 1].score or 0.0) >= score:
            return
        first = bisect.bisect_left(self._latencies, latency_ms)
        end = first  # the candidates from first to end are beaten
        while end < len(self._front) and (self._front[end].score or 0.0) <= score:
            end += 1
        self._front[first:end], self._latencies[first:end] = [candidate], [latency_ms]

    @property
    def candidates(self) -> list[SearchCandidate]:
        """The collected candidates, fastest first."""
        return list(self._front)


def admitted(candidate: SearchCandidate, least_chance: float) -> bool:
    """Whether a candidate is within the limits with at least this probability."""
    return candidate.chance is not None and candidate.chance >= least_chance


def hypervolume(points: Sequence[tuple[float, float]], slowest_ms: float) -> float:
    """The area of the latency-score plane (ms × score) that the points (ms, score) dominate, up to `slowest_ms`."""
    volume, highest = 0.0, 0.0
    for latency_ms, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if latency_ms < slowest_ms and score > highest:
            volume += (slowest_ms - latency_ms) * (score - highest)
            highest = score
    return volume


def check_suffix(out: Path) -> None:
    """Checks that a table with this suffix can be written."""
    if out.suffix not in (CSV, PARQUET):
        raise UserError(f"{out}: the table is CSV or Parquet; end its name with {CSV} or {PARQUET}")
    if out.suffix == PARQUET and find_spec("pyarrow") is None:
        raise UserError(f"{out}: Parquet needs the package pyarrow (pip install '.[search]'); or choose a {CSV}")


class PartFile:
    """The file of an unfinished search, with the candidates so far."""

    def __init__(self, out: Path, question: SearchQuestion) -> None:
        """Prepares the file next to `out`, the final table."""
        self.path = out.with_name(f"{out.name}.part")
        self._heading = json.dumps({"version": PART_VERSION, "search": json.loads(json.dumps(question._asdict(), default=str))})

    def begin(self) -> None:
        """Creates the file if it does not exist."""
        first = next(_complete_lines(self.path), None)
        if first is None:
            self.path.unlink(missing_ok=True)  # a kill may have cut its first line short
            append_line(self.path, line_with_digest(self._heading))
        elif first != self._heading:
            raise UserError(f"{self.path}: holds what another search found so far, with other options; remove it, or choose "
                            "another --out")

    def add(self, candidates: Sequence[SearchCandidate]) -> None:
        """Appends a batch."""
        append_line(self.path, line_with_digest(json.dumps({"candidates": candidates})))

    def candidates(self) -> Iterator[SearchCandidate]:
        """The candidates so far, in order."""
        for number, line in enumerate(_complete_lines(self.path)):
            if number:
                yield from (SearchCandidate(*fields) for fields in json.loads(line)["candidates"])

    def remove(self) -> None:
        self.path.unlink()


def _complete_lines(path: Path) -> Iterator[str]:
    """The complete lines of a file without digests, skipping a last line that was cut short. Empty without a file."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            try:
                yield line_without_digest(line.rstrip("\n"))
            except ValueError as error:
                raise UserError(f"{path}, line {number}: {error}; remove the file to search anew") from None


def write_table(out: Path, candidates: Iterable[SearchCandidate], best: Sequence[SearchCandidate],
                front: Sequence[SearchCandidate]) -> None:
    """Writes all candidates as CSV or Parquet, completely or not at all."""
    ranks = {candidate.number: rank for rank, candidate in enumerate(best, 1)}
    on_front = {candidate.number for candidate in front}
    rows = ({**candidate._asdict(), "rank": ranks.get(candidate.number), "front": candidate.number in on_front}
            for candidate in candidates)
    with replacing(out) as path, (_parquet_rows if out.suffix == PARQUET else _csv_rows)(path) as write:
        while batch := [row for _, row in zip(range(ROWS_AT_A_TIME), rows, strict=False)]:
            write(batch)


@contextmanager
def _csv_rows(path: Path) -> Iterator[Any]:
    with path.open("w", encoding="utf-8", newline="") as table:
        writer = csv.DictWriter(table, COLUMNS, lineterminator="\n")
        writer.writeheader()
        yield writer.writerows


@contextmanager
def _parquet_rows(path: Path) -> Iterator[Any]:
    types = {"model": pyarrow.string(), "error": pyarrow.string(), "rough_estimate": pyarrow.bool_(), "front": pyarrow.bool_(),
             "rank": pyarrow.int64(), "number": pyarrow.int64()}
    schema = pyarrow.schema([(name, types.get(name, pyarrow.float64())) for name in COLUMNS])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        def write(rows: Sequence[Mapping[str, Any]]) -> None:
            writer.write_table(pyarrow.Table.from_pylist(list(rows), schema))
        yield write
