"""The collection `other`: networks of kinds that image and text collections lack, each in a few sizes.

Recommenders, recurrent networks, U-Nets, super-resolution, convolutions over sequences and volumes, and networks that a CUDA
session runs partly on the host (on_host.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hase.model_zoo.exporting.network_export import Network, NetworkInput, NetworkSource
from hase.model_zoo.exporting.torch_models import SEED, make_like_trained
from hase.model_zoo.networks.images import SuperResolution, UNet, VolumeConvs
from hase.model_zoo.networks.on_host import (
    BeamStep,
    CtcDecoder,
    FoldedPatches,
    HashedRecommender,
    LoopDecoder,
    OneStageDetector,
    PointCloud,
    PolarConvs,
    SpectrumConvs,
)
from hase.model_zoo.networks.vectors import Recommender, Recurrent, SequenceConvs
from hase.utils.errors import UserError


@dataclass(frozen=True)
class OtherNetwork:
    """How to build one network: its builder, inputs and sizes (see `Network`)."""

    build: Callable[[], nn.Module]
    inputs: tuple[NetworkInput, ...]
    sizes: Mapping[str, tuple[int, ...]]
    chooses: bool = False  # it chooses tokens, boxes or ids, so its outputs can't be compared with torch's
    traced: bool = False  # whether torch's older exporter, which traces a run, exports it


def _image(size: int, batch: int | str = "batch") -> tuple[NetworkInput, ...]:
    return (NetworkInput("image", (batch, 3, size, size)),)


def _samples(count: int) -> tuple[NetworkInput, ...]:
    return (NetworkInput("samples", ("batch", count)),)


def _recommender_inputs(count: int, rows: int) -> tuple[NetworkInput, ...]:
    return (NetworkInput("numbers", ("batch", 16)), NetworkInput("categories", ("batch", count), "indices", rows))


def _vectors(width: int) -> tuple[NetworkInput, ...]:
    return (NetworkInput("vectors", ("batch", "steps", width)),)


def _ids(columns: int) -> tuple[NetworkInput, ...]:
    return (NetworkInput("ids", ("batch", columns), "indices", 20000),)


def _features(length: int) -> tuple[NetworkInput, ...]:
    return (NetworkInput("features", ("batch", 40, length)),)


def _volume(*sizes: int) -> tuple[NetworkInput, ...]:
    return (NetworkInput("volume", ("batch", 1, *sizes)),)


def _decoder(width: int, words: int, trips: int, batches: tuple[int, ...], drawn: bool = False) -> OtherNetwork:
    return OtherNetwork(lambda: LoopDecoder(width, words, trips, drawn), (NetworkInput("vectors", ("batch", 64, width)),),
                {"batch": batches}, chooses=True, traced=True)


def _beams(width: int, words: int, beams: int) -> OtherNetwork:
    inputs = (NetworkInput("token", (beams,), "indices", words), NetworkInput("state", (beams, width)),
              NetworkInput("score", (beams,)))
    return OtherNetwork(lambda: BeamStep(width, words, beams), inputs, {}, chooses=True, traced=True)


_BATCH_SIZES = {"batch": (1, 8)}
_ROW_COUNTS = {"batch": (64, 2048)}
_STEP_COUNTS = {"batch": (1, 16), "steps": (50,)}
NETWORKS: Mapping[str, OtherNetwork] = {
    "recommender_crossed": OtherNetwork(lambda: Recommender(26, 10000, 64, True), _recommender_inputs(26, 10000), _ROW_COUNTS),
    "recommender_wide": OtherNetwork(lambda: Recommender(40, 50000, 16, False), _recommender_inputs(40, 50000), _ROW_COUNTS),
    "recommender_large": OtherNetwork(lambda: Recommender(12, 200000, 128, True), _recommender_inputs(12, 200000), _ROW_COUNTS),
    "lstm_256": OtherNetwork(lambda: Recurrent("lstm", 256, 1, False), _vectors(128), _STEP_COUNTS),
    "lstm_512_both": OtherNetwork(lambda: Recurrent("lstm", 512, 3, True), _vectors(256), _STEP_COUNTS),
    "lstm_1024": OtherNetwork(lambda: Recurrent("lstm", 1024, 2, False), _vectors(512), _STEP_COUNTS),
    "gru_384": OtherNetwork(lambda: Recurrent("gru", 384, 2, False), _vectors(192), _STEP_COUNTS),
    "gru_128_both": OtherNetwork(lambda: Recurrent("gru", 128, 2, True), _vectors(64), _STEP_COUNTS),
    "rnn_512": OtherNetwork(lambda: Recurrent("rnn", 512, 2, False), _vectors(256), _STEP_COUNTS),
    "unet_16_grouped": OtherNetwork(lambda: UNet(16, 3, True), _image(128), _BATCH_SIZES),
    "unet_48_grouped": OtherNetwork(lambda: UNet(48, 4, True), _image(256), _BATCH_SIZES),
    "unet_32_batch": OtherNetwork(lambda: UNet(32, 4, False), _image(192), _BATCH_SIZES),
    "superresolution_64_x2": OtherNetwork(lambda: SuperResolution(64, 8, 2, False), _image(96), _BATCH_SIZES),
    "superresolution_32_x4": OtherNetwork(lambda: SuperResolution(32, 4, 4, True), _image(128), _BATCH_SIZES),
    "sequence_dilated_128": OtherNetwork(lambda: SequenceConvs(128, 8, False), _features(400), _BATCH_SIZES),
    "sequence_strided_256": OtherNetwork(lambda: SequenceConvs(256, 5, True), _features(1000), _BATCH_SIZES),
    "volume_16": OtherNetwork(lambda: VolumeConvs(16, 4, False), _volume(64, 64, 64), _BATCH_SIZES),
    "volume_24_instance": OtherNetwork(lambda: VolumeConvs(24, 3, True), _volume(32, 48, 48), _BATCH_SIZES),
    "greedy_256": _decoder(256, 8000, 12, (1,)),
    "drawn_256": _decoder(256, 8000, 12, (1, 4), drawn=True),
    "drawn_512": _decoder(512, 32000, 24, (1,), drawn=True),
    "beam_256": _beams(256, 8000, 5),
    "beam_768": _beams(768, 32000, 10),
    "ctc_256": OtherNetwork(lambda: CtcDecoder(256, 64), (NetworkInput("features", ("batch", 80, 800)),), {"batch": (8,)},
                    chooses=True, traced=True),
    "one_stage_16": OtherNetwork(lambda: OneStageDetector(16, 20, 100), _image(416, 1), {}, chooses=True, traced=True),
    "one_stage_48": OtherNetwork(lambda: OneStageDetector(48, 80, 300), _image(640, 1), {}, chooses=True, traced=True),
    "points_32": OtherNetwork(lambda: PointCloud(32, 16, 64), (NetworkInput("points", (2048, 3)),), {}, chooses=True,
                      traced=True),
    "spectrum_400": OtherNetwork(lambda: SpectrumConvs(400, 256), _samples(16000), {"batch": (1, 4)}, traced=True),
    "spectrum_1024": OtherNetwork(lambda: SpectrumConvs(1024, 512), _samples(32000), {"batch": (1,)}, traced=True),
    "fold_32": OtherNetwork(lambda: FoldedPatches(32, 4), _image(128), _BATCH_SIZES),
    "fold_96": OtherNetwork(lambda: FoldedPatches(96, 3), _image(192), {"batch": (1,)}),
    "hashed_16": OtherNetwork(lambda: HashedRecommender(16, 10000, 32, False), _ids(16), {"batch": (4096,)}, traced=True),
    "distinct_16": OtherNetwork(lambda: HashedRecommender(16, 20000, 32, True), _ids(16), {"batch": (64, 4096)}, chooses=True,
                        traced=True),
    "polar_32": OtherNetwork(lambda: PolarConvs(32), _image(256), _BATCH_SIZES),
    "polar_64": OtherNetwork(lambda: PolarConvs(64), _image(512), {"batch": (1,)}),
}


def check_names(names: Iterable[str]) -> None:
    """Raises `UserError` if there is no network of one of these names."""
    for name in names:
        if name not in NETWORKS:
            raise UserError(f"{name}: no such network; there are {', '.join(NETWORKS)}")


def build_network(name: str, family: str) -> Network:
    """One of NETWORKS, in float32."""
    described = NETWORKS[name]
    torch.manual_seed(SEED)
    network = Network(name, "other", family, described.build(), described.inputs, described.sizes,
                      data_sized=described.chooses, traced=described.traced or "steps" in described.sizes)
    make_like_trained(network.module, network.example)
    return network


SOURCES = {"other": NetworkSource(check_names, build_network)}
