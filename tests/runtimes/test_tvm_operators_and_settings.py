"""Operators of drawn sizes, measured under settings of threads and cores, and the setting that is left out."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import printed
from conftest import small_model
from optional_packages import needs

from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.ort_kernel_runner import measure_by, runtime_of
from hase.kernel_model.sampling.draws import read_seeds
from hase.learned.kernels.interface import TrainingConfig
from hase.records.dataset_files import read_header, read_kernels
from hase.records.devices import cache_kib, container_limit_mib, current_environment
from hase.records.measurement import Effort
from hase.runtimes import flavour_of
from hase.runtimes.tvm.compiling import tvm_flavour
from hase.runtimes.tvm.operator_sampler import DRAWS, OperatorSizes, sample
from hase.training.kernels.left_out_tables import ENVIRONMENT_FEATURES, setting_error_rows, settings_of
from hase.utils import files
from hase.utils.config import validate
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target
from hase.utils.paths import Workspace

pytestmark = [pytest.mark.measuring, pytest.mark.slow]

SMALL = OperatorSizes(batch=(1, 2), channels=(1, 16), side=(4, 12), rows=(4, 32), inner=(8, 32), columns=(8, 32),
                      windows=(1, 3))
SETTINGS = ((1, 1), (2, 1), (1, 0))


def test_draws_stay_within_the_bounds() -> None:
    numbers = np.random.default_rng(0)
    for model in (draw(SMALL, numbers) for draw in DRAWS.values() for _ in range(10)):
        shapes = [[dim.dim_value for dim in tensor.type.tensor_type.shape.dim]
                  for tensor in (*model.graph.input, *model.graph.output)]
        assert all(shapes)
        assert max(max(shape) for shape in shapes) <= 32
        assert len(model.graph.node) <= 3
    with pytest.raises(UserError, match="side: the smallest size comes first"):
        validate({"side": [9, 3]}, OperatorSizes, "sizes.yaml")


def test_the_environment_of_this_machine(tmp_path: Path) -> None:
    """Caches and limits are read from files in Linux's form."""
    limit = tmp_path / "memory.max"
    for index, cache in enumerate((("1", "Data", "32K"), ("1", "Instruction", "64K"), ("2", "Unified", "1M"))):
        for name, text in zip(("level", "type", "size"), cache, strict=True):
            files.write_text(tmp_path / f"index{index}" / name, text + "\n")
    assert (cache_kib(tmp_path), cache_kib(tmp_path / "none")) == ({1: 32, 2: 1024}, {})
    for text, limit_mib in ((f"{512 * 2**20}\n", 512), ("max\n", None)):
        limit.write_text(text)
        assert container_limit_mib(limit) == limit_mib
    target = Target(device_name="x", flavour=flavour_of("cpu"), threads=3, cores=1)
    environment = current_environment(target, limit_mib=100)
    assert (environment.threads, environment.cores, environment.memory_limit_mib) == (3, 1, 100)
    assert current_environment(target).memory_limit_mib > 100


def test_one_operator_is_timed_without_a_dataset(tmp_path: Path) -> None:
    """A function of TVM, of the sizes that were asked for, and a whole ONNX file under TVM."""
    needs("tvm", "requirements-tvm.txt")
    workspace = Workspace(tmp_path)
    sample(workspace, OperatorSizes(rows=(6, 6), inner=(32, 32), columns=(24, 24)), 1, ["product"], seed=0)
    (path,) = workspace.kernel_onnx.glob("*/*.tvm")
    assert "in1x6x32-32x24" in path.stem or "in6x32-32x24" in path.stem or "in1x2x3x32-32x24" in path.stem
    assert (runtime_of(path), runtime_of(Path("model.onnx"))) == ("tvm", "ort")
    effort = Effort(warmup=1, budget_s=0.0, least_runs=5, most_runs=5)
    timing = measure_by("tvm", path, "cpu", workspace, {}, effort)
    assert (timing.runtime, timing.model, len(timing.samples_ms)) == ("tvm", path.stem, 5)
    assert all(0 < sample_ms < 100 for sample_ms in timing.samples_ms)
    alone = shutil.copy(path, tmp_path / "copied.tvm")  # needs no other file
    assert measure_by("tvm", Path(alone), "cpu", workspace, {}, effort).model == "copied"
    with pytest.raises(UserError, match="a function of TVM has fixed sizes"):
        measure_by("tvm", path, "cpu", workspace, {"batch": 2}, effort)
    model = tmp_path / "small.onnx"
    onnx.save(small_model(batch="batch", channels=4, side=8), model)
    assert len(measure_by("tvm", model, "cpu", workspace, {"batch": 2}, effort).samples_ms) == 5


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Drawn kernels, measured under three settings."""
    needs("tvm", "requirements-tvm.txt")
    workspace = Workspace(tmp_path_factory.mktemp("settings"))
    drawn = sample(workspace, SMALL, 10, list(DRAWS), seed=0)
    assert drawn.total() >= 8
    for threads, cores in SETTINGS:
        collect(workspace, validate({
            "device": "cpu", "runtime": "tvm", "levels": [0.0], "window_s": 0.2, "attempts": 1, "patience_s": 0,
            "kernel": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.005, "least_runs": 3, "most_runs": 5},
            "setting": {"threads": threads, "cores": cores, "memory_limit_mib": 512}}, CollectorConfig, "test"))
    return workspace


def test_drawn_kernels_are_measured_under_each_setting(settings: Workspace) -> None:
    seeds = read_seeds(settings.kernel_onnx / tvm_flavour().name)
    for target, rows in settings_of(settings, "fused").items():
        header = read_header(settings.dataset(target))
        assert header.environment is not None
        assert (header.environment.threads, header.environment.memory_limit_mib) == (header.target.threads, 512)
        assert {entry.kernel.id for entry in read_kernels(settings.dataset(target))} == set(seeds)
        assert rows.metrics == ENVIRONMENT_FEATURES
        assert rows.load[0, 0] == math.log2(1 + header.target.threads)


def test_each_setting_is_left_out_once(settings: Workspace, tmp_path: Path) -> None:
    (tmp_path / "training.yaml").write_text("folds: 2\nxgboost: {trees: 30}\nforest: {trees: 3}\n")
    rows = json.loads(printed("training/held_out.py", "--by", "setting", "--workspace", settings.root, "--config",
                              tmp_path / "training.yaml", "--json"))
    assert sorted((row["threads"], row["cores"]) for row in rows) == sorted(SETTINGS)
    assert {row["kernels"] for row in rows} == {"known"}
    assert {row["learned_from"] for row in rows} == {2 * rows[0]["count"]}
    assert all(0 < row["median_%"] < math.inf for row in rows)
    with pytest.raises(UserError, match="0 settings of level tuned were measured"):
        settings_of(settings, "tuned")
    rows_of = settings_of(settings, "fused")  # kernels that no other setting has: their error is not only the setting's
    complete, *partial = rows_of
    for name in partial:
        rows_of[name] = rows_of[name].rows(np.arange(len(rows_of[name])) < 5)
    known, new = setting_error_rows(rows_of, complete, TrainingConfig(folds=2))
    measured_elsewhere = {kernel for name in partial for kernel in rows_of[name].ids}
    assert (known["kernels"], known["count"]) == ("known", len(measured_elsewhere & set(rows_of[complete].ids)))
    assert (new["kernels"], new["count"]) == ("new", len(rows_of[complete]) - known["count"])
    assert known["learned_from"] == new["learned_from"] == 10
