"""The recipes for clusters: what can be tried without one."""

from __future__ import annotations

import subprocess

import pytest
import yaml
from optional_packages import needs

from hase.utils.paths import ROOT


def test_rays_cluster_launcher_reads_the_template() -> None:
    needs("ray", "requirements-ray.txt")
    from ray.autoscaler._private.util import prepare_config, validate_config

    read = prepare_config(yaml.safe_load((ROOT / "recipes/cluster/cluster.yaml").read_text()))
    validate_config(read)
    assert read["max_workers"] == 2


@pytest.mark.parametrize("script", ["several_gpus.sh", "slurm.sh"])
def test_the_scripts_are_sound(script: str) -> None:
    assert subprocess.run(["bash", "-n", f"recipes/cluster/{script}"], cwd=ROOT, capture_output=True).stderr == b""
