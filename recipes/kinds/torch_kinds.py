"""Networks in the shape of each kind of model, small and with random weights, and their export to ONNX."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import detection, segmentation, video

from model_zoo.exporting.torch_models import build

FIRST_DYNAMO_OPSET = 18  # older operator sets come from torch's older exporter, which writes them itself


torch.backends.mha.set_fastpath_enabled(False)  # its operators are not exported


def export(module: nn.Module, inputs: Mapping[str, Tensor], path: Path, opset: int = 18, outputs: Sequence[str] = (),
           dynamic: Mapping[str, Mapping[int, str]] | None = None) -> None:
    """Writes `module` in evaluation mode.

    Args:
        inputs: in the order of the module's arguments.
        opset: below FIRST_DYNAMO_OPSET torch's older exporter is used.
        outputs: their names; by default torch's own.
        dynamic: by input, the names of the dimensions that stay open; one name is one size.
    """
    module = module.eval()
    names: dict[str, Any] = {"input_names": list(inputs), "output_names": list(outputs) or None, "opset_version": opset}
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            if opset < FIRST_DYNAMO_OPSET:
                axes = {name: dict(open_axes) for name, open_axes in (dynamic or {}).items()}
                torch.onnx.export(module, tuple(inputs.values()), str(path), dynamo=False, dynamic_axes=axes, **names)
                return
            sizes = {name: torch.export.Dim(name, min=1, max=65536)
                     for open_axes in (dynamic or {}).values() for name in open_axes.values()}
            each = [{axis: sizes[name] for axis, name in (dynamic or {}).get(key, {}).items()} for key in inputs]
            kinds = [one.kind for one in inspect.signature(module.forward).parameters.values()]
            own = len(kinds) - (inspect.Parameter.VAR_POSITIONAL in kinds)  # what goes into `*past` stands together
            shapes = (*each[:own], *([tuple(each[own:])] if own < len(each) else []))
            program = torch.onnx.export(module, tuple(inputs.values()), dynamo=True, verbose=False,
                                        dynamic_shapes=shapes if dynamic else None, **names)
        finally:
            logging.disable(before)
    if program is None:
        raise RuntimeError("torch.onnx.export returned nothing")
    program.save(str(path), external_data=False)


def random_inputs(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Random numbers of these shapes by name."""
    return {name: torch.randn(*shape) for name, shape in shapes.items()}


def images(*shape: int) -> dict[str, Tensor]:
    """One input, `image`."""
    return {"image": torch.randn(*shape)}


# --- transformers -----------------------------------------------------------------------------------------------------------

class RmsNorm(nn.Module):
    """The norm of llama-like decoders."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [batch, heads, length, width]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class DecoderLayer(nn.Module):
    """Grouped-query attention with rotary positions and a gated product, as in llama."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.before, self.after = RmsNorm(width), RmsNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], heads, self.size).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[
            Tensor, Tensor, Tensor]:
        y = self.before(x)
        q = rotated(self.split(self.q(y), self.heads), cos, sin)
        k, v = rotated(self.split(self.k(y), self.kv_heads), cos, sin), self.split(self.v(y), self.kv_heads)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        share = self.heads // self.kv_heads
        scores = q @ k.repeat_interleave(share, 1).transpose(-1, -2) / math.sqrt(self.size) + mask
        y = (scores.softmax(-1) @ v.repeat_interleave(share, 1)).transpose(1, 2).reshape(x.shape)
        x = x + self.out(y)
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)), k, v


class Decoder(nn.Module):
    """A llama-like decoder. With `cached` it takes the keys and values of earlier tokens, and gives the longer ones."""

    def __init__(self, cached: bool, width: int = 384, layers: int = 4, heads: int = 6, kv_heads: int = 2,
                 words: int = 8000) -> None:
        super().__init__()
        self.steps: Tensor
        self.cached, self.size = cached, width // heads
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads, kv_heads) for _ in range(layers))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, words, bias=False)
        self.register_buffer("steps", 10000.0 ** (-torch.arange(0, self.size, 2) / self.size))

    def forward(self, tokens: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        before = past[0].shape[2] if self.cached else 0
        length = tokens.shape[1]
        place = torch.arange(length) + before
        angle = torch.cat((place[:, None] * self.steps, place[:, None] * self.steps), -1)
        seen = torch.arange(length + before)[None, :] <= place[:, None]
        mask = torch.where(seen, 0.0, -1e9)
        x, made = self.words(tokens), []
        for number, layer in enumerate(self.layers):
            cache = (past[2 * number], past[2 * number + 1]) if self.cached else None
            x, k, v = layer(x, angle.cos(), angle.sin(), mask, cache)
            made += [k, v]
        return (self.head(self.norm(x[:, -1:])), *made)


def write_decoder_prefill(path: Path, opset: int = 18) -> None:
    export(Decoder(False), {"tokens": torch.zeros(2, 32, dtype=torch.int64)}, path, opset,
           dynamic={"tokens": {0: "batch", 1: "sequence"}})


def write_decoder_token(path: Path, opset: int = 18) -> None:
    model = Decoder(True)
    caches = {f"past_{number // 2}_{'kv'[number % 2]}": torch.randn(2, 2, 48, 64) for number in range(2 * len(model.layers))}
    export(model, {"tokens": torch.zeros(2, 1, dtype=torch.int64), **caches}, path, opset,
           ["logits", *(f"present_{name.removeprefix('past_')}" for name in caches)],
           {"tokens": {0: "batch"}, **{name: {0: "batch", 2: "past"} for name in caches}})


class EncoderLayer(nn.Module):
    """Attention, to which `away` is added before the softmax, and a feed-forward, each with a norm after it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], self.heads, self.size).transpose(1, 2)

    def forward(self, x: Tensor, away: Tensor | None = None) -> Tensor:
        scores = self.split(self.q(x)) @ self.split(self.k(x)).transpose(-1, -2) / math.sqrt(self.size)
        scores = scores if away is None else scores + away
        y = (scores.softmax(-1) @ self.split(self.v(x))).transpose(1, 2).reshape(x.shape)
        x = self.first(x + self.out(y))
        return self.second(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """BERT: words, places and segments, layers of attention with a mask, a pooled output beside the sequence."""

    def __init__(self, width: int = 384, layers: int = 4, heads: int = 6, words: int = 8000) -> None:
        super().__init__()
        self.words, self.places, self.segments = nn.Embedding(words, width), nn.Embedding(512, width), nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.pool = nn.Linear(width, width)

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        away = (1.0 - mask[:, None, None, :].to(torch.float32)) * -1e4
        x = self.norm(self.words(tokens) + self.places(torch.arange(tokens.shape[1])) + self.segments(segments))
        for layer in self.layers:
            x = layer(x, away)
        return x, torch.tanh(self.pool(x[:, 0]))


def write_bert(path: Path, opset: int = 18, dynamic: bool = True, batch: int = 2, length: int = 64) -> None:
    whole = torch.ones(batch, length, dtype=torch.int64)
    axes = {name: {0: "batch", 1: "sequence"} for name in ("tokens", "mask", "segments")} if dynamic else None
    export(Encoder(), {"tokens": 0 * whole, "mask": whole.clone(), "segments": 0 * whole.clone()}, path, opset,
           ["hidden", "pooled"], axes)


def encoder_of_vectors(width: int = 256, layers: int = 3, heads: int = 4) -> nn.Module:
    """A transformer's encoder without embeddings, which can be quantised or made half-precise as a whole."""
    return nn.Sequential(*(EncoderLayer(width, heads) for _ in range(layers)))


def write_encoder(path: Path, opset: int = 18) -> None:
    export(encoder_of_vectors(), {"input": torch.randn(1, 64, 256)}, path, opset)


class EinsumAttention(nn.Module):
    """Attention written with einsum, in two layers."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        size = width // heads
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width, heads, size) / math.sqrt(width)) for _ in range(6))
        self.outs = nn.ParameterList(nn.Parameter(torch.randn(heads, size, width) / math.sqrt(width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(2):
            q, k, v = (torch.einsum("bnd,dhe->bhne", x, weight) for weight in list(self.weights)[3 * layer:3 * layer + 3])
            scores = torch.einsum("bhne,bhme->bhnm", q, k).softmax(-1)
            x = x + torch.einsum("bhnm,bhme,hed->bnd", scores, v, self.outs[layer])
        return x


# --- speech -----------------------------------------------------------------------------------------------------------------

class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, a convolution module with a gate and a depthwise convolution, half a feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ahead = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(),
                                                 nn.Linear(4 * width, width)) for _ in range(2))
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, batch_first=True)
        self.conv_norm = nn.LayerNorm(width)
        self.conv = nn.Sequential(nn.Conv1d(width, 2 * width, 1), nn.GLU(1), nn.Conv1d(width, width, 31, 1, 15, groups=width),
                                  nn.BatchNorm1d(width), nn.SiLU(), nn.Conv1d(width, width, 1))
        self.last = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.ahead[0](x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.conv(self.conv_norm(x).transpose(1, 2)).transpose(1, 2)
        return self.last(x + 0.5 * self.ahead[1](x))


class Conformer(nn.Module):
    """Subsampling by 2-D convolutions, conformer blocks, log-probabilities of symbols."""

    def __init__(self, width: int = 144, blocks: int = 3) -> None:
        super().__init__()
        self.sample = nn.Sequential(nn.Conv2d(1, width, 3, 2), nn.ReLU(), nn.Conv2d(width, width, 3, 2), nn.ReLU())
        self.into = nn.Linear(width * 19, width)
        self.blocks = nn.Sequential(*(ConformerBlock(width, 4) for _ in range(blocks)))
        self.head = nn.Linear(width, 200)

    def forward(self, features: Tensor) -> Tensor:
        x = self.sample(features[:, None])
        x = self.into(x.transpose(1, 2).flatten(2))
        return F.log_softmax(self.head(self.blocks(x)), -1)


class WhisperEncoder(nn.Module):
    """Two 1-D convolutions over a spectrogram, places, a transformer."""

    def __init__(self, width: int = 256, length: int = 200) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(80, width, 3, 1, 1), nn.Conv1d(width, width, 3, 2, 1)
        self.places = nn.Parameter(torch.randn(length // 2, width))
        self.layers = encoder_of_vectors(width, 3, 4)

    def forward(self, spectrogram: Tensor) -> Tensor:
        x = F.gelu(self.second(F.gelu(self.first(spectrogram))))
        return self.layers(x.transpose(1, 2) + self.places)


class WaveEncoder(nn.Module):
    """1-D convolutions over raw samples, the first with a norm of groups, as in wav2vec."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(1, width, 10, 5), nn.GroupNorm(width, width)
        self.rest = nn.ModuleList(nn.Conv1d(width, width, 3 if number < 3 else 2, 2) for number in range(5))

    def forward(self, samples: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.first(samples[:, None])))
        for conv in self.rest:
            x = F.gelu(conv(x))
        return x


class Tcn(nn.Module):
    """Dilated 1-D convolutions with residuals."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 3, padding=2**number, dilation=2**number) for number in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + F.relu(conv(x))
        return x


# --- recurrent --------------------------------------------------------------------------------------------------------------

class Recurrent(nn.Module):
    """A recurrent network of torch's with a head over its last step."""

    def __init__(self, kind: str, width: int = 256, layers: int = 2, both_ways: bool = False) -> None:
        super().__init__()
        made = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind]
        self.layers = made(64, width, layers, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(width * (2 if both_ways else 1), 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


# --- images -----------------------------------------------------------------------------------------------------------------

class GroupedBlock(nn.Module):
    """Convolution, norm of groups, SiLU."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(8, after)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Down by strides, up by transposed convolutions, joined at each size."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.first = GroupedBlock(3, width)
        self.down = nn.ModuleList(nn.Sequential(GroupedBlock(a, b, 2), GroupedBlock(b, b))
                                  for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(sizes))
        self.join = nn.ModuleList(GroupedBlock(2 * a, a) for a in sizes[:-1])
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        x, kept = self.first(image), []
        for down in self.down:
            kept.append(x)
            x = down(x)
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat((up(x), kept.pop()), 1))
        return self.last(x)


class DiffusionBlock(nn.Module):
    """A residual block that a time is added to, attention over the image, attention to a text, a gated feed-forward."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.into = nn.Conv2d(4, width, 3, 1, 1)
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.norms = nn.ModuleList(nn.GroupNorm(16, width) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(2))
        self.layer_norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own = nn.MultiheadAttention(width, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(width, heads, batch_first=True, kdim=96, vdim=96)
        self.gate, self.out = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        self.last = nn.Conv2d(width, 4, 3, 1, 1)

    def forward(self, latent: Tensor, time: Tensor, text: Tensor) -> Tensor:
        angle = time[:, None].to(torch.float32) * torch.exp(-torch.arange(32) / 32 * math.log(1e4))
        x = self.into(latent)
        y = self.convs[0](F.silu(self.norms[0](x))) + self.time(torch.cat((angle.sin(), angle.cos()), -1))[:, :, None, None]
        x = x + self.convs[1](F.silu(self.norms[1](y)))
        y = self.norms[2](x).flatten(2).transpose(1, 2)
        z = self.layer_norms[0](y)
        y = y + self.own(z, z, z, need_weights=False)[0]
        y = y + self.cross(self.layer_norms[1](y), text, text, need_weights=False)[0]
        a, b = self.gate(self.layer_norms[2](y)).chunk(2, -1)
        y = y + self.out(a * F.gelu(b))
        return self.last(x + y.transpose(1, 2).reshape(x.shape))


def write_diffusion(path: Path, opset: int = 17) -> None:
    export(DiffusionBlock(), {"latent": torch.randn(1, 4, 32, 32), "time": torch.ones(1, dtype=torch.int64),
                              "text": torch.randn(1, 77, 96)}, path, opset)


class StyleNet(nn.Module):
    """Convolutions with instance norms and mirrored borders, up again by resizing."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 1 if a == 3 else 2) for a, b in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.InstanceNorm2d(b, affine=True) for b in sizes[1:])
        self.block, self.block_norm = nn.Conv2d(sizes[-1], sizes[-1], 3), nn.InstanceNorm2d(sizes[-1], affine=True)
        self.up, self.last = nn.Conv2d(sizes[-1], width, 3), nn.Conv2d(width, 3, 9)

    def forward(self, image: Tensor) -> Tensor:
        x = image
        for conv, norm in zip(self.down, self.norms, strict=True):
            x = F.relu(norm(conv(F.pad(x, (1, 1, 1, 1), "reflect"))))
        x = x + self.block_norm(self.block(F.pad(x, (1, 1, 1, 1), "reflect")))
        x = F.relu(self.up(F.interpolate(x, scale_factor=4.0, mode="nearest")))
        return torch.sigmoid(self.last(F.pad(x, (4, 4, 4, 4), "reflect")))


class SuperResolution(nn.Module):
    """Convolutions at the small size, then pixels out of channels."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 5, 1, 2), nn.Conv2d(width, 27, 3, 1, 1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(4))
        self.slopes = nn.ModuleList(nn.PReLU(width) for _ in range(4))

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image)
        for conv, slope in zip(self.blocks, self.slopes, strict=True):
            x = x + slope(conv(x))
        return F.pixel_shuffle(self.last(x), 3) + F.interpolate(image, scale_factor=3.0, mode="bicubic")


class SpatialTransformer(nn.Module):
    """Learns an affine map of the image, samples by it, and goes on with convolutions."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(3, 16, 7, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 6))
        self.convs = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(),
                                   nn.Conv2d(width, width, 3, 1, 1))
        y, x = torch.meshgrid(torch.linspace(-1, 1, 128), torch.linspace(-1, 1, 128), indexing="ij")
        self.register_buffer("plane", torch.stack((x, y, torch.ones_like(x)), -1).reshape(-1, 3))

    def forward(self, image: Tensor) -> Tensor:
        grid = (self.plane @ self.look(image).reshape(-1, 2, 3).transpose(1, 2)).reshape(-1, 128, 128, 2)
        return self.convs(F.grid_sample(image, grid, align_corners=False))


class VolumeNet(nn.Module):
    """A small 3-D U-Net."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.down = nn.Conv3d(1, width, 3, 1, 1), nn.Conv3d(width, 2 * width, 3, 2, 1)
        self.norms = nn.ModuleList(nn.BatchNorm3d(size) for size in (width, 2 * width, width))
        self.up, self.join = nn.ConvTranspose3d(2 * width, width, 2, 2), nn.Conv3d(2 * width, width, 3, 1, 1)
        self.last = nn.Conv3d(width, 2, 1)

    def forward(self, volume: Tensor) -> Tensor:
        a = F.relu(self.norms[0](self.first(volume)))
        b = F.relu(self.norms[1](self.down(a)))
        return self.last(F.relu(self.norms[2](self.join(torch.cat((self.up(b), a), 1)))))


class Pyramid(nn.Module):
    """Two images and a vector in; a map at each of three sizes and a vector out."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, width, 3, 2, 1), nn.Conv2d(3, width, 3, 2, 1)
        self.down = nn.ModuleList(nn.Conv2d(2 * width, 2 * width, 3, 2, 1) for _ in range(2))
        self.side = nn.ModuleList(nn.Conv2d(2 * width, width, 1) for _ in range(3))
        self.mix = nn.Linear(16, 2 * width)

    def forward(self, left: Tensor, right: Tensor, extra: Tensor) -> tuple[Tensor, ...]:
        maps = [F.relu(torch.cat((self.left(left), self.right(right)), 1))]
        for conv in self.down:
            maps.append(F.relu(conv(maps[-1])))
        x = torch.zeros(1)
        found: list[Tensor] = []
        for side, one in zip(reversed(self.side), reversed(maps), strict=True):
            x = side(one) + (F.interpolate(x, scale_factor=2.0) if found else 0.0)
            found.append(x)
        return (*found, maps[-1].mean((2, 3)) * torch.sigmoid(self.mix(extra)))


class ScalarLoss(nn.Module):
    """A network whose outputs are single numbers."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.convs(image)
        return x.abs().max(), (x * x).mean()


# --- tables -----------------------------------------------------------------------------------------------------------------

class Recommender(nn.Module):
    """Tables of categories, a network over numbers, the products of all pairs, a network over these (DLRM)."""

    def __init__(self, tables: int = 12, rows: int = 20000, width: int = 32) -> None:
        super().__init__()
        self.pairs: Tensor
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = torch.triu_indices(tables + 1, tables + 1, 1)
        self.register_buffer("pairs", pairs[0] * (tables + 1) + pairs[1])
        self.top = nn.Sequential(nn.Linear(width + pairs.shape[1], 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
                                 nn.Linear(256, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(numbers)
        all_of = torch.stack([x, *(table(categories[:, place]) for place, table in enumerate(self.tables))], 1)
        products = (all_of @ all_of.transpose(1, 2)).flatten(1)
        return torch.sigmoid(self.top(torch.cat((x, products[:, self.pairs]), 1)))


def write_recommender(path: Path, opset: int = 17) -> None:
    export(Recommender(), {"numbers": torch.randn(4, 13), "categories": torch.zeros(4, 12, dtype=torch.int64)}, path, opset,
           ["click"], {"numbers": {0: "batch"}, "categories": {0: "batch"}})


class MemoryUpdate(nn.Module):
    """Rows of a memory replaced at given places (ScatterND), then read by products."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, memory: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        updated = memory.index_put((places,), self.into(rows))
        return self.out(updated)


def write_memory_update(path: Path, opset: int = 17) -> None:
    export(MemoryUpdate(), {"memory": torch.randn(1024, 256), "rows": torch.randn(64, 256), "places": torch.arange(64)}, path,
           opset)


class Experts(nn.Module):
    """Each row goes by its two best of eight experts (TopK, Gather, ScatterElements); all experts are computed."""

    def __init__(self, width: int = 128, experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / 16)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / 16)

    def forward(self, x: Tensor) -> Tensor:
        best, which = self.gate(x).topk(2, -1)
        weights = torch.zeros(x.shape[0], self.up.shape[0]).scatter(1, which, best.softmax(-1))
        every = F.gelu(x @ self.up) @ self.down
        return (weights.t()[:, :, None] * every).sum(0)


class Mlp(nn.Module):
    """Linear layers with ReLU."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


# --- torchvision ------------------------------------------------------------------------------------------------------------

def write_classifier(path: Path, name: str, opset: int = 17, size: int = 224, batch: int = 1) -> None:
    export(build(name, "fp32", (size, size)), images(batch, 3, size, size), path, opset)


class FirstOf(nn.Module):
    """A segmentation network's main output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, image: Tensor) -> Tensor:
        return self.inner(image)["out"]


def write_segmentation(path: Path, name: str, size: int, opset: int = 17) -> None:
    made = getattr(segmentation, name)(weights=None, weights_backbone=None)
    export(FirstOf(made), images(1, 3, size, size), path, opset)


def write_detector(path: Path, name: str, size: int, opset: int = 12, **options: Any) -> None:
    made = getattr(detection, name)(weights=None, weights_backbone=None, **options)
    export(made, images(1, 3, size, size), path, opset)


def write_video(path: Path, name: str, frames: int, size: int, opset: int = 17) -> None:
    export(getattr(video, name)(weights=None), {"clip": torch.randn(1, 3, frames, size, size)}, path, opset)
