"""How well times are predicted under a setting of threads and cores that was not measured.

Learns from the datasets of one flavour under all settings but one, with the environment of each as further features (threads,
cores, frequency, memory limit, caches), and predicts the kernels of the setting that was left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hase.learned.kernels.estimators import fit_kernel_model, predict_rows
from hase.learned.kernels.settings import TrainingConfig
from hase.records.dataset_files import collected_targets, read_header
from hase.records.environment import Environment
from hase.training.kernels.training_set import TrainingSet, read_training_set
from hase.utils.errors import UserError
from hase.utils.paths import Workspace
from hase.utils.timing import error_statistics, time_weighted_error

FEATURES = ("threads", "cores", "mhz", "memory_limit_mib", "l1_kib", "l2_kib", "l3_kib")  # of an Environment
COLUMNS = ("ids", "types", "forms", "backgrounds", "idle", "features", "load", "flops", "bytes_moved")  # of a TrainingSet
LEAST_SETTINGS = 3


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
        collections=tuple(owners for part in parts for owners in part.collections),
        times_ms={label: np.concatenate([part.times_ms[label] for part in parts])},
        drifts={label: np.concatenate([part.drifts[label] for part in parts])})


def left_out_rows(settings: dict[str, TrainingSet], target: str, config: TrainingConfig) -> list[dict[str, Any]]:
    """The errors on the kernels of one setting of a training on the others: a row for those that are known there, and one for
    those that are new."""
    learned, left_out = joined([rows for name, rows in settings.items() if name != target]), settings[target]
    label = left_out.header.labels[0]
    predicted_ms = predict_rows(fit_kernel_model(learned, label, {}, config), left_out)
    known, table = np.isin(left_out.ids, learned.ids), []
    for name, chosen in (("known", known), ("new", ~known)):
        if chosen.any():
            predicted, measured = predicted_ms[chosen], left_out.times_ms[label][chosen]
            errors = error_statistics(predicted.tolist(), measured.tolist())
            table.append({
                "left_out": target, "threads": left_out.header.target.threads, "cores": left_out.header.target.cores,
                "kernels": name, "count": len(measured), "learned_from": len(learned), "MAPE_%": 100 * errors.mape,
                "median_%": 100 * errors.median, "time_weighted_%": 100 * time_weighted_error(predicted, measured)})
    return table


def settings_of(workspace: Workspace, level: str) -> dict[str, TrainingSet]:
    """The datasets of TVM's flavour of a level that have an environment, by target.

    Raises:
        UserError: there are fewer than three.
    """
    settings = {}
    for target in collected_targets(workspace):
        header = read_header(workspace.dataset(target))
        if header.environment is not None and header.target.flavour.optimization == level:
            settings[target] = with_environment(read_training_set(workspace, target), header.environment)
    if len(settings) < LEAST_SETTINGS:
        raise UserError(f"{workspace.dataset('')}: {len(settings)} settings of level {level} were measured, and leaving one "
                        f"out needs {LEAST_SETTINGS}; measure under other threads and cores: python benchmark/collector.py "
                        "(docs/tvm.md)")
    return settings
