"""The short form of recipes/fuzz/wrong_models.py and of `python -m tests.fuzzing`: damaged files give an error for the user, or
the right answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.fuzz import wrong_models
from recipes.fuzz.damaged_models import HARMFUL
from recipes.fuzz.reading import Outcome, Reader
from recipes.fuzz.wrong_models import COMMAND, damaged_files, outcomes_of
from runtimes import local_target
from tests.fuzzing import files_of, fuzz_files
from utils.paths import Workspace

pytestmark = pytest.mark.slow

TARGET = local_target("cpu").name
MODELS, DAMAGES = 40, 6
SLOW = ("constants folded for hours", "20,000 nodes", "constants of 7 GiB in parts")


@pytest.fixture(scope="module")
def workspace(trained_workspace: Workspace) -> Workspace:
    return trained_workspace


def faults(outcomes: list[Outcome]) -> list[str]:
    return [f"{outcome.what}: {outcome.damage}: {outcome.message[-300:]}" for outcome in outcomes if outcome.fault]


def test_damaged_models(tmp_path: Path) -> None:
    with Reader(COMMAND) as reader:
        outcomes = list(outcomes_of(damaged_files(tmp_path, MODELS, seed=3), wrong_models.TARGET, reader))
    assert faults(outcomes) == []
    assert {outcome.what for outcome in outcomes} == {"answer", "error"}


def test_harmful_models(tmp_path: Path) -> None:
    """Without those that only the limits of time end."""
    quick = {name: make for name, make in HARMFUL.items() if name not in SLOW}
    with Reader(COMMAND) as reader:
        for number, (name, make) in enumerate(quick.items()):
            path = tmp_path / f"{number}.onnx"
            path.write_bytes(make().SerializeToString())
            (outcome,) = outcomes_of([(name, path)], wrong_models.TARGET, reader)
            assert not outcome.fault, outcome
            assert outcome.peak_mib < 2048


def test_damaged_files(workspace: Workspace) -> None:
    outcomes = list(fuzz_files(workspace.root, TARGET, files_of(workspace.root, TARGET), DAMAGES, seed=2))
    assert faults(outcomes) == []
    assert {outcome.what for outcome in outcomes} == {"answer", "error"}
