"""The energy that was measured on three H200s and ships with Hase: its soundness, what is learned from it, and the
errors of predictions. Nothing is measured here."""

from __future__ import annotations

import json
import re
import shutil

import pandas as pd
import pytest
from command import run_script

from hase.learned import target_files
from hase.records.dataset_files import model_table_path
from hase.utils import files
from hase.utils.paths import ROOT, SHIPPED, Workspace

TARGET = "nvidia-h200-cuda-ort1.31-all"
ARCHIVE = ROOT / "recipes" / "h200" / "energy-nvidia-h200.tar.xz"
PREDICTED_FIRST = ROOT / "recipes" / "h200" / "energy_predicted_first.csv"  # before any of these models was measured
FIGURE = re.compile(r"([+-]?\d+\.\d+)%")
LIMIT_W = 700.0  # the power limit of this card


@pytest.fixture(scope="module")
def shipped_energy(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """The measured energies, with the predictors that come with Hase."""
    workspace = Workspace(tmp_path_factory.mktemp("measured_energy"))
    files.unpack(ARCHIVE, workspace.root)
    shutil.copytree(SHIPPED / TARGET, workspace.predictors(TARGET))
    return workspace


@pytest.fixture(scope="module")
def table(shipped_energy: Workspace) -> pd.DataFrame:
    return pd.read_csv(model_table_path(shipped_energy.dataset(TARGET)))


@pytest.mark.slow
def test_predictions_from_before_the_measurements(table: pd.DataFrame) -> None:
    """The blind test of docs/energy.md: the first measurement of each model counts."""
    measured = table.drop_duplicates("Model").set_index("Model")[["energy_j", "power_w"]]
    blind = pd.read_csv(PREDICTED_FIRST).set_index("model").join(measured.rename(columns={"energy_j": "measured_j"}))
    blind = blind.dropna(subset="measured_j")
    errors, by_gpu = (blind["energy_j"] / blind["measured_j"] - 1.0).abs(), blind["power_w"] > 242.0
    assert len(blind) == 22
    assert (errors.mean(), errors.median()) == pytest.approx((0.058, 0.030), abs=0.001)
    assert (errors[by_gpu].mean(), errors[~by_gpu].mean()) == pytest.approx((0.038, 0.093), abs=0.001)
    assert blind["measured_j"].between(blind["low_j"], blind["high_j"]).sum() == 20


@pytest.mark.slow
def test_what_ships_was_learned_from_these_readings(shipped_energy: Workspace) -> None:
    """The same coefficients, within the bar of 10 %, on the page's figures; and the evaluator scores by them."""
    folder = shipped_energy.predictors(TARGET)
    shipped = target_files.ENERGY.needed(folder)
    target_files.ENERGY.path(folder).unlink()
    done = run_script("training/fit_energy.py", "--workspace", shipped_energy.root, "--target", TARGET, "--models",
                      "--limit-w", LIMIT_W, "--markdown", shipped_energy.root / "page.md")
    assert done.returncode == 0, done.stderr
    learned = target_files.ENERGY.needed(folder)
    assert learned.kind == shipped.kind
    assert learned.coefficients == pytest.approx(shipped.coefficients, rel=1e-3)
    assert learned.left_out is not None
    assert (learned.left_out.count, learned.left_out.mape < 0.1) == (80, True)
    page = (shipped_energy.root / "page.md").read_text()
    shown, made = (FIGURE.findall(text) for text in ((ROOT / "docs" / "tables" / "energy.md").read_text(), page))
    assert len(made) > 79
    assert [float(value) for value in shown] == pytest.approx([float(value) for value in made], abs=0.3)  # per cent
    done = run_script("evaluator.py", "--workspace", shipped_energy.root, "--target", TARGET, "--recorded", "--json")
    assert done.returncode == 0, done.stderr
    [summary] = [row for row in json.loads(done.stdout)["summaries"] if row["group"] == "all models"]
    assert summary["energy"]["count"] >= 40  # models whose host was not disturbed
    assert summary["energy"]["mape"] < 0.1
