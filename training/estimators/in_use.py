"""The predictors that training learns, as an estimator to compare others with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from hase.learned.kernels.estimators import KernelModel
from hase.learned.kernels.interface import Estimator, Measured
from hase.training.kernels.fitting import fit_kernel_model


@dataclass
class InUseEstimator(KernelModel, Estimator):
    """Learns a booster for each type with enough kernels, and a shared one for the rest. `chosen` is as in `fit_kernel_model`;
    None: types with at least `own_min_kernels` kernels get a booster of their own."""

    chosen: Mapping[str, str] | None = None

    def fit(self, measured: Measured) -> None:
        rows, config = measured.all_rows, measured.config
        rows = rows.rows(np.isfinite(rows.times_ms[measured.label]))
        wanted = sorted(set(measured.types.tolist()))
        chosen = self.chosen
        if chosen is None:
            chosen = {name: name for name in wanted
                      if len(set(rows.ids[rows.types == name].tolist())) >= config.own_min_kernels}
        learned = fit_kernel_model(rows, measured.label, chosen, config, types=wanted)
        for attribute in fields(learned):
            setattr(self, attribute.name, getattr(learned, attribute.name))
