"""Predicts kernels' times on one GPU card from those on another.

`learned/data_sheet/learned` has what was learned about other cards. `training/data_sheets/<card>.json` of a workspace has
corrections from kernels measured on a card. The error that remains (the logarithm of measured over predicted time) is a smooth
function of a kernel's time, of what bounds it, and of its kind. A Gaussian process learns it: near measured kernels it follows
them, far from them it returns to the card's mean error, and without measured kernels it changes nothing.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from hase.learned.data_sheet.work import (
    KINDS,
    LAUNCH_US,
    Floats,
    Work,
    bounds_of,
    by_tensor_cores,
    features_of,
    peaks_flop_s,
    ratio_of_bounds,
)
from hase.learned.kernels.saved_form import booster_from_arrays
from hase.records.devices import GpuDataSheet
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.lazy import xgboost
from hase.utils.paths import Workspace

BASE = "h200"  # the card that times are carried over from
OWN = "onnxruntime"  # the table of Hase's own kernels
SHORTEST_US = {"products": 2.7, "attention": 9.5, "neusight": 15.0, OWN: LAUNCH_US}  # of a launch, as the table was measured
CORRECTED = ("product", "attention")  # kinds of kernels whose ratios the booster corrects
# The share of the tensor cores' peak that the best large products reach: those of an A100, which has most power for its peak.
MOST_REACHED = 0.85
KIND_APART = 2.0  # the distance of two kinds, in standard deviations of the other features
FOLDER = Path(__file__).with_name("learned")
SHEET_VERSION, CORRECTION_VERSION = 1, 1
FIT = "python training/fit_data_sheet.py"
CORRECT = "python training/correct_data_sheet.py"
Numbers = tuple[float, ...]


@dataclass
class CardRatios:
    """Predicts kernels' times on one card from those on another: by bounds from data sheets, which a booster corrects."""

    booster: Any = field(repr=False)

    def times_ms(self, work: Work, base_ms: Floats, base: GpuDataSheet, gpu: GpuDataSheet, table: str = OWN) -> Floats:
        """Times on card `gpu`, from those on card `base`; `table` (in SHORTEST_US): how they were measured."""
        if base.slug == gpu.slug:
            return base_ms
        if gpu.tensor_share < 1.0:
            # Its tensor cores do less than they could, so they reach more of their peak than a whole card's, which lacks power.
            whole_ms = CardRatios.times_ms(self, work, base_ms, base, gpu.with_tensor_peaks(1.0 / gpu.tensor_share), table)
            return np.maximum(whole_ms, 1e3 * by_tensor_cores(work, gpu) / (peaks_flop_s(work, gpu) * MOST_REACHED))
        base_s = base_ms * 1e-3
        on_base, on_gpu = (bounds_of(work, card, SHORTEST_US[table]) for card in (base, gpu))
        ratios = ratio_of_bounds(work, base_s, on_base, on_gpu, base, gpu)
        corrected = np.isin(work.kinds, [KINDS.index(kind) for kind in CORRECTED])
        if corrected.any():
            features = features_of(work, base_s, on_base, on_gpu, base, gpu)[corrected]
            ratios[corrected] *= np.exp(self.booster.predict(xgboost.DMatrix(features)))
        return np.asarray(base_ms * ratios, dtype=float)


class GaussianProcess(NamedTuple):
    """A Gaussian process fitted to kernels that were measured on a card.

    Attributes:
        known: features of these kernels (kernels × features), in standard deviations.
        pulls: the weight of each of these kernels.
        of_card: the variance that all kernels of the card share.
        nearby, length: the variance that nearby kernels share, and the distance that counts as near.
    """

    known: Floats
    pulls: Floats
    means: Floats
    spreads: Floats
    of_card: float
    nearby: float
    length: float

    def expected_log_errors(self, features: Floats) -> Floats:
        """The expected logarithm of true over predicted time of each kernel."""
        scaled = (features - self.means) / self.spreads
        return np.asarray((self.of_card + self.nearby * similarity(scaled, self.known, self.length)) @ self.pulls)


@dataclass
class AdjustedRatios(CardRatios):
    """Ratios corrected for one card. `low` and `high` contain 90 % of models' times, as multiples of a prediction. `left_out`
    is the logarithm of measured over predicted time of each measured kernel, left out; empty if unknown."""

    process: GaussianProcess
    gpu: GpuDataSheet
    table: str
    low: float = 1.0
    high: float = 1.0
    left_out: Floats = field(default_factory=lambda: np.zeros(0))

    def times_ms(self, work: Work, base_ms: Floats, base: GpuDataSheet, gpu: GpuDataSheet, table: str = OWN) -> Floats:
        times_ms = super().times_ms(work, base_ms, base, gpu, table)
        if gpu.slug != self.gpu.slug or base.slug == gpu.slug:
            return times_ms
        features = process_features(work, base_ms, base, gpu, table)
        return np.asarray(times_ms * np.exp(self.process.expected_log_errors(features)), dtype=float)


def similarity(features: Floats, others: Floats, length: float) -> Floats:
    """The similarity of kernels to others by their scaled features, 1 for equal ones; rows × rows of others."""
    squares = (features**2).sum(axis=1)[:, None] + (others**2).sum(axis=1)[None] - 2 * features @ others.T
    return np.asarray(np.exp(-0.5 * np.maximum(squares, 0.0) / length**2))


def process_features(work: Work, base_ms: Floats, base: GpuDataSheet, gpu: GpuDataSheet, table: str = OWN) -> Floats:
    """The features by which the Gaussian process compares kernels, a row for each kernel."""
    base_s = base_ms * 1e-3
    on_base, on_gpu = (bounds_of(work, card, SHORTEST_US[table]) for card in (base, gpu))
    longest_s = on_gpu.longest_s
    return np.column_stack([
        np.log(base_s), np.log(base_s / on_base.longest_s), on_gpu.memory_s / longest_s, on_gpu.compute_s / longest_s,
        np.log(work.moved_bytes), np.log(np.maximum(work.flops, 1.0) / work.moved_bytes), np.log(np.maximum(work.outputs, 1.0)),
        *(KIND_APART * (work.kinds == index) for index in range(len(KINDS)))])


class SheetRange(Frozen):
    """The multiples of a prediction that contained 90 % of the times, for cards that were left out."""

    low: float
    high: float


class SheetModel(Frozen):
    """`data_sheet.json`: a model of cards that were never measured.

    Attributes:
        own: the cards on which kernels of ONNX Runtime were measured, and not only products and attention.
        alike, unlike: errors for cards with the compute capability of one of `own`, and for others.
        booster: numbers of the saved booster, whose arrays are in `booster.npz`.
    """

    version: int = SHEET_VERSION
    base: str
    cards: tuple[str, ...]
    own: tuple[str, ...]
    alike: SheetRange
    unlike: SheetRange
    booster: dict[str, float]
    sha256: str


def read_sheet(folder: Path = FOLDER) -> tuple[SheetModel, CardRatios]:
    """Reads what was learned about cards from their data sheets."""
    model, path = files.read_record(folder / "data_sheet.json", SheetModel, SHEET_VERSION, FIT), folder / "booster.npz"
    try:
        if files.sha256(path) != model.sha256:
            raise UserError(f"{path}: is not the one that data_sheet.json describes; make both with: {FIT}")
        with np.load(path, allow_pickle=False) as arrays:
            return model, CardRatios(booster_from_arrays(model.booster, dict(arrays)))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: damaged ({error}); make it with: {FIT}") from None


class Correction(Frozen):
    """`training/data_sheets/<card>.json`: a correction for one card.

    Attributes:
        gpu: the card's short name.
        target: the target whose dataset it was learned from.
        base: the target whose times are converted.
        known, pulls, means, spreads, of_card, nearby, length: as in `GaussianProcess`.
        low, high: multiples of a prediction that contain 90 % of models' times.
        measured_ms: times of kernels on the card, by id, for look-up.
    """

    version: int = CORRECTION_VERSION
    gpu: str
    target: str
    base: str
    created: str
    known: tuple[Numbers, ...] = Field(min_length=1)
    pulls: Numbers
    means: Numbers
    spreads: Numbers
    of_card: float
    nearby: float
    length: float = Field(gt=0)
    low: float = Field(gt=0, le=1)
    high: float = Field(ge=1)
    measured_ms: dict[str, float]

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        features = {len(row) for row in (*self.known, self.means, self.spreads)}
        if len(features) != 1 or len(self.known) != len(self.pulls):
            raise ValueError("the sizes of known, pulls, means and spreads differ")
        return self

    def ratios(self, learned: CardRatios, gpu: GpuDataSheet) -> AdjustedRatios:
        """The learned ratios, corrected for this card."""
        known, pulls, means, spreads = map(np.array, (self.known, self.pulls, self.means, self.spreads))
        process = GaussianProcess(known, pulls, means, spreads, self.of_card, self.nearby, self.length)
        return AdjustedRatios(learned.booster, process, gpu, OWN, self.low, self.high)


def correction_path(workspace: Workspace, gpu: GpuDataSheet) -> Path:
    """The file with the correction of a card."""
    return workspace.data_sheets / f"{gpu.slug}.json"


def read_correction(workspace: Workspace, gpu: GpuDataSheet) -> Correction | None:
    """Reads the correction of a card; None if nothing was measured on it."""
    path = correction_path(workspace, gpu)
    return files.read_record(path, Correction, CORRECTION_VERSION, CORRECT) if path.is_file() else None
