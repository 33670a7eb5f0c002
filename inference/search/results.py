"""The files of a search: what it found so far, so that an interrupted search goes on, and the table at its end.

While a search runs, `OUT.part` holds a line for the question, and then a line for each batch of candidates; each line has a
digest. A batch is there completely or not at all. The table, which replaces `OUT` at once, has a row per candidate, with its
rank and whether it is on the front.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hase.inference.search.evaluating import Candidate, Question
from hase.utils.errors import UserError
from hase.utils.files import append_line, line_with_digest, line_without_digest, replacing
from hase.utils.lazy import pyarrow

PART_VERSION = 1
PARQUET, CSV = ".parquet", ".csv"
ROWS_AT_A_TIME = 10_000  # of the table: a group of a Parquet file
COLUMNS = (*Candidate._fields, "rank", "front")


def check_suffix(out: Path) -> None:
    """Checks that a table can be written.

    Raises:
        UserError: it is neither CSV nor Parquet, or the package for Parquet is missing.
    """
    if out.suffix not in (CSV, PARQUET):
        raise UserError(f"{out}: the table is CSV or Parquet; end its name with {CSV} or {PARQUET}")
    if out.suffix == PARQUET and find_spec("pyarrow") is None:
        raise UserError(f"{out}: Parquet needs the package pyarrow (pip install -r requirements-search.txt); or choose a {CSV}")


class PartFile:
    """What a search found so far.

    Attributes:
        path: the file.
    """

    def __init__(self, out: Path, question: Question) -> None:
        """Prepares.

        Args:
            out: the table that the search will write.
            question: what it asks.
        """
        self.path = out.with_name(f"{out.name}.part")
        self._heading = json.dumps({"version": PART_VERSION, "search": json.loads(json.dumps(question._asdict(), default=str))})

    def begin(self) -> None:
        """Begins the file if it is not there.

        Raises:
            UserError: it is of another search.
        """
        first = next(_whole_lines(self.path), None)
        if first is None:
            self.path.unlink(missing_ok=True)  # a kill may have cut its first line short
            append_line(self.path, line_with_digest(self._heading))
        elif first != self._heading:
            raise UserError(f"{self.path}: holds what another search found so far, with other options; remove it, or choose "
                            "another --out")

    def add(self, candidates: Sequence[Candidate]) -> None:
        """Adds a batch."""
        append_line(self.path, line_with_digest(json.dumps({"candidates": candidates})))

    def candidates(self) -> Iterator[Candidate]:
        """What was found so far, in order.

        Raises:
            UserError: the file is damaged.
        """
        for number, line in enumerate(_whole_lines(self.path)):
            if number:
                yield from (Candidate(*fields) for fields in json.loads(line)["candidates"])

    def remove(self) -> None:
        self.path.unlink()


def _whole_lines(path: Path) -> Iterator[str]:
    """The lines of a file, without digests; a last one that a kill cut short is left out. None if there is no file.

    Raises:
        UserError: a line is damaged.
    """
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


def write_table(out: Path, candidates: Iterable[Candidate], best: Sequence[Candidate], front: Sequence[Candidate]) -> None:
    """Writes all candidates as CSV or Parquet, completely or not at all."""
    ranks, on_front = {one.number: rank for rank, one in enumerate(best, 1)}, {one.number for one in front}
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
