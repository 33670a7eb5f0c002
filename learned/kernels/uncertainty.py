"""How wrong the estimated time of an unmeasured operator may be: ranges of true over estimated time (`uncertainty.json`).

The estimate comes from the measured operators of the same class. To see its error, each measured operator is left out in turn,
and its measured times are compared with the estimate. The range of a class of operators (elementwise, reduction, …) holds 90 %
of these ratios, with equal weight for each operator. With fewer than LEAST_OPERATORS measured operators, a class has a range at
least as wide as in DEFAULT_RANGES.

The file also lists the forms (`kernel_form`: element type, rank, groups, windows) in which each operator was measured. For
other forms, the interval of a prediction is wider; its width is learned by leaving forms out in turn.
"""

from __future__ import annotations

from pydantic import Field

from hase.records.kernel_record import Kernel
from hase.records.kernel_types import kernel_form
from hase.records.measurement import LAUNCHES
from hase.records.operators import OperatorClass, operator_row
from hase.utils.config import Frozen

UNCERTAINTY_VERSION = 2  # 2: forms have groups, windows and axes


class Range(Frozen):
    """The range of a true time, as multiples of its estimate, and how many operators or forms it is from (0: default)."""

    low: float = Field(ge=0, le=1e9)
    high: float = Field(ge=0, le=1e9)
    operators: int = 0

    def joined(self, other_range: Range) -> Range:
        """The smallest range that contains both."""
        return Range(low=min(self.low, other_range.low), high=max(self.high, other_range.high), operators=self.operators)


# True times over the scaled roofline, for classes of which few operators were measured. Chosen by hand, rather too wide: on an
# H200 this estimate was wrong by a factor of 2 to 100, most for recurrent layers while their steps were not counted yet.
DEFAULT_RANGES: dict[OperatorClass, Range] = {
    "elementwise": Range(low=0.2, high=4.0), "reduction": Range(low=0.3, high=10.0), "normalisation": Range(low=0.3, high=15.0),
    "recurrent": Range(low=0.3, high=10.0), "gather": Range(low=0.05, high=10.0), "movement": Range(low=0.2, high=30.0),
    "product": Range(low=0.2, high=5.0), "convolution": Range(low=0.3, high=15.0), "other": Range(low=0.1, high=100.0)}
# The same for launches, which are estimated as one. Chosen by hand.
DEFAULT_LAUNCHES: dict[OperatorClass, Range] = {
    "elementwise": Range(low=1.0, high=2.0), "reduction": Range(low=1.0, high=4.0), "normalisation": Range(low=1.0, high=5.0),
    "recurrent": Range(low=0.5, high=6.0), "gather": Range(low=1.0, high=3.0), "movement": Range(low=1.0, high=5.0),
    "product": Range(low=1.0, high=6.0), "convolution": Range(low=1.0, high=8.0), "other": Range(low=1.0, high=20.0)}
# Around a prediction for an operator that was measured in other forms only. Chosen by hand: on an H200, a 2-D
# BatchNormalization took 15 times as long as predicted from 4-D ones, and the 1-D depthwise convolutions of a speech model
# about 70 times (by the error of the whole model); all other cases stayed within a factor of 4. Elementwise operators and those
# that move data are bound by memory at any rank: each form left out, nine of ten took 0.8 to 1.3 and 0.7 to 1.4 times as long
# as predicted.
OTHER_FORM = Range(low=0.25, high=4.0)
OTHER_FORM_OF: dict[OperatorClass, Range] = {"normalisation": Range(low=0.25, high=15.0),
                                            "convolution": Range(low=0.25, high=60.0),
                                            "elementwise": Range(low=0.8, high=1.3), "movement": Range(low=0.7, high=1.4)}


class Uncertainty(Frozen):
    """`uncertainty.json`: ranges of true over predicted times.

    Attributes:
        dataset_sha256: of the kernel table that it was learned from; "" for the defaults.
        ranges: around the estimate, by label and class of operators.
        form_ranges: for an operator measured in other forms only, by label and class.
        forms: by kernel type, the measured forms, named as in `kernel_form`; None if unknown.
    """

    version: int = UNCERTAINTY_VERSION
    dataset_sha256: str
    ranges: dict[str, dict[str, Range]]
    form_ranges: dict[str, dict[str, Range]] = {}
    forms: dict[str, tuple[str, ...]] | None = None

    def estimate_range(self, kernel: Kernel, label: str) -> Range:
        """The range of a kernel whose operator was never measured under `label`."""
        kind = operator_row(kernel.op_type).operator_class
        defaults = DEFAULT_LAUNCHES if label == LAUNCHES else DEFAULT_RANGES
        return self.ranges.get(label, {}).get(kind, defaults[kind])

    def knows_form(self, kernel: Kernel) -> bool:
        """Whether the kernel's operator was measured in its form; true if forms are unknown."""
        return self.forms is None or kernel_form(kernel) in self.forms.get(kernel.type, ())

    def other_form_range(self, kernel: Kernel, label: str) -> Range | None:
        """The range under `label` for an operator that was measured in other forms only; None for a known form."""
        kind = operator_row(kernel.op_type).operator_class
        if self.knows_form(kernel):
            return None
        return self.form_ranges.get(label, {}).get(kind) or OTHER_FORM_OF.get(kind, OTHER_FORM)


NOTHING_LEARNED = Uncertainty(dataset_sha256="", ranges={})
