"""How wrong the estimated time of a kernel may be whose operator was never measured.

Reads the dataset of each target (default: of all). Writes training/predictors/<target>/doubt.json. With --classes, it also
learns anew how such times are estimated, for the predictors there. You rarely need it: training/train_kernel_model.py does the
same. This command is for predictors that were trained before it did.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from records.dataset_files import collected_targets
from training.kernels.estimators import learn_classes, pose
from training.kernels.features import KERNEL_FEATURES
from training.kernels.operators_left_out import LeftOutOperator, leave_operators_out, steady_classes
from training.kernels.saving import renew_classes
from training.kernels.settings import TrainingConfig
from training.kernels.sidecar import TRAIN, Sidecar, read_sidecar, schema_of
from training.kernels.targets import CONFIG
from training.kernels.training_set import TrainingSet, read_training_set
from training.kernels.uncertainty import Uncertainty, save_uncertainty
from utils import cli
from utils.config import read_config
from utils.errors import UserError
from utils.logger import get_logger

if TYPE_CHECKING:
    from xgboost import Booster

log = get_logger("training")
EXAMPLES = """
python training/fit_doubt.py
python training/fit_doubt.py --target h200-cuda-ort1.31-all --out training/shipped/h200-cuda-ort1.31-all
"""


def table(target: str, uncertainty: Uncertainty) -> list[dict[str, Any]]:
    """One row per label and class of operators."""
    return [{"target": target, "label": label, "operators": kind, "measured": found.operators, "low": found.low,
             "high": found.high} for label, ranges in uncertainty.ranges.items() for kind, found in sorted(ranges.items())]


def classes_anew(rows: TrainingSet, sidecar: Sidecar, left_out: Mapping[str, Sequence[LeftOutOperator]],
                 config: TrainingConfig) -> dict[str, Mapping[str, Booster]]:
    """The boosters of classes of operators by label, for predictors that were trained on `rows`.

    Raises:
        UserError: they were trained on another dataset.
    """
    if sidecar.dataset_sha256 != rows.sha256:
        raise UserError(f"the predictors of {sidecar.target.name} were trained on another dataset; train them again: {TRAIN}")
    found: dict[str, Mapping[str, Booster]] = {}
    for label, about in sidecar.labels.items():
        known = rows.rows(np.isfinite(rows.times_ms[label]))
        problem = pose(known, label, about.roofline)
        found[label] = learn_classes(known, problem, config, steady=steady_classes(left_out[label]))
    return found


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", help="name of a dataset in benchmark/dataset (default: all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write into this folder (default: the target's predictors)")
    parser.add_argument("--classes", action="store_true", help="learn the estimates anew, too")
    parser.add_argument("--config", type=Path, default=CONFIG, help="settings (default: training/config.yaml)")
    args = parser.parse_args()
    workspace = cli.start(args)
    config = read_config(args.config, TrainingConfig)
    rows = []
    for target in [args.target] if args.target else collected_targets(workspace):
        folder = args.out or workspace.predictors(target)
        schema = schema_of(read_sidecar(folder)) if args.classes else KERNEL_FEATURES  # saved boosters read one version
        known = read_training_set(workspace, target, schema)
        left_out = {label: leave_operators_out(known, label, config) for label in known.times_ms}
        rows += table(target, save_uncertainty(workspace, known, folder, left_out))
        if args.classes:
            renew_classes(folder, classes_anew(known, read_sidecar(folder), left_out, config))
        log.info("saved %s", folder)
    cli.print_rows(rows, args.json, "true over estimated time of operators that were never measured")
    return 0


if __name__ == "__main__":
    cli.run(main)
