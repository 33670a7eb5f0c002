"""The campaigns of tests/fuzz at a small size: each case gives an answer or an error for the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import pytest
from fuzz import cluster_kills, damaged_models, kills, long_run, rewriting
from fuzz.damaged_workspace import damaged, files_of
from fuzz.hostile_servers import clients
from fuzz.reading import Outcome
from optional_packages import needs

from hase.runtimes import local_target
from hase.utils.paths import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

TARGET = local_target("cpu").name
CAMPAIGNS: dict[str, tuple[Callable[[Path, Path], Iterable[Outcome]], set[str]]] = {  # in a folder and a trained workspace
    "damaged models": (lambda folder, _: damaged_models.damaged(40, 3, folder), {"answer", "error"}),
    "harmful models": (lambda folder, _: damaged_models.harmful(False, folder), {"answer", "error"}),
    "damaged files": (lambda _, root: damaged(root, TARGET, files_of(root, TARGET), 6, 2), {"answer", "error"}),
    "hostile clients": (lambda folder, _: clients(folder, ("a crowd that leaves before the answer", "garbage")), {"answer"}),
    "kills": (lambda folder, _: chain(*(  # tests/test_stopping.py has the others
        kills.interruptions(work, range(2), 1, folder) for work in kills.WORKS if work.name not in ("collector", "exporter"))),
        {"answer"}),
    "kills on a cluster": (lambda folder, _: (  # tests/benchmark/test_ray_actors.py loses a node
        outcome for _, outcomes in cluster_kills.parts(2, 1, folder, ("driver", "worker"), models=2) for outcome in outcomes),
        {"answer"}),
    "a long run": (lambda folder, _: long_run.cases(4 * long_run.EACH, folder), {"answer"}),
    "rewriting": (lambda _, root: rewriting.cases(2, root, answers=5), {"answer"})}


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_a_campaign_finds_no_fault(campaign: str, tmp_path: Path, trained_workspace: Workspace) -> None:
    if campaign == "kills on a cluster":
        needs("ray", "ray")
    cases, wanted = CAMPAIGNS[campaign]
    outcomes = list(cases(tmp_path, trained_workspace.root))
    assert not [str(outcome) for outcome in outcomes if outcome.fault]
    assert {outcome.what for outcome in outcomes} == wanted
