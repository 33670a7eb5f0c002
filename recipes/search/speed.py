"""How many networks a second a search can have predicted, by this code and by that of an earlier commit, side by side.

The networks are drawn from the space of inference/search/ofa.py. The earlier commit is checked out into a temporary folder, and
predicts the same records with the predictors that it shipped. Each way gets the records in memory, in rounds that take turns.
Their seconds are those of the processor, so other work on the machine changes them little. The user's cache is not used. The
first pass over the records meets new kernels, the second one none; a few other networks come before, so that the predictors are
read. The earlier commit's answers hold its peak memory, which it estimated more simply.

Then the whole work of a search, which makes each record from the network's name and predicts latency and energy: in one process
and in several, in rounds that take turns: by the clock, and what the ratio would be if each process had a core of its own, from
the seconds of the processor. With other work on all cores (the load is printed) the two can't agree. Starts are left out: a
process takes some seconds to read the predictors and to make the parts of networks, so several are for long searches.

Prints one row per way: networks a second, and how many times those of the earlier commit, or of one process.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import functools
import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import psutil

from inference.core.predictor import BATCH, Predictor, batches
from inference.search import ofa
from utils import cli
from utils.cache_folder import OFF, VARIABLE
from utils.errors import UserError
from utils.fingerprint import Flavour
from utils.logger import get_logger
from utils.paths import ROOT
from utils.temporary import temporary_folder

log = get_logger("speed")
EXAMPLES = """
python recipes/search/speed.py
python recipes/search/speed.py --count 500 --rounds 1 --processes 4
python recipes/search/speed.py --before HEAD~1 --json
"""
TARGET, FLAVOUR = "nvidia-h200", Flavour(device="cuda", runtime_version="1.31")
BEFORE = "a646845"
SEARCHED, WARM_UP = 12, 4096  # times as many networks as records in memory; networks for each process, before the clock starts
FIRST = 32  # other networks, which come before
WAYS: dict[str, dict[str, Any]] = {"latency": {}, "latency and energy": {"energy": True},
                                    "latency, energy and memory": {"energy": True, "memory": True}}
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
first = int(sys.argv[3])
predictor.predict_many(records[:first])
seconds = []
for _ in range(2):
    began = time.process_time()
    latencies = [prediction.latency_ms for prediction in predictor.predict_many(records[first:])]
    seconds.append(time.process_time() - began)
print(json.dumps(seconds))
"""


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


def seconds_before(folder: Path, records: Path) -> list[float]:
    """What the earlier commit took for the first and the second pass, in seconds of the processor.

    Raises:
        UserError: it failed.
    """
    command = [sys.executable, "-c", EARLIER, str(records), TARGET, str(FIRST)]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True,
                          check=False)
    if done.returncode:
        raise UserError(f"the earlier commit failed: {done.stderr.strip()}")
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def seconds_of(wanted: dict[str, Any], count: int) -> list[float]:
    """The same for this code, which predicts records in memory, batch after batch."""
    records = [ofa.make(name, FLAVOUR) for name in names_of(count)]
    predicts, seconds = Predictor(target=TARGET).brief(**wanted), list[float]()
    predicts(records[:FIRST])
    for _ in range(2):
        began = time.process_time()
        for batch in batches(records[FIRST:], BATCH):
            predicts(batch)
        seconds.append(time.process_time() - began)
    return seconds


def search_s(count: int, processes: int) -> tuple[float, float]:
    """What a search takes for `count` networks while it is going on, in seconds by the clock, and of the processor: it began
    some thousand networks before, and goes on after them."""
    before, after = WARM_UP * processes, (processes + 2) * BATCH
    make = functools.partial(ofa.make, flavour=FLAVOUR)
    predicted = Predictor(target=TARGET).predict_briefly(ofa.choices(before + count + after), make=make, energy=True,
                                                         processes=processes)
    began = ended = (0.0, 0.0)
    for number, _ in enumerate(predicted, 1):
        if number == before:
            began = time.perf_counter(), processor_s()
        if number == before + count:
            ended = time.perf_counter(), processor_s()
    return ended[0] - began[0], ended[1] - began[1]


def processor_s() -> float:
    """Seconds of the processor that this process and those that it started took so far."""
    own = psutil.Process()
    return sum(times.user + times.system for times in (one.cpu_times() for one in (own, *own.children(recursive=True))))


def names_of(count: int) -> Iterator[str]:
    """The networks whose records are in memory: those that come before, and `count` more."""
    return itertools.chain(ofa.choices(FIRST, seed=1), ofa.choices(count))


def rows_of(seconds: dict[str, list[list[float]]], count: int, earlier: str) -> list[dict[str, Any]]:
    """A row per way: networks a second, and the medians of how many times those of the earlier commit in the same round."""
    rows = []
    for name, rounds in seconds.items():
        row: dict[str, Any] = {"way": name}
        for place, which in enumerate(("new kernels", "known kernels")):
            row[f"{which} (networks/s)"] = round(count / median(of_round[place] for of_round in rounds))
            row[f"{which}, ratio"] = round(median(before[place] / now[place] for before, now in zip(
                seconds[earlier], rounds, strict=True)), 2)
        rows.append(row)
    return rows


def rows_of_searches(seconds: dict[int, list[tuple[float, float]]], count: int, load: float) -> list[dict[str, Any]]:
    """A row per number of processes; `load`: the machine's while they ran."""
    return [{"search, processes": processes, "networks/s": round(count / median(clock_s for clock_s, _ in rounds)),
             "ratio": round(median(one[0] / now[0] for one, now in zip(seconds[1], rounds, strict=True)), 2),
             "with a core each, ratio": round(median(processes * one[1] / now[1] for one, now in zip(
                 seconds[1], rounds, strict=True)), 2),
             "cores": os.cpu_count(), "load": round(load, 1)} for processes, rounds in seconds.items()]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT", help=f"the earlier commit (default: {BEFORE})")
    parser.add_argument("--count", type=cli.count, default=1000, help="networks (default: 1000)")
    parser.add_argument("--rounds", type=cli.count, default=3, help="rounds in which the ways take turns (default: 3)")
    parser.add_argument("--processes", type=cli.count, default=2, help="of a search with several (default: 2)")
    args = parser.parse_args()
    cli.start(args)
    os.environ[VARIABLE] = OFF  # nothing kept from an earlier round, for any of the ways
    seconds: dict[str, list[list[float]]] = {name: [] for name in (args.before, *WAYS)}
    searches: dict[int, list[tuple[float, float]]] = {processes: [] for processes in sorted({1, args.processes})}
    loads = []
    with checked_out(args.before) as earlier, temporary_folder() as folder:
        records = folder / "records.jsonl"
        records.write_text("".join(ofa.make(name, FLAVOUR).model_dump_json() + "\n" for name in names_of(args.count)))
        for place in range(args.rounds):
            log.info("round %d of %d", place + 1, args.rounds)
            seconds[args.before].append(seconds_before(earlier, records))
            for name, wanted in WAYS.items():
                seconds[name].append(seconds_of(wanted, args.count))
            for processes, of_search in searches.items():
                of_search.append(search_s(SEARCHED * args.count, processes))
                loads.append(os.getloadavg()[0])
    tables = {"predictions": rows_of(seconds, args.count, args.before),
              "searches": rows_of_searches(searches, SEARCHED * args.count, median(loads))}
    if args.json:
        cli.print_json(tables)
    else:
        cli.print_table(tables["predictions"], "how many networks a second are predicted, in seconds of the processor")
        cli.print_table(tables["searches"], "how many networks a second are made and predicted, by the clock")
    return 0


if __name__ == "__main__":
    cli.run(main)
