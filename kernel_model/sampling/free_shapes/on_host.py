"""Draws kernels that the CUDA provider lacks: in a CUDA session, the CPU provider runs them.

CUDA has integer products and convolutions, as quantisers write them, only for signed numbers. It also lacks signal processing,
some elementwise functions, tables of features, and the newest version of some operators of image networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hase.kernel_model.building.dummy_data import ML
from hase.kernel_model.sampling.draws import on_cuda
from hase.kernel_model.sampling.free_shapes import elementwise, forms, layers
from hase.kernel_model.sampling.free_shapes.forms import any_rank, any_shape
from hase.kernel_model.sampling.free_shapes.language import product_sizes, rows
from hase.kernel_model.sampling.free_shapes.sizes import (
    ABSENT,
    CONTRIB,
    Generator,
    activation_shape,
    as_float32,
    channels,
    channels_at,
    indices,
    inferred,
    kernel,
    log_uniform,
    numbers,
    pick,
    scalar,
    side,
    tensor,
)
from hase.records.kernel_record import Kernel, KernelInput, Tensor, type_code
from hase.records.kernel_types import describe_kernel

QUANTISED_TYPES = ("uint8", "uint8", "int8")  # of activations; quantisers mostly choose the first
UNARY = ("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Celu", "Cosh", "Hardmax", "Mish", "Sinh", "Tan")
FRAME_LENGTHS = (64, 128, 256, 400, 512, 1024, 2048)  # of short-time Fourier transforms
MAX_TRIES = 100  # draws until one is what CUDA lacks
SOME_FORMS = (forms.unary, forms.binary, forms.where, forms.cast, forms.reduction, forms.along_an_axis, forms.transpose,
              forms.concat, forms.pad, forms.expand_or_tile, forms.slice_axes)


def _quantised_type(generator: Generator) -> str:
    return str(generator.choice(QUANTISED_TYPES))


def _scale(dtype: str, *shape: int) -> list[KernelInput]:
    """The inputs for a quantised tensor's scale and zero point; `shape` if there is one of each per channel."""
    return [tensor("float32", *shape, constant=True), tensor(dtype, *shape, constant=True)]


def quantised_convolution(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A convolution of quantised images, with quantised (channels first or last) or integer output."""
    plain = layers.convolution("float32", batch, generator)
    image, weights, *bias = plain.inputs
    quantised, out = _quantised_type(generator), plain.outputs[0].shape
    activation, quantised_weights = tensor(quantised, *image.shape), tensor("int8", *weights.shape, constant=True)
    if generator.random() < 0.2:
        zero_points = [tensor(quantised, constant=True), tensor("int8", constant=True)]
        return kernel("ConvInteger", [activation, quantised_weights, *zero_points], [Tensor(dtype="int32", shape=out)],
                      **plain.attributes)
    channels_last = generator.random() < 0.5
    if channels_last:
        activation, out = tensor(quantised, *_channels_last(image.shape)), _channels_last(out)
    scales = weights.shape[:1] if generator.random() < 0.5 else ()
    inputs = [activation, *_scale(quantised), quantised_weights, *_scale("int8", *scales), *_scale(quantised),
              *(tensor("int32", *each.shape, constant=True) for each in bias)]
    attributes = plain.attributes | ({"channels_last": 1} if channels_last else {})
    return kernel("QLinearConv", inputs, [out], CONTRIB if channels_last else "", **attributes)


def _channels_last(shape: Sequence[int]) -> tuple[int, ...]:
    return (shape[0], *shape[2:], shape[1])


def _product_shape(batch: int, generator: Generator) -> tuple[tuple[int, ...], int, int]:
    """The leading sizes, the depth (the sum's length) and the columns of a product: of a language model, or of any layer."""
    depth, columns = product_sizes(generator) if generator.random() < 0.3 else (
        channels(generator, 32, 4096), channels(generator, 32, 4096))
    lead = rows(batch, generator) if generator.random() < 0.6 else (batch * pick([1, 1, 2, 8, 49, 197], generator),)
    return lead, depth, columns


def integer_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A product of unsigned 8-bit numbers, as in dynamic quantisation."""
    lead, depth, columns = _product_shape(batch, generator)
    weights = str(generator.choice(["uint8", "int8"]))
    return kernel("MatMulInteger", [tensor("uint8", *lead, depth), tensor(weights, depth, columns, constant=True),
                                    tensor("uint8"), tensor(weights, constant=True)],
                  [Tensor(dtype="int32", shape=(*lead, columns))])


def quantised_product(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A product of quantised matrices with quantised output, with or without bias."""
    lead, depth, columns = _product_shape(batch, generator)
    quantised = _quantised_type(generator)
    if generator.random() < 0.5:
        inputs = [tensor(quantised, *lead, depth), *_scale(quantised), tensor("int8", depth, columns, constant=True),
                  *_scale("int8"), *_scale(quantised)]
        return kernel("QLinearMatMul", inputs, [(*lead, columns)])
    inputs = [tensor(quantised, lead[0], depth), *_scale(quantised), tensor("int8", columns, depth, constant=True),
              *_scale("int8"), tensor("int32", columns, constant=True), *_scale(quantised)]
    return kernel("QGemm", inputs, [(lead[0], columns)], CONTRIB, alpha=1.0, transA=0, transB=1)


def rounded_while_running(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The quantisation of an activation to 8 bits at run time, which first finds its range."""
    shape = activation_shape(batch, generator)
    return kernel("DynamicQuantizeLinear", [tensor("float32", *shape)],
                  [Tensor(dtype="uint8", shape=shape), Tensor(dtype="float32", shape=()), Tensor(dtype="uint8", shape=())])


def quantised_arithmetic(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The sum or product of two quantised activations."""
    shape, quantised = activation_shape(batch, generator), _quantised_type(generator)
    op = str(generator.choice(["QLinearAdd", "QLinearMul"], p=[0.75, 0.25]))
    second = shape if generator.random() < 0.85 else (*shape[:2], *[1] * len(shape[2:]))
    return kernel(op, [tensor(quantised, *shape), *_scale(quantised), tensor(quantised, *second), *_scale(quantised),
                       *_scale(quantised)], [shape], CONTRIB)


def quantised_activation(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An elementwise function of quantised numbers."""
    shape, quantised = activation_shape(batch, generator), _quantised_type(generator)
    op = str(generator.choice(["QLinearSigmoid", "QLinearLeakyRelu"]))
    slope: dict[str, Any] = {"alpha": as_float32(0.01)} if op == "QLinearLeakyRelu" else {}
    return kernel(op, [tensor(quantised, *shape), *_scale(quantised), *_scale(quantised)], [shape], CONTRIB, **slope)


def quantised_pool(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The mean of a quantised image."""
    pixels, quantised, channels_last = side(generator), _quantised_type(generator), int(generator.integers(2))
    depth = channels_at(pixels, generator)
    shape, out = [_channels_last(sizes) if channels_last else sizes
                  for sizes in ((batch, depth, pixels, pixels), (batch, depth, 1, 1))]
    inputs = [tensor(quantised, *shape), *_scale(quantised), *_scale(quantised)]
    return kernel("QLinearGlobalAveragePool", inputs, [out], CONTRIB, channels_last=channels_last)


def moved_channels(dtype: str, batch: int, generator: Generator) -> Kernel:
    """The transposition of a quantised image from channels first to channels last, or back."""
    pixels = side(generator)
    image = (batch, channels_at(pixels, generator), pixels, pixels)
    shape, order = (image, (0, 2, 3, 1)) if generator.random() < 0.5 else (_channels_last(image), (0, 3, 1, 2))
    transposed = tuple(shape[axis] for axis in order)
    return kernel("Transpose", [tensor(_quantised_type(generator), *shape)], [transposed], perm=list(order))


def bias(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A quantised bias converted to floating point, with one scale or one per channel."""
    depth = channels(generator)
    scales = (depth,) if generator.random() < 0.5 else ()
    inputs = [tensor("int32", depth, constant=True), *_scale("int32", *scales)]
    return kernel("DequantizeLinear", inputs, [Tensor(dtype="float32", shape=(depth,))], axis=0)


def unary(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An elementwise function."""
    return inferred(str(generator.choice(UNARY)), [tensor("float32", *activation_shape(batch, generator))])


def any_form(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An operator in a form or element type that CUDA lacks."""
    for _ in range(MAX_TRIES):
        drawn = SOME_FORMS[int(generator.integers(len(SOME_FORMS)))](dtype, batch, generator)
        if not on_cuda(drawn):
            return drawn
    raise ValueError(f"CUDA has all of {MAX_TRIES} drawn forms")


def above_threshold(dtype: str, batch: int, generator: Generator) -> Kernel:
    """ThresholdedRelu of an activation."""
    return inferred("ThresholdedRelu", [tensor(dtype, *activation_shape(batch, generator))], alpha=1.0)


NEWER: tuple[tuple[str, Callable[[str, int, Generator], Kernel]], ...] = (  # operators, and draws that may give them
    ("MaxPool", layers.pool), ("MaxPool", forms.pool), ("InstanceNormalization", layers.instance_norm),
    ("InstanceNormalization", forms.channel_norm), ("Elu", elementwise.UNARY["Elu"]), ("Selu", elementwise.UNARY["Selu"]),
    ("ThresholdedRelu", above_threshold))


def newer_version(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A pooling, normalisation or activation that CUDA lacks only in its version of opset 22."""
    op, draw = NEWER[int(generator.integers(len(NEWER)))]
    for _ in range(MAX_TRIES):
        if (drawn := draw(dtype, batch, generator)).op_type == op:
            return drawn
    raise ValueError(f"none of {MAX_TRIES} draws was a {op}")


def spectrum(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A Fourier transform of whole signals, or of overlapping frames."""
    if generator.random() < 0.5:
        frame = pick(FRAME_LENGTHS, generator)
        step, length = frame // pick([2, 4], generator), frame * pick([2, 8, 16, 40], generator)
        frames = (length - frame) // step + 1
        onesided = int(generator.random() < 0.8)
        out = (batch, frames, frame // 2 + 1 if onesided else frame, 2)
        signal, window = tensor("float32", batch, length, 1), tensor("float32", frame, constant=True)
        return kernel("STFT", [signal, scalar("int64", step), window, scalar("int64", frame)], [out], onesided=onesided)
    length = pick([64, 100, 128, 256, 400, 512, 1000, 1024, 2048], generator)
    lead, onesided = pick([1, 3, 16, 64, 256], generator), int(generator.integers(2))
    return kernel("DFT", [tensor("float32", batch, lead, length, 1), ABSENT, scalar("int64", 2)],
                  [(batch, lead, length // 2 + 1 if onesided else length, 2)], inverse=0, onesided=onesided)


def distinct(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Unique: the different numbers among many."""
    count = round(log_uniform(16, 200_000, generator))
    kept = max(1, count // pick([1, 2, 4, 16, 256], generator))
    values = indices((count,), kept) if generator.random() < 0.7 else tensor("float32", count)
    return kernel("Unique", [values], [Tensor(dtype=values.dtype, shape=(kept,)), *(
        Tensor(dtype="int64", shape=(size,)) for size in (kept, count, kept))], sorted=int(generator.integers(2)))


def drawn_classes(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Multinomial: classes drawn by their probabilities."""
    classes, count = pick([16, 100, 1000, 8192, 32_000, 128_000], generator), pick([1, 1, 4, 64], generator)
    return kernel("Multinomial", [tensor("float32", batch, classes)], [Tensor(dtype="int64", shape=(batch, count))], dtype=7,
                  sample_size=count)


def pool(dtype: str, batch: int, generator: Generator) -> Kernel:
    """LpPool: the root mean square of windows, or of an image."""
    pixels = side(generator)
    image = tensor("float32", batch, channels_at(pixels, generator), pixels, pixels)
    if generator.random() < 0.3:
        return inferred("GlobalLpPool", [image], p=2)
    window = pick([2, 3], generator)
    return inferred("LpPool", [image], p=2, kernel_shape=[window] * 2, strides=[2, 2])


def other(dtype: str, batch: int, generator: Generator) -> Kernel:
    """Bit operations on integers, means of several tensors, and determinants."""
    shape = any_shape(any_rank(generator, 1, 4), generator, 2.0**22)
    makers: tuple[Callable[[], Kernel], ...] = (
        lambda: inferred(str(generator.choice(["BitwiseAnd", "BitwiseOr", "BitwiseXor"])), [tensor("int64", *shape)] * 2),
        lambda: inferred("BitShift", [tensor("uint8", *shape)] * 2, direction="LEFT"),
        lambda: inferred("BitwiseNot", [tensor("int32", *shape)]),
        lambda: inferred("Mean", [tensor("float32", *shape)] * int(generator.integers(2, 5))),
        lambda: inferred("Det", [tensor("float32", batch, *[pick([2, 3, 4, 16, 64], generator)] * 2)]))
    return makers[int(generator.integers(len(makers)))]()


def on_shapes(dtype: str, batch: int, generator: Generator) -> Kernel:
    """An operator on a few integers, such as a tensor's sizes: a session runs it on the CPU although CUDA could."""
    count = pick([1, 1, 2, 3, 4, 8, 64, 512], generator)
    values, other_values = tensor("int64", count), tensor("int64", count, constant=True)
    makers: tuple[Callable[[], Kernel], ...] = (
        lambda: inferred(str(generator.choice(["Add", "Sub", "Mul", "Div", "Max", "Min", "Equal", "Greater", "Less"])),
                         [values, other_values]),
        lambda: inferred("Cast", [values], to=type_code(str(generator.choice(["float32", "int32", "bool"])))),
        lambda: inferred("Slice", [values, numbers(0), numbers(-(-count // 2)), numbers(0)]),
        lambda: inferred("Gather", [values, indices((pick([1, 2, 4], generator),), count, constant=True)], axis=0),
        lambda: inferred("Concat", [values] * pick([2, 3, 4], generator), axis=0),
        lambda: inferred("Where", [tensor("bool", count), values, other_values]),
        lambda: inferred(str(generator.choice(["ReduceProd", "ReduceSum", "ReduceMin", "ReduceMax"])), [values], keepdims=1))
    return makers[int(generator.integers(len(makers)))]()


def table_of_features(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A step of scikit-learn's pipelines on a table: its columns are scaled, imputed, normalised or weighted."""
    examples, columns = batch * pick([1, 16, 256, 4096], generator), pick([4, 16, 30, 100, 784], generator)
    table, classes, weights = tensor("float32", examples, columns), pick([2, 3, 10, 100], generator), [0.5] * columns
    op = str(generator.choice(["Scaler", "Imputer", "Normalizer", "LinearClassifier", "LinearRegressor"]))
    attributes_of: dict[str, dict[str, Any]] = {
        "Scaler": {"offset": weights, "scale": weights}, "Imputer": {"imputed_value_floats": weights},
        "Normalizer": {"norm": str(generator.choice(["L1", "L2", "MAX"]))},
        "LinearRegressor": {"coefficients": weights, "intercepts": [0.0], "targets": 1, "post_transform": "NONE"},
        "LinearClassifier": {"coefficients": weights * classes, "intercepts": [0.0] * classes, "multi_class": 1,
                             "classlabels_ints": list(range(classes)), "post_transform": "SOFTMAX"}}
    scores = Tensor(dtype="float32", shape=(examples, {"LinearRegressor": 1, "LinearClassifier": classes}.get(op, columns)))
    outputs = [Tensor(dtype="int64", shape=(examples,)), scores] if op == "LinearClassifier" else [scores]
    return describe_kernel(op, ML, 1, attributes_of[op], [table], outputs)
