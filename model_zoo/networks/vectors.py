"""Networks of numbers, categories and sequences: recommenders, recurrent networks, transformers, speech.

All have torch's random initial weights.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Recommender(nn.Module):
    """Embedding tables next to a network for numbers, and a network over both. With `crossed`, the top network gets the
    products of all pairs of vectors (as in DLRM); with `each_pair_once`, without repetitions."""

    def __init__(self, tables: int, rows: int, width: int, crossed: bool, each_pair_once: bool = False, numbers: int = 16,
                 bottom: int | None = None, top: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.pairs: Tensor
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        hidden, (first, second) = bottom or 4 * width, top or (8 * width, 2 * width)
        self.bottom = nn.Sequential(nn.Linear(numbers, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU())
        self.crossed, self.each_pair_once = crossed, each_pair_once
        wide = width + (tables + 1) ** 2 if crossed else (tables + 1) * width
        if each_pair_once:
            pairs = torch.triu_indices(tables + 1, tables + 1, 1)
            self.register_buffer("pairs", pairs[0] * (tables + 1) + pairs[1])
            wide = width + pairs.shape[1]
        self.top = nn.Sequential(nn.Linear(wide, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        below = self.bottom(numbers)
        vectors = [below, *(table(categories[:, column]) for column, table in enumerate(self.tables))]
        if self.crossed:
            stacked = torch.stack(vectors, 1)
            products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
            vectors = [below, products[:, self.pairs] if self.each_pair_once else products]
        return torch.sigmoid(self.top(torch.cat(vectors, 1)))


class MemoryUpdate(nn.Module):
    """Replaces rows of a memory at given positions (ScatterND), then multiplies the memory."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, memory: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        updated = memory.index_put((places,), self.into(rows))
        return self.out(updated)


class Experts(nn.Module):
    """Each row uses its two best of eight experts (TopK, Gather, ScatterElements); all experts are computed."""

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


class Recurrent(nn.Module):
    """Recurrent layers over a sequence of vectors, with a classification per step, or scores of the last step only."""

    def __init__(self, kind: str, width: int, layers: int, both_ways: bool, inputs: int | None = None, classes: int = 100,
                 last_step: bool = False) -> None:
        super().__init__()
        layer = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind]
        self.layers = layer(inputs or width // 2, width, layers, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(width * (1 + both_ways), classes)
        self.last_step = last_step

    def forward(self, vectors: Tensor) -> Tensor:
        steps = self.layers(vectors)[0]
        return self.head(steps[:, -1]) if self.last_step else F.log_softmax(self.head(steps), -1)


class SequenceConvs(nn.Module):
    """Convolutions over a sequence: dilated ones with residuals and BatchNorm, or with strides, depthwise ones and ELU."""

    def __init__(self, width: int, layers: int, strided: bool) -> None:
        super().__init__()
        self.first = nn.Conv1d(40, width, 5, 1, 2)
        blocks = [nn.Sequential(nn.Conv1d(width, width, 9, 2, 4, groups=width), nn.Conv1d(width, width, 1), nn.ELU()) if strided
                  else nn.Sequential(nn.Conv1d(width, width, 3, 1, 2**layer, 2**layer), nn.BatchNorm1d(width), nn.ReLU())
                  for layer in range(layers)]
        self.blocks, self.strided = nn.ModuleList(blocks), strided
        self.head = nn.Linear(width, 50)

    def forward(self, features: Tensor) -> Tensor:
        out = self.first(features)
        for block in self.blocks:
            out = block(out) if self.strided else out + block(out)
        return self.head(out.mean(-1))


class Tcn(nn.Module):
    """Dilated 1-D convolutions with residuals."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 3, padding=2**number, dilation=2**number) for number in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + F.relu(conv(x))
        return x


class RmsNorm(nn.Module):
    """Root-mean-square normalisation, as in llama-like decoders."""

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


def transformer_encoder(width: int = 256, layers: int = 3, heads: int = 4) -> nn.Module:
    """A transformer encoder without embeddings, so that all of it can be quantised or converted to half precision."""
    return nn.Sequential(*(EncoderLayer(width, heads) for _ in range(layers)))


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
    """Two 1-D convolutions over a spectrogram, positions, a transformer."""

    def __init__(self, width: int = 256, length: int = 200) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(80, width, 3, 1, 1), nn.Conv1d(width, width, 3, 2, 1)
        self.places = nn.Parameter(torch.randn(length // 2, width))
        self.layers = transformer_encoder(width, 3, 4)

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
