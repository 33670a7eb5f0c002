"""Numbers that say which form of an operator a kernel is: along which axes it works, which of them it broadcasts, how it moves.

Libraries choose their algorithms by such things. Axes are counted from the last one, which lies next to itself in memory: a
set of axes is the sum of 1 for the last, 2 for the one before, 4, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from hase.records.kernel_record import Kernel, KernelInput, input_at
from hase.records.kernel_types import channels_last, worked_along
from hase.records.operators import operator_row

FORM_GROUPS: Mapping[str, tuple[str, ...]] = {
    "form": ("axes", "axis_size", "axis_size_out", "log_behind_axes", "broadcast_axes", "log_steps", "mode", "out_rank"),
    "volume": ("depth", "kernel_depth", "last_stride")}
FORM_CODES = frozenset({"axes", "broadcast_axes", "mode", "out_rank"})  # sets of axes, and places in a list
MODES = ("constant", "reflect", "edge", "wrap", "nearest", "linear", "cubic", "asymmetric", "half_pixel", "align_corners",
         "pytorch_half_pixel", "reverse", "bidirectional")
MODE_ATTRIBUTES = ("mode", "coordinate_transformation_mode", "direction")
MOST_AXES = 8  # that a set holds


def form_features(kernel: Kernel) -> list[float]:
    """The values of FORM_GROUPS, in its order; 0 for what a kernel does not have."""
    shape, out = (next((tensor.shape for tensor in tensors if tensor.dtype), ()) for tensors in (kernel.inputs, kernel.outputs))
    axes = _axes(kernel, shape, out)
    behind = shape[axes[-1] + 1:] if axes else ()
    sizes, sizes_out = (math.prod(tensor[axis] for axis in axes) if axes and len(tensor) == len(shape) else 0
                        for tensor in (shape, out))
    steps = input_at(kernel.inputs, 4).values if kernel.op_type == "Slice" else None
    return [float(_set(axes, len(shape))), float(sizes), float(sizes_out), math.log2(1 + math.prod(behind)) if axes else 0.0,
            float(_broadcast_axes(kernel, out)), math.log2(max((abs(step) for step in steps), default=1)) if steps else 0.0,
            _mode(kernel), float(len(out)), *_volume(kernel, shape)]


def _set(axes: Iterable[int], rank: int) -> int:
    return sum(1 << min(rank - 1 - axis, MOST_AXES) for axis in axes)


def _axes(kernel: Kernel, shape: Sequence[int], out: Sequence[int]) -> list[int]:
    """The axes along which an operator works, where it does not treat all alike; sorted."""
    if kernel.op_type == "Pad":
        given = input_at(kernel.inputs, 3)
        named = [int(value) % len(shape) for value in given.values] if given.values else range(len(shape))
        pads = input_at(kernel.inputs, 1).values or ()
        return sorted({axis for place, axis in enumerate(named) if any(pads[place::max(len(pads) // 2, 1)])})
    if axes := worked_along(kernel):
        return axes
    if len(shape) == len(out) and operator_row(kernel.op_type).kind_or_class in ("part", "gather"):
        return [axis for axis, (before, after) in enumerate(zip(shape, out, strict=True)) if before != after]
    return []


def _broadcast_axes(kernel: Kernel, out: Sequence[int]) -> int:
    """The axes along which some operand is repeated."""
    if operator_row(kernel.op_type).operator_class not in ("elementwise", "product") or len(out) < 1:
        return 0
    leads = 2 if operator_row(kernel.op_type).operator_class == "product" else 0
    return _set({axis for tensor in kernel.inputs if tensor.present and tensor.shape
                 for axis in range(len(out) - leads) if _repeated(tensor, axis, out)}, len(out))


def _repeated(tensor: KernelInput, axis: int, out: Sequence[int]) -> bool:
    """Whether a tensor is repeated along an axis of the output."""
    own = axis - (len(out) - len(tensor.shape))
    return out[axis] > 1 and (own < 0 or tensor.shape[own] == 1)


def _mode(kernel: Kernel) -> float:
    """The modes in which it works, as one number."""
    places = [MODES.index(value) + 1 for name in MODE_ATTRIBUTES if (value := kernel.attributes.get(name)) in MODES]
    return float(sum(place * (len(MODES) + 1) ** power for power, place in enumerate(places)))


def _volume(kernel: Kernel, shape: Sequence[int]) -> tuple[float, float, float]:
    """The depth of a volume and of the window that moves over it, and the window's step along the last axis."""
    window, strides = kernel.attributes.get("kernel_shape") or [], kernel.attributes.get("strides") or []
    deep = len(shape) == 5 and len(window) == 3
    return (float(shape[1 if channels_last(kernel) else 2]) if deep else 0.0, float(window[0]) if deep else 0.0,
            float(strides[-1]) if strides else 0.0)
