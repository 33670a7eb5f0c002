"""`predict_model_latency.py --html`: pages in a real browser, against what --json prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx.parser
import pytest
from chromium import column, opened, plots_of
from command import run_script
from conftest import small_model
from onnx import numpy_helper

from hase.inference import Predictor
from hase.inference.reporting.runs import time_by_layer
from hase.utils.pages.page import TreeMapPart
from hase.utils.pages.rendering import MOST_BYTES

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow

BATCHES = (1, 2, 4, 8)
EVIL = "</script><b onload=alert(1)>"  # in the name of a node


def predicted(page: Path, *options: str | Path) -> list[dict[str, Any]]:
    """What --json prints of the same answers as the page shows."""
    done = run_script("inference/predict_model_latency.py", "--target", "nvidia-h200", "--html", page, "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def layered_model(names: bool) -> onnx.ModelProto:
    """Two layers of two nodes each, named in the nodes' names or in their metadata, as torch.onnx writes them."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[32, 64] x) => (float[32, 64] y) '
        "{ a = MatMul(x, w) b = Sigmoid(a) c = MatMul(b, w) y = Softmax(c) }")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), np.float32), "w"))
    for node, layer in zip(model.graph.node, ("block1", "block1", "block2", "block2"), strict=True):
        node.name = f"/{layer}/mlp/{node.op_type}" if names else f"node_{node.output[0]}"
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
        assert f"between {low:.4g} and {high:.4g} ms" in page.inner_text("header")
        kernels = {kernel["id"]: kernel for kernel in answer["kernels"]}
        shown = dict(zip(column(page, 1, "kernel"), map(float, column(page, 1, "total (ms)")), strict=True))
        assert shown == pytest.approx({name: kernel["total_ms"] for name, kernel in kernels.items()})
        by_operator = dict(zip(column(page, 0, "operator"), map(float, column(page, 0, "time (ms)")), strict=True))
        assert sum(by_operator.values()) == pytest.approx(answer["kernel_sum_ms"])
        assert page.locator("[data-plot] svg").count() == 1  # the layers
        assert page.locator("[data-plot] canvas").count() >= 1  # the run over time
        for warning in answer["warnings"]:
            assert page.inner_text("body").count(warning) == 1
        assert f"--html {file} --json" in page.inner_text("pre")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert not complaints


def test_batches_sort_filter_and_dark_mode(folder: Path, browser: Browser) -> None:
    file = folder / "batches.html"
    answers = predicted(file, "--model", folder / "open.onnx", "--dim", f"batch={','.join(map(str, BATCHES))}")
    page, complaints = opened(browser, file, 1400, color_scheme="light")
    latencies = [answer["latency_ms"] for answer in answers]
    assert [float(value) for value in column(page, 0, "latency (ms)")] == pytest.approx(latencies)
    head = page.locator("figure.table").first.locator("th button", has_text="latency (ms)")
    head.click()
    assert [float(value) for value in column(page, 0, "latency (ms)")] == pytest.approx(sorted(latencies, reverse=True))
    head.click()
    assert [float(value) for value in column(page, 0, "latency (ms)")] == pytest.approx(sorted(latencies))
    plots = plots_of(page)
    assert [plot["kind"] for plot in plots[:2]] == ["chart", "chart"]
    (series,) = plots[0]["series"]
    assert series["x"] == list(BATCHES)
    assert series["y"] == pytest.approx(latencies, rel=1e-5)
    assert list(zip(series["low"], series["high"], strict=True)) == [
        pytest.approx(answer["interval_ms"], rel=1e-5) for answer in answers]
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#theme")
    assert page.evaluate(ground) != light
    page.click("#theme")
    assert page.evaluate(ground) == light
    dark, more = opened(browser, file, 375, color_scheme="dark")
    assert dark.evaluate(ground) != light
    dark.locator("details").first.locator("summary").click()
    assert dark.locator("details").first.locator("[data-plot] svg").count() == 1
    assert dark.evaluate("document.documentElement.scrollWidth") <= 375
    assert not complaints + more


def test_several_models_with_one_that_fails(folder: Path, browser: Browser) -> None:
    file = folder / "several.html"
    done = run_script("inference/predict_model_latency.py", "--target", "nvidia-h200", "--html", file, "--json", "--model",
                      *(folder / f"{name}.onnx" for name in ("evil", "named", "open")))
    assert done.returncode == 1  # open has no batch
    page, complaints = opened(browser, file, 1400)
    assert column(page, 0, "model") == [answer["model"] for answer in json.loads(done.stdout)]
    assert column(page, 1, "model") == [str(folder / "open.onnx")]
    assert "dimension batch" in column(page, 1, "why")[0]
    assert not complaints


def test_without_scripts_charts_are_drawings(folder: Path, browser: Browser) -> None:
    """As in a mail program: the batch curve is an SVG with a point for each batch and its interval as an area."""
    file = folder / "drawn.html"
    predicted(file, "--model", folder / "open.onnx", "--dim", "batch=1,4")
    page, _ = opened(browser, file, 1400, java_script_enabled=False)
    assert page.locator("noscript svg circle").count() == 2 * 2
    assert page.locator("noscript svg polygon").count() == 2


def test_it_prints_in_light_colours(folder: Path, browser: Browser) -> None:
    file = folder / "printed.html"
    predicted(file, "--model", folder / "named.onnx")
    page, complaints = opened(browser, file, 1400, color_scheme="dark")
    pdf = page.pdf(format="A4", print_background=True)
    assert pdf.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) < 8
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not complaints


def leaves(part: TreeMapPart) -> list[TreeMapPart]:
    return [leaf for child in part.parts.values() for leaf in leaves(child)] if part.parts else [part]


@pytest.mark.parametrize("name", ["named", "scoped", "evil"])
def test_time_by_layer(folder: Path, name: str) -> None:
    """The layers of torch.onnx, in names or metadata, or operators where a model has none; with all of the kernels' time."""
    run = Predictor(target="nvidia-h200").run(folder / f"{name}.onnx")
    operators = {kernel.type for kernel in run.prediction.kernels}
    whole, layered = time_by_layer(run, folder / f"{name}.onnx")
    assert layered == (name != "evil")
    assert {part.name for part in whole.parts.values()} == ({"block1.mlp", "block2.mlp"} if layered else operators)
    assert whole.total == pytest.approx(run.prediction.kernel_sum_ms)
    assert {leaf.group for leaf in leaves(whole)} == operators
