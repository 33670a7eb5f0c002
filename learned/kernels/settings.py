"""The settings of a training: training/config.yaml."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field

from hase.records.measurement import GPU_LABEL
from hase.utils.config import Config

LAUNCHES = "launches"  # learned like a label: how many CUDA kernels and copies one of our kernels launches


class XgboostSettings(Config):
    """Settings of a booster; names as in training/config.yaml."""

    trees: int = Field(400, ge=1)
    depth: int = Field(6, ge=1, le=20)
    learning_rate: float = Field(0.05, gt=0.0, le=1.0)
    row_share: float = Field(0.8, gt=0.0, le=1.0)
    column_share: float = Field(0.5, gt=0.0, le=1.0)
    min_leaf_weight: float = Field(2.0, ge=0.0)
    bins: int = Field(128, ge=2, le=1024)
    objective: Literal["squarederror", "absoluteerror"] = "absoluteerror"
    own_predictors: Literal["none", "better", "all"] = "better"


class ForestSettings(Config):
    """Settings of the random forest."""

    trees: int = Field(100, ge=1)
    column_share: float = Field(0.33, gt=0.0, le=1.0)
    least_in_leaf: int = Field(1, ge=1)


class TrainingConfig(Config):
    """training/config.yaml."""

    folds: int = Field(5, ge=2)
    seed: int = 7
    own_min_kernels: int = Field(60, ge=2)
    short_ms: float = Field(0.02, ge=0.0)
    threads: int = Field(0, ge=0)
    start_from: str | None = None
    estimators: tuple[Literal["xgboost", "random_forest"], ...] = Field(("xgboost",), min_length=1)
    xgboost: XgboostSettings = XgboostSettings()
    xgboost_gpu: XgboostSettings = XgboostSettings(depth=9, objective="squarederror", own_predictors="all")
    xgboost_class: XgboostSettings = XgboostSettings(trees=150, learning_rate=0.1, own_predictors="none")
    forest: ForestSettings = ForestSettings()

    @property
    def workers(self) -> int:
        return self.threads or os.cpu_count() or 1

    def booster(self, label: str) -> XgboostSettings:
        """The settings of the boosters of a label."""
        return self.xgboost_gpu if label in (GPU_LABEL, LAUNCHES) else self.xgboost
