"""Random networks (convolutional, transformers, mixtures), each determined by its name, such as `random_conv_7`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hase.model_zoo.exporting.network_export import Network, NetworkInput, NetworkSource
from hase.model_zoo.exporting.torch_models import SEED, make_like_trained
from hase.utils.errors import UserError

T = TypeVar("T")
NAME = re.compile(r"random_(conv|transformer|mixed)_(\d+)")
CLASSES = 100
WORDS = 8000
ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.ELU, nn.Tanh, nn.Mish, nn.ReLU6, nn.Sigmoid, nn.Softplus, nn.Hardsigmoid,
    lambda: nn.LeakyReLU(0.1), lambda: nn.GELU("tanh"))


class RandomChoices:
    """Random choices, always the same for one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def pick(self, *choices: T) -> T:
        return choices[int(self._generator.integers(len(choices)))]

    def chance(self, probability: float) -> bool:
        return bool(self._generator.random() < probability)


class ImageNorm(nn.Module):
    """LayerNorm over the channels of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


NORMS: tuple[Callable[[int], nn.Module], ...] = (  # norms for images; most have BatchNorm
    nn.BatchNorm2d, nn.BatchNorm2d, nn.BatchNorm2d, lambda width: nn.GroupNorm(8, width), ImageNorm,
    lambda width: nn.InstanceNorm2d(width, affine=True))


class ChannelGate(nn.Module):
    """Scales each channel by the output of a small network on the channels' means."""

    def __init__(self, width: int, draw: RandomChoices) -> None:
        super().__init__()
        inner = max(8, width // draw.pick(4, 8, 16))
        self.inner = nn.Sequential(nn.Conv2d(width, inner, 1), draw.pick(*ACTIVATIONS)(), nn.Conv2d(inner, width, 1),
                                   draw.pick(nn.Sigmoid, nn.Hardsigmoid)())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inner(x.mean((2, 3), keepdim=True))


class ConvBlock(nn.Module):
    """Convolutions of a random form around a width, with a residual, a concatenation or neither."""

    def __init__(self, width: int, draw: RandomChoices, norm: Callable[[int], nn.Module],
                 activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.join = draw.pick("add", "add", "concat", "none")
        form = draw.pick("plain", "bottleneck", "inverted", "grouped", "depthwise", "split")
        kernel = draw.pick(3, 3, 5, 7)
        if form == "plain":
            layers = [nn.Conv2d(width, width, min(kernel, 5), 1, min(kernel, 5) // 2), norm(width), activation()]
        elif form == "split":
            layers = [nn.Conv2d(width, width, (1, kernel), 1, (0, kernel // 2)), activation(),
                      nn.Conv2d(width, width, (kernel, 1), 1, (kernel // 2, 0)), norm(width)]
        elif form == "depthwise":
            layers = [nn.Conv2d(width, width, kernel, 1, kernel // 2, groups=width), norm(width),
                      nn.Conv2d(width, 4 * width, 1), activation(), nn.Conv2d(4 * width, width, 1)]
        else:
            inner = {"bottleneck": max(8, width // 4 // 8 * 8), "inverted": width * draw.pick(2, 4, 6), "grouped": width}[form]
            groups = {"bottleneck": 1, "inverted": inner, "grouped": max(1, inner // 8)}[form]
            kernel = kernel if form == "inverted" else 3
            layers = [nn.Conv2d(width, inner, 1, bias=False), norm(inner), activation(),
                      nn.Conv2d(inner, inner, kernel, 1, kernel // 2, groups=groups, bias=False), norm(inner), activation()]
            layers += [ChannelGate(inner, draw)] if draw.chance(0.4) else []
            layers += [nn.Conv2d(inner, width, 1, bias=False), norm(width)]
        self.layers, self.last = nn.Sequential(*layers), activation() if draw.chance(0.5) else nn.Identity()
        self.squeeze = nn.Conv2d(2 * width, width, 1) if self.join == "concat" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(x)
        if self.join == "add":
            out = out + x
        elif self.join == "concat":
            out = self.squeeze(torch.cat((out, x), 1))
        return self.last(out)


def conv_stages(draw: RandomChoices, before: int, width: int, stages: int) -> tuple[nn.Sequential, int]:
    """Stages of ConvBlocks, each of which first halves the image, and the final number of channels."""
    norm = draw.pick(*NORMS)
    activation = draw.pick(*ACTIVATIONS)
    layers: list[nn.Module] = []
    for _ in range(stages):
        how = draw.pick("stride", "stride", "max", "mean", "patch", "unshuffle")
        if how == "stride":
            layers += [nn.Conv2d(before, width, 3, 2, 1)]
        elif how == "patch":
            layers += [nn.Conv2d(before, width, 2, 2)]
        elif how == "unshuffle":
            layers += [nn.PixelUnshuffle(2), nn.Conv2d(4 * before, width, 1)]
        else:
            layers += [nn.Conv2d(before, width, 3, 1, 1), nn.MaxPool2d(3, 2, 1) if how == "max" else nn.AvgPool2d(2)]
        layers += [norm(width), activation(), *(ConvBlock(width, draw, norm, activation) for _ in range(draw.pick(1, 2, 3)))]
        before, width = width, min(1024, int(width * draw.pick(1.25, 1.5, 2.0, 2.0)) // 8 * 8)
    return nn.Sequential(*layers), before


class Attention(nn.Module):
    """Attention with as many key heads as query heads or fewer, or attention that is linear in the length."""

    def __init__(self, width: int, heads: int, key_heads: int, linear: bool) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size, self.linear = heads, key_heads, width // heads, linear
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * key_heads * self.size)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query = self.query(x).reshape(batch, length, self.heads, self.size).transpose(1, 2)
        key, value = self.key_value(x).reshape(batch, length, 2, self.key_heads, self.size).permute(2, 0, 3, 1, 4)
        share = self.heads // self.key_heads
        if share > 1:
            key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        if self.linear:
            mixed = F.softmax(query, -1) @ (F.softmax(key, -2).transpose(-1, -2) @ value)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class RootMeanSquareNorm(nn.Module):
    """A norm that subtracts no mean, as many decoders have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class FeedForward(nn.Module):
    """Two products with an activation between them, perhaps gated."""

    def __init__(self, width: int, inner: int, gated: bool, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner * (1 + gated)), nn.Linear(inner, width)
        self.gated, self.activation = gated, activation()

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(self.activation(self.up(x)))
        gate, values = self.up(x).chunk(2, -1)
        return self.down(self.activation(gate) * values)


class Mixer(nn.Module):
    """A depthwise convolution along the sequence, in place of attention."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.along, self.out = nn.Conv1d(width, width, kernel, 1, kernel // 2, groups=width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.along(x.transpose(1, 2)).transpose(1, 2)))


class TransformerLayer(nn.Module):
    """Attention and a feed-forward, each with a norm before or after it."""

    def __init__(self, width: int, mix: nn.Module, forward: nn.Module, norm: Callable[[int], nn.Module],
                 norm_first: bool) -> None:
        super().__init__()
        self.parts, self.norms = nn.ModuleList((mix, forward)), nn.ModuleList((norm(width), norm(width)))
        self.norm_first = norm_first

    def forward(self, x: Tensor) -> Tensor:
        for part, norm in zip(self.parts, self.norms, strict=True):
            x = x + part(norm(x)) if self.norm_first else norm(x + part(x))
        return x


def transformer_layers(draw: RandomChoices, width: int) -> nn.Sequential:
    """Two to six layers of one random form; `width` is divisible by 64."""
    size = draw.pick(32, 64)
    heads = width // size
    key_heads = draw.pick(heads, heads, 1, heads // 2 if heads % 2 == 0 else heads)
    norm: Callable[[int], nn.Module] = draw.pick(nn.LayerNorm, nn.LayerNorm, RootMeanSquareNorm)
    activation, inner = draw.pick(nn.GELU, *ACTIVATIONS), int(width * draw.pick(2, 3, 4))
    kind, gated, norm_first = draw.pick("softmax", "softmax", "linear", "conv"), draw.chance(0.4), draw.chance(0.6)
    kernel = draw.pick(3, 7, 15)
    return nn.Sequential(*(TransformerLayer(
        width, Mixer(width, kernel) if kind == "conv" else Attention(width, heads, key_heads, kind == "linear"),
        FeedForward(width, inner, gated, activation), norm, norm_first) for _ in range(draw.pick(2, 3, 4, 6))))


class ImageNetwork(nn.Module):
    """Stages of convolutions, perhaps a transformer after them, and a classification or an output image."""

    def __init__(self, draw: RandomChoices, mixed: bool) -> None:
        super().__init__()
        width = draw.pick(16, 24, 32, 48, 64)
        self.stages, width = conv_stages(draw, 3, width, draw.pick(2, 3) if mixed else draw.pick(3, 4, 5))
        inner = 64 * draw.pick(2, 3, 4, 6)
        self.into = nn.Conv2d(width, inner, 1) if mixed else None
        self.layers = transformer_layers(draw, inner) if mixed else None
        width = inner if mixed else width
        self.maps = draw.chance(0.3)
        scale = draw.pick(2, 4)
        self.head = (nn.Sequential(nn.ConvTranspose2d(width, 32, scale, scale), nn.ReLU(), nn.Conv2d(32, 8, 3, 1, 1))
                     if self.maps else nn.Linear(width, CLASSES))

    def forward(self, image: Tensor) -> Tensor:
        x = self.stages(image)
        if self.into is not None and self.layers is not None:
            x = self.into(x)
            x = self.layers(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        return self.head(x) if self.maps else self.head(x.mean((2, 3)))


class WordNetwork(nn.Module):
    """A transformer of words, with a classification or scores of words at each position."""

    def __init__(self, draw: RandomChoices) -> None:
        super().__init__()
        width = 64 * draw.pick(2, 4, 6, 8, 12, 16)
        self.words, self.layers = nn.Embedding(WORDS, width), transformer_layers(draw, width)
        self.classifies = draw.chance(0.5)
        self.head = nn.Linear(width, CLASSES if self.classifies else WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.layers(self.words(words))
        return self.head(x.mean(1) if self.classifies else x)


def check_names(names: Iterable[str]) -> None:
    """Raises `UserError` if one of these is not the name of a random network."""
    for name in names:
        if not NAME.fullmatch(name):
            raise UserError(f"{name}: a random network is called random_conv_N, random_transformer_N or random_mixed_N, "
                            "where N is its seed")


def build_network(name: str, family: str) -> Network:
    """The random network with this name, in float32."""
    kind, number = NAME.fullmatch(name).groups()  # type: ignore[union-attr]
    draw = RandomChoices(3 * int(number) + ("conv", "transformer", "mixed").index(kind))
    torch.manual_seed(SEED)
    if kind == "transformer":
        words = NetworkInput("words", ("batch", "sequence"), "indices", WORDS)
        network = Network(name, "random", family, WordNetwork(draw), (words,), {"batch": (1, 8), "sequence": (128,)})
    else:
        module = ImageNetwork(draw, kind == "mixed")
        size = draw.pick(64, 128, 160, 224) if kind == "mixed" else draw.pick(96, 128, 192, 224, 256)
        image = NetworkInput("image", ("batch", 3, size, size))
        network = Network(name, "random", family, module, (image,), {"batch": (1, 16)})
    make_like_trained(network.module, network.example)
    return network


SOURCES = {"random": NetworkSource(check_names, build_network)}
