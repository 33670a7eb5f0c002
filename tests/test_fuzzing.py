"""The campaigns of tests/fuzz at a small size: each case gives an answer or an error for the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
CAMPAIGNS: dict[str, tuple[Callable[[Path, Path], Iterable[Outcome]], set[str]]] = {  # in a folder and a trained workspace
    "damaged models": (lambda folder, _: wrong_models.damaged(40, 3, folder), {"answer", "error"}),
    "harmful models": (lambda folder, _: wrong_models.harmful(False, folder), {"answer", "error"}),
    "damaged files": (lambda _, root: damaged(root, TARGET, files_of(root, TARGET), 6, 2), {"answer", "error"}),
    "hostile clients": (lambda folder, _: clients(folder, ("a crowd that leaves before the answer", "garbage")), {"answer"}),
    "kills": (lambda folder, _: chain(*(  # of what measures nothing: tests/test_stopping.py has the others
        kills.interruptions(work, range(2), 1, folder) for work in kills.WORKS if work.name in ("analysis", "training"))),
        {"answer"}),
    "a long run": (lambda folder, _: long_run.cases(4 * long_run.EACH, folder), {"answer"}),
    "rewriting": (lambda _, root: rewriting.cases(2, root, answers=5), {"answer"})}


def ended(outcomes: Iterable[Outcome]) -> set[str]:
    """How some cases ended; there must be no fault."""
    seen = list(outcomes)
    assert not [str(outcome) for outcome in seen if outcome.fault]
    return {outcome.what for outcome in seen}


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_a_campaign_finds_no_fault(campaign: str, tmp_path: Path, trained_workspace: Workspace) -> None:
    outcomes, wanted = CAMPAIGNS[campaign]
    assert ended(outcomes(tmp_path, trained_workspace.root)) == wanted


def test_kills_on_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("ray", "requirements-ray.txt")
    monkeypatch.setattr(cluster_kills, "VICTIMS", ("driver", "worker"))  # tests/benchmark/test_ray_actors.py loses a node
    monkeypatch.setattr(cluster_kills, "MODELS", 2)
    assert ended(outcome for _, part in cluster_kills.parts(2, 1, tmp_path) for outcome in part) == {"answer"}
