"""Inputs with which a kernel whose output size depends on data puts out as much as it did in the model.

How long such a kernel takes may depend on it: a NonMaxSuppression compares each box that it keeps with all others.
"""

from __future__ import annotations

import math

import numpy as np

from records.kernel_record import Kernel

GRID = 10.0  # distance of boxes that do not overlap
SIDE = 4.0  # of a box


def chosen(kernel: Kernel, position: int) -> np.ndarray | None:
    """The value of an input, not yet of its type; None where any value does, or where no value gives this output."""
    if kernel.domain:
        return None
    make = {("NonZero", 0): _nonzero, ("Compress", 1): _condition, ("NonMaxSuppression", 0): _boxes,
            ("Unique", 0): _repeated}.get((kernel.op_type, position))
    return make(kernel) if make else None


def spread(count: int, places: int) -> np.ndarray:
    """`count` of `places` truth values are true, evenly spread."""
    at = np.arange(places + 1) * min(count, places) // max(places, 1)
    return np.diff(at) > 0


def _nonzero(kernel: Kernel) -> np.ndarray:
    shape = kernel.inputs[0].shape
    return spread(kernel.outputs[0].shape[-1], math.prod(shape)).reshape(shape)


def _condition(kernel: Kernel) -> np.ndarray:
    axis = kernel.attributes.get("axis")
    kept = kernel.outputs[0].shape[int(axis) if axis is not None else 0]
    return spread(kept, kernel.inputs[1].shape[0])


def _repeated(kernel: Kernel) -> np.ndarray | None:
    """As many different values as come out; None along an axis, where rows would have to differ."""
    if kernel.attributes.get("axis") is not None:
        return None
    shape = kernel.inputs[0].shape
    return (np.arange(math.prod(shape)) % max(kernel.outputs[0].shape[0], 1)).reshape(shape)


def _boxes(kernel: Kernel) -> np.ndarray | None:
    """As many places as boxes are kept, on a grid, each taken by boxes that coincide. None with several images or classes."""
    batch, boxes, _ = kernel.inputs[0].shape
    if batch != 1 or kernel.inputs[1].shape[1] != 1:
        return None
    place = np.arange(boxes) % max(kernel.outputs[0].shape[0], 1)
    wide = math.isqrt(boxes) + 1
    corner = GRID * np.stack([place // wide, place % wide], 1)
    return np.concatenate([corner, corner + SIDE], 1)[None]
