"""--html of the commands beside predict_model_latency.py: pages in a real browser, against what --json prints."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import pytest
from chromium import column, opened, plots_of
from command import printed
from conftest import Once, small_model
from decoder_models import TINY, genai_folder

from hase.inference.compare.devices import DeviceComparison
from hase.inference.evaluation.evaluate import evaluate
from hase.inference.evaluation.report import MOST_ROWS, MOST_WARNINGS, evaluation_page
from hase.inference.reporting.comparisons import device_chart
from hase.utils.pages.page import Page
from hase.utils.pages.rendering import MOST_BYTES, page_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as OpenedPage

    from hase.utils.paths import Workspace

pytestmark = pytest.mark.slow

H200 = ("--target", "nvidia-h200")


@pytest.fixture(scope="module")
def folder(once: Once) -> Path:
    """A small model with an open batch, and the folder of a language model."""
    def make(folder: Path) -> None:
        onnx.save(small_model(16, 32, "batch"), folder / "open.onnx")
        genai_folder(folder / "language", replace(TINY, layers=1))

    return once("answer_pages", make)


def answered(script: str, *options: str | Path) -> Any:
    """What --json prints."""
    return json.loads(printed(script, "--json", *options))


def shown(browser: Browser, file: Path) -> OpenedPage:
    """A page, after it was looked at in both themes, narrow and wide: nothing is complained of, and nothing sticks out."""
    assert file.stat().st_size < MOST_BYTES
    for width, theme in ((375, "dark"), (1400, "light")):
        page, complaints = opened(browser, file, width, color_scheme=theme)
        ground = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(ground)
        page.click("#theme")
        assert page.evaluate(ground) != before
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert not complaints
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every((one) => one.scrollWidth <= one.clientWidth)")
    return page


def numbers(page: OpenedPage, table: int, name: str) -> list[float]:
    return [float(cell) for cell in column(page, table, name)]


def series_of(chart: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in chart["series"]}


def near(values: Any) -> Any:
    """Plots have fewer digits."""
    return pytest.approx(values, rel=1e-4)


def test_a_language_model(folder: Path, browser: Browser, tmp_path: Path) -> None:
    """A sweep, and one request."""
    file, asked = tmp_path / "page.html", ("inference/predict_llm.py", "--model", folder / "language", *H200)
    answers = answered(*asked, "--generate", "20", "--sweep", "--batch", "1,16", "--ttft-ms", "1000", "--html", file)
    page, first_tokens_ms = shown(browser, file), [answer["ttft"]["ms"] for answer in answers]
    assert numbers(page, 0, "first token (ms)") == pytest.approx(first_tokens_ms)
    cells = page.locator("figure.grid").first.locator("td").evaluate_all("cells => cells.map(cell => +cell.dataset.value)")
    assert cells == pytest.approx(first_tokens_ms)  # batch by batch, prompt by prompt
    first, *_ = plots_of(page)
    drawn, of_prompt = series_of(first)["prompt 512"], [answer["ttft"] for answer in answers if answer["prompt"] == 512]
    assert (drawn["y"], drawn["high"]) == (near([time["ms"] for time in of_prompt]),
                                           near([time["interval_ms"][1] for time in of_prompt]))
    assert first["limits"] == [{"name": "1000 ms", "y": 1000.0}]
    most = max(answers, key=lambda answer: answer["device_tokens_per_second"])
    assert f"at batch {most['batch']} with prompts of {most['prompt']} tokens" in page.inner_text("h1")

    (answer,) = answered(*asked, "--generate", "300", "--html", file)
    page = shown(browser, file)
    assert f"{answer['ttft']['ms']:.4g} ms, then one every {answer['tpot']['ms']:.4g} ms" in page.inner_text("h1")
    chart, *of_runs = plots_of(page)
    assert [plot["kind"] for plot in of_runs] == ["treemap", "timeline"] * 2
    assert chart["series"][0]["y"] == near([token["ms"] for token in answer["tokens"]])


def test_a_load_curve(folder: Path, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "curve.html"
    curve = answered("inference/load_curve.py", "--model", folder / "open.onnx", *H200, "--dim", "batch=4", "--points", "12",
                     "--slo-ms", "900", "--html", file)
    page = shown(browser, file)
    p95, drawn = [point["p95_ms"] for point in curve["points"]], series_of(plots_of(page)[0])["p95"]
    assert numbers(page, 0, "p95 (ms)") == pytest.approx(p95)
    low, high = curve["interval_ratios"]
    assert (drawn["low"], drawn["high"]) == (near([low * value for value in p95]), near([high * value for value in p95]))
    assert "keeps to 900 ms while other work is busy for up to 100% of the time" in page.inner_text("header")


def test_two_models(folder: Path, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "two.html"
    answer = answered("inference/compare_models.py", folder / "open.onnx", folder / "open.onnx", *H200, "--dim", "batch=1",
                      "--b-dim", "batch=64", "--html", file)
    page = shown(browser, file)
    rows = dict(zip(column(page, 0, "operator"), numbers(page, 0, "B - A (ms)"), strict=True))
    assert rows == pytest.approx({row["operator"]: row["difference_ms"] for row in answer["operators"]}
                                 | {"outside kernels": answer["outside_kernels_ms"]})
    latencies, shift, *_ = plots_of(page)
    a_ms, b_ms = (answer[name]["latency_ms"] for name in "ab")
    assert page.inner_text("h1") == (f"open@batch=64,dynamic takes {b_ms:.4g} ms, {b_ms - a_ms:.4g} ms longer than "
                                     "open@batch=1,dynamic.")
    assert [bar["value"] for bar in latencies["bars"]] == near([answer[name]["latency_ms"] for name in "ab"])
    assert {bar["name"]: bar["value"] for bar in shift["bars"]} == near({name: value for name, value in rows.items() if value})


def test_several_devices(folder: Path, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "devices.html"
    rows = DeviceComparison.model_validate(answered(
        "inference/compare_devices.py", "--model", folder / "open.onnx", "--on", "h200,l4,t4", "--batch", "1,16", "--host-pace",
        "1", "--html", file)).rows()
    page = shown(browser, file)
    assert column(page, 0, "device") == [row["device"] for row in rows]
    assert numbers(page, 0, "latency (ms)") == pytest.approx([row["latency (ms)"] for row in rows])
    drawn = series_of(plots_of(page)[0])
    assert {name: tuple(one["x"]) for name, one in drawn.items()} == dict.fromkeys(("h200", "l4", "t4"), (1, 16))
    assert drawn["l4"]["y"] == near([row["latency (ms)"] for batch in (1, 16) for row in rows
                                     if (row["device"], row["batch"]) == ("l4", batch)])
    warnings = page.locator(".warnings > ul > li", has_text="from the data sheet: never measured on")
    assert warnings.locator("summary").all_inner_texts() == ["1 like it"]  # of two cards
    assert f"{rows[0]['device']} is fastest of 3" in page.inner_text("h1")


def test_latency_against_cost() -> None:
    """A line joins the batches of a device in their order, which stands beside its points, not in that of their cost."""
    row = {"device": "t4", "latency (ms)": 1.0, "low (ms)": 0.5, "high (ms)": 2.0, "from": "data sheet", "fits": "yes"}
    rows = [row | {"batch": batch, "a million items": cost} for batch, cost in ((8, 0.2), (1, 0.9), (32, 0.3))]
    (series,) = device_chart(rows, None).series
    assert (list(series.x), list(series.beside)) == ([0.9, 0.2, 0.3], ["1", "8", "32"])


def test_three_warnings_are_shown_and_the_others_folded(browser: Browser, tmp_path: Path) -> None:
    """Those that differ only in names and numbers are one."""
    alike = [f"never measured on NVIDIA {card}, so up to {factor} times as long" for card, factor in (("H100", 1.2), ("L4", 2))]
    others = [f"another warning about {word}" for word in ("memory", "sizes", "hosts")]
    page = Page("Devices", "two devices", "an answer", warnings=dict.fromkeys([*alike, *others, "a rough estimate: why"], ()))
    (file := tmp_path / "page.html").write_text(page_html(page, "command", datetime.now(UTC)), encoding="utf-8")
    opened_page, _ = opened(browser, file, 375)
    shown = opened_page.locator(".warnings > ul > li").all_inner_texts()
    assert [text.splitlines() for text in shown] == [["a rough estimate: why"], [alike[0], "1 like it"], [others[0]]]
    assert opened_page.locator(".warnings > details > summary").inner_text() == "2 more"


def test_an_evaluation(trained_workspace: Workspace, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "evaluation.html"
    evaluation = answered("evaluator.py", "--workspace", trained_workspace.root, "--recorded", "--html", file)
    page, rows = shown(browser, file), evaluation["comparisons"]
    assert len(column(page, 1, "model")) == 30 < len(rows)
    page.locator("button", has_text=f"Show all {len(rows)} rows").click()
    assert numbers(page, 1, "predicted (ms)") == pytest.approx([row["predicted_ms"] for row in rows])
    scatter, worst = plots_of(page)
    points = {label: (x, y) for one in scatter["series"] for label, x, y in zip(one["labels"], one["x"], one["y"], strict=True)}
    idle = next(row for row in rows if not row["level"])
    assert (points[idle["model"]], len(points)) == (near((idle["measured_ms"], idle["predicted_ms"])), len(rows))
    assert worst["bars"][0]["value"] == near(100 * max((row["error"] for row in rows), key=abs))
    mean = sum(abs(row["error"]) for row in rows) / len(rows)
    assert f"predictions err by {mean:.1%} on the mean" in page.inner_text("h1")


def test_a_page_of_thousands_of_latencies_stays_small(trained_workspace: Workspace) -> None:
    """It has the largest errors and the most frequent warnings, and says what it leaves out. The plot has all."""
    recorded = evaluate(trained_workspace, [], recorded=True)
    few, in_words = recorded.comparisons, str.maketrans("0123456789", "abcdefghij")  # warnings that differ in words
    many = [few[place % len(few)].model_copy(update={
        "model": f"a_long_name_of_a_model_{place}@batch={place},sequence=512", "warnings": (
            f"a warning about kernel Conv_112x112_in8x32x112x112-32x1x3x3-32_k3s1g32_fp32 and {str(place).translate(in_words)} "
            "others",)}) for place in range(2000)]
    html = page_html(evaluation_page(recorded.model_copy(update={"comparisons": tuple(many)})), "python evaluator.py",
                     datetime.now(UTC))
    assert len(html.encode()) < MOST_BYTES
    for said in (f"The {MOST_ROWS} of 2000 with the largest errors", f"{2000 - MOST_WARNINGS} rarer warnings are in"):
        assert said in html
