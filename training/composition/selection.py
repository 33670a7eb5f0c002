"""The GPU's time for a NonMaxSuppression, which depends on how many boxes it keeps.

A kernel measured alone gets random boxes and keeps another number of them, so neither its time nor what is learned from it
holds in a detector. These constants were fitted to the spans of 15 such nodes in detectors of five families on an NVIDIA H200
(recipes/cuda_kernels/profile_nodes.py, ONNX Runtime 1.31.1), with 507 to 27,000 boxes of which 3 to 16,405 were kept: boxes
are looked at one after another, and each that is kept is compared with all. The mean error is 1.6 %, and 3.3 % with each
family left out of the fit.
"""

from __future__ import annotations

from ort_analysis.records.kernel_record import Kernel

BASE_MS = 0.07
BOX_MS = 1.108e-4
KEPT_MS = 1.850e-4
PAIR_MS = 1.353e-8  # for each box that is kept, and each box
MANY_BOXES = 8192  # from here on they are sorted with more launches
LAUNCHES = (17.0, 28.0)  # with fewer boxes, and with more
RANGE = (0.7, 1.5)  # plausible range of the time, as multiples; a choice


def selects_boxes(kernel: Kernel) -> bool:
    """Whether a kernel is a NonMaxSuppression whose numbers of boxes are known."""
    return (kernel.op_type == "NonMaxSuppression" and not kernel.domain and len(kernel.inputs) > 1
            and len(kernel.inputs[1].shape) == 3 and len(kernel.outputs[0].shape) == 2)


def selection_ms(kernel: Kernel) -> float:
    """The GPU's time, ms; several images and classes are worked on one after another."""
    images, classes, boxes = kernel.inputs[1].shape
    rounds, kept = images * classes, kernel.outputs[0].shape[0]
    return rounds * (BASE_MS + BOX_MS * boxes) + kept * (KEPT_MS + PAIR_MS * boxes)


def selection_launches(kernel: Kernel) -> float:
    """The number of launches."""
    images, classes, boxes = kernel.inputs[1].shape
    return images * classes * LAUNCHES[boxes > MANY_BOXES]
