"""Chooses the best algorithm for each layer: what a model gains by it, and what is lost when choices rest on predicted times.

Times are predicted from shapes with the estimators for kernels, with an algorithm in the place of a kernel type: one shared
booster, and one booster per algorithm.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hase.extras.convolutions.choosing.tables import LayerCase, by_run, group_key, named
from hase.extras.convolutions.profiling.algorithms import ConvShape, NotSupported, convolution_shape
from hase.learned.kernels.estimators import SHARED, KernelModel
from hase.learned.kernels.features import FeatureSchema, KernelRows
from hase.learned.kernels.interface import XgboostSettings
from hase.model_zoo.exporting.torch_models import bare, check_names
from hase.training.kernels.fitting import problem_of, train_booster
from hase.utils.errors import UserError
from hase.utils.lazy import torch
from hase.utils.timing import Floats

if TYPE_CHECKING:
    from hase.extras.convolutions.profiling.algorithms import Convolution, Tensor

LEAST_ROWS = 20  # that an algorithm needs for a booster of its own
SETTINGS = XgboostSettings(trees=300, depth=4, min_leaf_weight=1.0, objective="squarederror")
SEED = 7


def fit(cases: Sequence[LayerCase]) -> KernelModel:
    """Fits the time of each algorithm from the cases that ran it; layers of the same shape count as one."""
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
    """The input of the estimators: each shape with its algorithm."""
    return KernelRows(types=np.array(algorithms), features=CONVOLUTION_FEATURES.matrix(shapes),
                      flops=np.array([shape.flops for shape in shapes], dtype=float),
                      bytes_moved=np.array([shape.bytes_moved for shape in shapes], dtype=float))


def predict_ms(model: KernelModel, shapes: Sequence[ConvShape], algorithm: str) -> Floats:
    """Predicted time of each shape under an algorithm, in ms."""
    if not shapes:
        return np.zeros(0)
    return model.predict_ms(rows_of(shapes, [algorithm] * len(shapes)))


def predict_cases(model: KernelModel, cases: Sequence[LayerCase]) -> list[dict[str, float]]:
    """Predicted times (ms) of each case, by algorithm; only algorithms that can run the case and were learned."""
    times_of: list[dict[str, float]] = [{} for _ in cases]
    for name in model.type_codes:
        runnable = [index for index, case in enumerate(cases) if name in case.times_ms]
        for index, time_ms in zip(runnable, predict_ms(model, [cases[index].shape for index in runnable], name), strict=True):
            times_of[index][name] = float(time_ms)
    return times_of


# features ----------------------------------------------------------------------------------------------------------------

WINOGRAD_TILE, FFT_TILE = 4, 32  # output pixels of Winograd's 3x3 transform in cuDNN; input pixels of FFT tiling
ROWS, COLUMNS = 128, 64  # of a matrix product's tile, as usual on GPUs; 64 x 32 is the smallest


def in_tiles(size: int, tile: int) -> int:
    """Number of tiles needed to cover `size`."""
    return -(-size // tile)


def product_work(shape: ConvShape) -> tuple[int, ...]:
    """Work as a matrix product: elements of input, output, weights; per group rows, depth, tiles, products in full tiles."""
    out_height, out_width = shape.out_size
    rows, columns = shape.batch * out_height * out_width, shape.out_channels // shape.groups
    depth = shape.in_channels // shape.groups * shape.kernel[0] * shape.kernel[1]
    tiles = in_tiles(rows, ROWS) * in_tiles(columns, COLUMNS)
    padded = in_tiles(rows, ROWS // 2) * in_tiles(columns, COLUMNS // 2) * (ROWS * COLUMNS // 4) * depth
    return (shape.batch * shape.in_channels * shape.height * shape.width, rows * shape.out_channels, shape.out_channels * depth,
            rows, depth, tiles, tiles * depth, padded)


def winograd_work(shape: ConvShape) -> tuple[int, ...]:
    """Work by Winograd's transform: tiles, forward and backward transforms, and products."""
    out_height, out_width = shape.out_size
    tiles = shape.batch * in_tiles(out_height, WINOGRAD_TILE) * in_tiles(out_width, WINOGRAD_TILE)
    return (tiles, tiles * shape.in_channels, tiles * shape.out_channels, tiles * shape.in_channels * shape.out_channels)


def fourier_work(shape: ConvShape) -> tuple[int, ...]:
    """Work by Fourier transforms, of whole images padded to a power of two and of tiles: pixels, transforms and products."""
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

# tables ------------------------------------------------------------------------------------------------------------------

Kind = tuple[Any, ...]


def best_rows(cases: Sequence[LayerCase]) -> list[dict[str, Any]]:
    """One row per layer: its best algorithm and time, the library's own choice, and the gain over that choice."""
    return [named(group_key(case)) | {
        "layer": case.layer, "best": case.best, "best_ms": case.best_ms, "library_choice": case.library_choice or None,
        "library_ms": case.library_ms,
        "gain_percent": None if case.library_ms is None else 100 * (1 - case.best_ms / case.library_ms),
        **{f"{name}_ms": case.times_ms[name] for name in sorted(case.times_ms)}} for case in cases]


def gain_rows(cases: Sequence[LayerCase]) -> list[dict[str, Any]]:
    """One row per run of a model: its convolutions' time by the library's choice and by the best algorithms.

    Layers whose library choice was not measured are left out and counted.
    """
    rows = []
    for key, run in by_run(cases).items():
        known = [case for case in run if case.library_ms is not None]
        library_ms, best_ms = sum(case.library_ms or 0.0 for case in known), sum(case.best_ms for case in known)
        chosen = Counter(case.best for case in run)
        rows.append(named(key) | {
            "layers": len(run), "without_library": len(run) - len(known), "library_ms": library_ms or None,
            "best_ms": best_ms or None,
            "gain_percent": 100 * (1 - best_ms / library_ms) if library_ms else None, "best_single": _best_single(run),
            "best": ", ".join(f"{count} {name}" for name, count in chosen.most_common())})
    return rows


def _best_single(cases: Sequence[LayerCase]) -> str | None:
    """The fastest algorithm among those that run every layer, or None."""
    names = set.intersection(*(set(case.times_ms) for case in cases))
    return min(names, key=lambda name: sum(case.times_ms[name] for case in cases), default=None)


def left_out_times(cases: Sequence[LayerCase]) -> list[dict[str, float]]:
    """Predicted times (ms) of each case by algorithm, without training on its model family; none for a single family."""
    times: list[dict[str, float]] = [{} for _ in cases]
    for gpu in sorted({case.gpu for case in cases}):
        for family in sorted({case.family for case in cases if case.gpu == gpu}):
            left_out = [index for index, case in enumerate(cases) if (case.gpu, case.family) == (gpu, family)]
            others = [case for case in cases if case.gpu == gpu and case.family != family]
            if not others:
                continue
            for index, predicted in zip(left_out, predict_cases(fit(others), [cases[i] for i in left_out]), strict=True):
                times[index] = predicted
    return times


def regret_rows(cases: Sequence[LayerCase], predicted: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """One row per run of a model: loss of the predicted choices against the best, in percent of all convolutions' time.

    Only algorithms that can run a layer are candidates (cuDNN tells this without measuring). Layers with one candidate count,
    too; cases without a prediction do not.
    """
    times_of = {(*group_key(case), case.layer): times for case, times in zip(cases, predicted, strict=True) if times}
    rows = []
    for key, run in by_run(case for case in cases if (*group_key(case), case.layer) in times_of).items():
        times = [times_of[*key, case.layer] for case in run]
        chosen = [min(predicted_ms, key=predicted_ms.__getitem__) for predicted_ms in times]
        best_ms = sum(case.best_ms for case in run)
        chosen_ms = sum(case.times_ms[name] for case, name in zip(run, chosen, strict=True))
        by_library = [case for case in run if case.library_ms is not None]
        errors = [abs(time_ms / case.times_ms[name] - 1) for case, predicted_ms in zip(run, times, strict=True)
                  for name, time_ms in predicted_ms.items()]
        rows.append(named(key) | {
            "layers": len(run), "algorithms": len(set().union(*({*case.times_ms, *case.refused} for case in run))),
            "with_a_choice": sum(len(case.times_ms) > 1 for case in run),
            "right": sum(name == case.best for case, name in zip(run, chosen, strict=True)), "best_ms": best_ms,
            "chosen_ms": chosen_ms, "regret_percent": 100 * (chosen_ms / best_ms - 1),
            "library_regret_percent": _excess_percent(by_library), "time_error_percent": 100 * float(np.mean(errors))})
    return rows


def _excess_percent(cases: Sequence[LayerCase]) -> float | None:
    """Loss of the library's own choice against the best measured, in percent; None without cases."""
    library_ms, best_ms = sum(case.library_ms or 0.0 for case in cases), sum(case.best_ms for case in cases)
    return 100 * (library_ms / best_ms - 1) if best_ms else None


def mean_regret(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean regret over models, each the mean over its finished runs, in percent; None without rows.

    In a finished run, as many algorithms were tried as in any other run on the device.
    """
    most: dict[str, int] = defaultdict(int)
    for row in rows:
        most[row["gpu"]] = max(most[row["gpu"]], row["algorithms"])
    by_model: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["algorithms"] == most[row["gpu"]]:
            by_model[row["model"]].append(row["regret_percent"])
    return float(np.mean([np.mean(regrets) for regrets in by_model.values()])) if by_model else None


def layer_shapes(model: str, input_size: int, batch: int, dtype: str) -> list[tuple[str, ConvShape]]:
    """The convolutions of a torchvision model in run order, found without computing anything."""
    check_names([model])
    shapes: list[tuple[str, ConvShape]] = []

    def record(name: str, layer: Convolution, inputs: tuple[Tensor]) -> None:
        shapes.append((name, convolution_shape(layer, inputs[0])))

    try:
        with torch.device("meta"), torch.inference_mode():
            network = bare(model, (input_size, input_size)).eval().to(torch.float16 if dtype == "fp16" else torch.float32)
            for name, layer in network.named_modules():
                if isinstance(layer, torch.nn.Conv2d):
                    layer.register_forward_pre_hook(partial(record, name))
            network(torch.empty(batch, 3, input_size, input_size, dtype=torch.float16 if dtype == "fp16" else torch.float32))
    except (RuntimeError, NotSupported) as error:
        raise UserError(f"{model} at {input_size}x{input_size}: {str(error).partition(chr(10))[0]}") from None
    return shapes


def kind_of(shape: ConvShape) -> Kind:
    """The properties of a convolution that decide, as far as is known, which algorithms can run it."""
    return shape.kernel, shape.stride, shape.dilation, min(shape.groups, 2), shape.dtype


def runnable_shares(cases: Sequence[LayerCase]) -> dict[Kind, dict[str, float]]:
    """For each kind of convolution, the share of measured layers that each algorithm could run."""
    ran: dict[Kind, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        for name in (*case.times_ms, *case.refused):
            ran[kind_of(case.shape)][name].append(name in case.times_ms)
    return {kind: {name: sum(outcomes) / len(outcomes) for name, outcomes in names.items()} for kind, names in ran.items()}


def predicted_rows(cases: Sequence[LayerCase], layers: Sequence[tuple[str, ConvShape]]) -> list[dict[str, Any]]:
    """One row per layer: its predicted best algorithm, and predicted times (ms) under those that can probably run it.

    The cases are of one device. With `basis` `measured kind`, layers with this filter, stride and grouping were measured, and
    only algorithms that ran most of them are candidates; with `guess` all are.
    """
    model, shares = fit(cases), runnable_shares(cases)
    shapes = [shape for _, shape in layers]
    times = {name: predict_ms(model, shapes, name) for name in model.type_codes}
    rows = []
    for index, (layer, shape) in enumerate(layers):
        share = shares.get(kind_of(shape))
        names = [name for name in times if share is None or share.get(name, 0.0) > 0.5]
        predicted = {name: float(times[name][index]) for name in names}
        best = min(predicted, key=predicted.__getitem__, default=None)
        rows.append({
            "layer": layer, "filter": f"{shape.kernel[0]}x{shape.kernel[1]}",
            "channels": f"{shape.in_channels} to {shape.out_channels}", "input": f"{shape.height}x{shape.width}", "best": best,
            "best_ms": predicted.get(best) if best else None, "basis": "guess" if share is None else "measured kind",
            **{f"{name}_ms": predicted.get(name) for name in sorted(times)}})
    return rows
