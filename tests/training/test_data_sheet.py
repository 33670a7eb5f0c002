"""Times carried over from one card to another: bounds, ratios, what is learned from pairs of cards, and rows in a training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command import run_script
from conftest import Once, small_model, unpacked

from hase.inference.library.predictor import Predictor
from hase.learned.data_sheet.ratios import BASE, CardRatios, SheetRange, correction_path, read_correction, read_sheet
from hase.learned.data_sheet.work import DTYPES, KINDS, REACHED_PEAK, Work, bounds_of, peaks_flop_s, ratio_of_bounds
from hase.records.dataset_files import header_path, kernel_table_path, read_header, read_kernels, write_kernels
from hase.training.fits import data_sheets
from hase.training.fits.data_sheets import (
    COLUMNS,
    adjust_ratios,
    card,
    fit_card_ratios,
    read_card_tables,
    with_carried,
    write_sheet,
)
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, Workspace


def work(kind: str, dtype: str, flops: float, moved_bytes: float, outputs: float) -> Work:
    return Work(np.array([flops]), np.array([moved_bytes]), np.array([outputs]), np.array([KINDS.index(kind)]),
                np.array([DTYPES.index(dtype)]), np.ones(1))


def ratio(of: Work, base: str, there: str) -> float:
    """How many times as long a kernel takes on a card, that takes its longest bound on the base card."""
    here, bounds = bounds_of(of, card(base)), bounds_of(of, card(there))
    return float(ratio_of_bounds(of, here.longest_s, here, bounds, card(base), card(there))[0])


def test_peaks_bandwidth_caches_and_clocks_bound_a_kernel() -> None:
    product = work("product", "bfloat16", 2 * 8192.0**3, 3 * 2 * 8192.0**2, 8192.0**2)
    copy = work("movement", "float16", 0.0, 4e9, 1e9)
    assert ratio(product, "h200", "a100") == pytest.approx(989 / 312, rel=0.02)
    assert ratio(copy, "h200", "h100") == pytest.approx(4800 / 3350, rel=0.08)  # the way through the cache is the same
    small = work("elementwise", "float32", 1e6, 8e6, 1e6)  # what fits into the second cache does not wait for memory
    assert bounds_of(small, card("l40s")).memory_s[0] < 8e6 / 864e9  # 96 MB; less than its memory alone would take
    assert bounds_of(small, card("t4")).memory_s[0] > 8e6 / 320e9  # 4 MB
    tiny = work("elementwise", "float32", 100.0, 800.0, 100.0)  # the shortest kernel goes with the clock
    assert ratio(tiny, "h200", "a100") == pytest.approx(1980 / 1410, rel=0.05)
    peaks = [peaks_flop_s(work("product", dtype, 1.0, 1.0, 1.0), card(name))[0] for dtype, name in (
        ("float32", "h200"), ("float32", "t4"), ("plain float32", "h200"))]  # uses TF32 only where there is any
    assert peaks == pytest.approx([494.7e12, 8.1e12, 66.9e12])


def made_up_tables(folder: Path, efficiency: dict[str, float]) -> Path:
    """Large products, each of which takes a share of the card's peak."""
    rows = [("products", "product", "bfloat16", "MatMul", f"{size}x{depth}", 2.0 * size * size * depth,
             2.0 * (2 * size * depth + size * size), float(size * size), 1.0, "", name,
             1e3 * 2.0 * size * size * depth / (card(name).peak_tflop_s("bfloat16") * 1e12 * share))
            for size in range(4096, 12288, 512) for depth in (4096, 6144, 8192) for name, share in efficiency.items()]
    path = folder / "tables.csv"
    pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(path, index=False)
    return path


@pytest.mark.slow
def test_the_booster_learns_how_far_a_card_stays_behind_its_sheet(tmp_path: Path) -> None:
    share = {"h200": REACHED_PEAK, "h100": REACHED_PEAK, "a100": 0.9, "l40s": 0.5}
    table, = read_card_tables(made_up_tables(tmp_path, share))
    ratios = fit_card_ratios([table], threads=1)
    for name in ("a100", "l40s"):
        carried = ratios.times_ms(table.work, table.ms[BASE], card(BASE), card(name), table.name)
        assert np.abs(carried / table.ms[name] - 1).mean() < 0.02, name
    write_sheet(tmp_path, ratios, "base", ("h200", "a100"), ("h200",), SheetRange(low=0.9, high=1.1),
                SheetRange(low=0.8, high=1.3))
    model, again = read_sheet(tmp_path)
    assert (model.cards, model.alike.high, model.unlike.low) == (("h200", "a100"), 1.1, 0.8)
    here = again.times_ms(table.work, table.ms[BASE], card(BASE), card("a100"), table.name)
    assert here == pytest.approx(ratios.times_ms(table.work, table.ms[BASE], card(BASE), card("a100"), table.name), rel=1e-3)
    (tmp_path / "booster.npz").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"booster\.npz: is not the one that data_sheet\.json describes"):
        read_sheet(tmp_path)


@pytest.mark.slow
def test_some_measured_kernels_correct_the_card_and_only_it(tmp_path: Path) -> None:
    table, = read_card_tables(made_up_tables(tmp_path, {"h200": REACHED_PEAK, "h100": REACHED_PEAK, "l40s": 0.5}))
    ratios = fit_card_ratios([table], without=("l40s",), threads=1)  # so that it takes the L40S to be as good as the others

    def error(of: CardRatios, chosen: np.ndarray) -> float:
        times_ms = of.times_ms(table.work.rows(chosen), table.ms[BASE][chosen], card(BASE), card("l40s"), table.name)
        return float(np.abs(times_ms / table.ms["l40s"][chosen] - 1).mean())

    few, others = np.arange(0, 48, 5), np.arange(1, 48, 5)
    adjusted = adjust_ratios(ratios, table.work.rows(few), table.ms[BASE][few], table.ms["l40s"][few], card(BASE), card("l40s"),
                      table.name)
    assert error(ratios, others) > 0.2
    assert error(adjusted, others) < 0.03
    before, after = (of.times_ms(table.work, table.ms[BASE], card(BASE), card("h100"), table.name) for of in (ratios, adjusted))
    assert np.array_equal(before, after)


def test_wrong_tables_are_refused_and_times_that_can_not_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no table of kernels on several cards"):
        read_card_tables(tmp_path / "none.csv")
    (tmp_path / "t.csv").write_text("table,gpu\na,h200\n", encoding="utf-8")
    with pytest.raises(UserError, match="lacks the columns kind, dtype"):
        read_card_tables(tmp_path / "t.csv")
    table, = read_card_tables(made_up_tables(tmp_path, {"h200": 0.7, "b200": 3.8}))  # almost four times its peak
    assert np.isfinite(table.ms["h200"]).all()
    assert np.isnan(table.ms["b200"]).all()


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


@pytest.mark.slow
def test_forms_that_a_card_lacks_are_carried_over(h100: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here as if an H200 had measured the kernels of an H100, but for those of one operator."""
    monkeypatch.setattr(data_sheets, "PAIRS", 200)  # fewer kernels that both cards measured
    tables, measured_twice = tmp_path / "tables.csv", pd.read_csv(TABLES, keep_default_na=False)
    measured_twice = measured_twice[measured_twice["table"] == data_sheets.OWN]
    measured_twice[measured_twice["moved_bytes"].rank(method="dense") % 6 == 0].to_csv(tables, index=False)
    table = pd.read_csv(kernel_table_path(h100.dataset(H100)), low_memory=False)
    copy_dataset(h100.dataset(H100), Workspace(tmp_path).dataset(H200), table[table["OpType"] != "MatMulInteger"],
                 device_name="NVIDIA H200")
    rows, there = read_training_set(Workspace(tmp_path), H200), read_training_set(h100, H100)
    learned = with_carried(rows, h100, tables)
    further = np.arange(len(learned.rows)) >= len(rows)
    assert set(learned.rows.types[further].tolist()) == {"MatMulInteger"}
    assert learned.about.kernels == further.sum() == (there.types == "MatMulInteger").sum() > 100
    assert np.array_equal(learned.rows.times_ms["gpu"][~further], rows.times_ms["gpu"])
    measured = dict(zip(there.ids.tolist(), there.times_ms["gpu"].tolist(), strict=True))
    ratios = learned.rows.times_ms["gpu"][further] / [measured[name] for name in learned.rows.ids[further].tolist()]
    assert 0.85 < np.median(ratios) < 1.02  # an H200 has the same units, and more bandwidth
    errors = learned.rows.carried_errors
    assert not errors[~further].any()
    assert 0.02 < np.abs(errors[further]).mean() < 0.12
    with pytest.raises(UserError, match="has 0 datasets of other cards"):
        with_carried(rows, Workspace(tmp_path), tables)


@pytest.mark.slow
def test_measured_kernels_correct_a_data_sheet(h100: Workspace) -> None:
    done = run_script("training/correct_data_sheet.py", "--workspace", h100.root, "--target", H100, "--most", "80", "--json")
    alone, corrected = json.loads(done.stdout)
    assert alone["kernels"] == corrected["kernels"] == 80
    assert corrected["mean_error_%"] < alone["mean_error_%"]
    correction = read_correction(h100, card("h100"))
    assert correction is not None
    assert (correction.target, len(correction.measured_ms), correction.low < 1 < correction.high) == (H100, 80, True)
    target, model = "h100-from-data-sheet", small_model(64, 224, 32)
    with_it, without = (Predictor(workspace, target).predict(model, host_pace=1.0) for workspace in (h100, Workspace()))
    assert any("corrected by 80 kernels that were measured on NVIDIA H100" in warning for warning in with_it.warnings)
    assert 0 < abs(with_it.latency_ms / without.latency_ms - 1) < 0.2
    files.write_json(correction_path(h100, card("h100")), correction.model_copy(update={"pulls": correction.pulls[1:]}))
    with pytest.raises(UserError, match="the sizes of known, pulls, means and spreads differ"):
        read_correction(h100, card("h100"))
    for gpu, message in (("rtx-9999", "rtx-9999: no such card is known; give its data sheet with --gpu FILE.yaml"),
                         ("h200", "NVIDIA H200: was measured itself")):
        done = run_script("training/correct_data_sheet.py", "--workspace", h100.root, "--target", H100, "--gpu", gpu)
        assert (done.returncode, message in done.stderr) == (1, True)
