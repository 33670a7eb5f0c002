"""The evaluator: predicted against really measured, recorded and listed latencies; how it scores and draws them."""

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
from command import printed, run_script
from conftest import endless
from onnx import TensorProto, helper, numpy_helper
from prometheus_stand import prometheus
from trained_workspace import HELD_OUT, METRIC, OPSETS, conv_net, model_ms

from hase.benchmark.collecting.config import CollectorConfig, StressConfig
from hase.graph_model.simulation.sharing import CoRunner
from hase.inference import predict
from hase.inference.evaluation.comparison import (
    Comparison,
    compare_model,
    comparison_table,
    count_marks,
    marks_in_words,
    summarise_comparisons,
)
from hase.inference.evaluation.evaluate import EvaluationLoads, MeasuringPlan, evaluate, measure_here
from hase.inference.evaluation.models import MANIFEST, EvaluatedModel, Failures, ListedModel, Manifest
from hase.inference.evaluation.report import draw_scatter
from hase.inference.live.load import InferenceConfig
from hase.inference.live.prometheus import PrometheusConfig
from hase.inference.prediction.conditions import HostPace, RunMode
from hase.ort_analysis.graph.analysis import analyze
from hase.records.dataset_files import header_path, journal_path, read_header, read_journal
from hase.records.measurement import Background
from hase.runtimes import local_target
from hase.runtimes.protocol import Worker
from hase.utils import files
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target, instruction_set
from hase.utils.pages.page import LEAST_TICKS, log_ticks
from hase.utils.paths import Workspace

pytestmark = pytest.mark.slow

TARGET, H200 = local_target("cpu").name, "nvidia-h200"
QUICK = MeasuringPlan(rounds=2, budget_s=0.02, patience_s=0.0)  # a busy machine is not waited for
QUICKLY = ("--rounds", "2", "--budget-s", "0.02", "--patience-s", "0")


@pytest.fixture(scope="module")
def workspace(trained_workspace: Workspace) -> Workspace:
    return trained_workspace


def shell(workspace: Workspace, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("evaluator.py", "--workspace", workspace.root, *arguments)


def test_models_are_predicted_and_measured(workspace: Workspace) -> None:
    """The command prints and writes all that is known of them, as JSON, as a table and as a picture."""
    done = shell(workspace, "anet_c16.onnx", f"{HELD_OUT}_c40.onnx", *QUICKLY, "--json")
    assert done.returncode == 0, done.stderr
    folder, evaluation = workspace.evaluation / TARGET, json.loads(done.stdout)
    rows = evaluation["comparisons"]
    assert [(row["model"], row["held_out"]) for row in rows] == [("anet_c16", False), (f"{HELD_OUT}_c40", True)]
    for row in rows:
        alone = [predict(f"{row['model']}.onnx", target=TARGET, workspace=workspace, strict=strict).latency_ms
                 for strict in (False, True)]
        assert [row["predicted_ms"], row["strict_ms"]] == alone
        assert (row["measured_ms"] > 0, row["runs"] >= 2 * 3) == (True, True)
        assert [row["error"], row["strict_error"]] == pytest.approx([ms / row["measured_ms"] - 1 for ms in alone])
    assert [evaluation[name] for name in ("source", "way", "load", "failures")] == [
        "measured", "with tensors on the device", "idle", {}]
    assert {summary["group"]: summary["lookup"]["count"] for summary in evaluation["summaries"]} == {
        "all models": 2, "not held out": 1, "held out": 1}
    assert evaluation == json.loads((folder / "evaluation.json").read_text())
    written = list(csv.DictReader((folder / "evaluation.csv").open()))
    assert [(row["model"], float(row["predicted_ms"])) for row in written] == [(r["model"], r["predicted_ms"]) for r in rows]
    assert (folder / "evaluation.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_dynamic_models_have_a_row_per_size(workspace: Workspace) -> None:
    models = [Path("dynnet.onnx"), Path("anet_c16.onnx")]
    evaluation = evaluate(workspace, models, dims={"batch": [1, 4]}, target=TARGET, plan=QUICK)
    assert [(row.model, row.batch) for row in evaluation.comparisons] == [
        ("dynnet@batch=1,dynamic", 1), ("dynnet@batch=4,dynamic", 4), ("anet_c16", 1)]
    with pytest.raises(UserError, match="height"):
        evaluate(workspace, models, target=TARGET, dims={"batch": [1], "height": [3]})


def divides(path: Path) -> None:
    """A model that takes its process down: a division whose quotient is no 32-bit number (x is 0, x - 1 divides)."""
    graph = helper.make_graph(
        [helper.make_node("Sub", ["x", "one"], ["d"]), helper.make_node("Div", ["least", "d"], ["y"])], "divides",
        [helper.make_tensor_value_info("x", TensorProto.INT32, [1])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [1])],
        [numpy_helper.from_array(np.array([number], np.int32), name) for name, number in (("one", 1), ("least", -2**31))])
    onnx.save(helper.make_model(graph, opset_imports=OPSETS, ir_version=10), path)


def test_a_failing_model_costs_only_itself(workspace: Workspace, tmp_path: Path) -> None:
    conv_net(tmp_path / "good.onnx")
    conv_net(tmp_path / "open.onnx", batch="batch")
    (tmp_path / "broken.onnx").write_text("no model")
    if traps := instruction_set().startswith("avx"):  # only x86 traps this division
        divides(tmp_path / "divides.onnx")
    done = shell(workspace, tmp_path, *QUICKLY, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, [row["model"] for row in report["comparisons"]]) == (1, ["good"])
    assert set(report["failures"]) == {"broken.onnx", "open.onnx"} | ({"divides"} if traps else set())
    assert "SIGFPE" in report["failures"].get("divides", "SIGFPE")
    assert (f"{2 + traps} failed: broken.onnx" in done.stderr, "Traceback" in done.stderr) == (True, False)
    with pytest.raises(UserError, match=r"broken\.onnx, open\.onnx failed"):
        evaluate(workspace, [tmp_path / "broken.onnx", tmp_path / "open.onnx"], target=TARGET)


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
    idle, loaded = (row for row in evaluation.comparisons if row.model == "bnet_c32")
    assert (idle.level, loaded.level) == (0, 0.5)
    record = analyze(workspace.models / "bnet_c32.onnx", "cpu")
    assert idle.measured_ms == pytest.approx(model_ms(record), rel=1e-5)
    assert idle.spread == pytest.approx(0.1)  # samples at 0.9, 1.0 and 1.1 of the median
    assert abs(idle.error) < 0.03  # all kernels looked up, α and β found again
    assert loaded.measured_ms == pytest.approx(model_ms(record, 0.5), rel=1e-5)
    assert loaded.predicted_ms == predict(record, target=TARGET, workspace=workspace, load={METRIC: 0.5}).latency_ms
    assert {row.model for row in evaluation.comparisons if row.held_out} == {f"{HELD_OUT}_c40"}
    errors = [abs(row.error) for row in evaluation.comparisons if row.level == 0]
    (of_all,) = (row.lookup for row in evaluation.summaries if row.group == "all models" and row.level == 0)
    assert (of_all.mape, of_all.worst, of_all.within_5) == pytest.approx(
        (sum(errors) / len(errors), max(errors), sum(error <= 0.05 for error in errors) / len(errors)))
    named = evaluate(workspace, [Path("anet_c8.onnx"), Path("dynnet.onnx")], dims={"batch": [1]}, target=TARGET, recorded=True)
    assert {row.model for row in named.comparisons} == {"anet_c8"}
    assert "holds no good measurement" in named.failures["dynnet@batch=1,dynamic"]
    copied = evaluate(workspace, [], target=TARGET, recorded=True, run_mode=RunMode(io="host"))  # idle ones only
    assert ({row.level for row in copied.comparisons}, copied.summaries[0].lookup.mape < 0.05) == ({0.0}, True)


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


def test_recorded_loads_are_separated_by_background(workspace: Workspace, tmp_path: Path) -> None:
    """Measurements beside `net`, which is held out, are twice as slow as those beside `products`."""
    copy, folder = Workspace(tmp_path), workspace.dataset(TARGET)
    shutil.copytree(workspace.kernel_records, copy.kernel_records)
    shutil.copytree(workspace.predictors(TARGET), copy.predictors(TARGET))
    idle, loaded = read_journal(folder)
    beside = loaded.model_copy(update={"background_name": "products"})
    held_out = loaded.model_copy(update={"background_name": "net", "measurements": tuple(
        m.model_copy(update={"samples_ms": tuple(2 * sample for sample in m.samples_ms)}) for m in loaded.measurements)})
    files.write_text(journal_path(copy.dataset(TARGET)),
                     "".join(block.model_dump_json() + "\n" for block in (idle, beside, held_out)))
    files.write_json(header_path(copy.dataset(TARGET)), read_header(folder).model_copy(update={
        "backgrounds": {"products": Background(name="products"), "net": Background(name="net", kind="memory")},
        "held_out_backgrounds": ("net",)}))
    evaluation = evaluate(copy, [], target=TARGET, recorded=True)
    of_bnet = {row.background: row for row in evaluation.comparisons if row.model == "bnet_c32"}
    assert {name: (row.level, row.background_held_out) for name, row in of_bnet.items()} == {
        "": (0.0, False), "products": (0.5, False), "net": (0.5, True)}
    assert of_bnet["net"].measured_ms == pytest.approx(2 * of_bnet["products"].measured_ms)
    assert of_bnet["net"].predicted_ms == of_bnet["products"].predicted_ms  # the metrics beside them are the same
    assert {row.background: row.lookup.count for row in evaluation.summaries if row.group == "all models"} == {
        "": 19, "products": 19, "net": 19}
    assert {(row["level"], row["background"]) for row in comparison_table(evaluation.comparisons)} == {
        (0.0, ""), (0.5, "products"), (0.5, "net (held out)")}


@pytest.mark.measuring
def test_the_evaluator_puts_the_device_under_load_itself(workspace: Workspace) -> None:
    """Idle, then beside a real stressor: the predictions use only metrics of it, and the measurement is a mean."""
    config = CollectorConfig(device="cpu", levels=(0.0, 0.5), window_s=0.3, stress=StressConfig(settle_s=0.2))
    loads = EvaluationLoads(under_load=config)
    evaluation = evaluate(workspace, [Path("anet_c8.onnx")], target=TARGET, loads=loads, plan=QUICK)
    idle, loaded = evaluation.comparisons
    assert [(row.level, row.background) for row in (idle, loaded)] == [(0.0, ""), (0.5, "compute")]
    assert (evaluation.load, idle.load, loaded.told_by) == ("by level", {}, None)
    assert (idle.measured_ms, loaded.measured_ms) == (idle.median_ms, loaded.mean_ms)
    assert 0.2 < loaded.load[METRIC] <= 1.0
    assert loaded.predicted_ms == predict("anet_c8.onnx", target=TARGET, workspace=workspace, load=loaded.load).latency_ms


def test_distributions_are_scored_by_percentiles(tmp_path: Path) -> None:
    """Predictions for the shipped H200 beside other work, against latencies of which a tenth is twice as long."""
    path, co_runner = conv_net(tmp_path / "net.onnx"), CoRunner(1.0, 0.0, np.array([0.7, 1.4]))
    expected = predict(path, target=H200, co_runner=co_runner)
    assert expected.under_load is not None
    model = EvaluatedModel(record=analyze(path, "cuda"), level=1.0, background="compute", co_runner=co_runner,
                           with_lookup=expected, strict=expected, samples_ms=[1.0] * 90 + [2.0] * 10)
    compared = compare_model(model, ())
    assert compared is not None
    assert (compared.told_by, compared.measured_ms) == ("probe", pytest.approx(1.1))
    assert [compared.error, compared.p50_error, compared.p95_error] == pytest.approx([
        expected.under_load.mean_ms / 1.1 - 1, expected.under_load.percentile_ms(50) / 1.0 - 1,
        expected.under_load.percentile_ms(95) / 2.0 - 1])
    (summary,) = summarise_comparisons([compared])
    assert (summary.p50, summary.p95) == pytest.approx((abs(compared.p50_error or 0.0), abs(compared.p95_error or 0.0)))


def loads_of(text: str, folder: Path, **more: object) -> EvaluationLoads:
    (folder / "loads.yaml").write_text(text)
    return EvaluationLoads(under_load=read_config(folder / "loads.yaml", CollectorConfig), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "reason"), [
    ("device: cuda", "described for device cuda"),
    ("{levels: [0, 0.5], stress: {backgrounds: [{name: deep, queue: deep}]}}", "queue deep: only a GPU has a queue"),
    ("{levels: [0, 0.5], stress: {backgrounds: [{name: other, kind: model, model: nowhere.onnx}]}}", "nowhere.onnx")])
def test_impossible_loads_are_reported_before_anything_is_measured(workspace: Workspace, tmp_path: Path, text: str,
                                                                   reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        evaluate(workspace, [Path("anet_c8.onnx")], target=TARGET, loads=loads_of(text, tmp_path))


TWO_LEVELS = "{device: cpu, levels: [0.5, 0.0], window_s: 0.2, stress: {settle_s: 0.0}}"


@pytest.mark.measuring
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


@pytest.mark.measuring
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


def test_a_bug_at_one_model_costs_only_that_model(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, the features of a scalar were such a fault. This one is made up."""
    from hase.inference.evaluation import models as evaluated_models

    def faulty(source: Any, **more: Any) -> Any:
        if source.model == "anet_c16":
            raise IndexError("tuple index out of range")
        return predict(source, **more)

    monkeypatch.setattr(evaluated_models, "predict", faulty)
    evaluation = evaluate(workspace, [Path("anet_c16.onnx"), Path("anet_c8.onnx")], target=TARGET, plan=QUICK)
    assert [row.model for row in evaluation.comparisons] == ["anet_c8"]
    assert "IndexError: tuple index out of range (a bug in Hase" in evaluation.failures["anet_c16"]


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A folder with a list of two models, and a third that is no model."""
    conv_net(tmp_path / "fixed.onnx")
    conv_net(tmp_path / "open.onnx", batch="batch")
    (tmp_path / "broken.onnx").write_text("no model")
    models = [ListedModel(name=name, file=f"{name}.onnx", kind=kind, opset=17, dims=dims) for name, kind, dims in (
        ("fixed", "nets", {}), ("open", "nets", {"batch": 4}), ("broken", "others", {}))]
    files.write_json(tmp_path / MANIFEST, Manifest(versions={}, models=tuple(models)))
    (tmp_path / "workspace").mkdir()
    return tmp_path


def test_listed_models_are_compared_with_latencies_of_a_file(listed: Path) -> None:
    """They are predicted at the pace of the host that was measured beside them; what was not measured is a failure."""
    latencies = listed / "on_gpu.json"
    files.write_json(latencies, {"models": [
        {"model": "fixed", "way": "static", "latency_ms": 0.1, "runs": 20, "host_probe_us": 400.0},
        {"model": "broken", "way": "static", "latency_ms": 0.1, "runs": 20}]})
    command = ("evaluator.py", "--workspace", listed / "workspace", "--manifest", listed / MANIFEST, "--target", H200,
               "--measured", latencies)
    done = run_script(*command, "--json")
    assert done.returncode == 1, done.stderr  # two of the three failed
    evaluation = json.loads(done.stdout)
    assert (evaluation["source"], set(evaluation["failures"])) == ("listed", {"open", "broken"})
    (row,) = evaluation["comparisons"]
    assert (row["model"], row["kind"], row["measured_ms"]) == ("fixed", "nets", 0.1)
    at_pace = predict(listed / "fixed.onnx", target=H200, workspace=Workspace(listed), host_pace=HostPace(
        row["host_pace"], "measured"))
    assert row["host_pace"] > 1
    assert row["predicted_ms"] == at_pace.latency_ms
    assert "of 1 predictions are marked as rough estimates" in printed(*command, "--only", "fixed")


@pytest.mark.measuring
@pytest.mark.usefixtures("canary")
def test_listed_models_are_measured_here_after_their_kernels(listed: Path) -> None:
    """Nothing was learned of this CPU before; each model runs at the sizes that the list gives it."""
    rows = json.loads(printed("evaluator.py", "--workspace", listed / "workspace", "--manifest", listed, "--only", "fixed",
                              "open", "--measure-missing", "--rounds", "1", "--budget-s", "0.05", "--json"))["comparisons"]
    assert [(row["model"], row["batch"]) for row in rows] == [("fixed", 1), ("open@batch=4,dynamic", 4)]
    assert [row["measured_share"] for row in rows] == pytest.approx([1.0, 1.0])  # quotients of sums in two orders
    assert all(row["measured_ms"] > 0 and row["runs"] >= 3 for row in rows), rows


@pytest.mark.parametrize(("options", "status", "message"), [
    ([], 2, ""), (["anet_c8.onnx", "--rounds", "0"], 2, ""), (["--recorded", "--config", "inference/config.yaml"], 2, ""),
    (["--recorded", "--probe"], 2, ""), (["--recorded", "--under-load"], 2, ""),
    (["anet_c8.onnx", "--probe"], 1, "how a GPU is shared in time slices"),
    (["anet_c8.onnx", "--metrics", "busy.json", "--under-load"], 2, ""),
    (["fixed.onnx", "--measured", "x.json"], 2, "go with --manifest FILE"),
    (["--manifest", "LIST", "--recorded"], 2, "run as usual, on an idle device"),
    (["--manifest", "LIST", "--measured", "x.json", "--measure-missing"], 2, "nothing is measured here"),
    (["--manifest", "LIST", "--only", "nothing"], 1, "no model with the name nothing")])
def test_wrong_usage_is_reported(workspace: Workspace, options: list[str], status: int, message: str, listed: Path) -> None:
    done = shell(workspace, *(listed if word == "LIST" else word for word in options))
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr


def test_marks_in_words() -> None:
    rows = []
    for error, rough, high in ((0.5, True, 2.0), (0.1, False, 1.2), (-0.2, False, 0.95)):
        read: dict[str, Any] = {"error": error, "rough_estimate": rough, "measured_ms": 1.0, "interval_low_ms": 0.9,
                                "interval_high_ms": high}  # the other fields are not read
        rows.append(Comparison.model_construct(**read))
    assert marks_in_words(count_marks(rows)) == (
        "1 of 3 predictions are marked as rough estimates; the others err by 15.0% on the mean, 15.0% in the median, 20.0% at "
        "most; 66.7% of the 90 % intervals hold what was measured")


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0.8, 130.0, [1, 3, 10, 30, 100]), (0.05, 2000.0, [0.1, 1, 10, 100, 1000]), (4.0, 60.0, [5, 10, 20, 50]),
    (1.4, 2.6, [1.4, 1.6, 1.8, 2.0, 2.2, 2.4, 2.6])])
def test_ticks_are_few_and_round(low: float, high: float, expected: list[float]) -> None:
    assert log_ticks(low, high) == expected
    assert len(expected) >= LEAST_TICKS


@pytest.mark.parametrize("latencies_ms", [[1.0], [1.0, 1.01, 1.02]])  # one, and all close together
def test_a_picture_of_few(latencies_ms: list[float], tmp_path: Path) -> None:
    rows = []
    for ms in latencies_ms:
        read: dict[str, Any] = {"model": "a", "level": 0.0, "held_out": False, "measured_ms": ms, "predicted_ms": 1.1 * ms,
                                "error": 0.1, "interval_low_ms": 0.9 * ms, "interval_high_ms": 1.2 * ms}
        rows.append(Comparison.model_construct(**read))
    draw_scatter(rows, "a target", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
