"""Phase 5.7: prediction errors for collections of models that were held out of everything.

Reads the dataset and predictors of a GPU target (default: all targets with label `gpu`). Holds out each collection
(torchvision, timm, …) in turn: the kernels of its models, measured or not, every shape sampled near one of its families, and
its models in the fit of the composition. Writes nothing and prints, for each collection and over all, the errors of

- whole models: with all kernels predicted, with the kernels that other collections share looked up, and with all as measured;
  at the host's usual pace, and at the pace measured with each model (the usual one where none was recorded);
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
python training/leave_collections_out.py
python training/leave_collections_out.py --workspace out/h200 --target nvidia-h200-cuda-ort1.31-all --json
python training/leave_collections_out.py --without-forests
"""


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    add_options(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    judge_targets(workspace, args, read_config(args.config, TrainingConfig, args.changes), "collection")
    return 0


if __name__ == "__main__":
    cli.run(main)
