"""Normalisations and softmaxes."""

from __future__ import annotations

from kernel_model.sampling.free_shapes.sizes import (
    CONTRIB,
    Generator,
    Sizes,
    as_float32,
    kernel,
    pick,
    tensor,
    tokens,
)
from records.kernel_record import Kernel


def layer_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Over the last channels, of any rank; also with the addition before it, and without the mean."""
    sizes = Sizes(batch, generator)
    shape = sizes.shape(str(generator.choice(["btx", "bssc", "bhtd", "bfssc", "rx", "bnnwwc"],
                                             p=[0.55, 0.2, 0.1, 0.06, 0.06, 0.03])))
    x, scale = tensor(dtype, *shape), tensor(dtype, shape[-1], constant=True)
    epsilon = as_float32(float(generator.choice([1e-6, 1e-5, 1e-12])))
    kind = generator.choice(["Layer", "Skip", "Simplified", "SkipSimplified"], p=[0.3, 0.2, 0.25, 0.25])
    if kind == "Simplified":
        return kernel("SimplifiedLayerNormalization", [x, scale], [shape], axis=-1, epsilon=epsilon, stash_type=1)
    if kind == "Layer":
        return kernel("LayerNormalization", [x, scale, scale], [shape], axis=-1, epsilon=epsilon, stash_type=1)
    shape = sizes.shape(str(generator.choice(["btx", "rx"], p=[0.9, 0.1])))  # others are not fused
    x, scale = tensor(dtype, *shape), tensor(dtype, shape[-1], constant=True)
    if kind == "SkipSimplified":
        return kernel("SkipSimplifiedLayerNormalization", [x, x, scale], [shape], CONTRIB, epsilon=epsilon)
    bias = [scale] if generator.random() < 0.2 else []
    return kernel("SkipLayerNormalization", [x, x, scale, scale, *bias], [shape], CONTRIB, epsilon=epsilon)


def instance_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Of each channel of a signal, an image or a video, or of each group of channels, as a GroupNorm is exported: each group is
    one row."""
    sizes = Sizes(batch, generator)
    if generator.random() < 0.4:
        groups = pick([1, 2, 4, 8, 16, 32, 32], generator)
        shape: tuple[int, ...] = (batch, groups, max(sizes["c"] // groups, 1) * sizes["s"] * sizes["s"])
    else:
        shape = sizes.shape(str(generator.choice(["bcss", "bcl", "bcfss"], p=[0.6, 0.2, 0.2])))
    scale = tensor(dtype, shape[1], constant=True)
    return kernel("InstanceNormalization", [tensor(dtype, *shape), scale, scale], [shape], epsilon=as_float32(1e-5))


def batch_norm(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A normalisation that no convolution before it could take in, of rows, a signal, an image or a video."""
    shape = Sizes(batch, generator).shape(str(generator.choice(["bcss", "bx", "bxt", "bcfss"], p=[0.7, 0.08, 0.1, 0.12])))
    scale = tensor(dtype, shape[1], constant=True)
    return kernel("BatchNormalization", [tensor(dtype, *shape), *[scale] * 4], [shape], epsilon=as_float32(1e-5),
                  momentum=as_float32(0.9), training_mode=0)


def softmax(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Over the keys of attention, the classes, or another axis; also its logarithm."""
    sizes = Sizes(batch, generator)
    op = str(generator.choice(["Softmax", "LogSoftmax"], p=[0.65, 0.35]))
    letters, axis = [("Bhtt", -1), ("Bhtl", -1), ("Bhkd", -1), ("bkhtt", -1), ("bxt", -1), ("rx", -1), ("bx", -1),
                     ("bthd", 1), ("bhtd", -2), ("bkx11", 1), ("bcss", 1), ("btlh", 2)][int(generator.choice(
                         12, p=[0.36, 0.12, 0.05, 0.05, 0.08, 0.08, 0.05, 0.05, 0.04, 0.04, 0.04, 0.04]))]
    shape = sizes.shape(letters)
    return kernel(op, [tensor(dtype, *shape)], [shape], axis=axis)


def biased_softmax(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Over the keys of attention, to which a mask (of each image, or of all) or a table (for each head) is added.

    `is_inner_broadcast` says that the mask is broadcast along the axes before the last, else along the first ones.
    """
    images, heads, count, _ = tokens(batch, generator)
    keys = count if generator.random() < 0.7 else tokens(batch, generator)[2]
    if generator.random() < 0.2:
        shape: tuple[int, ...] = (images * heads, count, keys)
        forms: list[tuple[tuple[int, ...], int]] = [((count, keys), 0), (shape, 1)]
    else:
        shape = (images, heads, count, keys)
        forms = [((images, 1, 1, keys), 1), ((1, 1, count, keys), 0), ((1, heads, count, keys), 0), ((heads, count, keys), 0),
                 (shape, 1)]
    bias, inner = forms[int(generator.integers(len(forms)))]
    operands = [tensor(dtype, *shape), tensor(dtype, *bias, constant=bool(generator.random() < 0.6))]
    return kernel("BiasSoftmax", operands, [shape], CONTRIB, axis=len(shape) - 1, is_inner_broadcast=inner)
