"""Draws operators that move data, gather or scatter it, or resize an image."""

from __future__ import annotations

from hase.kernel_model.sampling.free_shapes.sizes import (
    ABSENT,
    Generator,
    SizesByLetter,
    channels,
    channels_at,
    heads_and_tokens,
    indices,
    kernel,
    numbers,
    pick,
    scalar,
    side,
    tensor,
)
from hase.records.kernel_record import Kernel, KernelInput, Tensor

END = 2**63 - 1  # the `ends` of a Slice without an end
ORDERS = (  # the axes of tensors as `SizesByLetter` names them, and how models permute them
    ("Btx", "021"), ("bcl", "021"), ("tbx", "102"), ("bx", "10"), ("bcss", "0231"), ("bssc", "0312"), ("bthd", "0213"),
    ("bhtd", "0213"), ("bhtd", "0132"), ("htbd", "1023"), ("bhtd", "2013"), ("bcss", "0321"), ("btkhd", "20314"),
    ("bnhwd", "01324"), ("bwtkd", "03142"), ("btkhd", "03214"), ("bkthd", "01342"), ("bcfss", "02341"), ("btthk", "03241"),
    ("bttk", "0312"), ("bktt", "0231"),
    ("bfssc", "04123"), ("bcknw", "01243"), ("bhtkd", "01432"), ("bthww", "02134"), ("bktdt", "10243"), ("bkcss", "02134"),
    ("bnwnwc", "013245"), ("bcnwnw", "013524"), ("bhtkhd", "301425"), ("bcnwnw", "024351"), ("bnwnwc", "013425"),
    ("bnwnwc", "024135"), ("bcwnwn", "012435"), ("bxkkww", "012354"), ("bkhkhx", "052413"), ("bkkxww", "014253"),
    ("bkhhnwwc", "01425367"), ("bknhwhwc", "01352467"))
MOST_TABLE = 1 << 27  # numbers in a table: 512 MiB in single precision


def transpose(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Transpose: channels first to last and back, heads before tokens, the windows of an image, shuffled channels."""
    near = side(generator)
    wide = channels_at(near, generator)
    images, heads, count, width = heads_and_tokens(batch, generator)
    window = pick([7, 8], generator)
    tiles = max(near // window, 1)
    groups = pick([2, 3, 4], generator)
    shape, order = [
        ((batch, wide, near, near), (0, 2, 3, 1)), ((batch, near, near, wide), (0, 3, 1, 2)),
        ((batch, wide, count), (0, 2, 1)), ((batch, count, wide), (1, 0, 2)), ((images, count, heads, width), (0, 2, 1, 3)),
        ((images, heads, count, width), (0, 1, 3, 2)), ((count, images * heads, width), (1, 0, 2)),
        ((images, count, 3, heads, width), (2, 0, 3, 1, 4)), ((batch, groups, wide, near, near), (0, 2, 1, 3, 4)),
        ((batch, tiles, window, tiles, window, wide), (0, 1, 3, 2, 4, 5)),
    ][int(generator.integers(10))]
    return kernel("Transpose", [tensor(dtype, *shape)], [[shape[axis] for axis in order]], perm=list(order))


def any_order(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Transpose: any permutation of two to eight axes, as in models."""
    letters, digits = ORDERS[int(generator.integers(len(ORDERS)))]
    shape, order = SizesByLetter(batch, generator).shape(letters), [int(digit) for digit in digits]
    return kernel("Transpose", [tensor(dtype, *shape)], [[shape[axis] for axis in order]], perm=order)


def join(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Concat of images along their channels."""
    near = side(generator)
    parts = [max(channels_at(near, generator) // 2, 8) for _ in range(int(generator.integers(2, 9)))]
    return kernel("Concat", [tensor(dtype, batch, part, near, near) for part in parts], [(batch, sum(parts), near, near)],
                  axis=1)


def join_any(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Concat along any axis: halves of heads, a class token, a cache, shifted windows, parts of a video."""
    letters, axis, equal = [("bhtd", -1, True), ("bhtd", -2, False), ("bssc", 2, False), ("bssc", 1, False), ("btx", 1, False),
                            ("btx", 2, True), ("bcfss", 1, False), ("bfssc", 3, False), ("rx", -1, False), ("bx", -1, True),
                            ("bcss", 2, False), ("bt1hd", 2, True)][int(generator.integers(12))]
    shape = SizesByLetter(batch, generator).shape(letters)
    count = pick([2, 2, 2, 3, 4, 6], generator)
    index = axis % len(shape)
    parts = [shape[index]] * count if equal else [pick([1, 1, 3, shape[index]], generator) for _ in range(count - 1)] + [
        shape[index]]
    shapes = [(*shape[:index], part, *shape[index + 1:]) for part in parts]
    first = bool(letters == "btx" and parts[0] == 1 and generator.random() < 0.7)
    inputs = [tensor(dtype, *sizes, constant=first and position == 0) for position, sizes in enumerate(shapes)]
    return kernel("Concat", inputs, [(*shape[:index], sum(parts), *shape[index + 1:])], axis=axis)


def cut(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Split of image channels, of tokens into queries, keys and values, or of a channels-last image into unequal parts."""
    near = side(generator)
    wide = channels_at(near, generator)
    kind = generator.choice(["halves", "three", "shifted"], p=[0.4, 0.3, 0.3])
    if kind == "halves":
        half = max(wide // 2, 8)
        return kernel("Split", [tensor(dtype, batch, 2 * half, near, near)], [(batch, half, near, near)] * 2, axis=1,
                      num_outputs=2)
    if kind == "three":
        images, _, count, _ = heads_and_tokens(batch, generator)
        return kernel("Split", [tensor(dtype, images, count, 3 * wide)], [(images, count, wide)] * 3, axis=2, num_outputs=3)
    axis, last = pick([1, 2], generator), min(pick([3, 4], generator), near - 1)
    parts = [(batch, *((part, near) if axis == 1 else (near, part)), wide) for part in (near - last, last)]
    return kernel("Split", [tensor(dtype, batch, near, near, wide), numbers(near - last, last)], parts, axis=axis)


def cut_any(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Split along any axis: queries, keys and values apart, halves of heads, groups of channels, gates."""
    letters, axis = [("btkhd", 2), ("kbhtd", 0), ("bhtd", 3), ("btx", 2), ("bcss", 1), ("bkcss", 1), ("bcl", 1), ("rx", 1),
                     ("bx", 1), ("bssc", 3), ("bcfss", 1)][int(generator.integers(11))]
    sizes = SizesByLetter(batch, generator)
    count = pick([2, 2, 3, 4, 8], generator)
    parts = [1] * count if letters[axis] == "k" else [max(sizes[letters[axis]] // count, 1)] * count
    if generator.random() < 0.3 and parts[0] > 1:
        parts[0] += parts[0] // 2
    shapes = [tuple(part if index == axis else sizes[letter] for index, letter in enumerate(letters)) for part in parts]
    whole = (*shapes[0][:axis], sum(parts), *shapes[0][axis + 1:])
    if len(set(parts)) == 1 and letters[axis] != "k":
        return kernel("Split", [tensor(dtype, *whole)], shapes, axis=axis, num_outputs=count)
    return kernel("Split", [tensor(dtype, *whole), numbers(*parts)], shapes, axis=axis)


def part(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Slice: one token, one of several parts, all but the first, every second pixel, a rolled window."""
    letters, axis = [("btx", 1), ("bcss", 1), ("bcss", 2), ("bssc", 1), ("bssc", 2), ("bfssc", 2), ("bhtt", 2), ("bhtt", 3),
                     ("btx", 2), ("bt", 1), ("rx", 1), ("bcl", 2)][int(generator.integers(12))]
    shape = SizesByLetter(batch, generator).shape(letters)
    size = shape[axis]
    start, end, step = [(0, 1, 1), (-1, END, 1), (1, END, 1), (0, -1, 1), (0, END, 2), (1, END, 2), (size // 2, END, 1),
                        (0, max(size // 2, 1), 1)][int(generator.integers(8))]
    out = (*shape[:axis], len(range(size)[slice(start, end, step)]), *shape[axis + 1:])
    inputs = [tensor(dtype, *shape), numbers(start), numbers(end), numbers(axis)]
    return kernel("Slice", [*inputs, numbers(step)] if step > 1 or generator.random() < 0.6 else inputs, [out])


def pad(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Pad: a channels-last image to whole windows (often nothing is missing), or a border around an image."""
    near, window = side(generator), pick([7, 8], generator)
    wide = channels_at(near, generator)
    if generator.random() < 0.7:
        missing = -near % window
        shape, before, after = (batch, near, near, wide), (0, 0, 0, 0), (0, missing, missing, 0)
    else:
        border = int(generator.integers(1, 4))
        shape, before, after = (batch, wide, near, near), (0, 0, border, border), (0, 0, border, border)
    return kernel("Pad", [tensor(dtype, *shape), numbers(*before, *after)],
                  [[sum(sizes) for sizes in zip(shape, before, after, strict=True)]], mode="constant")


def pad_any(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Pad: a border of a signal, image, video or tokens (zeros, mirrored or repeated), or one more row."""
    letters, axes = [("bcss", (2, 3)), ("bcl", (2,)), ("bhtt", (2,)), ("bhtd", (3,)), ("bfssc", (2, 3)), ("rx", (1,)),
                     ("btx", (1,)), ("btx", (2,))][int(generator.integers(8))]
    mode = str(generator.choice(["constant", "reflect", "edge"], p=[0.6, 0.25, 0.15]))
    if letters not in ("bcss", "bcl"):
        mode = "constant"
    shape = SizesByLetter(batch, generator).shape(letters)
    wide = min(pick([1, 1, 2, 3, 15], generator), min(shape[axis] for axis in axes) - (mode == "reflect"))
    before = [wide if axis in axes and generator.random() < 0.6 else 0 for axis in range(len(shape))]
    after = [wide if axis in axes else 0 for axis in range(len(shape))]
    value = [scalar(dtype, 0.0)] if mode == "constant" and generator.random() < 0.5 else []
    return kernel("Pad", [tensor(dtype, *shape), numbers(*before, *after), *value],
                  [[sum(sizes) for sizes in zip(shape, before, after, strict=True)]], mode=mode)


def repeat(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Expand or Tile: heads that share keys, a token per image, a row per column."""
    letters, axis, repeats = [("bk1td", 2, "h"), ("1tx", 0, "b"), ("bt1x", 2, "w"), ("b1tt", 1, "h"), ("bc11", 2, "s"),
                              ("b1x", 1, "t"), ("bk1hd", 2, "h")][int(generator.integers(7))]
    sizes = SizesByLetter(batch, generator)
    shape, count = sizes.shape(letters), sizes[repeats]
    out = tuple(count if index == axis else size for index, size in enumerate(shape))
    if generator.random() < 0.6:
        wanted = numbers(*out) if generator.random() < 0.5 else numbers(*(
            count if index == axis else 1 for index in range(len(shape))))
        return kernel("Expand", [tensor(dtype, *shape), wanted], [out])
    if generator.random() < 0.4:
        shape, axis, count = sizes.shape("bssc"), 0, pick([1, 4, 16, 64], generator)
        out = (shape[0] * count, *shape[1:])
    times = numbers(*(count if index == axis else 1 for index in range(len(shape))))
    return kernel("Tile", [tensor(dtype, *shape), times], [out])


def blocks(dtype: str, batch: int, generator: Generator) -> Kernel:
    """DepthToSpace or SpaceToDepth: channels to blocks of pixels, or back."""
    near, block = side(generator), pick([2, 2, 2, 4], generator)
    wide = channels_at(near, generator) if generator.random() < 0.7 else 3
    small, large = (batch, wide * block * block, near, near), (batch, wide, near * block, near * block)
    if generator.random() < 0.7:
        return kernel("DepthToSpace", [tensor(dtype, *small)], [large], blocksize=block,
                      mode=str(generator.choice(["CRD", "DCR"], p=[0.8, 0.2])))
    return kernel("SpaceToDepth", [tensor(dtype, *large)], [small], blocksize=block)


def triangle(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Trilu: one half of each matrix."""
    shape = SizesByLetter(batch, generator).shape(str(generator.choice(["tt", "b1tt", "bhtt"])))
    return kernel("Trilu", [tensor(dtype, *shape), scalar("int64", pick([0, 1], generator))], [shape],
                  upper=int(generator.integers(2)))


def embedding(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Gather: a row of a constant table per word, position or category."""
    sizes = SizesByLetter(batch, generator)
    words = sizes["v"] if generator.random() < 0.6 else pick([2, 49, 512, 1024, 4096], generator)
    wide = min(channels(generator, 16, 4096), MOST_TABLE // words)
    positions = sizes.shape(str(generator.choice(["bt", "bt", "b1", "b", "r", "tt"])))
    table = tensor(dtype, words, wide, constant=True)
    return kernel("Gather", [table, indices(positions, words)], [(*positions, wide)], axis=0)


def taken(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Gather along an axis: one token, shuffled channels, rolled windows, the rows of a table of distances."""
    sizes = SizesByLetter(batch, generator)
    letters, axis = [("btx", 1), ("bcss", 2), ("bcss", 3), ("bcss", 1), ("bhtt", 3), ("bcwss", 3), ("x", 0), ("btx", 2)][int(
        generator.choice(8, p=[0.3, 0.12, 0.12, 0.12, 0.1, 0.08, 0.08, 0.08]))]
    shape = sizes.shape(letters)
    positions: KernelInput = indices([shape[axis]], shape[axis], constant=True)
    if letters == "btx" and generator.random() < 0.7:
        positions = scalar("int64", 0)
    elif letters == "x":
        positions = indices((batch, sizes["t"], 1, 1), shape[0], constant=True)
    elif generator.random() < 0.3:
        positions = indices((2, max(shape[axis] // 2, 1)), shape[axis], constant=True)
    result = (*shape[:axis], *positions.shape, *shape[axis + 1:])
    return kernel("Gather", [tensor(dtype, *shape), positions], [result], axis=axis)


def taken_elements(dtype: str, batch: int, generator: Generator) -> Kernel:
    """GatherElements with different positions per row: of kept tokens, boxes or relative distances."""
    sizes = SizesByLetter(batch, generator)
    letters, axis = [("btx", 1), ("bhtt", 3), ("bl", 1), ("bt", 1), ("bcl", 2)][int(generator.integers(5))]
    shape = sizes.shape(letters)
    kept = max(1, min(shape[axis], round(shape[axis] * generator.uniform(0.2, 1.0))))
    positions = (*shape[:axis], kept, *shape[axis + 1:])
    return kernel("GatherElements", [tensor(dtype, *shape), indices(positions, shape[axis])], [positions], axis=axis)


def taken_slices(dtype: str, batch: int, generator: Generator) -> Kernel:
    """GatherND: a token of each image, one of several parts, positions in a mask."""
    sizes = SizesByLetter(batch, generator)
    kind = generator.choice(["token", "part", "mask", "places"], p=[0.35, 0.25, 0.2, 0.2])
    if kind == "part":
        shape = (pick([2, 12, 18, 24], generator), *sizes.shape("bt"), sizes["d"])
        positions: tuple[int, ...] = (1, 1)
    elif kind == "mask":
        shape, positions, dtype = sizes.shape("bt"), (batch, 1, 1, sizes["t"], 2), "bool"
    elif kind == "token":
        shape, positions = sizes.shape("btx"), (batch, 2)
    else:
        shape, positions = sizes.shape("bssx"), (pick([10, 100, 1000, 10000], generator), 3)
    used = positions[-1]
    return kernel("GatherND", [tensor(dtype, *shape), indices(positions, min(shape[:used]), constant=kind == "mask")],
                  [(*positions[:-1], *shape[used:])], batch_dims=0)


def put_slices(dtype: str, batch: int, generator: Generator) -> Kernel:
    """ScatterND: overwrites tokens, cache entries or parts of a position table."""
    sizes = SizesByLetter(batch, generator)
    kind = dtype if generator.random() < 0.8 else "int64"
    shape = sizes.shape(str(generator.choice(["tx", "rx", "tb", "btx"])))
    used = 2 if len(shape) > 2 else 1
    count = max(1, round(min(shape[0] * (shape[1] if used == 2 else 1), 4096) * generator.uniform(0.05, 1.0)))
    return kernel("ScatterND", [tensor(kind, *shape, constant=bool(generator.random() < 0.2)),
                                indices((count, used), min(shape[:used])), tensor(kind, count, *shape[used:])], [shape],
                  reduction="none")


def put_elements(dtype: str, batch: int, generator: Generator) -> Kernel:
    """ScatterElements: overwrites single numbers of masks, words, or one-hot codes."""
    sizes = SizesByLetter(batch, generator)
    kind = dtype if generator.random() < 0.8 else "int64"
    letters, axis = [("bt", 1), ("rx", 1), ("btx", 1), ("bl", 1)][int(generator.integers(4))]
    shape = sizes.shape(letters)
    kept = pick([1, 2, max(1, shape[axis] // 4), shape[axis]], generator)
    positions = (*shape[:axis], min(kept, shape[axis]), *shape[axis + 1:])
    return kernel("ScatterElements", [tensor(kind, *shape), indices(positions, shape[axis]), tensor(kind, *positions)], [shape],
                  axis=axis, reduction="none")


def resize(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Resize of an image, larger or smaller: nearest, linear or cubic."""
    sizes = SizesByLetter(batch, generator)
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
    """GridSample: an image read at given positions."""
    sizes = SizesByLetter(batch, generator)
    shape = sizes.shape("bcss")
    near = side(generator)
    return kernel("GridSample", [tensor("float32", *shape), tensor("float32", batch, near, near, 2)],
                  [Tensor(dtype="float32", shape=(*shape[:2], near, near))], align_corners=int(generator.integers(2)),
                  mode="linear", padding_mode="zeros")
