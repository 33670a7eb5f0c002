"""`predict_model_latency.py --html`: pages in a real browser, against what --json prints; and predictions in a notebook: cards,
tables and data frames."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx.parser
import pytest
from chromium import column, opened, plots_of
from command import run_script
from conftest import small_model
from onnx import numpy_helper

from hase.inference import Predictions, Predictor
from hase.inference.reporting.runs import time_by_layer
from hase.utils.pages.rendering import MOST_BYTES

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow

TARGET = "nvidia-h200"
BATCHES = (1, 2, 4, 8)
EVIL = "</script><b onload=alert(1)>"  # in the name of a node or model


def predicted(page: Path, *options: str | Path) -> list[dict[str, Any]]:
    """What --json prints of the same answers as the page shows."""
    done = run_script("inference/predict_model_latency.py", "--target", TARGET, "--html", page, "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def layered_model(names: bool, within: str = "") -> onnx.ModelProto:
    """Two layers of two nodes each, named in the nodes' names or in their metadata, as torch.onnx writes them. `within`: the
    layer that holds both, with a slash before it."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[32, 64] x) => (float[32, 64] y) '
        "{ a = MatMul(x, w) b = Sigmoid(a) c = MatMul(b, w) y = Softmax(c) }")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), np.float32), "w"))
    for node, layer in zip(model.graph.node, ("block1", "block1", "block2", "block2"), strict=True):
        node.name = f"{within}/{layer}/mlp/{node.op_type}" if names else f"node_{node.output[0]}"
        if not names:
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(["", layer, f"{layer}.mlp", node.name]))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an open batch, one whose node has a name that tries to leave its place, and one with layers."""
    folder = tmp_path_factory.mktemp("pages")
    onnx.save(small_model(16, 32, "batch"), folder / "open.onnx")
    evil = small_model(8, 32)
    evil.graph.node[0].name = EVIL
    onnx.save(evil, folder / "evil.onnx")
    onnx.save(layered_model(names=True), folder / "named.onnx")
    onnx.save(layered_model(names=False), folder / "scoped.onnx")
    onnx.save(layered_model(names=True, within="/encoder"), folder / "nested.onnx")
    return folder


def test_one_prediction(folder: Path, browser: Browser) -> None:
    """The numbers are those of --json, nothing is asked of a network, and nothing is wider than a phone."""
    file = folder / "one.html"
    (answer,) = predicted(file, "--model", folder / "evil.onnx", "--slo-ms", "5")
    assert file.stat().st_size < MOST_BYTES
    for width in (1400, 375):
        page, complaints = opened(browser, file, width)
        low, high = answer["interval_ms"]
        assert f"takes {answer['latency_ms']:.4g} ms on NVIDIA H200, within the 5 ms asked for" in page.inner_text("h1")
        assert f"the latency lies between {low:.4g} and {high:.4g} ms" in page.inner_text("header")
        shown = dict(zip(column(page, 1, "kernel"), map(float, column(page, 1, "total (ms)")), strict=True))
        assert shown == pytest.approx({kernel["id"]: kernel["total_ms"] for kernel in answer["kernels"]})
        assert sum(map(float, column(page, 0, "time (ms)"))) == pytest.approx(answer["kernel_sum_ms"])
        assert page.locator("[data-plot] svg").count() == 1  # the layers
        assert page.locator("[data-plot] canvas").count() >= 1  # the run over time
        for warning in answer["warnings"]:
            assert page.inner_text("body").count(warning) == 1
        assert f"--html {file} --json" in page.inner_text("pre")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert not complaints
        (timeline,) = (plot for plot in plots_of(page) if plot["kind"] == "timeline")
        launched = {node: begins for begins, _, node, _ in timeline["tracks"]["host"]}
        worked = {node: begins for begins, _, node, _ in timeline["tracks"]["GPU"]}
        assert worked
        assert all(begins >= launched[node] > 0 for node, begins in worked.items())


def test_batches_sort_filter_and_dark_mode(folder: Path, browser: Browser) -> None:
    file = folder / "batches.html"
    answers = predicted(file, "--model", folder / "open.onnx", "--dim", f"batch={','.join(map(str, BATCHES))}", "--energy")
    page, complaints = opened(browser, file, 1400, color_scheme="light")
    latencies = [answer["latency_ms"] for answer in answers]
    assert [float(value) for value in column(page, 0, "latency (ms)")] == pytest.approx(latencies)
    head = page.locator("figure.table").first.locator("th button", has_text="latency (ms)")
    head.click()
    assert [float(value) for value in column(page, 0, "latency (ms)")] == pytest.approx(sorted(latencies, reverse=True))
    plots = plots_of(page)
    assert [plot["title"] for plot in plots[:3]] == [
        f"{name}, with its interval" for name in ("Latency", "Throughput", "Energy of an item")]
    assert plots[2]["series"][0]["y"] == pytest.approx([answer["energy"]["energy_per_item_j"] for answer in answers], rel=1e-5)
    (series,) = plots[0]["series"]
    assert series["x"] == list(BATCHES)
    assert series["y"] == pytest.approx(latencies, rel=1e-5)
    assert list(zip(series["low"], series["high"], strict=True)) == [
        pytest.approx(answer["interval_ms"], rel=1e-5) for answer in answers]
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#theme")
    assert page.evaluate(ground) != light
    dark, more = opened(browser, file, 375, color_scheme="dark")
    assert dark.evaluate(ground) != light
    dark.locator("details").first.locator("summary").click()
    assert dark.locator("details").first.locator("[data-plot] svg").count() == 1
    assert dark.evaluate("document.documentElement.scrollWidth") <= 375
    assert not complaints + more


def test_several_models(folder: Path, browser: Browser) -> None:
    """Only one of them has sizes. A long name breaks between its parts, and bars show the energy of each."""
    file = folder / "several.html"
    long_name = folder / "a_long_model_name_of_five_parts.onnx"
    long_name.write_bytes((folder / "open.onnx").read_bytes())
    answers = predicted(file, "--energy", "--dim", "batch=1", "--model", long_name, folder / "named.onnx")
    for width in (1400, 375):
        page, complaints = opened(browser, file, width)
        assert sorted(column(page, 0, "sizes")) == ["", "left open"]
        parts = page.locator("td.name").first.evaluate("""(cell) => [...cell.childNodes].map((node) => {
            const range = document.createRange();
            range.selectNodeContents(node);
            return [node.data?.trim(), range.getClientRects().length];
        })""")
        assert {part: lines for part, lines in parts if part} == dict.fromkeys(
            ("a_", "long_", "model_", "name_", "of_", "five_", "parts", "@batch=1,", "dynamic"), 1)
        bars = {plot["title"]: [bar["value"] for bar in plot["bars"]] for plot in plots_of(page) if plot["kind"] == "bars"}
        assert bars["Energy per item, with its interval"] == pytest.approx(
            [one["energy"]["energy_per_item_j"] for one in answers], rel=1e-5)
        assert not complaints


def test_without_scripts_and_on_paper(folder: Path, browser: Browser) -> None:
    """As in a mail program: the batch curve is an SVG with a point for each batch and its interval as an area."""
    file = folder / "drawn.html"
    predicted(file, "--model", folder / "open.onnx", "--dim", "batch=1,4")
    page, _ = opened(browser, file, 1400, java_script_enabled=False)
    assert page.locator("noscript svg circle").count() == 2 * 2
    assert page.locator("noscript svg polygon").count() == 2
    page, complaints = opened(browser, file, 1400, color_scheme="dark")
    assert len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4", print_background=True))) < 8
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not complaints


@pytest.mark.parametrize("name", ["named", "scoped", "nested", "evil"])
def test_time_by_layer(folder: Path, name: str) -> None:
    """The layers of torch.onnx, in names or metadata, below one that holds them all; or operators where a model has none. They
    have all of the kernels' time.
    """
    run = Predictor(target=TARGET).run(folder / f"{name}.onnx")
    operators = {kernel.type for kernel in run.prediction.kernels}
    whole, layered = time_by_layer(run, folder / f"{name}.onnx")
    assert layered == (name != "evil")
    assert {part.name for part in whole.parts.values()} == ({"block1.mlp", "block2.mlp"} if layered else operators)
    assert whole.total == pytest.approx(run.prediction.kernel_sum_ms)


# in a notebook -------------------------------------------------------------------------------------------------------------


class Balanced(HTMLParser):
    """Checks that every element ends, and collects the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.text = list[str](), list[str]()
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open += [tag] * (tag != "br")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_prediction_is_a_card(folder: Path) -> None:
    """It marks doubt, and lets nothing out of a name."""
    prediction = Predictor(target=TARGET).predict(folder / "open.onnx", dims={"batch": 4})
    low, high = prediction.interval_ms
    text = Balanced(prediction._repr_html_()).text
    for words in (prediction.target, f"{prediction.latency_ms:.4g} ms", f"90 % between {low:.4g} and {high:.4g}",
                  f"{prediction.items_per_second:.4g} items/s", f"{prediction.peak_memory_mib:.4g} MiB", "batch 4", "fits"):
        assert words in text
    assert "a rough estimate" not in text
    kernels = prediction.to_pandas()
    assert kernels["total_ms"].sum() == pytest.approx(prediction.kernel_sum_ms)
    doubtful = prediction.model_copy(update={"rough_estimate": True, "model": EVIL, "fits_memory": False,
                                             "warnings": tuple(f"warning {place}" for place in range(5))})
    assert EVIL not in doubtful._repr_html_()
    text = Balanced(doubtful._repr_html_()).text
    assert EVIL in "".join(text)
    for words in ("a rough estimate", "more than the device has", "warning 2", "and 2 more"):
        assert words in text
    assert "warning 3" not in text


def test_predictions_are_a_table_and_a_data_frame(folder: Path) -> None:
    predictions = Predictor(target=TARGET).predict_many([folder / "evil.onnx", folder / "named.onnx"])
    frame = predictions.to_pandas()
    assert list(frame["latency_ms"]) == [prediction.latency_ms for prediction in predictions]
    assert list(frame["interval_high_ms"]) == [prediction.interval_ms[1] for prediction in predictions]
    assert (frame[["measured_share", "predicted_share", "estimated_share"]].sum(axis=1) - 1).abs().max() < 1e-9
    assert f"{predictions[0].latency_ms:.4g}" in Balanced(predictions._repr_html_()).text
    assert Balanced(Predictions()._repr_html_()).text == ["nothing"]
    assert Predictions().to_pandas().empty
