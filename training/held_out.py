"""Shows how far off predictions are for what training never saw: families, collections, operators, forms or settings.

Reads datasets (those of a GPU target with its predictors), writes nothing but --markdown's page, and prints tables.

- `--by family` (such as resnet) and `--by collection` (such as torchvision or timm) hold out each group of models in turn: the
  kernels of its models, every shape sampled near them, and its models in the fit of the composition. They print the errors of
  whole models (with all kernels predicted, with kernels that other groups share looked up, and with all as measured; at the
  host's usual pace, and at the pace measured with each model), of single kernels and of 90 % intervals, and of baselines on the
  same split: a line over the sum of kernel times, the roofline, and nn-Meter's random forests.
- `--by operator` holds out each measured operator, so that its kernels are estimated from the other operators of its class,
  and prints their errors beside those of kernels that were held out alone (from training/kernel_errors).
- `--by form` holds out a fifth of the forms (rank, element type, groups, windows, axes) of each kernel type at a time, and
  prints the errors of their kernels, the number of measured forms, and the cliffs: large differences between neighbours that
  differ only in sizes. Only for targets of a GPU.
- `--by setting` holds out each setting of threads and cores under which a flavour of TVM was measured, and prints a row for
  kernels that were measured under other settings too (known), and one for the others (new).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hase.learned.kernels.interface import TrainingConfig
from hase.training.composition.held_out_errors import judge_targets
from hase.training.kernels.left_out_tables import form_report, operator_report, setting_error_rows, settings_of
from hase.training.kernels.targets import add_options, for_each_target, trained_targets
from hase.utils import cli
from hase.utils.config import read_config

EXAMPLES = """
python training/held_out.py --by collection --target nvidia-h200-cuda-ort1.31-all
python training/held_out.py --by family --without-forests --at-most 12 --workspace out/h200 --json
python training/held_out.py --by operator --target nvidia-h200-cuda-ort1.31-all --markdown docs/tables/operators.md
python training/held_out.py --by form --target nvidia-h200-cuda-ort1.31-all --markdown docs/tables/forms.md
python training/held_out.py --by setting --level tuned
"""
VALUES_OF_BY = {  # for each option, the values of --by that it needs
    "target": ("family", "collection", "operator", "form"), "without_forests": ("family", "collection"),
    "at_most": ("family", "collection"), "markdown": ("operator", "form"), "level": ("setting",)}
REPORTS = {"operator": operator_report, "form": form_report}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--by", choices=("family", "collection", "operator", "form", "setting"), required=True,
                        help="what is held out, one after another")
    add_options(parser, "name of a target in training/predictors (default: all; by family or collection, all with label gpu)")
    parser.add_argument("--without-forests", action="store_true", help="omit nn-Meter's random forests, which take minutes")
    parser.add_argument("--at-most", type=cli.count, metavar="N",
                        help="hold out groups of models in at most N parts, several at a time (default: the config's `folds`)")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="also write the tables of operators or forms to this file, for one --target")
    parser.add_argument("--level", choices=("unfused", "fused", "tuned"), help="level of TVM's flavour (default: fused)")
    args = parser.parse_args()
    for option, kinds in VALUES_OF_BY.items():
        if getattr(args, option) and args.by not in kinds:
            parser.error(f"--{option.replace('_', '-')} goes with --by {' or '.join(kinds)}")
    if args.markdown and not args.target:
        parser.error("--markdown needs a --target: a page shows one")
    workspace, config = cli.start(args), read_config(args.config, TrainingConfig, args.changes)
    if args.at_most:
        config = config.model_copy(update={"folds": args.at_most})
    if args.by in REPORTS:
        for_each_target([args.target] if args.target else trained_targets(workspace),
                        lambda target, show: REPORTS[args.by](workspace, target, config, args.markdown, show), args.json)
    elif args.by == "setting":
        settings = settings_of(workspace, args.level or "fused")
        cli.print_rows([row for target in settings for row in setting_error_rows(settings, target, config)], args.json,
                       "settings left out")
    else:
        judge_targets(workspace, args, config, args.by)
    return 0


if __name__ == "__main__":
    cli.run(main)
