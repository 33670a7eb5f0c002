"""How kernel times make a model's time: latency = α·Σ + β, fitted for a target.

Σ is the sum of the kernels' times under one label, or their longest path through the graph. α stands for what kernels
meet in a model and not alone (caches, layouts), β for what a run costs besides its kernels. Both are fitted on relative
errors, so that short models count as much as long ones, and β is never negative, so that no model takes less than nothing.
History of the schema: version 1 is the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from ort_analysis.records import Frozen
from utils import files
from utils.errors import UserError

COMPOSITION_VERSION = 1
FIT = "python training/fit_composition.py"
Kind = Literal["sum", "critical_path"]
KINDS: tuple[Kind, ...] = ("sum", "critical_path")
Floats = npt.NDArray[np.float64]


class Candidate(Frozen):
    """One way of composing, and how far it is off; errors are ratios, not per cent.

    Attributes:
        cv_mape, cv_max: of models that were left out of the fit; None where there are too few models to leave one out.
        fit_mape: of the models of the fit.
        plain_mape: with α = 1 and β = 0, for reference.
    """

    label: str
    kind: Kind
    alpha: float
    beta_ms: float
    cv_mape: float | None
    cv_max: float | None
    fit_mape: float
    plain_mape: float


class FittedModel(Frozen):
    """A model of the fit under the composition used: measured and left-out (or, with one model, fitted) latency, ms."""

    model: str
    measured_ms: float
    predicted_ms: float


class Composition(Frozen):
    """`composition.json`: the composition used for a target, and the candidates that it was chosen from.

    Attributes:
        left_out: what was left out at a time: `family`, `model`, or `nothing` where only one model was measured.
        dataset_sha256: of the kernel table behind the predictors.
        models: of the fit.
    """

    version: int = COMPOSITION_VERSION
    label: str
    kind: Kind
    alpha: float
    beta_ms: float
    left_out: Literal["family", "model", "nothing"]
    dataset_sha256: str
    candidates: tuple[Candidate, ...]
    models: tuple[FittedModel, ...]


def composition_path(folder: Path) -> Path:
    return folder / "composition.json"


def load_composition(folder: Path) -> Composition:
    """The composition of the target whose predictors lie in `folder`.

    Raises:
        UserError: none was fitted, or it can't be read, or the predictors were trained on other data since.
    """
    path = composition_path(folder)
    if not path.is_file():
        raise UserError(f"{folder}: no composition; fit one with: {FIT}")
    composition = files.read_record(path, Composition, COMPOSITION_VERSION, FIT)
    trained = files.read_json(folder / "predictors.json").get("dataset_sha256")
    if trained != composition.dataset_sha256:
        raise UserError(f"{path}: the predictors were trained on other data since it was fitted; fit it anew: {FIT}")
    return composition


def fit_line(sums_ms: Floats, measured_ms: Floats) -> tuple[float, float]:
    """α and β that minimise Σ((α·Σ + β) / measured − 1)², with α > 0 and β ≥ 0.

    β is 0 where fewer than two different sums are there to tell it from α.

    Args:
        sums_ms: Σ of each model, positive.
        measured_ms: its latency, positive.
    """
    ratio, inverse = sums_ms / measured_ms, 1.0 / measured_ms
    if len(set(sums_ms.tolist())) > 1:
        (alpha, beta), *_ = np.linalg.lstsq(np.column_stack([ratio, inverse]), np.ones(len(sums_ms)), rcond=None)
        if alpha > 0 and beta >= 0:
            return float(alpha), float(beta)
    return float(ratio.sum() / (ratio @ ratio)), 0.0


def leave_out(sums_ms: Floats, measured_ms: Floats, groups: Sequence[str]) -> Floats:
    """Each model's latency by a line fitted without its group."""
    labels = np.array(groups)
    predicted = np.empty(len(labels))
    for group in set(groups):
        out = labels == group
        alpha, beta = fit_line(sums_ms[~out], measured_ms[~out])
        predicted[out] = alpha * sums_ms[out] + beta
    return predicted


def fit_candidate(label: str, kind: Kind, sums_ms: Floats, measured_ms: Floats,
                  groups: Sequence[str] | None) -> tuple[Candidate, Floats]:
    """One candidate with its errors, and the latency that it gives each model (left out, where `groups` says how)."""
    alpha, beta = fit_line(sums_ms, measured_ms)
    fitted = alpha * sums_ms + beta
    predicted = fitted if groups is None else leave_out(sums_ms, measured_ms, groups)
    errors = np.abs(predicted / measured_ms - 1)
    return Candidate(
        label=label, kind=kind, alpha=alpha, beta_ms=beta, cv_mape=float(errors.mean()) if groups is not None else None,
        cv_max=float(errors.max()) if groups is not None else None,
        fit_mape=float(np.abs(fitted / measured_ms - 1).mean()), plain_mape=float(np.abs(sums_ms / measured_ms - 1).mean()),
    ), predicted


def best(candidates: Sequence[Candidate]) -> int:
    """The position of the candidate that errs least in cross-validation (in the fit, where there was none).

    Between equals the first wins: the longest path of a chain is its sum, and the sum is what serial execution means.
    """
    return min(range(len(candidates)), key=lambda place: (
        round(candidates[place].fit_mape if candidates[place].cv_mape is None else candidates[place].cv_mape or 0.0, 6), place))
