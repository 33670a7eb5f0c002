"""The campaigns of tests/fuzz at a small size: each case gives an answer or an error for the user."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest
from fuzz import cluster_kills, kills, long_run, rewriting, wrong_models
from fuzz.damaged_workspace import damaged, files_of
from fuzz.hostile_clients import clients
from fuzz.reporting import Outcome
from optional_packages import needs

from hase.runtimes import local_target
from hase.utils.paths import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

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


def test_hostile_clients(tmp_path: Path) -> None:
    assert ended(clients(tmp_path, ("a crowd that leaves before the answer", "garbage"))) == {"answer"}


def test_interrupted_commands(tmp_path: Path) -> None:
    """Those that measure nothing: tests/test_stopping.py has some others."""
    works = [work for work in kills.WORKS if work.name in ("analysis", "training")]
    assert ended(chain(*(kills.interruptions(work, range(2), 1, tmp_path) for work in works))) == {"answer"}


def test_kills_on_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("ray", "requirements-ray.txt")
    monkeypatch.setattr(cluster_kills, "VICTIMS", ("driver", "worker"))  # tests/benchmark/test_ray_actors.py loses a node
    monkeypatch.setattr(cluster_kills, "MODELS", 2)
    assert ended(outcome for _, outcome in cluster_kills.outcomes(2, 1, tmp_path)) == {"answer"}


def test_many_predictions(tmp_path: Path) -> None:
    assert ended(long_run.cases(4 * long_run.EACH, tmp_path)) == {"answer"}


def test_predictions_while_predictors_are_trained(tmp_path: Path, workspace: Workspace,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "ANSWERS", 5)
    assert ended(rewriting.cases(2, workspace.root)) == {"answer"}
