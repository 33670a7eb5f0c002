"""Finds the way of sharing a GPU, the shares and the batches with which several models meet their latency objectives.

Name each model, the rate of its requests and its objective: --model, --rate and --slo-ms, once for each model, in the same
order. For each way of sharing that was learned for the target, predicts the time of each model's run, alone and beside the
others, and simulates its requests: they arrive at random, wait, and are run together, in runs of the batch's size. The best way
has the most headroom, the smallest (objective − latency) ÷ objective of all models. Prints a row for each way and model, and a
sentence. GPU instances (MIG) rank last: they were never measured, and their times follow from the data sheet. Exit status 4: no
way meets all objectives.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse

from hase.benchmark.serving.sets import ServedModel
from hase.inference.library.predictor import Predictor
from hase.inference.prediction.answers import PERCENTILE
from hase.inference.prediction.conditions import AS_USUAL, PaceAsked
from hase.inference.prediction.sources import pair_with_sizes
from hase.inference.sharing.advice import BATCHES, MOST_MODELS, ServedSet, advice_rows, advice_verdict, advise_sharing
from hase.utils import cli
from hase.utils.config import read_config, validate
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

EXAMPLES = """
python inference/sharing_advice.py --model resnet18.onnx --rate 200 --slo-ms 5 --on h200
python inference/sharing_advice.py --model a.onnx --rate 200 --slo-ms 5 --model b.onnx --rate 50 --slo-ms 20  # needs models
python inference/sharing_advice.py --set served.yaml --on h200 --json  # needs a file with models
"""

log = get_logger("sharing_advice")


def _models_and_batches(parser: argparse.ArgumentParser, args: argparse.Namespace,
                        workspace: Workspace) -> tuple[list[ServedModel], list[list[int]]]:
    """The models that the options name, and the possible batches of each."""
    if args.set:
        if args.model or args.rate or args.slo_ms:
            parser.error("--set names the models; leave out --model, --rate and --slo-ms")
        models = list(read_config(args.set, ServedSet).models)
        return models, [args.batch or [model.batch] for model in models]
    if not args.model:
        parser.error("no models; give --model, --rate and --slo-ms for each, or --set FILE")
    if not len(args.model) == len(args.rate) == len(args.slo_ms):
        parser.error(f"each model has one rate and one objective: {len(args.model)} × --model, {len(args.rate)} × --rate, "
                     f"{len(args.slo_ms)} × --slo-ms")
    batches = args.batch or list(BATCHES)
    questions = pair_with_sizes([workspace.find_model(model) for model in args.model], [cli.one_size_dims(args.dim)])
    given = [{"model": question.model, "dims": question.sizes[0], "batch": max(batches), "rate_per_s": rate, "slo_ms": slo_ms}
             for question, rate, slo_ms in zip(questions, args.rate, args.slo_ms, strict=True)]
    return list(validate({"models": given}, ServedSet, "the command line").models), [batches] * len(given)


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", type=Path, action="append", default=[],
                        help=f"an ONNX file with a dynamic dimension `batch` (repeatable, up to {MOST_MODELS}); a bare name is "
                             "also looked for in model_zoo")
    parser.add_argument("--rate", type=cli.positive, action="append", default=[], metavar="PER_S",
                        help="requests per second to the model, on average")
    parser.add_argument("--slo-ms", type=cli.positive, action="append", default=[], metavar="MS",
                        help="the latency within which its requests should be answered")
    parser.add_argument("--set", type=Path, metavar="FILE",
                        help="instead of these three: YAML with models, each as in a set of benchmark/served_sets.py; "
                             "batches are then the file's, unless --batch is given")
    parser.add_argument("--batch", type=cli.counts, metavar="N[,N…]",
                        help=f"batches to choose from (default: {','.join(map(str, BATCHES))})")
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE",
                        help="size of another dynamic dimension, for those models that have it, e.g. --dim seq=128 "
                             "(repeatable)")
    parser.add_argument("--percentile", type=cli.percentile, default=PERCENTILE, metavar="P",
                        help=f"the share of requests that must meet the objective, in per cent (default: {PERCENTILE:g})")
    cli.add_target(parser)
    cli.add_host_pace(parser, "what benchmark/host_pace.py measured here in the last ten minutes")
    cli.add_trust(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    models, batches = _models_and_batches(parser, args, workspace)
    predictor = Predictor(workspace, args.target, strict=args.strict, force=args.force, any_device=True)
    pace = PaceAsked(args.host_pace, args.machine).now(predictor.fitted, run_mode=AS_USUAL)
    advice = advise_sharing(predictor, models, batches, args.percentile, pace)
    for warning in advice.warnings:
        log.warning("%s", warning)
    if args.json:
        cli.print_json(advice)
    else:
        cli.print_table(advice_rows(advice), f"several models on one {advice.target}")
        print(advice_verdict(advice))
    return 0 if advice.meets else cli.EXIT_SLO_MISSED


if __name__ == "__main__":
    cli.run(main)
