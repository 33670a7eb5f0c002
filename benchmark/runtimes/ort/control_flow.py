"""What a Loop, an If or a Scan takes the host itself, besides the nodes of its body: stated constants.

On a CPU they were read off loops of one and four Adds of eight numbers (ONNX Runtime 1.31, two cores of a Xeon): 0.3 to 0.7 µs
a trip besides the body's nodes. On a GPU the host reads a Loop's condition after each trip, and so waits for the GPU; what a
trip costs besides was fitted by eye to three models on an NVIDIA H200: 12 trips of a Loop, 24 of a Scan, and an If.
"""

from __future__ import annotations

from ort_analysis.records.kernel_record import Kernel

CPU_TRIP_MS = {"Loop": 0.0006, "Scan": 0.0004, "If": 0.0005}
CUDA_TRIP_MS = {"Loop": 0.03, "Scan": 0.017, "If": 0.001}
RANGE = (0.5, 2.0)  # between which multiples of these a trip is taken to lie: a choice


def trip_ms(kernel: Kernel, device: str) -> float:
    """What each trip takes the host, in ms."""
    return (CUDA_TRIP_MS if device == "cuda" else CPU_TRIP_MS)[kernel.op_type]


def loop_waits(kernel: Kernel) -> bool:
    """Whether the host waits for the GPU after each trip: it reads whether a Loop goes on."""
    return kernel.op_type == "Loop"
