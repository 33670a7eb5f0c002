"""Sizes as networks have them, and the parts that a kernel is described with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hase.records.kernel_record import Kernel, KernelInput, Tensor
from hase.records.kernel_types import describe_kernel

SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 16, 17, 18, 20, 24, 27, 28, 32, 35, 36, 40, 48, 55, 56, 64, 72, 75, 80, 96,
         109, 112, 128, 144, 149, 150, 160, 192, 224, 256, 288, 320)
HALVED = (7, 14, 28, 56, 112, 224)  # an image of 224, halved again and again
CHANNEL_MULTIPLES, MULTIPLE_WEIGHTS = (2, 8, 16, 32, 64), (0.08, 0.34, 0.2, 0.18, 0.2)
POWERS = (16, 32, 64, 128, 256, 512, 1024, 2048)
WIDTH_SIDE = 3584  # channels × side of a typical image inside a network: 64 at 56, 512 at 7
TOKENS = (1, 16, 32, 49, 50, 64, 65, 100, 128, 144, 145, 196, 197, 225, 256, 257, 384, 400, 512, 577, 785, 1024, 1025, 2048,
          3136)
HEADS, HEAD_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), (16, 24, 32, 48, 64, 80, 96, 128)
VOCABULARIES = (1000, 8000, 16000, 30522, 32000, 50257, 100000, 200000)
OPSET = 20  # of the operators below, as torch exports them now
CONTRIB = "com.microsoft"
Generator = np.random.Generator


def pick(values: Sequence[int], generator: Generator) -> int:
    """One of some numbers."""
    return int(generator.choice(values))


def log_uniform(low: float, high: float, generator: Generator) -> float:
    return float(np.exp(generator.uniform(np.log(low), np.log(high))))


def channels(generator: Generator, low: float = 8, high: float = 2560) -> int:
    """A number of channels: a power of two or a multiple of a small number, all magnitudes alike."""
    size = log_uniform(low, high, generator)
    if generator.random() < 0.25:
        return min(POWERS, key=lambda power: abs(np.log(power / size)))
    multiple = int(generator.choice(CHANNEL_MULTIPLES, p=MULTIPLE_WEIGHTS))
    return max(multiple, round(size / multiple) * multiple)


def channels_at(near: int, generator: Generator) -> int:
    """Channels of an image of that side: networks give small images many and large ones few; some draws heed nothing."""
    if generator.random() < 0.2:
        return channels(generator)
    usual = WIDTH_SIDE / max(near, 2)
    return channels(generator, min(max(usual / 8, 8), 512), min(max(usual * 6, 64), 2560))


def side(generator: Generator) -> int:
    """An image side, small ones as often as large ones."""
    return int(generator.choice(HALVED if generator.random() < 0.4 else SIDES))


def tokens(batch: int, generator: Generator) -> tuple[int, int, int, int]:
    """Images or windows, heads, tokens of each, and the width of a head, as attention takes them."""
    windows = pick([1, 1, 1, 4, 16, 64], generator)
    return batch * windows, pick(HEADS, generator), pick(TOKENS[1:18], generator), pick(HEAD_WIDTHS, generator)


class Sizes:
    """The sizes of one kernel by letter, each drawn when it is first asked for.

    `b` batch, `B` batch times windows, `c` channels that suit the side, `s` the side of an image, `f` frames of a video, `t`
    tokens, `h` heads, `d` the width of a head, `x` the width of a layer, `r` rows (a batch of tokens), `n` windows along a
    side, `w` the side of a window, `k` a few, `v` words, `l` the length of a signal. A digit is itself.
    """

    def __init__(self, batch: int, generator: Generator) -> None:
        self._batch, self._generator = batch, generator
        self._known: dict[str, int] = {}

    def __getitem__(self, letter: str) -> int:
        if letter.isdigit():
            return int(letter)
        if letter not in self._known:
            self._known[letter] = self._draw(letter)
        return self._known[letter]

    def shape(self, letters: str) -> tuple[int, ...]:
        """The sizes of a tensor whose axes are `letters`."""
        return tuple(self[letter] for letter in letters)

    def _draw(self, letter: str) -> int:
        generator, batch = self._generator, self._batch
        if letter == "b":
            return batch
        if letter == "B":
            return batch * pick([1, 1, 4, 16, 64], generator)
        if letter == "c":
            return channels_at(self["s"], generator)
        if letter == "s":
            return side(generator)
        if letter == "x":
            return channels(generator, 32, 5120)
        if letter == "r":
            return batch * pick(TOKENS, generator)
        if letter == "l":
            return round(log_uniform(16, 4096, generator))
        return pick({"f": (1, 2, 4, 8, 16), "t": TOKENS, "h": HEADS, "d": HEAD_WIDTHS, "n": (1, 2, 4, 7, 8, 14, 16),
                     "w": (2, 4, 7, 8, 14), "k": (1, 2, 3, 4), "v": VOCABULARIES}[letter], generator)


SHAPES = {  # of activations, and how often each is drawn
    "bcss": 0.36, "btx": 0.18, "bssc": 0.08, "bhtt": 0.05, "bhtd": 0.08, "bx": 0.03, "rx": 0.04, "x": 0.01, "bc11": 0.03,
    "bt1": 0.02, "b1": 0.01, "bcl": 0.02, "bcfss": 0.04, "bfssc": 0.015, "bkhtd": 0.015, "bnnwwc": 0.015, "bknwnwhd": 0.005}


def activation_shape(batch: int, generator: Generator) -> tuple[int, ...]:
    """The shape of a tensor between two operators: of images, tokens, attention, rows, a signal or a video."""
    letters = str(generator.choice(list(SHAPES), p=np.array(list(SHAPES.values())) / sum(SHAPES.values())))
    return Sizes(batch, generator).shape(letters)


def as_float32(value: float) -> float:
    """As a model's file holds it, so that the same kernel has one id."""
    return float(np.float32(value))


def tensor(dtype: str, *shape: int, constant: bool = False) -> KernelInput:
    return KernelInput(dtype=dtype, shape=shape, constant=constant)


def with_weight(x: KernelInput, weight: Sequence[int], columns: int, biased: float, generator: Generator) -> list[KernelInput]:
    """The inputs of a convolution or product: a tensor, a constant weight, and as often as `biased` says a bias of `columns`
    numbers."""
    bias = [tensor(x.dtype, columns, constant=True)] if generator.random() < biased else []
    return [x, tensor(x.dtype, *weight, constant=True), *bias]


def scalar(dtype: str, value: float) -> KernelInput:
    """A constant number, as the type holds it."""
    return KernelInput(dtype=dtype, shape=(), constant=True, values=(np.dtype(dtype).type(value).item(),))


def numbers(*values: int) -> KernelInput:
    """Constant whole numbers: axes, sizes, positions."""
    return KernelInput(dtype="int64", shape=(len(values),), constant=True, values=values)


def indices(shape: Sequence[int], size: int, constant: bool = False) -> KernelInput:
    """Positions along an axis of `size`."""
    return KernelInput(dtype="int64", shape=tuple(shape), constant=constant, value_range=(0, max(size - 1, 0)))


ABSENT = KernelInput(dtype="")  # an optional input that is left out


def kernel(op_type: str, inputs: Sequence[KernelInput], outputs: Sequence[Sequence[int] | Tensor], domain: str = "",
           opset: int = OPSET, **attributes: Any) -> Kernel:
    """A described kernel; an output that is given as a shape has the type of the first input. `opset` is of ONNX's own set."""
    made = [output if isinstance(output, Tensor) else Tensor(dtype=inputs[0].dtype, shape=tuple(output)) for output in outputs]
    return describe_kernel(op_type, domain, 1 if domain == CONTRIB else opset, attributes, inputs, made)
