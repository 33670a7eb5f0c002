"""Networks of which a CUDA session runs some nodes on the CPU.

These are decoders that choose tokens in a loop, selections of boxes, points and ids, and transforms and activations that the
CUDA provider lacks. Torch's older exporter exports them, since it makes Loops of scripted functions.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn


@torch.jit.script
def tokens_after(state: Tensor, table: Tensor, within: Tensor, out: Tensor, trips: int, drawn: bool) -> Tensor:
    """Chooses tokens one after another: each is the likeliest after the state, or sampled (`drawn`), and updates the state.

    Args:
        state: batch × width.
        table: embedding of the vocabulary, words × width; also its output layer.
        within: width × width, the recurrence.
        out: width × width, before the output layer.
        trips: number of tokens.
    """
    tokens = torch.ones([state.size(0), 1], dtype=torch.long)
    token = tokens[:, 0]
    for _ in range(trips):
        state = torch.tanh(torch.matmul(state, within) + table[token])
        logits = torch.matmul(torch.matmul(state, out), table.t())
        token = torch.multinomial(torch.softmax(logits, 1), 1)[:, 0] if drawn else torch.argmax(logits, dim=1)
        tokens = torch.cat([tokens, token.unsqueeze(1)], 1)
    return tokens


@torch.jit.script
def farthest_points(points: Tensor, count: int) -> Tensor:
    """Indices of `count` points that are far apart: each is the farthest from those before. `points`: number × 3."""
    distance = torch.full([points.size(0)], 1e10)
    farthest = torch.zeros([1], dtype=torch.long)
    chosen = farthest
    for _ in range(count - 1):
        away = torch.sum((points - points[farthest]) ** 2, dim=1)
        distance = torch.min(distance, away)
        farthest = torch.argmax(distance, dim=0, keepdim=True)
        chosen = torch.cat([chosen, farthest], 0)
    return chosen


class LoopDecoder(nn.Module):
    """A transformer encoder, then a loop that chooses tokens from its mean output: the likeliest, or sampled if `drawn`."""

    def __init__(self, width: int, words: int, trips: int, drawn: bool) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True), 2,
                                             enable_nested_tensor=False)
        self.table = nn.Embedding(words, width)
        self.within, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.trips, self.drawn = trips, drawn

    def forward(self, vectors: Tensor) -> Tensor:
        state = self.encoder(vectors).mean(1)
        return tokens_after(state, self.table.weight, self.within.weight, self.out.weight, self.trips, self.drawn)


class BeamStep(nn.Module):
    """One step of beam search: the likeliest continuations, and the states that they continue."""

    def __init__(self, width: int, words: int, beams: int) -> None:
        super().__init__()
        self.table, self.beams, self.words = nn.Embedding(words, width), beams, words
        self.layers = nn.GRUCell(width, width)

    def forward(self, token: Tensor, state: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        after = self.layers(self.table(token), state)
        logits = F.log_softmax(after @ self.table.weight.t(), -1) + score[:, None]
        best, index = logits.reshape(-1, self.beams * self.words).topk(self.beams)
        origin = torch.div(index, self.words, rounding_mode="floor") + self.beams * torch.arange(index.size(0))[:, None]
        seen = torch.unique(origin.flatten(), sorted=True)
        return (index % self.words).flatten(), after[origin.flatten()], best.flatten(), seen


class CtcDecoder(nn.Module):
    """Speech recognition by CTC: convolutions over features, the likeliest symbol of each step, repetitions removed."""

    def __init__(self, width: int, symbols: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv1d(80, width, 5, 2, 2), nn.ReLU(), nn.Conv1d(width, width, 5, 1, 2), nn.ReLU(),
                                   nn.Conv1d(width, width, 5, 1, 2), nn.ReLU(), nn.Conv1d(width, symbols, 1))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        symbols = self.convs(features).argmax(1)
        changed = symbols[:, 1:] != symbols[:, :-1]
        return symbols[:, 1:][changed], changed.sum(1)


class OneStageDetector(nn.Module):
    """A detector: convolutions that halve the image five times, boxes with scores at each position, NonMaxSuppression."""

    def __init__(self, width: int, classes: int, most: int) -> None:
        super().__init__()
        widths = [3, width, 2 * width, 4 * width, 8 * width, 8 * width]
        self.body = nn.Sequential(*(layer for a, b in itertools.pairwise(widths) for layer in (
            nn.Conv2d(a, b, 3, 2, 1), nn.SiLU(), nn.Conv2d(b, b, 3, 1, 1), nn.SiLU())))
        self.boxes, self.scores, self.most = nn.Conv2d(widths[-1], 12, 1), nn.Conv2d(widths[-1], 3 * classes, 1), most

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.body(image)
        raw = self.boxes(features).permute(0, 2, 3, 1).reshape(-1, 4)
        middle, size = 400 * torch.sigmoid(40 * raw[:, :2]), 10 + 60 * torch.sigmoid(40 * raw[:, 2:])
        boxes = torch.cat([middle - size, middle + size], 1)
        score, kind = self.scores(features).permute(0, 2, 3, 1).reshape(boxes.size(0), -1).max(1)
        kept = torchvision.ops.nms(boxes + 1000.0 * kind[:, None], score, 0.5)[:self.most]
        return boxes[kept], score[kept], kind[kept]


class PointCloud(nn.Module):
    """A classifier of point clouds: groups of the nearest points around far-apart ones, and a network over these groups."""

    def __init__(self, chosen: int, near: int, width: int) -> None:
        super().__init__()
        self.chosen, self.near = chosen, near
        self.net = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2 * width), nn.ReLU())
        self.head = nn.Linear(2 * width, 40)

    def forward(self, points: Tensor) -> Tensor:
        centres = points[farthest_points(points, self.chosen)]
        away = ((centres[:, None] - points[None]) ** 2).sum(-1)
        _, nearest = away.topk(self.near, dim=1, largest=False)
        groups = points[nearest] - centres[:, None]
        return self.head(self.net(groups).amax((0, 1)))


class SpectrumConvs(nn.Module):
    """The spectrum of samples by a Fourier transform over windows, then convolutions."""

    def __init__(self, window: int, width: int) -> None:
        super().__init__()
        self.window_size = window
        self.window = nn.Parameter(torch.hann_window(window), requires_grad=False)
        self.convs = nn.Sequential(nn.Conv1d(window // 2 + 1, width, 3, 2, 1), nn.ReLU(),
                                   nn.Conv1d(width, width, 3, 2, 1), nn.ReLU(), nn.Conv1d(width, 64, 3, 1, 1))

    def forward(self, samples: Tensor) -> Tensor:
        spectrum = torch.stft(samples, self.window_size, self.window_size // 2, window=self.window, center=False,
                              return_complex=False)
        power = spectrum.pow(2).sum(-1)
        return self.convs(torch.log(power + 1e-6)).mean(-1)


class FoldedPatches(nn.Module):
    """Layers that cut an image into overlapping patches, transform each, and add them up again where they were."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 4, 4), nn.Linear(width, 100)
        self.mix = nn.ModuleList(nn.Linear(9 * width, 9 * width) for _ in range(layers))

    def forward(self, image: Tensor) -> Tensor:
        features = self.first(image)
        size = (features.shape[2], features.shape[3])
        for mix in self.mix:
            patches = F.unfold(features, 3, padding=1, stride=2)
            features = features + F.fold(F.relu(mix(patches.transpose(1, 2))).transpose(1, 2), size, 3, padding=1, stride=2)
        return self.last(features.mean((2, 3)))


class HashedRecommender(nn.Module):
    """A recommender whose ids are hashed into one embedding table; with `distinct`, each distinct id is looked up once."""

    def __init__(self, columns: int, rows: int, width: int, distinct: bool) -> None:
        super().__init__()
        self.table, self.rows, self.distinct, self.wide = nn.Embedding(rows, width), rows, distinct, columns * width
        self.top = nn.Sequential(nn.Linear(self.wide, 512), nn.ReLU(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids: Tensor) -> Tensor:
        if self.distinct:
            unique_ids, index = torch.unique(ids, return_inverse=True)
            vectors = self.table(unique_ids)[index]
        else:
            vectors = self.table((ids + torch.bitwise_right_shift(ids, 7) + torch.bitwise_right_shift(ids, 13)) % self.rows)
        return torch.sigmoid(self.top(vectors.reshape(-1, self.wide)))


class PolarConvs(nn.Module):
    """Length and angle of an image's gradients, by functions that the CUDA provider lacks, then convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gradients = nn.Conv2d(3, 16, 3, 2, 1)
        self.net = nn.Sequential(nn.Conv2d(16, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(2 * width, 20)

    def forward(self, image: Tensor) -> Tensor:
        across, down = self.gradients(image).chunk(2, 1)
        angle = torch.atan(across / (down.abs() + 0.1))
        length = torch.asinh(across * across + down * down)
        return self.head(self.net(torch.cat([angle, length], 1)).mean((2, 3)))
