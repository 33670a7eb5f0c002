"""Phase 5.5: how wrong the estimated time of a kernel may be whose operator was never measured.

Reads the dataset of each target (default: of all). Writes training/predictors/<target>/doubt.json. You rarely need it:
training/train_kernel_model.py does the same; this command is for predictors that were trained before it did.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from benchmark.records.files import collected_targets
from training.kernels.operators_left_out import leave_operators_out
from training.kernels.settings import TrainingConfig
from training.kernels.targets import CONFIG
from training.kernels.training_set import read_training_set
from training.kernels.uncertainty import Uncertainty, save_uncertainty
from utils import cli
from utils.config import read_config
from utils.logger import get_logger

log = get_logger("training")
EXAMPLES = """
python training/fit_doubt.py
python training/fit_doubt.py --target h200-cuda-ort1.31-all --out training/shipped/h200-cuda-ort1.31-all
"""


def table(target: str, uncertainty: Uncertainty) -> list[dict[str, Any]]:
    """One row per label and class of operators."""
    return [{"target": target, "label": label, "operators": kind, "measured": found.operators, "low": found.low,
             "high": found.high} for label, ranges in uncertainty.ranges.items() for kind, found in sorted(ranges.items())]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", help="name of a dataset in benchmark/dataset (default: all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write into this folder (default: the target's predictors)")
    parser.add_argument("--config", type=Path, default=CONFIG, help="settings (default: training/config.yaml)")
    args = parser.parse_args()
    workspace = cli.start(args)
    config = read_config(args.config, TrainingConfig)
    rows = []
    for target in [args.target] if args.target else collected_targets(workspace):
        folder = args.out or workspace.predictors(target)
        known = read_training_set(workspace, target)
        left_out = {label: leave_operators_out(known, label, config) for label in known.times_ms}
        rows += table(target, save_uncertainty(workspace, known, folder, left_out))
        log.info("saved %s", folder)
    cli.print_rows(rows, args.json, "true over estimated time of operators that were never measured")
    return 0


if __name__ == "__main__":
    cli.run(main)
