"""The plan's own path under load: kernels measured alone under load, learned with the metrics as features, summed, α·Σ+β.

What it gives for a run comes from a training that saw nothing of the run's background and nothing of its model's family, and
from an α and β fitted to the latencies of other families beside other backgrounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from benchmark.dataset import kernel_table_path
from training.composition import fit_line, latency_ms
from training.estimators import KernelModel, fit_kernel_model, side_by_side
from training.features import kernel_features
from training.training_set import TrainingSet, load_training_set

if TYPE_CHECKING:
    from ort_analysis.records import ModelRecord
    from training.estimators import TrainingConfig
    from training.shared_runs import SharedRuns
    from utils.paths import Workspace

Floats = npt.NDArray[np.float64]
LABEL = "run"


def measured_under_load(workspace: Workspace, target: str) -> TrainingSet | None:
    """Kernels of the dataset with label `run`; None where none was measured beside a background."""
    if not kernel_table_path(workspace.dataset(target)).exists():
        return None
    rows = load_training_set(workspace, target)
    if LABEL not in rows.times_ms or rows.idle.all():
        return None
    return rows.rows(np.isfinite(rows.times_ms[LABEL]))


def summed_ms(rows: TrainingSet, runs: Sequence[SharedRuns], records: Mapping[str, ModelRecord],
              families: Mapping[str, str], config: TrainingConfig) -> Floats:
    """Each run's mean latency (ms) by the plan's own path; NaN beside backgrounds that no kernel was measured beside, and for
    models without a record.

    Args:
        rows: see `measured_under_load`.
        runs: to predict, and the others of which α and β are fitted.
        records, families: of the models, by the record's name.
        config: of the training.
    """
    means = np.array([run.samples_ms.mean() for run in runs])
    known = [place for place, run in enumerate(runs) if run.background in set(rows.backgrounds) and run.model in records]
    groups = defaultdict[tuple[str, str], list[int]](list)
    for place in known:
        groups[runs[place].background, families[runs[place].model]].append(place)
    found = np.full(len(runs), np.nan)

    def one_group(key: tuple[str, str]) -> Floats:
        background, family = key
        held = {name for record in records.values() if families[record.model] == family for name in record.kernels}
        seen = (rows.backgrounds != background) & ~np.isin(rows.ids, list(held))
        seen &= np.array([family not in names for names in rows.families])
        model = fit_kernel_model(rows.rows(seen), LABEL, (), config)
        others = [place for place in known
                  if runs[place].background != background and families[runs[place].model] != family]
        sums = {place: _sum_ms(model, rows, records[runs[place].model], runs[place].metrics)
                for place in (*groups[key], *others)}
        line = fit_line(np.array([sums[place] for place in others]), means[others])
        return np.array([float(latency_ms(line, sums[place], 0.0)) for place in groups[key]])

    keys = sorted(groups)
    for key, predicted in zip(keys, side_by_side(one_group, keys, config.workers), strict=True):
        found[groups[key]] = predicted
    return found


def _sum_ms(model: KernelModel, rows: TrainingSet, record: ModelRecord, metrics: Mapping[str, float]) -> float:
    """Σ of a model's kernels (ms), each as often as it stands in it, at the metrics of a load."""
    kernels = [record.kernel_of(node) for node in record.nodes]
    load = np.array([metrics.get(name, rows.idle_load[name]) for name in rows.metrics])
    return float(model.predict_ms(
        [kernel.type for kernel in kernels], np.array([kernel_features(kernel) for kernel in kernels]),
        np.tile(load, (len(kernels), 1)), np.array([float(kernel.flops) for kernel in kernels]),
        np.array([float(kernel.bytes_read + kernel.bytes_written) for kernel in kernels])).sum())
