"""The GPU's time for kernels that select one after another: NonMaxSuppression, and TopK in long rows.

NonMaxSuppression depends on how many boxes it keeps. A kernel measured alone got random boxes and kept another number of them,
so neither its time nor what is learned from it holds in a detector. These constants were fitted to the spans of 15 such nodes
in detectors of five families on an NVIDIA H200 (recipes/cuda_kernels/profile_nodes.py, ONNX Runtime 1.31.1), with 507 to
27,000 boxes of which 3 to 16,405 were kept: boxes are looked at one after another, and each that is kept is compared with all.
The mean error is 1.6 %, and 3.3 % with each family left out of the fit.

Where ONNX Runtime selects more than 64 by radix, one block of threads reads a whole row several times, slower where the row
does not fit into the caches next to it. These constants were read off 20 such kernels of 675 to 43,200 numbers, measured
alone, and off the waiting after three of up to 1.2 million in a detector.
"""

from __future__ import annotations

import math

from records.kernel_record import Kernel

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


TOPK_MS = 0.024
NUMBER_MS = 2.9e-6
FAR_MS = 2.4e-6  # of each number beyond NEAR, in addition
NEAR = 30_000
LEAST_SELECTED = 65  # fewer are selected in another way
LEAST_NUMBERS = 512  # fewer are sorted
ROWS_AT_ONCE = 132  # multiprocessors of an H200


def selects_in_rows(kernel: Kernel) -> bool:
    """Whether a kernel is a TopK that reads long rows, along its last axis, by radix."""
    if kernel.op_type != "TopK" or kernel.domain or not kernel.inputs[0].shape or not kernel.outputs[0].shape:
        return False
    axis = int(kernel.attributes.get("axis", -1)) % len(kernel.inputs[0].shape)
    return (axis == len(kernel.inputs[0].shape) - 1 and kernel.inputs[0].shape[-1] >= LEAST_NUMBERS
            and kernel.outputs[0].shape[-1] >= LEAST_SELECTED)


def row_selection_ms(kernel: Kernel) -> float:
    """The GPU's time for such a TopK, ms; it has one launch."""
    numbers = kernel.inputs[0].shape[-1]
    rounds = math.ceil(kernel.inputs[0].elements / numbers / ROWS_AT_ONCE)
    return rounds * (TOPK_MS + NUMBER_MS * numbers + FAR_MS * max(numbers - NEAR, 0))
