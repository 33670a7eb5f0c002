"""Times many kernels in one graph, each under the conditions of a model (kernel_model/building/kernel_models.py).

cuDNN runs the groups of some convolutions in parallel, on its own streams. How far they overlap depends on how fast the host
launches them, and a profiled host is slow. So such kernels are traced again while all their launches wait for the GPU, as in a
model whose host is ahead. This gives the GPU's time independent of the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hase.benchmark.measuring.gpu_trace import alone_on_gpu, preparing_on_gpu, read, record, split_carrier
from hase.benchmark.ort.profile import counted_runs, labels_of, plain_runs_ms, profile_runs
from hase.benchmark.ort.runner import bind, device_binding
from hase.kernel_model.building.dummy_data import random_floats
from hase.kernel_model.building.kernel_models import WRITER, WRITER_OP, Carrier, build_carrier, node_name
from hase.ort_analysis.graph.nodes import shared_caches
from hase.ort_analysis.graph.source import built_kernel
from hase.records.kernel_record import Kernel, Tensor, session_dtype, type_code
from hase.records.measurement import GPU_LABEL, UNPROFILED, Measurement, kernel_names
from hase.records.traces import GpuRun, GpuWork
from hase.runtimes.protocol import Reply, Request
from hase.utils.errors import UserError
from hase.utils.files import temporary_folder
from hase.utils.lazy import torch
from hase.utils.ort_sessions import model_errors, open_session
from hase.utils.timing import covered_us

if TYPE_CHECKING:
    import onnxruntime


ALIGNMENT = 256  # bytes, as CUDA itself places tensors
RANDOM_BYTES = 64 << 20  # of random numbers that the host generates once; a block repeats them
LEAST_BYTES = 4 * RANDOM_BYTES  # of a block
TRACED_RUNS = 5
MOST_QUEUED = 800  # launches that wait for the GPU at a time; a driver holds 1,024, then the host waits, too
INPUTS_WRITTEN = 3  # at most, for a convolution
SPIN_CYCLES = 50_000  # of GPU work per queued launch: 25 us on an H200, twice the host's time for a traced launch


class SharedMemory:
    """A block of random numbers on the GPU per floating type; it grows as inputs need more."""

    def __init__(self) -> None:
        self._blocks: dict[str, Any] = {}

    def address(self, dtype: str, size: int) -> int:
        """GPU address of at least `size` bytes of random numbers of type `dtype`. Needs torch with CUDA."""
        block = self._blocks.get(dtype)
        if block is None or block.numel() * block.element_size() < size:
            self._blocks.pop(dtype, None)
            values = random_floats((RANDOM_BYTES // np.dtype(dtype).itemsize,), dtype).view(np.uint8)  # torch lacks some types
            self._blocks[dtype] = block = torch.from_numpy(values).cuda().repeat(-(-max(size, LEAST_BYTES) // RANDOM_BYTES))
            torch.cuda.synchronize()
        return int(block.data_ptr())

    def bind(self, session: onnxruntime.InferenceSession, carrier: Carrier) -> Callable[[], Any]:
        """A function that runs a carrier once; inputs without a value are read from the start of the block."""
        # a carrier's other outputs are shapes: on the GPU, each would cost a copy that belongs to no kernel
        binding = device_binding(session, carrier.values, "cuda", outputs_on="cpu")
        inputs = [Tensor(dtype=session_dtype(value.type), shape=tuple(value.shape)) for value in session.get_inputs()]
        tensors = {value.name: tensor for value, tensor in zip(session.get_inputs(), inputs, strict=True)
                   if value.name not in carrier.values}
        caches = [name for name in carrier.caches if name in tensors]
        ends: dict[str, int] = {}
        for name, tensor in tensors.items():
            if name not in caches:
                ends[tensor.dtype] = max(ends.get(tensor.dtype, 0), tensor.bytes)
        offsets = dict.fromkeys(tensors, 0)
        for name in caches:
            tensor = tensors[name]
            offsets[name] = -(-ends.get(tensor.dtype, 0) // ALIGNMENT) * ALIGNMENT
            ends[tensor.dtype] = offsets[name] + tensor.bytes
        shared = shared_caches(carrier.model.graph, {})
        blocks = {dtype: self.address(dtype, size) for dtype, size in ends.items()}
        for name, tensor in tensors.items():
            location = type_code(tensor.dtype), list(tensor.shape), blocks[tensor.dtype] + offsets[name]
            binding.bind_input(name, "cuda", 0, *location)
            for output in (output for output, past in shared.items() if past == name):
                binding.bind_output(output, "cuda", 0, *location)
        return functools.partial(session.run_with_iobinding, binding)


@functools.cache
def shared_memory() -> SharedMemory:
    """The block on the GPU that all carriers read from."""
    return SharedMemory()


@functools.cache
def held_stream() -> Any:
    """The stream of sessions whose work is held back. Needs torch with CUDA."""
    return torch.cuda.Stream()


class TracedCarrier(NamedTuple):
    """Measurements of a carrier's kernels, and which kernels run parts in parallel."""

    measurements: list[Measurement]
    side_by_side: list[Measurement]  # label `gpu` of kernels that work on several streams


def time_carrier(request: Request) -> Reply:
    """Times several kernels in one graph: their in-model labels and, if requested, `gpu`.

    Raises UserError if the GPU's work cannot be attributed to kernels; fewer kernels per carrier then help.
    """
    kernels = [built_kernel(Path(path)) for path in request.paths]
    first = run_carrier(kernels, request)
    by_id, gpu_request = {kernel.id: kernel for kernel in kernels}, request.model_copy(update={"labels": (GPU_LABEL,)})
    queued: dict[str, Measurement] = {}
    for group in groups_to_queue(first.side_by_side):
        held_back = run_carrier([by_id[m.id] for m in group], gpu_request, sum(map(launches_with_inputs, group)))
        queued |= {m.id: m for m in held_back.measurements}
    return Reply(measurements=tuple(queued.get(m.id, m) if m.label == GPU_LABEL else m for m in first.measurements))


def launches_with_inputs(measured: Measurement) -> int:
    """Upper bound for the launches of a kernel and of the nodes that write its inputs."""
    return (measured.launches or 0) + INPUTS_WRITTEN


def groups_to_queue(measured: Iterable[Measurement]) -> Iterator[list[Measurement]]:
    """Groups of kernels whose launches can all wait for the GPU; a kernel with too many is left out."""
    group: list[Measurement] = []
    launches = 0
    for m in measured:
        needed = launches_with_inputs(m)
        if needed > MOST_QUEUED:
            continue
        if launches + needed > MOST_QUEUED:
            yield group
            group, launches = [], 0
        group.append(m)
        launches += needed
    if group:
        yield group


def hold_back(launches: int) -> None:
    """Keeps the GPU busy until this number of launches waits on the `held_stream`. Needs torch with CUDA."""
    if launches:
        with torch.cuda.stream(held_stream()):
            torch.cuda._sleep(launches * SPIN_CYCLES)


def run_carrier(kernels: Sequence[Kernel], request: Request, queued: int = 0) -> TracedCarrier:
    """Opens and runs a carrier of some kernels; with `queued`, the GPU begins only when that many launches wait."""
    on_gpu = request.device == "cuda"
    options = request.provider_options | ({"user_compute_stream": str(held_stream().cuda_stream)} if queued else {})
    carrier = build_carrier(kernels, request.device, with_floats=not on_gpu)
    with temporary_folder() as folder, model_errors("carrier"):
        with preparing_on_gpu(request.turns):
            session = open_session(carrier.model.SerializeToString(), request.device, optimize="none", name="carrier",
                                   profile_prefix=folder / "carrier", provider_options=options, weights=carrier.weights)
            run = shared_memory().bind(session, carrier) if on_gpu else bind(
                session, carrier.values, "cpu", "device", shared_caches(carrier.model.graph, {}))
            counted = profile_runs(run, request.effort, request.device)
        with alone_on_gpu(request.turns):
            recording = record([run] * TRACED_RUNS, lambda: hold_back(queued)) if GPU_LABEL in request.labels else None
        traced = read(recording) if recording else []
        runs = counted_runs(session.end_profiling(), [*counted, *[False] * len(traced)])
        nodes_ms = median(plain_runs_ms(run, counted, request.device)) if UNPROFILED in request.labels else None
    ids = {node_name(number): kernel.id for number, kernel in enumerate(kernels)}
    like_writers = {node_name(number) for number, kernel in enumerate(kernels) if kernel.op_type == WRITER_OP}
    split = split_runs(traced, [node.node for node in runs[-1].nodes], ids, like_writers)
    in_model = [m for m in labels_of(runs, ids, "carrier", "carrier", nodes_ms) if m.label in request.labels]
    parallel = {ids[name] for by_node in split for name, work in by_node.items()
                if len({piece.stream for piece in work}) > 1}
    gpu = gpu_measurements(split, ids, bool(queued))
    return TracedCarrier([*in_model, *gpu], [m for m in gpu if m.id in parallel])


def split_runs(traced: Sequence[GpuRun], executed: Sequence[str], ids: Collection[str],
               like_writers: Collection[str] = ()) -> list[dict[str, tuple[GpuWork, ...]]]:
    """The GPU's work for each kernel of a carrier, by node name, in each run. `executed` has the node names in run order;
    `like_writers` are kernels with the same operator as the nodes that write inputs."""
    order = [name for name in executed if name in ids or name.startswith(WRITER)]
    split = [work for run in traced if (work := split_carrier(run, order, WRITER, like_writers)) is not None]
    if len(split) < len(traced):
        raise UserError("carrier: the GPU's work can't be assigned to kernels")
    return split


def gpu_measurements(split: Sequence[Mapping[str, Sequence[GpuWork]]], ids: Mapping[str, str],
                     queued: bool) -> list[Measurement]:
    """The GPU's times of a carrier's kernels (label `gpu`), from the GPU's work by node name in each run."""
    return [Measurement(subject="kernel", id=ids[name], label=GPU_LABEL, context="carrier", place="carrier", queued=queued,
                        samples_ms=tuple(round(covered_us(work[name]) / 1000, 6) for work in split),
                        launches=len(split[0][name]), cuda_kernels=kernel_names([work.name for work in split[0][name]]))
            for name in (split[0] if split else ())]
