"""The predictors that training learns for a target (training/kernels/estimators.py), as an estimator like any other.

They stand for what is in use: others are compared with them. Under the GPU's labels each type has a booster of its own, which
learns a little from related types; under others, cross-validation chose which types have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from records.measurement import GPU_LABEL
from training.admission.interface import Estimator, Floats, Measured
from training.estimators.boosted_trees import SavedBooster
from training.estimators.on_roofline import WORK, WORK_AND_FEATURES
from training.kernels.estimators import SHARED, KernelModel, pose, train_booster, train_own
from training.kernels.features import KERNEL_FEATURES
from training.kernels.roofline import Roofline


class InUse(Estimator):
    """Boosters of types with enough kernels, a shared one for the rest, on log(time / roofline of all kernels)."""

    name = "in_use"
    features = WORK_AND_FEATURES
    saved_classes = (Roofline, SavedBooster)
    model: KernelModel

    def __init__(self, own: Sequence[str] | None = None) -> None:
        """`own`: the types with boosters of their own; by default all with as many kernels as the settings ask for."""
        self.own = own

    def fit(self, measured: Measured) -> None:
        rows, label, config = measured.all_rows, measured.label, measured.config
        rows = rows.rows(np.isfinite(rows.times_ms[label]))
        problem, settings = pose(rows, label), config.booster(label)
        wanted = sorted(set(measured.types.tolist()))
        kernels = {name: len(set(rows.ids[rows.types == name].tolist())) for name in wanted}
        own = [name for name in wanted if kernels[name] and (
            kernels[name] >= config.own_min_kernels if self.own is None else name in self.own)]
        boosters = {name: train_own(name, rows, problem, settings, config.seed, label == GPU_LABEL) for name in own}
        if set(wanted) - set(own) or not own:
            boosters[SHARED] = train_booster(problem.matrix, problem.log_ratios, settings, config.seed)
        self.model = KernelModel(KERNEL_FEATURES, problem.roofline, problem.type_codes,
                                 {name: name if name in own else SHARED for name in wanted}, boosters,
                                 tuple(rows.idle_load.values()))

    def predict_ms(self, types: Sequence[str], features: Floats) -> Floats:
        flops, moved = features[:, :len(WORK)].T
        load = np.tile(np.array(self.model.idle_load, dtype=float), (len(features), 1))
        return self.model.predict_ms(types, features[:, len(WORK):], load, flops, moved)

    def saved(self) -> dict[str, Any]:
        model = self.model
        return {"roofline": model.roofline, "type_codes": dict(model.type_codes), "predictor_of": dict(model.predictor_of),
                "boosters": {name: SavedBooster.of(booster) for name, booster in model.boosters.items()},
                "idle_load": list(model.idle_load)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.model = KernelModel(KERNEL_FEATURES, saved["roofline"], saved["type_codes"], saved["predictor_of"],
                                 {name: one.opened() for name, one in saved["boosters"].items()}, saved["idle_load"])
