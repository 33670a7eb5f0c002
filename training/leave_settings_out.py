"""Phase 5.13: how well times are predicted under a setting of threads and cores that was not measured.

Reads the datasets of one flavour under several settings (targets that differ in threads and cores, or in the machine). Learns
from all but one, with the environment of each as further features (threads, cores, frequency, memory limit, caches), and
predicts the kernels of the one that was left out. Prints a row for each setting and whether its kernels were measured under
other settings too (known) or not (new), whose errors are not the setting's alone; writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from records.dataset_files import collected_targets, read_header
from records.environment import Environment
from training.kernels.estimators import fit_kernel_model, predict_rows
from training.kernels.settings import TrainingConfig
from training.kernels.targets import add_config
from training.kernels.training_set import TrainingSet, read_training_set
from utils import cli
from utils.config import read_config
from utils.errors import UserError
from utils.paths import Workspace
from utils.timing import error_statistics, time_weighted_error

FEATURES = ("threads", "cores", "mhz", "memory_limit_mib", "l1_kib", "l2_kib", "l3_kib")  # of an Environment
COLUMNS = ("ids", "types", "forms", "backgrounds", "idle", "features", "load", "flops", "bytes_moved")  # of a TrainingSet
LEAST_SETTINGS = 3
EXAMPLES = """
python training/leave_settings_out.py
python training/leave_settings_out.py --level tuned --json
"""


def environment_row(environment: Environment) -> list[float]:
    """The features of an environment: logarithms to base 2."""
    return [math.log2(1 + getattr(environment, name)) for name in FEATURES]


def with_environment(rows: TrainingSet, environment: Environment) -> TrainingSet:
    """The idle rows of a dataset, with the environment in place of the load."""
    idle = rows.rows(rows.idle)
    values = environment_row(environment)
    return replace(idle, load=np.tile(values, (len(idle), 1)), metrics=FEATURES,
                   idle_load=dict(zip(FEATURES, values, strict=True)))


def joined(parts: Sequence[TrainingSet]) -> TrainingSet:
    """The rows of several settings, one after another; header and hash are those of the first."""
    def stacked(name: str) -> Any:
        return np.concatenate([getattr(part, name) for part in parts])

    label = parts[0].header.labels[0]
    return replace(
        parts[0], **{name: stacked(name) for name in COLUMNS},
        groups=tuple(group for part in parts for group in part.groups),
        collections=tuple(one for part in parts for one in part.collections),
        times_ms={label: np.concatenate([part.times_ms[label] for part in parts])})


def left_out_rows(settings: dict[str, TrainingSet], target: str, config: TrainingConfig) -> list[dict[str, Any]]:
    """The errors on the kernels of one setting of a training on the others: a row for those that are known there, and one for
    those that are new."""
    there, here = joined([rows for name, rows in settings.items() if name != target]), settings[target]
    label = here.header.labels[0]
    predicted_ms, measured_ms = predict_rows(fit_kernel_model(there, label, (), config), here), here.times_ms[label]
    known, found = np.isin(here.ids, there.ids), []
    for name, chosen in (("known", known), ("new", ~known)):
        if chosen.any():
            predicted, measured = predicted_ms[chosen], measured_ms[chosen]
            errors = error_statistics(predicted.tolist(), measured.tolist())
            found.append({
                "left_out": target, "threads": here.header.target.threads, "cores": here.header.target.cores, "kernels": name,
                "count": len(measured), "learned_from": len(there), "MAPE_%": 100 * errors.mape,
                "median_%": 100 * errors.median, "time_weighted_%": 100 * time_weighted_error(predicted, measured)})
    return found


def settings_of(workspace: Workspace, level: str) -> dict[str, TrainingSet]:
    """The datasets of TVM's flavour of a level that have an environment, by target.

    Raises:
        UserError: there are fewer than three.
    """
    found = {}
    for target in collected_targets(workspace):
        header = read_header(workspace.dataset(target))
        if header.environment is not None and header.target.flavour.optimization == level:
            found[target] = with_environment(read_training_set(workspace, target), header.environment)
    if len(found) < LEAST_SETTINGS:
        raise UserError(f"{workspace.dataset('')}: {len(found)} settings of level {level} were measured, and leaving one out "
                        f"needs {LEAST_SETTINGS}; measure under other threads and cores: python benchmark/collector.py "
                        "(docs/tvm.md)")
    return found


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--level", choices=("unfused", "fused", "tuned"), default="fused",
                        help="the flavour's level (default: fused)")
    add_config(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    config, settings = read_config(args.config, TrainingConfig, args.changes), settings_of(workspace, args.level)
    rows = [row for target in settings for row in left_out_rows(settings, target, config)]
    cli.print_rows(rows, args.json, "settings left out")


if __name__ == "__main__":
    cli.run(main)
