"""Baseline: kernels measured under load. Kernel times are learned with the metrics as features, summed, and put into α·Σ+β.

Each run is predicted by a training without the run's background and without its model's family. Its α and β are fitted to
latencies of other families next to other backgrounds, and the sums behind those are predicted in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from records.dataset_files import kernel_table_path, read_kernel_table
from training.composition.fitted import latency_ms
from training.composition.formulas import fit_line
from training.kernels.estimators import KernelModel, fit_kernel_model, parallel_map, predict_kernels
from training.kernels.training_set import TrainingSet, read_training_set

if TYPE_CHECKING:
    from records.kernel_record import ModelRecord
    from training.kernels.settings import TrainingConfig
    from training.sharing.shared_runs import SharedRuns
    from utils.paths import Workspace

Floats = npt.NDArray[np.float64]
LABEL = "run"


def measured_under_load(workspace: Workspace, target: str) -> TrainingSet | None:
    """The kernels of the dataset that have label `run`; None where no kernel was measured next to a background."""
    if not kernel_table_path(workspace.dataset(target)).exists() or read_kernel_table(workspace, target).empty:
        return None
    rows = read_training_set(workspace, target)
    if LABEL not in rows.times_ms or rows.idle.all():
        return None
    return rows.rows(np.isfinite(rows.times_ms[LABEL]))


def summed_ms(rows: TrainingSet, runs: Sequence[SharedRuns], records: Mapping[str, ModelRecord],
              families: Mapping[str, str], config: TrainingConfig) -> Floats:
    """The mean latency (ms) that the baseline predicts for each run. NaN where it can't: a kernel of the model was not
    measured, no kernel was measured next to the background, metrics are missing, or nothing is left to learn from.

    Args:
        rows: kernels with label `run`, idle and next to backgrounds.
        runs: to predict; α and β of each are fitted to the others.
        records, families: of the models, by the record's name.
        config: of the training.
    """
    measured, backgrounds = set(rows.ids.tolist()), set(rows.backgrounds.tolist())
    groups = defaultdict[tuple[str, str], list[int]](list)
    for place, run in enumerate(runs):
        if (run.background in backgrounds and set(rows.metrics) <= set(run.metrics)
                and run.model in records and set(records[run.model].kernels) <= measured):
            groups[run.background, families[run.model]].append(place)
    sums = np.full(len(runs), np.nan)

    def sums_of(key: tuple[str, str]) -> list[float]:
        background, family = key
        kernels_of_family = {name for record in records.values() if families[record.model] == family for name in record.kernels}
        seen = (rows.backgrounds != background) & ~np.isin(rows.ids, list(kernels_of_family))
        seen &= np.array([family not in names for names in rows.groups])
        if not (seen & ~rows.idle).any():
            return [np.nan] * len(groups[key])
        model = fit_kernel_model(rows.rows(seen), LABEL, (), config)
        return [_sum_ms(model, rows, records[runs[place].model], runs[place].metrics) for place in groups[key]]

    keys = sorted(groups)
    for key, predicted in zip(keys, parallel_map(sums_of, keys, config.workers), strict=True):
        sums[groups[key]] = predicted
    means = np.array([run.samples_ms.mean() for run in runs])
    predicted_ms = np.full(len(runs), np.nan)
    for (background, family), places in groups.items():
        others = [place for key in keys if key[0] != background and key[1] != family for place in groups[key]
                  if np.isfinite(sums[place])]
        if others:
            predicted_ms[places] = latency_ms(fit_line(sums[others], means[others]), sums[places], 0.0)
    return predicted_ms


def _sum_ms(model: KernelModel, rows: TrainingSet, record: ModelRecord, metrics: Mapping[str, float]) -> float:
    """Σ over a model's nodes of their kernels' times (ms) under a load with these metrics."""
    kernels = [record.kernel_of(node) for node in record.nodes]
    return float(predict_kernels(model, kernels, rows.schema.matrix(kernels), [metrics[name] for name in rows.metrics]).sum())
