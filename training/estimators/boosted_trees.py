"""XGBoost on log(time / roofline), one booster for all kernels that it is for."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.admission.interface import Floats, Measured
from training.estimators.on_roofline import Matrix, OnRoofline
from training.kernels.boosters import open_booster, pack_booster
from training.kernels.estimators import train_booster
from training.kernels.roofline import Roofline
from utils.frozen import Frozen

if TYPE_CHECKING:
    import xgboost


class SavedBooster(Frozen):
    """A booster as XGBoost saves it, packed by `pack_booster`, in base64."""

    packed: str

    @classmethod
    def of(cls, booster: xgboost.Booster) -> SavedBooster:
        return cls(packed=base64.b64encode(pack_booster(booster)).decode())

    def opened(self) -> xgboost.Booster:
        return open_booster(base64.b64decode(self.packed), Path("a saved estimator"))


class BoostedTrees(OnRoofline):
    """XGBoost with the settings that the training has for the label."""

    name = "xgboost"
    saved_classes = (Roofline, SavedBooster)
    booster: xgboost.Booster

    def learn(self, matrix: Matrix, log_ratios: Floats, measured: Measured) -> None:
        self.booster = train_booster(matrix, log_ratios, measured.config.booster(measured.label), measured.config.seed)

    def log_ratios(self, matrix: Matrix) -> Floats:
        return np.asarray(self.booster.inplace_predict(matrix), dtype=float)

    def saved(self) -> dict[str, Any]:
        return super().saved() | {"booster": SavedBooster.of(self.booster)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        super().restore(saved)
        self.booster = saved["booster"].opened()
