"""Learns how much energy a run of a model takes, from models whose energy was measured.

Reads the dataset of each target, which was collected with energy_s, the kernel records, the predictors and their composition.
Writes energy.json into the predictors' folder. energy = idle power · time + Σ coefficient · work; the work is the time of
kernels by class, the time in which they fill the device, their operations by class, the bytes that they move, and launches
(learned/energy.py). Coefficients are not negative. Each family of models is held out in turn, and the combination of kinds of
work with the smallest error is used.

With --predictors, the predictors are read from another folder, such as that of the predictors that come with Hase. --models
also shows each model's energy, measured and predicted with its family held out; --markdown writes all of it to a page.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from hase.learned import target_files
from hase.learned.composition.fitted import read_composition
from hase.learned.kernels.predictors import read_predictors
from hase.training.composition.measured_models import models_sha256
from hase.training.fits.energy import coefficient_rows, error_rows, fit_energy, measured_energies, model_rows, page
from hase.training.kernels.targets import Show, for_each_target, trained_targets
from hase.utils import cli, files
from hase.utils.logger import get_logger

log = get_logger("energy")
EXAMPLES = """
python training/fit_energy.py
python training/fit_energy.py --workspace out/energy --predictors learned/shipped/nvidia-h200-cuda-ort1.31-all
"""



def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", help="name of a target (default: all in training/predictors, or that of --predictors)")
    parser.add_argument("--predictors", type=Path, metavar="DIR",
                        help="read predictors from this folder and write energy.json there (default: the target's own)")
    parser.add_argument("--limit-w", type=cli.positive, metavar="W",
                        help="the device's power limit (nvidia-smi -q -d POWER); no mean power is predicted above it")
    parser.add_argument("--models", action="store_true", help="also show each model, its family held out")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write a page to this file, for one target")
    args = parser.parse_args()
    workspace = cli.start(args)
    target = args.target or (read_predictors(args.predictors).sidecar.target.name if args.predictors else None)
    if args.markdown and not target:
        parser.error("--markdown needs --target or --predictors: a page shows one target")

    def fit(name: str, show: Show) -> dict[str, Any]:
        folder = args.predictors or workspace.predictors(name)
        predictors = read_predictors(folder)
        models = measured_energies(workspace, name, predictors, read_composition(folder, predictors.sidecar.dataset_sha256))
        fitted = fit_energy(name, models, models_sha256(workspace, name), args.limit_w)
        files.write_json(target_files.ENERGY.path(folder), fitted)
        log.info("saved %s", target_files.ENERGY.path(folder))
        show(coefficient_rows(fitted), f"{name}: {len(fitted.models)} models, {fitted.kind}")
        show(error_rows(fitted), "errors of energy per run, each family held out in turn")
        if args.models:
            show(model_rows(fitted), "energy per run, each family held out in turn")
        if args.markdown:
            files.write_text(args.markdown, page(fitted))
        return fitted.model_dump(mode="json")

    for_each_target([target] if target else trained_targets(workspace), fit, args.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
