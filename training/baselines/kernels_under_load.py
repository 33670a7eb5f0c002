"""The plan's own path under load: kernels measured alone under load, learned with the metrics as features, summed, α·Σ+β.

What it gives for a run comes from a training that saw nothing of the run's background and nothing of its model's family, and
from an α and β fitted to the latencies of other families beside other backgrounds, each of whose sums was predicted likewise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from benchmark.records.files import kernel_table_path
from benchmark.records.reading import read_kernel_table
from training.composition.fitted import latency_ms
from training.composition.fitting import fit_line
from training.kernels.estimators import KernelModel, fit_kernel_model, parallel_map, predict_kernels
from training.kernels.training_set import TrainingSet, read_training_set

if TYPE_CHECKING:
    from ort_analysis.records.kernel_record import ModelRecord
    from training.kernels.settings import TrainingConfig
    from training.sharing.shared_runs import SharedRuns
    from utils.paths import Workspace

Floats = npt.NDArray[np.float64]
LABEL = "run"


def measured_under_load(workspace: Workspace, target: str) -> TrainingSet | None:
    """Kernels of the dataset with label `run`; None where none was measured beside a background."""
    if not kernel_table_path(workspace.dataset(target)).exists() or read_kernel_table(workspace, target).empty:
        return None
    rows = read_training_set(workspace, target)
    if LABEL not in rows.times_ms or rows.idle.all():
        return None
    return rows.rows(np.isfinite(rows.times_ms[LABEL]))


def summed_ms(rows: TrainingSet, runs: Sequence[SharedRuns], records: Mapping[str, ModelRecord],
              families: Mapping[str, str], config: TrainingConfig) -> Floats:
    """Each run's mean latency (ms) by the plan's own path; NaN for models whose kernels were not measured, beside backgrounds
    that no kernel was measured beside, without metrics, and where nothing else is left to learn from.

    Args:
        rows: see `measured_under_load`.
        runs: to predict, and the others of which α and β are fitted.
        records, families: of the models, by the record's name.
        config: of the training.
    """
    measured, beside = set(rows.ids.tolist()), set(rows.backgrounds.tolist())
    groups = defaultdict[tuple[str, str], list[int]](list)
    for place, run in enumerate(runs):
        if (run.background in beside and set(rows.metrics) <= set(run.metrics)
                and run.model in records and set(records[run.model].kernels) <= measured):
            groups[run.background, families[run.model]].append(place)
    sums = np.full(len(runs), np.nan)

    def sums_of(key: tuple[str, str]) -> list[float]:
        background, family = key
        own = {name for record in records.values() if families[record.model] == family for name in record.kernels}
        seen = (rows.backgrounds != background) & ~np.isin(rows.ids, list(own))
        seen &= np.array([family not in names for names in rows.groups])
        if not (seen & ~rows.idle).any():
            return [np.nan] * len(groups[key])
        model = fit_kernel_model(rows.rows(seen), LABEL, (), config)
        return [_sum_ms(model, rows, records[runs[place].model], runs[place].metrics) for place in groups[key]]

    keys = sorted(groups)
    for key, predicted in zip(keys, parallel_map(sums_of, keys, config.workers), strict=True):
        sums[groups[key]] = predicted
    means = np.array([run.samples_ms.mean() for run in runs])
    found = np.full(len(runs), np.nan)
    for (background, family), places in groups.items():
        others = [place for key in keys if key[0] != background and key[1] != family for place in groups[key]
                  if np.isfinite(sums[place])]
        if others:
            found[places] = latency_ms(fit_line(sums[others], means[others]), sums[places], 0.0)
    return found


def _sum_ms(model: KernelModel, rows: TrainingSet, record: ModelRecord, metrics: Mapping[str, float]) -> float:
    """Σ of a model's kernels (ms), each as often as it stands in it, at the metrics of a load."""
    kernels = [record.kernel_of(node) for node in record.nodes]
    return float(predict_kernels(model, kernels, rows.schema.matrix(kernels), [metrics[name] for name in rows.metrics]).sum())
