"""What a session takes from a GPU's memory: its arena, and the libraries.

Weights, intermediate tensors and outputs lie in ONNX Runtime's arena (arena.py), whose regions double. It loads the weights in
the order of a hash table, which differs from session to session, and so does what does not fit into a region any more. So
several orders are tried, and the median counts.

What a kernel needs while it runs is taken from the arena, too (scratch.py).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

from hase.inference.core.arena import Arena, Block
from hase.inference.core.buffers import Layout, NodeBuffers, lay_out
from hase.ort_analysis.cuda.placement import cuda_kernel
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.operators import operator_row
from hase.utils.files import cached

# Of a session: 64 MiB when it is opened and 64 MiB when it is first bound (cuBLAS and cuDNN), and 21 MiB of code that the
# libraries load in the process. Medians of 111 sessions of 37 models; those of onnxruntime-genai hold the same.
LIBRARIES_MIB = 149.0
ORDERS = 5  # of the weights
KEPT_KERNELS = 100_000  # whose weights are known; a hundred bytes each
_weights: dict[str, tuple[tuple[int, int, bool], ...]] = {}  # by kernel id


def weight_bytes_of(record: ModelRecord) -> Mapping[str, int]:
    """The constants that nodes read from the GPU's memory, in the order in which they first do, with their bytes. A recurrent
    layer keeps its own in the order that cuDNN wants, too."""
    weights: dict[str, int] = {}
    for node in record.nodes:
        if node.provider == "cuda":
            of_kernel = cached(_weights, node.kernel_id, partial(_weights_of, record.kernel_of(node)), KEPT_KERNELS)
            for place, size, twice in of_kernel:
                if place < len(node.inputs):
                    weights.setdefault(node.inputs[place], size)
                    if twice:
                        weights.setdefault(f"{node.inputs[place]}/{node.name}", size)
    return weights


def _weights_of(kernel: Kernel) -> tuple[tuple[int, int, bool], ...]:
    """The inputs of a kernel that are weights on the GPU: the place, the bytes, and whether they are there twice."""
    placed = cuda_kernel(kernel.op_type, kernel.domain, kernel.opset, [tensor.dtype for tensor in kernel.inputs],
                         [tensor.dtype for tensor in kernel.outputs])
    on_host = placed.host_inputs if placed else ()
    recurrent = operator_row(kernel.op_type).operator_class == "recurrent"
    return tuple((place, tensor.bytes, recurrent) for place, tensor in enumerate(kernel.inputs)
                 if tensor.constant and place not in on_host)


def taken_bytes(record: ModelRecord, run: Sequence[NodeBuffers], layouts: Sequence[Layout]) -> float:
    """What the arena of a session takes from the device, bytes: with its weights, a first run tensor by tensor, and a second
    one, whose tensors lie in one block. It makes its outputs itself, and those of the run before are there until it ends.

    Args:
        record: the model.
        run: the buffers of each node.
        layouts: of each node.
    """
    weights, scratch = list(weight_bytes_of(record).values()), [layout.scratch_bytes for layout in layouts]
    block = Block()
    lay_out(block, run, [0] * len(run))
    with_outputs = [buffers._replace(made=[*buffers.made, (f"output {place}", buffers.lent_bytes)]) if buffers.lent_bytes else
                    buffers for place, buffers in enumerate(run)]
    shuffle, taken = random.Random(0).shuffle, []
    for _ in range(ORDERS):
        shuffle(weights)
        arena = Arena()
        arena.keep(weights)
        lay_out(arena, with_outputs, scratch)
        for size in (block.size, max(scratch, default=0), *(buffers.lent_bytes for buffers in run)):
            if size:
                arena.allocate(size)
        taken.append(arena.taken)
        if taken.count(arena.taken) > ORDERS / 2:  # so it is the median, whatever the other orders take
            break
    return float(median(taken))
