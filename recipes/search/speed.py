"""How many networks a second a search can have predicted, by this code and by that of an earlier commit, side by side.

The networks are drawn from a search space of MobileNetV3's kind (candidates.py), each with a record of its own. The earlier
commit is checked out into a temporary folder, and predicts the same records with the predictors that it shipped. Each way gets
the records in memory, in rounds that take turns, so that other work on the machine slows all of them alike; what counts is the
ratio within a round. The first pass over the records meets new kernels, the second one none.

Prints one row per way: networks a second in the first and in the second pass, and how many times those of the earlier commit.
The earlier commit's answers hold its peak memory, which it estimated more simply.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import functools
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

from inference.core.predictor import BATCH, Predictor
from recipes.search.candidates import candidate
from records.kernel_record import ModelRecord
from utils import cli
from utils.errors import UserError
from utils.fingerprint import Flavour
from utils.logger import get_logger
from utils.paths import ROOT
from utils.temporary import temporary_folder

log = get_logger("speed")
EXAMPLES = """
python recipes/search/speed.py
python recipes/search/speed.py --count 4000 --rounds 1 --processes 4
python recipes/search/speed.py --before HEAD~1 --json
"""
TARGET, FLAVOUR = "nvidia-h200", Flavour(device="cuda", runtime_version="1.31")
BEFORE = "a646845"
SLOWER = 4
# Runs in the earlier commit's folder: how many seconds its predictions took, in the first and in the second pass.
EARLIER = """
import json, sys, time
try:
    from records.kernel_record import ModelRecord
except ImportError:  # where it was then
    from ort_analysis.records.kernel_record import ModelRecord
from inference import Predictor
records = [ModelRecord.model_validate_json(line) for line in open(sys.argv[1], encoding="utf-8")]
predictor = Predictor(target=sys.argv[2])
predictor.predict_many(records[:1])
seconds = []
for _ in range(2):
    began = time.perf_counter()
    latencies = [prediction.latency_ms for prediction in predictor.predict_many(records)]
    seconds.append(time.perf_counter() - began)
print(json.dumps({"seconds": seconds, "latencies_ms": latencies}))
"""


class Way(NamedTuple):
    """A way to predict: the options of `Predictor.predict_briefly`, which part of the networks is enough to time it (one in
    `fewer`), and the passes over those whose kernels it knows."""

    options: dict[str, Any]
    fewer: int = 1
    passes: int = 8


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit.

    Raises:
        UserError: the repository has no such commit.
    """
    with temporary_folder() as folder:
        files = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
        if files.returncode:
            raise UserError(f"{commit}: {files.stderr.decode().strip()}")
        subprocess.run(["tar", "x", "-C", str(folder)], input=files.stdout, check=True)
        yield folder


def write_candidates(path: Path, count: int) -> None:
    """Writes the records of `count` networks, one a line."""
    with path.open("w", encoding="utf-8") as lines:
        for number in range(count):
            lines.write(candidate(number, FLAVOUR).model_dump_json() + "\n")


@functools.cache
def records_in(path: Path) -> list[ModelRecord]:
    """The records in a file, read once in each process."""
    with path.open(encoding="utf-8") as lines:
        return [ModelRecord.model_validate_json(line) for line in lines]


def record_at(place: int, path: Path) -> ModelRecord:
    return records_in(path)[place]


def seconds_before(folder: Path, candidates: Path) -> list[float]:
    """What the earlier commit took for the first and the second pass, in seconds.

    Raises:
        UserError: it failed.
    """
    command = [sys.executable, "-c", EARLIER, str(candidates), TARGET]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True,
                          check=False)
    if done.returncode:
        raise UserError(f"the earlier commit failed: {done.stderr.strip()}")
    seconds: list[float] = json.loads(done.stdout)["seconds"]
    return seconds


def seconds_of(way: Way, candidates: Path, count: int) -> list[float]:
    """What a way takes for one pass over the records, in seconds, if it meets new kernels, and if it knows them all: from when
    the stream asks for the first record until the last answer is there. Processes have started, and have read the predictors
    and the records, before. The known kernels are timed over several passes, since processes work a few batches ahead."""
    warm_up, began, ended = 4 * BATCH * way.options.get("processes", 1), list[float](), list[float]()

    def places() -> Iterator[int]:
        yield from (0 for _ in range(warm_up))
        for passes in (1, way.passes):
            began.append(time.perf_counter())
            yield from list(range(count)) * passes

    make = functools.partial(record_at, path=candidates)
    for number, _ in enumerate(Predictor(target=TARGET).predict_briefly(places(), make=make, **way.options), 1):
        if number in (warm_up + count, warm_up + (1 + way.passes) * count):
            ended.append(time.perf_counter())
    first_s, second_s = (end - begin for begin, end in zip(began, ended, strict=True))
    return [first_s, second_s / way.passes]


def rows_of(seconds: dict[str, list[list[float]]], counts: dict[str, int], earlier: str) -> list[dict[str, Any]]:
    """A row per way: networks a second, and the medians of how many times those of the earlier commit in the same round."""
    rows = []
    for name, rounds in seconds.items():
        row: dict[str, Any] = {"way": name}
        for place, which in enumerate(("first", "second")):
            each_s = [of_round[place] / counts[name] for of_round in rounds]
            before_s = [of_round[place] / counts[earlier] for of_round in seconds[earlier]]
            row[f"{which} pass (networks/s)"] = round(1.0 / median(each_s))
            row[f"{which} pass, ratio"] = round(median(before / now for before, now in zip(before_s, each_s, strict=True)), 2)
        rows.append(row)
    return rows


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT", help=f"the earlier commit (default: {BEFORE})")
    parser.add_argument("--count", type=cli.count, default=1000, help="networks (default: 1000)")
    parser.add_argument("--rounds", type=cli.count, default=3, help="rounds in which the ways take turns (default: 3)")
    parser.add_argument("--processes", type=cli.count, default=2, help="of the way with several (default: 2)")
    args = parser.parse_args()
    cli.start(args)
    ways = {"brief": Way({}), f"brief, {args.processes} processes": Way({"processes": args.processes}),
            "brief, with energy": Way({"energy": True}),
            "brief, with energy and memory": Way({"energy": True, "memory": True}, SLOWER, 1)}
    counts = {args.before: args.count} | {name: max(BATCH, args.count // way.fewer) for name, way in ways.items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in counts}
    with checked_out(args.before) as earlier, temporary_folder() as folder:
        candidates = folder / "candidates.jsonl"
        write_candidates(candidates, max(counts.values()))
        for place in range(args.rounds):
            log.info("round %d of %d", place + 1, args.rounds)
            seconds[args.before].append(seconds_before(earlier, candidates))
            for name, way in ways.items():
                seconds[name].append(seconds_of(way, candidates, counts[name]))
    cli.print_rows(rows_of(seconds, counts, args.before), args.json, "how many networks a second a search can have predicted")
    return 0


if __name__ == "__main__":
    cli.run(main)
