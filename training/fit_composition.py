"""Fits how a model's latency follows from the times of its kernels, latency = α·Σ + β.

Reads the dataset, the kernel records and the predictors of each target (default: every target that has predictors). Writes
training/predictors/<target>/composition.json. Run it after training/train_kernel_model.py.

The candidates are, with the times of each label, the sum and the longest path, and on a GPU also two tracks for host and GPU.
Each family of models is held out in turn: its kernels are predicted by a training without the family, or taken as measured,
and its latencies by an α and β fitted without it. The simplest candidate becomes the target's composition, unless a richer one
errs less on the models held out: with their kernels predicted and as measured, and with the latter by more than the noise of
the comparison. The longest path is only used where a profile shows that kernels overlap. --composition overrules all this.
With --few-models, fewer constants are fitted (training/composition/fitting.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from hase.learned import target_files
from hase.learned.composition.fitted import Candidate, Composition
from hase.learned.kernels.interface import TrainingConfig
from hase.training.composition.fitting import SIMPLEST_FIRST, fit_target, kept_composition
from hase.training.kernels.targets import Show, add_options, for_each_target, trained_targets
from hase.utils import cli, files
from hase.utils.config import read_config
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger

log = get_logger("composition")
EXAMPLES = """
python training/fit_composition.py
python training/fit_composition.py --json
python training/fit_composition.py --few-models
python training/fit_composition.py --composition critical_path
"""


def candidate_table(composition: Composition) -> list[dict[str, Any]]:
    """One row per candidate, with errors in per cent; column `used` marks the one in use and impossible ones."""
    def percent(ratio: float | None) -> float | None:
        return None if ratio is None else 100 * ratio

    def used(candidate: Candidate) -> str:
        if (candidate.label, candidate.kind) == (composition.label, composition.kind):
            return "forced" if composition.forced else "yes"
        return "no: kernels do not overlap" if candidate.kind == "critical_path" and not composition.overlap else ""

    return [{"label": tried.label, "composition": tried.kind, "CV_MAPE_%": percent(tried.cv_mape),
             "CV_max_%": percent(tried.cv_max), "alpha": tried.alpha, "beta_ms": tried.beta_ms, "node_us": 1000 * tried.node_ms,
             "fit_MAPE_%": percent(tried.fit_mape), "plain_MAPE_%": percent(tried.plain_mape),
             "alone_MAPE_%": percent(tried.measured_cv_mape), "used": used(tried)} for tried in composition.candidates]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    add_options(parser)
    parser.add_argument("--force", action="store_true", help="fit again although nothing changed since the last time")
    parser.add_argument("--few-models", action="store_true",
                        help="for a handful of models whose kernels were measured: fit fewer constants")
    parser.add_argument("--composition", choices=SIMPLEST_FIRST,
                        help="use the best candidate of this kind (default: chosen); the next run without it chooses again")
    args = parser.parse_args()
    workspace = cli.start(args)
    config = read_config(args.config, TrainingConfig, args.changes)

    def fit(target: str, show: Show) -> dict[str, Any]:
        path = target_files.COMPOSITION.path(workspace.predictors(target))
        composition = None if args.force or args.few_models else kept_composition(workspace, target, args.composition)
        if composition is None:
            composition = fit_target(workspace, target, config, args.few_models, args.composition)
            files.write_json(path, composition)
            log.info("saved %s", path)
        else:
            log.info("kept %s: nothing changed since", path)
        show(candidate_table(composition), f"{target}: {len(composition.models)} models, each {composition.left_out} left out "
                                           "in turn")
        return composition.model_dump(mode="json")

    with sole_writer(workspace.predictors("")):
        for_each_target([args.target] if args.target else trained_targets(workspace), fit, args.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
