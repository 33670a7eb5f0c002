"""The features of a convolution that predict its time: its sizes, and the work that each method makes of them."""

from __future__ import annotations

import numpy as np

from convolutions.algorithms import ConvShape
from training.kernels.schema import FeatureSchema

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
