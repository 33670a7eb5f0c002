"""Plots as files: an SVG that needs no plotting library, and a PNG or PDF by matplotlib."""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hase.utils import cli
from hase.utils.pages.charts import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, chart_svg, right_margin, write_plot
from hase.utils.pages.page import Chart, ChartAxis, ChartSeries, Limit, chart_scales

SVG = "{http://www.w3.org/2000/svg}"


def chart(log: bool = False) -> Chart:
    """A line with intervals and words beside its points, and a limit."""
    line = ChartSeries("a rather long name", [1, 2, 4], [3.0, 4, 9], [2.5, 3, 7], [4.0, 6, 12], marked=[2],
                       beside=["one", "two", "four"])
    across, up = ChartAxis("batch", log=True), ChartAxis("ms", log=log, zero=not log)
    return Chart("Latency", across, up, [line], [Limit("5 ms", 5.0)], [1, 2, 4])


@pytest.mark.parametrize("log", [False, True])
def test_points_and_intervals_lie_where_their_numbers_are(log: bool) -> None:
    one = chart(log=log)
    element = ET.fromstring(chart_svg(one))
    (across, up), right = chart_scales(one), WIDTH - right_margin(one)

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + across.position(x) * (right - LEFT), HEIGHT - BOTTOM - up.position(y) * (HEIGHT - BOTTOM - TOP)

    circles = [(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in element.iter(f"{SVG}circle")]
    assert circles == [pytest.approx(at(x, y), abs=0.06) for x, y in ((1, 3), (2, 4))]  # the third one is a cross
    (band,) = element.iter(f"{SVG}polygon")
    corners = [tuple(map(float, corner.split(","))) for corner in band.attrib["points"].split()]
    expected = [at(*corner) for corner in ((1, 2.5), (2, 3), (4, 7), (4, 12), (2, 6), (1, 4))]
    assert corners == [pytest.approx(corner, abs=0.06) for corner in expected]
    assert {text.text for text in element.iter(f"{SVG}text")} >= {"Latency", "batch", "ms", "1", "2", "4"}
    places = {text.text: (float(text.attrib["x"]), float(text.attrib["y"])) for text in element.iter(f"{SVG}text")}
    assert places["5 ms"] == pytest.approx((right + 6, at(4, 5)[1] + 4), abs=0.1)  # beside the line, where no curve is
    assert places["two"] == pytest.approx((at(2, 4)[0] + 6, at(2, 4)[1] - 2), abs=0.1)


@pytest.mark.slow
def test_matplotlib_draws_the_others(tmp_path: Path) -> None:
    for suffix, begin in ((".png", b"\x89PNG"), (".pdf", b"%PDF")):
        write_plot([chart(), chart(log=True)], path := tmp_path / f"plot{suffix}", "a model")
        assert path.read_bytes().startswith(begin)


def test_without_matplotlib_an_svg_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.plot_file(str(tmp_path / "plot.png")) == tmp_path / "plot.png"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(argparse.ArgumentTypeError, match=r"plot\.png needs matplotlib \(pip install .*plot\.svg needs nothing"):
        cli.plot_file(str(tmp_path / "plot.png"))
    path = cli.plot_file(str(tmp_path / "plot.svg"))
    write_plot([chart(), chart(log=True)], path, "resnet <18>\non a target")
    element = ET.fromstring(path.read_text(encoding="utf-8"))  # a text that is no XML is an error
    assert {"resnet <18>", "on a target"} <= {text.text for text in element.iter(f"{SVG}text")}
