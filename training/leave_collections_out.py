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

from typing import Any

from training.composition.held_out import gpu_targets, hold_out
from training.composition.held_out_errors import interval_table, kernel_table, model_table
from training.kernels.settings import TrainingConfig
from training.kernels.targets import Show, add_options, for_each_target
from utils import cli
from utils.config import read_config

EXAMPLES = """
python training/leave_collections_out.py
python training/leave_collections_out.py --workspace out/h200 --target nvidia-h200-cuda-ort1.31-all --json
python training/leave_collections_out.py --without-forests
"""


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    add_options(parser, "name of a target in training/predictors (default: all with label gpu)")
    parser.add_argument("--without-forests", action="store_true", help="omit nn-Meter's random forests, which take minutes")
    args = parser.parse_args()
    workspace = cli.start(args)
    config = read_config(args.config, TrainingConfig)

    def judge(target: str, show: Show) -> dict[str, Any]:
        held_out = hold_out(workspace, target, config, "collection")
        models, kernels = model_table(held_out, config, not args.without_forests), kernel_table(held_out)
        show(models, f"{target}: whole models, each collection held out in turn")
        show(kernels, f"{target}: the GPU's time of their kernels, each collection held out")
        intervals = interval_table(held_out)
        if intervals:
            show(intervals, f"{target}: 90 % intervals, calibrated without the collection that they are for")
        return {"models": models, "kernels": kernels[0], "kernels_of": kernels, "intervals": intervals}

    results = for_each_target([args.target] if args.target else gpu_targets(workspace), judge, args.json)
    if args.json:
        cli.print_json(results)
    return 0


if __name__ == "__main__":
    cli.run(main)
