"""Predicts the peak memory of a model's session, and compares it with the memory of the target's device.

A session's buffers lie in an arena (inference/memory/buffers.py) that holds them twice: the first run allocates tensor by
tensor, later runs use one block that is planned from it, and the memory of the first run is never released. On a CPU, a page
counts only once it is written, so a region of the arena costs only the part that is used. The session's own graph and kernels
take 2.4 MiB plus 11 KiB per node.

While a session is opened, weights are copied (parsed, folded, reordered for blocked convolutions). The copies are freed, but
glibc keeps blocks below its maximum mmap threshold of 32 MiB in the process until `malloc_trim` is called. How much stays
depends on the order of loading and varies by tens of per cent between runs: up to twice the weights of a convolutional network,
half of those of others. So it is reported separately (`loading_mib`) and is no part of the peak.

On CUDA, the arena takes whole regions from the device and also holds the weights; cuBLAS and cuDNN keep code and scratch of
their own. The regions depend on the order of loading, which varies between sessions. Since each region is twice as large as the
last, one session may hold a third more or less than another one of the same model.

TVM plans one place for each intermediate tensor in advance: nothing is held twice, and loading leaves nothing.

Not counted: the process with an idle session (about 70 MiB with Python and ONNX Runtime), and a CUDA context (some 0.5 GiB of
the device, the same for every model).
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial

from hase.inference.memory.buffers import (
    Activations,
    Arena,
    Layout,
    NodeBuffers,
    TensorBlock,
    buffers_of_run,
    chunk_bytes,
    lay_out,
    layouts_of,
    live_activations,
)
from hase.ort_analysis.cuda.placement import cuda_kernel
from hase.records.devices import gpu_memory_mib
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.operators import operator_row
from hase.runtimes import runtime_named
from hase.utils.config import Frozen
from hase.utils.files import cached
from hase.utils.fingerprint import FROM_SHEET, Machine, Target
from hase.utils.processes import MIB

SESSION_BYTES, NODE_BYTES = 2.4 * MIB, 0.011 * MIB  # a CPU session's own memory, and per node
LOADED_BASE_BYTES = 2 * MIB  # left in the heap after loading the graph itself
# What CUDA's libraries hold for a session: 64 MiB when it is opened and 64 MiB when it is first bound (cuBLAS and cuDNN), and
# 21 MiB of code that they load in the process. Medians of 111 sessions of 37 models; those of onnxruntime-genai hold the same.
LIBRARIES_MIB = 149.0
TRIED_ORDERS = 5  # of loading the weights
KEPT_KERNELS = 100_000  # in the cache; a hundred bytes each
_weights: dict[str, tuple[tuple[int, int, bool], ...]] = {}  # the cache of `_kernel_weights`, by kernel id


class Memory(Frozen):
    """The memory that a session holds at the peak of its runs, in MiB: of the process on a CPU, of the device on CUDA.

    Attributes:
        weights_mib: constants of the optimised graph.
        activations_mib: inputs, outputs and intermediate tensors alive at the peak.
        arena_mib: the arena's surplus.
        workspace_mib: on a CPU the session's graph and kernels; on CUDA what libraries keep.
        loading_mib: what loading leaves free in a CPU's heap; 0 on CUDA.
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
        """The least memory with which a run succeeds: in need, the arena takes smaller regions (ONNX Runtime's bfc_arena.cc:
        Extend)."""
        return self.weights_mib + self.activations_mib + (self.workspace_mib or 0.0)


def peak_memory(record: ModelRecord, workspace_mib: float | None = None, layouts: Mapping[str, Layout] | None = None,
                excluded: Collection[str] = ()) -> Memory:
    """Predicts the peak memory of a model's session. By default, `workspace_mib` is estimated and `layouts` are computed.
    `excluded` is as for `buffers_of_run`."""
    if layouts is None:
        layouts = layouts_of(record, record.flavour.device)
    run = buffers_of_run(record, layouts, excluded, keeps_dead=runtime_named(record.flavour.runtime).keeps_arena)
    activations, node_layouts = live_activations(record, run, excluded), [layouts[node.kernel_id] for node in record.nodes]
    arena, workspace, loading = _surplus_bytes(record, activations, run, node_layouts)
    if workspace_mib is None:
        workspace_mib = workspace / MIB
    weights, live = record.weight_bytes / MIB, activations.peak_bytes / MIB
    return Memory(weights_mib=weights, activations_mib=live, arena_mib=arena / MIB, workspace_mib=workspace_mib,
                  loading_mib=loading / MIB, peak_mib=weights + live + arena / MIB + workspace_mib)


def _surplus_bytes(record: ModelRecord, activations: Activations, run: Sequence[NodeBuffers],
                   node_layouts: Sequence[Layout]) -> tuple[float, float, float]:
    """Bytes of the arena's surplus, of what the session or libraries hold, and of what loading leaves in the heap."""
    if not runtime_named(record.flavour.runtime).keeps_arena:
        return 0.0, 0.0, 0.0
    if record.flavour.device == "cuda":
        inputs = sum(tensor.bytes for tensor in record.inputs.values())
        taken = gpu_arena_bytes(record, run, node_layouts) + inputs
        return max(taken - record.weight_bytes - activations.peak_bytes, 0.0), LIBRARIES_MIB * MIB, 0.0
    used = activations.caller_bytes + cpu_arena_bytes(run, [layout.scratch_bytes for layout in node_layouts])
    return (max(used - activations.peak_bytes, 0), SESSION_BYTES + NODE_BYTES * len(record.nodes),
            LOADED_BASE_BYTES + sum(layout.loading_bytes for layout in node_layouts))


def cpu_arena_bytes(run: Sequence[NodeBuffers], scratch_bytes: Sequence[int]) -> int:
    """Bytes of a CPU's arena that were ever in use: by a first run, tensor by tensor, and a second one in one block."""
    arena, block = Arena(), TensorBlock()
    lay_out(arena, run, scratch_bytes)
    lay_out(block, run)
    if block.size:
        arena.allocate(block.size)
    if largest := max(scratch_bytes, default=0):
        arena.allocate(largest)
    return arena.used_bytes


GPU_MEMORY_MIB = {"NVIDIA H200": 143771.0}  # by device name, as nvidia-smi shows it


def device_memory_mib(target: Target, machines: Sequence[Machine]) -> float | None:
    """The memory of a target's device in MiB; None if unknown. For a CPU, that of the measured machine with the least."""
    if target.flavour.device == "cpu":
        return min((1024 * machine.memory_gib for machine in machines), default=None)
    return GPU_MEMORY_MIB.get(target.device_name) or gpu_memory_mib(target.device_name.removesuffix(FROM_SHEET))


def memory_warnings(memory: Memory, device_mib: float | None) -> tuple[str, ...]:
    """A warning if a model's peak exceeds the memory of its device."""
    if device_mib is None or memory.peak_mib <= device_mib:
        return ()
    has = f"the device has {device_mib / 1024:.4g} GiB"
    if memory.least_mib > device_mib:
        return (f"it can't run there: it needs at least {memory.least_mib / 1024:.4g} GiB of memory, and {has}; the latency is "
                "one that no run has",)
    return (f"it does not fit in the memory: its peak is {memory.peak_mib / 1024:.4g} GiB, and {has}. It can run only if ONNX "
            f"Runtime gets along with less, {memory.least_mib / 1024:.4g} GiB at least",)


def gpu_weight_bytes(record: ModelRecord) -> Mapping[str, int]:
    """Bytes of each constant that nodes read from the GPU's memory, in order of first use. A recurrent layer also keeps a copy
    in cuDNN's order."""
    weights: dict[str, int] = {}
    kernel_weights = {name: cached(_weights, name, partial(_kernel_weights, kernel), KEPT_KERNELS)
                      for name, kernel in record.kernels.items()}
    for node in record.nodes:
        if node.provider == "cuda":
            for index, size, twice in kernel_weights[node.kernel_id]:
                if index < len(node.inputs):
                    weights.setdefault(node.inputs[index], size)
                    if twice:
                        weights.setdefault(f"{node.inputs[index]}/{node.name}", size)
    return weights


def _kernel_weights(kernel: Kernel) -> tuple[tuple[int, int, bool], ...]:
    """A kernel's inputs that are weights on the GPU: index, bytes, and whether they are held twice."""
    placed = cuda_kernel(kernel.op_type, kernel.domain, kernel.opset, [tensor.dtype for tensor in kernel.inputs],
                         [tensor.dtype for tensor in kernel.outputs])
    on_host = placed.host_inputs if placed else ()
    recurrent = operator_row(kernel.op_type).operator_class == "recurrent"
    return tuple((index, tensor.bytes, recurrent) for index, tensor in enumerate(kernel.inputs)
                 if tensor.constant and index not in on_host)


def gpu_arena_bytes(record: ModelRecord, run: Sequence[NodeBuffers], layouts: Sequence[Layout]) -> float:
    """Bytes that a session's arena takes from a GPU for its weights and two runs. The first run allocates tensor by tensor, the
    second one in one block. The session allocates its outputs, and those of the previous run stay until a run ends. Weights are
    loaded in the order of a hash table, which differs between sessions and changes what fits into a region. So the result is
    the median of several orders."""
    weights = [chunk_bytes(size) for size in gpu_weight_bytes(record).values()]
    block = TensorBlock()
    lay_out(block, run)
    changes, scratch = [], []  # at nodes that change the arena
    for index, (buffers, layout) in enumerate(zip(run, layouts, strict=True)):
        if buffers.caller_bytes:
            buffers = buffers._replace(created=[*buffers.created, (f"output {index}", buffers.caller_bytes)])
        if buffers.created or buffers.freed or layout.scratch_bytes:
            changes.append(buffers)
            scratch.append(layout.scratch_bytes)
    second_run = [size for size in (block.size, max(scratch, default=0), *(buffers.caller_bytes for buffers in run)) if size]
    taken: list[int] = []
    for order in _loading_orders(len(weights)):
        arena = Arena()
        arena.allocate_weights(map(weights.__getitem__, order))
        lay_out(arena, changes, scratch)
        for size in second_run:
            arena.allocate(size)
        bisect.insort(taken, arena.reserved_bytes)
        left, middle = TRIED_ORDERS - len(taken), TRIED_ORDERS // 2
        if left <= middle and taken[middle - left] == taken[middle]:
            break  # this is the median, whatever the other orders take
    return float(taken[TRIED_ORDERS // 2])


@lru_cache(maxsize=1024)
def _loading_orders(count: int) -> tuple[tuple[int, ...], ...]:
    """TRIED_ORDERS random orders of `count` weights, the same in each process."""
    indices, shuffle = list(range(count)), random.Random(0).shuffle
    orders = []
    for _ in range(TRIED_ORDERS):
        shuffle(indices)
        orders.append(tuple(indices))
    return tuple(orders)
