"""Searches many models for the best ones that keep to limits on a target: latency, memory, energy.

The candidates are the models of a folder, of a list of paths, those that a Python file makes (inference/search/spaces.py says
what it defines), or those of a design space that comes with Hase (`ofa`: once-for-all networks of MobileNetV3's kind, drawn at
random). They are read in batches, so there may be more than memory holds.

A candidate keeps to a limit if that is likely enough (--chance), by the 90 % interval of the prediction. Among the candidates
that keep to all limits, the best have the highest scores: the space's own score, that of a table (such as an accuracy), or the
operations (FLOPs) or the bytes of weights, which say how much a network can learn, but are no accuracy. Peak memories have no
interval and count as predicted. Since they take the most time, they are predicted only for candidates that keep to the other
limits.

Prints a row for each of the best candidates, or with --front for each on the Pareto front of latency and score; --json has
both. With --out, a table holds all candidates; after an interruption, the same command continues there. A candidate that can't
be predicted has an error in the table, and the exit status is 1. With --ray, all machines of a Ray cluster share the work.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from typing import Any

from hase.inference.library.predictor import Predictor
from hase.inference.prediction.conditions import AS_USUAL, PaceAsked
from hase.inference.search.evaluating import (
    FLOPS,
    NAME,
    OWN,
    SCORE,
    TABLE_SUFFIX,
    WEIGHTS,
    SearchCandidate,
    SearchLimits,
    SearchQuestion,
)
from hase.inference.search.searching import SearchResult, search
from hase.inference.search.spaces import COUNT
from hase.utils import cli
from hase.utils.logger import get_logger
from hase.utils.text import cell

log = get_logger("search")
EXAMPLES = """
python inference/search_models.py --space ofa --on h200 --latency-ms 1.2 --memory-mib 500 --count 2000 --top 10
python inference/search_models.py --space ofa --on h200 --latency-ms 1.5 --energy-j 0.2 --chance 0.9 --out found.csv
python inference/search_models.py --space ofa --on h200 --latency-ms 1.2 --count 20000 --ray auto  # needs Ray
python inference/search_models.py --space model_zoo/models --on h200 --front
python inference/search_models.py --space ofa --on h200 --score accuracies.csv --front  # needs your own
python inference/search_models.py --space my_space.py --on h200 --latency-ms 2 --out found.parquet  # needs your own
"""


def options() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--space", required=True, metavar="SPACE",
                        help="a folder of .onnx models, a list of them (.txt, a path on each line), a Python file, or ofa")
    cli.add_target(parser)
    parser.add_argument("--latency-ms", type=cli.positive, metavar="MS", help="the longest latency")
    parser.add_argument("--memory-mib", type=cli.positive, metavar="MIB", help="the largest peak memory")
    parser.add_argument("--energy-j", type=cli.positive, metavar="J", help="the highest energy of a run")
    parser.add_argument("--chance", type=share, default=0.5, metavar="SHARE",
                        help="how likely it must be that a candidate keeps to the limits, 0 to 1 (default: 0.5, so that the "
                             "predicted numbers themselves keep to them)")
    parser.add_argument("--score", type=score, metavar="SCORE",
                        help=f"what makes a candidate good: {OWN} (the space's), {FLOPS}, {WEIGHTS}, or a {TABLE_SUFFIX} with "
                             f"the columns {NAME} and {SCORE} (default: {OWN}, else {FLOPS})")
    parser.add_argument("--energy", action="store_true", help="also predict energies where they have no limit")
    cli.add_host_pace(parser, "what benchmark/host_pace.py measured here in the last ten minutes; else intervals are wide")
    parser.add_argument("--top", type=cli.count, default=10, metavar="N", help="how many of the best to print (default: 10)")
    parser.add_argument("--front", action="store_true", help="print the Pareto front of latency and score instead")
    parser.add_argument("--count", type=cli.count, metavar="N",
                        help=f"search only the first N candidates (default: all; of ofa, {COUNT})")
    parser.add_argument("--seed", type=cli.whole, default=0, help="of a space that draws its candidates (default: 0)")
    parser.add_argument("--out", type=cli.out_file, metavar="FILE",
                        help="write all candidates to this .csv or .parquet; an interrupted search continues from FILE.part")
    parser.add_argument("--processes", type=cli.count, metavar="N",
                        help="how many share the work (default: 1; with --ray, one for each CPU of the cluster)")
    parser.add_argument("--ray", metavar="ADDRESS", help="search on the Ray cluster at HOST:PORT; auto: on the one that this "
                        "machine belongs to, or on this machine (default: without Ray)")
    parser.add_argument("--force", action="store_true",
                        help="predict even if element type or ONNX Runtime version differ from those of the predictors")
    return parser


def share(text: str) -> float:
    """Parses an option whose value is above 0 and at most 1."""
    value = cli.positive(text)
    if value > 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def score(text: str) -> str:
    """Parses the option that says which score candidates have."""
    if text in (OWN, FLOPS, WEIGHTS) or (text.endswith(TABLE_SUFFIX) and Path(text).is_file()):
        return text
    raise argparse.ArgumentTypeError(f"{text}: give {OWN}, {FLOPS}, {WEIGHTS} or a table ({TABLE_SUFFIX}) that exists")


def candidate_row(rank: int, candidate: SearchCandidate) -> dict[str, Any]:
    """A candidate as a table row, without columns of what was not predicted."""
    def between(low: float | None, high: float | None) -> str:
        return f"{cell(low)} and {cell(high)}"

    row: dict[str, Any] = {
        "rank": rank, "model": candidate.model, "latency (ms)": candidate.latency_ms,
        "90 % between (ms)": between(candidate.latency_low_ms, candidate.latency_high_ms),
        "rough": "yes" if candidate.rough_estimate else "no"}
    if candidate.energy_j is not None:
        row |= {"energy (J)": candidate.energy_j, "90 % between (J)": between(candidate.energy_low_j, candidate.energy_high_j)}
    if candidate.peak_memory_mib is not None:
        row["peak memory (MiB)"] = candidate.peak_memory_mib
    return row | {"GFLOP": candidate.gflop, "weights (MiB)": candidate.weights_mib, "score": candidate.score,
                  "chance": f"{100 * (candidate.chance or 0.0):.0f} %"}


def print_result(found: SearchResult, args: argparse.Namespace) -> None:
    """Prints the best candidates or the front, and logs how many candidates there were."""
    if args.json:
        cli.print_json(found.to_dict())
    else:
        shown, what = (found.front, "the front") if args.front else (found.best, "the best")
        cli.print_table([candidate_row(rank, candidate) for rank, candidate in enumerate(shown, 1)],
                        f"{what} of {found.searched} candidates")
    log.info("%d candidates; %d keep to the limits with a chance of at least %g, %d are on the front", found.searched,
             found.admitted, args.chance, len(found.front))
    if found.failed:
        log.error("%d candidates could not be predicted; the error of the first one: %s", found.failed, found.first_error)


def main() -> int:
    args = options().parse_args()
    workspace = cli.start(args)
    fitted = Predictor(workspace, args.target, any_device=True).fitted
    pace = PaceAsked(args.host_pace, args.machine).now(fitted, run_mode=AS_USUAL)
    limits = SearchLimits(args.latency_ms, args.memory_mib, args.energy_j, args.chance)
    question = SearchQuestion(workspace.root, args.target, args.space, args.count, args.seed, limits, args.energy, args.score,
                              pace, args.force)
    found = search(question, args.top, args.out, args.processes, args.ray)
    print_result(found, args)
    return 1 if found.failed else 0


if __name__ == "__main__":
    cli.run(main, kept="what was searched (with --out)")
