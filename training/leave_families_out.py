"""Phase 5.3: prediction errors for families of models that were held out of everything.

Reads the dataset and predictors of a GPU target (default: all targets with label `gpu`). Holds out each family in turn: its
kernels, the shapes sampled near them, and its models in the fit of the composition. Writes nothing and prints the errors of

- whole models: with all kernels predicted, with the kernels that other families share looked up, and with all as measured; at
  the host's usual pace, and at the pace measured with each model (the usual one where none was recorded);
- single kernels;
- 90 % prediction intervals: how many models lie in theirs, and how wide they are, by what a prediction rests on;
- the baselines on the same split: a line over the sum of kernel times, the roofline, and nn-Meter's random forests.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from training.composition.held_out_errors import add_options, judge_targets
from training.kernels.settings import TrainingConfig
from utils import cli
from utils.config import read_config

EXAMPLES = """
python training/leave_families_out.py
python training/leave_families_out.py --workspace out/h200 --target nvidia-h200-cuda-ort1.31-all --json
python training/leave_families_out.py --without-forests --at-most 12
"""


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    add_options(parser)
    parser.add_argument("--at-most", type=cli.count, metavar="N",
                        help="hold out families in at most N parts, several at a time (default: `folds` of the settings)")
    args = parser.parse_args()
    workspace = cli.start(args)
    config = read_config(args.config, TrainingConfig, args.changes)
    if args.at_most:
        config = config.model_copy(update={"folds": args.at_most})
    judge_targets(workspace, args, config, "family")
    return 0


if __name__ == "__main__":
    cli.run(main)
