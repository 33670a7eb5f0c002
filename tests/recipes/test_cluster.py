"""The recipes for clusters: what can be tried without one."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml
from hase.recipes.cluster.compare_actors import ONE, TWO, WAYS, difference_rows, speed_rows
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


def test_speeds_and_differences() -> None:
    def round_of(took_s: float, measuring_s: float) -> dict[str, Any]:
        return {"kernel_rows": 100, "took_s": took_s, "measuring_s": measuring_s}

    none, one, two = speed_rows(dict(zip(WAYS, ([round_of(10, 10)], [round_of(10, 9), round_of(20, 18), round_of(10, 9)],
                                                [round_of(5, 9)]), strict=True)))
    assert (none["kernels_per_s"], one["kernels_per_s"], two["kernels_per_s"]) == (10, 10, 20)
    assert (none["measuring"], one["measuring"], two["measuring"]) == (1.0, pytest.approx(0.9), pytest.approx(0.9))
    assert two["times_one_actor"] == 2.0
    kernel = ("run", "k")
    again, between = difference_rows({ONE: [{kernel: 1.0}, {kernel: 1.1}], TWO: [{kernel: 1.2}]})
    assert (again["pairs"], again["median_difference_%"]) == (1, pytest.approx(10.0))
    assert (between["pairs"], between["least_%"], between["most_%"]) == (2, pytest.approx(100 / 11), pytest.approx(20.0))
