"""--html of the commands beside predict_model_latency.py: pages in a real browser, against what --json prints."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import pytest
from chromium import column, opened, plots_of
from command import run_script
from conftest import Once, small_model
from decoder_models import genai_folder

from hase.inference.evaluation.comparison import Evaluation
from hase.inference.evaluation.report import MOST_ROWS, MOST_WARNINGS, evaluation_page
from hase.utils.pages.page import PageTable
from hase.utils.pages.rendering import MOST_BYTES, page_html
from hase.utils.text import distinct

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from hase.utils.paths import Workspace

pytestmark = pytest.mark.slow

H200 = ("--target", "nvidia-h200")


@pytest.fixture(scope="module")
def folder(once: Once) -> Path:
    """A small model with an open batch, and the folder of a language model."""
    def make(folder: Path) -> None:
        onnx.save(small_model(16, 32, "batch"), folder / "open.onnx")
        genai_folder(folder / "language")

    return once("answer_pages", make)


def printed(script: str, *options: str | Path) -> Any:
    """What --json prints."""
    done = run_script(script, "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def shown(browser: Browser, file: Path) -> Page:
    """A page, after it was looked at in both themes, wide and narrow: nothing is complained of, and nothing sticks out."""
    assert file.stat().st_size < MOST_BYTES
    for width, theme in ((375, "dark"), (375, "light"), (1400, "dark"), (1400, "light")):
        page, complaints = opened(browser, file, width, color_scheme=theme)
        ground = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(ground)
        page.click("#theme")
        assert page.evaluate(ground) != before
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert not complaints
    return page


def numbers(page: Page, table: int, name: str) -> list[float]:
    return [float(cell) for cell in column(page, table, name)]


def test_a_sweep_of_a_language_model(folder: Path, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "sweep.html"
    answers = printed("inference/predict_llm.py", "--model", folder / "language", *H200, "--generate", "20", "--sweep",
                      "--batch", "1,2,16", "--ttft-ms", "1000", "--html", file)
    page = shown(browser, file)
    assert numbers(page, 0, "first token (ms)") == pytest.approx([answer["ttft"]["ms"] for answer in answers])
    assert numbers(page, 0, "tokens/s") == pytest.approx([answer["device_tokens_per_second"] for answer in answers])
    cells = page.locator("figure.grid").first.locator("td").evaluate_all("cells => cells.map(cell => +cell.dataset.value)")
    assert cells == pytest.approx([answer["ttft"]["ms"] for answer in answers])  # batch by batch, prompt by prompt
    first, *_ = plots_of(page)
    series = {one["name"]: one for one in first["series"]}
    assert list(series) == ["prompt 128", "prompt 512"]
    of_prompt = [answer["ttft"] for answer in answers if answer["prompt"] == 512]
    assert series["prompt 512"]["y"] == pytest.approx([time["ms"] for time in of_prompt], rel=1e-5)
    assert series["prompt 512"]["high"] == pytest.approx([time["interval_ms"][1] for time in of_prompt], rel=1e-5)
    assert first["limits"] == [{"name": "1000 ms", "y": 1000.0}]
    most = max(answers, key=lambda answer: answer["device_tokens_per_second"])
    assert f"at batch {most['batch']} with prompts of {most['prompt']} tokens" in page.inner_text("h1")
    page.locator("th button", has_text="prompt").first.click()
    assert numbers(page, 0, "prompt") == sorted((answer["prompt"] for answer in answers), reverse=True)
    texts, words = list({text for answer in answers for text in answer["warnings"]}), page.locator("body").text_content()
    said = distinct(texts)  # texts that differ in nothing but numbers, and in names with numbers, are one
    assert len(said) < len(texts)
    assert (page.locator(".warnings details").count() == 1) == (len(said) > 8)
    assert words is not None
    assert sum(words.count(text) for text in texts) == len(said)


def test_one_request(folder: Path, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "request.html"
    (answer,) = printed("inference/predict_llm.py", "--model", folder / "language", *H200, "--generate", "900", "--html", file)
    page = shown(browser, file)
    first, further = answer["ttft"]["ms"], answer["tpot"]["ms"]
    assert f"first token after {first:.4g} ms, then one every {further:.4g} ms" in page.inner_text("h1")
    chart, *of_runs = plots_of(page)
    assert [plot["kind"] for plot in of_runs] == ["treemap", "timeline"] * 2
    assert [text for text in page.locator("summary").all_inner_texts() if "run" in text] == [
        "The prompt's run", "A token's run, in the middle of the generation"]
    assert chart["series"][0]["x"] == [token["cached"] for token in answer["tokens"]]
    assert chart["series"][0]["y"] == pytest.approx([token["ms"] for token in answer["tokens"]], rel=1e-5)
    assert numbers(page, 1, "peak (MiB)") == pytest.approx([answer["memory"]["peak_mib"]])
    assert f"{answer['energy']['token_j']:.4g}" in page.inner_text(".facts")


def test_a_load_curve(folder: Path, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "curve.html"
    curve = printed("inference/load_curve.py", "--model", folder / "open.onnx", *H200, "--dim", "batch=4", "--points", "12",
                    "--slo-ms", "900", "--html", file)
    page = shown(browser, file)
    for name in ("mean", "p50", "p95", "p99"):
        assert numbers(page, 0, f"{name} (ms)") == pytest.approx([point[f"{name}_ms"] for point in curve["points"]])
    (chart,) = plots_of(page)
    series = {one["name"]: one for one in chart["series"]}
    low, high = curve["interval_ratios"]
    assert low < 1 < high
    p95 = [point["p95_ms"] for point in curve["points"]]
    assert series["p95"]["low"] == pytest.approx([low * value for value in p95], rel=1e-5)
    assert series["p95"]["high"] == pytest.approx([high * value for value in p95], rel=1e-5)
    assert "keeps to 900 ms while other work is busy for up to 100% of the time" in page.inner_text("header")
    page.fill("input[type=search]", "100%")
    assert column(page, 0, "other work busy") == ["100%"]


def test_two_models(folder: Path, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "two.html"
    answer = printed("inference/compare_models.py", folder / "open.onnx", folder / "open.onnx", *H200, "--dim", "batch=1",
                     "--b-dim", "batch=64", "--html", file)
    page = shown(browser, file)
    rows = dict(zip(column(page, 0, "operator"), numbers(page, 0, "B - A (ms)"), strict=True))
    assert rows == pytest.approx({row["operator"]: row["difference_ms"] for row in answer["operators"]}
                                 | {"outside kernels": answer["outside_kernels_ms"]})
    assert sum(rows.values()) == pytest.approx(answer["difference_ms"])
    latencies, shift, *of_runs = plots_of(page)
    assert [plot["kind"] for plot in of_runs] == ["treemap", "timeline"] * 2
    page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    for place, name in enumerate("ab"):
        of_operators = numbers(page, 1 + place, "time (ms)")
        assert sum(of_operators) == pytest.approx(answer[name]["latency_ms"] - answer[name]["outside_kernels_ms"])
    assert [bar["value"] for bar in latencies["bars"]] == pytest.approx(
        [answer[name]["latency_ms"] for name in "ab"], rel=1e-5)
    assert latencies["bars"][0]["high"] == pytest.approx(answer["a"]["interval_ms"][1], rel=1e-5)
    assert {bar["name"]: bar["value"] for bar in shift["bars"]} == pytest.approx(
        {name: value for name, value in rows.items() if value}, rel=1e-4)
    page.locator("th button", has_text="operator").first.click()
    assert column(page, 0, "operator") == sorted(rows, key=str.lower)


def test_several_devices(folder: Path, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "devices.html"
    rows = printed("inference/compare_devices.py", "--model", folder / "open.onnx", "--gpus", "h200,l4,t4", "--dim",
                   "batch=1,16", "--slo-ms", "5", "--host-pace", "1", "--html", file)
    page = shown(browser, file)
    assert column(page, 0, "device") == [row["device"] for row in rows]
    assert numbers(page, 0, "latency (ms)") == pytest.approx([row["latency (ms)"] for row in rows])
    (chart,) = plots_of(page)
    of_l4 = next(one for one in chart["series"] if one["name"] == "l4")
    assert (of_l4["dash"], next(one for one in chart["series"] if one["name"] == "h200")["dash"]) == ("dashed", "")
    assert sorted(of_l4["y"]) == pytest.approx(sorted(row["latency (ms)"] for row in rows if row["device"] == "l4"), rel=1e-5)
    assert f"{rows[0]['device']} is fastest of 3" in page.inner_text("h1")


def test_an_evaluation(trained_workspace: Workspace, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "evaluation.html"
    evaluation = printed("evaluator.py", "--workspace", trained_workspace.root, "--recorded", "--html", file)
    page = shown(browser, file)
    rows = evaluation["comparisons"]
    assert len(column(page, 1, "model")) == 30 < len(rows)
    page.locator("button", has_text=f"Show all {len(rows)} rows").click()
    assert numbers(page, 1, "measured (ms)") == pytest.approx([row["measured_ms"] for row in rows])
    assert numbers(page, 1, "predicted (ms)") == pytest.approx([row["predicted_ms"] for row in rows])
    scatter, worst = plots_of(page)
    points = {label: (x, y) for one in scatter["series"] for label, x, y in zip(one["labels"], one["x"], one["y"], strict=True)}
    idle = next(row for row in rows if not row["level"])
    assert points[idle["model"]] == pytest.approx((idle["measured_ms"], idle["predicted_ms"]), rel=1e-5)
    assert len(points) == len(rows)
    assert worst["bars"][0]["value"] == pytest.approx(100 * max((row["error"] for row in rows), key=abs), rel=1e-5)
    mean = sum(abs(row["error"]) for row in rows) / len(rows)
    assert f"predictions err by {mean:.1%} on the mean" in page.inner_text("h1")
    name = rows[0]["model"]
    field = page.locator("figure.table").nth(1).locator("input")
    field.fill(f"{name} ")
    kept = column(page, 1, "model")
    assert kept
    assert [cell for cell in kept if name not in cell] == []
    field.fill("no such model")
    assert column(page, 1, "model") == []
    field.fill("")
    assert len(column(page, 1, "model")) == len(rows)


def words(number: int) -> str:
    """Different words for different numbers."""
    return "".join("abcdefghij"[int(digit)] for digit in str(number))


def test_a_page_of_thousands_of_latencies_stays_small(trained_workspace: Workspace) -> None:
    """It has the largest errors and the most frequent warnings, and says what it leaves out. The plot has all."""
    recorded = Evaluation.model_validate(printed("evaluator.py", "--workspace", trained_workspace.root, "--recorded"))
    few = recorded.comparisons
    many = [row.model_copy(update={"model": f"a_long_name_of_a_model_{place}@batch={place},sequence=512", "warnings": (
        f"a warning about kernel Conv_112x112_in8x32x112x112-32x1x3x3-32_k3s1g32_fp32 and {words(place)} others",)})
        for place, row in ((place, few[place % len(few)]) for place in range(2000))]
    page = evaluation_page(recorded.model_copy(update={"comparisons": tuple(many)}))
    html = page_html(page, "python evaluator.py", datetime.now(UTC))
    assert len(html.encode()) < MOST_BYTES
    (section,) = (section for section in page.sections if section.title == "Model by model")
    (table,) = section.pieces
    assert section.text.startswith(f"The {MOST_ROWS} of 2000 with the largest errors")
    assert isinstance(table, PageTable)
    assert len(table.rows) == MOST_ROWS
    assert max((abs(row.error), row.model) for row in many)[1] in {row["model"] for row in table.rows}
    assert f"{2000 - MOST_WARNINGS} rarer warnings are in evaluation.json only" in html
