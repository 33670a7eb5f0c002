"""Predicts the time of a convolution under each algorithm from its shape, with the estimators of kernels.

An algorithm stands where a kernel's type stands: one booster is shared, and each algorithm has one of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hase.extras.convolutions.algorithms import ConvShape
from hase.extras.convolutions.tables import Case
from hase.learned.kernels.estimators import SHARED, KernelModel, problem_of, train_booster
from hase.learned.kernels.schema import FeatureSchema, KernelRows
from hase.learned.kernels.settings import XgboostSettings
from hase.utils.errors import UserError

Floats = npt.NDArray[np.float64]
LEAST_ROWS = 20  # of an algorithm, for a booster of its own
SETTINGS = XgboostSettings(trees=300, depth=4, min_leaf_weight=1.0, objective="squarederror")
SEED = 7


def fit(cases: Sequence[Case]) -> KernelModel:
    """Learns the time of each algorithm from the cases that it ran; layers of one shape count as one.

    Raises:
        UserError: there are none.
    """
    samples_ms: dict[tuple[ConvShape, str], list[float]] = defaultdict(list)
    for case in cases:
        for name, time_ms in case.times_ms.items():
            samples_ms[case.shape, name].append(time_ms)
    if not samples_ms:
        raise UserError("no measured layer to learn from")
    shapes, names = [shape for shape, _ in samples_ms], [name for _, name in samples_ms]
    times_ms = np.array([np.median(samples) for samples in samples_ms.values()])
    problem = problem_of(rows_of(shapes, names), times_ms)
    boosters = {SHARED: train_booster(problem.matrix, problem.log_ratios, SETTINGS, SEED)}
    for name in problem.type_codes:
        mask = np.array(names) == name
        if mask.sum() >= LEAST_ROWS:
            boosters[name] = train_booster(problem.matrix[mask], problem.log_ratios[mask], SETTINGS, SEED)
    predictor_of = {name: name if name in boosters else SHARED for name in problem.type_codes}
    return KernelModel(CONVOLUTION_FEATURES, problem.roofline, problem.type_codes, predictor_of, boosters, ())


def rows_of(shapes: Sequence[ConvShape], algorithms: Sequence[str]) -> KernelRows:
    """The shapes as the estimators read them, each under an algorithm."""
    return KernelRows(types=np.array(algorithms), features=CONVOLUTION_FEATURES.matrix(shapes),
                      flops=np.array([shape.flops for shape in shapes], dtype=float),
                      bytes_moved=np.array([shape.bytes_moved for shape in shapes], dtype=float))


def predict_ms(model: KernelModel, shapes: Sequence[ConvShape], algorithm: str) -> Floats:
    """The time of each shape under an algorithm, in ms."""
    if not shapes:
        return np.zeros(0)
    return model.predict_ms(rows_of(shapes, [algorithm] * len(shapes)))


def predict_cases(model: KernelModel, cases: Sequence[Case]) -> list[dict[str, float]]:
    """The predicted time (ms) of each case under each algorithm that can run it and that was learned."""
    times_of: list[dict[str, float]] = [{} for _ in cases]
    for name in model.type_codes:
        able = [place for place, case in enumerate(cases) if name in case.times_ms]
        for place, time_ms in zip(able, predict_ms(model, [cases[place].shape for place in able], name), strict=True):
            times_of[place][name] = float(time_ms)
    return times_of


WINOGRAD_TILE, FFT_TILE = 4, 32  # output pixels of Winograd's 3x3 transform in cuDNN; input pixels of FFT tiling
ROWS, COLUMNS = 128, 64  # of a matrix product's tile, as usual on GPUs; 64 x 32 is the smallest


def in_tiles(size: int, tile: int) -> int:
    """How many tiles cover `size`."""
    return -(-size // tile)


def product_work(shape: ConvShape) -> tuple[int, ...]:
    """As a matrix product: elements of input, output and weights; of a group rows, depth, tiles, and products in full tiles."""
    out_height, out_width = shape.out_size
    rows, columns = shape.batch * out_height * out_width, shape.out_channels // shape.groups
    depth = shape.in_channels // shape.groups * shape.kernel[0] * shape.kernel[1]
    tiles = in_tiles(rows, ROWS) * in_tiles(columns, COLUMNS)
    padded = in_tiles(rows, ROWS // 2) * in_tiles(columns, COLUMNS // 2) * (ROWS * COLUMNS // 4) * depth
    return (shape.batch * shape.in_channels * shape.height * shape.width, rows * shape.out_channels, shape.out_channels * depth,
            rows, depth, tiles, tiles * depth, padded)


def winograd_work(shape: ConvShape) -> tuple[int, ...]:
    """By Winograd's transform: tiles, their transforms forth and back, and products."""
    out_height, out_width = shape.out_size
    tiles = shape.batch * in_tiles(out_height, WINOGRAD_TILE) * in_tiles(out_width, WINOGRAD_TILE)
    return (tiles, tiles * shape.in_channels, tiles * shape.out_channels, tiles * shape.in_channels * shape.out_channels)


def fourier_work(shape: ConvShape) -> tuple[int, ...]:
    """By Fourier transforms of whole images, padded to a power of two, and of tiles: pixels, transforms and products."""
    padded = max(size + 2 * padding for size, padding in zip((shape.height, shape.width), shape.padding, strict=True))
    pixels = 4 ** (padded - 1).bit_length()
    tiles = 1
    for size, filter_size in zip((shape.height, shape.width), shape.kernel, strict=True):
        tiles *= in_tiles(size, max(FFT_TILE - filter_size + 1, 1))
    channels, products = shape.batch * (shape.in_channels + shape.out_channels), shape.in_channels * shape.out_channels
    return (pixels, pixels * channels, pixels * products, pixels * products * shape.batch,
            tiles, tiles * channels, tiles * products * shape.batch)


def features_of(shape: ConvShape) -> list[float]:
    """The values of CONVOLUTION_FEATURES."""
    out_height, out_width = shape.out_size
    area = shape.kernel[0] * shape.kernel[1]
    sizes = (shape.batch, shape.in_channels, shape.out_channels, shape.height, shape.width, out_height * out_width,
             shape.in_channels // shape.groups, shape.out_channels // shape.groups, area, shape.flops, shape.bytes_moved,
             shape.flops / shape.bytes_moved)
    work = (*product_work(shape), *winograd_work(shape), *fourier_work(shape))
    return [*np.log2(np.maximum(sizes, 1e-9)), shape.kernel[0], shape.kernel[1], shape.stride[0], shape.stride[1],
            shape.dilation[0], shape.groups, float(shape.groups == shape.in_channels), float(shape.dtype == "fp16"),
            shape.height + 2 * shape.padding[0], shape.batch * out_height * out_width % 128,
            *np.log2(np.maximum(work, 1))]


CONVOLUTION_FEATURES: FeatureSchema[ConvShape] = FeatureSchema("convolution", 2, {
    "sizes": ("log_batch", "log_in_channels", "log_out_channels", "log_height", "log_width", "log_out_pixels",
              "log_group_in", "log_group_out", "log_filter"),
    "work": ("log_flops", "log_bytes", "log_intensity"),
    "filter": ("kernel_h", "kernel_w", "stride_h", "stride_w", "dilation", "groups", "depthwise"),
    "type": ("half",),
    "tiles": ("padded_height", "rest_of_128"),
    "product": ("log_read", "log_written", "log_weights", "log_rows", "log_depth", "log_product_tiles", "log_tile_steps",
                "log_padded_product"),
    "winograd": ("log_winograd_tiles", "log_winograd_in", "log_winograd_out", "log_winograd_products"),
    "fourier": ("log_fft_pixels", "log_fft_transforms", "log_fft_filters", "log_fft_products", "log_fft_tiles",
                "log_fft_tile_transforms", "log_fft_tile_products"),
}, features_of)
