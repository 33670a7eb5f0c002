"""Recognises nodes of a CUDA session whose time is not just that of a GPU kernel, and guesses the time of some.

- Copies between host and GPU, and nodes on the CPU provider. Their costs were measured for some targets (host_side.py).
  Unmeasured CPU kernels get a guess from here, marked as estimated.
- GPU kernels at which the host waits, since the size of their output depends on data.
- GPU kernels that select sequentially: NonMaxSuppression, and TopK in long rows.
"""

from __future__ import annotations

import math

from hase.records.kernel_costs import is_control_flow
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.operators import operator_row

HOST_KERNEL_MS = 0.001  # of a kernel that does next to nothing; a guess, like the rate below
HOST_FLOPS_PER_MS = 150e6
# Medians by operator of sampled kernels (of no model; recipes/h200/collect_kernels.sh host) on a Xeon of 16 threads, in a
# nanosecond: matrix products and convolutions of eight-bit numbers do 300 to 1,500 operations where activations are unsigned,
# and 30 to 140 where they are signed; matrix products of few rows, roundings and sums move 27 to 55 bytes.
EIGHT_BIT_FLOPS_PER_MS = 700e6
HOST_BYTES_PER_MS = 30e6
# For each number that a slow kernel (`is_slow`) reads; a choice. On a Xeon of 16 threads Atan takes 2 ns, Unique 5, Multinomial
# 10, Asinh 25 and STFT 100 (geometric mean 12; 8 with Col2Im, which takes 0.9 but only adds and moves).
SLOW_MS = 8e-6
HOST_RANGE = (0.2, 6.0)  # plausible range of a CPU kernel's time, as multiples of the guess; a choice
SERIAL_RANGE = (0.2, 30.0)  # the same for slow kernels, recurrent ones and unknown operators
# The same for predicted kernels of the CPU that move LEAST_BYTES or more, as multiples of the prediction. Nine of ten that were
# held out take 0.5 to 2.3 times as long as predicted. They were measured one after another in large graphs, and a small model
# finds its weights in the caches: products and convolutions of whole numbers then take as little as a third (16 of them, on two
# cores of a Xeon). The range is widened to include `guessed_host_ms`: a convolution of 16 places and 512 channels was predicted
# twelve times as long as its operations take.
PREDICTED_HOST_RANGE, LEAST_BYTES = (0.3, 2.3), 1 << 14
# NonMaxSuppression depends on how many boxes it keeps. A kernel measured alone got random boxes and kept another number of
# them, so neither its time nor what is learned from it holds in a detector. These constants were fitted to the spans of 15 such
# nodes in detectors of five families on an NVIDIA H200 (recipes/cuda_kernels/profile_nodes.py, ONNX Runtime 1.31.1), with 507
# to 27,000 boxes of which 3 to 16,405 were kept: boxes are looked at one after another, and each that is kept is compared with
# all. The mean error is 1.6 %, and 3.3 % with each family left out of the fit.
BASE_MS = 0.07  # for each class of each image
BOX_MS = 1.108e-4  # for each box of these
KEPT_MS = 1.850e-4  # for each box that is kept
PAIR_MS = 1.353e-8  # for each pair of a kept box and any box
MANY_BOXES = 8192  # more are sorted with more launches
SELECTION_LAUNCHES = (17.0, 28.0)  # for each class of each image, with up to MANY_BOXES and with more
SELECTION_RANGE = (0.7, 1.5)  # plausible range of the time, also of TopK's, as multiples of it; a choice
# TopK: where ONNX Runtime selects more than 64 by radix, one block of threads reads a whole row several times, slower where the
# row does not fit into the caches next to it. These constants come from 20 such kernels of 675 to 43,200 numbers, measured
# alone, and from how long the host waited after three of up to 1.2 million in a detector.
TOPK_MS = 0.024  # for each round of ROWS_AT_ONCE rows
NUMBER_MS = 2.9e-6  # for each number of a row
UNCACHED_MS = 2.4e-6  # for each number beyond CACHED_NUMBERS, in addition
CACHED_NUMBERS = 30_000
LEAST_SELECTED = 65  # fewer are selected in another way
LEAST_NUMBERS = 512  # fewer are sorted
ROWS_AT_ONCE = 132  # multiprocessors of an H200


def is_slow(kernel: Kernel) -> bool:
    """Whether the CPU provider computes it element by element, as most standard operators that CUDA lacks."""
    row = operator_row(kernel.op_type)
    return not kernel.domain and (row.operator_class == "other" if row.slow_on_cpu is None else row.slow_on_cpu)


def host_range(kernel: Kernel) -> tuple[float, float]:
    """The plausible range of a CPU kernel's time, as multiples of `guessed_host_ms`."""
    serial = operator_row(kernel.op_type).operator_class in ("recurrent", "other")
    return SERIAL_RANGE if serial or is_slow(kernel) else HOST_RANGE


def is_copy(kernel: Kernel) -> bool:
    """Whether a kernel is a copy between host and GPU that ONNX Runtime inserted."""
    return operator_row(kernel.op_type).copies


def is_off_gpu(kernel: Kernel, provider: str) -> bool:
    """Whether a node of a CUDA session is no GPU kernel: a copy, a read of a tensor's shape, or a node on the CPU provider."""
    return provider == "cpu" or is_copy(kernel) or reads_shape(kernel)


def reads_shape(kernel: Kernel) -> bool:
    """Whether a kernel only reads a tensor's shape, which the host knows: the GPU has nothing to do."""
    return operator_row(kernel.op_type).launches == "none" and not kernel.domain


def copies_to_host(kernel: Kernel) -> bool:
    """Whether a kernel is a copy to the host, at which the host waits for the GPU."""
    return kernel.op_type == "MemcpyToHost"


def takes_host_time(kernel: Kernel, provider: str) -> bool:
    """Whether a node of a CUDA session takes the host's time: it has a body, or is off the GPU and no copy to the host."""
    return is_control_flow(kernel) or (is_off_gpu(kernel, provider) and not copies_to_host(kernel))


def waits_for_size(kernel: Kernel) -> bool:
    """Whether the host waits at a GPU kernel, to read the size of its output from the GPU."""
    return operator_row(kernel.op_type).waits_for_size and not kernel.domain


def loops_with_gpu_condition(record: ModelRecord) -> set[str]:
    """The Loops (ids) whose condition the host reads from the GPU after each trip: a boolean that no node of the body reads."""
    reading = set()
    for loop in record.nodes:
        if record.kernel_of(loop).op_type != "Loop":
            continue
        body = [node for node in record.nodes if node.inside == loop.name]
        read = {name for node in body for name in node.inputs}
        if any(node.provider == "cuda" and set(node.outputs).isdisjoint(read) and _is_boolean(record.kernel_of(node))
               for node in body):
            reading.add(loop.kernel_id)
    return reading


def _is_boolean(kernel: Kernel) -> bool:
    """Whether a kernel computes a single boolean."""
    return len(kernel.outputs) == 1 and kernel.outputs[0].dtype == "bool" and kernel.outputs[0].elements == 1


def takes_no_time(kernel: Kernel) -> bool:
    """Whether a kernel of the CPU provider only renames a tensor or reads its shape."""
    return not kernel.moves_data or reads_shape(kernel)


def guessed_host_ms(kernel: Kernel) -> float:
    """Guesses how long the CPU provider takes for a kernel of a CUDA session."""
    if takes_no_time(kernel):
        return 0.0
    bytes_moved = kernel.bytes_read + kernel.bytes_written
    numbers = sum(tensor.elements for tensor in kernel.activations)
    flops_per_ms = EIGHT_BIT_FLOPS_PER_MS if kernel.dtype in ("uint8", "int8") else HOST_FLOPS_PER_MS
    return HOST_KERNEL_MS + max(kernel.flops / flops_per_ms, bytes_moved / HOST_BYTES_PER_MS,
                                numbers * SLOW_MS if is_slow(kernel) else 0.0)


def is_box_selection(kernel: Kernel) -> bool:
    """Whether a kernel is a NonMaxSuppression with known numbers of boxes."""
    return (kernel.op_type == "NonMaxSuppression" and not kernel.domain and len(kernel.inputs) > 1
            and len(kernel.inputs[1].shape) == 3 and len(kernel.outputs[0].shape) == 2)


def box_selection_ms(kernel: Kernel) -> float:
    """The GPU's time for NonMaxSuppression, which processes images and classes one after another."""
    images, classes, boxes = kernel.inputs[1].shape
    rounds, kept = images * classes, kernel.outputs[0].shape[0]
    return rounds * (BASE_MS + BOX_MS * boxes) + kept * (KEPT_MS + PAIR_MS * boxes)


def box_selection_launches(kernel: Kernel) -> float:
    """The number of launches that NonMaxSuppression takes."""
    images, classes, boxes = kernel.inputs[1].shape
    return images * classes * SELECTION_LAUNCHES[boxes > MANY_BOXES]


def is_row_selection(kernel: Kernel) -> bool:
    """Whether a kernel is a TopK that selects by radix from long rows along its last axis."""
    if kernel.op_type != "TopK" or kernel.domain or not kernel.inputs[0].shape or not kernel.outputs[0].shape:
        return False
    axis = int(kernel.attributes.get("axis", -1)) % len(kernel.inputs[0].shape)
    return (axis == len(kernel.inputs[0].shape) - 1 and kernel.inputs[0].shape[-1] >= LEAST_NUMBERS
            and kernel.outputs[0].shape[-1] >= LEAST_SELECTED)


def row_selection_ms(kernel: Kernel) -> float:
    """The GPU's time for a TopK of `is_row_selection`, which is one launch."""
    numbers = kernel.inputs[0].shape[-1]
    rounds = math.ceil(kernel.inputs[0].elements / numbers / ROWS_AT_ONCE)
    return rounds * (TOPK_MS + NUMBER_MS * numbers + UNCACHED_MS * max(numbers - CACHED_NUMBERS, 0))
