"""The host's own time for a Loop, an If or a Scan, besides the nodes of its body: fixed constants.

On a CPU they were read off loops of one and of four Adds of eight numbers (ONNX Runtime 1.31, two cores of a Xeon): 0.3 to
0.7 µs per trip besides the body's nodes. On a GPU the host reads a Loop's condition after each trip, and so waits for the
GPU. What a trip costs besides was fitted manually to three models on an NVIDIA H200: 12 trips of a Loop, 24 of a Scan, and
an If.
"""

from __future__ import annotations

from ort_analysis.records.kernel_record import Kernel

CPU_TRIP_MS = {"Loop": 0.0006, "Scan": 0.0004, "If": 0.0005}
CUDA_TRIP_MS = {"Loop": 0.03, "Scan": 0.017, "If": 0.001}
RANGE = (0.5, 2.0)  # assumed limits of a trip's time, as multiples of these constants


def trip_ms(kernel: Kernel, device: str) -> float:
    """The host's time per trip, in ms."""
    return (CUDA_TRIP_MS if device == "cuda" else CPU_TRIP_MS)[kernel.op_type]


def loop_waits(kernel: Kernel) -> bool:
    """Whether the host waits for the GPU after each trip, because it reads whether a Loop goes on."""
    return kernel.op_type == "Loop"
