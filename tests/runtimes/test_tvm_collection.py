"""Kernels and models measured under TVM by the collector, with its real worker, and predictors trained on their dataset."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import run_script
from onnx import TensorProto, helper, numpy_helper
from optional_packages import needs
from recipe_commands import configs_of

from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.graph_model.simulation.dag import build_dag, calculate_latency
from hase.inference.sum_and_path import check_families, chosen_by_others, kernel_times, target_rows
from hase.learned.kernels.measured import measured_times
from hase.model_zoo.exporting.zoo_config import ZooConfig
from hase.records.dataset_files import kernel_table_path, model_table_path, read_header, read_journal
from hase.records.kernel_record_files import read_model_records, record_path, update_index
from hase.records.measurement import Effort
from hase.runtimes.protocol import Request, RuntimeSetting, Worker
from hase.runtimes.tvm.compiling import TUNED, function_path, tvm_flavour
from hase.runtimes.tvm.operator_sampler import OperatorSizes
from hase.runtimes.tvm.recording import parse, write_parsed
from hase.runtimes.tvm.tune_kernels import DATABASE, tune_kernels
from hase.runtimes.tvm.worker import PLACEMENTS
from hase.utils.config import validate
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

pytestmark = [pytest.mark.measuring, pytest.mark.slow]

CONFIG = {"device": "cpu", "runtime": "tvm", "levels": [0.0], "window_s": 0.2, "attempts": 1, "patience_s": 0,
          "kernel": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.02, "least_runs": 3, "most_runs": 5},
          "model": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.05, "least_runs": 4, "most_runs": 10},
          "setting": {"threads": 1, "cores": 1}}


def layers(path: Path, depth: int, width: int = 256) -> Path:
    """Fully connected layers with Relu."""
    nodes, weights = [], []
    for number in range(depth):
        nodes += [helper.make_node("MatMul", [f"x{number}", f"w{number}"], [f"p{number}"]),
                  helper.make_node("Relu", [f"p{number}"], [f"x{number + 1}"])]
        weights.append(numpy_helper.from_array(np.full((width, width), 0.01, np.float32), f"w{number}"))
    graph = helper.make_graph(nodes, "layers", [helper.make_tensor_value_info("x0", TensorProto.FLOAT, [16, width])],
                              [helper.make_tensor_value_info(f"x{depth}", TensorProto.FLOAT, [16, width])], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, dict[str, object]]:
    """Two networks, taken apart and measured; the larger one needs more memory than the limit."""
    needs("tvm", "requirements-tvm.txt")
    workspace = Workspace(tmp_path_factory.mktemp("tvm"))
    workspace.models.mkdir(parents=True)
    for name, depth, width in (("small", 3, 256), ("large", 2, 1024)):
        write_parsed(workspace, parse(layers(workspace.models / f"{name}.onnx", depth, width)))
    update_index(workspace, tvm_flavour())
    config = validate(CONFIG | {"setting": {"threads": 1, "cores": 1, "memory_limit_mib": 4}}, CollectorConfig, "test")
    return workspace, collect(workspace, config)


def test_the_dataset_of_a_tvm_target(measured: tuple[Workspace, dict[str, object]]) -> None:
    workspace, totals = measured
    header = read_header(workspace.dataset(str(totals["target"])))
    assert (header.target.flavour.runtime, header.target.threads, header.target.cores, header.labels) == ("tvm", 1, 1, ("run",))
    assert str(totals["target"]).endswith(f"-1t1c-{tvm_flavour().name}")
    with kernel_table_path(workspace.dataset(header.target.name)).open() as lines:
        rows = list(csv.DictReader(lines))
    assert {row["OpType"] for row in rows} == {"MatMul_Relu"}
    assert {row["Status"] for row in rows} == {"ok"}
    times = {row["Input_Shape"]: float(row["run_median_ms"]) for row in rows}
    assert times["16x1024;1024x1024"] > 4 * times["16x256;256x256"] > 0


def test_the_sum_of_a_chain_is_its_longest_path(measured: tuple[Workspace, dict[str, object]]) -> None:
    """inference/sum_and_path.py measures the error of both for the whole network, which a busy machine changes."""
    workspace, totals = measured
    folder = workspace.dataset(str(totals["target"]))
    with kernel_table_path(folder).open() as lines:
        times = {row["Kernel_ID"]: float(row["run_median_ms"]) for row in csv.DictReader(lines)}
    [record] = [entry for entry in read_model_records(workspace, tvm_flavour()) if entry.model == "small"]
    dag = build_dag(record)
    by_node = {node.name: times[node.kernel_id] for node in record.nodes}
    total_ms = calculate_latency(dag, by_node)
    assert total_ms == pytest.approx(sum(by_node.values()))
    assert total_ms == pytest.approx(calculate_latency(dag, by_node, "critical_path"))
    with model_table_path(folder).open() as lines:
        rows = {row["Model"]: row for row in csv.DictReader(lines)}
    assert float(rows["small"]["median_ms"]) > 0


def test_memory_is_reported_and_a_limit_refuses(measured: tuple[Workspace, dict[str, object]]) -> None:
    workspace, totals = measured
    by_model = {m.id: m for block in read_journal(workspace.dataset(str(totals["target"]))) for m in block.measurements
                if m.subject == "model"}
    facts = by_model["small"].facts
    assert facts["weights_mib"] == pytest.approx(3 * 256 * 256 * 4 / 2**20)
    assert facts["activations_mib"] == pytest.approx(2 * 16 * 256 * 4 / 2**20, rel=0.01)  # two layers' outputs at a time
    assert float(facts["peak_memory_mib"]) > float(facts["weights_mib"])
    assert by_model["large"].status == "failed"
    assert "refused, since it needs 8.2" in by_model["large"].error
    assert "the limit is 4 MiB" in by_model["large"].error
    assert totals["failed"] == ["large"]


def test_a_worker_keeps_its_setting_and_reports_errors(measured: tuple[Workspace, dict[str, object]],
                                                       tmp_path: Path) -> None:
    workspace, _ = measured
    [record] = [entry for entry in read_model_records(workspace, tvm_flavour()) if entry.model == "small"]
    path = function_path(workspace, record.flavour, record.nodes[0].kernel_id)
    request = Request(do="alone", device="cpu", effort=Effort(budget_s=0.01, least_runs=12), paths=(str(path),))
    with Worker(60, "tvm", RuntimeSetting(level="fused", threads=2, cores=1)) as worker:
        # At least three in each place, however slow the machine is.
        assert len(worker.ask(request).measurements[0].samples_ms) >= 3 * PLACEMENTS
        assert "no carrier" in worker.ask(request.model_copy(update={"do": "carrier"})).error
        assert "no such function" in worker.ask(request.model_copy(update={"paths": (str(tmp_path / "x.tvm"),)})).error
        deeper = parse(layers(tmp_path / "small.onnx", 4))["fused"].record
        model = request.model_copy(update={"do": "model", "paths": (str(tmp_path / "small.onnx"),),
                                           "record": str(record_path(workspace, record.flavour, "small"))})
        assert len(deeper.nodes) == 4
        assert "TVM's graph is not the one in its record" in worker.ask(model).error
    with Worker(60, "tvm", RuntimeSetting(level="fused", cores=10_000)) as worker:
        assert "cores: 10000, but this process may use" in worker.ask(request).error


def test_a_config_asks_only_for_what_tvm_has() -> None:
    config = validate(CONFIG | {"labels": ["run", "kernel_time"]}, CollectorConfig, "test")
    with pytest.raises(UserError, match="labels: kernel_time: TVM has no such labels on cpu; it has run"):
        config.labels_on("cpu")
    assert validate(CONFIG, CollectorConfig, "test").variants_on("cpu") == ()
    assert validate(CONFIG | {"energy_s": 3}, CollectorConfig, "test").with_energy_on("cpu").energy_s == 0


def test_sum_and_path_in_one_table(measured: tuple[Workspace, dict[str, object]]) -> None:
    """The network that was refused has no time, so it has no row."""
    workspace, totals = measured
    done = run_script("inference/sum_and_path.py", "--workspace", workspace.root, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    [row] = report["models"]
    assert (row["model"], row["network"], row["nodes"], row["chain"]) == ("small", "fully connected", 3, 3)
    assert row["sum_ms"] == pytest.approx(row["critical_path_ms"])
    assert row["sum_error_%"] == pytest.approx(100 * (row["sum_ms"] / row["whole_ms"] - 1))
    assert row["peak_MiB"] > 0.75
    assert [(target["target"], target["models"]) for target in report["targets"]] == [(totals["target"], 1)]
    assert row["scale"] == "small"
    [small] = report["scales"]
    assert small == {"target": totals["target"], "scale": "small"} | report["targets"][0]


def test_families_that_choose_may_be_missing_under_one_target_but_not_under_all(
        measured: tuple[Workspace, dict[str, object]]) -> None:
    """A target with searched schedules often has fewer whole models than the others of the same table."""
    workspace, totals = measured
    [row] = target_rows(workspace, str(totals["target"]), ["vgg"])
    assert (row["model"], row["used"]) == ("small", "sum")
    done = run_script("inference/sum_and_path.py", "--workspace", workspace.root, "--choose-by", "small", "--choose-by", "vgg")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: --choose-by: no target has measured models of vgg; there are: small"
    check_families([[row], [row | {"family": "vgg"}]], ["small", "vgg"])


def test_predictions_and_the_evaluator(tmp_path: Path) -> None:
    """The model is taken apart by TVM for the prediction, and run under the target's setting for the comparison."""
    needs("tvm", "requirements-tvm.txt")
    workspace, widths = Workspace(tmp_path), (64, 96, 128, 160, 192, 256)
    workspace.models.mkdir(parents=True)
    for width in widths:
        write_parsed(workspace, parse(layers(workspace.models / f"wide{width}.onnx", 3, width)))
    update_index(workspace, tvm_flavour())
    target = str(collect(workspace, validate(CONFIG, CollectorConfig, "test"))["target"])
    for script in ("training/train_kernel_model.py", "training/fit_composition.py"):
        done = run_script(script, "--workspace", workspace.root, "--target", target)
        assert done.returncode == 0, done.stderr
    done = run_script("inference/predict_model_latency.py", "--workspace", workspace.root, "--target", target,
                      "--model", "wide256.onnx", "--json")
    assert done.returncode == 0, done.stderr
    [answer] = json.loads(done.stdout)
    assert answer["flavour"] == tvm_flavour().name
    assert answer["latency_ms"] > 0
    held_mib = 3 * 256 * 256 * 4 / 2**20  # weights
    assert held_mib < answer["memory"]["peak_mib"] < held_mib + 4 * 16 * 256 * 4 / 2**20
    done = run_script("evaluator.py", "--workspace", workspace.root, "--target", target, "--rounds", "1", "--json",
                      "wide64.onnx", "wide256.onnx")
    assert done.returncode == 0, done.stderr
    rows = {row["model"]: row for row in json.loads(done.stdout)["comparisons"]}
    assert rows["wide256"]["measured_ms"] > rows["wide64"]["measured_ms"] > 0
    assert rows["wide256"]["measured_memory_mib"] == pytest.approx(answer["memory"]["peak_mib"], rel=0.1)


def test_the_other_models_choose_the_composition() -> None:
    """Errors of the row and of its family do not count."""
    rows = [{"family": family, "sum_error_%": of_sum, "critical_path_error_%": of_path}
            for family, of_sum, of_path in (("a", 0.0, 50.0), ("a", 0.0, 60.0), ("b", -30.0, 4.0), ("c", 20.0, -3.0))]
    assert [chosen_by_others(rows, place) for place in range(4)] == ["critical_path", "critical_path", "sum", "sum"]
    assert chosen_by_others(rows[:1], 0) == "sum"
    assert [chosen_by_others(rows, place, ("a",)) for place in range(4)] == ["sum"] * 4
    assert [chosen_by_others(rows, place, ("b",)) for place in range(4)] == [*["critical_path"] * 2, "sum", "critical_path"]


def test_a_kernel_without_a_time_is_named(measured: tuple[Workspace, dict[str, object]]) -> None:
    workspace, _ = measured
    [record] = [entry for entry in read_model_records(workspace, tvm_flavour()) if entry.model == "small"]
    with pytest.raises(UserError, match="small: 1 of 1 kernels were not measured, MatMul_Relu_"):
        kernel_times(record, {}, "run")


def elementwise(path: Path, *operators: str) -> Path:
    """A model of operators with one input each, one after another."""
    names = ["x", *operators]
    nodes = [helper.make_node(operator, [before], [operator]) for before, operator in pairwise(names)]
    graph = helper.make_graph(nodes, "model",
                              [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 1024])],
                              [helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, [64, 1024])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


def test_schedules_are_searched_once_for_a_separate_target(tmp_path: Path) -> None:
    """Two trials of an elementwise kernel test the path, but find no good schedule. In the sum of a network, a kernel that was
    not searched counts with its time without a search."""
    needs("tvm", "requirements-tvm.txt")
    workspace = Workspace(tmp_path)
    workspace.models.mkdir(parents=True)
    write_parsed(workspace, parse(elementwise(workspace.models / "relu.onnx", "Relu")))
    write_parsed(workspace, parse(elementwise(workspace.models / "both.onnx", "Relu", "Softmax")))
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
    tuned = validate(CONFIG | {"setting": setting | {"level": "tuned"}}, CollectorConfig, "test")
    totals = collect(workspace, tuned)
    assert str(totals["target"]).endswith("-tuned")
    assert (totals["kernel_rows"], totals["model_rows"], totals["failed"]) == (1, 2, [])
    assert [row["model"] for row in target_rows(workspace, str(totals["target"]))] == ["relu"]  # Softmax has no time
    fused = str(collect(workspace, validate(CONFIG | {"setting": setting}, CollectorConfig, "test"))["target"])
    relu_softmax, relu = target_rows(workspace, str(totals["target"]))
    assert (relu_softmax["unsearched"], relu["unsearched"]) == (1, 0)
    [softmax_ms] = [times["run"] for name, times in measured_times(workspace, fused).items() if name.startswith("Softmax")]
    assert relu_softmax["sum_ms"] == pytest.approx(relu["sum_ms"] + softmax_ms)


def test_the_recipes_measure_settings(tmp_path: Path) -> None:
    """Three settings, one with searched schedules, and a GPU without and with them: each is a separate target. Of the twelve
    networks, four choose the composition."""
    configs = [config for name in ("run.sh", "gpu.sh") for config in configs_of(f"recipes/tvm/{name}", tmp_path)]
    collected = [config for config in configs if isinstance(config, CollectorConfig)]
    settings = [(config.device, config.runtime, config.setting) for config in collected]
    assert [(device, runtime, setting.level, setting.threads, setting.cores) for device, runtime, setting in settings] == [
        ("cpu", "tvm", "fused", 2, 2), ("cpu", "tvm", "fused", 2, 1), ("cpu", "tvm", "fused", 1, 1),
        ("cpu", "tvm", "tuned", 2, 2), ("cpu", "ort", "", 0, 0), ("cuda", "tvm", "fused", 0, 0),
        ("cuda", "tvm", "tuned", 0, 0)]
    assert {config.levels for config in collected} == {(0.0,)}
    assert max(config.most_gflop for config in configs if isinstance(config, OperatorSizes)) == 20
    assert [len(config.models) for config in configs if isinstance(config, ZooConfig)] == [8 + 4, 8 + 4]
