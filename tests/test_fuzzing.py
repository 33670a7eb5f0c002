"""The campaigns of recipes/fuzz at a small size: each case gives an answer or an error for the user."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from recipes.fuzz import wrong_models
from recipes.fuzz.damaged_workspace import damaged, files_of
from recipes.fuzz.reporting import Outcome
from runtimes import local_target
from utils.paths import Workspace

pytestmark = pytest.mark.slow

TARGET = local_target("cpu").name
MODELS, DAMAGES = 40, 6


@pytest.fixture(scope="module")
def workspace(trained_workspace: Workspace) -> Workspace:
    return trained_workspace


def ended(outcomes: Iterable[Outcome]) -> set[str]:
    """How some cases ended; there must be no fault."""
    seen = list(outcomes)
    assert not [str(outcome) for outcome in seen if outcome.fault]
    return {outcome.what for outcome in seen}


def test_damaged_models(tmp_path: Path) -> None:
    assert ended(wrong_models.damaged(MODELS, 3, tmp_path)) == {"answer", "error"}


def test_harmful_models(tmp_path: Path) -> None:
    assert ended(wrong_models.harmful(False, tmp_path)) == {"answer", "error"}


def test_damaged_files(workspace: Workspace) -> None:
    assert ended(damaged(workspace.root, TARGET, files_of(workspace.root, TARGET), DAMAGES, 2)) == {"answer", "error"}
