"""The memory that a model's session holds at the peak of its runs, and that of the target's device.

A session's buffers are planned (inference/core/buffers.py) and lie in an arena (inference/core/arena.py), which keeps them
twice: the first run allocates tensor by tensor, later runs use one block planned from it, and what the first run used is not
given back. On a CPU a page counts only once it is written, so a region of the arena costs only the part that is used. The
session itself, its graph and its kernels, takes 2.4 MiB and 11 KiB for each node.

While a session is opened, weights were copied (parsed, folded, reordered for blocked convolutions). The copies are free again
afterwards, but glibc keeps what lies under its greatest mmap threshold of 32 MiB in the process, until somebody calls
`malloc_trim`. How much stays depends on the order of loading and differs by tens of per cent from run to run: up to twice the
weights of a convolutional network, half of those of others. So it is told apart (`loading_mib`) and is not in the peak.

On CUDA the arena takes whole regions from the device, and holds the weights, too; cuBLAS and cuDNN keep code and scratch of
their own (cuda_memory.py). Which regions it takes depends on the order of loading, which differs from session to session: with
the next region twice as large, a session may hold a third more or less than another one of the same model.

TVM plans one place for each intermediate tensor beforehand: nothing is kept twice, and loading leaves nothing.

Not counted: the process with an idle session (about 70 MiB with Python and ONNX Runtime), and a CUDA context (some 0.5 GiB of
the device, the same for every model).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hase.inference.core.arena import MIB, Arena, Block
from hase.inference.core.buffers import Activations, Layout, NodeBuffers, buffers_of_run, lay_out, layouts_of, live_activations
from hase.inference.core.cuda_memory import LIBRARIES_MIB, taken_bytes
from hase.records.gpu_catalogue import gpu_memory_mib
from hase.records.kernel_record import ModelRecord
from hase.runtimes import runtime_named
from hase.utils.fingerprint import FROM_SHEET, Machine, Target
from hase.utils.frozen import Frozen

SESSION_BYTES, NODE_BYTES = 2.4 * MIB, 0.011 * MIB  # of a CPU's session: of any, and for each node
LOADED_BASE_BYTES = 2 * MIB  # that loading leaves in the heap, of the graph itself


class Memory(Frozen):
    """The memory that a session holds at the peak of its runs, in MiB: of the process on a CPU, of the device on CUDA.

    Attributes:
        weights_mib: constants of the optimised graph.
        activations_mib: inputs, outputs and intermediate tensors alive at the peak.
        arena_mib: the arena's surplus: what the first run took and later runs do not use; on CUDA whole regions.
        workspace_mib: on a CPU the session's graph and kernels; on CUDA what cuBLAS and cuDNN keep.
        loading_mib: what loading leaves in the heap of a CPU's process, free again but not given back; 0 on CUDA.
        peak_mib: the sum of all but what loading leaves.
    """

    weights_mib: float
    activations_mib: float
    arena_mib: float
    workspace_mib: float | None = None
    loading_mib: float = 0.0
    peak_mib: float

    @property
    def least_mib(self) -> float:
        """The least memory with which a run works: the arena takes smaller regions where the device has no room for larger ones
        (ONNX Runtime's bfc_arena.cc: Extend)."""
        return self.weights_mib + self.activations_mib + (self.workspace_mib or 0.0)


def peak_memory(record: ModelRecord, workspace_mib: float | None = None, layouts: Mapping[str, Layout] | None = None,
                apart: Collection[str] = ()) -> Memory:
    """The memory that a session of a model holds at the peak of its runs.

    Args:
        record: the model.
        workspace_mib: where it was measured; by default estimated.
        layouts: of its kernels by id, where they are known already; by default computed.
        apart: tensors that are left out, since the caller counts them: the caches of a language model.
    """
    if layouts is None:
        layouts = layouts_of(record, record.flavour.device)
    run = buffers_of_run(record, layouts, apart, keeps=runtime_named(record.flavour.runtime).keeps_arena)
    activations, of_nodes = live_activations(record, run, apart), [layouts[node.kernel_id] for node in record.nodes]
    arena, workspace, loading = _surplus(record, activations, run, of_nodes)
    if workspace_mib is None:
        workspace_mib = workspace / MIB
    weights, live = record.weight_bytes / MIB, activations.peak_bytes / MIB
    return Memory(weights_mib=weights, activations_mib=live, arena_mib=arena / MIB, workspace_mib=workspace_mib,
                  loading_mib=loading / MIB, peak_mib=weights + live + arena / MIB + workspace_mib)


def _surplus(record: ModelRecord, activations: Activations, run: Sequence[NodeBuffers],
             of_nodes: Sequence[Layout]) -> tuple[float, float, float]:
    """Bytes beyond weights and activations: the arena's surplus, what session or libraries hold, and what loading leaves in the
    heap."""
    if not runtime_named(record.flavour.runtime).keeps_arena:
        return 0.0, 0.0, 0.0
    if record.flavour.device == "cuda":
        inputs = sum(tensor.bytes for tensor in record.inputs.values())
        taken = taken_bytes(record, run, of_nodes) + inputs
        return max(taken - record.weight_bytes - activations.peak_bytes, 0.0), LIBRARIES_MIB * MIB, 0.0
    used = activations.lent_bytes + used_by_runs(run, [layout.scratch_bytes for layout in of_nodes])
    return (max(used - activations.peak_bytes, 0),
            SESSION_BYTES + NODE_BYTES * len(record.nodes),
            LOADED_BASE_BYTES + sum(layout.loading_bytes for layout in of_nodes))


def used_by_runs(run: Sequence[NodeBuffers], scratch_bytes: Sequence[int]) -> int:
    """Bytes of a CPU's arena that were ever in use: by a first run, tensor by tensor, and by a second one, whose tensors lie in
    one block.

    Args:
        run: the buffers of each node.
        scratch_bytes: of each node.
    """
    arena, block = Arena(), Block()
    lay_out(arena, run, scratch_bytes)
    lay_out(block, run, [0] * len(run))
    if block.size:
        arena.allocate(block.size)
    if largest := max(scratch_bytes, default=0):
        arena.allocate(largest)
    return arena.used


GPU_MEMORY_MIB = {"NVIDIA H200": 143771.0}  # by device name, as nvidia-smi shows it


def device_memory_mib(target: Target, machines: Sequence[Machine]) -> float | None:
    """The memory of a target's device in MiB; None where it is not known.

    Args:
        target: the target.
        machines: those that were measured; for a CPU the smallest of their memories is taken.
    """
    if target.flavour.device == "cpu":
        return min((1024 * machine.memory_gib for machine in machines), default=None)
    return GPU_MEMORY_MIB.get(target.device_name) or gpu_memory_mib(target.device_name.removesuffix(FROM_SHEET))


def memory_warnings(memory: Memory, there_mib: float | None) -> tuple[str, ...]:
    """A warning where a model's peak is more memory than its device has (`there_mib`)."""
    if there_mib is None or memory.peak_mib <= there_mib:
        return ()
    has = f"the device has {there_mib / 1024:.4g} GiB"
    if memory.least_mib > there_mib:
        return (f"it can't run there: it needs at least {memory.least_mib / 1024:.4g} GiB of memory, and {has}; the latency is "
                "one that no run has",)
    return (f"it does not fit in the memory: its peak is {memory.peak_mib / 1024:.4g} GiB, and {has}. It can run only if ONNX "
            f"Runtime gets along with less, {memory.least_mib / 1024:.4g} GiB at least",)
