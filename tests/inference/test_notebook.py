"""Predictions in a notebook: cards, tables and data frames, with the numbers of the records; the card in a real browser."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import pytest
from chromium import opened
from conftest import Once, small_model
from decoder_models import genai_folder

from hase.inference import Predictions, Predictor, predict_language_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow

TARGET = "nvidia-h200"
EVIL = "<script>alert(1)</script>"


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


@pytest.fixture(scope="module")
def predictions(once: Once) -> Predictions:
    """Of a small model at two batches, asked for as many models."""
    folder = once("notebook", lambda folder: [onnx.save(small_model(8, 32, batch), folder / f"b{batch}.onnx")
                                              for batch in (1, 4)])
    return Predictor(target=TARGET).predict_many([folder / "b1.onnx", folder / "b4.onnx"])


def test_a_prediction_is_a_card(predictions: Predictions) -> None:
    prediction = predictions[1]
    low, high = prediction.interval_ms
    text = Balanced(prediction._repr_html_()).text
    for words in ("b4", prediction.target, f"{prediction.latency_ms:.4g} ms", f"90 % between {low:.4g} and {high:.4g}",
                  f"{prediction.items_per_second:.4g} items/s", f"{prediction.peak_memory_mib:.4g} MiB", "batch 4", "fits"):
        assert words in text
    assert "a rough estimate" not in text
    kernels = prediction.to_pandas()
    assert kernels["total_ms"].sum() == pytest.approx(prediction.kernel_sum_ms)
    assert kernels["id"].tolist() == [kernel.id for kernel in prediction.kernels]


def test_a_card_marks_doubt_and_lets_nothing_out_of_a_name(predictions: Predictions) -> None:
    doubtful = predictions[0].model_copy(update={"rough_estimate": True, "model": EVIL, "fits_memory": False,
                                                 "warnings": tuple(f"warning {place}" for place in range(5))})
    html = doubtful._repr_html_()
    text = Balanced(html).text
    assert EVIL not in html
    assert EVIL in "".join(text)
    for words in ("a rough estimate", "more than the device has", "warning 2", "and 2 more"):
        assert words in text
    assert "warning 3" not in text


def test_predictions_are_a_table_and_a_data_frame(predictions: Predictions) -> None:
    frame = predictions.to_pandas()
    assert list(frame["latency_ms"]) == [prediction.latency_ms for prediction in predictions]
    assert list(frame["interval_high_ms"]) == [prediction.interval_ms[1] for prediction in predictions]
    assert list(frame["batch"]) == [1, 4]
    assert (frame[["measured_share", "predicted_share", "estimated_share"]].sum(axis=1) - 1).abs().max() < 1e-9
    text = Balanced(predictions._repr_html_()).text
    assert f"{predictions[0].latency_ms:.4g}" in text
    assert Predictions(reversed(predictions)).to_pandas()["batch"].tolist() == [4, 1]
    assert Balanced(Predictions()._repr_html_()).text == ["nothing"]
    assert Predictions().to_pandas().empty


def test_the_card_of_a_language_model(once: Once) -> None:
    answer = predict_language_model(once("notebook_language", lambda folder: genai_folder(folder / "model")) / "model",
                                    prompt=64, generate=8, target=TARGET)
    text = Balanced(answer._repr_html_()).text
    assert answer.tpot is not None
    for words in (f"{answer.ttft.ms:.4g} ms", f"90 % between {answer.ttft.between}", f"{answer.tpot.ms:.4g} ms",
                  f"64 tokens in, 8 out, batch 1; {answer.target}"):
        assert words in text


@pytest.mark.parametrize(("ground", "ink"), [("white", "rgb(0, 0, 0)"), ("black", "rgb(255, 255, 255)")])
def test_a_card_is_readable_on_any_ground(predictions: Predictions, browser: Browser, tmp_path: Path, ground: str,
                                          ink: str) -> None:
    """It takes its colour from the notebook's text, and fits a phone."""
    file = tmp_path / "card.html"
    file.write_text(f'<body style="background:{ground};color:{ink}">{predictions[0]._repr_html_()}</body>', encoding="utf-8")
    page, complaints = opened(browser, file, 375)
    assert page.evaluate("getComputedStyle(document.querySelector('div')).color") == ink
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert not complaints
