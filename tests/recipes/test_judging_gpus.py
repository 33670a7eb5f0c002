"""Judging data sheets: kernels from their shapes alone, and published rates of vision models."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hase.recipes.gpus.by_shape import MOST_OF_PEAK, SHORTEST_S, Measured, Shaped, learn_by_shape
from hase.recipes.gpus.judge_vision import CARDS, VisionPrediction, drawn, each_in_time, judged, read_rates

from hase.learned.data_sheet.work import KINDS, Work, peaks_flop_s
from hase.training.data_sheet.tables import card


def products(count: int, seed: int) -> Shaped:
    sizes = np.column_stack([np.ones(count), 2.0 ** np.random.default_rng(seed).integers(10, 14, (count, 3))])
    flops = 2 * sizes.prod(axis=1)
    moved_bytes = 4 * (sizes[:, 1] * sizes[:, 3] + sizes[:, 3] * sizes[:, 2] + sizes[:, 1] * sizes[:, 2])
    work = Work(flops, moved_bytes, sizes[:, 1] * sizes[:, 2], np.full(count, KINDS.index("product")), np.full(count, 3),
                np.ones(count))
    return Shaped(work, np.zeros(count, dtype=int), sizes)


def test_a_faster_card_than_any_that_was_learned_from() -> None:
    """Each product takes 1.4 times its bound by the clock, and what any kernel takes."""
    def on(name: str, kernels: Shaped) -> np.ndarray:
        return 1e3 * (1.4 * kernels.work.flops / (MOST_OF_PEAK * peaks_flop_s(kernels.work, card(name))) + SHORTEST_S)

    learned = learn_by_shape([Measured(kernels, card(name), on(name, kernels)) for name, kernels in (
        (name, products(400, seed)) for seed, name in enumerate(("v100-pcie", "a100", "a100-40gb")))], threads=1)
    kernels = products(200, 9)
    errors = np.abs(learned.times_ms(kernels, card("h100")) / on("h100", kernels) - 1)
    assert errors.mean() < 0.1


@pytest.fixture
def rates(tmp_path: Path) -> pd.DataFrame:
    """Of 30 models, twice as fast on the second card; one is too large, and one has too large images."""
    rows = [{"gpu": gpu, "model": f"m{number}", "infer_img_size": 448 if number == 3 else 224,
             "infer_samples_per_sec": 100.0 * (number + 1) * (1 + place), "infer_batch_size": 256.0,
             "param_count": 500.0 if number == 5 else 10.0} for place, gpu in enumerate(CARDS.values()) for number in range(30)]
    pd.DataFrame(rows).to_csv(tmp_path / "rates.csv", index=False)
    return read_rates(tmp_path / "rates.csv")


def test_more_models_begin_with_the_same_ones(rates: pd.DataFrame) -> None:
    few, many = drawn(rates, 10), drawn(rates, 100)
    assert many[:10] == few
    assert {f"m{number}" for number in range(30)} - {each.model for each in many} == {"m3", "m5"}
    assert few[0].batches == dict.fromkeys(CARDS, 256)


def test_a_common_factor_is_no_error(rates: pd.DataFrame) -> None:
    name, _ = CARDS
    predictions = [VisionPrediction(model=each.model, image=each.image, card=name, batch=256,
                                    latency_ms=256 * 3.0 * float(rates["ms", name][each.model, each.image]))
                   for each in drawn(rates, 20)]
    rows, summary = judged(rates, predictions, name)
    assert (summary["models"], summary["rank_correlation"], summary["factor"]) == (20, "1.0000", f"{1 / 3:.3f}")
    assert summary["mean_%"] == pytest.approx(0.0, abs=1e-9)
    predictions[0] = predictions[0].model_copy(update={"latency_ms": 2 * predictions[0].latency_ms})
    rows, summary = judged(rates, predictions, name)
    assert rows.iloc[0]["model"] == predictions[0].model
    assert summary["mean_%"] == pytest.approx(100 / 20)


def slow_at_two(number: int) -> int:
    if number == 2:
        time.sleep(30)
    return 10 * number


def nothing() -> None:
    """Prepares nothing."""


@pytest.mark.slow
def test_what_takes_too_long_is_named_and_the_others_go_on() -> None:
    assert list(each_in_time(slow_at_two, [1, 2, 3], 2.0, nothing)) == [(1, 10), (2, "took more than 2 s"), (3, 30)]
