"""A model on several devices side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import printed, run_script

from hase.inference.compare_devices import target_of
from hase.inference.library.predictor import Predictor
from hase.inference.prediction.answers import chance_within
from hase.utils.paths import Workspace

pytestmark = pytest.mark.slow

SCRIPT = "inference/compare_devices.py"


def test_rows_are_those_of_single_predictions_and_sorted_by_cost(torch_models: dict[str, Path], tmp_path: Path) -> None:
    model = torch_models["resnet18"]
    prices = tmp_path / "prices.yaml"
    prices.write_text("h200: 3.6\nl4: 0.36\np4: 0.036\n", encoding="utf-8")
    rows = json.loads(printed(SCRIPT, "--model", model, "--host-pace", "1", "--json", "--gpus", "h200,l4,p4", "--prices",
                              prices, "--slo-ms", "1", "--plot", tmp_path / "plot.svg"))
    costs = [row["a million items"] for row in rows]
    assert costs == sorted(costs)
    by_device = {str(row["device"]): row for row in rows}
    assert {name: row["from"] for name, row in by_device.items()} == {
        "h200": "measured card", "l4": "data sheet", "p4": "data sheet"}
    alone = Predictor(target="nvidia-h200").predict(model, host_pace=1.0)
    assert by_device["h200"]["latency (ms)"] == pytest.approx(alone.latency_ms)
    assert alone.items_per_second is not None
    assert by_device["h200"]["a million items"] == pytest.approx(3.6 / 3600 * 1e6 / alone.items_per_second)
    assert (tmp_path / "plot.svg").stat().st_size > 1000
    assert by_device["h200"]["chance of 1 ms"] == f"{chance_within(alone.latency_ms, alone.interval_ms, 1.0):.0%}"


@pytest.mark.parametrize(("gpus", "price", "message"), [
    ("h200", "-1", "greater than 0"), ("h200,l4", "1", "no price of l4; it has h200"),
    ("gaudi3", "", "Intel's cards have providers of their own"), ("h100,h100", "", "different devices")])
def test_wrong_names_and_prices_are_told(gpus: str, price: str, message: str, torch_models: dict[str, Path],
                                         tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(f"h200: {price}\n", encoding="utf-8")
    prices = ("--prices", tmp_path / "prices.yaml") if price else ()
    done = run_script(SCRIPT, "--model", torch_models["resnet18"], "--gpus", gpus, *prices)
    assert (done.returncode in (1, 2), message in done.stderr) == (True, True), done.stderr


def test_a_name_stands_for_a_measured_card_or_for_a_data_sheet() -> None:
    assert target_of("h200", Workspace()) == "nvidia-h200-cuda-ort1.31-all"
    assert target_of("h200-nvl", Workspace()) == "h200-nvl-from-data-sheet"
    assert target_of("this", Workspace()) is None
