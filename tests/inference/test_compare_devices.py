"""A model on several devices side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run_script

from hase.inference.compare_devices import target_of
from hase.inference.library.predictor import Predictor
from hase.inference.prediction.answers import chance_within
from hase.utils.paths import Workspace

pytestmark = pytest.mark.slow


def compare(model: Path, *options: str | Path) -> list[dict[str, object]]:
    done = run_script("inference/compare_devices.py", "--model", model, "--host-pace", "1", "--json", *options)
    rows: list[dict[str, object]] = json.loads(done.stdout)
    return rows


def test_rows_are_those_of_single_predictions_and_sorted_by_cost(torch_models: dict[str, Path], tmp_path: Path) -> None:
    model = torch_models["resnet18"]
    prices = tmp_path / "prices.yaml"
    prices.write_text("h200: 3.6\nl4: 0.36\np4: 0.036\n", encoding="utf-8")
    rows = compare(model, "--gpus", "h200,l4,p4", "--prices", prices, "--slo-ms", "1", "--plot", tmp_path / "plot.svg")
    costs = [row["a million items"] for row in rows]
    assert costs == sorted(costs)  # type: ignore[type-var]
    by_device = {str(row["device"]): row for row in rows}
    assert {name: row["from"] for name, row in by_device.items()} == {
        "h200": "measured card", "l4": "data sheet", "p4": "data sheet"}
    alone = Predictor(target="nvidia-h200").predict(model, host_pace=1.0)
    assert by_device["h200"]["latency (ms)"] == pytest.approx(alone.latency_ms)
    assert alone.items_per_second is not None
    assert by_device["h200"]["a million items"] == pytest.approx(3.6 / 3600 * 1e6 / alone.items_per_second)
    assert (tmp_path / "plot.svg").stat().st_size > 1000
    assert by_device["h200"]["chance of 1 ms"] == f"{chance_within(alone.latency_ms, alone.interval_ms, 1.0):.0%}"


def test_wrong_names_and_prices_are_told(torch_models: dict[str, Path], tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("h200: -1\n", encoding="utf-8")
    cases: tuple[tuple[tuple[str | Path, ...], str], ...] = (
        (("--gpus", "h200", "--prices", prices), "greater than 0"),
        (("--gpus", "gaudi3"), "Intel's cards have providers of their own"), (("--gpus", "h100,h100"), "different devices"))
    for options, message in cases:
        done = run_script("inference/compare_devices.py", "--model", torch_models["resnet18"], *options)
        assert done.returncode in (1, 2)
        assert message in done.stderr
    prices.write_text("h200: 1\n", encoding="utf-8")
    done = run_script("inference/compare_devices.py", "--model", torch_models["resnet18"], "--gpus", "h200,l4", "--prices",
                      prices)
    assert "no price of l4; it has h200" in done.stderr


def test_a_name_stands_for_a_measured_card_or_for_a_data_sheet() -> None:
    assert target_of("h200", Workspace()) == "nvidia-h200-cuda-ort1.31-all"
    assert target_of("h200-nvl", Workspace()) == "h200-nvl-from-data-sheet"
    assert target_of("this", Workspace()) is None
