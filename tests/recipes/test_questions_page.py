"""docs/questions.md: each command prints, for the demo's models, what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import run_script
from conftest import Once
from decoder_models import genai_folder

from hase.recipes.printed_answers import aligned, answer
from hase.recipes.questions_page import PAGE, QUESTION, page
from hase.utils.errors import UserError
from hase.utils.paths import ROOT

CONFIG = ROOT / "recipes" / "demo" / "model_zoo.yaml"
QUESTIONS = list(QUESTION.finditer(PAGE.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def demo(once: Once, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with those of the demo's models that the page asks about, as the demo exports them, and a language model."""
    def export(folder: Path) -> None:
        for options in (("--model", "resnet18", "--model", "mnasnet1_0"),
                        ("--model", "mnasnet1_0", "--batch-size", "1", "--set", "dynamic=true", "--set", "fixed=false")):
            done = run_script("model_zoo/torchvision_exporter.py", "--workspace", folder, "--config", CONFIG, *options)
            assert done.returncode == 0, done.stderr
        genai_folder(folder / "llama-int4", precision="int4")

    return once("questions", export)


def test_there_are_twenty_each_with_its_answer() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(QUESTIONS) == 20 == text.count("```bash") == text.count("```text")
    assert [text.count(f"\n**{number}. ") for number in range(1, 21)] == [1] * 20
    assert all(found["answer"] for found in QUESTIONS)


@pytest.mark.slow("minutes")
def test_each_command_prints_what_the_page_shows(demo: Path, monkeypatch: pytest.MonkeyPatch,
                                                 tmp_path: Path) -> None:
    monkeypatch.setenv("HASE_CACHE", str(tmp_path))
    for found in QUESTIONS:
        assert answer(found["command"], demo) == found["answer"], (
            f"{found['command']}\nmake the answers anew: python recipes/questions_page.py --workspace out/demo")


def test_answers_replace_those_that_stand_there(tmp_path: Path) -> None:
    text = "**1. What?**\n\n```bash\npython -c 'print(\"a\\tbc\\nabc\\td\\n\\nend\")'\n```\n\n```text\nold\n```\n\nmore\n"
    made = page(text, tmp_path)
    assert made == text.replace("old\n", "a    bc\nabc  d\n\nend\n")
    assert page(made, tmp_path) == made
    with pytest.raises(UserError, match="no such thing"):
        answer("echo no such thing >&2; exit 1", tmp_path)
    assert answer(f"echo {tmp_path} out/demo llama-int4/x", tmp_path) == "out/demo out/demo llama-int4/x\n"


def test_columns_are_aligned() -> None:
    assert aligned("said\na\tb\n1234\t5\n") == "said\na     b\n1234  5\n"
