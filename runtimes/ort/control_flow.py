"""The host's own time for a Loop, an If or a Scan, besides the nodes of its body: fixed constants.

On a CPU they were read off loops of one and of four Adds of eight numbers (ONNX Runtime 1.31, two cores of a Xeon): 0.3 to
0.7 µs per trip besides the body's nodes. What a trip costs on an NVIDIA H200 was fitted manually: 24 trips of a Scan, an If,
and 12 and 10 trips of Loops whose body makes the condition on the GPU. The host reads such a condition after each trip, and so
waits for the GPU. A Loop whose body leaves the condition alone, as torch exports a `for`, costs next to nothing besides its
body (12 to 31 trips of four decoders and a sampler of points).
"""

from __future__ import annotations

from records.kernel_record import Kernel

CPU_TRIP_MS = {"Loop": 0.0006, "Scan": 0.0004, "If": 0.0005}
CUDA_TRIP_MS = {"Loop": 0.001, "Scan": 0.017, "If": 0.001}
CONDITION_MS = 0.018  # of a Loop on a GPU that reads its condition from there, besides waiting
RANGE = (0.5, 2.0)  # assumed limits of a trip's time, as multiples of these constants


def trip_ms(kernel: Kernel, device: str, reads_condition: bool = False) -> float:
    """The host's time per trip, in ms; on a GPU more where the host reads from there whether a Loop goes on."""
    if device != "cuda":
        return CPU_TRIP_MS[kernel.op_type]
    return CUDA_TRIP_MS[kernel.op_type] + (CONDITION_MS if reads_condition else 0.0)
