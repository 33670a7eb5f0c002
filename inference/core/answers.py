"""A prediction, as it is printed by --json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graph_model.simulation.pipeline import PipelineCosts
from inference.core.host_pace import PaceSource
from inference.core.memory import Memory
from inference.core.run_modes import AS_USUAL, RunMode
from inference.sharing.co_runner import UnderLoad
from ort_analysis.records.kernel_record import Frozen

Provenance = Literal["measured", "predicted", "estimated"]
PROVENANCES: tuple[Provenance, ...] = ("measured", "predicted", "estimated")
PREDICTION_VERSION = 1


class UsedComposition(Frozen):
    """How kernel times became the model's: latency_ms = alpha · (Σ or longest path of the kernels) + beta_ms, and in
    kind `sum_nodes` + node_ms for each node that moves data. Kind `pipeline` lets host and GPU wait for each other at the
    costs given, and takes no alpha or beta. `assumed`: no model was ever measured on the target, so that these are defaults."""

    label: str
    kind: Literal["sum", "sum_nodes", "critical_path", "pipeline"]
    alpha: float
    beta_ms: float
    node_ms: float = 0.0
    costs: PipelineCosts | None = None
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class KernelShare:
    """One kernel of the model: how often it runs, its time a run, and its part of the model's kernel time (a ratio).

    No pydantic class: a model has dozens, and to check each would take a fifth of a prediction's time.

    Attributes:
        launches: how many launches it takes, where the composition asks.
        kind: what it means to a GPU's host.
        provider: that runs it, `cuda` or `cpu`; in a CUDA session some nodes are the CPU's.
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


class Prediction(Frozen):
    """A model's predicted latency and where it comes from. Printed as it is by `--json`. Version 1 is the first.

    Attributes:
        model: the record's name: the file's stem, with the sizes of dynamic dimensions.
        target, flavour: names of what the prediction holds for, and of the graph.
        composition: how the kernels' times were put together.
        way: how the model is run.
        latency_ms: the prediction; under a load with a distribution, its mean.
        interval_ms: between which latencies nine of ten models lay, wider with every doubt (inference/core/uncertainty.py);
        under load, of
            the mean.
        rough_estimate: the plausible error of doubtful kernels (estimated, known in other forms only, or far beyond what was
            measured) could move the latency by more than doubt.ROUGH, sizes that depend on data were taken to be the largest
            possible, or nodes hold graphs that are not counted.
        estimated_operators: kernel types that were never measured, so that they are estimated from FLOPs and bytes.
        doubtful_operators: kernel types that were measured for other ranks or element types only, or that a like operator
            stands for.
        sum_latency_ms: α·Σ+β; the prediction itself, unless the composition uses the longest path.
        kernel_sum_ms: Σ of the kernels' times.
        critical_path_ms: the longest path, where the composition uses it.
        load: `idle`, or the metrics of what else runs, by DCGM field name (none where only a probe told of it).
        under_load: the latency's distribution beside what else runs; None where nothing does, or where the target's composition
            knows no sharing and the kernels' times answer to the load.
        host_pace: how many times as long as usual the host takes to dispatch, a ratio; None where that is not known, or does
            not count.
        host_pace_source: who said so; None where the host's pace does not count: on a CPU, which is its own host, and for a
            CUDA graph that is replayed. Where it counts and is not known, the interval is as wide as hosts differ.
        strict: no measured kernel time was looked up.
        time_share, kernel_count: by provenance: ratios of kernel_sum_ms, and numbers of nodes.
        kernels: each once, the dominating ones first.
        types_without_predictor: the same as estimated_operators, by its older name.
        dims: sizes given to dynamic dimensions.
        static: whether they were fixed before ONNX Runtime optimised the model; true where all are fixed in the file.
        batch, items_per_second: of the first input; None where it has no dimension.
        memory, peak_memory_mib: what a run holds at its fullest moment.
        device_memory_mib: what the target's device has; None where that is not known.
        fits_memory: whether the device has what a run can't do without (`Memory.least_mib`); None likewise.
        warnings: what the reader should know.
    """

    version: int = PREDICTION_VERSION
    model: str
    target: str
    flavour: str
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
    kernels: tuple[KernelShare, ...]
    types_without_predictor: tuple[str, ...]
    dims: dict[str, int]
    static: bool = True
    batch: int | None
    items_per_second: float | None
    memory: Memory
    peak_memory_mib: float
    device_memory_mib: float | None = None
    fits_memory: bool | None = None
    warnings: tuple[str, ...] = ()
