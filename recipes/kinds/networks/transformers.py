"""Transformers: decoders with and without a cache, encoders, attention written with einsum."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hase.recipes.kinds.networks.exporting import export


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
    """A llama-like decoder. With `cached` it takes the keys and values of earlier tokens and returns the extended ones."""

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
    """Attention (with `away` added before the softmax) and a feed-forward, each followed by a norm."""

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
    """BERT: embeddings of words, positions and segments, layers of attention with a mask, a sequence and a pooled output."""

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
    """A transformer's encoder without embeddings, so that all of it can be quantised or converted to half precision."""
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
