"""The evaluation's picture: its ticks, the models it names, and their numbers, which cover nothing."""

from __future__ import annotations

import math
import random
from pathlib import Path

import matplotlib as mpl
import matplotlib.image
import numpy as np
import pytest

from hase.inference.evaluation.report import NAMED, Point, draw, number_points, worst
from hase.utils.pages.page import LEAST_TICKS, log_ticks


def made(count: int, low_ms: float = 1.0, decades: float = 2.0) -> list[Point]:
    chance = random.Random(1)
    measured = [low_ms * 10 ** chance.uniform(0, decades) for _ in range(count)]
    return [Point(f"model_{number}", time_ms, time_ms * (1 + chance.gauss(0, 0.08)), number % 5 == 0,
                  (0.9 * time_ms, 1.1 * time_ms)) for number, time_ms in enumerate(measured)]


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0.8, 130.0, [1, 3, 10, 30, 100]), (0.05, 2000.0, [0.1, 1, 10, 100, 1000]), (4.0, 60.0, [5, 10, 20, 50]),
    (1.4, 2.6, [1.4, 1.6, 1.8, 2.0, 2.2, 2.4, 2.6])])
def test_ticks_are_few_and_round(low: float, high: float, expected: list[float]) -> None:
    assert log_ticks(low, high) == expected
    assert len(expected) >= LEAST_TICKS


def test_the_worst_come_first() -> None:
    points = [Point(name, 1.0, predicted_ms, False, (0.4, 1.2)) for name, predicted_ms in (("a", 1.1), ("b", 0.5), ("c", 1.0))]
    assert [point.name for point in worst(points, 2)] == ["b", "a"]


@pytest.mark.slow
@pytest.mark.parametrize("points", [made(1), made(10, decades=0.05), made(300)], ids=["1", "close", "300"])
def test_a_picture_of_few_and_many(points: list[Point], tmp_path: Path) -> None:
    draw(points, "a target", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_intervals_are_drawn(tmp_path: Path) -> None:
    """A prediction without an interval and one with a wide one: only the second picture has ink above and below its point."""
    files = [tmp_path / "none.png", tmp_path / "wide.png"]
    for file, between_ms in zip(files, ((1.0, 1.0), (0.5, 2.0)), strict=True):
        draw([Point("a", 1.0, 1.0, False, between_ms), Point("b", 0.1, 0.1, False, (0.1, 0.1)),
              Point("c", 10.0, 10.0, False, (10.0, 10.0))], "a target", file)
    none, wide = (mpl.image.imread(file) for file in files)
    assert none.shape == wide.shape
    down, across = np.nonzero((none != wide).any(axis=2))
    assert across.max() - across.min() < 8
    assert down.max() - down.min() > 50


def test_numbers_cover_no_point_and_no_other_number() -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    points = made(300)
    figure, axes = plt.subplots(figsize=(8, 8))
    axes.set(xscale="log", yscale="log", xlim=(0.5, 200), ylim=(0.5, 200))
    number_points(axes, worst(points), points)
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.texts]
    assert [label.get_text() for label in axes.texts] == [str(number) for number in range(1, NAMED + 1)]
    centres = [((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2) for box in boxes]
    places = [tuple(axes.transData.transform((point.measured_ms, point.predicted_ms))) for point in points]
    plt.close(figure)
    for number, centre in enumerate(centres):
        assert all(math.dist(centre, place) > 8 for place in places + centres[:number])
