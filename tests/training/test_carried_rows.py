"""Kernels of another card in a training set, and in the correction of its data sheet: those that were measured on an H100."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command import run_script
from conftest import Once, small_model, unpacked

from hase.inference.library.predictor import Predictor
from hase.learned.data_sheet.ratios import correction_path, read_correction
from hase.records.dataset_files import header_path, kernel_table_path, read_header, read_kernels, write_kernels
from hase.training.fits import data_sheets
from hase.training.fits.data_sheets import card, with_carried
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, Workspace

pytestmark = pytest.mark.slow
H100, H200 = "nvidia-h100-80gb-hbm3-cuda-ort1.31-all", "nvidia-h200-cuda-ort1.31-all"
TABLES = ROOT / "recipes" / "gpus" / "tables.csv.xz"


@pytest.fixture(scope="module")
def h100(once: Once, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A sixth of the kernels of an H100's dataset that H200's predictors learn from."""
    whole = unpacked(once, "carried", "carried-nvidia-h100.tar.xz").dataset(H100)
    workspace = Workspace(tmp_path_factory.mktemp("h100"))
    table = pd.read_csv(kernel_table_path(whole), low_memory=False)
    copy_dataset(whole, workspace.dataset(H100), table[table["Kernel_ID"].isin(sorted(set(table["Kernel_ID"]))[::6])])
    return workspace


def copy_dataset(whole: Path, folder: Path, table: pd.DataFrame, **target: str) -> None:
    """Some rows of a dataset, and another target."""
    header, chosen = read_header(whole), set(table["Kernel_ID"])
    files.write_json(header_path(folder), header.model_copy(update={"target": header.target.model_copy(update=target)}))
    write_kernels(folder, (entry.model_dump_json() for entry in read_kernels(whole, chosen)))
    files.write_text(kernel_table_path(folder), table.to_csv(index=False))


def as_own(h100: Workspace, own: Workspace, without: str) -> None:
    """A dataset as if an H200 had measured the kernels of an H100, but for those of one operator."""
    table = pd.read_csv(kernel_table_path(h100.dataset(H100)), low_memory=False)
    copy_dataset(h100.dataset(H100), own.dataset(H200), table[table["OpType"] != without], device_name="NVIDIA H200")


def test_forms_that_a_card_lacks_are_carried_over(h100: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sheets, "PAIRS", 200)  # fewer kernels that both cards measured
    tables, measured_twice = tmp_path / "tables.csv", pd.read_csv(TABLES, keep_default_na=False)
    measured_twice = measured_twice[measured_twice["table"] == data_sheets.OWN]
    measured_twice[measured_twice["moved_bytes"].rank(method="dense") % 6 == 0].to_csv(tables, index=False)
    as_own(h100, Workspace(tmp_path), "MatMulInteger")
    rows, there = read_training_set(Workspace(tmp_path), H200), read_training_set(h100, H100)
    learned = with_carried(rows, h100, tables)
    further = np.arange(len(learned.rows)) >= len(rows)
    assert set(learned.rows.types[further].tolist()) == {"MatMulInteger"} == {
        kernel.op_type for kernel in learned.kernels.values()}
    assert learned.about.card == "NVIDIA H100 80GB HBM3"
    assert learned.about.kernels == further.sum() == (there.types == "MatMulInteger").sum() > 100
    assert np.array_equal(learned.rows.times_ms["gpu"][~further], rows.times_ms["gpu"])
    measured = dict(zip(there.ids.tolist(), there.times_ms["gpu"].tolist(), strict=True))
    ratios = learned.rows.times_ms["gpu"][further] / [measured[name] for name in learned.rows.ids[further].tolist()]
    assert 0.85 < np.median(ratios) < 1.02  # an H200 has the same units, and more bandwidth
    errors = learned.rows.carried_errors
    assert not errors[~further].any()
    assert 0.02 < np.abs(errors[further]).mean() < 0.12
    assert (learned.rows.load[further] == list(rows.idle_load.values())).all()
    assert len(learned.rows.rows(further)) == further.sum()
    with pytest.raises(UserError, match="has 0 datasets of other cards"):
        with_carried(rows, Workspace(tmp_path), tables)


def test_measured_kernels_correct_a_data_sheet(h100: Workspace) -> None:
    done = run_script("training/correct_data_sheet.py", "--workspace", h100.root, "--target", H100, "--most", "80", "--json")
    alone, corrected = json.loads(done.stdout)
    assert alone["kernels"] == corrected["kernels"] == 80
    assert corrected["mean_error_%"] < alone["mean_error_%"]
    correction = read_correction(h100, card("h100"))
    assert correction is not None
    assert (correction.target, len(correction.measured_ms)) == (H100, 80)
    assert correction.low < 1 < correction.high
    target, model = "h100-from-data-sheet", small_model(64, 224, 32)
    with_it, without = (Predictor(workspace, target).predict(model, host_pace=1.0) for workspace in (h100, Workspace()))
    assert any("corrected by 80 kernels that were measured on NVIDIA H100" in warning for warning in with_it.warnings)
    assert with_it.latency_ms == pytest.approx(without.latency_ms, rel=0.2)
    assert with_it.latency_ms != without.latency_ms
    files.write_json(correction_path(h100, card("h100")), correction.model_copy(update={"pulls": correction.pulls[1:]}))
    with pytest.raises(UserError, match="the sizes of known, pulls, means and spreads differ"):
        read_correction(h100, card("h100"))


def test_what_can_not_be_corrected_is_told(h100: Workspace) -> None:
    for gpu, message in (("rtx-9999", "rtx-9999: no such card is known; give its data sheet with --gpu FILE.yaml"),
                         ("h200", "NVIDIA H200: was measured itself")):
        done = run_script("training/correct_data_sheet.py", "--workspace", h100.root, "--target", H100, "--gpu", gpu)
        assert (done.returncode, message in done.stderr) == (1, True)
