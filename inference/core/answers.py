"""The record of a prediction, as --json prints it; predictions of one model at several sizes in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Literal

from pydantic import Field

from hase.graph_model.simulation.pipeline import PipelineCosts
from hase.inference.core.host_pace import PaceSource
from hase.inference.core.memory import Memory
from hase.inference.core.run_modes import AS_USUAL, RunMode
from hase.inference.sharing.co_runner import UnderLoad
from hase.learned.composition.fitted import NEARLY_ALL
from hase.utils.frozen import Frozen
from hase.utils.lazy import pandas as pd
from hase.utils.pages import cards

Provenance = Literal["measured", "predicted", "estimated"]
PROVENANCES: tuple[Provenance, ...] = ("measured", "predicted", "estimated")
PREDICTION_VERSION = 1


class UsedComposition(Frozen):
    """How the times of the kernels were put together to the model's.

    latency_ms = alpha · (Σ or longest path of the kernels) + beta_ms; in kind `sum_nodes` plus node_ms for each node that moves
    data. Kind `pipeline` simulates host and GPU, which wait for each other, with `costs`; it takes no alpha or beta.

    Attributes:
        label: which time of the kernels is added up (records/measurement.py).
        kind: the form.
        alpha, beta_ms, node_ms, costs: its constants.
        assumed: whether no model was ever measured on the target, so that the constants are defaults.
    """

    label: str
    kind: Literal["sum", "sum_nodes", "critical_path", "pipeline"]
    alpha: float
    beta_ms: float
    node_ms: float = 0.0
    costs: PipelineCosts | None = None
    assumed: bool = False


@dataclass(frozen=True, slots=True)  # a model has dozens: pydantic's checks would take a fifth of a prediction's time
class KernelShare:
    """One kernel of the model.

    Attributes:
        id, type: of the kernel.
        count: how often it runs.
        latency_ms, total_ms: of one run, and of all.
        share: of the model's kernel time, a ratio.
        provenance: where its time comes from.
        launches: number of GPU launches, where the composition needs it.
        unsteady: whether its time was measured while the machine was unsteady.
        provider: the execution provider that runs it, `cuda` or `cpu`; in a CUDA session the CPU runs some nodes.
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
        name, source: of the estimator, and where its code comes from.
        types: the kernel types of the model that it predicted.
        mape: its error on held-out kernels, a ratio.
        forced: whether it was admitted although it is not better than what it replaced.
    """

    name: str
    source: str
    types: tuple[str, ...]
    mape: float
    forced: bool


class Prediction(Frozen):
    """A model's predicted latency and what it rests on. `--json` prints it as it is. Version 1 is the first.

    Attributes:
        model: the record's name: the file's stem, with the sizes of dynamic dimensions.
        target, flavour: names of the target that the prediction holds for, and of the graph's flavour.
        holds_for: the machine and the versions that were measured, unless this is that machine, and how the graph was made here
            without its provider; in words.
        composition: how the kernels' times were put together.
        way: how the model is run.
        latency_ms: the prediction; where `under_load` gives a distribution, its mean.
        interval_ms: the range around latency_ms that held nine of ten models; wider with every uncertainty
            (inference/core/uncertainty.py).
        rough_estimate: whether the prediction is a rough estimate: uncertain kernels (estimated, measured in other forms only,
            or far beyond what was measured) could move the latency by more than uncertainty.ROUGH, or those of forms that were
            never measured take more of it; or kernels like its own were predicted badly (uncertainty.FAR_OFF); or sizes that
            depend on data were taken to be the largest possible; or some nodes hold graphs that are not counted.
        estimated_operators: kernel types that were never measured, so they are estimated from operators of their class.
        doubtful_operators: kernel types that were measured in other forms only (ranks, element types, groups, windows), or
            whose time depends on values and was not measured with realistic ones.
        sum_latency_ms: the plain α·Σ+β of an idle device, with the α and β of the sum among the composition's candidates; the
            prediction itself where that is the composition. None where no sum was fitted.
        kernel_sum_ms: Σ of the kernels' times.
        critical_path_ms: the longest path, where the composition uses it.
        load: `idle`, or the metrics of the load by DCGM field name (empty where only a probe saw it).
        under_load: the distribution of the latency while a co-runner shares the GPU. None where nothing else runs, and where
            nothing was learned of sharing, so that the load changes the kernels' times instead.
        host_pace: how many times as long as usual the host takes to dispatch, a ratio; None where it is not known or does not
            matter.
        host_pace_source: where host_pace comes from. None where it does not matter: on a CPU, which is its own host, and for a
            CUDA graph that is replayed. Where it matters and is not known, the interval covers slow and fast hosts.
        strict: whether no measured kernel time was looked up.
        time_share, kernel_count: by provenance: ratios of kernel_sum_ms, and numbers of nodes.
        unsteady_share: the part of kernel_sum_ms that was measured while the machine was unsteady, a ratio; it is a part of the
            measured share.
        kernels: each kernel once, the ones with the most time first.
        estimators: the admitted estimators that predicted some of the kernels; left out where there are none.
        dims: the sizes given to dynamic dimensions.
        static: whether sizes were fixed before ONNX Runtime optimised the model; true where the file fixes all of them.
        batch, items_per_second: of the first input; None where it has no dimension.
        memory, peak_memory_mib: the memory that a run holds at its peak.
        device_memory_mib: the memory of the target's device; None where it is not known.
        fits_memory: whether the device has as much memory as the run's peak, peak_memory_mib; None where it is not known.
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
        """Its numbers as a row of a table, with their units in the names."""
        low, high = self.interval_ms
        return {"model": self.model, "target": self.target, "batch": self.batch, "latency_ms": self.latency_ms,
                "interval_low_ms": low, "interval_high_ms": high, "rough_estimate": self.rough_estimate,
                "items_per_second": self.items_per_second, "peak_memory_mib": self.peak_memory_mib,
                "fits_memory": self.fits_memory, "kernel_sum_ms": self.kernel_sum_ms,
                **{f"{provenance}_share": self.time_share[provenance] for provenance in PROVENANCES}}

    def to_pandas(self) -> pd.DataFrame:
        """Its kernels, a row each, with the fields of `KernelShare`."""
        return pd.DataFrame([asdict(kernel) for kernel in self.kernels], columns=[one.name for one in fields(KernelShare)])

    def _repr_html_(self) -> str:
        """A card, for notebooks."""
        low, high = self.interval_ms
        numbers = [cards.Field("latency", f"{self.latency_ms:.4g} ms", f"90 % between {low:.4g} and {high:.4g}")]
        if self.under_load:
            p95, p99 = (self.under_load.percentile_ms(percent) for percent in (95, 99))
            numbers.append(cards.Field("p95 beside other work", f"{p95:.4g} ms", f"p99 {p99:.4g} ms"))
        if self.items_per_second:
            numbers.append(cards.Field("throughput", f"{self.items_per_second:.4g} items/s", f"batch {self.batch}"))
        fits = {True: "fits", False: "more than the device has", None: ""}[self.fits_memory]
        others = ", ".join(f"{self.time_share[name]:.0%} {name}" for name in PROVENANCES[1:] if self.time_share[name] >= 0.005)
        numbers += [cards.Field("peak memory", f"{self.peak_memory_mib:.4g} MiB", fits),
                    cards.Field("measured", f"{self.time_share['measured']:.0%}", others)]
        return cards.card(self.model, self.target, numbers, self.warnings, "a rough estimate" if self.rough_estimate else "")

    def __str__(self) -> str:
        """One line: `resnet18: 0.7568 ms on nvidia-h200-cuda-ort1.31-all (90 % between 0.7021 and 0.9114)`."""
        low, high = self.interval_ms
        return (f"{self.model}: {self.latency_ms:.4g} ms on {self.target} (90 % between {low:.4g} and {high:.4g}"
                f"{'; a rough estimate' if self.rough_estimate else ''}"
                f"{'; more memory than the device has' if self.fits_memory is False else ''})")


class Predictions(list[Prediction]):
    """Predictions, which a notebook shows as a table."""

    def to_pandas(self) -> pd.DataFrame:
        """A row for each, with its numbers."""
        return pd.DataFrame([prediction.as_row() for prediction in self])

    def _repr_html_(self) -> str:
        """For notebooks."""
        return cards.table([prediction.as_row() for prediction in self])


def make_monotonic(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Predictions of a model at several sizes of its dynamic dimensions, none shorter than one at sizes that are no greater.

    Where the predictors say otherwise, the prediction at the greater sizes is raised to the other's latency, with a warning.
    Predictions that rest on steadily measured kernels (NEARLY_ALL of their time) stay as they are.
    """
    return [_raised(prediction, predictions) for prediction in predictions]


def _raised(prediction: Prediction, predictions: Sequence[Prediction]) -> Prediction:
    below = [smaller for smaller in predictions if _no_greater(smaller.dims, prediction.dims)
             and not (_measured(prediction) and _measured(smaller))]
    longest = max(below, key=lambda smaller: smaller.latency_ms, default=prediction)
    if longest.latency_ms <= prediction.latency_ms:
        return prediction
    low, high = prediction.interval_ms
    shared = prediction.under_load
    if shared and longest.under_load:
        pairs = zip(shared.percentiles_ms, longest.under_load.percentiles_ms, strict=True)
        shared = shared.model_copy(update={"mean_ms": longest.latency_ms, "percentiles_ms": tuple(map(max, pairs))})
    return prediction.model_copy(update={
        "latency_ms": longest.latency_ms, "interval_ms": (low, max(high, longest.interval_ms[1])), "under_load": shared,
        "items_per_second": prediction.batch / longest.latency_ms * 1e3 if prediction.batch else None,
        "warnings": (*prediction.warnings, f"{prediction.model}: predicted as {prediction.latency_ms:.4g} ms, less than "
                                           f"{longest.model}; taken to be as long as that")})


def _no_greater(dims: Mapping[str, int], than: Mapping[str, int]) -> bool:
    return dims.keys() == than.keys() and dims != than and all(size <= than[name] for name, size in dims.items())


def _measured(prediction: Prediction) -> bool:
    return prediction.time_share["measured"] - prediction.unsteady_share >= NEARLY_ALL
