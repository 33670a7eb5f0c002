"""Networks of sequences: speech, 1-D convolutions, recurrent networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hase.recipes.kinds.networks.transformers import encoder_of_vectors


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


class Recurrent(nn.Module):
    """One of torch's recurrent networks with a head on its last step."""

    def __init__(self, kind: str, width: int = 256, layers: int = 2, both_ways: bool = False) -> None:
        super().__init__()
        made = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind]
        self.layers = made(64, width, layers, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(width * (2 if both_ways else 1), 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])
