"""docs/json.md has the fields of what --json prints; each command of docs/questions.md prints what the page shows."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from command import run_script
from conftest import small_model
from decoder_models import genai_folder

from hase.recipes.write_pages import (
    JSON_PAGE,
    QUESTION,
    QUESTIONS_PAGE,
    command_output,
    json_page,
    questions_page,
)
from hase.utils.errors import UserError
from hase.utils.paths import ROOT

CONFIG = ROOT / "recipes" / "demo" / "model_zoo.yaml"
QUESTIONS = list(QUESTION.finditer(QUESTIONS_PAGE.read_text(encoding="utf-8")))


def test_the_page_of_json_is_up_to_date() -> None:
    assert JSON_PAGE.read_text(encoding="utf-8") == json_page(), "write it again: python recipes/write_pages.py"


@pytest.mark.slow
def test_what_a_command_prints_is_on_the_page(tmp_path: Path) -> None:
    onnx.save(small_model(), tmp_path / "net.onnx")
    done = run_script("inference/predict_model_latency.py", "--model", tmp_path / "net.onnx", "--target", "nvidia-h200",
                      "--slo-ms", "5", "--energy", "--json")
    (printed,), page = json.loads(done.stdout), JSON_PAGE.read_text(encoding="utf-8")
    for record, class_name in ((printed, "Prediction"), (printed["slo"], "SloUnderLoad"), (printed["memory"], "Memory"),
                               (printed["kernels"][0], "KernelShare"), (printed["energy"], "EnergyPrediction")):
        on_page = page.partition(f"### {class_name}\n")[2].partition("\n#")[0]
        assert not [name for name in record if f"`{name}`" not in on_page and name not in ("slo", "energy")]


@pytest.mark.slow
@pytest.mark.nightly
def test_each_command_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those of the demo's models that the page asks about, as the demo exports them, and of a language model."""
    demo = tmp_path / "demo"
    for options in (("--model", "resnet18", "--model", "mnasnet1_0"),
                    ("--model", "mnasnet1_0", "--batch-size", "1", "--set", "dynamic=true", "--set", "fixed=false")):
        done = run_script("model_zoo/torchvision_exporter.py", "--workspace", demo, "--config", CONFIG, *options)
        assert done.returncode == 0, done.stderr
    genai_folder(demo / "llama-int4", precision="int4")
    monkeypatch.setenv("HASE_CACHE", str(tmp_path / "cache"))
    for found in QUESTIONS:
        assert command_output(found["command"], demo) == found["answer"], (
            f"{found['command']}\nwrite the answers again: python recipes/write_pages.py --questions --workspace out/demo")


def test_answers_replace_those_that_stand_there(tmp_path: Path) -> None:
    text = "**1. What?**\n\n```bash\npython -c 'print(\"a\\tbc\\nabc\\td\\n\\nend\")'\n```\n\n```text\nold\n```\n\nmore\n"
    made = questions_page(text, tmp_path)
    assert made == text.replace("old\n", "a    bc\nabc  d\n\nend\n")
    assert questions_page(made, tmp_path) == made
    with pytest.raises(UserError, match="no such thing"):
        command_output("echo no such thing >&2; exit 1", tmp_path)
    assert command_output(f"echo {tmp_path} out/demo llama-int4/x", tmp_path) == "out/demo out/demo llama-int4/x\n"
