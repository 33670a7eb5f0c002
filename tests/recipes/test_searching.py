"""The recipe of a search: an evolutionary one beside a random one."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from command import run_script
from optional_packages import needs

from hase.inference.search import ofa
from hase.recipes.search.evolve import front_of


def test_a_front_holds_what_nothing_beats() -> None:
    found = {"fast": (1.0, 1.0), "slower": (1.5, 1.0), "large": (2.0, 3.0), "small": (2.5, 2.0), "equal": (1.0, 0.5)}
    assert list(front_of(found)) == ["fast", "large"]


@pytest.mark.slow
def test_searches_side_by_side(tmp_path: Path) -> None:
    needs("optuna", "requirements-search.txt")
    options = ("--count", "60", "--random-count", "40", "--out", tmp_path / "fronts.csv", "--json")
    done = run_script("recipes/search/evolve.py", *options)
    random, evolutionary = json.loads(done.stdout)
    assert (random["networks"], evolutionary["networks"]) == (40, 60)
    with (tmp_path / "fronts.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert len(rows) == random["on the front"] + evolutionary["on the front"]
    assert all(ofa.network_named(row["network"]) for row in rows)
    assert 0.5 < random["hypervolume (ms · GFLOP)"] < 2.0
