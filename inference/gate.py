"""Did a change make a model slower? Compares predictions with those of an earlier state, for CI.

A prediction is the same each time, so no noise of a machine fails a build. `--write` makes a snapshot of predictions, a small
JSON file that a repository can hold. `--baseline` compares with one, of the models and sizes given or, by default, of all that
it holds. It prints a sentence and a table: for each model and size its latency before and now, the change with a 90 % interval
of its own (errors of kernels that both states have cancel), the kernels that it comes from, and a verdict:

- surely slower: the whole interval is above --max-regression. This alone fails.
- maybe slower: the change is above it, or may be.
- slower, within the limit; same; faster: by the interval, too. New and gone models are reported.

Reads the models (ONNX files; weights in other files may be missing) and what training learned for the target. Writes the
snapshot (--write) and the table as Markdown (--markdown). A baseline must be of the same target, options and version of Hase.
Exit status: 0 passed, 1 an error that the message explains, 2 wrong usage, 4 surely slower, or more memory than
--max-memory-growth allows. More in docs/gate.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from collections.abc import Iterable, Sequence

from hase.inference.compare.regressions import GateResult, gate_rows, gate_sentences, judge
from hase.inference.compare.snapshots import (
    Conditions,
    ModelSnapshot,
    Snapshot,
    check_alike,
    conditions_of,
    model_snapshot,
    name_in_snapshot,
    read_snapshot,
    write_snapshot,
)
from hase.inference.library.predictor import Predictor
from hase.inference.prediction.conditions import UNKNOWN, RunMode, given_pace, pace_matters
from hase.inference.prediction.sources import Question, pair_with_sizes
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.files import write_text
from hase.utils.logger import get_logger, progress
from hase.utils.text import cell, markdown_table

log = get_logger("gate")
EXAMPLES = """
python inference/gate.py --model resnet18.onnx --batch 1,8 --on h200 --write main.json  # before the change
python inference/gate.py --baseline main.json --max-regression 5%  # after it
python inference/gate.py --model resnet18.onnx --on h200 --baseline main.json --markdown table.md
"""


def share(text: str) -> float:
    """An option in per cent, `5%` or `5`, as a ratio."""
    try:
        per_cent = float(text.removesuffix("%"))
    except ValueError:
        per_cent = -1.0
    if not 0.0 <= per_cent < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: per cent are expected, such as 5%")
    return per_cent / 100.0


def option_parser() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    parser = cli.parser(__doc__, EXAMPLES)
    cli.add_models(parser, required=False)
    cli.add_dim(parser)
    cli.add_sizes(parser)
    cli.add_rebatch(parser)
    cli.add_static(parser)
    cli.add_target(parser)
    cli.add_run_mode(parser)
    parser.add_argument("--host-pace", type=cli.positive, metavar="RATIO",
                        help="how many times as long as usual the GPU's host takes to dispatch (default: unknown; intervals "
                             "hold any plausible host)")
    parser.add_argument("--baseline", type=cli.existing, metavar="FILE", help="compare with this snapshot")
    parser.add_argument("--write", type=cli.out_file, metavar="FILE", help="write a snapshot; may be the baseline's file")
    parser.add_argument("--max-regression", type=share, default=0.05, metavar="PERCENT",
                        help="how much slower a model may become (default: 5%%)")
    parser.add_argument("--max-memory-growth", type=share, metavar="PERCENT",
                        help="how much more memory it may need (default: any)")
    parser.add_argument("--markdown", metavar="FILE", help="write the sentence and the table as Markdown; -: print them so")
    cli.add_trust(parser)
    return parser


def questions(args: argparse.Namespace, models: Sequence[Path], baseline: Snapshot | None) -> list[Question]:
    """What to predict: the models and sizes given, else those of the baseline whose files still exist."""
    if models or baseline is None:
        return pair_with_sizes(models, cli.all_sizes(cli.parse_dims(args.dim), args.sizes))
    by_file: dict[str, list[dict[str, int]]] = {}
    for model in baseline.models.values():
        by_file.setdefault(model.file, []).append(model.sizes)
    return [Question(Path(file), sizes) for file, sizes in by_file.items() if Path(file).is_file()]


def snapshot_of(predictor: Predictor, conditions: Conditions, asked: Iterable[Question],
                args: argparse.Namespace) -> tuple[Snapshot, set[str]]:
    """The snapshot of the predictions, and the names of those that failed, each with an error in the log."""
    pace = None
    if args.host_pace is not None or pace_matters(predictor.fitted.composition, conditions.way):
        pace = UNKNOWN if args.host_pace is None else given_pace(args.host_pace)
    models, failed = dict[str, ModelSnapshot](), set[str]()
    for model, sizes in progress(list(asked), "predicting"):
        for size in sizes:
            try:
                run = predictor.run(model, dims=size, static=args.static, run_mode=conditions.way, host_pace=pace)
            except UserError as error:
                log.error("%s", error)
                failed.add(name_in_snapshot(model, size))
                continue
            models[name_in_snapshot(model, size)] = model_snapshot(run, model, size)
    return Snapshot(conditions=conditions, models=models), failed


def report(args: argparse.Namespace, result: GateResult) -> None:
    """Prints what was found, and writes it as Markdown."""
    sentences, rows = gate_sentences(result), gate_rows(result)
    page = "\n\n".join([f"**{sentences[0]}**", *sentences[1:], markdown_table([
        {name: value if value is None else cell(value) for name, value in row.items()} for row in rows]),
        f"Predicted by Hase for {result.target}; nothing was run."]) + "\n"
    if args.markdown and args.markdown != "-":
        write_text(Path(args.markdown), page)
    if args.json:
        cli.print_json(result)
    elif args.markdown == "-":
        print(page)
    else:
        print(*sentences, sep="\n")
        print()
        cli.print_table(rows, f"before and now, on {result.target}")


def main() -> int:
    parser = option_parser()
    args = parser.parse_args()
    if not args.baseline and not args.write:
        parser.error("give --write FILE to make a snapshot, or --baseline FILE to compare with one")
    if not args.model and not args.baseline:
        parser.error("give --model, the models that the snapshot is to hold")
    if not args.model and (args.dim or args.sizes):
        parser.error("--dim and --sizes go with --model; without it, the baseline's models and sizes are predicted")
    workspace = cli.start(args)
    baseline = read_snapshot(args.baseline) if args.baseline else None
    models = list(dict.fromkeys(workspace.find_models(args.model or [])))
    target = args.target or (baseline.conditions.target if baseline else None)
    predictor = Predictor(workspace, target, strict=args.strict, force=args.force, any_device=True, no_weights=True)
    for notice in predictor.fitted.notices:
        log.warning("%s", notice)
    conditions = conditions_of(predictor.fitted, RunMode(io=args.io, cuda_graph=args.cuda_graph), args.static, args.strict,
                               args.host_pace)
    if baseline:
        check_alike(baseline.conditions, conditions, args.baseline)  # before the predictions, which it would make useless
    now, failed = snapshot_of(predictor, conditions, questions(args, models, baseline), args)
    result = None
    if baseline:
        predicted = {name: model for name, model in baseline.models.items() if name not in failed}
        result = judge(predicted, now.models, now.conditions.target, args.max_regression, args.max_memory_growth)
        report(args, result)
    if args.write and not failed:
        write_snapshot(args.write, now)
        log.info("%s: %d predictions for %s", args.write, len(now.models), now.conditions.target)
    if failed:
        log.error("%d predictions failed%s", len(failed), "; no snapshot was written" if args.write else "")
        return 1
    return cli.EXIT_SLO_MISSED if result and not result.passed else 0


if __name__ == "__main__":
    cli.run(main)
