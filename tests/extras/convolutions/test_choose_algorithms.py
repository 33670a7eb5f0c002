"""The best algorithm of each layer, gains, and the regret of predicted choices, from tables with made-up times."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import printed, run_script

from hase.extras.convolutions.choosing.choice import (
    CONVOLUTION_FEATURES,
    layer_shapes,
    left_out_times,
    mean_regret,
    predicted_rows,
    regret_rows,
)
from hase.extras.convolutions.choosing.tables import read_cases
from hase.extras.convolutions.profiling.algorithms import ConvShape
from hase.extras.convolutions.profiling.results import LAYERS, LAYERS_MORE, OVERALL, OVERALL_MORE
from hase.utils import files
from hase.utils.errors import UserError

pytestmark = pytest.mark.slow

SCRIPT = "extras/convolutions/choose_algorithms.py"
FILTERS = (1, 3, 5, 7)


def made_up_ms(shape: ConvShape, algorithm: str) -> float:
    """Time by a simple rule: gemm by its operations, fft by the pixels alone, so that it wins for large filters."""
    pixels = shape.height * shape.width * (shape.in_channels + shape.out_channels)
    return 0.001 + (shape.flops / 2e9 if algorithm == "gemm" else pixels * np.log2(shape.height) / 1e8)


def shape_of(channels: int, filter_size: int, size: int) -> ConvShape:
    side = filter_size // 2
    return ConvShape(1, channels, channels, size, size, (filter_size,) * 2, (1, 1), (side, side), (1, 1), 1, False, "fp32")


def layer_row(model: str, algorithm: str, shape: ConvShape, **changes: Any) -> dict[str, Any]:
    time_ms = made_up_ms(shape, algorithm)
    row = {"layer": f"conv{shape.in_channels}_{shape.kernel[0]}", "in_channels": shape.in_channels,
           "out_channels": shape.out_channels, "kernel_size": f"{shape.kernel[0]}x{shape.kernel[1]}", "mean_ms": time_ms,
           "percentage": 1.0, "model": model, "algorithm": algorithm, "input_size": shape.height, "batch": 1, "dtype": "fp32",
           "tf32": 1, "gpu": "h200", "ran": algorithm, "status": "ok", "median_ms": time_ms, "height": shape.height,
           "width": shape.width, "stride": "1x1", "padding": f"{shape.padding[0]}x{shape.padding[1]}", "dilation": "1x1",
           "groups": 1}
    return row | changes


def write_results(root: Path, model: str, sizes: tuple[int, ...] = (32, 64)) -> None:
    """The tables of one model under gemm, fft and guess, which always takes gemm; fft can't run filters of 1x1."""
    shapes = [shape_of(channels, filter_size, size) for size in sizes for channels in (8, 16, 48) for filter_size in FILTERS]
    refused = {"status": "CUDNN_STATUS_NOT_SUPPORTED", "ran": "gemm"}  # by the fallback
    tables = {
        "gemm": [layer_row(model, "gemm", shape) for shape in shapes],
        "fft": [layer_row(model, "fft", shape, **(refused if shape.kernel == (1, 1) else {})) for shape in shapes],
        "guess": [layer_row(model, "gemm", shape) | {"algorithm": "guess"} for shape in shapes]}
    for name, rows in tables.items():
        folder = root / "2_quick" / f"{model}_{name}_h200"
        files.write_csv(folder / f"{model}_{name}_layers.csv", (*LAYERS, *LAYERS_MORE), rows)
        overall = [{"model": model, "algorithm": name, "input_size": size, "mean": size / 10, "std": 0.1, "batch": 1,
                    "dtype": "fp32", "tf32": 1, "gpu": "h200", "layers_not_supported": 6 * (name == "fft"), "status": "ok",
                    "energy_per_inference_j": None if name == "fft" else size / 40}
                   for size in sizes]
        files.write_csv(folder / f"{model}_{name}_overall.csv", (*OVERALL, *OVERALL_MORE), overall)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    for model in ("vgg16", "resnet50", "resnet152", "alexnet"):
        write_results(root, model)
    return root


def test_what_ran_counts_and_a_fallback_does_not(results: Path) -> None:
    cases = read_cases(results)
    assert len(cases) == 4 * 2 * 3 * 4
    for case in cases:
        assert case.times_ms == {name: made_up_ms(case.shape, name) for name in case.times_ms}
        assert set(case.times_ms) == ({"gemm"} if case.shape.kernel == (1, 1) else {"gemm", "fft"})
        assert (case.library_choice, case.library_ms) == ("gemm", made_up_ms(case.shape, "gemm"))


def test_predicted_choices_of_families_left_out(results: Path) -> None:
    """resnet50 and resnet152 are left out together. The rule is simple, so next to nothing is lost."""
    cases = read_cases(results)
    rows = regret_rows(cases, left_out_times(cases))
    assert {row["model"] for row in rows} == {"vgg16", "resnet50", "resnet152", "alexnet"}
    assert 0 <= (mean_regret(rows) or 0.0) < 5.0
    assert all(row["with_a_choice"] == 9 and row["library_regret_percent"] > 10 for row in rows)
    worst = [{name: -time_ms for name, time_ms in case.times_ms.items()} for case in cases]  # chooses the slowest
    assert all(row["regret_percent"] > 10 for row in regret_rows(cases, worst))


def test_the_script(results: Path, tmp_path: Path) -> None:
    tables = json.loads(printed(SCRIPT, "--results", results, "--output-dir", tmp_path, "--model", "vgg16", "--json"))
    for row in tables["gain"]:
        run = [case for case in read_cases(results) if (case.model, case.input_size) == (row["model"], row["input_size"])]
        library_ms = sum(made_up_ms(case.shape, "gemm") for case in run)
        best_ms = sum(min(case.times_ms.values()) for case in run)
        assert row["gain_percent"] == pytest.approx(100 * (library_ms - best_ms) / library_ms)
        assert (row["model"], row["layers"], row["without_library"], row["best_single"]) == ("vgg16", 12, 0, "gemm")
    assert tables["mean_regret_percent"] < 5
    with (tmp_path / "best.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert len(rows) == 24
    assert {row["best"] for row in rows if "_7" in row["layer"]} == {"fft"}
    for plot in ("vgg16_h200_b1_fp32_times", "vgg16_h200_b1_fp32_energy", "resnet50_h200_b1_fp32_64_layers"):
        assert (tmp_path / f"{plot}.png").stat().st_size > 5000


def test_a_model_that_was_not_measured(results: Path) -> None:
    shapes = [shape_of(12, filter_size, 40) for filter_size in (1, 3, 7, 9)]
    of_1, of_3, of_7, of_9 = predicted_rows(read_cases(results), [(f"conv{shape.kernel[0]}", shape) for shape in shapes])
    assert (of_1["best"], of_1["fft_ms"], of_1["basis"]) == ("gemm", None, "measured kind")  # fft never ran 1x1
    assert of_3["basis"] == "measured kind"
    assert (of_7["best"], of_9["best"], of_9["basis"]) == ("fft", "fft", "guess")
    predicted = json.loads(printed(SCRIPT, "--results", results, "--predict", "alexnet", "--json"))
    assert [row["filter"] for row in predicted] == ["11x11", "5x5", "3x3", "3x3", "3x3"]


def test_missing_and_damaged_tables(tmp_path: Path, results: Path) -> None:
    for options, message in (
            ((tmp_path,), "no results of convolution algorithms"),
            ((results, "--model", "vgg19"), "--model vgg19: not measured; there are alexnet"),
            ((results, "--predict", "alexnet", "--gpu", "v100"), "--gpu v100: name one of those that were measured: h200")):
        done = run_script(SCRIPT, "--results", *options)
        assert (done.returncode, message in done.stderr) == (1, True)
    with pytest.raises(UserError, match="alexnet at 16x16: "):
        layer_shapes("alexnet", 16, 1, "fp32")
    (tmp_path / "x_layers.csv").write_text("layer\nconv1\n")
    with pytest.raises(UserError, match="tables without the column gpu"):
        read_cases(tmp_path)


def test_work_of_each_method() -> None:
    """Numbers worked out by hand: 16 images of 56x56, 3x3 filters, from 128 to 32 channels."""
    shape = ConvShape(16, 128, 32, 56, 56, (3, 3), (1, 1), (1, 1), (1, 1), 1, False, "fp32")
    values = dict(zip(CONVOLUTION_FEATURES.names, CONVOLUTION_FEATURES.compute(shape), strict=True))
    expected = {"log_rows": 16 * 56 * 56, "log_depth": 128 * 9, "log_product_tiles": 392, "log_tile_steps": 392 * 128 * 9,
                "log_padded_product": 784 * 64 * 32 * 128 * 9, "log_winograd_tiles": 16 * 14 * 14,
                "log_winograd_out": 16 * 14 * 14 * 32, "log_fft_pixels": 64 * 64, "log_fft_tiles": 4,
                "log_fft_tile_products": 4 * 128 * 32 * 16}
    assert {name: round(2 ** values[name]) for name in expected} == expected
