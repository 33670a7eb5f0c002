"""The recipes of searches: an evolutionary search beside a random one, and the networks of a front measured on this CPU."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from command import run_script
from hase.recipes.search.measure_best import networks_in
from optional_packages import needs

from hase.inference.search import ofa
from hase.recipes.search.evolve import front_of
from hase.utils.errors import UserError


def test_a_front_holds_what_nothing_beats() -> None:
    found = {"fast": (1.0, 1.0), "slower": (1.5, 1.0), "large": (2.0, 3.0), "small": (2.5, 2.0), "equal": (1.0, 0.5)}
    assert list(front_of(found)) == ["fast", "large"]


@pytest.mark.slow
def test_searches_side_by_side(tmp_path: Path) -> None:
    needs("optuna", "requirements-search.txt")
    options = ("--count", "250", "--random-count", "150", "--out", tmp_path / "fronts.csv", "--json")
    done = run_script("recipes/search/evolve.py", *options)
    random, evolutionary = json.loads(done.stdout)
    assert (random["networks"], evolutionary["networks"]) == (150, 250)
    with (tmp_path / "fronts.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert len(rows) == random["on the front"] + evolutionary["on the front"]
    assert all(ofa.choice_of(row["network"]) for row in rows)
    assert 0.5 < random["hypervolume (ms · GFLOP)"] < 2.0


def test_the_networks_of_a_front(tmp_path: Path) -> None:
    table = tmp_path / "found.csv"
    table.write_text("model,latency_ms,front\n" + "".join(f"{number},{10 - number},{number != 3}\n" for number in range(10)))
    assert networks_in(table, 20) == ["9", "8", "7", "6", "5", "4", "2", "1", "0"]
    assert networks_in(table, 3) == ["9", "5", "0"]
    assert networks_in(table, 1) == ["9"]
    table.write_text("model,latency_ms\nresnet18,1\n")
    with pytest.raises(UserError, match="holds no front"):
        networks_in(table, 3)


@pytest.mark.slow
def test_networks_are_measured(tmp_path: Path) -> None:
    small, large = "ofa_r128_w1.0_33.33_33.33_33.33_33.33_33.33", "ofa_r224_w1.2_76.76.76_76.76_76.76_76.76_76.76"
    (tmp_path / "found.csv").write_text(f"model,latency_ms,front\n{large},2,True\n{small},1,True\n")
    done = run_script("recipes/search/measure_best.py", "--table", tmp_path / "found.csv", "--rounds", "3", "--json")
    first, second = json.loads(done.stdout)
    assert (first["network"], second["network"]) == (small, large)
    assert first["predicted (ms)"] < second["predicted (ms)"]
    assert first["measured (ms)"] < second["measured (ms)"]
    assert "rank correlation of predicted and measured latencies: 1.000" in done.stderr
