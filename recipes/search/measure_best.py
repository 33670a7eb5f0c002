"""Do the networks of a search take as long as predicted, in the same order? Measures the front of a search on this CPU.

Reads the table of `inference/search_models.py --out` (.csv), exports the networks of its front (at most --top, evenly spread
over it), predicts each for a CPU, and runs each on this one. Other work on the machine makes runs slower and never faster, so
each network is run many times, all in turn, with one thread; the shortest time of the processor counts. By default the
predictors are those of another CPU that tests use (recipes/same_predictions/cpu.tar.xz): then times differ, and only the order
can be compared.

Prints a row per network, and on stderr Spearman's rank correlation of the predicted and the measured latencies.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import csv
import time
from collections.abc import Sequence
from typing import Any

from inference import Predictor
from recipes.same_predictions.questions import CPU_WORKSPACE
from recipes.search.spaces.ofa_in_torch import exported
from runtimes.ort.runner import random_feed
from utils import cli
from utils.errors import UserError
from utils.files import unpack
from utils.lazy import onnx, scipy
from utils.logger import get_logger
from utils.ort_sessions import open_session
from utils.paths import ROOT
from utils.temporary import temporary_folder

log = get_logger("measured")
EXAMPLES = """
python recipes/search/measure_best.py --table found.csv  # needs a table of search_models.py
python recipes/search/measure_best.py --table found.csv --workspace out/here --target epyc --top 10  # needs your own
"""


def networks_in(table: Path, most: int) -> list[str]:
    """The networks on the front of a search, the fastest first; of more than `most`, some that are evenly spread.

    Raises:
        UserError: it is no table of a search, or has no front.
    """
    with table.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("front") == "True"]
    if not rows:
        raise UserError(f"{table}: holds no front of a search; inference/search_models.py --out {table} writes one")
    names = [row["model"] for row in sorted(rows, key=lambda row: float(row["latency_ms"]))]
    steps = min(most, len(names))
    return [names[place * (len(names) - 1) // max(steps - 1, 1)] for place in range(steps)]


def measured_ms(models: Sequence[onnx.ModelProto], rounds: int) -> list[float]:
    """The shortest time of a run of each model on this CPU, in ms of the processor, with one thread."""
    sessions = [open_session(model.SerializeToString(), "cpu", threads=1) for model in models]
    feeds = [random_feed(session) for session in sessions]
    shortest = [float("inf")] * len(models)
    for _ in cli.progress(range(rounds), "rounds"):
        for place, (session, feed) in enumerate(zip(sessions, feeds, strict=True)):
            began = time.process_time()
            session.run(None, feed)
            shortest[place] = min(shortest[place], 1e3 * (time.process_time() - began))
    return shortest


def options() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--table", type=Path, required=True, metavar="FILE", help="what search_models.py --out wrote")
    parser.add_argument("--top", type=cli.count, default=20, metavar="N", help="networks (default: 20)")
    parser.add_argument("--rounds", type=cli.count, default=40, help="runs of each network (default: 40)")
    parser.add_argument("--target", default="cpu", help="whose predictors, by name or a part of it (default: cpu)")
    return parser


def main() -> int:
    args = options().parse_args()
    workspace = cli.start(args)
    names = networks_in(args.table, args.top)
    models = [exported(name) for name in cli.progress(names, "exporting")]
    with temporary_folder() as folder:
        if workspace.root == ROOT:
            unpack(CPU_WORKSPACE, folder)
        predictor = Predictor(folder if workspace.root == ROOT else workspace, args.target, force=True)
        predictions = predictor.predict_many(models)
    measured = measured_ms(models, args.rounds)
    rows: list[dict[str, Any]] = [
        {"network": name, "predicted (ms)": prediction.latency_ms, "measured (ms)": time_ms}
        for name, prediction, time_ms in zip(names, predictions, measured, strict=True)]
    cli.print_rows(rows, args.json, f"predicted for {predictor.fitted.target.name}, and measured here")
    if len(rows) > 1:
        correlation = scipy.stats.spearmanr([prediction.latency_ms for prediction in predictions], measured).statistic
        log.info("rank correlation of predicted and measured latencies: %.3f", correlation)
    return 0


if __name__ == "__main__":
    cli.run(main)
