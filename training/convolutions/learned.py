"""Predicts the time of a convolution under each algorithm from its shape, with the estimators of kernels.

An algorithm stands where a kernel's type stands: one booster is shared, and each algorithm has one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmark.convolutions.shapes import ConvShape
from training.convolutions.table import Case
from training.kernels.estimators import SHARED, KernelModel, design_matrix, encode_types, train_booster
from training.kernels.roofline import fit_roofline
from training.kernels.schema import FeatureSchema
from training.kernels.settings import XgboostSettings
from utils.errors import UserError

Floats = npt.NDArray[np.float64]
LEAST_ROWS = 20  # of an algorithm, for a booster of its own
SETTINGS = XgboostSettings(trees=300, depth=7, min_leaf_weight=1.0, objective="squarederror")
SEED = 7


def features_of(shape: ConvShape) -> list[float]:
    """The values of CONVOLUTION_FEATURES."""
    out_height, out_width = shape.out_size
    area = shape.kernel[0] * shape.kernel[1]
    sizes = (shape.batch, shape.in_channels, shape.out_channels, shape.height, shape.width, out_height * out_width,
             shape.in_channels // shape.groups, shape.out_channels // shape.groups, area, shape.flops, shape.bytes_moved,
             shape.flops / shape.bytes_moved)
    return [*np.log2(np.maximum(sizes, 1e-9)), shape.kernel[0], shape.kernel[1], shape.stride[0], shape.stride[1],
            shape.dilation[0], shape.groups, float(shape.groups == shape.in_channels), float(shape.dtype == "fp16"),
            shape.height + 2 * shape.padding[0], shape.batch * out_height * out_width % 128]


CONVOLUTION_FEATURES: FeatureSchema[ConvShape] = FeatureSchema("convolution", 1, {
    "sizes": ("log_batch", "log_in_channels", "log_out_channels", "log_height", "log_width", "log_out_pixels",
              "log_group_in", "log_group_out", "log_filter"),
    "work": ("log_flops", "log_bytes", "log_intensity"),
    "filter": ("kernel_h", "kernel_w", "stride_h", "stride_w", "dilation", "groups", "depthwise"),
    "type": ("half",),
    "tiles": ("padded_height", "rest_of_128"),
}, features_of)


def fit(cases: Sequence[Case]) -> KernelModel:
    """Learns the time of each algorithm from the cases that it ran.

    Raises:
        UserError: there are none.
    """
    rows = [(case.shape, name, time_ms) for case in cases for name, time_ms in case.times_ms.items()]
    if not rows:
        raise UserError("no measured layer to learn from")
    shapes, names = [shape for shape, _, _ in rows], [name for _, name, _ in rows]
    times_ms = np.array([time_ms for _, _, time_ms in rows])
    flops, bytes_moved = work_of(shapes)
    roofline = fit_roofline(flops, bytes_moved, times_ms)
    log_ratios = np.log(times_ms / roofline.bound_ms(flops, bytes_moved))
    codes = encode_types(names, log_ratios)
    matrix = design_matrix(names, CONVOLUTION_FEATURES.matrix(shapes), np.zeros((len(rows), 0)), codes)
    boosters = {SHARED: train_booster(matrix, log_ratios, SETTINGS, SEED)}
    predictor_of = dict.fromkeys(codes, SHARED)
    for name in codes:
        mask = np.array([one == name for one in names])
        if mask.sum() >= LEAST_ROWS:
            boosters[name] = train_booster(matrix[mask], log_ratios[mask], SETTINGS, SEED)
            predictor_of[name] = name
    return KernelModel(CONVOLUTION_FEATURES, roofline, codes, predictor_of, boosters, ())


def work_of(shapes: Sequence[ConvShape]) -> tuple[Floats, Floats]:
    """Operations and bytes of each shape."""
    return (np.array([shape.flops for shape in shapes], dtype=float),
            np.array([shape.bytes_moved for shape in shapes], dtype=float))


def predict_ms(model: KernelModel, shapes: Sequence[ConvShape], algorithm: str) -> Floats:
    """The time of each shape under an algorithm, in ms."""
    if not shapes:
        return np.zeros(0)
    return model.predict_ms([algorithm] * len(shapes), CONVOLUTION_FEATURES.matrix(shapes), np.zeros((len(shapes), 0)),
                            *work_of(shapes))


def predict_cases(model: KernelModel, cases: Sequence[Case]) -> list[dict[str, float]]:
    """The predicted time (ms) of each case under each algorithm that can run it and that was learned."""
    found: list[dict[str, float]] = [{} for _ in cases]
    for name in model.type_codes:
        able = [place for place, case in enumerate(cases) if name in case.times_ms]
        for place, time_ms in zip(able, predict_ms(model, [cases[place].shape for place in able], name), strict=True):
            found[place][name] = float(time_ms)
    return found
