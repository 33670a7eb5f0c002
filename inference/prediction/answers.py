"""The record of a prediction, as --json prints it; how predictions of one model at several sizes are made consistent; and
latency objectives: whether a prediction keeps to a limit, and how likely that is."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import NormalDist
from typing import Any, Literal

from pydantic import Field

from hase.inference.memory.session import Memory
from hase.inference.prediction.conditions import AS_USUAL, PaceSource, RunMode
from hase.inference.prediction.under_load import UnderLoad
from hase.learned.composition.fitted import NEARLY_ALL, Formula
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.lazy import pandas as pd
from hase.utils.pages.rendering import CardField, card_html, table_html

Provenance = Literal["measured", "predicted", "estimated"]
PROVENANCES: tuple[Provenance, ...] = ("measured", "predicted", "estimated")
PREDICTION_VERSION = 1
PERCENTILE = 95.0  # default percentile of an objective
INTERVAL_END = NormalDist().inv_cdf(0.95)  # the upper end of a 90 % interval, in standard deviations
LEAST_SPREAD = 1e-6  # minimum standard deviation of the log latency, since an interval may end at the prediction
VERY_LIKELY = 0.9  # above it a chance is "very likely"
CHANCE_WORDS = (  # for chances up to each number
    (0.1, "very unlikely"), (0.35, "unlikely"), (0.65, "about even"), (VERY_LIKELY, "likely"))


class UsedComposition(Formula):
    """How the times of the kernels were put together to the model's.

    latency_ms = alpha · (Σ or longest path of the kernels) + beta_ms; in kind `sum_nodes` plus node_ms for each node that moves
    data. Kind `pipeline` simulates host and GPU, which wait for each other, with `costs`; it takes no alpha or beta.

    Attributes:
        label: which time of the kernels is added up.
        kind: the form.
        alpha, beta_ms, node_ms, costs: its constants.
        assumed: whether the constants are defaults, since no model was measured on the target.
    """

    assumed: bool = False


@dataclass(frozen=True, slots=True)  # a model has dozens: pydantic's checks would take a fifth of a prediction's time
class KernelShare:
    """One kernel of the model.

    Attributes:
        id, type: of the kernel.
        count: runs.
        latency_ms, total_ms: of one run, and of all.
        share: of the model's kernel time, a ratio.
        provenance: where its time comes from.
        launches: GPU launches, where the composition needs them.
        unsteady: whether it was measured while the machine was unsteady.
        provider: `cuda` or `cpu`: what runs it.
    """

    id: str
    type: str
    count: int
    latency_ms: float
    total_ms: float
    share: float
    provenance: Provenance
    launches: float | None = None
    provider: str = ""
    unsteady: bool = False


class UsedEstimator(Frozen):
    """An admitted estimator that predicted kernels of the model (docs/estimators.md).

    Attributes:
        name, source: the estimator, and where its code comes from.
        types: the kernel types that it predicted.
        mape: its error on held-out kernels, a ratio.
        forced: whether it was admitted although it is not better.
    """

    name: str
    source: str
    types: tuple[str, ...]
    mape: float
    forced: bool


class ReadableResult(Frozen):
    """What a question from Python gives. `to_dict` is what `--json` prints, `to_pandas` a table; a notebook shows it."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain types, for JSON."""
        return self.model_dump(mode="json")

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """The rows of its table; column names hold the units."""

    def to_pandas(self) -> pd.DataFrame:
        """Its rows as a table."""
        return pd.DataFrame(self.rows())

    def _repr_html_(self) -> str:
        """For notebooks."""
        return table_html(self.rows())


class Prediction(ReadableResult):
    """A model's predicted latency and what it rests on. `--json` prints it as it is. Version 1 is the first.

    Attributes:
        model: the file's stem, with the sizes of dynamic dimensions.
        target, flavour: what the prediction holds for; what shaped the graph.
        holds_for: machine and versions that were measured, unless this is that machine; in words.
        composition: how the kernels' times were put together.
        way: how the model is run.
        latency_ms: the prediction; where `under_load` gives a distribution, its mean.
        interval_ms: 90 % prediction interval of latency_ms.
        rough_estimate: whether it is marked as one (docs/predicting.md says when).
        estimated_operators: kernel types that were never measured.
        doubtful_operators: kernel types measured in other forms only, or without realistic values.
        sum_latency_ms: the plain α·Σ+β of an idle device; None where none was fitted.
        kernel_sum_ms: Σ of the kernels' times.
        critical_path_ms: the longest path, where the composition uses it.
        load: `idle`, or metrics by DCGM field name.
        under_load: the distribution while a co-runner shares the GPU, where sharing was learned.
        host_pace: how many times as long as usual the host takes to dispatch; None where unknown or without effect.
        host_pace_source: None on a CPU and for a CUDA graph.
        strict: whether no measured time was looked up.
        time_share, kernel_count: ratios of kernel_sum_ms, and numbers of nodes.
        unsteady_share: the part of kernel_sum_ms measured while the machine was unsteady, a ratio.
        kernels: the ones with the most time first.
        estimators: that predicted some of the kernels.
        dims: the sizes given to dynamic dimensions.
        static: whether sizes were fixed before ONNX Runtime optimised the model.
        batch, items_per_second: of the first input.
        memory, peak_memory_mib: at the peak of a run.
        device_memory_mib: the device's.
        fits_memory: whether the peak is no more than that.
        warnings: what the reader should know.
    """

    version: int = PREDICTION_VERSION
    model: str
    target: str
    flavour: str
    holds_for: tuple[str, ...] = ()
    composition: UsedComposition
    way: RunMode = AS_USUAL
    latency_ms: float
    interval_ms: tuple[float, float]
    rough_estimate: bool = False
    estimated_operators: tuple[str, ...] = ()
    doubtful_operators: tuple[str, ...] = ()
    sum_latency_ms: float | None
    kernel_sum_ms: float
    critical_path_ms: float | None = None
    load: Literal["idle"] | dict[str, float]
    under_load: UnderLoad | None = None
    host_pace: float | None = None
    host_pace_source: PaceSource | None = None
    strict: bool
    time_share: dict[Provenance, float]
    kernel_count: dict[Provenance, int]
    unsteady_share: float = 0.0
    kernels: tuple[KernelShare, ...]
    estimators: tuple[UsedEstimator, ...] = Field((), exclude_if=lambda used: not used)
    dims: dict[str, int]
    static: bool = True
    batch: int | None
    items_per_second: float | None
    memory: Memory
    peak_memory_mib: float
    device_memory_mib: float | None = None
    fits_memory: bool | None = None
    warnings: tuple[str, ...] = ()

    def as_row(self) -> dict[str, str | float | bool | None]:
        """The prediction as a table row; column names hold the units."""
        low, high = self.interval_ms
        return {"model": self.model, "target": self.target, "batch": self.batch, "latency_ms": self.latency_ms,
                "interval_low_ms": low, "interval_high_ms": high, "rough_estimate": self.rough_estimate,
                "items_per_second": self.items_per_second, "peak_memory_mib": self.peak_memory_mib,
                "fits_memory": self.fits_memory, "kernel_sum_ms": self.kernel_sum_ms,
                **{f"{provenance}_share": self.time_share[provenance] for provenance in PROVENANCES}}

    def rows(self) -> list[dict[str, Any]]:
        """The model's kernels with the fields of `KernelShare`."""
        return [asdict(kernel) for kernel in self.kernels]

    def to_pandas(self) -> pd.DataFrame:
        """A table of the model's kernels."""
        return pd.DataFrame(self.rows(), columns=[one.name for one in fields(KernelShare)])

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        low, high = self.interval_ms
        numbers = [CardField("latency", f"{self.latency_ms:.4g} ms", f"90 % between {low:.4g} and {high:.4g}")]
        if self.under_load:
            p95, p99 = (self.under_load.percentile_ms(percent) for percent in (95, 99))
            numbers.append(CardField("p95 beside other work", f"{p95:.4g} ms", f"p99 {p99:.4g} ms"))
        if self.items_per_second:
            numbers.append(CardField("throughput", f"{self.items_per_second:.4g} items/s", f"batch {self.batch}"))
        fits = {True: "fits", False: "more than the device has", None: ""}[self.fits_memory]
        others = ", ".join(f"{self.time_share[name]:.0%} {name}" for name in PROVENANCES[1:] if self.time_share[name] >= 0.005)
        numbers += [CardField("peak memory", f"{self.peak_memory_mib:.4g} MiB", fits),
                    CardField("measured", f"{self.time_share['measured']:.0%}", others)]
        return card_html(self.model, self.target, numbers, self.warnings, "a rough estimate" if self.rough_estimate else "")

    def __str__(self) -> str:
        """One line: `resnet18: 0.7568 ms on nvidia-h200-cuda-ort1.31-all (90 % between 0.7021 and 0.9114)`."""
        low, high = self.interval_ms
        return (f"{self.model}: {self.latency_ms:.4g} ms on {self.target} (90 % between {low:.4g} and {high:.4g}"
                f"{'; a rough estimate' if self.rough_estimate else ''}"
                f"{'; more memory than the device has' if self.fits_memory is False else ''})")


class Predictions(list[Prediction]):
    """A list of predictions that a notebook shows as a table."""

    def to_pandas(self) -> pd.DataFrame:
        """A table with a row of numbers for each prediction."""
        return pd.DataFrame([prediction.as_row() for prediction in self])

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        return table_html([prediction.as_row() for prediction in self])


def widen_to_smaller_sizes(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Predictions of one model, whose intervals contain the latency at each smaller size; with a warning where they did not.

    A model takes no less at a larger size, so one of the two predictions is off. Latencies stay as they are: a size has the
    same one alone and among others. Predictions of which nearly all kernel time was measured, on a steady machine, do not
    change one another.
    """
    return [_widened(prediction, predictions) for prediction in predictions]


def _widened(prediction: Prediction, predictions: Sequence[Prediction]) -> Prediction:
    at_smaller_sizes = [other for other in predictions if _is_smaller(other.dims, prediction.dims)
                        and not (_is_measured(prediction) and _is_measured(other))]
    longest = max(at_smaller_sizes, key=lambda other: other.latency_ms, default=prediction)
    if longest.latency_ms <= prediction.latency_ms:
        return prediction
    low_ms, high_ms = prediction.interval_ms
    return prediction.model_copy(update={
        "interval_ms": (low_ms, max(high_ms, longest.interval_ms[1])),
        "warnings": (*prediction.warnings, f"{prediction.model}: predicted as {prediction.latency_ms:.4g} ms, less than "
                                           f"{longest.model} with {longest.latency_ms:.4g}: the interval spans both")})


def _is_smaller(dims: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return dims.keys() == other.keys() and dims != other and all(size <= other[name] for name, size in dims.items())


def _is_measured(prediction: Prediction) -> bool:
    return prediction.time_share["measured"] - prediction.unsteady_share >= NEARLY_ALL


def chance_within(latency_ms: float, interval_ms: tuple[float, float], limit_ms: float) -> float:
    """The probability (0 to 1) that a latency is within a limit, given its prediction.

    The prediction is taken as the median, 5 % lies below the interval, 5 % above it, and on each side of the prediction the
    latency's logarithm is normally distributed.
    """
    if not latency_ms:
        return 1.0
    distance = math.log(limit_ms / latency_ms)
    end_ms = interval_ms[1] if distance > 0 else interval_ms[0]
    spread = abs(math.log(end_ms / latency_ms)) / INTERVAL_END if end_ms > 0 else math.inf
    return NormalDist().cdf(distance / max(spread, LEAST_SPREAD))


def chance_word(chance: float) -> str:
    """A probability (0 to 1) in words, by CHANCE_WORDS."""
    return next((words for most, words in CHANCE_WORDS if chance <= most), "very likely")


def chance_text(chance: float) -> str:
    """A probability (0 to 1) in words and as a number: "likely (80 %)"."""
    number = "over 99 %" if chance > 0.99 else "under 1 %" if chance < 0.01 else f"{100 * chance:.0f} %"
    return f"{chance_word(chance)} ({number})"


class Slo(Frozen):
    """A latency objective, and how a prediction compares with it.

    Attributes:
        limit_ms: the highest latency that is allowed.
        percentile: of the runs, in per cent, must keep to it.
        latency_ms: that percentile of the prediction; on an idle device the median.
        met: whether latency_ms is at most limit_ms.
        headroom_ms, headroom_percent: how far latency_ms is below the limit; negative if missed.
        could_be_ms: the upper end of its 90 % interval.
        chance: how likely the objective is met, 0 to 1.
        chance_in_words: the same in words.
    """

    limit_ms: float
    percentile: float
    latency_ms: float
    met: bool
    headroom_ms: float
    headroom_percent: float
    could_be_ms: float
    chance: float
    chance_in_words: str


def slo_statistic(prediction: Prediction, slo: Slo) -> str:
    """The name of the number that is compared with an objective: a percentile under load, where the spread of the runs'
    latencies is predicted, else the median."""
    return f"p{slo.percentile:g}" if prediction.under_load else "median"


def check_percentile(percentile: float) -> None:
    """Raises UserError unless a percentile is between 1 and 100 (0.95 is a common mistake)."""
    if not 1.0 <= percentile <= 100.0:
        raise UserError(f"percentile {percentile:g} is not between 1 and 100; write 95 for the 95th percentile")


def check_slo(prediction: Prediction, limit_ms: float, percentile: float = PERCENTILE) -> Slo:
    """Compares a prediction with the objective that `percentile` % of the runs take at most `limit_ms`."""
    check_percentile(percentile)
    latency_ms, (low_ms, high_ms) = prediction.latency_ms, prediction.interval_ms
    if prediction.under_load:
        latency_ms = prediction.under_load.percentile_ms(percentile)
        low_ms, high_ms = (end_ms * latency_ms / prediction.latency_ms for end_ms in (low_ms, high_ms))
    chance = chance_within(latency_ms, (low_ms, high_ms), limit_ms)
    return Slo(limit_ms=limit_ms, percentile=percentile, latency_ms=latency_ms, met=latency_ms <= limit_ms,
               headroom_ms=limit_ms - latency_ms, headroom_percent=100 * (1 - latency_ms / limit_ms),
               could_be_ms=high_ms, chance=chance, chance_in_words=chance_word(chance))
