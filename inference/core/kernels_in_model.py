"""What each kernel contributes to the models that hold it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from hase.benchmark.ort.profile import GUESSED_ON_CUDA, RANGE, trip_ms
from hase.graph_model.simulation.pipeline import NodeKind, node_kind
from hase.inference.core.answers import Provenance
from hase.inference.core.buffers import Layout, layout_of
from hase.inference.core.uncertainty import CERTAIN, KernelUncertainty, Span, joined, kernel_uncertainties
from hase.learned.composition.cuda_nodes import (
    LEAST_BYTES,
    PREDICTED_ON_HOST,
    SELECTION_RANGE,
    guessed_ms,
    host_range,
    is_copy,
    is_off_gpu,
    on_host,
    reading_loops,
    row_selection_ms,
    selection_launches,
    selection_ms,
    selects_boxes,
    selects_in_rows,
    takes_no_time,
    to_host,
    waits_inside,
)
from hase.learned.composition.host_side import HOST_LABEL
from hase.learned.kernels.settings import LAUNCHES
from hase.records.kernel_costs import is_control_flow
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.measurement import GPU_LABEL

if TYPE_CHECKING:
    from hase.inference.core.conditions import Conditions


class KernelInModel(NamedTuple):
    """What a kernel contributes to every model that holds it, computed once for all of them.

    Attributes:
        launches: number of GPU launches, where the composition needs it.
        kind: what it costs a GPU's host to dispatch.
        layout: how it uses memory.
        uncertainty: how far its time may be off, where that is more than usual.
        on_host: whether its time is the host's and not the GPU's, in a CUDA session.
        waits: whether the host waits for the GPU at this kernel.
        host_ms: how long it keeps the host busy besides, where its time is the GPU's.
        doubt: how far off such a predicted time is in the mean, as a logarithm; 0 where that is not known.
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
        """The GPU's time for it."""
        return 0.0 if self.on_host else self.latency_ms

    @property
    def unsteady(self) -> bool:
        """Whether its time was measured while the machine was unsteady."""
        return self.uncertainty is not None and self.uncertainty.reason == "unsteady"

    def at(self, end: Literal["low", "high"], rough_only: bool) -> KernelInModel:
        """The same kernel at one end of its plausible times; unchanged where it is not uncertain."""
        if self.uncertainty is None or (rough_only and not self.uncertainty.makes_rough):
            return self
        time, launches = getattr(self.uncertainty.time, end), getattr(self.uncertainty.launches, end)
        return self._replace(latency_ms=time * self.latency_ms,
                             launches=None if self.launches is None else launches * self.launches)


Placed = tuple[str, str]  # a kernel's id, and the provider that runs it: the same kernel may run on the CPU and on the GPU


def placed_kernels(record: ModelRecord) -> list[Placed]:
    """The kernel and the provider of each node, in order."""
    return [(node.kernel_id, node.provider) for node in record.nodes]


def runs_of_kernels(record: ModelRecord) -> dict[Placed, float]:
    """How often each kernel runs in a run of the model."""
    counts: dict[Placed, float] = {}
    for node in record.nodes:
        key = node.kernel_id, node.provider
        counts[key] = counts.get(key, 0.0) + node.runs
    return counts


def kernels_in_models(records: Sequence[ModelRecord], conditions: Conditions) -> dict[Placed, KernelInModel]:
    """What each kernel of some models contributes; a kernel that several of them share is predicted once."""
    placed = {(node.kernel_id, node.provider): record.kernel_of(node) for record in records for node in record.nodes}
    reading: set[str] = set()
    if conditions.device == "cuda" and any(is_control_flow(kernel) for kernel in placed.values()):
        reading = {name for record in records for name in reading_loops(record)}
    return contributions(placed, conditions, reading)


def contributions(placed: Mapping[Placed, Kernel], conditions: Conditions,
                  reading: Collection[str] = ()) -> dict[Placed, KernelInModel]:
    """What kernels contribute to the models that hold them.

    Args:
        placed: the kernels.
        conditions: what the predictions hold for.
        reading: the ids of Loops at which the host reads from the GPU whether they go on.
    """
    loops = {key: kernel for key, kernel in placed.items() if is_control_flow(kernel)}
    off_gpu = {key: kernel for key, kernel in placed.items()
               if conditions.device == "cuda" and is_off_gpu(kernel, key[1]) and key not in loops}
    known = _predicted({key: kernel for key, kernel in placed.items() if key not in off_gpu and key not in loops}, conditions)
    known |= {key: selecting_kernel(kernel, known[key]) for key, kernel in placed.items()
              if conditions.device == "cuda" and key in known and key not in off_gpu
              and (selects_boxes(kernel) or (selects_in_rows(kernel) and known[key].provenance != "measured"))}
    known |= _off_gpu_kernels(off_gpu, conditions)
    return known | {key: _control_flow_kernel(kernel, conditions.device, key[0] in reading) for key, kernel in loops.items()}


def _predicted(kernels: Mapping[Placed, Kernel], conditions: Conditions) -> dict[Placed, KernelInModel]:
    """The kernels that the target's predictors predict."""
    fitted, used, load = conditions.fitted, conditions.used, conditions.kernel_load
    times = fitted.predictors.predict(list(kernels.values()), load, used.label, conditions.strict)
    launches: Sequence[float | None] = [None] * len(kernels)
    if used.kind == "pipeline":
        launches = fitted.predictors.predict(list(kernels.values()), load, LAUNCHES, conditions.strict).latency_ms
    doubts = fitted.predictors.doubts([kernel for kernel, origin in zip(kernels.values(), times.provenance, strict=True)
                                       if origin == "predicted" and kernel.moves_data]) if used.label == GPU_LABEL else {}
    uncertainties = kernel_uncertainties(kernels.values(), times.provenance, fitted, used.label, doubts)
    on_gpu, host = conditions.device == "cuda", fitted.host
    return {key: KernelInModel(time_ms, cast("Provenance", provenance), count, node_kind(kernel),
                               layout_of(kernel, conditions.device),
                               uncertainties.get(kernel.id), waits=on_gpu and waits_inside(kernel),
                               host_ms=host.wait_ms(kernel) if on_gpu else 0.0, doubt=doubts.get(kernel.id, 0.0))
            for (key, kernel), time_ms, provenance, count in zip(
                kernels.items(), times.latency_ms, times.provenance, launches, strict=True)}


def selecting_kernel(kernel: Kernel, known: KernelInModel) -> KernelInModel:
    """What a NonMaxSuppression on a GPU contributes, by how many boxes it keeps, and a TopK in long rows, whatever predictors
    say."""
    time_ms, launches = ((selection_ms(kernel), selection_launches(kernel)) if selects_boxes(kernel) else
                         (row_selection_ms(kernel), 1.0))
    return known._replace(latency_ms=time_ms, launches=launches, provenance="predicted",
                          uncertainty=KernelUncertainty("control flow", Span(*SELECTION_RANGE), CERTAIN, False))


def _control_flow_kernel(kernel: Kernel, device: str, reads_condition: bool) -> KernelInModel:
    """What a Loop, If or Scan contributes with each trip, in addition to the nodes of its body; `reads_condition`: the host
    reads from the GPU whether it goes on."""
    on_gpu = device == "cuda"
    return KernelInModel(trip_ms(kernel, device, reads_condition), "predicted", 0.0, NodeKind.OWN, layout_of(kernel, device),
                         KernelUncertainty("control flow", Span(*RANGE), CERTAIN, on_gpu and kernel.op_type in GUESSED_ON_CUDA),
                         on_host=on_gpu, waits=reads_condition)


def _off_gpu_kernels(kernels: Mapping[Placed, Kernel], conditions: Conditions) -> dict[Placed, KernelInModel]:
    """What copies, and kernels of the CPU provider, contribute in a CUDA session."""
    host = conditions.fitted.host
    contributions = {key: KernelInModel(host.copy_ms(kernel), "predicted", 1.0, NodeKind.OWN, layout_of(kernel, "cuda"),
                                        on_host=on_host(kernel, key[1]), waits=to_host(kernel))
                     for key, kernel in kernels.items() if is_copy(kernel)}
    on_cpu = {key: kernel for key, kernel in kernels.items() if key not in contributions}
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
            guess = guessed_ms(kernel) / time.time_ms if time.time_ms else 1.0
            low, high = PREDICTED_ON_HOST
            spans = [Span(min(low, guess), max(high, guess)), *([uncertainty.time] if uncertainty else [])]
            uncertainty = KernelUncertainty("on the CPU", joined(spans), CERTAIN, True)
        contributions[key] = KernelInModel(time.time_ms, cast("Provenance", time.provenance), 0.0,
                                           node_kind(kernel, on_gpu=False), layout_of(kernel, "cuda"), uncertainty,
                                           on_host=True)
    return contributions
