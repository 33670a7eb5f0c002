"""Learns energy from made-up energies of real models: those of the shipped H200 dataset, with their records and latencies.

No GPU's energy is measured here. The test knows the coefficients that it made the energies with.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from command import run_script
from conftest import Once
from made_up_dataset import conv, gemm, relu

from hase.inference import Predictor
from hase.learned import target_files
from hase.learned.composition.fitted import read_composition
from hase.learned.energy import EnergyModel, Part, without_types, work_of_run
from hase.learned.kernels.predictors import read_predictors
from hase.records.dataset_files import header_path, model_table_path
from hase.records.kernel_record_files import read_model_record, record_path
from hase.training.fits.energy import MeasuredEnergy, fit_coefficients, fit_energy, model_parts
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import SHIPPED, Workspace

TARGET = "nvidia-h200-cuda-ort1.31-all"
IDLE_W = 115.0
TRUE = {"run_s": 30.0, "busy_s:convolution": 80.0, "busy_s:product": 60.0, "busy_s:other": 40.0, "full_4m_s": 200.0,
        "tflop:convolution": 1.2, "tflop:product": 1.0, "gb": 0.05, "launches": 1e-5}
NOISE = 0.02
EACH = 12  # every twelfth of the models


def true_j(work: dict[str, float]) -> float:
    return IDLE_W * work["run_s"] + sum(TRUE.get(name, 0.0) * amount for name, amount in without_types(work).items())


def test_work_is_summed_by_class_and_type() -> None:
    first, last = conv(), gemm()
    work = work_of_run([Part(first, 2.0, 0.1, 1.0), Part(last, 1.0, 0.2, 3.0), Part(relu(), 1.0, 0.1, 1.0)], 1.0)
    assert work["run_s"] == 1e-3
    assert (work["busy_s:convolution"], work["busy_s:product"], work["busy_s:other"]) == pytest.approx((2e-4, 2e-4, 1e-4))
    assert work["tflop:convolution:float32"] == pytest.approx(2 * first.flops / 1e12)
    assert work["gb"] * 1e9 == pytest.approx(sum(n * (k.bytes_read + k.bytes_written) for n, k in (
        (2, first), (1, last), (1, relu()))))
    assert work["launches"] == 6.0


def made_up(count: int, families: int, seed: int = 0) -> list[MeasuredEnergy]:
    """Runs of random work with the true coefficients."""
    draw, runs = np.random.default_rng(seed), []
    for number in range(count):
        work = {name: float(draw.lognormal(0.0, 1.0)) / TRUE[name] for name in TRUE} | {
            "run_s": float(draw.lognormal(0.0, 0.3)) / IDLE_W}
        energy_j = true_j(work)
        runs.append(MeasuredEnergy(f"m{number}", f"f{number % families}", energy_j, energy_j / work["run_s"], IDLE_W,
                                    1e3 * work["run_s"], work))
    return runs


@pytest.mark.slow
def test_exact_energies_give_the_coefficients() -> None:
    names = sorted(TRUE)
    coefficients = dict(zip(names, fit_coefficients(made_up(80, 8), names), strict=True))
    assert coefficients == pytest.approx(TRUE, rel=0.1)  # the penalty takes a little
    with pytest.raises(UserError, match="t: 4 models with a sound measured energy; it takes 5 or more"):
        fit_energy("t", made_up(4, 2), "0")


@pytest.fixture(scope="module")
def learned() -> EnergyModel:
    return fit_energy("t", made_up(40, 8), "0")


def test_work_that_no_model_had_is_a_guess(learned: EnergyModel) -> None:
    assert learned.run_j({"run_s": 1.0}).guessed == ()
    half = learned.run_j({"run_s": 1.0, "tflop:product:float16": 10.0})
    assert half.guessed == ("tflop:product:float16",)
    energy = learned.run_j({"run_s": 1.0, "tflop:other:float32": 10.0})  # of a class that none had
    assert energy.guessed == ("tflop:other:float32",)
    assert energy.energy_j >= half.energy_j


def test_no_energy_is_above_the_power_limit(learned: EnergyModel) -> None:
    models = made_up(40, 8)
    limit_w = float(np.median([model.power_w for model in models]))
    limited = fit_energy("t", models, "0", limit_w)
    for model, below, free in zip(models, limited.models, learned.models, strict=True):
        assert below.predicted_j == pytest.approx(min(free.predicted_j, limit_w * model.run_ms / 1e3))
    assert limited.run_j({"run_s": 1.0, "busy_s:other": 100.0}).energy_j == limit_w


@pytest.fixture(scope="module")
def energies(once: Once, h200_workspace: Workspace) -> Path:
    def make(root: Path) -> None:
        workspace, folder = Workspace(root), Workspace(root).predictors(TARGET)
        files.write_bytes(header_path(workspace.dataset(TARGET)), header_path(h200_workspace.dataset(TARGET)).read_bytes())
        shutil.copytree(SHIPPED / TARGET, folder)
        target_files.ENERGY.path(folder).unlink(missing_ok=True)
        predictors, composition, draw, rows = read_predictors(folder), read_composition(folder), np.random.default_rng(0), []
        flavour = predictors.sidecar.target.flavour
        for model in composition.models[::EACH]:
            path, there = (record_path(of, flavour, model.model) for of in (workspace, h200_workspace))
            if not there.is_file():
                continue
            files.write_bytes(path, there.read_bytes())
            work = work_of_run(model_parts(read_model_record(path), predictors, composition.label), model.measured_ms)
            energy_j = true_j(work) * math.exp(NOISE * draw.standard_normal())
            rows.append({"Model": model.model, "Level": 0.0, "Latency_ms": model.measured_ms, "median_ms": model.measured_ms,
                         "energy_ms": model.measured_ms, "energy_j": energy_j, "counter_j": 1.01 * energy_j,
                         "power_w": 1e3 * energy_j / model.measured_ms, "idle_w": IDLE_W, "Runs": 10, "Status": "ok",
                         "energy_doubts": "", "Groups": model.group})
        rows.append(rows[0] | {"energy_j": 1e6, "energy_doubts": "no sample for 2.00 s"})  # no such row counts
        pd.DataFrame(rows).to_csv(model_table_path(workspace.dataset(TARGET)), index=False)

    return once("measured_energy", make)


@pytest.mark.slow
def test_made_up_energies_of_real_models_are_learned(energies: Path) -> None:
    done = run_script("training/fit_energy.py", "--workspace", energies, "--json")
    assert done.returncode == 0, done.stderr
    learned = target_files.ENERGY.needed(Workspace(energies).predictors(TARGET))
    assert json.loads(done.stdout)[TARGET] == learned.model_dump(mode="json")
    assert "its energy is not used: no sample for 2.00 s" in done.stderr
    assert (learned.idle_w, learned.agreement) == (pytest.approx(IDLE_W), pytest.approx(1 / 1.01))
    for name in ("full_4m_s", "tflop:convolution", "gb"):  # most of the energy of these models
        assert learned.coefficients[name] == pytest.approx(TRUE[name], rel=0.3)
    assert learned.left_out is not None
    assert learned.left_out.count > 20
    assert learned.left_out.mape < 1.5 * NOISE
    assert learned.left_out_with_latency is not None
    assert learned.left_out.mape < learned.left_out_with_latency.mape < 0.06  # the latency's error comes on top
    record = read_model_record(sorted(energies.glob("ort_analysis/**/*.json"))[0])
    energy: dict[str, Any] = Predictor(Workspace(energies), TARGET).energy(record).model_dump()
    assert energy["mean_power_w"] == pytest.approx(1e3 * energy["energy_j"] / energy["latency_ms"])
    assert energy["energy_per_item_j"] == pytest.approx(energy["energy_j"] / energy["batch"])
    table = pd.read_csv(model_table_path(Workspace(energies).dataset(TARGET)))
    measured_j = table[(table["Model"] == record.model) & (table["energy_doubts"].isna())]["energy_j"].iloc[0]
    assert energy["interval_j"][0] < measured_j < energy["interval_j"][1]


@pytest.mark.slow
def test_a_dataset_without_energy_says_how_to_get_it(energies: Path, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    shutil.copytree(Workspace(energies).predictors(TARGET), workspace.predictors(TARGET))
    row = {"Model": "anet", "Level": 0.0, "Latency_ms": 1.0, "Status": "ok", "Runs": 3}
    files.write_text(model_table_path(workspace.dataset(TARGET)), pd.DataFrame([row]).to_csv(index=False))
    done = run_script("training/fit_energy.py", "--workspace", tmp_path)
    assert done.returncode == 1
    assert "no energy was measured; collect with energy_s: 3 in the collector's config" in done.stderr
