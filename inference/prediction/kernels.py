"""Computes what each kernel contributes to the models that contain it, as rows of a table.

Each kernel is computed once, and cached for later questions under the same conditions. A model is then a row of kernel numbers
(batch.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

from hase.benchmark.ort.profile import GUESSED_ON_CUDA, RANGE, trip_ms
from hase.graph_model.simulation.pipeline import NO_NODE, NodeKind, node_kind
from hase.inference.memory.buffers import Layout, layout_of
from hase.inference.prediction.answers import Provenance
from hase.inference.prediction.uncertainty import (
    BEYOND_POWER,
    CALIBRATED,
    CERTAIN,
    KernelUncertainty,
    Span,
    joined,
    kernel_uncertainties,
)
from hase.learned.composition.cuda_nodes import (
    LEAST_BYTES,
    PREDICTED_HOST_RANGE,
    SELECTION_RANGE,
    box_selection_launches,
    box_selection_ms,
    copies_to_host,
    guessed_host_ms,
    host_range,
    is_box_selection,
    is_copy,
    is_off_gpu,
    is_row_selection,
    row_selection_ms,
    takes_host_time,
    takes_no_time,
    waits_for_size,
)
from hase.learned.composition.host_side import HOST_LABEL
from hase.learned.composition.intervals import KNOWN, Novelty
from hase.records.kernel_costs import is_control_flow
from hase.records.kernel_record import Kernel
from hase.records.measurement import GPU_LABEL, LAUNCHES

if TYPE_CHECKING:
    from hase.inference.prediction.conditions import Conditions

NO_UNCERTAINTY = KernelUncertainty("estimated", CERTAIN, CERTAIN, False)


class KernelInModel(NamedTuple):
    """A kernel's contribution to every model that contains it: time, launches, memory and uncertainty.

    Attributes:
        launches: number of GPU launches, if the composition needs it.
        kind: its cost class when a GPU's host dispatches it.
        layout: how it uses memory.
        uncertainty: how far its time may be off, where that is more than usual.
        on_host: in a CUDA session, whether its time is the host's.
        waits: whether the host waits for the GPU at this kernel.
        host_ms: extra time of the host, if its own time is the GPU's.
        doubt: the mean error of such predictions, as a logarithm; 0 where unknown.
    """

    latency_ms: float
    provenance: Provenance
    launches: float | None
    kind: NodeKind
    layout: Layout
    uncertainty: KernelUncertainty | None = None
    on_host: bool = False
    waits: bool = False
    host_ms: float = 0.0
    doubt: float = 0.0

    @property
    def gpu_ms(self) -> float:
        """The kernel's time on the GPU; 0 if it runs on the host."""
        return 0.0 if self.on_host else self.latency_ms

    @property
    def unsteady(self) -> bool:
        """Whether it was measured while the machine was unsteady."""
        return self.uncertainty is not None and self.uncertainty.reason == "unsteady"


Placed = tuple[str, str]  # kernel id and provider; the same kernel may run on the CPU and on the GPU
Keyed = tuple[str, str, bool]  # also: whether it is a Loop whose condition the host reads from the GPU


def contributions(placed: Mapping[Keyed, Kernel], conditions: Conditions) -> dict[Keyed, KernelInModel]:
    """Computes the contribution of each kernel: measured, predicted or estimated."""
    on_gpu = conditions.device == "cuda"
    loops = {key: kernel for key, kernel in placed.items() if is_control_flow(kernel)}
    off_gpu = {key: kernel for key, kernel in placed.items() if on_gpu and is_off_gpu(kernel, key[1]) and key not in loops}
    results = _predicted({key: kernel for key, kernel in placed.items() if key not in off_gpu and key not in loops}, conditions)
    results |= {key: selecting_kernel(kernel, results[key]) for key, kernel in placed.items()
                if on_gpu and key in results and key not in off_gpu
                and (is_box_selection(kernel) or (is_row_selection(kernel) and results[key].provenance != "measured"))}
    results |= _off_gpu_kernels(off_gpu, conditions)
    return results | {key: _control_flow_kernel(kernel, conditions.device, key[2]) for key, kernel in loops.items()}


def _predicted(kernels: Mapping[Keyed, Kernel], conditions: Conditions) -> dict[Keyed, KernelInModel]:
    """The kernels that the target's predictors predict."""
    fitted, composition, load = conditions.fitted, conditions.used, conditions.kernel_load
    times = fitted.predictors.predict(list(kernels.values()), load, composition.label, conditions.strict)
    launches: Sequence[float | None] = [None] * len(kernels)
    if composition.kind == "pipeline":
        launches = fitted.predictors.predict(list(kernels.values()), load, LAUNCHES, conditions.strict).latency_ms
    predicted = [kernel for kernel, origin in zip(kernels.values(), times.provenance, strict=True)
                 if origin == "predicted" and kernel.moves_data]
    doubts = fitted.predictors.doubts(predicted) if composition.label == GPU_LABEL else {}
    uncertainties = kernel_uncertainties(kernels.values(), times.provenance, fitted, composition.label, doubts)
    on_gpu, host = conditions.device == "cuda", fitted.host
    return {key: KernelInModel(time_ms, cast("Provenance", provenance), count, node_kind(kernel),
                               layout_of(kernel, conditions.device),
                               uncertainties.get(kernel.id), waits=on_gpu and waits_for_size(kernel),
                               host_ms=host.wait_ms(kernel) if on_gpu else 0.0, doubt=doubts.get(kernel.id, 0.0))
            for (key, kernel), time_ms, provenance, count in zip(
                kernels.items(), times.latency_ms, times.provenance, launches, strict=True)}


def selecting_kernel(kernel: Kernel, known: KernelInModel) -> KernelInModel:
    """Times a NonMaxSuppression on a GPU by its kept boxes, and a TopK in long rows; replaces the predictors' times."""
    time_ms, launches = ((box_selection_ms(kernel), box_selection_launches(kernel)) if is_box_selection(kernel) else
                         (row_selection_ms(kernel), 1.0))
    return known._replace(latency_ms=time_ms, launches=launches, provenance="predicted",
                          uncertainty=KernelUncertainty("control flow", Span(*SELECTION_RANGE), CERTAIN, False))


def _control_flow_kernel(kernel: Kernel, device: str, reads_condition: bool) -> KernelInModel:
    """The cost per trip of a Loop, If or Scan itself. `reads_condition`: the host reads from the GPU whether to go on."""
    on_gpu = device == "cuda"
    return KernelInModel(trip_ms(kernel, device, reads_condition), "predicted", 0.0, NodeKind.OWN, layout_of(kernel, device),
                         KernelUncertainty("control flow", Span(*RANGE), CERTAIN, on_gpu and kernel.op_type in GUESSED_ON_CUDA),
                         on_host=on_gpu, waits=reads_condition)


def _off_gpu_kernels(kernels: Mapping[Keyed, Kernel], conditions: Conditions) -> dict[Keyed, KernelInModel]:
    """Copies, and kernels of the CPU provider, in a CUDA session."""
    host = conditions.fitted.host
    results = {key: KernelInModel(host.copy_ms(kernel), "predicted", 1.0, NodeKind.OWN, layout_of(kernel, "cuda"),
                                  on_host=takes_host_time(kernel, key[1]), waits=copies_to_host(kernel))
               for key, kernel in kernels.items() if is_copy(kernel)}
    on_cpu = {key: kernel for key, kernel in kernels.items() if key not in results}
    times = host.kernel_times(list(on_cpu.values()), conditions.strict)
    learned: dict[str, KernelUncertainty] = {}
    if host.kernels is not None:
        learned = kernel_uncertainties(on_cpu.values(), [time.provenance for time in times],
                                       replace(conditions.fitted, predictors=host.kernels, uncertainty=host.uncertainty),
                                       HOST_LABEL)
    for (key, kernel), time in zip(on_cpu.items(), times, strict=True):
        uncertainty = None if takes_no_time(kernel) else learned.get(kernel.id)
        if time.provenance == "estimated":
            uncertainty = KernelUncertainty("on the CPU", Span(*host_range(kernel)), CERTAIN, True)
        elif time.provenance == "predicted" and kernel.bytes_read + kernel.bytes_written >= LEAST_BYTES:
            guess = guessed_host_ms(kernel) / time.time_ms if time.time_ms else 1.0
            low, high = PREDICTED_HOST_RANGE
            spans = [Span(min(low, guess), max(high, guess)), *([uncertainty.time] if uncertainty else [])]
            uncertainty = KernelUncertainty("on the CPU", joined(spans), CERTAIN, True)
        results[key] = KernelInModel(time.time_ms, cast("Provenance", time.provenance), 0.0,
                                           node_kind(kernel, on_gpu=False), layout_of(kernel, "cuda"), uncertainty,
                                           on_host=True)
    return results


def novelty(kernel: KernelInModel) -> Novelty | None:
    """How a kernel differs from those in the training data; None if it was measured."""
    if kernel.provenance == "measured":
        return None
    kind = CALIBRATED.get(kernel.uncertainty.reason, KNOWN.kind) if kernel.uncertainty else KNOWN.kind
    beyond = kernel.uncertainty.time.high ** (1.0 / BEYOND_POWER) if kernel.uncertainty and kind == "beyond" else 1.0
    return Novelty(kind, beyond, kernel.doubt)


class Contribution(NamedTuple):
    """A row of the table: a kernel's numbers (as in `KernelInModel`) and what follows from them. The default row stands for no
    kernel.

    Attributes:
        time_ms, on_host, launches, kind, waits, host_ms: as in `KernelInModel`; 0 launches where unknown.
        time_low, time_high, launches_low, launches_high: the factors by which they may be off.
        uncertain: whether they may be off.
        rough: whether that may make a prediction a rough estimate.
        calibrated: whether a calibrated interval covers it.
        predicted, unmeasured, other_form, beyond, doubt: its weight in each source of error (`intervals.Sources`).
        measured: whether its time was measured.
    """

    time_ms: float = 0.0
    on_host: bool = False
    launches: float = 0.0
    kind: int = NO_NODE
    waits: bool = False
    host_ms: float = 0.0
    time_low: float = 1.0
    time_high: float = 1.0
    launches_low: float = 1.0
    launches_high: float = 1.0
    uncertain: bool = False
    rough: bool = False
    calibrated: bool = False
    predicted: float = 0.0
    unmeasured: float = 0.0
    other_form: float = 0.0
    beyond: float = 0.0
    doubt: float = 0.0
    measured: bool = False

    @classmethod
    def of(cls, known: KernelInModel) -> Contribution:
        unsure, new = known.uncertainty or NO_UNCERTAINTY, novelty(known)
        weights = {} if new is None else new.weights | {"doubt": new.doubt}
        return cls(known.latency_ms, known.on_host, known.launches or 0.0, int(known.kind), known.waits, known.host_ms,
                   unsure.time.low, unsure.time.high, unsure.launches.low, unsure.launches.high, unsure is not NO_UNCERTAINTY,
                   unsure.makes_rough, unsure is not NO_UNCERTAINTY and unsure.reason in CALIBRATED, **weights,
                   measured=known.provenance == "measured")


COLUMN = {name: index for index, name in enumerate(Contribution._fields)}
