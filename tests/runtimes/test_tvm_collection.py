"""Kernels and models measured under TVM by the collector, with its real worker, and predictors trained on their dataset;
operators of drawn sizes, measured under settings of threads and cores, and the setting that is left out."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import printed, run_script
from conftest import small_model
from made_up_dataset import QUICK
from onnx import helper
from onnx_files import layers, saved
from optional_packages import needs

from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.ort_kernel_runner import measure_by, runtime_of
from hase.inference.sum_and_path import chosen_by_others, record_times_ms, target_rows
from hase.kernel_model.sampling.draws import read_seeds
from hase.records.dataset_files import header_path, kernel_table_path, read_header, read_journal, read_kernels, read_table
from hase.records.devices import cache_kib, container_limit_mib, current_environment
from hase.records.kernel_record_files import read_model_record, record_path, update_index
from hase.records.measurement import Effort
from hase.runtimes import local_flavour
from hase.runtimes.protocol import Request, RuntimeSetting, Worker
from hase.runtimes.tvm.compiling import TUNED, function_path, tvm_flavour
from hase.runtimes.tvm.operator_sampler import DRAWS, OperatorSizes, sample
from hase.runtimes.tvm.recording import parse, write_parsed
from hase.runtimes.tvm.tune_kernels import DATABASE, tune_kernels
from hase.runtimes.tvm.worker import PLACEMENTS
from hase.training.kernels.left_out_tables import setting_error_rows, settings_of
from hase.utils import files
from hase.utils.config import validate
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target
from hase.utils.paths import Workspace

pytestmark = [pytest.mark.measuring, pytest.mark.slow]
SMALL = OperatorSizes(batch=(1, 2), channels=(1, 16), side=(4, 12), rows=(4, 32), inner=(8, 32), columns=(8, 32),
                      windows=(1, 3))
CONFIG = {"device": "cpu", "runtime": "tvm", "levels": [0.0], "window_s": 0.2, "attempts": 1, "patience_s": 0,
          "kernel": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.02, "least_runs": 3, "most_runs": 5},
          "model": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.05, "least_runs": 4, "most_runs": 10},
          "setting": {"threads": 1, "cores": 1}}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, str]:
    """Two networks, taken apart and measured, and the target; the larger one needs more memory than the limit."""
    needs("tvm", "tvm")
    workspace = Workspace(tmp_path_factory.mktemp("tvm"))
    workspace.models.mkdir(parents=True)
    for name, depth, width in (("small", 3, 256), ("large", 2, 1024)):
        write_parsed(workspace, parse(layers(workspace.models / f"{name}.onnx", depth, width)))
    update_index(workspace, tvm_flavour())
    config = validate(CONFIG | {"setting": {"threads": 1, "cores": 1, "memory_limit_mib": 4}}, CollectorConfig, "test")
    totals = collect(workspace, config)
    assert totals["failed"] == ["large"]
    return workspace, str(totals["target"])


def test_the_dataset_of_a_tvm_target(measured: tuple[Workspace, str]) -> None:
    """Memory is reported, and a limit refuses a model."""
    workspace, name = measured
    folder = workspace.dataset(name)
    header = read_header(folder)
    assert (header.target.flavour.runtime, header.target.threads, header.target.cores, header.labels) == ("tvm", 1, 1, ("run",))
    assert name.endswith(f"-1t1c-{tvm_flavour().name}")
    table = read_table(kernel_table_path(folder))
    assert set(zip(table["OpType"], table["Status"], strict=True)) == {("MatMul_Relu", "ok")}
    times = dict(zip(table["Input_Shape"], table["run_median_ms"], strict=True))
    assert times["16x1024;1024x1024"] > 4 * times["16x256;256x256"] > 0
    by_model = {m.id: m for block in read_journal(folder) for m in block.measurements if m.subject == "model"}
    facts = by_model["small"].facts
    assert facts["weights_mib"] == pytest.approx(3 * 256 * 256 * 4 / 2**20)
    assert facts["activations_mib"] == pytest.approx(2 * 16 * 256 * 4 / 2**20, rel=0.01)  # two layers' outputs at a time
    assert float(facts["peak_memory_mib"]) > float(facts["weights_mib"])
    assert by_model["large"].status == "failed"
    assert re.search("refused, since it needs 8.2.*the limit is 4 MiB", by_model["large"].error)


def test_a_worker_keeps_its_setting_and_reports_errors(measured: tuple[Workspace, str], tmp_path: Path) -> None:
    workspace = measured[0]
    record_file = record_path(workspace, tvm_flavour(), "small")
    path = function_path(workspace, tvm_flavour(), read_model_record(record_file).nodes[0].kernel_id)
    request = Request(do="alone", device="cpu", effort=Effort(budget_s=0.01, least_runs=12), paths=(str(path),))
    deeper = request.model_copy(update={"do": "model", "paths": (str(layers(tmp_path / "small.onnx", 4)),),
                                        "record": str(record_file)})
    with Worker(60, "tvm", RuntimeSetting(level="fused", threads=2, cores=1)) as worker:
        # at least three in each place, however slow the machine is
        assert len(worker.ask(request).measurements[0].samples_ms) >= 3 * PLACEMENTS
        assert "no carrier" in worker.ask(request.model_copy(update={"do": "carrier"})).error
        assert "TVM's graph is not the one in its record" in worker.ask(deeper).error
    with Worker(60, "tvm", RuntimeSetting(level="fused", cores=10_000)) as worker:
        assert "cores: 10000, but this process may use" in worker.ask(request).error


def test_sum_and_path_in_one_table(measured: tuple[Workspace, str]) -> None:
    """The network that was refused has no time, so it has no row."""
    workspace, name = measured
    command = ("inference/sum_and_path.py", "--workspace", workspace.root)
    report = json.loads(printed(*command, "--json"))
    [row] = report["models"]
    assert [row[column] for column in ("model", "network", "scale", "nodes")] == ["small", "fully connected", "small", 3]
    assert row["sum_ms"] == pytest.approx(row["critical_path_ms"])
    assert row["sum_error_%"] == pytest.approx(100 * (row["sum_ms"] / row["whole_ms"] - 1))
    assert [(target["target"], target["models"]) for target in report["targets"]] == [(name, 1)]
    done = run_script(*command, "--choose-by", "small", "--choose-by", "vgg")
    assert done.stderr.splitlines()[-1] == "error: --choose-by: no target has measured models of vgg; there are: small"
    with pytest.raises(UserError, match="small: 1 of 1 kernels were not measured, MatMul_Relu_"):
        record_times_ms(read_model_record(record_path(workspace, tvm_flavour(), "small")), {}, "run")


def test_predictions_and_the_evaluator(workspace: Workspace) -> None:
    """The model is taken apart by TVM for the prediction, and run under the target's setting for the comparison."""
    needs("tvm", "tvm")
    workspace.models.mkdir(parents=True)
    for width in (64, 96, 128, 160, 192, 256):
        write_parsed(workspace, parse(layers(workspace.models / f"wide{width}.onnx", 3, width)))
    update_index(workspace, tvm_flavour())
    target = str(collect(workspace, validate(CONFIG, CollectorConfig, "test"))["target"])
    for script in ("training/train_kernel_model.py", "training/fit_composition.py"):
        done = run_script(script, "--workspace", workspace.root, "--target", target, "--set", "folds=2")
        assert done.returncode == 0, done.stderr
    [answer] = json.loads(printed("inference/predict_model_latency.py", "--workspace", workspace.root, "--target", target,
                                  "--model", "wide256.onnx", "--json"))
    low_ms, high_ms = answer["interval_ms"]
    assert 0 < low_ms < answer["latency_ms"] < high_ms
    held_mib = 3 * 256 * 256 * 4 / 2**20  # weights
    assert held_mib < answer["memory"]["peak_mib"] < held_mib + 4 * 16 * 256 * 4 / 2**20
    report = json.loads(printed("evaluator.py", "--workspace", workspace.root, "--target", target, "--rounds", "1", "--json",
                                "wide64.onnx", "wide256.onnx"))
    rows = {row["model"]: row for row in report["comparisons"]}
    assert rows["wide256"]["measured_ms"] > rows["wide64"]["measured_ms"] > 0
    assert rows["wide256"]["measured_memory_mib"] == pytest.approx(answer["memory"]["peak_mib"], rel=0.1)


@pytest.mark.nightly
def test_a_gpu_is_a_target_that_is_learned_and_predicted(workspace: Workspace) -> None:
    """The times are those of this CPU, since there is no GPU."""
    needs("tvm", "tvm")
    workspace.models.mkdir(parents=True)
    for width in (64, 96, 128, 160, 192, 256):
        path = layers(workspace.models / f"wide{width}.onnx", 3, width)
        for device in ("cpu", "cuda"):
            write_parsed(workspace, parse(path, device=device))
    for device in ("cpu", "cuda"):
        update_index(workspace, tvm_flavour(device))
    measured = workspace.dataset(str(collect(workspace, validate(CONFIG, CollectorConfig, "test"))["target"]))
    gpu = Target(device_name="NVIDIA made up", flavour=tvm_flavour("cuda"))
    assert RuntimeSetting.of(gpu, workspace.kernel_onnx) == RuntimeSetting(
        level="fused", kernels=str(workspace.kernel_onnx / gpu.flavour.name))
    folder = Path(shutil.copytree(measured, workspace.dataset(gpu.name)))
    files.write_json(header_path(folder), read_header(measured).model_copy(update={"target": gpu}))
    for script in ("training/train_kernel_model.py", "training/fit_composition.py"):
        printed(script, "--workspace", workspace.root, "--target", gpu.name, "--set", "folds=2")
    [answer] = json.loads(printed("inference/predict_model_latency.py", "--workspace", workspace.root, "--target", gpu.name,
                                  "--model", "wide256.onnx", "--json"))
    assert answer["flavour"] == tvm_flavour("cuda").name
    assert 0 < answer["interval_ms"][0] < answer["latency_ms"] < answer["interval_ms"][1]


def test_the_other_models_choose_the_composition() -> None:
    """Errors of the row and of its family do not count."""
    rows = [{"family": family, "sum_error_%": of_sum, "critical_path_error_%": of_path}
            for family, of_sum, of_path in (("a", 0.0, 50.0), ("a", 0.0, 60.0), ("b", -30.0, 4.0), ("c", 20.0, -3.0))]
    assert [chosen_by_others(rows, place) for place in range(4)] == ["critical_path", "critical_path", "sum", "sum"]
    assert chosen_by_others(rows[:1], 0) == "sum"
    assert [chosen_by_others(rows, place, ("a",)) for place in range(4)] == ["sum"] * 4
    assert [chosen_by_others(rows, place, ("b",)) for place in range(4)] == [*["critical_path"] * 2, "sum", "critical_path"]


def test_schedules_are_searched_once_for_a_separate_target(workspace: Workspace) -> None:
    """One trial of an elementwise kernel tests the path, but finds no good schedule."""
    needs("tvm", "tvm")
    workspace.models.mkdir(parents=True)
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    write_parsed(workspace, parse(saved(workspace.models / "relu.onnx", nodes, {"x": [8, 256]}, {"y": [8, 256]}, {})))
    update_index(workspace, tvm_flavour())
    with pytest.raises(UserError, match=r"--model gelu: no record of this model under TVM \(analysed: relu\)"):
        tune_kernels(workspace, trials=1, threads=1, models=["gelu"])
    [row] = tune_kernels(workspace, trials=1, threads=1, models=["relu"])
    assert (row["type"], row["trials"]) == ("Relu", 1)
    assert 0 < row["after_ms"] <= row["before_ms"]
    assert tune_kernels(workspace, trials=1, threads=1, models=["relu"]) == []
    assert len(list((workspace.kernel_onnx / tvm_flavour(level=TUNED).name / DATABASE).glob("*.json"))) == 2
    config = CONFIG | {"setting": {"threads": 1, "cores": 1, "level": "tuned"}}
    totals = collect(workspace, validate(config, CollectorConfig, "test"))
    assert (totals["kernel_rows"], totals["model_rows"], totals["failed"]) == (1, 1, [])
    assert [row["model"] for row in target_rows(workspace, str(totals["target"]))] == ["relu"]


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
    target = Target(device_name="x", flavour=local_flavour("cpu"), threads=3, cores=1)
    environment = current_environment(target, limit_mib=100)
    assert (environment.threads, environment.cores, environment.memory_limit_mib) == (3, 1, 100)


def test_one_operator_is_timed_without_a_dataset(workspace: Workspace) -> None:
    """A function of TVM, of the sizes that were asked for, and a whole ONNX file under TVM."""
    needs("tvm", "tvm")
    sample(workspace, OperatorSizes(rows=(6, 6), inner=(32, 32), columns=(24, 24)), 1, ["product"], seed=0)
    (path,) = workspace.kernel_onnx.glob("*/*.tvm")
    assert any(f"in{rows}x32-32x24" in path.stem for rows in ("1x6", "6", "1x2x3"))
    assert (runtime_of(path), runtime_of(Path("model.onnx"))) == ("tvm", "ort")
    effort = Effort(warmup=1, budget_s=0.0, least_runs=5, most_runs=5)
    timing = measure_by("tvm", path, "cpu", workspace, {}, effort)
    assert (timing.runtime, timing.model, len(timing.samples_ms)) == ("tvm", path.stem, 5)
    assert all(0 < sample_ms < 100 for sample_ms in timing.samples_ms)
    with pytest.raises(UserError, match="a function of TVM has fixed sizes"):
        measure_by("tvm", path, "cpu", workspace, {"batch": 2}, effort)
    model = workspace.root / "small.onnx"
    onnx.save(small_model(batch="batch", channels=4, side=8), model)
    assert len(measure_by("tvm", model, "cpu", workspace, {"batch": 2}, effort).samples_ms) == 5


def test_each_setting_is_left_out_once(workspace: Workspace) -> None:
    """Of drawn kernels, measured under three settings of threads and cores."""
    needs("tvm", "tvm")
    settings = ((1, 1), (2, 1), (1, 0))
    assert sample(workspace, SMALL, 10, list(DRAWS), seed=0).total() >= 8
    for threads, cores in settings:
        collect(workspace, validate(CONFIG | {"setting": {"threads": threads, "cores": cores, "memory_limit_mib": 512}},
                                    CollectorConfig, "test"))
    seeds = read_seeds(workspace.kernel_onnx / tvm_flavour().name)
    for target, measured in settings_of(workspace, "fused").items():
        header = read_header(workspace.dataset(target))
        assert header.environment is not None
        assert (header.environment.threads, header.environment.memory_limit_mib) == (header.target.threads, 512)
        assert {entry.kernel.id for entry in read_kernels(workspace.dataset(target))} == set(seeds)
        assert measured.load[0, 0] == math.log2(1 + header.target.threads)
    files.write_text(workspace.root / "training.yaml", "folds: 2\nxgboost: {trees: 30}\nforest: {trees: 3}\n")
    rows = json.loads(printed("training/held_out.py", "--by", "setting", "--workspace", workspace.root, "--config",
                              workspace.root / "training.yaml", "--json"))
    assert sorted((row["threads"], row["cores"]) for row in rows) == sorted(settings)
    assert {(row["kernels"], row["learned_from"]) for row in rows} == {("known", 2 * rows[0]["count"])}
    assert all(0 < row["median_%"] < math.inf for row in rows)
    with pytest.raises(UserError, match="0 settings of level tuned were measured"):
        settings_of(workspace, "tuned")
    # The error of kernels that no other setting has is not only the setting's, so they have a separate row
    complete, *others = rows_of = settings_of(workspace, "fused")
    rows_of |= {name: rows_of[name].rows(np.arange(len(rows_of[name])) < 5) for name in others}
    known, new = setting_error_rows(rows_of, complete, QUICK)
    shared = set(rows_of[complete].ids) & {kernel for name in others for kernel in rows_of[name].ids}
    assert [(row["kernels"], row["count"], row["learned_from"]) for row in (known, new)] == [
        ("known", len(shared), 10), ("new", len(rows_of[complete]) - len(shared), 10)]
