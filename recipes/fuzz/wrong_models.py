"""Predicts wrong ONNX files, by a seed: damaged ones, and some that are made to do harm. Each must give an answer or an error,
within a minute and 4 GiB, and without a traceback or a crash.

Prints the faults, and how many files ended how; writes the files with faults to --out.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator

from inference import predict
from recipes.fuzz.damaged_models import HARMFUL, SOUND, damaged_model
from recipes.fuzz.reading import Outcome, Reader, serve
from utils import cli
from utils.paths import ROOT

TARGET = "nvidia-h200"  # predictors for it come with Hase, so nothing has to be trained
COMMAND = ("-m", "recipes.fuzz.wrong_models", "--serve")
EXAMPLES = """
python recipes/fuzz/wrong_models.py
python recipes/fuzz/wrong_models.py --count 2000 --seed 7 --json
"""


def damaged_files(folder: Path, count: int, seed: int) -> Iterator[tuple[str, Path]]:
    """Damaged models, each by its damage and its file in `folder`."""
    sound = [(make.__name__, make().SerializeToString()) for make in SOUND]
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        name, data = rng.choice(sound)
        damage, changed = damaged_model(data, rng)
        path = folder / f"damaged_{number}.onnx"
        path.write_bytes(changed)
        yield f"{number}: {name}: {damage}", path


def harmful_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Models that are made to do harm, each by what it is and its file in `folder`."""
    for number, (name, make) in enumerate(HARMFUL.items()):
        path = folder / f"harmful_{number}.onnx"
        path.write_bytes(make().SerializeToString())
        yield name, path


def outcomes_of(files: Iterable[tuple[str, Path]], target: str, reader: Reader) -> Iterator[Outcome]:
    """What comes of predicting each file. A file that gives no fault is removed."""
    for name, path in files:
        outcome = reader.read(f"answers.append(predict({str(path)!r}, target={target!r}, force=True).latency_ms)", name)
        if outcome.what == "answer" and not all(0.0 <= latency_ms < math.inf for latency_ms in outcome.answers):
            outcome.what = "another answer"
        if not outcome.fault:
            path.unlink()
        yield outcome


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--count", type=cli.count, default=600, metavar="N", help="damaged files (default: 600)")
    parser.add_argument("--seed", type=cli.whole, default=1, metavar="N", help="of the damages (default: 1)")
    parser.add_argument("--target", default=TARGET, metavar="NAME", help=f"whose latency (default: {TARGET})")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "fuzz", metavar="DIR", help="where the files are made")
    parser.add_argument("--serve", action="store_true", help="the process that reads them; the command starts it itself")
    args = parser.parse_args()
    if args.serve:
        serve({"predict": predict})
        return 0
    cli.start(args)
    args.out.mkdir(parents=True, exist_ok=True)
    rows, faults = [], 0
    with Reader(COMMAND) as reader:
        for title, files in (("damaged", damaged_files(args.out, args.count, args.seed)), ("harmful", harmful_files(args.out))):
            counts: Counter[str] = Counter()
            slowest_s = largest_mib = 0.0
            for outcome in outcomes_of(files, args.target, reader):
                counts[outcome.what] += 1
                slowest_s, largest_mib = max(slowest_s, outcome.seconds), max(largest_mib, outcome.peak_mib)
                if outcome.fault:
                    faults += 1
                    print(f"{outcome.what}: {outcome.damage}: {outcome.message.strip()[-1500:]}", file=sys.stderr, flush=True)
            rows.append({"files": title, "count": counts.total(), **{what: counts[what] for what in (
                "answer", "error", "traceback", "crash", "hang", "memory", "another answer")},
                "slowest (s)": slowest_s, "most memory (MiB)": largest_mib})
    if args.json:
        cli.print_json(rows)
    else:
        cli.print_table(rows, "wrong models")
    return 1 if faults else 0


if __name__ == "__main__":
    cli.run(main)
