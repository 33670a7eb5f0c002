"""Kernels and models measured under TVM by the collector, with its real worker, and predictors trained on their dataset."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command import printed, run_script
from onnx import helper
from onnx_files import layers, saved
from optional_packages import needs

from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.inference.sum_and_path import check_families, chosen_by_others, kernel_times, target_rows
from hase.learned.kernels.measured import measured_times
from hase.records.dataset_files import header_path, kernel_table_path, read_header, read_journal, read_table
from hase.records.kernel_record import ModelRecord
from hase.records.kernel_record_files import read_model_records, record_path, update_index
from hase.records.measurement import Effort
from hase.runtimes.protocol import Request, RuntimeSetting, Worker
from hase.runtimes.tvm.compiling import TUNED, function_path, tvm_flavour
from hase.runtimes.tvm.recording import parse, write_parsed
from hase.runtimes.tvm.tune_kernels import DATABASE, tune_kernels
from hase.runtimes.tvm.worker import PLACEMENTS
from hase.utils import files
from hase.utils.config import validate
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target
from hase.utils.paths import Workspace

pytestmark = [pytest.mark.measuring, pytest.mark.slow]

CONFIG = {"device": "cpu", "runtime": "tvm", "levels": [0.0], "window_s": 0.2, "attempts": 1, "patience_s": 0,
          "kernel": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.02, "least_runs": 3, "most_runs": 5},
          "model": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.05, "least_runs": 4, "most_runs": 10},
          "setting": {"threads": 1, "cores": 1}}


class Measured(NamedTuple):
    """A workspace, the target that was measured, and the record of the model `small`."""

    workspace: Workspace
    target: str
    record: ModelRecord


class Learned(NamedTuple):
    """A workspace, and the two targets that have predictors in it."""

    workspace: Workspace
    target: str
    gpu: Target


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Two networks, taken apart and measured; the larger one needs more memory than the limit."""
    needs("tvm", "requirements-tvm.txt")
    workspace = Workspace(tmp_path_factory.mktemp("tvm"))
    workspace.models.mkdir(parents=True)
    for name, depth, width in (("small", 3, 256), ("large", 2, 1024)):
        write_parsed(workspace, parse(layers(workspace.models / f"{name}.onnx", depth, width)))
    update_index(workspace, tvm_flavour())
    config = validate(CONFIG | {"setting": {"threads": 1, "cores": 1, "memory_limit_mib": 4}}, CollectorConfig, "test")
    totals = collect(workspace, config)
    assert totals["failed"] == ["large"]
    [record] = [entry for entry in read_model_records(workspace, tvm_flavour()) if entry.model == "small"]
    return Measured(workspace, totals["target"], record)


def test_the_dataset_of_a_tvm_target(measured: Measured) -> None:
    """Memory is reported, and a limit refuses a model."""
    folder = measured.workspace.dataset(measured.target)
    header = read_header(folder)
    assert (header.target.flavour.runtime, header.target.threads, header.target.cores, header.labels) == ("tvm", 1, 1, ("run",))
    assert measured.target.endswith(f"-1t1c-{tvm_flavour().name}")
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


def test_a_worker_keeps_its_setting_and_reports_errors(measured: Measured, tmp_path: Path) -> None:
    record = measured.record
    path = function_path(measured.workspace, record.flavour, record.nodes[0].kernel_id)
    request = Request(do="alone", device="cpu", effort=Effort(budget_s=0.01, least_runs=12), paths=(str(path),))
    deeper = request.model_copy(update={"do": "model", "paths": (str(layers(tmp_path / "small.onnx", 4)),),
                                        "record": str(record_path(measured.workspace, record.flavour, "small"))})
    with Worker(60, "tvm", RuntimeSetting(level="fused", threads=2, cores=1)) as worker:
        # at least three in each place, however slow the machine is
        assert len(worker.ask(request).measurements[0].samples_ms) >= 3 * PLACEMENTS
        assert "no carrier" in worker.ask(request.model_copy(update={"do": "carrier"})).error
        assert "no such function" in worker.ask(request.model_copy(update={"paths": (str(tmp_path / "x.tvm"),)})).error
        assert "TVM's graph is not the one in its record" in worker.ask(deeper).error
    with Worker(60, "tvm", RuntimeSetting(level="fused", cores=10_000)) as worker:
        assert "cores: 10000, but this process may use" in worker.ask(request).error


def test_sum_and_path_in_one_table(measured: Measured) -> None:
    """The network that was refused has no time, so it has no row. Families that choose the composition may be missing under
    one target, which often has fewer whole models with searched schedules, but not under all."""
    command = ("inference/sum_and_path.py", "--workspace", measured.workspace.root)
    report = json.loads(printed(*command, "--json"))
    [row] = report["models"]
    assert (row["model"], row["network"], row["scale"], row["nodes"], row["chain"]) == (
        "small", "fully connected", "small", 3, 3)
    assert row["sum_ms"] == pytest.approx(row["critical_path_ms"])
    assert row["sum_error_%"] == pytest.approx(100 * (row["sum_ms"] / row["whole_ms"] - 1))
    assert row["peak_MiB"] > 0.75
    assert [(target["target"], target["models"]) for target in report["targets"]] == [(measured.target, 1)]
    assert report["scales"] == [{"target": measured.target, "scale": "small"} | report["targets"][0]]
    [row] = target_rows(measured.workspace, measured.target, ["vgg"])
    assert (row["model"], row["used"]) == ("small", "sum")
    check_families([[row], [row | {"family": "vgg"}]], ["small", "vgg"])
    done = run_script(*command, "--choose-by", "small", "--choose-by", "vgg")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: --choose-by: no target has measured models of vgg; there are: small"
    with pytest.raises(UserError, match="small: 1 of 1 kernels were not measured, MatMul_Relu_"):
        kernel_times(measured.record, {}, "run")


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """Networks measured on this CPU. A made-up GPU's dataset is a copy: there is no GPU. Both have predictors."""
    needs("tvm", "requirements-tvm.txt")
    workspace = Workspace(tmp_path_factory.mktemp("learned"))
    workspace.models.mkdir(parents=True)
    for width in (64, 96, 128, 160, 192, 256):
        path = layers(workspace.models / f"wide{width}.onnx", 3, width)
        for device in ("cpu", "cuda"):
            write_parsed(workspace, parse(path, device=device))
    for device in ("cpu", "cuda"):
        update_index(workspace, tvm_flavour(device))
    target = str(collect(workspace, validate(CONFIG, CollectorConfig, "test"))["target"])
    gpu = Target(device_name="NVIDIA made up", flavour=tvm_flavour("cuda"))
    folder = workspace.dataset(gpu.name)
    shutil.copytree(workspace.dataset(target), folder)
    files.write_json(header_path(folder), read_header(folder).model_copy(update={"target": gpu}))
    for name in (target, gpu.name):
        for script in ("training/train_kernel_model.py", "training/fit_composition.py"):
            done = run_script(script, "--workspace", workspace.root, "--target", name, "--set", "folds=2")
            assert done.returncode == 0, done.stderr
    return Learned(workspace, target, gpu)


def predicted(learned: Learned, target: str) -> dict[str, Any]:
    answers: list[dict[str, Any]] = json.loads(printed(
        "inference/predict_model_latency.py", "--workspace", learned.workspace.root, "--target", target,
        "--model", "wide256.onnx", "--json"))
    return answers[0]


def test_predictions_and_the_evaluator(learned: Learned) -> None:
    """The model is taken apart by TVM for the prediction, and run under the target's setting for the comparison."""
    answer = predicted(learned, learned.target)
    assert answer["flavour"] == tvm_flavour().name
    assert answer["latency_ms"] > 0
    held_mib = 3 * 256 * 256 * 4 / 2**20  # weights
    assert held_mib < answer["memory"]["peak_mib"] < held_mib + 4 * 16 * 256 * 4 / 2**20
    report = json.loads(printed("evaluator.py", "--workspace", learned.workspace.root, "--target", learned.target,
                                "--rounds", "1", "--json", "wide64.onnx", "wide256.onnx"))
    rows = {row["model"]: row for row in report["comparisons"]}
    assert rows["wide256"]["measured_ms"] > rows["wide64"]["measured_ms"] > 0
    assert rows["wide256"]["measured_memory_mib"] == pytest.approx(answer["memory"]["peak_mib"], rel=0.1)


def test_a_gpu_is_a_target_that_is_learned_and_predicted(learned: Learned) -> None:
    kernels = learned.workspace.kernel_onnx
    assert RuntimeSetting.of(learned.gpu, kernels) == RuntimeSetting(
        level="fused", kernels=str(kernels / learned.gpu.flavour.name))
    answer = predicted(learned, learned.gpu.name)
    assert answer["flavour"] == tvm_flavour("cuda").name
    low_ms, high_ms = answer["interval_ms"]
    assert 0 < low_ms < answer["latency_ms"] < high_ms


def test_the_other_models_choose_the_composition() -> None:
    """Errors of the row and of its family do not count."""
    rows = [{"family": family, "sum_error_%": of_sum, "critical_path_error_%": of_path}
            for family, of_sum, of_path in (("a", 0.0, 50.0), ("a", 0.0, 60.0), ("b", -30.0, 4.0), ("c", 20.0, -3.0))]
    assert [chosen_by_others(rows, place) for place in range(4)] == ["critical_path", "critical_path", "sum", "sum"]
    assert chosen_by_others(rows[:1], 0) == "sum"
    assert [chosen_by_others(rows, place, ("a",)) for place in range(4)] == ["sum"] * 4
    assert [chosen_by_others(rows, place, ("b",)) for place in range(4)] == [*["critical_path"] * 2, "sum", "critical_path"]


def test_schedules_are_searched_once_for_a_separate_target(tmp_path: Path) -> None:
    """Two trials of an elementwise kernel test the path, but find no good schedule. In the sum of a network, a kernel that was
    not searched counts with its time without a search."""
    needs("tvm", "requirements-tvm.txt")
    workspace = Workspace(tmp_path)
    workspace.models.mkdir(parents=True)
    relu, softmax = helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Softmax", ["r"], ["y"])
    for name, nodes, output in (("relu", [relu], "r"), ("both", [relu, softmax], "y")):
        path = saved(workspace.models / f"{name}.onnx", nodes, {"x": [64, 1024]}, {output: [64, 1024]}, {})
        write_parsed(workspace, parse(path))
    update_index(workspace, tvm_flavour())
    with pytest.raises(UserError, match=r"--model gelu: no record of this model under TVM \(analysed: both, relu\)"):
        tune_kernels(workspace, trials=2, threads=1, models=["gelu"])
    [row] = tune_kernels(workspace, trials=2, threads=1, models=["relu"])
    assert row["type"] == "Relu"
    assert 0 < row["after_ms"] <= row["before_ms"]
    assert row["trials"] >= 1
    assert tune_kernels(workspace, trials=2, threads=1, models=["relu"]) == []
    assert len(list((workspace.kernel_onnx / tvm_flavour(level=TUNED).name / DATABASE).glob("*.json"))) == 2
    setting = {"threads": 1, "cores": 1}
    totals = collect(workspace, validate(CONFIG | {"setting": setting | {"level": "tuned"}}, CollectorConfig, "test"))
    assert str(totals["target"]).endswith("-tuned")
    assert (totals["kernel_rows"], totals["model_rows"], totals["failed"]) == (1, 2, [])
    assert [row["model"] for row in target_rows(workspace, str(totals["target"]))] == ["relu"]  # Softmax has no time
    fused = str(collect(workspace, validate(CONFIG | {"setting": setting}, CollectorConfig, "test"))["target"])
    of_both, of_relu = target_rows(workspace, str(totals["target"]))
    assert (of_both["unsearched"], of_relu["unsearched"]) == (1, 0)
    [softmax_ms] = [times["run"] for name, times in measured_times(workspace, fused).items() if name.startswith("Softmax")]
    assert of_both["sum_ms"] == pytest.approx(of_relu["sum_ms"] + softmax_ms)
