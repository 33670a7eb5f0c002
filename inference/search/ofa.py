"""The search space of once-for-all networks based on MobileNetV3 (Cai et al., "Once-for-All", ICLR 2020).

Five stages have two to four blocks each, with a window of 3, 5 or 7 and an expansion of 3, 4 or 6, at two widths and several
image sizes. The name of a network is its full description: `ofa_r160_w1.2_33.56_…` has an image of 160 × 160, 1.2 times the
channels, and the window and the expansion of each block, by stage. Its layers are those of torchvision's `MobileNetV3`, with
1280 features before the classes (a test checks that); the weights of the paper's networks can't be loaded into them.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

from hase.inference.search.network import GraphPart, NamedTensor, PartBuilder, join_parts
from hase.records.kernel_record import ModelRecord
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour

SIDES, WIDTHS = (128, 144, 160, 176, 192, 208, 224), (1.0, 1.2)
DEPTHS, WINDOWS, EXPANSIONS = (2, 3, 4), (3, 5, 7), (3, 4, 6)
FIRST_CHANNELS, CLASSES, FEATURES, LAST_EXPANSION = 16, 1000, 1280, 6
ONE_SIXTH = 0.1666666716337204  # in single precision
PREFIX = "ofa"


class OfaStage(NamedTuple):
    """The properties that the blocks of a stage share; only the first one has the stride."""

    channels: int
    stride: int
    activation: str
    squeeze_excitation: bool


STAGES = (OfaStage(24, 2, "Relu", False), OfaStage(40, 2, "Relu", True), OfaStage(80, 2, "HardSwish", False),
          OfaStage(112, 1, "HardSwish", True), OfaStage(160, 2, "HardSwish", True))


class OfaBlock(NamedTuple):
    """The choices for one block."""

    window: int
    expansion: int


class OfaNetwork(NamedTuple):
    """A network of the space: image size, width factor, and the blocks of each stage."""

    side: int
    width: float
    stages: tuple[tuple[OfaBlock, ...], ...]

    @property
    def name(self) -> str:
        blocks = (".".join(f"{block.window}{block.expansion}" for block in stage) for stage in self.stages)
        return "_".join([PREFIX, f"r{self.side}", f"w{self.width}", *blocks])


def network_named(name: str) -> OfaNetwork:
    """The network with this name."""
    found = re.fullmatch(PREFIX + r"_r(\d+)_w(\d\.\d)" + len(STAGES) * r"_(\d\d(?:\.\d\d)*)", name)
    if found:
        side, width, *stages = found.groups()
        network = OfaNetwork(int(side), float(width), tuple(
            tuple(OfaBlock(int(block[0]), int(block[1])) for block in stage.split(".")) for stage in stages))
        if network.side in SIDES and network.width in WIDTHS and all(
                len(stage) in DEPTHS and all(block.window in WINDOWS and block.expansion in EXPANSIONS for block in stage)
                for stage in network.stages):
            return network
    raise UserError(f"{name}: no network of this space, such as {draw_network(random.Random(0)).name}; the space has sides "
                    f"{SIDES}, widths {WIDTHS}, {DEPTHS} blocks a stage, windows {WINDOWS} and expansions {EXPANSIONS}")


def draw_network(generator: random.Random) -> OfaNetwork:
    """A random network."""
    pick = generator.choice
    return OfaNetwork(pick(SIDES), pick(WIDTHS), tuple(
        tuple(OfaBlock(pick(WINDOWS), pick(EXPANSIONS)) for _ in range(pick(DEPTHS))) for _ in STAGES))


def choices(count: int, seed: int = 0) -> Iterator[str]:
    """Names of random networks; a larger count only adds names at the end."""
    generator = random.Random(seed)
    return (draw_network(generator).name for _ in range(count))


def make(name: str, flavour: Flavour) -> ModelRecord:
    """The record of a network as ONNX Runtime runs it on a GPU, for one image."""
    if flavour.device != "cuda":
        raise UserError(f"{PREFIX}: these are graphs as ONNX Runtime runs them on a GPU; name such a target, e.g. nvidia-h200")
    return join_parts(name, flavour, *_parts(network_named(name)))


def rounded_channels(channels: float) -> int:
    """The nearest multiple of 8 channels, at most a tenth below (torchvision's `_make_divisible`)."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near


def layer_channels(width: float) -> tuple[int, ...]:
    """The channels of the first layer, and of each stage."""
    return tuple(rounded_channels(width * channels) for channels in (FIRST_CHANNELS, *(stage.channels for stage in STAGES)))


def _parts(network: OfaNetwork) -> tuple[NamedTensor, list[GraphPart]]:
    """The input image, and the parts of a network."""
    first, *channels = layer_channels(network.width)
    image = NamedTensor("input", (1, 3, network.side, network.side))
    parts = [_stem(image, first)]
    for number, (stage, blocks) in enumerate(zip(STAGES, network.stages, strict=True)):
        for index, block in enumerate(blocks):
            is_last = index == len(blocks) - 1  # a stage's output has one name at any depth, so that cached parts fit
            parts.append(_block(f"stage{number}.{index}", f"stage{number}" if is_last else "", parts[-1].output,
                                channels[number], stage.stride if index == 0 else 1, block, stage.activation,
                                stage.squeeze_excitation))
    return image, [*parts, _head(parts[-1].output)]


@functools.lru_cache(1000)
def _stem(image: NamedTensor, channels: int) -> GraphPart:
    """The first convolution, and a block without expansion."""
    stem = PartBuilder("stem")
    inner = stem.unary("act", "HardSwish", stem.convolution("conv", image, channels, 3, 2))
    output = stem.unary("first.act", "Relu", stem.convolution("first.depthwise", inner, channels, 3, groups=channels))
    output = stem.convolution("first.project", output, channels)
    return stem.part(stem.add("first.add", "Add", [output, inner], output.shape))


@functools.lru_cache(20_000)
def _block(name: str, output_name: str, image: NamedTensor, channels: int, stride: int, block: OfaBlock, activation: str,
           squeeze_excitation: bool) -> GraphPart:
    """An inverted residual block; its output is called `output_name`, if given."""
    builder, expanded = PartBuilder(name), rounded_channels(block.expansion * image.shape[1])
    inner = builder.unary("act1", activation, builder.convolution("expand", image, expanded))
    inner = builder.unary("act2", activation, builder.convolution("depthwise", inner, expanded, block.window, stride, expanded))
    if squeeze_excitation:
        squeezed = builder.convolution("fc1", _mean(builder, inner), rounded_channels(expanded // 4))
        squeezed = builder.unary("squeezed", "Relu", squeezed)
        gate = builder.unary("gate", "HardSigmoid", builder.convolution("fc2", squeezed, expanded), alpha=ONE_SIXTH, beta=0.5)
        inner = builder.add("excited", "Mul", [gate, inner], inner.shape)
    output = builder.convolution("project", inner, channels)
    if output.shape == image.shape:
        output = builder.add("add", "Add", [output, image], output.shape)
    return builder.part(output, output_name)


@functools.lru_cache(1000)
def _head(image: NamedTensor) -> GraphPart:
    """The last convolution, and the classifier."""
    head = PartBuilder("head")
    pooled = _mean(head, head.unary("act", "HardSwish", head.convolution("conv", image, LAST_EXPANSION * image.shape[1])))
    flat = head.add("flat", "Reshape", [pooled], pooled.shape[:2], constants=[(2,)], attributes={"allowzero": 1},
                    values=pooled.shape[:2])
    hidden = head.unary("hidden", "HardSwish", _linear(head, "features", flat, FEATURES))
    return head.part(_linear(head, "classes", hidden, CLASSES))


def _mean(builder: PartBuilder, image: NamedTensor) -> NamedTensor:
    return builder.add("mean", "ReduceMean", [image], (*image.shape[:2], 1, 1), constants=[(2,)],
                       attributes={"keepdims": 1, "noop_with_empty_axes": 0}, values=(-1, -2))  # of the axes


def _linear(builder: PartBuilder, name: str, values: NamedTensor, features: int) -> NamedTensor:
    return builder.add(name, "Gemm", [values], (values.shape[0], features), [(features, values.shape[1]), (features,)],
                       {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 1})
