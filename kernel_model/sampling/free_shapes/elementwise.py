"""Draws elementwise operators on one, two or three tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hase.kernel_model.sampling.free_shapes.sizes import (
    CONTRIB,
    Generator,
    SizesByLetter,
    activation_shape,
    as_float32,
    channels,
    channels_at,
    heads_and_tokens,
    kernel,
    pick,
    scalar,
    side,
    tensor,
)
from hase.records.kernel_record import Kernel, KernelInput, Tensor

ATTRIBUTES: dict[str, dict[str, Any]] = {
    "Gelu": {"approximate": "none"}, "HardSigmoid": {"alpha": as_float32(1 / 6), "beta": 0.5}, "Elu": {"alpha": 1.0},
    "LeakyRelu": {"alpha": as_float32(0.01)}, "Selu": {"alpha": as_float32(1.67326319217681884765625),
                                                       "gamma": as_float32(1.05070102214813232421875)},
    "QuickGelu": {"alpha": 1.0}}
INTEGER_SHAPES = ("bt", "bt", "b1tt", "bhtt", "b1t", "bss", "r", "b")  # of masks, positions and words, a letter for each size
LOWEST = {"float32": float(np.finfo(np.float32).min), "float16": float(np.finfo(np.float16).min)}


def activation(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An activation of an image or of tokens."""
    image_size = side(generator)
    image = (batch, channels_at(image_size, generator), image_size, image_size)
    shape = image if generator.random() < 0.75 else (batch, heads_and_tokens(1, generator)[2], channels(generator, 64, 5120))
    op = str(generator.choice(["Relu", "Clip", "QuickGelu", "Gelu", "Sigmoid", "HardSigmoid", "HardSwish"],
                              p=[0.25, 0.2, 0.2, 0.15, 0.1, 0.05, 0.05]))
    return _unary(op, dtype, shape)


def unary(op: str, dtype: str, batch: int, generator: Generator) -> Kernel:
    """An elementwise operator on one tensor of any rank."""
    return _unary(op, dtype, activation_shape(batch, generator))


def _unary(op: str, dtype: str, shape: Sequence[int]) -> Kernel:
    x = tensor(dtype, *shape)
    if op == "Clip":
        return kernel(op, [x, scalar(dtype, 0.0), scalar(dtype, 6.0)], [shape])
    result = Tensor(dtype="bool", shape=tuple(shape)) if op in ("IsNaN", "IsInf") else shape
    return kernel(op, [x], [result], CONTRIB if op in ("QuickGelu", "FastGelu") else "", **ATTRIBUTES.get(op, {}))


def other_operand(dtype: str, shape: Sequence[int], generator: Generator) -> KernelInput:
    """A second operand: of the same shape, or of size 1 along some axes (broadcast)."""
    rank = len(shape)
    kind = str(generator.choice(["same", "number", "last", "channel", "some", "table", "row"],
                                p=[0.36, 0.16, 0.1, 0.08, 0.2, 0.05, 0.05]))
    constant = bool(generator.random() < 0.15)
    if kind == "number":
        return scalar(dtype, float(generator.choice([0.5, 1.0, 2.0, 0.125, 6.0])))
    if kind == "last":
        return tensor(dtype, shape[-1], constant=True)
    if kind == "channel" and rank > 2:
        return tensor(dtype, shape[1], *[1] * (rank - 2), constant=True)
    if kind == "table" and rank > 2:
        return tensor(dtype, *shape[pick(range(1, rank - 1), generator):], constant=True)
    if kind == "row":
        return tensor(dtype, *shape[:-1], 1, constant=constant)
    if kind == "some":
        is_kept = generator.random(rank) < 0.5
        return tensor(dtype, *(size if keeps else 1 for size, keeps in zip(shape, is_kept, strict=True)), constant=constant)
    return tensor(dtype, *shape, constant=constant)


def arithmetic(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Arithmetic on an image and another image, a scale per channel of each image, or a constant per last channel."""
    image_size = side(generator)
    channel_count = channels_at(image_size, generator)
    shape: tuple[int, ...] = (batch, channel_count, image_size, image_size)
    kind = generator.choice(["same", "scale", "last"], p=[0.5, 0.3, 0.2])
    op = str(generator.choice(["Add", "Mul", "Div", "Sub"], p=[0.4, 0.4, 0.1, 0.1] if kind == "same" else [0.5, 0.5, 0, 0]))
    operand = tensor(dtype, *shape)
    if kind == "scale":
        operand = tensor(dtype, batch, channel_count, 1, 1)
    elif kind == "last":
        shape = (batch, image_size, image_size, channel_count)
        operand = tensor(dtype, *((channel_count,) if op == "Add" else (1, 1, 1, channel_count)), constant=True)
    operands = [tensor(dtype, *shape), operand]
    return kernel(op, operands[::-1] if generator.random() < 0.5 else operands, [shape])


def binary(op: str, dtype: str, batch: int, generator: Generator) -> Kernel:
    """An elementwise operator on two tensors of any rank, with or without broadcasting."""
    shape = activation_shape(batch, generator)
    first, second = tensor(dtype, *shape), other_operand(dtype, shape, generator)
    if len(shape) > 1 and generator.random() < 0.04:  # each along its own axis
        first, second = tensor(dtype, *shape[:-1], 1), tensor(dtype, *[1] * (len(shape) - 1), shape[-1])
    operands = [second, first] if generator.random() < 0.2 else [first, second]
    result = "bool" if op in ("Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal") else dtype
    return kernel(op, operands, [Tensor(dtype=result, shape=shape)])


def power(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Pow with a constant exponent."""
    shape = activation_shape(batch, generator)
    exponent = scalar(dtype, float(generator.choice([2.0, 0.5, 3.0, 1.5], p=[0.6, 0.15, 0.15, 0.1])))
    return kernel("Pow", [tensor(dtype, *shape), exponent], [shape])


def several(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The sum, maximum or minimum of two to four tensors."""
    shape = activation_shape(batch, generator)
    count = pick([2, 2, 3, 4], generator)
    return kernel(str(generator.choice(["Sum", "Max", "Min"])), [tensor(dtype, *shape)] * count, [shape])


def slopes(dtype: str, batch: int, generator: Generator) -> Kernel:
    """PRelu with a slope per channel."""
    shape = SizesByLetter(batch, generator).shape(str(generator.choice(["bcss", "bcl", "bcfss"], p=[0.8, 0.1, 0.1])))
    slope = tensor(dtype, shape[1], *[1] * (len(shape) - 2), constant=True)
    return kernel("PRelu", [tensor(dtype, *shape), slope], [shape])


def biased_gelu(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A bias for the last axis, then Gelu, or its approximation."""
    shape = SizesByLetter(batch, generator).shape(str(generator.choice(["btx", "rx", "bssx"])))
    op = str(generator.choice(["BiasGelu", "FastGelu"]))
    return kernel(op, [tensor(dtype, *shape), tensor(dtype, shape[-1], constant=True)], [shape], CONTRIB)


def choice(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Where: a mask chooses between a tensor and a number, or between two tensors."""
    shape = activation_shape(batch, generator)
    mask = tensor("bool", *shape)
    if len(shape) > 2 and generator.random() < 0.4:  # one mask for all heads, or channels
        mask = tensor("bool", shape[0], *[1] * (len(shape) - 3), *shape[-2:], constant=bool(generator.random() < 0.3))
    kind = generator.choice(["number", "both", "numbers"], p=[0.6, 0.3, 0.1])
    if kind == "numbers":
        shape = mask.shape
        return kernel("Where", [mask, scalar(dtype, 0.0), scalar(dtype, LOWEST[dtype])], [Tensor(dtype=dtype, shape=shape)])
    values = [tensor(dtype, *shape), tensor(dtype, *shape) if kind == "both" else scalar(
        dtype, float(generator.choice([0.0, LOWEST[dtype]])))]
    return kernel("Where", [mask, *(values if generator.random() < 0.5 else values[::-1])], [Tensor(dtype=dtype, shape=shape)])


def on_masks(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Integer comparisons and mask operations, with which models compute masks and positions."""
    sizes = SizesByLetter(batch, generator)
    shape = sizes.shape(str(generator.choice(INTEGER_SHAPES)))
    op = str(generator.choice(["And", "Or", "Not", "Equal", "Greater", "Less", "Add", "Sub", "Mul", "Where"]))
    integer = str(generator.choice(["int64", "int32"], p=[0.8, 0.2]))
    if op == "Not":
        return kernel(op, [tensor("bool", *shape)], [shape])
    if op in ("And", "Or"):
        first, second = (1, *shape[1:-1], 1), shape
        if len(shape) > 1 and generator.random() < 0.5:  # a causal mask and a mask of padding
            return kernel(op, [tensor("bool", *first, constant=True), tensor("bool", *second)], [shape])
        return kernel(op, [tensor("bool", *shape)] * 2, [shape])
    result = Tensor(dtype="bool" if op in ("Equal", "Greater", "Less") else integer, shape=shape)
    if op == "Where":
        return kernel(op, [tensor("bool", *shape), scalar(integer, 1), tensor(integer, *shape)], [result])
    if len(shape) > 1 and generator.random() < 0.4:  # each along its own axis
        return kernel(op, [tensor(integer, *shape[:-1], 1), tensor(integer, *[1] * (len(shape) - 1), shape[-1])], [result])
    operand = scalar(integer, pick([0, 1, 2, 100], generator)) if generator.random() < 0.6 else tensor(integer, *shape)
    return kernel(op, [tensor(integer, *shape), operand], [result])


TYPE_CODES = {"float32": 1, "int32": 6, "int64": 7, "bool": 9, "float16": 10}  # ONNX's numbers of element types


def cast(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Cast: between floating types of tensors as large as activations, or of masks and positions."""
    if generator.random() < 0.55:
        shape = activation_shape(batch, generator)
        source = dtype
        target = "float16" if dtype == "float32" else "float32"
    else:
        shape = SizesByLetter(batch, generator).shape(str(generator.choice(INTEGER_SHAPES)))
        source, target = [("bool", dtype), ("int64", dtype), ("int32", dtype), ("int64", "int32"), ("int64", "bool"),
                          ("bool", "int32"), ("int32", "int64"), (dtype, "int64"), (dtype, "bool")][int(generator.integers(9))]
    return kernel("Cast", [tensor(source, *shape)], [Tensor(dtype=target, shape=shape)], to=TYPE_CODES[target], saturate=1)


UNARY = {op: partial(unary, op) for op in (
    "Relu", "Sigmoid", "Tanh", "Gelu", "QuickGelu", "Neg", "Sqrt", "Reciprocal", "Exp", "Erf", "Log", "Abs", "Elu", "LeakyRelu",
    "Softplus", "FastGelu", "IsNaN", "Sin", "Cos", "Floor", "Round", "Selu", "Softsign", "Clip", "HardSwish", "HardSigmoid")}
BINARY = {op: partial(binary, op) for op in ("Add", "Mul", "Sub", "Div", "Greater", "Less", "Equal", "GreaterOrEqual")}
