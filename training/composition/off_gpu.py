"""The nodes of a CUDA session that are not GPU kernels: copies between host and GPU, and the nodes that the CPU provider runs.

Also those GPU kernels at which the host waits, since the size of their output depends on data. What all of these cost was
measured for some targets (host_side.py). Where the CPU provider's kernels were not, their times are guessed here, and marked as
estimated everywhere.
"""

from __future__ import annotations

from records.kernel_costs import is_control_flow
from records.kernel_record import Kernel, ModelRecord
from runtimes.ort.cuda.capture import COPIES
from training.kernels.operator_classes import operator_class

HOST_KERNEL_MS = 0.001  # of a kernel that does next to nothing; a guess, like the two rates
HOST_FLOPS_PER_MS = 150e6
HOST_BYTES_PER_MS = 10e6
# Of each number that a slow kernel reads; a choice. On a Xeon of 16 threads Atan takes 2 ns, Unique 5, Multinomial 10, Asinh 25
# and STFT 100 (geometric mean 12; 8 with Col2Im, which takes 0.9 but only adds and moves).
SLOW_MS = 8e-6
FUNCTIONS = frozenset({"Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Sinh", "Tan"})
HOST_RANGE = (0.2, 6.0)  # plausible range of a CPU kernel's time, as multiples of the guess; a choice
WAITING = ("NonZero", "NonMaxSuppression", "Compress")  # of ONNX Runtime 1.31: their kernels copy a size to the host
SERIAL_RANGE = (0.2, 30.0)  # the same for kernels of serial steps (recurrent ones) and of unknown operators


def is_slow(kernel: Kernel) -> bool:
    """Whether a kernel is of an operator of ONNX's own set that the CPU provider computes number by number, such as most that
    CUDA lacks: it chooses, sorts or transforms, or it is a function that takes many steps."""
    slow = operator_class(kernel) == "other" or kernel.op_type in FUNCTIONS
    return slow and not kernel.domain and kernel.op_type not in ("Col2Im", "DynamicQuantizeLinear")


def host_range(kernel: Kernel) -> tuple[float, float]:
    """The plausible range of a kernel's time, as multiples of `guessed_ms`."""
    return SERIAL_RANGE if is_slow(kernel) or operator_class(kernel) in ("recurrent", "other") else HOST_RANGE


def is_copy(kernel: Kernel) -> bool:
    """Whether a kernel is a copy between host and GPU that ONNX Runtime inserted."""
    return kernel.op_type in COPIES


def is_off_gpu(kernel: Kernel, provider: str) -> bool:
    """Whether a node of a CUDA session that `provider` runs is no GPU kernel: the CPU provider runs it, or it is a copy, or it
    only reads a tensor's shape."""
    return provider == "cpu" or is_copy(kernel) or reads_shape(kernel)


def reads_shape(kernel: Kernel) -> bool:
    """Whether a kernel only reads a tensor's shape, which the host knows, so that the GPU has nothing to do."""
    return kernel.op_type in ("Shape", "Size") and not kernel.domain


def to_host(kernel: Kernel) -> bool:
    """Whether a kernel is a copy to the host, which waits for the GPU."""
    return kernel.op_type == "MemcpyToHost"


def on_host(kernel: Kernel, provider: str) -> bool:
    """Whether the time of a node of a CUDA session is the host's: true of nodes with bodies, and of nodes that are no GPU
    kernel, except copies to the host."""
    return is_control_flow(kernel) or (is_off_gpu(kernel, provider) and not to_host(kernel))


def waits_inside(kernel: Kernel) -> bool:
    """Whether a GPU kernel reads from the GPU how large its output is, so that the host waits."""
    return kernel.op_type in WAITING and not kernel.domain


def reading_loops(record: ModelRecord) -> set[str]:
    """The ids of those Loops at which the host waits after each trip, since their bodies make the condition on the GPU: a
    single truth value that no node of the body reads."""
    found = set()
    for loop in record.nodes:
        if record.kernel_of(loop).op_type != "Loop":
            continue
        body = [node for node in record.nodes if node.inside == loop.name]
        read = {name for node in body for name in node.inputs}
        if any(node.provider == "cuda" and set(node.outputs).isdisjoint(read) and is_condition(record.kernel_of(node))
               for node in body):
            found.add(loop.kernel_id)
    return found


def is_condition(kernel: Kernel) -> bool:
    """Whether a kernel makes a single truth value."""
    return len(kernel.outputs) == 1 and kernel.outputs[0].dtype == "bool" and kernel.outputs[0].elements == 1


def takes_no_time(kernel: Kernel) -> bool:
    """Whether a kernel of the CPU provider only renames a tensor or reads its shape."""
    return not kernel.moves_data or reads_shape(kernel)


def guessed_ms(kernel: Kernel) -> float:
    """A guess at how long the CPU provider takes for a kernel of a CUDA session (ms)."""
    if takes_no_time(kernel):
        return 0.0
    bytes_moved = kernel.bytes_read + kernel.bytes_written
    numbers = sum(tensor.elements for tensor in kernel.activations)
    return HOST_KERNEL_MS + max(kernel.flops / HOST_FLOPS_PER_MS, bytes_moved / HOST_BYTES_PER_MS,
                                numbers * SLOW_MS if is_slow(kernel) else 0.0)
