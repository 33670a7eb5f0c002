"""Draws typical sizes of networks, and describes kernels with them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hase.kernel_model.sampling.draws import without_large_weights
from hase.records.kernel_record import Kernel, KernelInput, Tensor, session_dtype
from hase.records.kernel_types import default_of, describe_kernel
from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.ort_sessions import outputs_by_schema

SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 16, 17, 18, 20, 24, 27, 28, 32, 35, 36, 40, 48, 55, 56, 64, 72, 75, 80, 96,
         109, 112, 128, 144, 149, 150, 160, 192, 224, 256, 288, 320)
HALVED_SIDES = (7, 14, 28, 56, 112, 224)  # an image of 224, halved again and again
CHANNEL_MULTIPLES, MULTIPLE_WEIGHTS = (2, 8, 16, 32, 64), (0.08, 0.34, 0.2, 0.18, 0.2)
POWERS_OF_TWO = (16, 32, 64, 128, 256, 512, 1024, 2048)
CHANNELS_TIMES_SIDE = 3584  # of a typical image inside a network: 64 channels at side 56, 512 at 7
TOKENS = (1, 16, 32, 49, 50, 64, 65, 100, 128, 144, 145, 196, 197, 225, 256, 257, 384, 400, 512, 577, 785, 1024, 1025, 2048,
          3136)
HEADS, HEAD_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), (16, 24, 32, 48, 64, 80, 96, 128)
VOCABULARIES = (1000, 8000, 16000, 30522, 32000, 50257, 100000, 200000)
OPSET = 20  # of the operators below, as torch exports them now
CONTRIB = "com.microsoft"
Generator = np.random.Generator


def pick(values: Sequence[int], generator: Generator) -> int:
    """One of some numbers, at random."""
    return int(generator.choice(values))


def log_uniform(low: float, high: float, generator: Generator) -> float:
    return float(np.exp(generator.uniform(np.log(low), np.log(high))))


def channels(generator: Generator, low: float = 8, high: float = 2560) -> int:
    """A log-uniform number of channels: a power of two or a multiple of a small number."""
    size = log_uniform(low, high, generator)
    if generator.random() < 0.25:
        return min(POWERS_OF_TWO, key=lambda power: abs(np.log(power / size)))
    multiple = int(generator.choice(CHANNEL_MULTIPLES, p=MULTIPLE_WEIGHTS))
    return max(multiple, round(size / multiple) * multiple)


def channels_at(image_side: int, generator: Generator) -> int:
    """Channels of an image: mostly many for small images and few for large ones, as in networks."""
    if generator.random() < 0.2:
        return channels(generator)
    usual = CHANNELS_TIMES_SIDE / max(image_side, 2)
    return channels(generator, min(max(usual / 8, 8), 512), min(max(usual * 6, 64), 2560))


def side(generator: Generator) -> int:
    """The side of an image: a halved 224, or any of SIDES."""
    return int(generator.choice(HALVED_SIDES if generator.random() < 0.4 else SIDES))


def heads_and_tokens(batch: int, generator: Generator) -> tuple[int, int, int, int]:
    """Sizes of attention: images or windows, heads, tokens of each image or window, and head size."""
    windows = pick([1, 1, 1, 4, 16, 64], generator)
    return batch * windows, pick(HEADS, generator), pick(TOKENS[1:18], generator), pick(HEAD_WIDTHS, generator)


class SizesByLetter(dict[str, int]):
    """The sizes of one kernel by letter, each drawn when first used. `b` batch, `B` batch times windows, `c` channels that suit
    the side, `s` image side, `f` frames of a video, `t` tokens, `h` heads, `d` head size, `x` layer width, `r` rows (a batch of
    tokens), `n` windows along a side, `w` window side, `k` a few, `v` words, `l` signal length. A digit is itself."""

    def __init__(self, batch: int, generator: Generator) -> None:
        super().__init__(b=batch)
        self._generator = generator

    def __missing__(self, letter: str) -> int:
        self[letter] = int(letter) if letter.isdigit() else self._draw(letter)
        return self[letter]

    def shape(self, letters: str) -> tuple[int, ...]:
        """The shape of a tensor with axes `letters`."""
        return tuple(self[letter] for letter in letters)

    def _draw(self, letter: str) -> int:
        generator = self._generator
        if letter == "B":
            return self["b"] * pick([1, 1, 4, 16, 64], generator)
        if letter == "c":
            return channels_at(self["s"], generator)
        if letter == "s":
            return side(generator)
        if letter == "x":
            return channels(generator, 32, 5120)
        if letter == "r":
            return self["b"] * pick(TOKENS, generator)
        if letter == "l":
            return round(log_uniform(16, 4096, generator))
        return pick({"f": (1, 2, 4, 8, 16), "t": TOKENS, "h": HEADS, "d": HEAD_WIDTHS, "n": (1, 2, 4, 7, 8, 14, 16),
                     "w": (2, 4, 7, 8, 14), "k": (1, 2, 3, 4), "v": VOCABULARIES}[letter], generator)


SHAPES = {  # of activations, and how often each is drawn
    "bcss": 0.36, "btx": 0.18, "bssc": 0.08, "bhtt": 0.05, "bhtd": 0.08, "bx": 0.03, "rx": 0.04, "x": 0.01, "bc11": 0.03,
    "bt1": 0.02, "b1": 0.01, "bcl": 0.02, "bcfss": 0.04, "bfssc": 0.015, "bkhtd": 0.015, "bnnwwc": 0.015, "bknwnwhd": 0.005}


def activation_shape(batch: int, generator: Generator) -> tuple[int, ...]:
    """The shape of an activation: images, tokens, attention, rows, a signal or a video."""
    letters = str(generator.choice(list(SHAPES), p=np.array(list(SHAPES.values())) / sum(SHAPES.values())))
    return SizesByLetter(batch, generator).shape(letters)


def as_float32(value: float) -> float:
    """A number rounded to float32 as in a model's file, so that equal kernels have equal ids."""
    return float(np.float32(value))


def tensor(dtype: str, *shape: int, constant: bool = False) -> KernelInput:
    return KernelInput(dtype=dtype, shape=shape, constant=constant)


def with_weight(x: KernelInput, weight: Sequence[int], columns: int, biased: float, generator: Generator) -> list[KernelInput]:
    """The inputs of a convolution or product: tensor, constant weight and, with probability `biased`, a bias."""
    bias = [tensor(x.dtype, columns, constant=True)] if generator.random() < biased else []
    return [x, tensor(x.dtype, *weight, constant=True), *bias]


def scalar(dtype: str, value: float) -> KernelInput:
    """A constant number, rounded to the type."""
    return KernelInput(dtype=dtype, shape=(), constant=True, values=(np.dtype(dtype).type(value).item(),))


def numbers(*values: int) -> KernelInput:
    """Constant integers: axes, sizes, positions."""
    return KernelInput(dtype="int64", shape=(len(values),), constant=True, values=values)


def indices(shape: Sequence[int], size: int, constant: bool = False) -> KernelInput:
    """Indices along an axis of `size`."""
    return KernelInput(dtype="int64", shape=tuple(shape), constant=constant, value_range=(0, max(size - 1, 0)))


ABSENT = KernelInput(dtype="")  # an optional input that is left out


def kernel(op_type: str, inputs: Sequence[KernelInput], outputs: Sequence[Sequence[int] | Tensor], domain: str = "",
           opset: int = OPSET, **attributes: Any) -> Kernel:
    """A kernel's description; an output given as a shape has the first input's type. `opset` is of ONNX's domain."""
    tensors = [shape if isinstance(shape, Tensor) else Tensor(dtype=inputs[0].dtype, shape=tuple(shape)) for shape in outputs]
    return describe_kernel(op_type, domain, 1 if domain == CONTRIB else opset, attributes, inputs, tensors)


def inferred(op_type: str, inputs: Sequence[KernelInput], **attributes: Any) -> Kernel:
    """A kernel's description whose only output and remaining attributes follow from the operator's schema."""
    opset, kept = max(OPSET, _schema(op_type).since_version), _defaults(op_type) | attributes
    unshaped = describe_kernel(op_type, "", opset, kept, inputs, [Tensor(dtype=inputs[0].dtype, shape=())])
    values = outputs_by_schema(without_large_weights(unshaped).SerializeToString())
    output = next((value for value in values if value.name == "y0"), None)
    if output is None or any(not isinstance(size, int) or size < 1 for size in output.shape):
        raise UserError(f"{op_type}: the sizes drawn do not fit together")
    return describe_kernel(op_type, "", opset, kept, inputs, [
        Tensor(dtype=session_dtype(output.type), shape=tuple(output.shape))])


@functools.cache
def _schema(op_type: str) -> Any:
    """The newest definition of an operator."""
    return onnx.defs.get_schema(op_type, onnx.defs.onnx_opset_version(), "")


@functools.cache
def _defaults(op_type: str) -> dict[str, Any]:
    """The attributes of an operator with their default values, as ONNX Runtime writes them."""
    schema = _schema(op_type)
    return {name: value for name in schema.attributes if (value := default_of(schema, name)) is not None}
