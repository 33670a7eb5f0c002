"""How sure a prediction is: the interval around it, and whether it is a rough estimate.

Sources of error are taken as independent: the errors of models that were held out of the fit, kernels that are estimated or
lie beyond what was measured, kernels that were measured while the machine was unsteady, a load, another cuDNN. Where the target
has a calibrated interval, it takes the place of the first three. Each is a factor by which the latency may be off; their
logarithms are added in quadrature. So an interval widens with every source, never vanishes, and always holds the prediction
itself.

Kernels of which nothing was learned count as one source: all of them at the low end of their range, or all at the high end.
Where that moves the latency by more than ROUGH, the prediction is a rough estimate. So is one that rests on kernels of forms
that were never measured for more than ROUGH of its time, and one where the doubts of predicted kernels amount to FAR_OFF.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from hase.learned.composition import formulas
from hase.learned.composition.intervals import NoveltyKind
from hase.learned.kernels.settings import LAUNCHES
from hase.records.kernel_record import Kernel
from hase.utils.lazy import scipy

if TYPE_CHECKING:
    from hase.inference.core.run_modes import RunMode
    from hase.inference.core.targets import Fitted
    from hase.learned.composition.fitted import Composition
    from hase.learned.composition.intervals import ErrorRange, Sources
    from hase.learned.kernels.predictors import Predictors
    from hase.learned.sharing.slices import Sharing, SharingErrors
    from hase.utils.timing import ErrorStatistics

WORTH_SAYING = 0.01  # of the latency: no warning about uncertain kernels that move it by less
ROUGH = 0.10  # of the latency: uncertain kernels that may move it by more, or take more of it in forms that were never
# measured, make a prediction a rough estimate
# What the doubts of predicted kernels amount to (`Sources.doubt`): a prediction is a rough estimate from here on. Of 763 models
# of an H200 whose collection was held out, all kernels predicted, 4 % were that doubtful: all 4 that were off by over 30 % were
# among them, and 7 of 8 that were off by over 20 %.
FAR_OFF = 0.05
BEYOND_POWER = 0.25  # a kernel with a feature f times beyond what was measured may take f ** ±0.25 times the prediction: a
# choice; the roofline explains most of a time's growth, and only its ratio to that is learned
DOUBTFUL = 0.25  # mean error of such kernels, as a logarithm: from here on one may make the prediction a rough estimate
NO_DOUBTS: Mapping[str, float] = {}
FAR = 4.0  # times beyond what was measured: from here on such a kernel may make the prediction a rough estimate
UNSTEADY = 0.25  # drift of a measurement, a ratio: from here on it may make the prediction a rough estimate: a choice
# How many times as long as predicted a kernel of a CPU may take whose time depends on values: a choice. Rows that take the same
# branches of trees took 0.25 to 0.6 of the time of real ones, and a TopK of sorted numbers six times that of mixed ones.
BY_VALUES = (0.4, 2.5)
OTHER_CUDNN = 2.0  # how many times as far an interval reaches under another cuDNN minor: a choice, since no GPU was measured
# under two of them
FORCED = 2.0  # the same for an element type or ONNX Runtime version that is not the predictors': a choice
NORMAL_90 = 2.06  # 90 % of normal errors are within so many times their mean size: 1.645 / sqrt(2 / pi)
UNKNOWN = 2.0  # the factor by which a prediction may be off if no errors are known at all: a choice

PACE_WORTH_SAYING = 0.05  # of the latency: no warning about an unknown host's pace that moves it by less

Reason = Literal[
    "estimated", "on the CPU", "other form", "doubtful", "beyond", "control flow", "forced", "unsteady", "by values"]
# The reasons that a calibrated interval (learned/composition/intervals.py) covers, and as what.
CALIBRATED: dict[Reason, NoveltyKind] = {
    "estimated": "unmeasured", "other form": "other form", "beyond": "beyond", "doubtful": "known"}


class Span(NamedTuple):
    """The factors between which the truth plausibly lies, relative to a predicted number."""

    low: float
    high: float

    def widened(self, times: float) -> Span:
        """The span with ends `times` as far from 1, as logarithms."""
        return Span(self.low ** times, self.high ** times)

    def covering(self, span: Span) -> Span:
        """The smallest span that contains both."""
        return Span(min(self.low, span.low), max(self.high, span.high))


CERTAIN = Span(1.0, 1.0)
HOSTS = Span(*formulas.HOSTS)  # how many times as long as usual a host may take to dispatch
# Where the pace is known, a model's host plausibly takes from pace ** (1 - this) to pace ** (1 + this) times as long as usual.
# With it, intervals hold about nine of ten recorded latencies of H200s at any pace from 0.83 to 1.7: 87 to 96 % of 436 in five
# groups by pace, all kernels predicted (without it 69 % where the pace is above 1.3).
PACE_POWER = 0.4
# For compositions with default constants, fitted on no model of this machine. On a CPU the sum of the kernels' times in a model
# erred by 3 % (models over 10 ms) to 33 % (shorter ones); on a GPU the host's pace is a guess, and it decides short models.
ASSUMED = {"cpu": Span(0.75, 1.3), "cuda": Span(0.5, 1.8)}


class Shortness(NamedTuple):
    """How far a latency lies below the shortest model of a composition's fit. In short models the fixed cost of a run weighs
    most, and longer ones hardly show how large it is.

    Attributes:
        times: how many times shorter it is; at least 1.
    """

    times: float

    @property
    def span(self) -> Span:
        off = self.times ** BEYOND_POWER
        return Span(1.0 / off, off)

    @property
    def makes_rough(self) -> bool:
        return self.times >= FAR

    @property
    def warnings(self) -> tuple[str, ...]:
        if not self.makes_rough:
            return ()
        return (f"rough estimate: {self.times:.2g} times shorter than any model from which the cost of a run was learned",)


def shortness(used: Composition, latency_ms: float) -> Shortness:
    """How much shorter a model is than those on which a composition was fitted; 1 where it was fitted on none."""
    shortest_ms = min((model.predicted_ms for model in used.models), default=0.0)
    return Shortness(max(1.0, shortest_ms / latency_ms) if latency_ms else 1.0)


class KernelUncertainty(NamedTuple):
    """How far a kernel's time and its launches may be off, and why.

    Attributes:
        makes_rough: whether that is enough to make a prediction a rough estimate, and not only to widen its interval.
    """

    reason: Reason
    time: Span
    launches: Span
    makes_rough: bool


def kernel_uncertainties(kernels: Iterable[Kernel], provenance: Iterable[str], fitted: Fitted, label: str,
                         doubts: Mapping[str, float] = NO_DOUBTS) -> dict[str, KernelUncertainty]:
    """The kernels that are uncertain, by id. Steadily measured ones are not, nor those that only rename a tensor.

    One that was measured while the machine was unsteady may be off by as much as the machine's speed changed meanwhile.

    Args:
        kernels: of a model.
        provenance: of the time of each.
        fitted: what was learned for the target.
        label: whose times.
        doubts: how far off predicted times are in the mean, as logarithms, by id, as far as that is known.
    """
    uncertainties, predicted = dict[str, KernelUncertainty](), list[Kernel]()
    kernels, provenance = list(kernels), list(provenance)
    for kernel, origin in zip(kernels, provenance, strict=True):
        if origin == "measured":
            if drift := fitted.predictors.drift_of(kernel, label):
                uncertainties[kernel.id] = KernelUncertainty("unsteady", Span(1.0 / (1.0 + drift), 1.0 + drift), CERTAIN,
                                                             drift >= UNSTEADY)
        elif not kernel.moves_data:
            continue
        elif origin == "estimated":
            time, launches = (fitted.uncertainty.of_estimate(kernel, name) for name in (label, LAUNCHES))
            uncertainties[kernel.id] = KernelUncertainty("estimated", Span(time.low, time.high),
                                                         Span(launches.low, launches.high), True)
        elif (form := fitted.uncertainty.of_other_form(kernel, label)) is not None:
            doubted = _doubted(doubts.get(kernel.id, 0.0))
            uncertainties[kernel.id] = KernelUncertainty("other form", Span(form.low, form.high).covering(doubted), doubted,
                                                         True)
        else:
            predicted.append(kernel)
    for kernel in predicted:
        if (doubted := _doubted(doubts.get(kernel.id, 0.0))) != CERTAIN:
            uncertainties[kernel.id] = KernelUncertainty("doubtful", doubted, doubted, True)
    for name, times in fitted.predictors.beyond_range([
            kernel for kernel in predicted if kernel.id not in uncertainties]).items():
        off = times ** BEYOND_POWER
        uncertainties[name] = KernelUncertainty("beyond", Span(1.0 / off, off), CERTAIN, times >= FAR)
    uncertainties |= _by_values(kernels, provenance, fitted, label, uncertainties)
    return uncertainties | _forced(kernels, provenance, fitted.predictors, label, uncertainties)


def _doubted(doubt: float) -> Span:
    """How far off the time or the launches of a kernel may be, whichever is longer; CERTAIN up to DOUBTFUL."""
    return Span(math.exp(-doubt), math.exp(doubt)) if doubt >= DOUBTFUL else CERTAIN


def _by_values(kernels: Iterable[Kernel], provenance: Iterable[str], fitted: Fitted, label: str,
               known: Mapping[str, KernelUncertainty]) -> dict[str, KernelUncertainty]:
    """The kernels of a CPU whose time depends on values, and was not measured with realistic ones; together with their
    uncertainties that are `known` already."""
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
    """The kernels that an estimator predicts which was admitted by force: its errors on held-out kernels, together with their
    uncertainties that are `known` already."""
    if predictors.admitted is None:
        return {}
    entries = {name: entry for name, entry in predictors.admitted.of(label).items() if entry.forced}
    forced = {}
    for kernel, origin in zip(kernels, provenance, strict=True):
        if kernel.type in entries and kernel.moves_data and origin == "predicted":
            estimator_span = Span(*entries[kernel.type].true_over_predicted)
            before = known.get(kernel.id, KernelUncertainty("forced", CERTAIN, CERTAIN, True))
            forced[kernel.id] = KernelUncertainty("forced", joined([estimator_span, before.time]), before.launches, True)
    return forced


def joined(spans: Iterable[Span]) -> Span:
    """Independent sources of error as one: their logarithms added in quadrature. The result holds 1."""
    spans = list(spans)
    low = math.sqrt(sum(math.log(min(span.low, 1.0)) ** 2 if span.low > 0 else math.inf for span in spans))
    high = math.sqrt(sum(math.log(max(span.high, 1.0)) ** 2 for span in spans))
    return Span(math.exp(-low), math.exp(high))


def is_rough(moved: Span) -> bool:
    """Whether a latency is a rough estimate if uncertain kernels may move it by `moved`."""
    return moved.high > 1.0 + ROUGH or moved.low < 1.0 - ROUGH


def source_warnings(sources: Sources) -> tuple[str, ...]:
    """A warning about each source of error that makes a prediction a rough estimate by itself."""
    warnings = []
    if sources.other_form > ROUGH:
        warnings.append(f"kernels of forms that were never measured take {sources.other_form:.0%} of the latency")
    if sources.doubt >= FAR_OFF:
        warnings.append(f"predictions that rest on kernels like these were off by {sources.doubt:.0%} in the mean")
    return tuple(f"rough estimate: {warning}" for warning in warnings)


def fitted_span(used: Composition, run_mode: RunMode, measured_share: float, device: str) -> Span:
    """How far models were off that were held out of a composition's fit.

    Args:
        used: the composition.
        run_mode: how the model is run.
        measured_share: the part of the kernels' time that was measured, a ratio.
        device: `cpu` or `cuda`.
    """
    usual = _known(used.interval_for(measured_share)) or _few_models(used, device)
    ran = used.cuda_graph if run_mode.cuda_graph else used.host_io if run_mode.io == "host" else None
    if ran is None:
        return usual
    return _known(ran.interval) or joined([usual, _of_errors(ran.left_out)])


def hosts_between(pace: float | None) -> Span:
    """The plausible paces (ratios) of a model's host, if `pace` is known, or if it is not (None)."""
    if pace is None:
        return HOSTS
    ends = pace ** (1.0 - PACE_POWER), pace ** (1.0 + PACE_POWER)
    return Span(min(ends), max(ends))


def host_warning(moved: Span) -> tuple[str, ...]:
    """A warning that the host's pace is unknown, if that may move the latency by more than PACE_WORTH_SAYING."""
    if moved.high <= 1.0 + PACE_WORTH_SAYING and moved.low >= 1.0 - PACE_WORTH_SAYING:
        return ()
    return (f"the host's pace is not known, so the interval holds hosts that dispatch {HOSTS.low:g} to {HOSTS.high:g} times as "
            "long as usual; measure it on the machine in question (benchmark/host_pace.py --out machine.json) and give "
            "--machine machine.json",)


def load_span(sharing: Sharing, load_source: str) -> Span:
    """How far predictions under load were off, for models and co-runners that were held out, by the source of the load."""
    by_source = {"probe": sharing.probed, "prediction": sharing.paired}
    errors: SharingErrors | None = by_source.get(load_source, sharing.from_metrics)
    return span_of_error(errors.mean if errors else None)


def span_of_error(mean_error: float | None) -> Span:
    """The factors by which nine of ten latencies are off whose mean error (a ratio) is known; None: nothing is known of it."""
    return Span(1.0 / UNKNOWN, UNKNOWN) if mean_error is None else _within(NORMAL_90 * mean_error)


def kernels_under_load_span(predictors: Predictors, label: str) -> Span:
    """How far kernels under load were off that were held out of the training; a model's time may be off as far."""
    errors = [entry.mape for entry in predictors.sidecar.labels[label].errors
              if (entry.type, entry.rows_of) == ("all", "under load")]
    return _within(NORMAL_90 * errors[0]) if errors else Span(1.0 / UNKNOWN, UNKNOWN)


def _known(interval: ErrorRange | None) -> Span | None:
    return Span(interval.low, interval.high) if interval else None


def _within(error: float) -> Span:
    """A relative error in both directions, as factors."""
    return Span(1.0 / (1.0 + error), 1.0 + error)


def _of_errors(errors: ErrorStatistics | None) -> Span:
    return _within(NORMAL_90 * errors.mape) if errors else Span(1.0 / UNKNOWN, UNKNOWN)


def _few_models(used: Composition, device: str) -> Span:
    """The 90 % prediction interval of Student's t for the log errors of few held-out models, with as many degrees of freedom as
    there are groups of models, since models of one group err alike."""
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
    """Warnings about a model's uncertain kernels, and by how much they may move its latency."""
    warnings: list[str] = []
    rough = is_rough(moved)
    if moved.high < 1.0 + WORTH_SAYING and moved.low > 1.0 - WORTH_SAYING:
        return warnings  # the answer names the kernels and their provenance anyway
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
