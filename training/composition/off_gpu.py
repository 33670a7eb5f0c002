"""What a CUDA session does off the GPU: copies between host and GPU, and the nodes that the CPU provider runs.

Copies were measured once on an NVIDIA H200 (recipes/cuda_kernels/measure_copies.py, ONNX Runtime 1.31.1, Intel Xeon host): a
copy to the host fills pinned memory while the GPU's stream goes on, and the host waits for it; a copy to the GPU reads pageable
memory, which holds the host up. What either costs besides is what a node with one launch costs.

What the CPU provider's kernels take on such a host was not measured: it is guessed, and every such time is marked as estimated.
"""

from __future__ import annotations

from benchmark.runtimes.ort.control_flow import loop_waits
from ort_analysis.cuda.capture import COPIES
from ort_analysis.records.kernel_costs import is_control_flow
from ort_analysis.records.kernel_record import Kernel
from training.kernels.uncertainty import operator_class

TO_HOST_BYTES_PER_MS = 54e6  # 16 MiB to 256 MiB: 53 to 54 GB/s
TO_GPU_BYTES_PER_MS = 12.4e6  # 1 MiB to 16 MiB: 12.3 to 12.5 GB/s; larger ones 8 to 9
HOST_KERNEL_MS = 0.001  # of a kernel that does next to nothing: a guess, as are the two rates
HOST_FLOPS_PER_MS = 150e6
HOST_BYTES_PER_MS = 10e6
HOST_RANGE = (0.2, 6.0)  # between which multiples of the guess a CPU kernel's time is taken to lie: a choice
SERIAL_RANGE = (0.2, 30.0)  # the same of kernels that take one step after another, or of which nothing is known


def host_range(kernel: Kernel) -> tuple[float, float]:
    """Between which multiples of `host_kernel_ms` a kernel's time is taken to lie."""
    return SERIAL_RANGE if operator_class(kernel) in ("recurrent", "other") else HOST_RANGE


def is_copy(kernel: Kernel) -> bool:
    """Whether a kernel is a copy between host and GPU that ONNX Runtime inserted."""
    return kernel.op_type in COPIES


def is_off_gpu(kernel: Kernel, provider: str) -> bool:
    """Whether a node of a CUDA session, run by `provider`, is the CPU provider's, a copy, or reads but a tensor's shape."""
    return provider == "cpu" or is_copy(kernel) or reads_shape(kernel)


def reads_shape(kernel: Kernel) -> bool:
    """Whether it gives the GPU nothing to do, since a tensor's shape is known to the host."""
    return kernel.op_type in ("Shape", "Size") and not kernel.domain


def to_host(kernel: Kernel) -> bool:
    """Whether it is a copy to the host, which waits for the GPU."""
    return kernel.op_type == "MemcpyToHost"


def on_host(kernel: Kernel, provider: str) -> bool:
    """Whether the time of a node of a CUDA session is the host's: that of nodes with bodies, and of what is off the GPU but for
    copies to the host."""
    return is_control_flow(kernel) or (is_off_gpu(kernel, provider) and not to_host(kernel))


def waits_for_gpu(kernel: Kernel) -> bool:
    """Whether the host waits there until the GPU has done all that it was given."""
    return to_host(kernel) or loop_waits(kernel)


def copy_ms(kernel: Kernel) -> float:
    """How long a copy moves data, in ms: on the GPU's track to the host, on the host's to the GPU."""
    return kernel.bytes_written / (TO_HOST_BYTES_PER_MS if to_host(kernel) else TO_GPU_BYTES_PER_MS)


def host_kernel_ms(kernel: Kernel) -> float:
    """A guess at how long the CPU provider takes for a kernel in a CUDA session, in ms; 0 where it only renames a tensor or
    reads its shape."""
    if not kernel.moves_data or reads_shape(kernel):
        return 0.0
    bytes_moved = kernel.bytes_read + kernel.bytes_written
    return HOST_KERNEL_MS + max(kernel.flops / HOST_FLOPS_PER_MS, bytes_moved / HOST_BYTES_PER_MS)
