"""The configs of the recipes: each file is valid, and so is each change that a script makes to one."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_commands import configs_of

from hase.benchmark.collecting.config import CollectorConfig
from hase.model_zoo.exporting.zoo_config import ZooConfig
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.paths import ROOT

SCRIPTS = {  # how many configs their commands read
    "recipes/demo/run.sh": 4, "recipes/same_predictions/run.sh": 4, "recipes/tvm/run.sh": 9,
    "recipes/tvm/gpu.sh": 6, "recipes/openvino/run.sh": 6, "recipes/h200/run.sh": 4, "recipes/h200/collect_pool.sh": 2,
    "recipes/cluster/several_gpus.sh": 3}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_configs_of_a_script_are_valid(script: str, tmp_path: Path) -> None:
    assert len(configs_of(script, tmp_path)) == SCRIPTS[script]


def test_models_of_the_h200() -> None:
    """A config that extends another one keeps what it does not change."""
    pool, collector = (read_config(ROOT / "recipes" / "h200" / f"{name}.yaml", CollectorConfig)
                       for name in ("collect_pool", "collector"))
    assert (pool.kernel, pool.tracers, pool.levels) == (collector.kernel, collector.tracers, collector.levels)
    assert pool.model == collector.model.model_copy(update={"budget_s": 0.2})
    assert (collector.kernel_levels, pool.kernel_levels) == (None, ())


def test_half_precision_and_other_sizes(tmp_path: Path) -> None:
    all_models, float16, other_sizes, _ = configs_of("recipes/h200/run.sh", tmp_path)
    assert isinstance(float16, ZooConfig)
    assert isinstance(other_sizes, ZooConfig)
    assert isinstance(all_models, ZooConfig)
    assert (float16.dtypes, other_sizes.dtypes) == (("fp16",), ("fp32",))
    assert set(float16.models) | set(other_sizes.models) < set(all_models.models)
    stems = [export.stem for export in other_sizes.exports()]
    assert stems[:3] == ["convnext_tiny", "convnext_tiny_160x160", "convnext_tiny_288x288"]


def test_a_change_that_does_not_fit_is_named() -> None:
    with pytest.raises(UserError, match=r"^--set level=\[0\.5\]: level: unknown key; did you mean levels\?"):
        read_config(ROOT / "recipes" / "h200" / "collect_pool.yaml", CollectorConfig, ["tracers=2", "level=[0.5]"])
