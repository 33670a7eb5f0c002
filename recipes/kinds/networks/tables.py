"""Networks of numbers and categories: recommenders, memories, experts, linear layers."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hase.recipes.kinds.networks.exporting import export


class Recommender(nn.Module):
    """DLRM: embeddings of categories, a network over numbers, the products of all pairs, a network over these."""

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
    """Replaces rows of a memory at given positions (ScatterND), then multiplies the memory."""

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
