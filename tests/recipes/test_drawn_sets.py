"""The forty sets of models of recipes/h200: the file is what its generator writes, by the rule that it states."""

from __future__ import annotations

import argparse
from collections import Counter

import pytest
import yaml

from benchmark.serving.config import ServedSetsConfig
from graph_model.simulation.serving import busy_share
from model_zoo.exporting.zoo_config import ZooConfig
from recipes.h200.served_sets import BATCHES, CONFIG, IDLE_MS, config_text, idle_ms, sizes_of_sets
from utils.config import read_config, validate
from utils.paths import ROOT
from utils.sharing_mode import SetSharing


@pytest.fixture(scope="module")
def config() -> ServedSetsConfig:
    return read_config(CONFIG, ServedSetsConfig)


def test_the_files_are_what_the_generator_writes() -> None:
    for name, seed in (("served_sets", 36), ("served_sets_again", 37), ("served_sets_fourth", 39),
                       ("served_sets_one_card", 40)):
        assert CONFIG.with_name(f"{name}.yaml").read_text(encoding="utf-8") == config_text(40, seed)
    of_four = CONFIG.with_name("served_sets_of_four.yaml").read_text(encoding="utf-8")
    assert of_four == config_text(40, 38, (2, 3, 4))
    config = validate(yaml.safe_load(of_four), ServedSetsConfig, "config")
    assert Counter(map(len, config.sets)) == {2: 14, 3: 13, 4: 13}
    assert sum(SetSharing.parse(way).fits(4) for way in config.ways) == 5


@pytest.mark.parametrize("sizes", ["1", "2,5", "two"])
def test_sizes_that_no_set_has(sizes: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        sizes_of_sets(sizes)


def test_times_between_sizes() -> None:
    assert idle_ms("resnet50", 4) == pytest.approx(1.07 * 1.53)
    assert idle_ms("resnet50", 8) == pytest.approx(1.07 * (1.53 * 3.15) ** 0.5)


def test_rates_and_objectives(config: ServedSetsConfig) -> None:
    assert len(config.sets) == 40
    totals = []
    for models in config.sets:
        shares = []
        for model in models:
            run_ms = idle_ms(model.model.stem, model.batch)
            shares.append(busy_share(model.rate_per_s, run_ms, model.batch))
            assert 1.99 <= model.slo_ms / max(run_ms, 3.0) <= 6.05
        assert all(0.079 <= share <= 0.501 for share in shares)
        totals.append(sum(shares))
    assert 0.249 < min(totals) < 0.30
    assert 0.85 < max(totals) < 0.901
    assert sum(totals[:20]) / 20 == pytest.approx(0.575, abs=0.02)


@pytest.mark.parametrize("part", [slice(0, 20), slice(20, 40)])
def test_twenty_sets_are_a_sample_of_all(config: ServedSetsConfig, part: slice) -> None:
    sets = config.sets[part]
    assert Counter(map(len, sets)) == {2: 10, 3: 10}
    assert all(len({model.model for model in models}) == len(models) for models in sets)
    models = Counter(model.model.stem for models in sets for model in models)
    assert models.keys() == IDLE_MS.keys()
    assert min(models.values()) >= 2
    batches = Counter(model.batch for models in sets for model in models)
    assert sorted(batches) == list(BATCHES)
    assert max(batches.values()) - min(batches.values()) <= 1


def test_each_way_fits_some_sets(config: ServedSetsConfig) -> None:
    for size in (2, 3):
        assert sum(SetSharing.parse(way).fits(size) for way in config.ways) == 5


def test_the_exporter_knows_the_models() -> None:
    assert set(IDLE_MS) <= set(read_config(ROOT / "recipes" / "h200" / "model_zoo.yaml", ZooConfig).models)
