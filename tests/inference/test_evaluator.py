"""The evaluator: predicted against really measured and against recorded latencies, and how it scores them."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from command import run_script
from conftest import endless
from onnx import TensorProto, helper, numpy_helper
from prometheus_stand import prometheus
from trained_workspace import HELD_OUT, METRIC, OPSETS, conv_net, model_ms

from hase.benchmark.collecting.config import CollectorConfig, StressConfig
from hase.graph_model.simulation.sharing import CoRunner
from hase.inference import predict
from hase.inference.evaluation.comparison import compare, models_by_warning, percent, summarise, summary_table, table
from hase.inference.evaluation.evaluate import EvaluationLoads, MeasuringPlan, evaluate, measure_here
from hase.inference.evaluation.models import EvaluatedModel, Failures, models_in_dataset
from hase.inference.live.load import InferenceConfig
from hase.inference.live.prometheus import PrometheusConfig
from hase.inference.prediction.conditions import RunMode
from hase.ort_analysis.graph.analysis import analyze
from hase.records.dataset_files import header_path, journal_path, read_header, read_journal
from hase.records.kernel_record_files import read_model_records
from hase.records.measurement import Background, Measurement
from hase.runtimes import flavour_of, local_target
from hase.runtimes.protocol import Worker
from hase.utils import files
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target, instruction_set
from hase.utils.paths import Workspace
from hase.utils.text import first_and_count

pytestmark = [pytest.mark.measuring, pytest.mark.slow]

TARGET = local_target("cpu").name
QUICK = MeasuringPlan(rounds=2, budget_s=0.02)


@pytest.fixture(scope="module")
def workspace(trained_workspace: Workspace) -> Workspace:
    return trained_workspace


def shell(workspace: Workspace, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("evaluator.py", "--workspace", workspace.root, *arguments)


def test_a_model_is_predicted_and_measured(workspace: Workspace) -> None:
    names = [Path("anet_c16.onnx"), Path(f"{HELD_OUT}_c40.onnx")]
    evaluation = evaluate(workspace, names, target=TARGET, plan=QUICK)
    assert [row.model for row in evaluation.comparisons] == ["anet_c16", f"{HELD_OUT}_c40"]
    assert [row.held_out for row in evaluation.comparisons] == [False, True]
    for row in evaluation.comparisons:
        assert row.predicted_ms == predict(f"{row.model}.onnx", target=TARGET, workspace=workspace).latency_ms
        assert row.strict_ms == predict(f"{row.model}.onnx", target=TARGET, workspace=workspace, strict=True).latency_ms
        assert row.measured_ms > 0
        assert row.runs >= 2 * 3
        assert row.error == pytest.approx(row.predicted_ms / row.measured_ms - 1)
        assert row.strict_error == pytest.approx(row.strict_ms / row.measured_ms - 1)
    assert (evaluation.source, evaluation.way) == ("measured", "with tensors on the device")
    assert (evaluation.load, evaluation.failures) == ("idle", {})
    assert {summary.group: summary.lookup.count for summary in evaluation.summaries} == {
        "all models": 2, "not held out": 1, "held out": 1}


def test_host_copies_are_measured_and_reported(workspace: Workspace) -> None:
    run_mode = RunMode(io="host")
    evaluation = evaluate(workspace, [Path("anet_c8.onnx")], target=TARGET, run_mode=run_mode, plan=QUICK)
    assert evaluation.way == "with tensors on the host"
    recorded = evaluate(workspace, [], target=TARGET, recorded=True, run_mode=run_mode)
    assert {row.level for row in recorded.comparisons} == {0.0}
    assert recorded.summaries[0].lookup.mape < 0.05


def test_dynamic_models_have_a_row_per_size(workspace: Workspace) -> None:
    evaluation = evaluate(workspace, [Path("dynnet.onnx"), Path("anet_c16.onnx")], dims={"batch": [1, 4]},
                               target=TARGET, plan=QUICK)
    assert [(row.model, row.batch) for row in evaluation.comparisons] == [
        ("dynnet@batch=1,dynamic", 1), ("dynnet@batch=4,dynamic", 4), ("anet_c16", 1)]
    with pytest.raises(UserError, match="height"):
        evaluate(workspace, [Path("dynnet.onnx"), Path("anet_c16.onnx")], target=TARGET,
                           dims={"batch": [1], "height": [3]})


def test_a_failing_model_costs_only_itself(workspace: Workspace, tmp_path: Path) -> None:
    conv_net(tmp_path / "good.onnx")
    (tmp_path / "broken.onnx").write_text("no model")
    conv_net(tmp_path / "open.onnx", batch="batch")
    evaluation = evaluate(workspace, [tmp_path], target=TARGET, plan=QUICK)
    assert [row.model for row in evaluation.comparisons] == ["good"]
    assert set(evaluation.failures) == {"broken.onnx", "open.onnx"}
    (tmp_path / "good.onnx").unlink()
    with pytest.raises(UserError, match=r"broken\.onnx, open\.onnx failed"):
        evaluate(workspace, [tmp_path], target=TARGET)


@pytest.mark.skipif(not instruction_set().startswith("avx"), reason="only x86 traps this division")
def test_a_model_that_takes_its_process_down_costs_only_itself(workspace: Workspace, tmp_path: Path) -> None:
    """A real one: a division whose quotient is no 32-bit number (x is 0, x - 1 divides)."""
    constants = {"one": np.ones(1, np.int32), "least": np.full(1, -2**31, np.int32)}
    graph = helper.make_graph(
        [helper.make_node("Sub", ["x", "one"], ["d"]), helper.make_node("Div", ["least", "d"], ["y"])], "divides",
        [helper.make_tensor_value_info("x", TensorProto.INT32, [1])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [1])],
        [numpy_helper.from_array(values, name) for name, values in constants.items()])
    onnx.save(helper.make_model(graph, opset_imports=OPSETS, ir_version=10), tmp_path / "divides.onnx")
    conv_net(tmp_path / "good.onnx")
    done = shell(workspace, tmp_path, "--rounds", "2", "--budget-s", "0.02", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert [row["model"] for row in report["comparisons"]] == ["good"]
    assert report["comparisons"][0]["runs"] >= 2 * 3
    assert set(report["failures"]) == {"divides"}
    assert "SIGFPE" in report["failures"]["divides"]
    assert "1 failed: divides" in done.stderr
    assert "Traceback" not in done.stderr
    written = json.loads((workspace.evaluation / TARGET / "evaluation.json").read_text())
    assert written["failures"] == report["failures"]


def test_a_model_that_never_ends_times_out(tmp_path: Path) -> None:
    """A real loop without an end."""
    endless(tmp_path / "endless.onnx")
    model, failures = EvaluatedModel(analyze(tmp_path / "endless.onnx", "cpu"), tmp_path / "endless.onnx"), Failures()
    with Worker(60) as worker:
        worker.canary_ms("cpu")  # starting the process does not count here
        worker.timeout_s = 1
        measure_here([model], worker, "cpu", RunMode(), QUICK, 0.0, failures)
    assert (model.failed, model.samples_ms) == (True, [])
    assert failures == {"endless": "endless: while it was measured: no answer within 1 s; --timeout-s gives it longer"}


def test_recorded_measurements_are_compared_level_by_level(workspace: Workspace) -> None:
    evaluation = evaluate(workspace, [], target=TARGET, recorded=True)
    assert len(evaluation.comparisons) == 2 * 19
    idle = next(row for row in evaluation.comparisons if row.model == "bnet_c32" and row.level == 0)
    loaded = next(row for row in evaluation.comparisons if row.model == "bnet_c32" and row.level == 0.5)
    record = analyze(workspace.models / "bnet_c32.onnx", "cpu")
    assert idle.measured_ms == pytest.approx(model_ms(record), rel=1e-5)
    assert idle.spread == pytest.approx(0.1)  # samples at 0.9, 1.0 and 1.1 of the median
    assert abs(idle.error) < 0.03  # all kernels looked up, α and β found again
    assert loaded.measured_ms == pytest.approx(model_ms(record, 0.5), rel=1e-5)
    assert loaded.predicted_ms == predict(record, target=TARGET, workspace=workspace, load={METRIC: 0.5}).latency_ms
    assert loaded.measured_share == 0
    held_out = [row for row in evaluation.comparisons if row.held_out]
    assert {row.model for row in held_out} == {f"{HELD_OUT}_c40"}
    assert all(row.measured_memory_mib is None for row in evaluation.comparisons)
    errors = [abs(row.error) for row in evaluation.comparisons if row.level == 0]
    of_all = next(summary for summary in evaluation.summaries if summary.group == "all models" and summary.level == 0)
    assert of_all.lookup.mape == pytest.approx(sum(errors) / len(errors))
    assert of_all.lookup.worst == pytest.approx(max(errors))
    assert of_all.lookup.within_5 == pytest.approx(sum(error <= 0.05 for error in errors) / len(errors))


def test_other_labels_of_a_model_are_not_its_latency(workspace: Workspace) -> None:
    """On a GPU a block also holds the host's time of a model."""
    folder = workspace.dataset(TARGET)
    block = read_journal(folder)[0]
    name = next(m.id for m in block.measurements if m.subject == "model")
    host = Measurement(subject="model", id=name, label="host", context=name, place="alone", samples_ms=(1e-6,) * 5)
    with_host = block.model_copy(update={"measurements": (*block.measurements, host)})
    records = {record.model: record for record in read_model_records(workspace, flavour_of("cpu"))}
    files.write_text(journal_path(workspace.root / "other"), with_host.model_dump_json() + "\n")
    models = models_in_dataset(workspace.root / "other", {name: records[name]}, (), "latency")
    assert [model.record.model for model in models] == [name]
    assert min(models[0].samples_ms) > 1e-3


def test_sessions_beside_a_disturbed_host_are_not_compared(workspace: Workspace) -> None:
    """On a GPU a model that was timed beside a disturbed host is timed again."""
    folder = workspace.dataset(TARGET)
    block = read_journal(folder)[0]
    latency = next(m for m in block.measurements if m.subject == "model" and m.label == "latency")
    records = {record.model: record for record in read_model_records(workspace, flavour_of("cpu"))}
    times = [(0.3, 9.0), (0.0, 1.0), (0.1, 5.0)]
    lines = [block.model_copy(update={"measurements": (latency.model_copy(update={
        "disturbance": disturbance, "samples_ms": (time, time)}),)}).model_dump_json() + "\n" for disturbance, time in times]
    files.write_text(journal_path(workspace.root / "again"), "".join(lines))
    (model,) = models_in_dataset(workspace.root / "again", records, (), "latency")
    assert model.samples_ms == [1.0, 1.0, 5.0, 5.0]


def test_recorded_measurements_of_named_models(workspace: Workspace) -> None:
    evaluation = evaluate(workspace, [Path("anet_c8.onnx"), Path("dynnet.onnx")], dims={"batch": [1]}, target=TARGET,
                               recorded=True)
    assert {row.model for row in evaluation.comparisons} == {"anet_c8"}
    assert "holds no good measurement" in evaluation.failures["dynnet@batch=1,dynamic"]
    with pytest.raises(UserError, match="dynnet@batch=1,dynamic failed"):
        evaluate(workspace, [Path("dynnet.onnx")], dims={"batch": [1]}, target=TARGET, recorded=True)


def test_another_machine_is_compared_with_records_only(workspace: Workspace, tmp_path: Path) -> None:
    elsewhere = Target.model_validate(local_target("cpu").model_dump() | {"device_name": "Some Other CPU"})
    copy = Workspace(tmp_path)
    shutil.copytree(workspace.kernel_records, copy.kernel_records)
    shutil.copytree(workspace.predictors(TARGET), copy.predictors(elsewhere.name))
    shutil.copytree(workspace.dataset(TARGET), copy.dataset(elsewhere.name))
    for path in (copy.predictors(elsewhere.name) / "predictors.json", copy.dataset(elsewhere.name) / "dataset.json"):
        files.write_json(path, files.with_digest(files.read_json(path) | {"target": elsewhere.model_dump()}))
    with pytest.raises(UserError, match=r"is not this machine .*--recorded"):
        evaluate(copy, [workspace.models / "anet_c8.onnx"])
    assert len(evaluate(copy, [], recorded=True).comparisons) == 2 * 19


def test_the_command_writes_table_json_and_plot(workspace: Workspace) -> None:
    done = shell(workspace, "anet_c16.onnx", "bnet_c64.onnx", "--rounds", "1", "--budget-s", "0.02", "--json")
    assert done.returncode == 0, done.stderr
    folder = workspace.evaluation / TARGET
    printed = json.loads(done.stdout)
    assert printed == json.loads((folder / "evaluation.json").read_text())
    rows = list(csv.DictReader((folder / "evaluation.csv").open()))
    assert [row["model"] for row in rows] == ["anet_c16", "bnet_c64"]
    assert float(rows[0]["predicted_ms"]) == printed["comparisons"][0]["predicted_ms"]
    assert (folder / "evaluation.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "with tensors on the device" in done.stdout


def test_the_command_fails_at_the_end_where_a_model_fails(workspace: Workspace, tmp_path: Path) -> None:
    conv_net(tmp_path / "good.onnx")
    (tmp_path / "broken.onnx").write_text("no model")
    done = shell(workspace, tmp_path, "--rounds", "1", "--budget-s", "0.02")
    assert done.returncode == 1
    assert "good" in done.stdout
    assert "1 failed: broken.onnx" in done.stderr


def test_wrong_usage_is_reported(workspace: Workspace) -> None:
    for arguments in ([], ["anet_c8.onnx", "--rounds", "0"], ["--recorded", "--config", "inference/config.yaml"]):
        assert shell(workspace, *arguments).returncode == 2


def test_recorded_loads_are_separated_by_background(workspace: Workspace, tmp_path: Path) -> None:
    """Measurements beside `net`, which is held out, are twice as slow as those beside `products`."""
    copy = Workspace(tmp_path)
    shutil.copytree(workspace.kernel_records, copy.kernel_records)
    shutil.copytree(workspace.predictors(TARGET), copy.predictors(TARGET))
    idle, loaded = read_journal(workspace.dataset(TARGET))
    beside = loaded.model_copy(update={"background_name": "products"})
    slower = tuple(m.model_copy(update={"samples_ms": tuple(2 * sample for sample in m.samples_ms)})
                   for m in loaded.measurements)
    held_out = loaded.model_copy(update={"background_name": "net", "measurements": slower})
    files.write_text(journal_path(copy.dataset(TARGET)),
                     "".join(block.model_dump_json() + "\n" for block in (idle, beside, held_out)))
    backgrounds = {"products": Background(name="products"), "net": Background(name="net", kind="memory")}
    header = read_header(workspace.dataset(TARGET)).model_copy(
        update={"backgrounds": backgrounds, "held_out_backgrounds": ("net",)})
    files.write_json(header_path(copy.dataset(TARGET)), header)
    evaluation = evaluate(copy, [], target=TARGET, recorded=True)
    assert len(evaluation.comparisons) == 3 * 19
    of_bnet = {comparison.background: comparison for comparison in evaluation.comparisons if comparison.model == "bnet_c32"}
    assert {name: (comparison.level, comparison.background_held_out) for name, comparison in of_bnet.items()} == {
        "": (0.0, False), "products": (0.5, False), "net": (0.5, True)}
    assert of_bnet["net"].measured_ms == pytest.approx(2 * of_bnet["products"].measured_ms)
    assert of_bnet["net"].predicted_ms == of_bnet["products"].predicted_ms  # the metrics beside them are the same
    of_all = {summary.background: summary for summary in evaluation.summaries if summary.group == "all models"}
    assert {name: summary.lookup.count for name, summary in of_all.items()} == {"": 19, "products": 19, "net": 19}
    assert of_all["net"].strict.mape > of_all["products"].strict.mape + 0.3
    shown = [row["background"] for row in summary_table(evaluation.summaries) if row["models"] == "all models"]
    assert shown == ["", "", "net (held out)", "net (held out)", "products", "products"]
    assert {(row["level"], row["background"]) for row in table(evaluation.comparisons)} == {
        (0.0, ""), (0.5, "products"), (0.5, "net (held out)")}


def test_the_evaluator_puts_the_device_under_load_itself(workspace: Workspace) -> None:
    """Idle, then beside a real stressor: the predictions use only metrics of it, and the measurement is a mean."""
    config = CollectorConfig(device="cpu", levels=(0.0, 0.5), window_s=0.3, stress=StressConfig(settle_s=0.2))
    evaluation = evaluate(workspace, [Path("anet_c8.onnx"), Path("anet_c16.onnx")], target=TARGET,
                               loads=EvaluationLoads(under_load=config), plan=MeasuringPlan(rounds=1, budget_s=0.05))
    assert [(row.model, row.level, row.background) for row in evaluation.comparisons] == [
        ("anet_c8", 0.0, ""), ("anet_c16", 0.0, ""), ("anet_c8", 0.5, "compute"), ("anet_c16", 0.5, "compute")]
    idle, _, loaded, loaded_too = evaluation.comparisons
    assert (evaluation.load, idle.load) == ("by level", {})
    assert (idle.measured_ms, loaded.measured_ms) == (idle.median_ms, loaded.mean_ms)
    assert 0.2 < loaded.load[METRIC] <= 1.0
    assert loaded_too.load == loaded.load
    assert loaded.predicted_ms == predict("anet_c8.onnx", target=TARGET, workspace=workspace, load=loaded.load).latency_ms
    assert (loaded.told_by, loaded.p50_error) == (None, None)
    assert {(summary.level, summary.background) for summary in evaluation.summaries} == {(0.0, ""), (0.5, "compute")}


def test_distributions_are_scored_by_percentiles(torch_models: dict[str, Path]) -> None:
    """Predictions for the shipped H200 beside other work, against latencies of which a tenth is twice as long."""
    path, co_runner = torch_models["resnet18"], CoRunner(1.0, 0.0, np.array([0.7, 1.4]))
    expected = predict(path, target="nvidia-h200", co_runner=co_runner)
    assert expected.under_load is not None
    model = EvaluatedModel(record=analyze(path, "cuda"), level=1.0, background="compute", co_runner=co_runner,
                           with_lookup=expected, strict=expected, samples_ms=[1.0] * 90 + [2.0] * 10)
    compared = compare(model, ())
    assert compared is not None
    assert (compared.told_by, compared.measured_ms) == ("probe", pytest.approx(1.1))
    assert compared.error == pytest.approx(expected.under_load.mean_ms / 1.1 - 1)
    assert compared.p50_error is not None
    assert compared.p95_error is not None
    assert compared.p50_error == pytest.approx(expected.under_load.percentile_ms(50) / 1.0 - 1)
    assert compared.p95_error == pytest.approx(expected.under_load.percentile_ms(95) / 2.0 - 1)
    (summary,) = summarise([compared])
    assert (summary.p50, summary.p95) == (pytest.approx(abs(compared.p50_error)), pytest.approx(abs(compared.p95_error)))
    assert summary_table([summary])[0]["p95"] == f"{abs(compared.p95_error):.1%}"
    (row,) = table([compared])
    assert row["p50 error"] == percent(compared.p50_error)


def test_warnings_of_predictions_are_reported_once(torch_models: dict[str, Path]) -> None:
    """Metrics alone, beside two models: one warning about both."""
    models = []
    for name in ("resnet18", "mobilenet_v3_small"):
        record = analyze(torch_models[name], "cuda")
        prediction = predict(record, target="nvidia-h200", load={"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.5})
        models.append(EvaluatedModel(record=record, level=0.5, with_lookup=prediction, strict=prediction, samples_ms=[1.0]))
    compared = [row for model in (*models, models[0]) if (row := compare(model, ()))]
    warned = models_by_warning(compared)
    (of_metrics,) = [names for warning, names in warned.items() if "metrics do not show" in warning]
    assert of_metrics == [compared[0].model, compared[1].model]
    assert models[0].with_lookup is not None
    assert compared[0].warnings == models[0].with_lookup.warnings
    assert first_and_count(of_metrics) == f"{compared[0].model} and 1 more"


def test_loads_of_the_evaluator_that_do_not_fit(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "busy.json").write_text('{"DCGM_FI_DEV_CPU_UTIL_TOTAL": 0.5}')
    for options in (["--recorded", "--probe"], ["--recorded", "--under-load"],
                    ["anet_c8.onnx", "--metrics", tmp_path / "busy.json", "--under-load"]):
        assert shell(workspace, *options).returncode == 2
    done = shell(workspace, "anet_c8.onnx", "--probe")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "how a GPU is shared in time slices" in done.stderr


def loads_of(text: str, folder: Path, **more: object) -> EvaluationLoads:
    (folder / "loads.yaml").write_text(text)
    return EvaluationLoads(under_load=read_config(folder / "loads.yaml", CollectorConfig), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "reason"), [
    ("device: cuda", "described for device cuda"),
    ("{levels: [0, 0.5], stress: {backgrounds: [{name: deep, queue: deep}]}}", "queue deep: only a GPU has a queue"),
    ("{levels: [0, 0.5], stress: {backgrounds: [{name: other, kind: model, model: nowhere.onnx}]}}", "nowhere.onnx"),
])
def test_impossible_loads_are_reported_before_anything_is_measured(workspace: Workspace, tmp_path: Path, text: str,
                                                                   reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        evaluate(workspace, [Path("anet_c8.onnx")], target=TARGET, loads=loads_of(text, tmp_path))


TWO_LEVELS = "{device: cpu, levels: [0.5, 0.0], window_s: 0.2, stress: {settle_s: 0.0}}"


def test_a_load_that_breaks_down_costs_only_its_level(workspace: Workspace, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """The stressor is killed while the first level's models are measured: their times are no latencies under load."""
    measured = measure_here

    def kill_and_measure(models: list[EvaluatedModel], *options: Any) -> None:
        if models[0].level:
            children = [child for child in psutil.Process().children(recursive=True)
                        if "resource_tracker" not in " ".join(child.cmdline())]  # Python's own, of earlier pools
            for child in children:
                child.kill()
            psutil.wait_procs(children)
        measured(models, *options)

    monkeypatch.setattr("hase.inference.evaluation.evaluate.measure_here", kill_and_measure)
    loads = loads_of(TWO_LEVELS, tmp_path)
    evaluation = evaluate(workspace, [Path("anet_c8.onnx")], target=TARGET, loads=loads, plan=QUICK)
    assert [(row.level, row.background) for row in evaluation.comparisons] == [(0.0, "")]
    assert list(evaluation.failures) == ["level 0.5, compute"]
    assert "the stressor ended" in evaluation.failures["level 0.5, compute"]


def asking(port: int) -> InferenceConfig:
    """A config with a Prometheus at a port of this machine. If that fails, predictions are for an idle device."""
    return InferenceConfig(prometheus=PrometheusConfig(url=f"http://127.0.0.1:{port}", window_s=0.1, max_age_s=0.1,
                                                       probe_max_age_s=None, on_failure="idle"))


def test_under_a_started_load_a_missing_reading_is_an_error(workspace: Workspace, tmp_path: Path) -> None:
    """The Prometheus scrapes nothing."""
    with prometheus(tmp_path, {}) as port:
        loads = loads_of(TWO_LEVELS, tmp_path, config=asking(port))
        with pytest.raises(UserError, match=r"no model could be evaluated: level 0\.5, compute, level 0 failed"):
            evaluate(workspace, [Path("anet_c8.onnx")], target=TARGET, loads=loads, plan=QUICK)


def test_a_missing_prometheus_is_reported_before_any_load_is_started(
        workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EvaluationLoads, "running", lambda *_: pytest.fail("a load was started"))
    loads = loads_of(TWO_LEVELS, tmp_path, config=asking(9))
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9: can't be reached"):
        evaluate(workspace, [Path("anet_c8.onnx")], target=TARGET, loads=loads, plan=QUICK)


def test_a_device_is_idle_if_the_probe_never_waited(tmp_path: Path) -> None:
    record = analyze(conv_net(tmp_path / "net.onnx"), "cpu")
    assert EvaluatedModel(record=record, co_runner=CoRunner(0.0, 1.0, np.zeros(0))).idle
    assert EvaluatedModel(record=record, co_runner=CoRunner(0.5, 49.5, np.array([0.2]))).idle  # a slow run without other work
    assert not EvaluatedModel(record=record, co_runner=CoRunner(1.0, 0.0, np.array([0.5]))).idle
    engine = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
    assert [EvaluatedModel(record=record, load=load).idle for load in ({}, {engine: 6e-5}, {engine: 0.1}, {METRIC: 0.0})] == [
        True, True, False, False]
    loaded = EvaluatedModel(record=record).next_to(0.5, "compute", {}, None)
    assert (loaded.idle, loaded.name, EvaluatedModel(record=record).name) == (False, "net at level 0.5, compute", "net")


def test_a_bug_at_one_model_costs_only_that_model(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, the features of a scalar were such a fault. This one is made up."""
    from hase.inference.evaluation import models as evaluated_models

    def faulty(source: Any, **more: Any) -> Any:
        if source.model == "anet_c16":
            raise IndexError("tuple index out of range")
        return predict(source, **more)

    monkeypatch.setattr(evaluated_models, "predict", faulty)
    evaluation = evaluate(workspace, [Path("anet_c16.onnx"), Path(f"{HELD_OUT}_c40.onnx")], target=TARGET, plan=QUICK)
    assert [row.model for row in evaluation.comparisons] == [f"{HELD_OUT}_c40"]
    assert "IndexError: tuple index out of range (a bug in Hase" in evaluation.failures["anet_c16"]
