"""How wrong the estimated time of an unmeasured operator may be: ranges of true over estimated time (`uncertainty.json`).

The time of a kernel whose operator was never measured is estimated from the measured operators of its class. To see how wrong
that is, each measured operator is left out in turn, and its measured times are compared with the estimate. The range of a class
of operators (elementwise, reduction, …) holds 90 % of these ratios, each operator counted alike. A class with fewer than
LEAST_OPERATORS measured operators has a range at least as wide as in DEFAULT_RANGES.

The file also lists the forms (`form_of`: element type, rank, groups, windows) in which each operator was measured. An operator
that was measured in other forms only is predicted, but with a wider interval: how wide shows where forms are left out in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from pydantic import Field

from hase.learned.kernels.settings import LAUNCHES
from hase.learned.kernels.sidecar import TRAIN
from hase.records.kernel_record import Kernel
from hase.records.kernel_types import form_of
from hase.records.operators import OperatorClass, operator_row
from hase.training.kernels.forms_left_out import LeftOutForm
from hase.training.kernels.operators_left_out import LeftOutOperator
from hase.utils import files
from hase.utils.frozen import Frozen

if TYPE_CHECKING:
    from hase.training.kernels.training_set import TrainingSet  # needs pandas, which a prediction does not

UNCERTAINTY_VERSION = 2  # 2: forms have groups, windows and axes
FILE = "uncertainty.json"
LEAST_OPERATORS, LEAST_FORMS = 3, 12
TAIL = 0.05  # share of the ratios that is cut off at each end, which leaves 90 %
PARTS = 101  # quantiles that stand for the kernels of an operator, so that operators count alike
Floats = npt.NDArray[np.float64]


class Range(Frozen):
    """The plausible range of a true time, as multiples of its estimate.

    Attributes:
        low, high: the multiples.
        operators: how many operators (or forms) they were learned from; 0: a default.
    """

    low: float = Field(ge=0, le=1e9)
    high: float = Field(ge=0, le=1e9)
    operators: int = 0

    def joined(self, other_range: Range) -> Range:
        """The smallest range that contains both."""
        return Range(low=min(self.low, other_range.low), high=max(self.high, other_range.high), operators=self.operators)


# True times over the scaled roofline, for classes of which few operators were measured. Choices, rather too wide: on an H200
# this estimate was wrong by a factor of 2 to 100, most for recurrent layers while their steps were not counted yet.
DEFAULT_RANGES: dict[OperatorClass, Range] = {
    "elementwise": Range(low=0.2, high=4.0), "reduction": Range(low=0.3, high=10.0), "normalisation": Range(low=0.3, high=15.0),
    "recurrent": Range(low=0.3, high=10.0), "gather": Range(low=0.05, high=10.0), "movement": Range(low=0.2, high=30.0),
    "product": Range(low=0.2, high=5.0), "convolution": Range(low=0.3, high=15.0), "other": Range(low=0.1, high=100.0)}
# The same for launches, which are estimated as one. Choices.
DEFAULT_LAUNCHES: dict[OperatorClass, Range] = {
    "elementwise": Range(low=1.0, high=2.0), "reduction": Range(low=1.0, high=4.0), "normalisation": Range(low=1.0, high=5.0),
    "recurrent": Range(low=0.5, high=6.0), "gather": Range(low=1.0, high=3.0), "movement": Range(low=1.0, high=5.0),
    "product": Range(low=1.0, high=6.0), "convolution": Range(low=1.0, high=8.0), "other": Range(low=1.0, high=20.0)}
# Around a prediction for an operator that was measured in other forms only. A choice: on an H200, a 2-D BatchNormalization took
# 15 times as long as predicted from 4-D ones, and the 1-D depthwise convolutions of a speech model about 70 times (by the error
# of the whole model); all other cases stayed within a factor of 4. Elementwise operators and those that move data are bound by
# memory at any rank: each form left out, nine of ten took 0.8 to 1.3 and 0.7 to 1.4 times as long as predicted (docs/forms.md).
OTHER_FORM = Range(low=0.25, high=4.0)
OTHER_FORM_OF: dict[OperatorClass, Range] = {"normalisation": Range(low=0.25, high=15.0),
                                            "convolution": Range(low=0.25, high=60.0),
                                            "elementwise": Range(low=0.8, high=1.3), "movement": Range(low=0.7, high=1.4)}


class Uncertainty(Frozen):
    """`uncertainty.json`.

    Attributes:
        dataset_sha256: of the kernel table that it was learned from; "" for the defaults.
        ranges: around the estimate, by label and class of operators.
        form_ranges: around the prediction for an operator that was measured in other forms only, likewise.
        forms: by kernel type, the forms in which it was measured, as `form_of` names them; None where they are not known.
    """

    version: int = UNCERTAINTY_VERSION
    dataset_sha256: str
    ranges: dict[str, dict[str, Range]]
    form_ranges: dict[str, dict[str, Range]] = {}
    forms: dict[str, tuple[str, ...]] | None = None

    def of_estimate(self, kernel: Kernel, label: str) -> Range:
        """The range of a kernel whose operator was never measured under `label`."""
        kind = operator_row(kernel.op_type).operator_class
        defaults = DEFAULT_LAUNCHES if label == LAUNCHES else DEFAULT_RANGES
        return self.ranges.get(label, {}).get(kind, defaults[kind])

    def knows_form(self, kernel: Kernel) -> bool:
        """Whether the kernel's operator was measured in its form; yes where forms are not known."""
        return self.forms is None or form_of(kernel) in self.forms.get(kernel.type, ())

    def of_other_form(self, kernel: Kernel, label: str) -> Range | None:
        """The range around a prediction under `label` for an operator that was measured in other forms only; None for a known
        form."""
        kind = operator_row(kernel.op_type).operator_class
        if self.knows_form(kernel):
            return None
        return self.form_ranges.get(label, {}).get(kind) or OTHER_FORM_OF.get(kind, OTHER_FORM)


NOTHING_LEARNED = Uncertainty(dataset_sha256="", ranges={})


def learn_uncertainty(rows: TrainingSet, kernels: Iterable[Kernel], left_out: Mapping[str, Sequence[LeftOutOperator]],
                      forms_left_out: Mapping[str, Sequence[LeftOutForm]]) -> Uncertainty:
    """The ranges and forms in the idle rows of a dataset.

    Args:
        rows: of the dataset.
        kernels: all kernels of `rows`.
        left_out: the operators of each label, left out in turn.
        forms_left_out: the same of forms.
    """
    by_id = {kernel.id: kernel for kernel in kernels}
    forms: dict[str, set[str]] = {}
    for name in set(rows.ids.tolist()):
        forms.setdefault(by_id[name].type, set()).add(form_of(by_id[name]))
    return Uncertainty(dataset_sha256=rows.sha256, forms={name: tuple(sorted(forms[name])) for name in sorted(forms)},
                       ranges={label: ranges_of(operators, DEFAULT_LAUNCHES if label == LAUNCHES else DEFAULT_RANGES,
                                                LEAST_OPERATORS) for label, operators in left_out.items()},
                       form_ranges={label: ranges_of(of_label, {}, LEAST_FORMS) for label, of_label in forms_left_out.items()})


def ranges_of(left_out: Iterable[LeftOutOperator] | Iterable[LeftOutForm], defaults: Mapping[OperatorClass, Range],
              least: int) -> dict[str, Range]:
    """The range of each class of operators, of which some were left out.

    Args:
        left_out: operators or forms.
        defaults: joined with the range of a class of which fewer than `least` were left out; it has none without a default.
        least: how many make a range of their own.
    """
    ratios_of: dict[OperatorClass, list[Floats]] = {}
    for each in left_out:
        ratios_of.setdefault(each.kind, []).append(np.quantile(each.ratios, np.linspace(0.0, 1.0, PARTS)))
    ranges: dict[str, Range] = {}
    for kind, ratios in ratios_of.items():
        low, high = np.quantile(np.concatenate(ratios), [TAIL, 1.0 - TAIL])
        learned = Range(low=min(1.0, float(low)), high=max(1.0, float(high)), operators=len(ratios))
        if len(ratios) >= least:
            ranges[kind] = learned
        elif kind in defaults:
            ranges[kind] = learned.joined(defaults[kind])
    return ranges


def uncertainty_path(folder: Path) -> Path:
    """The file of a target whose predictors are in `folder`."""
    return folder / FILE


def read_uncertainty(folder: Path) -> Uncertainty:
    """The uncertainty that was learned for a target; the defaults where there is none.

    Raises:
        UserError: the file is damaged or of another version.
    """
    path = uncertainty_path(folder)
    return files.read_record(path, Uncertainty, UNCERTAINTY_VERSION, TRAIN) if path.exists() else NOTHING_LEARNED


def save_uncertainty(rows: TrainingSet, kernels: Iterable[Kernel], folder: Path,
                     left_out: Mapping[str, Sequence[LeftOutOperator]],
                     forms_left_out: Mapping[str, Sequence[LeftOutForm]]) -> Uncertainty:
    """Learns the uncertainty (the arguments are those of `learn_uncertainty`, by label) and writes it into `folder`."""
    uncertainty = learn_uncertainty(rows, kernels, left_out, forms_left_out)
    files.write_json(uncertainty_path(folder), uncertainty)
    return uncertainty
