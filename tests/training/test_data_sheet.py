"""Times carried over from one card to another: bounds, ratios, and what is learned from pairs of cards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hase.learned.data_sheet.ratios import BASE, MOST_REACHED, CardRatios, SheetRange, read_sheet
from hase.learned.data_sheet.work import (
    DTYPES,
    KINDS,
    REACHED_PEAK,
    Work,
    bounds_of,
    peaks_flop_s,
    ratio_of_bounds,
)
from hase.records.devices import GpuDataSheet, gpu_named
from hase.training.fits.data_sheets import COLUMNS, adjust, learn, most_useful, read_tables, write_sheet
from hase.utils.errors import UserError


def card(name: str) -> GpuDataSheet:
    gpu = gpu_named(name)
    assert gpu is not None
    return gpu


def work(kind: str, dtype: str, flops: float, moved_bytes: float, outputs: float) -> Work:
    return Work(np.array([flops]), np.array([moved_bytes]), np.array([outputs]), np.array([KINDS.index(kind)]),
                np.array([DTYPES.index(dtype)]), np.ones(1))


def ratio(of: Work, base: str, there: str, times_bound: float = 1.0) -> float:
    """How many times as long a kernel takes on a card, that takes so many times its longest bound on the base card."""
    here, bounds = bounds_of(of, card(base)), bounds_of(of, card(there))
    return float(ratio_of_bounds(of, times_bound * here.longest_s, here, bounds, card(base), card(there))[0])


def test_a_large_product_goes_with_the_peak_and_a_large_copy_with_the_bandwidth() -> None:
    product = work("product", "bfloat16", 2 * 8192.0**3, 3 * 2 * 8192.0**2, 8192.0**2)
    copy = work("movement", "float16", 0.0, 4e9, 1e9)
    assert ratio(product, "h200", "a100") == pytest.approx(989 / 312, rel=0.02)
    assert ratio(copy, "h200", "h100") == pytest.approx(4800 / 3350, rel=0.08)  # the way through the cache is the same
    assert ratio(copy, "h200", "h200") == ratio(product, "h200", "h200") == 1.0


def test_caches_clocks_and_peaks_bound_a_kernel() -> None:
    small = work("elementwise", "float32", 1e6, 8e6, 1e6)  # what fits into the second cache does not wait for memory
    assert bounds_of(small, card("l40s")).memory_s[0] < 8e6 / 864e9  # 96 MB; less than its memory alone would take
    assert bounds_of(small, card("t4")).memory_s[0] > 8e6 / 320e9  # 4 MB
    tiny = work("elementwise", "float32", 100.0, 800.0, 100.0)  # the shortest kernel goes with the clock
    assert ratio(tiny, "h200", "a100") == pytest.approx(1980 / 1410, rel=0.05)
    product = work("product", "float32", 1.0, 1.0, 1.0)  # uses TF32 only where there is any
    assert [peaks_flop_s(product, card(name))[0] for name in ("h200", "t4")] == pytest.approx([494.7e12, 8.1e12])
    plain = work("product", "plain float32", 1.0, 1.0, 1.0)
    assert peaks_flop_s(plain, card("h200"))[0] == pytest.approx(66.9e12)


def made_up_tables(folder: Path, efficiency: dict[str, float]) -> Path:
    """Large products, each of which takes a share of the card's peak."""
    rows = [("products", "product", "bfloat16", "MatMul", f"{size}x{depth}", 2.0 * size * size * depth,
             2.0 * (2 * size * depth + size * size), float(size * size), 1.0, "", name,
             1e3 * 2.0 * size * size * depth / (card(name).peak_tflop_s("bfloat16") * 1e12 * share))
            for size in range(4096, 12288, 512) for depth in (4096, 6144, 8192) for name, share in efficiency.items()]
    path = folder / "tables.csv"
    pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(path, index=False)
    return path


def test_the_booster_learns_how_far_a_card_stays_behind_its_sheet(tmp_path: Path) -> None:
    share = {"h200": REACHED_PEAK, "h100": REACHED_PEAK, "a100": 0.9, "l40s": 0.5}
    table, = read_tables(made_up_tables(tmp_path, share))
    ratios = learn([table], threads=1)
    for name in ("a100", "l40s"):
        carried = ratios.times_ms(table.work, table.ms[BASE], card(BASE), card(name), table.name)
        assert np.abs(carried / table.ms[name] - 1).mean() < 0.02, name
    assert ratios.times_ms(table.work, table.ms[BASE], card(BASE), card(BASE)) is table.ms[BASE]
    write_sheet(tmp_path, ratios, "base", ("h200", "a100"), ("h200",), SheetRange(low=0.9, high=1.1),
                SheetRange(low=0.8, high=1.3))
    model, again = read_sheet(tmp_path)
    assert (model.cards, model.alike.high, model.unlike.low) == (("h200", "a100"), 1.1, 0.8)
    here = again.times_ms(table.work, table.ms[BASE], card(BASE), card("a100"), table.name)
    assert here == pytest.approx(ratios.times_ms(table.work, table.ms[BASE], card(BASE), card("a100"), table.name), rel=1e-3)
    (tmp_path / "booster.npz").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"booster\.npz: is not the one that data_sheet\.json describes"):
        read_sheet(tmp_path)


def test_some_measured_kernels_correct_the_card_and_only_it(tmp_path: Path) -> None:
    table, = read_tables(made_up_tables(tmp_path, {"h200": REACHED_PEAK, "h100": REACHED_PEAK, "l40s": 0.5}))
    ratios = learn([table], without=("l40s",), threads=1)  # so that it takes the L40S to be as good as the others

    def error(of: CardRatios, chosen: np.ndarray) -> float:
        times_ms = of.times_ms(table.work.rows(chosen), table.ms[BASE][chosen], card(BASE), card("l40s"), table.name)
        return float(np.abs(times_ms / table.ms["l40s"][chosen] - 1).mean())

    few, others = np.arange(0, 48, 5), np.arange(1, 48, 5)
    adjusted = adjust(ratios, table.work.rows(few), table.ms[BASE][few], table.ms["l40s"][few], card(BASE), card("l40s"),
                      table.name)
    assert error(ratios, others) > 0.2
    assert error(adjusted, others) < 0.03
    before, after = (of.times_ms(table.work, table.ms[BASE], card(BASE), card("h100"), table.name) for of in (ratios, adjusted))
    assert np.array_equal(before, after)


def test_wrong_tables_are_refused_and_times_that_can_not_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no table of kernels on several cards"):
        read_tables(tmp_path / "none.csv")
    (tmp_path / "t.csv").write_text("table,gpu\na,h200\n", encoding="utf-8")
    with pytest.raises(UserError, match="lacks the columns kind, dtype"):
        read_tables(tmp_path / "t.csv")
    table, = read_tables(made_up_tables(tmp_path, {"h200": 0.7, "b200": 3.8}))  # almost four times its peak
    assert np.isfinite(table.ms["h200"]).all()
    assert np.isnan(table.ms["b200"]).all()


def test_the_kernels_to_measure_first_are_like_those_that_are_wanted() -> None:
    sizes = np.array([1e5, 1.01e5, 1e8, 1.01e8, 1e11])
    of = Work(sizes, sizes, sizes, np.full(5, KINDS.index("product")), np.zeros(5, dtype=int), np.ones(5))
    order = most_useful(of, sizes * 1e-8, of.rows(np.array([2, 2, 2, 0])), sizes[[2, 2, 2, 0]] * 1e-8, card(BASE), 3)
    assert order[0] in (2, 3)  # three of four are like these
    assert order[1] in (0, 1)
    assert len(set(order)) == 3


def test_tensor_cores_that_may_do_half_reach_more_of_their_peak() -> None:
    """A GeForce card has the chip of a workstation's, whose tensor cores may do twice as much and lack power."""
    learned, large = read_sheet()[1], work("product", "float16", 2 * 8192.0**3, 3 * 2 * 8192.0**2, 8192.0**2)
    base_ms = 1e3 * bounds_of(large, card("h200")).longest_s
    assert (card("rtx-4090").tensor_share, card("rtx-6000-ada").tensor_share, card("p4").tensor_share) == (0.5, 1.0, 1.0)
    reached = {name: float(large.flops[0] / learned.times_ms(large, base_ms, card("h200"), card(name))[0] / 1e9
                           / card(name).peak_tflop_s("float16")) for name in ("rtx-6000-ada", "rtx-4090")}
    assert reached["rtx-6000-ada"] < 0.7 < reached["rtx-4090"] <= MOST_REACHED
    copy = work("movement", "float16", 0.0, 4e9, 1e9)
    there = learned.times_ms(copy, 1e3 * bounds_of(copy, card("h200")).longest_s, card("h200"), card("rtx-4090"))
    assert there[0] == pytest.approx(1e3 * bounds_of(copy, card("rtx-4090")).longest_s[0], rel=0.1)
