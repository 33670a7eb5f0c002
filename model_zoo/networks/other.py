"""Networks of the kinds that image and text collections lack: recommenders, recurrent ones, U-Nets, super-resolution,
convolutions over sequences and volumes, and those of on_host.py. Each kind comes in a few sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hase.model_zoo.exporting.network_export import Network, NetworkInput
from hase.model_zoo.exporting.torch_models import SEED, make_like_trained
from hase.model_zoo.networks import on_host
from hase.utils.errors import UserError

COLLECTION = "other"


class Recommender(nn.Module):
    """Embedding tables next to a network for numbers; products of all pairs if `crossed`; a network over all of these."""

    def __init__(self, tables: int, rows: int, width: int, crossed: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(16, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU())
        self.crossed = crossed
        wide = width + (tables + 1) ** 2 if crossed else (tables + 1) * width
        self.top = nn.Sequential(nn.Linear(wide, 8 * width), nn.ReLU(), nn.Linear(8 * width, 2 * width), nn.ReLU(),
                                 nn.Linear(2 * width, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        below = self.bottom(numbers)
        vectors = [below, *(table(categories[:, column]) for column, table in enumerate(self.tables))]
        if self.crossed:
            stacked = torch.stack(vectors, 1)
            vectors = [below, torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)]
        return torch.sigmoid(self.top(torch.cat(vectors, 1)))


class Recurrent(nn.Module):
    """Recurrent layers over a sequence of vectors, with a classification of each step."""

    def __init__(self, kind: str, width: int, layers: int, both_ways: bool) -> None:
        super().__init__()
        made = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind]
        self.layers = made(width // 2, width, layers, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(width * (1 + both_ways), 100)

    def forward(self, vectors: Tensor) -> Tensor:
        return F.log_softmax(self.head(self.layers(vectors)[0]), -1)


class NormedConv(nn.Sequential):
    """Convolution, GroupNorm or BatchNorm, activation."""

    def __init__(self, before: int, after: int, stride: int, grouped: bool) -> None:
        norm = nn.GroupNorm(8, after) if grouped else nn.BatchNorm2d(after)
        super().__init__(nn.Conv2d(before, after, 3, stride, 1), norm, nn.SiLU() if grouped else nn.ReLU())


class UNet(nn.Module):
    """Halves the image `depth` times, doubles it again by transposed convolutions, and joins what has one size."""

    def __init__(self, width: int, depth: int, grouped: bool) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.first = NormedConv(3, width, 1, grouped)
        self.down = nn.ModuleList(nn.Sequential(NormedConv(a, b, 2, grouped), NormedConv(b, b, 1, grouped))
                                  for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.join = nn.ModuleList(NormedConv(2 * a, a, 1, grouped) for a in widths[:-1])
        self.last = nn.Conv2d(width, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        levels = [self.first(image)]
        for down in self.down:
            levels.append(down(levels[-1]))
        out = levels.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            out = join(torch.cat((up(out), levels.pop()), 1))
        return self.last(out)


class SuperResolution(nn.Module):
    """Residual convolutions at the small size, then pixels out of channels; `leaky`: LeakyReLU in place of PReLU."""

    def __init__(self, width: int, blocks: int, factor: int, leaky: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 3 * factor**2, 3, 1, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.LeakyReLU(0.2) if leaky else nn.PReLU(width),
                          nn.Conv2d(width, width, 3, 1, 1)) for _ in range(blocks))
        self.factor = factor

    def forward(self, image: Tensor) -> Tensor:
        out = self.first(image)
        for block in self.blocks:
            out = out + 0.2 * block(out)
        larger = F.interpolate(image, scale_factor=float(self.factor), mode="bilinear", align_corners=False)
        return F.pixel_shuffle(self.last(out), self.factor) + larger


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


class VolumeConvs(nn.Module):
    """3-D convolutions over a volume with BatchNorm or InstanceNorm, pooling, and a classification."""

    def __init__(self, width: int, stages: int, instance: bool) -> None:
        super().__init__()
        widths = [1, *(width * 2**stage for stage in range(stages))]
        norm = nn.InstanceNorm3d if instance else nn.BatchNorm3d
        self.stages = nn.Sequential(*(layer for a, b in itertools.pairwise(widths) for layer in
                                      (nn.Conv3d(a, b, 3, 1, 1), norm(b, affine=True), nn.LeakyReLU(0.01), nn.MaxPool3d(2))))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, volume: Tensor) -> Tensor:
        return self.head(self.stages(volume).mean((2, 3, 4)))


@dataclass(frozen=True)
class Made:
    """A network of this file: what builds it, what it takes, and its sizes (see `Network`).

    Attributes:
        chooses: it chooses tokens, boxes or ids, so that its outputs can't be compared with torch's.
        traced: exported by torch's older exporter, which traces a run.
    """

    build: Callable[[], nn.Module]
    inputs: tuple[NetworkInput, ...]
    sizes: Mapping[str, tuple[int, ...]]
    chooses: bool = False
    traced: bool = False


def _image(size: int, batch: int | str = "batch") -> tuple[NetworkInput, ...]:
    return (NetworkInput("image", (batch, 3, size, size)),)


def _samples(count: int) -> tuple[NetworkInput, ...]:
    return (NetworkInput("samples", ("batch", count)),)


def _tables(count: int, rows: int) -> tuple[NetworkInput, ...]:
    return (NetworkInput("numbers", ("batch", 16)), NetworkInput("categories", ("batch", count), "indices", rows))


def _vectors(width: int) -> tuple[NetworkInput, ...]:
    return (NetworkInput("vectors", ("batch", "steps", width)),)


def _ids(columns: int) -> tuple[NetworkInput, ...]:
    return (NetworkInput("ids", ("batch", columns), "indices", 20000),)


def _decoder(width: int, words: int, trips: int, batches: tuple[int, ...], drawn: bool = False) -> Made:
    return Made(lambda: on_host.LoopDecoder(width, words, trips, drawn), (NetworkInput("vectors", ("batch", 64, width)),),
                {"batch": batches}, chooses=True, traced=True)


def _beams(width: int, words: int, beams: int) -> Made:
    inputs = (NetworkInput("token", (beams,), "indices", words), NetworkInput("state", (beams, width)),
              NetworkInput("score", (beams,)))
    return Made(lambda: on_host.BeamStep(width, words, beams), inputs, {}, chooses=True, traced=True)


_BATCH = {"batch": (1, 8)}
_ROWS = {"batch": (64, 2048)}
_STEPS = {"batch": (1, 16), "steps": (50,)}
NETWORKS: Mapping[str, Made] = {
    "recommender_crossed": Made(lambda: Recommender(26, 10000, 64, True), _tables(26, 10000), _ROWS),
    "recommender_wide": Made(lambda: Recommender(40, 50000, 16, False), _tables(40, 50000), _ROWS),
    "recommender_large": Made(lambda: Recommender(12, 200000, 128, True), _tables(12, 200000), _ROWS),
    "lstm_256": Made(lambda: Recurrent("lstm", 256, 1, False), _vectors(128), _STEPS),
    "lstm_512_both": Made(lambda: Recurrent("lstm", 512, 3, True), _vectors(256), _STEPS),
    "lstm_1024": Made(lambda: Recurrent("lstm", 1024, 2, False), _vectors(512), _STEPS),
    "gru_384": Made(lambda: Recurrent("gru", 384, 2, False), _vectors(192), _STEPS),
    "gru_128_both": Made(lambda: Recurrent("gru", 128, 2, True), _vectors(64), _STEPS),
    "rnn_512": Made(lambda: Recurrent("rnn", 512, 2, False), _vectors(256), _STEPS),
    "unet_16_grouped": Made(lambda: UNet(16, 3, True), _image(128), _BATCH),
    "unet_48_grouped": Made(lambda: UNet(48, 4, True), _image(256), _BATCH),
    "unet_32_batch": Made(lambda: UNet(32, 4, False), _image(192), _BATCH),
    "superresolution_64_x2": Made(lambda: SuperResolution(64, 8, 2, False), _image(96), _BATCH),
    "superresolution_32_x4": Made(lambda: SuperResolution(32, 4, 4, True), _image(128), _BATCH),
    "sequence_dilated_128": Made(lambda: SequenceConvs(128, 8, False), (NetworkInput("features", ("batch", 40, 400)),), _BATCH),
    "sequence_strided_256": Made(lambda: SequenceConvs(256, 5, True), (NetworkInput("features", ("batch", 40, 1000)),), _BATCH),
    "volume_16": Made(lambda: VolumeConvs(16, 4, False), (NetworkInput("volume", ("batch", 1, 64, 64, 64)),), _BATCH),
    "volume_24_instance": Made(lambda: VolumeConvs(24, 3, True), (NetworkInput("volume", ("batch", 1, 32, 48, 48)),), _BATCH),
    "greedy_256": _decoder(256, 8000, 12, (1,)),
    "drawn_256": _decoder(256, 8000, 12, (1, 4), drawn=True),
    "drawn_512": _decoder(512, 32000, 24, (1,), drawn=True),
    "beam_256": _beams(256, 8000, 5),
    "beam_768": _beams(768, 32000, 10),
    "ctc_256": Made(lambda: on_host.CtcDecoder(256, 64), (NetworkInput("features", ("batch", 80, 800)),), {"batch": (8,)},
                    chooses=True, traced=True),
    "one_stage_16": Made(lambda: on_host.OneStageDetector(16, 20, 100), _image(416, 1), {}, chooses=True, traced=True),
    "one_stage_48": Made(lambda: on_host.OneStageDetector(48, 80, 300), _image(640, 1), {}, chooses=True, traced=True),
    "points_32": Made(lambda: on_host.PointCloud(32, 16, 64), (NetworkInput("points", (2048, 3)),), {}, chooses=True,
                      traced=True),
    "spectrum_400": Made(lambda: on_host.SpectrumConvs(400, 256), _samples(16000), {"batch": (1, 4)}, traced=True),
    "spectrum_1024": Made(lambda: on_host.SpectrumConvs(1024, 512), _samples(32000), {"batch": (1,)}, traced=True),
    "fold_32": Made(lambda: on_host.FoldedPatches(32, 4), _image(128), _BATCH),
    "fold_96": Made(lambda: on_host.FoldedPatches(96, 3), _image(192), {"batch": (1,)}),
    "hashed_16": Made(lambda: on_host.HashedRecommender(16, 10000, 32, False), _ids(16), {"batch": (4096,)}, traced=True),
    "distinct_16": Made(lambda: on_host.HashedRecommender(16, 20000, 32, True), _ids(16), {"batch": (64, 4096)}, chooses=True,
                        traced=True),
    "polar_32": Made(lambda: on_host.PolarConvs(32), _image(256), _BATCH),
    "polar_64": Made(lambda: on_host.PolarConvs(64), _image(512), {"batch": (1,)}),
}


def check_names(names: Iterable[str]) -> None:
    """Checks that there is a network of each name; `UserError` where there is none."""
    for name in names:
        if name not in NETWORKS:
            raise UserError(f"{name}: no such network; there are {', '.join(NETWORKS)}")


def build_network(name: str, family: str) -> Network:
    """One of NETWORKS, in float32."""
    made = NETWORKS[name]
    torch.manual_seed(SEED)
    network = Network(name, COLLECTION, family, made.build(), made.inputs, made.sizes,
                      data_sized=made.chooses, traced=made.traced or "steps" in made.sizes)
    make_like_trained(network.module, network.example)
    return network
