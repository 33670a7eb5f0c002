"""The short form of `python -m tests.fuzzing`: damaged files give an error for the user or the right answer."""

from __future__ import annotations

import pytest

from runtimes import local_target
from tests.fuzzing import Outcome, files_of, fuzz_files, fuzz_models
from utils.paths import Workspace

pytestmark = pytest.mark.slow

TARGET = local_target("cpu").name
MODELS, DAMAGES = 40, 6


@pytest.fixture(scope="module")
def workspace(trained_workspace: Workspace) -> Workspace:
    return trained_workspace


def faults(outcomes: list[Outcome]) -> list[str]:
    return [f"{outcome.what}: {outcome.damage}: {outcome.message[-300:]}" for outcome in outcomes if outcome.fault]


def test_damaged_models(workspace: Workspace) -> None:
    models = [workspace.models / "anet_c16.onnx", workspace.models / "bnet_c24.onnx"]
    outcomes = list(fuzz_models(workspace.root, TARGET, models, MODELS, seed=2))
    assert faults(outcomes) == []
    assert {outcome.what for outcome in outcomes} == {"answer", "error"}


def test_damaged_files(workspace: Workspace) -> None:
    outcomes = list(fuzz_files(workspace.root, TARGET, files_of(workspace.root, TARGET), DAMAGES, seed=2))
    assert faults(outcomes) == []
    assert {outcome.what for outcome in outcomes} == {"answer", "error"}
