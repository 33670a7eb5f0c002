"""How far off kernels are whose form was never measured: forms are left out of the training of their operators in turn.

A form is what `form_of` says: element type, rank, and for some operators groups, windows or axes. Forms are left out in
FOLDS parts, each with a fifth of every type's forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hase.learned.kernels.estimators import assign_folds, fit_kernel_model, parallel_map, predict_rows
from hase.records.kernel_types import operator_of
from hase.records.operators import OperatorClass, operator_row

if TYPE_CHECKING:
    from hase.learned.kernels.settings import TrainingConfig
    from hase.training.kernels.training_set import TrainingSet  # needs pandas, which a prediction does not

FOLDS = 5
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LeftOutForm:
    """A form of a kernel type, and what a training without it makes of its kernels.

    Attributes:
        type, form: as `form_of` names it.
        kind: class of the operator.
        times_ms: measured, idle; a number for each kernel.
        ratios: true over predicted time of each kernel.
    """

    type: str
    form: str
    kind: OperatorClass
    times_ms: Floats
    ratios: Floats

    @property
    def errors(self) -> Floats:
        """The prediction's error on each kernel, as a share of the true time."""
        return np.abs(1.0 / self.ratios - 1.0)


def leave_forms_out(rows: TrainingSet, label: str, chosen: Mapping[str, str], config: TrainingConfig) -> list[LeftOutForm]:
    """Each form of the types that were measured in several, left out of everything; sorted by type and form.

    Args:
        rows: of the dataset.
        label: whose times.
        chosen: the predictors of types, as in `fit_kernel_model`.
        config: of the training.
    """
    known = rows.rows(rows.idle & np.isfinite(rows.times_ms[label]))
    if not len(known):
        return []
    names = [f"{kind}\t{form}" for kind, form in zip(known.types.tolist(), known.forms.tolist(), strict=True)]
    folds = assign_folds(names, known.types.tolist(), FOLDS, config.seed)
    predicted = np.full(len(known), np.nan)

    def one_fold(fold: int) -> None:
        train, test = known.rows(folds != fold), folds == fold
        test = test & np.isin(known.types, sorted(set(train.types.tolist())))  # others have no measured form left
        if len(train) and test.any():
            predicted[test] = predict_rows(fit_kernel_model(train, label, chosen, config), known.rows(test))

    parallel_map(one_fold, sorted(set(folds.tolist())), config.workers)
    found, ratios = [], known.times_ms[label] / predicted
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        if np.isfinite(predicted[place]):
            places.setdefault(name, []).append(place)
    for name, of_form in sorted(places.items()):
        kind, form = name.split("\t")
        found.append(LeftOutForm(kind, form, operator_row(operator_of(kind)).operator_class, known.times_ms[label][of_form],
                                 ratios[of_form]))
    return found
