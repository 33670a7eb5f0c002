"""Operators that read or write at given positions, and those that resize an image."""

from __future__ import annotations

from kernel_model.sampling.free_shapes.sizes import (
    ABSENT,
    Generator,
    Sizes,
    channels,
    indices,
    kernel,
    numbers,
    pick,
    scalar,
    side,
    tensor,
)
from records.kernel_record import Kernel, KernelInput, Tensor

MOST_TABLE = 1 << 27  # numbers in a table: 512 MiB in single precision


def embedding(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A row of a constant table for each word, position or category."""
    sizes = Sizes(batch, generator)
    words = sizes["v"] if generator.random() < 0.6 else pick([2, 49, 512, 1024, 4096], generator)
    wide = min(channels(generator, 16, 4096), MOST_TABLE // words)
    place = sizes.shape(str(generator.choice(["bt", "bt", "b1", "b", "r", "tt"])))
    return kernel("Gather", [tensor(dtype, words, wide, constant=True), indices(place, words)], [(*place, wide)], axis=0)


def taken(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Some positions along an axis: one token, shuffled channels, rolled windows, the rows of a table of distances."""
    sizes = Sizes(batch, generator)
    letters, axis = [("btx", 1), ("bcss", 2), ("bcss", 3), ("bcss", 1), ("bhtt", 3), ("bcwss", 3), ("x", 0), ("btx", 2)][int(
        generator.choice(8, p=[0.3, 0.12, 0.12, 0.12, 0.1, 0.08, 0.08, 0.08]))]
    shape = sizes.shape(letters)
    place: KernelInput = indices([shape[axis]], shape[axis], constant=True)
    if letters == "btx" and generator.random() < 0.7:
        place = scalar("int64", 0)
    elif letters == "x":
        place = indices((batch, sizes["t"], 1, 1), shape[0], constant=True)
    elif generator.random() < 0.3:
        place = indices((2, max(shape[axis] // 2, 1)), shape[axis], constant=True)
    return kernel("Gather", [tensor(dtype, *shape), place], [(*shape[:axis], *place.shape, *shape[axis + 1:])], axis=axis)


def taken_elements(dtype: str, batch: int, generator: Generator) -> Kernel:
    """GatherElements: other positions for each row: of kept tokens, boxes or relative distances."""
    sizes = Sizes(batch, generator)
    letters, axis = [("btx", 1), ("bhtt", 3), ("bl", 1), ("bt", 1), ("bcl", 2)][int(generator.integers(5))]
    shape = sizes.shape(letters)
    kept = max(1, min(shape[axis], round(shape[axis] * generator.uniform(0.2, 1.0))))
    place = (*shape[:axis], kept, *shape[axis + 1:])
    return kernel("GatherElements", [tensor(dtype, *shape), indices(place, shape[axis])], [place], axis=axis)


def taken_slices(dtype: str, batch: int, generator: Generator) -> Kernel:
    """GatherND: a token of each image, one of several parts, places of a mask."""
    sizes = Sizes(batch, generator)
    kind = generator.choice(["token", "part", "mask", "places"], p=[0.35, 0.25, 0.2, 0.2])
    if kind == "part":
        shape = (pick([2, 12, 18, 24], generator), *sizes.shape("bt"), sizes["d"])
        place: tuple[int, ...] = (1, 1)
    elif kind == "mask":
        shape, place, dtype = sizes.shape("bt"), (batch, 1, 1, sizes["t"], 2), "bool"
    elif kind == "token":
        shape, place = sizes.shape("btx"), (batch, 2)
    else:
        shape, place = sizes.shape("bssx"), (pick([10, 100, 1000, 10000], generator), 3)
    used = place[-1]
    return kernel("GatherND", [tensor(dtype, *shape), indices(place, min(shape[:used]), constant=kind == "mask")],
                  [(*place[:-1], *shape[used:])], batch_dims=0)


def put_slices(dtype: str, batch: int, generator: Generator) -> Kernel:
    """ScatterND: tokens, cache entries or parts of a position table are overwritten."""
    sizes = Sizes(batch, generator)
    kind = dtype if generator.random() < 0.8 else "int64"
    shape = sizes.shape(str(generator.choice(["tx", "rx", "tb", "btx"])))
    used = 2 if len(shape) > 2 else 1
    count = max(1, round(min(shape[0] * (shape[1] if used == 2 else 1), 4096) * generator.uniform(0.05, 1.0)))
    return kernel("ScatterND", [tensor(kind, *shape, constant=bool(generator.random() < 0.2)),
                                indices((count, used), min(shape[:used])), tensor(kind, count, *shape[used:])], [shape],
                  reduction="none")


def put_elements(dtype: str, batch: int, generator: Generator) -> Kernel:
    """ScatterElements: single numbers are overwritten: of masks, words, or one-hot codes."""
    sizes = Sizes(batch, generator)
    kind = dtype if generator.random() < 0.8 else "int64"
    letters, axis = [("bt", 1), ("rx", 1), ("btx", 1), ("bl", 1)][int(generator.integers(4))]
    shape = sizes.shape(letters)
    kept = pick([1, 2, max(1, shape[axis] // 4), shape[axis]], generator)
    place = (*shape[:axis], min(kept, shape[axis]), *shape[axis + 1:])
    return kernel("ScatterElements", [tensor(kind, *shape), indices(place, shape[axis]), tensor(kind, *place)], [shape],
                  axis=axis, reduction="none")


def resize(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An image made larger or smaller: by the nearest pixel, between two or between four."""
    sizes = Sizes(batch, generator)
    shape = sizes.shape("bcss")
    mode = str(generator.choice(["linear", "nearest", "cubic"], p=[0.5, 0.35, 0.15]))
    frame = "asymmetric" if mode == "nearest" else str(generator.choice(
        ["half_pixel", "pytorch_half_pixel", "align_corners"], p=[0.7, 0.1, 0.2]))
    factor = float(generator.choice([2, 4, 8, 0.5], p=[0.6, 0.2, 0.1, 0.1]))
    out = tuple(int(size * factor) for size in shape[2:]) if generator.random() < 0.7 else (side(generator),) * 2
    if out == tuple(int(size * factor) for size in shape[2:]) and generator.random() < 0.6:
        wanted = [ABSENT, KernelInput(dtype="float32", shape=(4,), constant=True, values=(1.0, 1.0, factor, factor))]
    else:
        wanted = [ABSENT, ABSENT, numbers(*shape[:2], *out)]
    return kernel("Resize", [tensor(dtype, *shape), *wanted], [(*shape[:2], *out)], antialias=0,
                  coordinate_transformation_mode=frame, cubic_coeff_a=-0.75, exclude_outside=0, extrapolation_value=0.0,
                  keep_aspect_ratio_policy="stretch", mode=mode, nearest_mode="floor")


def sampled_image(dtype: str, batch: int, generator: Generator) -> Kernel:
    """GridSample: an image read at given places."""
    sizes = Sizes(batch, generator)
    shape = sizes.shape("bcss")
    near = side(generator)
    return kernel("GridSample", [tensor("float32", *shape), tensor("float32", batch, near, near, 2)],
                  [Tensor(dtype="float32", shape=(*shape[:2], near, near))], align_corners=int(generator.integers(2)),
                  mode="linear", padding_mode="zeros")
