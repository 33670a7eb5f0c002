"""Finds the best convolution algorithm for each layer, what it gains, and what a predicted choice loses.

Reads the tables of extras/convolutions/run_profile.py in extras/convolutions/results/ (or --results). Prints, for each run of a
model, the time of its convolutions by the library's own choice (cuDNN's on a GPU, torch's on a CPU) and by the best algorithm
of each layer. Then it learns the time of each algorithm from the layers' shapes, leaves out each family of models in turn, lets
the predictions choose for it, and prints the regret: the time lost against the best measured choice, in per cent.

With --predict it names the best algorithm for each layer of a torchvision model that was not measured, with predicted times.

Writes with --output-dir: best.csv (each layer), gain.csv, regret.csv, and plots (time over input size, energy
over time, layers of a model).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from hase.extras.convolutions.choosing.choice import (
    best_rows,
    gain_rows,
    layer_shapes,
    left_out_times,
    mean_regret,
    predicted_rows,
    regret_rows,
)
from hase.extras.convolutions.choosing.tables import LayerCase, by_run, draw_all, read_cases, read_table, unpacked
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.logger import get_logger

EXAMPLES = """
python extras/convolutions/choose_algorithms.py
python extras/convolutions/choose_algorithms.py --results recipes/convolutions/nvidia-h200.tar.xz --output-dir out/choice
python extras/convolutions/choose_algorithms.py --model resnet50 --json
python extras/convolutions/choose_algorithms.py --predict resnet34 --input-size 320
"""
log = get_logger("convolutions")
Rows = list[dict[str, Any]]


def result_tables(cases: list[LayerCase], models: list[str]) -> dict[str, Rows]:
    """The result tables by name, with only the rows of `models` if some are named. Predictors still learn from all models."""
    if missing := sorted(set(models) - {case.model for case in cases}):
        raise UserError(f"--model {missing[0]}: not measured; there are {', '.join(sorted({case.model for case in cases}))}")
    regrets = regret_rows(cases, left_out_times(cases))
    tables = {"best": best_rows(cases), "gain": gain_rows(cases), "regret": regrets}
    return {name: [row for row in rows if not models or row["model"] in models] for name, rows in tables.items()}


def write(tables: dict[str, Rows], cases: list[LayerCase], results: Path, folder: Path) -> None:
    """Writes tables and plots."""
    for name, rows in tables.items():
        files.write_csv(folder / f"{name}.csv", list(dict.fromkeys(column for row in rows for column in row)), rows)
    drawn = draw_all(read_table(results, "overall"), by_run(cases), folder)
    log.info("written to %s: %s, and %d plots", folder, ", ".join(f"{name}.csv" for name in tables), len(drawn))


def predict(cases: list[LayerCase], args: argparse.Namespace) -> Rows:
    """The layers of the model in --predict, with predictions. Raises UserError if several devices need a choice by --gpu."""
    gpus = sorted({case.gpu for case in cases})
    if args.gpu not in gpus and (args.gpu or len(gpus) > 1):
        raise UserError(f"--gpu {args.gpu or ''}: name one of those that were measured: {', '.join(gpus)}")
    layers = layer_shapes(args.predict, args.input_size, args.batch, args.dtype)
    rows = predicted_rows([case for case in cases if case.gpu == (args.gpu or gpus[0])], layers)
    if guessed := sum(row["basis"] == "guess" for row in rows):
        log.warning("%d of %d layers have a filter, stride or grouping that was not measured: which algorithms can run them is "
                    "a guess (column basis)", guessed, len(rows))
    return rows


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--results", type=Path, metavar="DIR",
                        help="folder or archive of tables (default: extras/convolutions/results)")
    parser.add_argument("--model", action="append", default=[], metavar="NAME", help="show this model only (repeatable)")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="write tables and plots there")
    parser.add_argument("--predict", metavar="MODEL", help="a torchvision model: the predicted best algorithm of each layer")
    parser.add_argument("--input-size", type=cli.count, default=224, metavar="PIXELS", help="for --predict (default: 224)")
    parser.add_argument("--batch", type=cli.count, default=1, metavar="N", help="for --predict (default: 1)")
    parser.add_argument("--dtype", choices=("fp32", "fp16"), default="fp32", help="for --predict (default: fp32)")
    parser.add_argument("--gpu", help="for --predict: the device, if several were measured")
    args = parser.parse_args()
    workspace = cli.start(args)
    with unpacked(args.results or workspace.convolution_results) as results:
        cases = read_cases(results)
        if args.predict:
            cli.print_rows(predict(cases, args), args.json)
            return
        tables = result_tables(cases, args.model)
        if args.output_dir is not None:
            write(tables, cases, results, args.output_dir)
    if args.json:
        cli.print_json(tables | {"mean_regret_percent": mean_regret(tables["regret"])})
        return
    cli.print_table(tables["gain"], "the best algorithm of each layer against the library's own choice")
    cli.print_table(tables["regret"], "choices by prediction, the model's family left out")
    if (regret := mean_regret(tables["regret"])) is None:
        log.warning("no regret: a device needs two families of models, of which one can be left out")
    else:
        log.info("mean regret over the models: %.2f %%", regret)


if __name__ == "__main__":
    cli.run(main)
