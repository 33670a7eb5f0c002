"""Learns energy from made-up energies of real models: those of the shipped H200 dataset, with their records and latencies.

No GPU's energy is measured here. The test knows the coefficients that it made the energies with.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command import run_script
from made_up_dataset import chain, conv, gemm, relu, tensor

from hase.learned import target_files
from hase.learned.composition.fitted import read_composition
from hase.learned.energy import EnergyModel, Part, without_types, work_of_run
from hase.learned.kernels.predictors import read_predictors
from hase.records.dataset_files import header_path, model_table_path
from hase.records.kernel_record import Kernel, Tensor
from hase.records.kernel_record_files import read_model_record, record_path
from hase.records.kernel_types import describe_kernel
from hase.training.fits.energy import MeasuredEnergy, fit_coefficients, fit_energy, parts_of
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import SHIPPED, Workspace

TARGET = "nvidia-h200-cuda-ort1.31-all"
IDLE_W = 115.0
TRUE = {"run_s": 30.0, "busy_s:convolution": 80.0, "busy_s:product": 60.0, "busy_s:other": 40.0, "full_4m_s": 200.0,
        "tflop:convolution": 1.2, "tflop:product": 1.0, "gb": 0.05, "launches": 1e-5}
NOISE = 0.02
Once = Callable[[str, Callable[[Path], object]], Path]


def true_j(work: dict[str, float]) -> float:
    return IDLE_W * work["run_s"] + sum(TRUE.get(name, 0.0) * amount for name, amount in without_types(work).items())


# the work of a run


def test_work_is_summed_by_class_and_type() -> None:
    first, last = conv(), gemm()
    work = work_of_run([Part(first, 2.0, 0.1, 1.0), Part(last, 1.0, 0.2, 3.0), Part(relu(), 1.0, 0.1, 1.0)], 1.0)
    assert work["run_s"] == 1e-3
    assert (work["busy_s:convolution"], work["busy_s:product"], work["busy_s:other"]) == pytest.approx((2e-4, 2e-4, 1e-4))
    assert work["tflop:convolution:float32"] == pytest.approx(2 * first.flops / 1e12)
    assert work["gb"] * 1e9 == pytest.approx(sum(n * (k.bytes_read + k.bytes_written) for n, k in (
        (2, first), (1, last), (1, relu()))))
    assert work["launches"] == 6.0
    millions = [(k.bytes_read + k.bytes_written) / 4e6 for k in (first, last, relu())]
    assert work["full_4m_s"] == pytest.approx(sum(time_s * n / (n + 4) for time_s, n in zip((2e-4, 2e-4, 1e-4), millions,
                                                                                            strict=True)))


def test_half_precision_is_half_the_work_on_as_many_numbers() -> None:
    def product(dtype: str) -> Kernel:
        return describe_kernel("MatMul", "", 13, {}, [tensor(64, 32, dtype=dtype), tensor(32, 16, dtype=dtype)],
                               [Tensor(dtype=dtype, shape=(64, 16))])

    whole, half = (work_of_run([Part(product(dtype), 1.0, 0.1, 1.0)], 1.0) for dtype in ("float32", "float16"))
    assert half["tflop:product:float16"] == pytest.approx(whole["tflop:product:float32"] / 2)
    assert half["full_1m_s"] == pytest.approx(whole["full_1m_s"])
    assert half["gb"] == pytest.approx(whole["gb"] / 2)
    assert without_types({"tflop:product:float32": 1.0, "tflop:product:float16": 2.0, "gb": 3.0}) == {
        "tflop:product": 3.0, "gb": 3.0}


def test_kernels_take_no_longer_than_the_run() -> None:
    work = work_of_run([Part(conv(), 1.0, 3.0, 1.0), Part(relu(), 1.0, 1.0, 1.0)], 2.0)
    assert (work["busy_s:convolution"], work["busy_s:other"]) == pytest.approx((1.5e-3, 0.5e-3))


# the fit


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


def test_exact_energies_give_the_coefficients() -> None:
    names = sorted(TRUE)
    coefficients = dict(zip(names, fit_coefficients(made_up(80, 8), names), strict=True))
    assert coefficients == pytest.approx(TRUE, rel=0.1)  # the penalty takes a little
    assert min(fit_coefficients(made_up(6, 2), names)) >= 0.0  # fewer models than coefficients


def test_batches_of_kernels_are_in_the_fit_and_in_no_error() -> None:
    works = [{**model.work, "busy_s:product": model.work["busy_s:convolution"]} for model in made_up(30, 6)]  # never apart
    models = [replace(model, work=work, energy_j=true_j(work)) for model, work in zip(made_up(30, 6), works, strict=True)]
    batches = [MeasuredEnergy(name, name, true_j(work), 1.0, IDLE_W, 10.0, work, is_model=False) for name, work in (
        ("4 from Conv", {"run_s": 0.01, "busy_s:convolution": 0.009}),
        ("4 from Gemm", {"run_s": 0.01, "busy_s:product": 0.009}))]
    alone, together = fit_energy("t", models, "0"), fit_energy("t", [*models, *batches], "0")
    assert together.left_out is not None
    assert (len(together.models), together.left_out.count) == (30, 30)
    wrong = [abs(fit.coefficients["busy_s:convolution"] - TRUE["busy_s:convolution"]) for fit in (alone, together)]
    assert wrong[1] < wrong[0]  # models alone share the energy between the two


def test_one_family_is_not_held_out_and_few_models_are_refused() -> None:
    fit = fit_energy("t", made_up(12, 1), "0")
    assert (fit.left_out, fit.interval, fit.candidates[0].cv_mape) == (None, None, None)
    with pytest.raises(UserError, match="t: 4 models with a sound measured energy; it takes 5 or more"):
        fit_energy("t", made_up(4, 2), "0")


def test_work_that_no_model_had_is_a_guess() -> None:
    learned = fit_energy("t", made_up(40, 8), "0")
    assert learned.run_j({"run_s": 1.0}) == (
        pytest.approx(learned.idle_w + learned.coefficients["run_s"]), (), 1.0)
    half = learned.run_j({"run_s": 1.0, "tflop:product:float16": 10.0})
    assert half.guessed == ("tflop:product:float16",)
    assert half.energy_j - learned.run_j({"run_s": 1.0}).energy_j == pytest.approx(
        10.0 * learned.coefficients["tflop:product"])
    energy = learned.run_j({"run_s": 1.0, "tflop:other:float32": 10.0})  # of a class that none had
    assert energy.guessed == ("tflop:other:float32",)
    assert energy.energy_j - half.energy_j == pytest.approx(
        10.0 * (max(learned.coefficients["tflop:product"], learned.coefficients["tflop:convolution"])
                - learned.coefficients["tflop:product"]))


def test_no_energy_is_above_the_power_limit() -> None:
    models = made_up(40, 8)
    limit_w = float(np.median([model.power_w for model in models]))
    learned = fit_energy("t", models, "0", limit_w)
    free = fit_energy("t", models, "0")
    for model, limited, unlimited in zip(models, learned.models, free.models, strict=True):
        assert limited.predicted_j == pytest.approx(min(unlimited.predicted_j, limit_w * model.run_ms / 1e3))
    energy = learned.run_j({"run_s": 1.0, "busy_s:other": 100.0})
    assert energy.energy_j == limit_w
    assert energy.over_limit == pytest.approx(free.run_j({"run_s": 1.0, "busy_s:other": 100.0}).energy_j / limit_w)


# the command


@pytest.fixture(scope="module")
def energies(once: Once, h200_workspace: Workspace) -> Path:
    """A workspace with records of the H200's models, a table of every second one with made-up energies, and the shipped
    predictors."""
    def make(root: Path) -> None:
        shutil.copytree(h200_workspace.kernel_records, Workspace(root).kernel_records)
        header = header_path(Workspace(root).dataset(TARGET))
        files.write_bytes(header, header_path(h200_workspace.dataset(TARGET)).read_bytes())
        workspace, folder = Workspace(root), Workspace(root).predictors(TARGET)
        shutil.copytree(SHIPPED / TARGET, folder)
        target_files.ENERGY.path(folder).unlink(missing_ok=True)
        predictors = read_predictors(folder)
        composition = read_composition(folder)
        draw, rows = np.random.default_rng(0), []
        for model in composition.models[::2]:
            path = record_path(workspace, predictors.sidecar.target.flavour, model.model)
            if not path.is_file():
                continue
            work = work_of_run(parts_of(read_model_record(path), predictors, composition.label), model.measured_ms)
            energy_j = true_j(work) * math.exp(NOISE * draw.standard_normal())
            rows.append({"Model": model.model, "Level": 0.0, "Latency_ms": model.measured_ms, "median_ms": model.measured_ms,
                         "energy_ms": model.measured_ms, "energy_j": energy_j, "counter_j": 1.01 * energy_j,
                         "power_w": 1e3 * energy_j / model.measured_ms, "idle_w": IDLE_W, "Runs": 10, "Status": "ok",
                         "energy_doubts": "", "Groups": model.group})
        rows.append(rows[0] | {"energy_j": 1e6, "energy_doubts": "no sample for 2.00 s"})  # no such row counts
        pd.DataFrame(rows).to_csv(model_table_path(workspace.dataset(TARGET)), index=False)

    return once("measured_energy", make)


@pytest.fixture(scope="module")
def fitted(energies: Path) -> tuple[EnergyModel, subprocess.CompletedProcess[str]]:
    done = run_script("training/fit_energy.py", "--workspace", energies, "--json")
    assert done.returncode == 0, done.stderr
    return target_files.ENERGY.needed(Workspace(energies).predictors(TARGET)), done


@pytest.mark.slow
def test_made_up_energies_of_real_models_are_learned(fitted: tuple[EnergyModel, subprocess.CompletedProcess[str]]) -> None:
    learned, done = fitted
    assert json.loads(done.stdout)[TARGET] == learned.model_dump(mode="json")
    assert "its energy is not used: no sample for 2.00 s" in done.stderr
    assert (learned.idle_w, learned.agreement) == (pytest.approx(IDLE_W), pytest.approx(1 / 1.01))
    assert learned.kind == "class powers and work, half full at 4 million numbers"
    for name in ("full_4m_s", "tflop:convolution", "gb"):  # most of the energy of these models
        assert learned.coefficients[name] == pytest.approx(TRUE[name], rel=0.3)
    assert learned.left_out is not None
    assert learned.left_out.count > 100
    assert learned.left_out.mape < 1.5 * NOISE
    assert learned.left_out_with_latency is not None
    assert learned.left_out.mape < learned.left_out_with_latency.mape < 0.06  # the latency's error comes on top
    assert learned.interval is not None
    assert learned.interval.low < 1.0 < learned.interval.high < 1.1
    rejected_mapes = [candidate.cv_mape for candidate in learned.candidates if candidate.name != learned.kind]
    assert min(mape for mape in rejected_mapes if mape is not None) > learned.left_out.mape


@pytest.mark.slow
def test_a_dataset_without_energy_says_how_to_get_it(energies: Path, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    shutil.copytree(Workspace(energies).predictors(TARGET), workspace.predictors(TARGET))
    pd.DataFrame([{"Model": chain("anet", [relu()]).model, "Level": 0.0, "Latency_ms": 1.0, "Status": "ok", "Runs": 3}]).to_csv(
        _made(model_table_path(workspace.dataset(TARGET))), index=False)
    done = run_script("training/fit_energy.py", "--workspace", tmp_path)
    assert done.returncode == 1
    assert "no energy was measured; collect with energy_s: 3 in the collector's config" in done.stderr


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    return path


# the prediction


def predict(energies: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("inference/predict_model_latency.py", "--workspace", energies, "--target", TARGET, *options)


@pytest.fixture(scope="module")
def record(energies: Path) -> Path:
    return sorted((energies / "ort_analysis").glob("**/resnet50@batch=16.json"))[0]


@pytest.mark.slow
def test_energy_follows_from_a_models_latency(fitted: tuple[EnergyModel, subprocess.CompletedProcess[str]], energies: Path,
                                              record: Path) -> None:
    done = predict(energies, "--model", record, "--energy", "--json")
    assert done.returncode == 0, done.stderr
    [prediction] = json.loads(done.stdout)
    energy, table = prediction["energy"], pd.read_csv(model_table_path(Workspace(energies).dataset(TARGET)))
    true = table[table["Model"] == read_model_record(record).model]
    assert energy["latency_ms"] == prediction["latency_ms"]
    assert energy["mean_power_w"] == pytest.approx(1e3 * energy["energy_j"] / prediction["latency_ms"])
    assert energy["energy_per_item_j"] == pytest.approx(energy["energy_j"] / prediction["batch"])
    assert energy["idle_j"] == pytest.approx(IDLE_W * prediction["latency_ms"] / 1e3)
    for name, value in (("interval_j", "energy_j"), ("item_interval_j", "energy_per_item_j"),
                        ("power_interval_w", "mean_power_w")):
        assert energy[name][0] < energy[value] < energy[name][1]
    if len(true):  # every second model was measured
        assert energy["interval_j"][0] < true["energy_j"].iloc[0] < energy["interval_j"][1]
    shown = predict(energies, "--model", record, "--energy").stdout
    assert "J/item\tmean power (W)" in shown


@pytest.mark.slow
def test_without_energy_the_answer_is_as_before_and_a_load_is_refused(
        fitted: tuple[EnergyModel, subprocess.CompletedProcess[str]], energies: Path, record: Path) -> None:
    assert "energy" not in json.loads(predict(energies, "--model", record, "--json").stdout)[0]
    assert "leave --watch, --metrics and --probe out" in predict(energies, "--model", record, "--energy", "--probe").stderr


@pytest.mark.slow
def test_predictors_without_energy_say_how_to_get_it(record: Path, tmp_path: Path) -> None:
    folder = Workspace(tmp_path).predictors(TARGET)
    shutil.copytree(SHIPPED / TARGET, folder)
    target_files.ENERGY.path(folder).unlink()
    done = predict(tmp_path, "--model", record, "--energy")
    assert done.returncode == 1
    assert "nothing was learned of its energy; measure models there with energy_s: 3" in done.stderr
