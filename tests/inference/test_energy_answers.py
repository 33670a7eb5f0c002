"""Energy on a CPU from the dataset to the evaluator. The energies are made up, like all times of this dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import printed, run_script
from trained_workspace import HELD_OUT, model_ms

from hase.inference import Predictor
from hase.inference.prediction.energy import EnergyPrediction
from hase.learned import target_files
from hase.records.dataset_files import header_path, journal_path, read_header, read_journal
from hase.records.dataset_tables import write_dataset_tables
from hase.records.kernel_record import ModelRecord
from hase.records.kernel_record_files import read_model_records
from hase.records.measurement import Measurement
from hase.runtimes import local_flavour, local_target
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

pytestmark = pytest.mark.slow

TARGET = local_target("cpu").name
IDLE_W, RUNNING_W, J_PER_GB = 20.0, 30.0, 0.2


def energy_j(record: ModelRecord) -> float:
    kernels = [record.kernel_of(node) for node in record.nodes]
    gb = sum(kernel.bytes_read + kernel.bytes_written for kernel in kernels) / 1e9
    return (IDLE_W + RUNNING_W) * model_ms(record) / 1e3 + J_PER_GB * gb


def measurement(record: ModelRecord, doubt: str) -> Measurement:
    run_j, run_ms = energy_j(record), model_ms(record)
    quantities = {"energy_j": run_j, "power_w": 1e3 * run_j / run_ms, "idle_w": IDLE_W, "window_s": 3.0, "runs": 3e3 / run_ms}
    return Measurement(subject="model", id=record.model, label="energy", context=record.model, place="alone", error=doubt,
                       samples_ms=(run_ms,), quantities={name: (value,) for name, value in quantities.items()})


@pytest.fixture(scope="module")
def workspace(trained_workspace: Workspace) -> Workspace:
    """The trained workspace with the energy of each model; one of the readings is doubtful."""
    folder, records = trained_workspace.dataset(TARGET), read_model_records(trained_workspace, local_flavour("cpu"))
    energies = tuple(measurement(record, "no sample for 2.00 s" if number == 3 else "")
                     for number, record in enumerate(records))
    blocks = [block if block.level else block.model_copy(update={"measurements": (*block.measurements, *energies)})
              for block in read_journal(folder)]
    header = read_header(folder).model_copy(update={"energy": True})
    files.write_json(header_path(folder), header)
    files.write_text(journal_path(folder), "".join(block.model_dump_json() + "\n" for block in blocks))
    write_dataset_tables(folder, header, blocks)
    return trained_workspace


def run(script: str, workspace: Workspace, *options: str | Path) -> Any:
    """What --json prints."""
    return json.loads(printed(script, "--workspace", workspace.root, *options, "--json"))


def test_before_anything_is_learned(workspace: Workspace) -> None:
    assert not target_files.ENERGY.path(workspace.predictors(TARGET)).exists()
    with pytest.raises(UserError, match=r"nothing was learned of its energy; measure .* energy_s: 3 .*fit_energy"):
        Predictor(workspace, TARGET).energy("anet_c16.onnx")


def test_learned_predicted_and_judged(workspace: Workspace) -> None:
    learned = run("training/fit_energy.py", workspace)[TARGET]
    assert HELD_OUT not in {model["group"] for model in learned["models"]}
    assert len(learned["models"]) == 17  # of 18, one reading is doubtful
    assert learned["left_out"]["mape"] < 0.02

    records = read_model_records(workspace, local_flavour("cpu"))
    record = next(candidate for candidate in records if candidate.model == "bnet_c32")
    energy = Predictor(workspace, TARGET).energy("bnet_c32.onnx")
    assert energy.energy_j == pytest.approx(energy_j(record), rel=0.05)
    assert energy.energy_per_item_j == energy.energy_j / 2
    assert energy.interval_j[0] < energy_j(record) < energy.interval_j[1]
    assert energy.rough_estimate  # the energy was learned from 17 models, too few to tell its error
    assert energy.interval_j[1] >= 2 * energy.energy_j

    curve = [answer["energy"] for answer in run("inference/predict_model_latency.py", workspace, "--target", TARGET, "--model",
                                                "dynnet.onnx", "--dim", "batch=1,4,16", "--energy")]
    assert curve[0]["energy_j"] < curve[1]["energy_j"] < curve[2]["energy_j"]

    judged = run("evaluator.py", workspace, "--target", TARGET, "--recorded")
    idle = {row["model"]: row for row in judged["comparisons"] if row["level"] == 0}
    bnet = idle["bnet_c32"]
    assert bnet["measured_energy_j"] == pytest.approx(energy_j(record), rel=1e-6)
    assert bnet["energy_error"] == pytest.approx(bnet["predicted_energy_j"] / bnet["measured_energy_j"] - 1)
    [summary] = [row for row in judged["summaries"] if row["group"] == "all models" and row["level"] == 0]
    assert (summary["energy"]["count"], summary["energy"]["mape"] < 0.05) == (len(idle) - 1, True)  # all but the doubtful one


def test_no_power_is_above_the_limit_or_far_above_what_was_measured(workspace: Workspace) -> None:
    """A run that would draw twice the limit draws the limit. It may take longer, and then more energy."""
    path = target_files.ENERGY.path(workspace.predictors(TARGET))
    learned = target_files.ENERGY.needed(path.parent)
    most = max(model.power_w for model in learned.models)

    def energy_with(run_w: float, **changes: float) -> EnergyPrediction:
        """If runs take this much power, beside the idle one, and with other changes of what was learned."""
        try:
            files.write_json(path, learned.model_copy(update={"coefficients": {"run_s": run_w}, **changes}))
            return Predictor(workspace, TARGET).energy("anet_c16.onnx")
        finally:
            files.write_json(path, learned)

    unlimited, limited = energy_with(10 * most), energy_with(2 * most - IDLE_W, limit_w=most)
    assert (unlimited.rough_estimate, limited.rough_estimate) == (True, True)
    assert f"took more than {most:.0f} W" in unlimited.warnings[-1]
    assert unlimited.power_interval_w[0] < 1.05 * most  # what is plausible is in the range
    assert (limited.mean_power_w, limited.power_interval_w[1]) == pytest.approx((most, most))
    assert limited.interval_j[1] >= 1.99 * limited.energy_j
    assert f"would draw {2 * most:.0f} W, and the device's power limit is {most:.0f} W" in limited.warnings[-1]


def test_energy_next_to_other_work_is_refused(workspace: Workspace, tmp_path: Path) -> None:
    files.write_json(tmp_path / "busy.json", {"DCGM_FI_DEV_CPU_UTIL_TOTAL": 0.5})
    done = run_script("inference/predict_model_latency.py", "--workspace", workspace.root, "--target", TARGET, "--model",
                      "anet_c16.onnx", "--metrics", tmp_path / "busy.json", "--energy")
    assert "--energy is of a device that does nothing else" in done.stderr
