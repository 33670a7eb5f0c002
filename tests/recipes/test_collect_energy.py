"""The recipe that measures energy on a GPU: its models exist, and its configs can be read. No GPU is needed here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import torchvision
import yaml
from recipe_commands import configs_of

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.metrics.power import WINDOW_S
from hase.model_zoo.exporting.zoo_config import ZooConfig
from hase.utils.config import read_config
from hase.utils.paths import ROOT

RECIPE = ROOT / "recipes" / "h200"


def named(variable: str) -> list[str]:
    """The models in a variable of the script."""
    script = (RECIPE / "collect_energy.sh").read_text(encoding="utf-8")
    return cast("re.Match[str]", re.search(rf'^{variable}="([^"]*)"', script, re.MULTILINE))[1].split()


def test_the_models_are_torchvisions_and_the_pools() -> None:
    pool = yaml.safe_load((ROOT / "model_zoo" / "pool.yaml").read_text(encoding="utf-8"))
    for variable, collection in (("timm", "timm"), ("timm_fp16", "timm"), ("transformers", "transformers")):
        listed = {name for names in pool[collection].values() for name in names}
        assert named(variable)
        assert set(named(variable)) <= listed
    assert set(named("torchvision")) <= set(torchvision.models.list_models(torchvision.models))


def test_the_windows_are_long_enough_and_batches_stay_open(tmp_path: Path) -> None:
    configs = configs_of("recipes/h200/collect_energy.sh", tmp_path)
    [config] = [config for config in configs if isinstance(config, CollectorConfig)]
    assert config.energy_s >= WINDOW_S
    assert config.levels == (0.0,)
    [export] = read_config(RECIPE / "model_zoo.yaml", ZooConfig, ["models=[resnet50]"]).exports()
    assert export.stem == "resnet50"  # one file for all batch sizes
