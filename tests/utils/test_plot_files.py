"""Plots as files: an SVG that needs no plotting library, and a PNG or PDF by matplotlib."""

from __future__ import annotations

import argparse
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hase.utils import cli
from hase.utils.pages.charts import BOTTOM, HEIGHT, LEFT, NAMES, RIGHT, TOP, WIDTH, chart_svg, write_plot
from hase.utils.pages.page import Bar, Bars, Chart, ChartAxis, ChartSeries, Limit, scale_of, scales_of

SVG = "{http://www.w3.org/2000/svg}"


def chart(names: int = 1, log: bool = False) -> Chart:
    """Lines with intervals, and a limit."""
    series = [ChartSeries(f"a rather long name {place}", [1, 2, 4], [3.0 + place, 4, 9], [2.5, 3, 7], [4.0, 6, 12], marked=[2])
              for place in range(names)]
    across, up = ChartAxis("batch", log=True), ChartAxis("ms", log=log, zero=not log)
    return Chart("Latency", across, up, series, [Limit("5 ms", 5.0)], [1, 2, 4])


@pytest.mark.parametrize("log", [False, True])
def test_points_and_intervals_lie_where_their_numbers_are(log: bool) -> None:
    one = chart(log=log)
    element = ET.fromstring(chart_svg(one))
    across, up = scales_of(one)

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + across.share(x) * (WIDTH - RIGHT - LEFT), HEIGHT - BOTTOM - up.share(y) * (HEIGHT - BOTTOM - TOP)

    circles = [(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in element.iter(f"{SVG}circle")]
    assert circles == [pytest.approx(at(x, y), abs=0.06) for x, y in ((1, 3), (2, 4))]  # the third one is a cross
    (band,) = element.iter(f"{SVG}polygon")
    corners = [tuple(map(float, corner.split(","))) for corner in band.attrib["points"].split()]
    expected = [at(*corner) for corner in ((1, 2.5), (2, 3), (4, 7), (4, 12), (2, 6), (1, 4))]
    assert corners == [pytest.approx(corner, abs=0.06) for corner in expected]
    assert {text.text for text in element.iter(f"{SVG}text")} >= {"Latency", "batch", "ms", "5 ms", "1", "2", "4"}


def test_several_charts_stand_below_each_other(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    write_plot([chart(), chart(log=True)], path, "resnet <18>\non a target")
    element = ET.fromstring(path.read_text(encoding="utf-8"))  # a text that is no XML is an error
    assert len(list(element.iter(f"{SVG}polygon"))) == 2
    moves = [float(re.findall(r"[\d.]+", group.attrib["transform"])[1]) for group in element.iter(f"{SVG}g")]
    assert moves[1] - moves[0] == HEIGHT
    assert float(element.attrib["viewBox"].split()[3]) == moves[1] + HEIGHT
    assert {"resnet <18>", "on a target"} <= {text.text for text in element.iter(f"{SVG}text")}


def test_many_names_take_several_rows_and_cover_nothing() -> None:
    element = ET.fromstring(chart_svg(chart(names=8)))
    names = [(float(text.attrib["x"]), float(text.attrib["y"]), str(text.text)) for text in element.iter(f"{SVG}text")
             if str(text.text).startswith("a rather")]
    assert len(names) == 8
    assert len({y for _, y, _ in names}) > 1
    for x, y, name in names:
        assert x + 7 * len(name) < WIDTH + 46
        assert not [other for other_x, other_y, other in names if other_y == y and x < other_x < x + 6 * len(name)]
    first_gridline = min(float(line.attrib["y1"]) for line in element.iter(f"{SVG}line") if line.attrib["stroke"] == "#e1e4e8")
    assert first_gridline > max(y for _, y, _ in names)


def test_bars_of_negative_numbers_begin_at_zero() -> None:
    bars = Bars("Difference", ChartAxis("ms", zero=True), [Bar("less", -2.0), Bar("more", 3.0, 1.0, 4.0)])
    element = ET.fromstring(chart_svg(bars))
    zero = NAMES + scale_of(bars).share(0.0) * (WIDTH - RIGHT - NAMES)
    less, more = ((float(rect.attrib["x"]), float(rect.attrib["width"])) for rect in element.iter(f"{SVG}rect"))
    assert sum(less) == pytest.approx(zero, abs=0.2)
    assert more[0] == pytest.approx(zero, abs=0.2)
    assert scale_of(bars).high >= 4.0
    below = Bars("Difference", ChartAxis("ms", zero=True), [Bar("less", -2.0), Bar("least", -5.0)])
    assert scale_of(below).high >= 0.0


@pytest.mark.slow
def test_matplotlib_draws_the_others(tmp_path: Path) -> None:
    for suffix, begin in ((".png", b"\x89PNG"), (".pdf", b"%PDF")):
        path = tmp_path / f"plot{suffix}"
        write_plot([chart(3), chart(log=True)], path, "a model")
        assert path.read_bytes().startswith(begin)


def test_without_matplotlib_an_svg_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.plot_file(str(tmp_path / "plot.png")) == tmp_path / "plot.png"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(argparse.ArgumentTypeError, match=r"plot\.png needs matplotlib, which .*plot\.svg needs nothing"):
        cli.plot_file(str(tmp_path / "plot.png"))
    path = cli.plot_file(str(tmp_path / "plot.svg"))
    write_plot([chart()], path, "a model")
    assert ET.fromstring(path.read_text(encoding="utf-8")).tag == f"{SVG}svg"
