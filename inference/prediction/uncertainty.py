"""The uncertainty of a prediction: the interval around it, and whether it is a rough estimate.

The sources of error are: models held out of the fit, kernels that are estimated or beyond what was measured, kernels measured
while the machine was unsteady, a load, another cuDNN. If the target has a calibrated interval, it replaces the first three.
Each source is a factor by which the latency may be off. Sources are assumed independent, so the logarithms of their factors are
added in quadrature: every source widens the interval, and the interval always contains the prediction.

Kernels without any training data count as one source: all of them at the low end of their range, or all at the high end. A
prediction is a rough estimate if they move the latency by more than ROUGH, if kernels of forms that were never measured take
more than ROUGH of its time, or if the doubts of predicted kernels amount to FAR_OFF.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hase.learned.composition import intervals
from hase.learned.composition.intervals import NoveltyKind
from hase.records.kernel_record import Kernel
from hase.records.measurement import LAUNCHES
from hase.utils.lazy import scipy

if TYPE_CHECKING:
    from hase.inference.prediction.conditions import RunMode
    from hase.inference.prediction.targets import Fitted
    from hase.learned.composition.fitted import Composition
    from hase.learned.composition.intervals import ErrorRange, Sources
    from hase.learned.kernels.predictors import Predictors
    from hase.learned.sharing import Sharing, SharingErrors

REPORTED_SHIFT = 0.01  # share of the latency: uncertain kernels that move it by less cause no warning
REPORTED_PACE_SHIFT = 0.05  # the same for the pace of an unknown host
ROUGH = 0.10  # share of the latency, see above
# The least doubt about predicted kernels (`Sources.doubt`) that makes a prediction a rough estimate. Of 763 models of an H200
# whose collection was held out, all kernels predicted, 4 % reach it: among them are all 4 that were off by over 30 %, and 7 of
# the 8 that were off by over 20 %.
FAR_OFF = 0.05
# If a kernel's feature is f times beyond what was measured, its time may be f ** ±0.25 times the prediction: a choice. The
# roofline explains most of a time's growth, and only the ratio to it is learned.
BEYOND_POWER = 0.25
# Each of these, from this value on, lets a kernel make the prediction a rough estimate:
DOUBTFUL_LOG_ERROR = 0.25  # the mean log error of its predicted time
FAR_BEYOND = 4.0  # the factor by which it exceeds the measured range
UNSTEADY_DRIFT = 0.25  # the drift of its measurement, a ratio: a choice
NO_DOUBTS: Mapping[str, float] = {}
# The true time over the predicted one, for a kernel of a CPU whose time depends on values: a choice. Rows that take the same
# branches of trees took 0.25 to 0.6 of the time of real ones, and a TopK of sorted numbers six times that of mixed ones.
BY_VALUES = (0.4, 2.5)
OTHER_CUDNN = 2.0  # factor on the interval under another cuDNN minor: a choice, since no GPU was measured with both
FORCED = 2.0  # the same for another element type or ONNX Runtime version than the predictors': a choice
NORMAL_90 = 2.06  # 90 % of normal errors are below this multiple of their mean absolute value: 1.645 / sqrt(2 / pi)

Reason = Literal[
    "estimated", "on the CPU", "other form", "doubtful", "beyond", "control flow", "forced", "unsteady", "by values"]
# The reasons that a calibrated interval (learned/composition/intervals.py) covers, and the kind of novelty of each.
CALIBRATED: dict[Reason, NoveltyKind] = {
    "estimated": "unmeasured", "other form": "other form", "beyond": "beyond", "doubtful": "known"}


class Span(NamedTuple):
    """The plausible range of the true value, as factors of the prediction."""

    low: float
    high: float

    def covering(self, span: Span) -> Span:
        """The smallest span that contains both."""
        return Span(min(self.low, span.low), max(self.high, span.high))


CERTAIN = Span(1.0, 1.0)
UNKNOWN_SPAN = Span(0.5, 2.0)  # of a prediction without any known errors: a choice
HOSTS = Span(*intervals.HOSTS)  # plausible paces of an unknown host
# A host of known pace plausibly takes pace ** (1 - this) to pace ** (1 + this) times as long as usual to dispatch a model.
# With it, intervals hold about nine of ten recorded latencies of H200s at any pace from 0.83 to 1.7: 87 to 96 % of 436 in five
# groups by pace, all kernels predicted (without it 69 % where the pace is above 1.3).
PACE_POWER = 0.4
# Of compositions with default constants, fitted on no model of this machine. On a CPU, the sum of the kernels' times in a model
# erred by 3 % (models over 10 ms) to 33 % (shorter ones). On a GPU, the host's pace is a guess, and it decides short models.
ASSUMED = {"cpu": Span(0.75, 1.3), "cuda": Span(0.5, 1.8)}


class KernelUncertainty(NamedTuple):
    """How far a kernel's time and its launches may be off, and why.

    `makes_rough`: the kernel can make the prediction a rough estimate.
    """

    reason: Reason
    time: Span
    launches: Span
    makes_rough: bool


def kernel_uncertainties(kernels: Iterable[Kernel], provenance: Iterable[str], fitted: Fitted, label: str,
                         doubts: Mapping[str, float] = NO_DOUBTS) -> dict[str, KernelUncertainty]:
    """The uncertainties of kernels, by id. Kernels that were measured steadily or only rename a tensor have none.

    A kernel measured while the machine was unsteady may be off by as much as the machine's speed changed meanwhile. `doubts`
    are as from `Predictors.doubts`.
    """
    uncertainties, predicted = dict[str, KernelUncertainty](), list[Kernel]()
    kernels, provenance = list(kernels), list(provenance)
    for kernel, origin in zip(kernels, provenance, strict=True):
        if origin == "measured":
            if drift := fitted.predictors.measured_drift(kernel, label):
                uncertainties[kernel.id] = KernelUncertainty("unsteady", Span(1.0 / (1.0 + drift), 1.0 + drift), CERTAIN,
                                                             drift >= UNSTEADY_DRIFT)
        elif not kernel.moves_data:
            continue
        elif origin == "estimated":
            time, launches = (fitted.uncertainty.estimate_range(kernel, name) for name in (label, LAUNCHES))
            uncertainties[kernel.id] = KernelUncertainty("estimated", Span(time.low, time.high),
                                                         Span(launches.low, launches.high), True)
        elif (form := fitted.uncertainty.other_form_range(kernel, label)) is not None:
            doubt = _doubt_span(doubts.get(kernel.id, 0.0))
            uncertainties[kernel.id] = KernelUncertainty("other form", Span(form.low, form.high).covering(doubt), doubt, True)
        else:
            predicted.append(kernel)
    for kernel in predicted:
        if (doubt := _doubt_span(doubts.get(kernel.id, 0.0))) != CERTAIN:
            uncertainties[kernel.id] = KernelUncertainty("doubtful", doubt, doubt, True)
    others = [kernel for kernel in predicted if kernel.id not in uncertainties]
    for name, times in fitted.predictors.beyond_range(others).items():
        factor = times ** BEYOND_POWER
        uncertainties[name] = KernelUncertainty("beyond", Span(1.0 / factor, factor), CERTAIN, times >= FAR_BEYOND)
    uncertainties |= _by_values(kernels, provenance, fitted, label, uncertainties)
    return uncertainties | _forced(kernels, provenance, fitted.predictors, label, uncertainties)


def _doubt_span(doubt: float) -> Span:
    """The span of a kernel's time and of its launches for a mean log error; CERTAIN if it is small."""
    return Span(math.exp(-doubt), math.exp(doubt)) if doubt >= DOUBTFUL_LOG_ERROR else CERTAIN


def _by_values(kernels: Iterable[Kernel], provenance: Iterable[str], fitted: Fitted, label: str,
               known: Mapping[str, KernelUncertainty]) -> dict[str, KernelUncertainty]:
    """The uncertainties, added to `known` ones, of CPU kernels whose time depends on values that were not realistic."""
    by_values = {}
    for kernel, origin in zip(kernels, provenance, strict=True):
        if not kernel.time_by_values or fitted.target.flavour.device != "cpu" or (
                origin == "measured" and fitted.predictors.inputs_realistic(kernel, label)):
            continue
        before = known.get(kernel.id, KernelUncertainty("by values", CERTAIN, CERTAIN, True))
        reason = before.reason if before.reason in ("estimated", "unsteady") else "by values"
        by_values[kernel.id] = KernelUncertainty(reason, joined([Span(*BY_VALUES), before.time]), before.launches, True)
    return by_values


def _forced(kernels: Iterable[Kernel], provenance: Iterable[str], predictors: Predictors, label: str,
            known: Mapping[str, KernelUncertainty]) -> dict[str, KernelUncertainty]:
    """The uncertainties, added to `known` ones, of kernels predicted by an estimator that was admitted by force.

    They are its errors on held-out kernels.
    """
    if predictors.admitted is None:
        return {}
    entries = {name: entry for name, entry in predictors.admitted.by_type(label).items() if entry.forced}
    forced = {}
    for kernel, origin in zip(kernels, provenance, strict=True):
        if kernel.type in entries and kernel.moves_data and origin == "predicted":
            estimator_span = Span(*entries[kernel.type].true_over_predicted)
            before = known.get(kernel.id, KernelUncertainty("forced", CERTAIN, CERTAIN, True))
            forced[kernel.id] = KernelUncertainty("forced", joined([estimator_span, before.time]), before.launches, True)
    return forced


def joined(spans: Iterable[Span]) -> Span:
    """Combines independent sources of error by adding their logarithms in quadrature. The result contains 1."""
    spans = list(spans)
    low = math.sqrt(sum(math.log(min(span.low, 1.0)) ** 2 if span.low > 0 else math.inf for span in spans))
    high = math.sqrt(sum(math.log(max(span.high, 1.0)) ** 2 for span in spans))
    return Span(math.exp(-low), math.exp(high))


def source_warnings(sources: Sources) -> tuple[str, ...]:
    """A warning for each source of error that alone makes a prediction a rough estimate."""
    warnings = []
    if sources.other_form > ROUGH:
        warnings.append(f"kernels of forms that were never measured take {sources.other_form:.0%} of the latency")
    if sources.doubt >= FAR_OFF:
        warnings.append(f"predictions that rest on kernels like these were off by {sources.doubt:.0%} in the mean")
    return tuple(f"rough estimate: {warning}" for warning in warnings)


def shortness(composition: Composition, latency_ms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The shortest latency in the composition's fit divided by each latency; at least 1, and 1 without a fit."""
    shortest_ms = min((model.predicted_ms for model in composition.models), default=0.0)
    return np.maximum(np.divide(shortest_ms, latency_ms, out=np.ones_like(latency_ms), where=latency_ms > 0), 1.0)


def shortness_warnings(times: float) -> tuple[str, ...]:
    """A warning if a latency is `times` shorter than any in the composition's fit, so that a run's fixed cost is unsure."""
    if times < FAR_BEYOND:
        return ()
    return (f"rough estimate: {times:.2g} times shorter than any model from which the cost of a run was learned",)


def fitted_span(composition: Composition, run_mode: RunMode, measured_share: float, device: str) -> Span:
    """The errors of models held out of a composition's fit. `measured_share`: the measured part of the kernels' time, a ratio.
    """
    usual = _as_span(composition.interval_for(measured_share)) or _few_models_span(composition, device)
    mode = composition.cuda_graph if run_mode.cuda_graph else composition.host_io if run_mode.io == "host" else None
    if mode is None:
        return usual
    return _as_span(mode.interval) or joined([usual, span_of_error(mode.left_out.mape if mode.left_out else None)])


def hosts_between(pace: float | None) -> Span:
    """The paces (ratios) that a host may have for a model, if it was measured as `pace`, or None if it was not."""
    if pace is None:
        return HOSTS
    ends = pace ** (1.0 - PACE_POWER), pace ** (1.0 + PACE_POWER)
    return Span(min(ends), max(ends))


def host_warning(moved: Span) -> tuple[str, ...]:
    """A warning that the host's pace is unknown, if that may move the latency by more than REPORTED_PACE_SHIFT."""
    if moved.high <= 1.0 + REPORTED_PACE_SHIFT and moved.low >= 1.0 - REPORTED_PACE_SHIFT:
        return ()
    return (f"the host's pace is not known, so the interval holds hosts that dispatch {HOSTS.low:g} to {HOSTS.high:g} times as "
            "long as usual; measure it on the machine in question (benchmark/host_pace.py --out machine.json) and give "
            "--machine machine.json",)


def load_span(sharing: Sharing, load_source: str) -> Span:
    """The errors under load, for held-out models and co-runners, by the source of the load."""
    by_source = {"probe": sharing.probed, "prediction": sharing.paired}
    errors: SharingErrors | None = by_source.get(load_source, sharing.from_metrics)
    return span_of_error(errors.mean if errors else None)


def span_of_error(mean_error: float | None) -> Span:
    """The span that contains nine of ten errors, for a mean error (a ratio; None: unknown)."""
    if mean_error is None:
        return UNKNOWN_SPAN
    factor = 1.0 + NORMAL_90 * mean_error
    return Span(1.0 / factor, factor)


def kernels_under_load_span(predictors: Predictors, label: str) -> Span:
    """The errors of held-out kernels under load; a model's time may be off as far."""
    return span_of_error(next((entry.mape for entry in predictors.sidecar.labels[label].errors
                               if (entry.type, entry.rows_of) == ("all", "under load")), None))


def _as_span(interval: ErrorRange | None) -> Span | None:
    return Span(interval.low, interval.high) if interval else None


def _few_models_span(composition: Composition, device: str) -> Span:
    """The 90 % prediction interval of Student's t for the log errors of few held-out models.

    The degrees of freedom are the number of groups of models, since models of one group have similar errors.
    """
    if composition.assumed:
        return ASSUMED[device]
    if composition.left_out == "nothing" or not composition.models:
        return UNKNOWN_SPAN
    errors = [math.log(model.measured_ms / model.predicted_ms) for model in composition.models]
    groups = len({model.group for model in composition.models})
    size = math.sqrt(sum(error ** 2 for error in errors) / len(errors))
    factor = math.exp(float(scipy.special.stdtrit(groups, 0.95)) * size * math.sqrt(1.0 + 1.0 / groups))
    return Span(1.0 / factor, factor)


def uncertainty_warnings(uncertainties: Sequence[tuple[Kernel, KernelUncertainty]], moved: Span) -> list[str]:
    """Warnings about a model's uncertain kernels, which may move its latency by `moved`."""
    warnings: list[str] = []
    rough = moved.high > 1.0 + ROUGH or moved.low < 1.0 - ROUGH
    if moved.high < 1.0 + REPORTED_SHIFT and moved.low > 1.0 - REPORTED_SHIFT:
        return warnings  # the answer lists the kernels and their provenance anyway
    by = f"may move the latency by {moved.low - 1:+.0%} to {moved.high - 1:+.0%}"
    for reason, what in (("estimated", "never measured and estimated from operators of their class"),
                         ("on the CPU", "run on the CPU in a CUDA session, where these kernels were never measured"),
                         ("other form", "measured for other ranks, element types, groups, windows or axes only"),
                         ("doubtful", "near sizes at which a library changes its algorithm, where predictions were far off"),
                         ("control flow", "what each trip costs besides the nodes of its body is a guess"),
                         ("forced", "predicted by an estimator that was admitted by force"),
                         ("unsteady", "measured while the machine was unsteady"),
                         ("by values", "the time depends on the inputs' values, and was not measured with realistic ones")):
        if names := sorted({kernel.type for kernel, uncertainty in uncertainties if uncertainty.reason == reason}):
            warnings.append(f"{'rough estimate: ' if rough else ''}{', '.join(names)}: {what}; uncertain kernels {by}")
    if rough and not warnings:
        warnings.append(f"rough estimate: kernels far beyond what was measured in some size {by}")
    return warnings
