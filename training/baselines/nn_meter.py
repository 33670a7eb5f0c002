"""Baseline: the random forests of nn-Meter, one for each class of kernels, on raw shapes.

After nn-Meter (Zhang et al., MobiSys 2021), with the settings of the trainer that it published. nn-Meter was made for phones
and has no batch size among its features; here it is the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from records.measurement import GPU_LABEL
from training.composition.held_out import Fold, HeldOutKind, by_model, folds_of
from training.kernels.estimators import parallel_map
from training.kernels.predictors import leaves_gpu_idle
from training.kernels.settings import TrainingConfig
from training.kernels.training_set import TrainingSet
from utils.lazy import sklearn

if TYPE_CHECKING:
    from training.composition.measured_models import MeasuredModel

Floats = npt.NDArray[np.float64]
MOST_KERNELS = 6000  # that a forest learns from, drawn at random from its class; nn-Meter samples about as many
SIZES = ("batch", "height", "width", "channels", "out_channels", "kernel_height", "stride", "log_flops", "log_weights")
FORESTS: dict[str, tuple[tuple[int, int, float], tuple[str, ...]]] = {  # class: (trees, depth, features per split), features
    "conv": ((550, 80, 5), SIZES),
    "dwconv": ((240, 40, 7), SIZES),
    "fc": ((330, 70, 4), ("m", "n", "k", "log_flops")),
    "pool": ((370, 50, 5), ("batch", "height", "width", "channels", "out_channels", "kernel_height", "stride")),
    "add": ((570, 50, 3), ("batch", "height", "width", "channels")),
    "concat": ((690, 100, 5), ("batch", "height", "width", "channels", "out_channels", "inputs")),
    "relu": ((190, 50, 2), ("batch", "height", "width", "channels")),
    "others": ((370, 50, 1.0), ("batch", "height", "width", "channels")),
}


def kernel_class(kernel_type: str, depthwise: bool) -> str:
    """The class of a kernel, which names one of FORESTS."""
    if kernel_type.startswith("Conv"):
        return "dwconv" if depthwise else "conv"
    if kernel_type in ("Gemm", "MatMul", "FusedMatMul"):
        return "fc"
    if "Pool" in kernel_type:
        return "pool"
    return {"Add": "add", "Concat": "concat", "Relu": "relu"}.get(kernel_type, "others")


def predict_out_of_fold(rows: TrainingSet, models: Sequence[MeasuredModel], groups: Sequence[str],
                        left_out: HeldOutKind, config: TrainingConfig) -> dict[str, dict[str, float]]:
    """For each model, the GPU times (ms) of its kernels by id, predicted by forests trained without the model's group."""
    rows = rows.rows(rows.idle & np.isfinite(rows.times_ms[GPU_LABEL]))
    depthwise = rows.schema.index("depthwise")
    classes = np.array([kernel_class(name, bool(flag)) for name, flag in zip(
        rows.types, rows.features[:, depthwise] > 0, strict=True)])

    def one_fold(fold: Fold) -> dict[str, dict[str, float]]:
        features = dict(zip(fold.kernels, rows.schema.matrix(fold.kernels.values()), strict=True))
        median = float(np.median(rows.times_ms[GPU_LABEL][fold.seen]))  # for classes that only the held-out models have
        times = {name: 0.0 if leaves_gpu_idle(kernel, GPU_LABEL) else median for name, kernel in fold.kernels.items()}
        generator = np.random.default_rng(config.seed)
        for name, ((trees, depth, split), wanted) in FORESTS.items():
            columns = [rows.schema.index(feature) for feature in wanted]
            mine = [kernel.id for kernel in fold.kernels.values() if times[kernel.id] and kernel_class(
                kernel.type, bool(features[kernel.id][depthwise])) == name]
            learned = np.flatnonzero(fold.seen & (classes == name))
            if not mine or not len(learned):
                continue
            learned = generator.permutation(learned)[:MOST_KERNELS]
            share = min(split, len(columns)) if isinstance(split, int) else split
            forest = sklearn.ensemble.RandomForestRegressor(
                n_estimators=trees, max_depth=depth, max_features=share, random_state=10, n_jobs=1)
            forest.fit(rows.features[learned][:, columns], rows.times_ms[GPU_LABEL][learned])
            predicted_ms = forest.predict(np.array([features[kernel_id][columns] for kernel_id in mine]))
            times |= dict(zip(mine, predicted_ms.tolist(), strict=True))
        return by_model(fold, times)

    folds = folds_of(rows, models, groups, left_out, config.folds)
    return {name: times for part in parallel_map(one_fold, folds, config.workers) for name, times in part.items()}
