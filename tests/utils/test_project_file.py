"""`hase.toml`: options that a project's commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.project_file import project_words

PROJECT = """
on = "h200"
slo-ms = 10
unheard-of = 3

[predict]
model = ["small.onnx", "large.onnx"]
batch = [1, 8]
energy = true
strict = false

[gate]
baseline = "main.json"
"""


@pytest.fixture
def parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hase.toml").write_text(PROJECT)
    made = cli.parser("Predicts.", "")
    cli.add_models(made)
    cli.add_dim(made)
    cli.add_target(made)
    cli.add_trust(made)
    for option, options in (("--slo-ms", {"type": float}), ("--energy", {"action": "store_true"})):
        made.add_argument(option, **options)
    return made


def test_a_command_has_its_own_options_and_those_of_all(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args(project_words(parser, "predict", []))
    assert (args.target, args.slo_ms, args.energy, args.strict) == ("h200", 10.0, True, False)
    assert (args.model, args.dim) == ([Path("small.onnx"), Path("large.onnx")], ["batch=1,8"])
    assert project_words(parser, "", []) == ["--on", "h200", "--slo-ms", "10"]


def test_the_command_line_wins_by_any_name_of_an_option(parser: argparse.ArgumentParser) -> None:
    words = project_words(parser, "predict", ["--target=l4", "--dim", "batch=2", "--model", "own.onnx", "--slo-ms", "5"])
    assert words == ["--energy"]


@pytest.mark.parametrize(("text", "message"), [
    ("on = ", "hase.toml: not a TOML file: Invalid value"),
    ("[predict]\nbtach = 1", "hase.toml: hase predict has no option --btach"),
    ("predict = 3", "hase.toml: predict is a table with the options of hase predict")])
def test_a_wrong_file_is_one_sentence(parser: argparse.ArgumentParser, text: str, message: str) -> None:
    Path("hase.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        project_words(parser, "predict", [])
