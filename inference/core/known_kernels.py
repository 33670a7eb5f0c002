"""What a kernel brings to every model that holds it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from benchmark.runtimes.ort.control_flow import RANGE, trip_ms
from graph_model.simulation.tracks import NodeKind, node_kind
from inference.core.answers import Provenance
from inference.core.doubt import CERTAIN, KernelDoubt, Span
from inference.core.memory import Layout, layout_of
from ort_analysis.records.kernel_record import Kernel, ModelRecord


class KnownKernel(NamedTuple):
    """What a kernel brings to every model that holds it, worked out once for all of them.

    Attributes:
        launches: how many launches it takes, where the composition asks.
        kind: what it means to a GPU's host.
        layout: what it does with buffers.
        doubt: how far its time may be off, where it is doubtful.
        on_host: in a CUDA session, whether its time is the host's and not the GPU's.
        waits: whether the host waits for the GPU there.
    """

    latency_ms: float
    provenance: Provenance
    launches: float | None
    kind: NodeKind
    layout: Layout
    doubt: KernelDoubt | None = None
    on_host: bool = False
    waits: bool = False

    @property
    def gpu_ms(self) -> float:
        """What it keeps the GPU busy."""
        return 0.0 if self.on_host else self.latency_ms

    def at(self, end: Literal["low", "high"], marking_only: bool) -> KnownKernel:
        """The same kernel at one end of its plausible times; as it is where it is not doubtful."""
        if self.doubt is None or (marking_only and not self.doubt.marks):
            return self
        time, launches = getattr(self.doubt.time, end), getattr(self.doubt.launches, end)
        return self._replace(latency_ms=time * self.latency_ms,
                             launches=None if self.launches is None else launches * self.launches)


Placed = tuple[str, str]  # a kernel's id, and the provider that runs it: the same kernel may run on the CPU and on the GPU


def placed_kernels(record: ModelRecord) -> list[Placed]:
    """The kernel and provider of each node, in order."""
    return [(node.kernel_id, node.provider) for node in record.nodes]


def runs_of_kernels(record: ModelRecord) -> dict[Placed, float]:
    """How often each kernel runs in a run of the model."""
    counts: dict[Placed, float] = {}
    for node in record.nodes:
        key = node.kernel_id, node.provider
        counts[key] = counts.get(key, 0.0) + node.runs
    return counts


def _control_flow_kernel(kernel: Kernel, device: str) -> KnownKernel:
    """What a Loop, an If or a Scan brings to a model with each trip, besides the nodes of its body."""
    from training.composition.off_gpu import waits_for_gpu

    on_gpu = device == "cuda"
    return KnownKernel(trip_ms(kernel, device), "predicted", 0.0, NodeKind.OWN, layout_of(kernel),
                       KernelDoubt("control flow", Span(*RANGE), CERTAIN, False), on_host=on_gpu,
                       waits=on_gpu and waits_for_gpu(kernel))


def _off_gpu_kernel(kernel: Kernel, provider: str) -> KnownKernel:
    """What a copy, or a kernel that the CPU provider runs, brings to a CUDA session."""
    from training.composition.off_gpu import copy_ms, host_kernel_ms, host_range, is_copy, on_host, reads_shape, waits_for_gpu

    if is_copy(kernel):
        return KnownKernel(copy_ms(kernel), "predicted", 1.0, NodeKind.OWN, layout_of(kernel),
                           on_host=on_host(kernel, provider), waits=waits_for_gpu(kernel))
    guessed = kernel.moves_data and not reads_shape(kernel)
    doubt = KernelDoubt("on the CPU", Span(*host_range(kernel)), CERTAIN, True) if guessed else None
    return KnownKernel(host_kernel_ms(kernel), "estimated" if doubt else "measured", 0.0, node_kind(kernel, on_gpu=False),
                       layout_of(kernel), doubt, on_host=True)
