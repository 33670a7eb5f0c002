"""The recipes' scripts without what they measure on: each config is valid, as is each change that a script makes to one; models
that are named exist; clusters' templates can be read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from optional_packages import needs
from recipe_commands import configs_of

from hase.benchmark.collecting.config import CollectorConfig
from hase.utils.config import read_config
from hase.utils.paths import ROOT

H200 = ROOT / "recipes" / "h200"
SCRIPTS = {  # how many configs their commands read
    "recipes/demo/run.sh": 4, "recipes/same_predictions/run.sh": 4, "recipes/tvm/run.sh": 9,
    "recipes/tvm/gpu.sh": 6, "recipes/openvino/run.sh": 6, "recipes/h200/run.sh": 4, "recipes/h200/collect_pool.sh": 2,
    "recipes/cluster/several_gpus.sh": 3}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_configs_of_a_script_are_valid(script: str, tmp_path: Path) -> None:
    assert len(configs_of(script, tmp_path)) == SCRIPTS[script]


def test_a_config_that_extends_another_keeps_what_it_does_not_change() -> None:
    pool, collector = (read_config(H200 / f"{name}.yaml", CollectorConfig) for name in ("collect_pool", "collector"))
    assert (pool.kernel, pool.tracers, pool.levels) == (collector.kernel, collector.tracers, collector.levels)
    assert pool.model == collector.model.model_copy(update={"budget_s": 0.2})
    assert (collector.kernel_levels, pool.kernel_levels) == (None, ())


@pytest.mark.parametrize(("script", "variable", "collection"), [
    ("collect_energy", "timm", "timm"), ("collect_energy", "timm_fp16", "timm"), ("collect_pool", "in_half", "timm"),
    ("collect_energy", "transformers", "transformers"),
    pytest.param("collect_energy", "torchvision", "torchvision", marks=pytest.mark.slow)])
def test_the_models_of_a_script_exist(script: str, variable: str, collection: str) -> None:
    text = (H200 / f"{script}.sh").read_text(encoding="utf-8")
    (named,) = re.findall(rf'^ *{variable}="([^"]*)"', text, re.MULTILINE)
    pool = yaml.safe_load((ROOT / "model_zoo" / "pool.yaml").read_text(encoding="utf-8"))
    if collection == "torchvision":
        import torchvision

        pool[collection] = {"all": torchvision.models.list_models(torchvision.models)}
    listed = {name for names in pool[collection].values() for name in names}
    assert named.split()
    assert set(named.split()) <= listed


@pytest.mark.slow
def test_rays_cluster_launcher_reads_the_template() -> None:
    needs("ray", "ray")
    from ray.autoscaler._private.util import prepare_config, validate_config

    read = prepare_config(yaml.safe_load((ROOT / "recipes/cluster/cluster.yaml").read_text()))
    validate_config(read)
    assert read["max_workers"] == 2


def test_the_script_for_slurm_is_sound() -> None:
    assert subprocess.run(["bash", "-n", "recipes/cluster/slurm.sh"], cwd=ROOT, capture_output=True).stderr == b""
