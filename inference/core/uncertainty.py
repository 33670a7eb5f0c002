"""How sure a prediction is: the interval around it, and whether it is a rough estimate.

Sources of error are taken as independent, and added up in quadrature as logarithms of the factors by which each may be off:
the errors of models that were left out of the fit, kernels that are estimated or lie beyond what was measured, another load,
another cuDNN. So an interval widens with every doubt, never vanishes, and always holds the prediction itself.

Kernels that nothing was learned of are taken as one source: all at the low end of their range together, or all at the high
one. Where that moves the latency by more than ROUGH, the prediction is a rough estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from ort_analysis.records.kernel_record import Kernel
from training.kernels.settings import LAUNCHES
from utils.lazy import scipy

if TYPE_CHECKING:
    from inference.core.run_modes import RunMode
    from inference.core.targets import Fitted
    from training.composition.fitted import Composition, ErrorRange
    from training.kernels.predictors import Predictors
    from training.sharing.learned import Sharing, SharingErrors
    from utils.timing import ErrorStatistics

WORTH_SAYING = 0.01  # of the latency: doubtful kernels that move it by less are not warned of
ROUGH = 0.10  # of the latency, by which a plausible error of its doubtful kernels makes a prediction a rough estimate
BEYOND_POWER = 0.25  # a kernel with a feature f times beyond what was measured may take f ** ±0.25 times what is predicted: a
# choice; the roofline carries most of a time's growth, and what is learned is only its ratio to that
FAR = 4.0  # times beyond what was measured: from here on such a kernel is doubtful, and not only less sure
OTHER_CUDNN = 2.0  # how many times as far from the prediction an interval reaches under another cuDNN minor: a choice, not
# measured, since no GPU was measured under two of them
FORCED = 2.0  # the same for an element type or ONNX Runtime version that is not the predictors': a choice
NORMAL_90 = 2.06  # 90 % of normal errors are within so many times their mean size: 1.645 / sqrt(2 / pi)
UNKNOWN = 2.0  # the factor by which a prediction may be off of which no errors are known at all: a choice

PACE_WORTH_SAYING = 0.05  # of the latency: a host's pace that is not known and moves it by less is not warned of

Reason = Literal["estimated", "on the CPU", "stand-in", "other form", "beyond", "control flow"]


class Span(NamedTuple):
    """Between which multiples of a number the truth plausibly lies."""

    low: float
    high: float

    def widened(self, times: float) -> Span:
        """As a span whose ends are `times` as far from 1, as logarithms."""
        return Span(self.low ** times, self.high ** times)


CERTAIN = Span(1.0, 1.0)
# How many times as long as usual hosts beside one kind of GPU take to dispatch. Measured beside H200s: 1.15 to 1.6 times with
# other hosts than those that the shipped predictors were learned on, or with neighbours on them; 0.85 times in one session.
HOSTS = Span(0.85, 1.6)
# Where the pace is known, a model's host plausibly takes from pace ** (1 - this) to pace ** (1 + this) times as long as usual.
# So intervals hold about nine of ten recorded latencies of H200s at any pace from 0.83 to 1.7: 87 to 96 % of 436 in five groups
# by pace, all kernels predicted (without it 69 % where the pace is above 1.3).
PACE_POWER = 0.4
# Around what is composed with constants that were fitted on no model of this machine. On a CPU sums of kernels' times in their
# model erred by 3 % (models over 10 ms) to 33 % (shorter ones); on a GPU the host's pace is a guess, and decides short models.
ASSUMED = {"cpu": Span(0.75, 1.3), "cuda": Span(0.5, 1.8)}


class Shortness(NamedTuple):
    """How far below the shortest model of a composition's fit a latency lies: what a run costs besides its nodes weighs most in
    short models, and longer ones hardly say how much that is.

    Attributes:
        times: how many times shorter it is; at least 1.
    """

    times: float

    @property
    def span(self) -> Span:
        off = self.times ** BEYOND_POWER
        return Span(1.0 / off, off)

    @property
    def marks(self) -> bool:
        return self.times >= FAR

    @property
    def warnings(self) -> tuple[str, ...]:
        if not self.marks:
            return ()
        return (f"rough estimate: {self.times:.2g} times shorter than any model that tells what a run costs",)


def shortness(used: Composition, latency_ms: float) -> Shortness:
    """How much shorter a model is than those that a composition was fitted on; 1 where it was fitted on none."""
    shortest_ms = min((model.predicted_ms for model in used.models), default=0.0)
    return Shortness(max(1.0, shortest_ms / latency_ms) if latency_ms else 1.0)


class KernelUncertainty(NamedTuple):
    """How far a kernel's time and its launches may be off, and why.

    Attributes:
        marks: whether it is doubtful enough to make a prediction a rough estimate, and not only less sure.
    """

    reason: Reason
    time: Span
    launches: Span
    marks: bool


def kernel_uncertainties(kernels: Iterable[Kernel], provenance: Iterable[str], fitted: Fitted,
                         label: str) -> dict[str, KernelUncertainty]:
    """The kernels that are doubtful, by id. What was measured is not, nor what only renames a tensor."""
    found, predicted = dict[str, KernelUncertainty](), []
    for kernel, origin in zip(kernels, provenance, strict=True):
        if not kernel.moves_data or origin == "measured":
            continue
        if origin == "estimated":
            time, launches = (fitted.uncertainty.of_estimate(kernel, name) for name in (label, LAUNCHES))
            found[kernel.id] = KernelUncertainty("estimated", Span(time.low, time.high), Span(launches.low, launches.high),
                                                 True)
        elif (other := fitted.predictors.stand_in(kernel, label)) is not None:
            found[kernel.id] = KernelUncertainty("stand-in", Span(other.range.low, other.range.high), CERTAIN, True)
        elif (form := fitted.uncertainty.of_other_form(kernel)) is not None:
            found[kernel.id] = KernelUncertainty("other form", Span(form.low, form.high), CERTAIN, True)
        else:
            predicted.append(kernel)
    for name, times in fitted.predictors.beyond_range(predicted).items():
        off = times ** BEYOND_POWER
        found[name] = KernelUncertainty("beyond", Span(1.0 / off, off), CERTAIN, times >= FAR)
    return found


def joined(spans: Iterable[Span]) -> Span:
    """Independent sources of error as one, added up in quadrature as logarithms; it holds 1."""
    spans = list(spans)
    low = math.sqrt(sum(math.log(min(span.low, 1.0)) ** 2 if span.low > 0 else math.inf for span in spans))
    high = math.sqrt(sum(math.log(max(span.high, 1.0)) ** 2 for span in spans))
    return Span(math.exp(-low), math.exp(high))


def is_rough(moved: Span) -> bool:
    """Whether a latency that doubtful kernels may move so far is a rough estimate."""
    return moved.high > 1.0 + ROUGH or moved.low < 1.0 - ROUGH


def fitted_span(used: Composition, run_mode: RunMode, measured_share: float, device: str) -> Span:
    """How far the models that were left out of a composition's fit were off.

    Args:
        used: the composition.
        run_mode: how the model is run.
        measured_share: of the kernels' time, a ratio.
        device: `cpu` or `cuda`.
    """
    usual = _known(used.interval_for(measured_share)) or _few_models(used, device)
    ran = used.cuda_graph if run_mode.cuda_graph else used.host_io if run_mode.io == "host" else None
    if ran is None:
        return usual
    return _known(ran.interval) or joined([usual, _of_errors(ran.left_out)])


def hosts_between(pace: float | None) -> Span:
    """Between which paces (ratios) a model's host plausibly works, where `pace` is known, or not (None)."""
    if pace is None:
        return HOSTS
    ends = pace ** (1.0 - PACE_POWER), pace ** (1.0 + PACE_POWER)
    return Span(min(ends), max(ends))


def host_warning(moved: Span) -> tuple[str, ...]:
    """What to know about a host's pace that is not known, by which a latency may move so far; nothing where that is little."""
    if moved.high <= 1.0 + PACE_WORTH_SAYING and moved.low >= 1.0 - PACE_WORTH_SAYING:
        return ()
    return (f"the host's pace is not known, so the interval holds hosts that dispatch {HOSTS.low:g} to {HOSTS.high:g} times as "
            "long as usual; measure it on the machine in question (benchmark/host_pace.py --out machine.json) and give "
            "--machine machine.json",)


def load_span(sharing: Sharing, told_by: str) -> Span:
    """How far latencies beside other work were off of models and work in no fit, by what told of it."""
    errors: SharingErrors | None = {"probe": sharing.probed, "prediction": sharing.paired}.get(told_by, sharing.from_metrics)
    return Span(1.0 / UNKNOWN, UNKNOWN) if errors is None else _within(NORMAL_90 * errors.mean)


def kernels_under_load_span(predictors: Predictors, label: str) -> Span:
    """How far kernels under load were off that were left out of the training; a model's time may be as far."""
    errors = [found.mape for found in predictors.sidecar.labels[label].errors
              if (found.type, found.rows_of) == ("all", "under load")]
    return _within(NORMAL_90 * errors[0]) if errors else Span(1.0 / UNKNOWN, UNKNOWN)


def _known(interval: ErrorRange | None) -> Span | None:
    return Span(interval.low, interval.high) if interval else None


def _within(error: float) -> Span:
    """A relative error in both directions, as factors."""
    return Span(1.0 / (1.0 + error), 1.0 + error)


def _of_errors(errors: ErrorStatistics | None) -> Span:
    return _within(NORMAL_90 * errors.mape) if errors else Span(1.0 / UNKNOWN, UNKNOWN)


def _few_models(used: Composition, device: str) -> Span:
    """The 90 % prediction interval of Student's t for log errors of few left-out models; as many degrees of freedom as there
    are families of models, since those of one family err alike."""
    if used.assumed:
        return ASSUMED[device]
    if used.left_out == "nothing" or not used.models:
        return Span(1.0 / UNKNOWN, UNKNOWN)
    errors = [math.log(model.measured_ms / model.predicted_ms) for model in used.models]
    count = len({model.group for model in used.models})
    size = math.sqrt(sum(error ** 2 for error in errors) / len(errors))
    reach = math.exp(float(scipy.special.stdtrit(count, 0.95)) * size * math.sqrt(1.0 + 1.0 / count))
    return Span(1.0 / reach, reach)


def uncertainty_warnings(uncertainties: Sequence[tuple[Kernel, KernelUncertainty]], moved: Span) -> list[str]:
    """What to know about a model's doubtful kernels, and by how much they may move its latency."""
    warnings: list[str] = []
    rough = is_rough(moved)
    if moved.high < 1.0 + WORTH_SAYING and moved.low > 1.0 - WORTH_SAYING:
        return warnings  # the kernels' names and their provenance stand in the answer all the same
    by = f"may move the latency by {moved.low - 1:+.0%} to {moved.high - 1:+.0%}"
    for reason, what in (("estimated", "never measured and estimated from FLOPs and bytes"),
                         ("on the CPU", "run on the CPU in a CUDA session, where nothing was measured"),
                         ("stand-in", "never measured and taken to cost what a like operator does"),
                         ("other form", "measured for other ranks or element types only")):
        if names := sorted({kernel.type for kernel, uncertainty in uncertainties if uncertainty.reason == reason}):
            warnings.append(f"{'rough estimate: ' if rough else ''}{', '.join(names)}: {what}; doubtful kernels {by}")
    if rough and not warnings:
        warnings.append(f"rough estimate: kernels far beyond what was measured in some size {by}")
    return warnings
