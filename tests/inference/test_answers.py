"""Answers built on a latency's distribution: objectives, a curve over the load, two models that share a GPU, a watched load.

The models and the H200's predictors are real; how an H200 is shared is made up, in the form that training writes.
"""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import requests
from command import run_script
from prometheus_client.parser import text_string_to_metric_families
from prometheus_stand import STEP_S, Exporter, device_labels, free_port, prometheus, recorded, value, wait_for

from hase.graph_model.simulation.pipeline import NodeKind, PipelineCosts, Tracks
from hase.graph_model.simulation.sharing import CoRunner, turns_ms
from hase.inference import Predictor, check_slo, highest_busy_share, predict
from hase.inference.live.watch import AT_PERCENTILE, CHANCE, FAILED, LATENCY, LIMIT, MEAN, PREDICTED, ROUGH
from hase.inference.prediction.conditions import RunMode
from hase.inference.prediction.targets import fitted_for
from hase.inference.prediction.under_load import NotShared, UnderLoad
from hase.inference.sharing.shared_models import SharedModel
from hase.learned import target_files
from hase.learned.sharing import Sharing
from hase.utils import files
from hase.utils.cli import EXIT_SLO_MISSED
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda
from hase.utils.paths import ROOT, SHIPPED, Workspace
from hase.utils.web_server import STALE_INTERVALS

pytestmark = pytest.mark.slow

TARGET = "nvidia-h200-cuda-ort1.31-all"
SHARING = Sharing(slice_ms=2.0, alone_ms={"tiny": 0.016, "long": 0.5}, waits_ms=(0.3, 0.7, 2.4), cycle_ms=20.0,
                  longest_wait_ms=2.42, switch_ms=0.26)
FREE = PipelineCosts(node_ms=0, view_ms=0, launch_ms=0, start_ms=0, gap_ms=0, lead_ms=0, end_ms=0)
BUSY = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
WATCH_S = 0.3


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, torch_models: dict[str, Path]) -> Workspace:
    """The predictors that ship for an H200 with made-up sharing, and `resnet18`."""
    made = Workspace(tmp_path_factory.mktemp("shared"))
    shutil.copytree(SHIPPED / TARGET, made.predictors(TARGET))
    files.write_json(target_files.SHARING.path(made.predictors(TARGET)), SHARING)
    made.models.mkdir(parents=True)
    shutil.copy2(torch_models["resnet18"], made.models / "resnet18.onnx")
    return made


@pytest.fixture(scope="module")
def model(workspace: Workspace) -> SharedModel:
    return Predictor(workspace, TARGET).shared("resnet18.onnx")


def shell(workspace: Workspace, script: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script(f"inference/{script}.py", "--workspace", workspace.root, "--target", TARGET, "--model", "resnet18.onnx",
                      *options)


def stdout_of(completed: subprocess.CompletedProcess[str]) -> str:
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def working(model: SharedModel, gpu_ms: float, nodes: int = 31) -> SharedModel:
    """`model` with a host that takes no time and equal nodes that take the GPU `gpu_ms`."""
    tracks = Tracks(np.full(nodes, gpu_ms / nodes), np.ones(nodes), np.full(nodes, NodeKind.OWN))
    return replace(model, tracks=tracks, costs=FREE)


@pytest.mark.parametrize(("gpu_ms", "node_ms", "away_ms", "expected_ms"), [
    # work without pauses is cut at the longest turn
    ([1.0, 1.0, 1.0], 0.0, 1.0, [2.16, 0.84]), ([5.0], 0.0, 1.0, [2.16, 2.16, 0.68]), ([0.5, 1.0], 0.0, 1.0, [1.5]),
    # a slower host, which dispatches 1, 2, 3 and 4 ms from the start of a run, fills its queue while the GPU is away
    ([0.4] * 4, 1.0, 0.0, [0.4] * 4), ([0.4] * 4, 1.0, 1.5, [0.4, 1.2]), ([0.4] * 4, 1.0, 10.0, [1.6])])
def test_the_turns_of_a_loop(gpu_ms: list[float], node_ms: float, away_ms: float, expected_ms: list[float]) -> None:
    count = len(gpu_ms)
    turns = turns_ms(Tracks(np.array(gpu_ms), np.ones(count), np.full(count, NodeKind.OWN)),
                     FREE.model_copy(update={"node_ms": node_ms}), 2.16, away_ms)
    assert turns == pytest.approx(np.tile(expected_ms, 30))


def test_waits_beside_a_model_in_a_loop_are_those_of_an_h200(model: SharedModel) -> None:
    """Beside 3.1 ms of work on the GPU, 2.42 and 1.2 ms in turn; beside bursts of 0.5 ms, 0.76; beside no work, none. So 1 ms
    waits once for the other model's 0.5 ms and a switch, and 5 ms waits three times (slices of 2 ms)."""
    short, middle, long = (working(model, gpu_ms) for gpu_ms in (0.5, 1.0, 5.0))
    assert model.co_runner([working(model, 3.1)]) == (1.0, 0.0, pytest.approx(np.tile([2.42, 1.2], 30)))
    assert model.co_runner([short]).waits_ms == pytest.approx(np.full(30, 0.76))
    nothing = Tracks(np.zeros(3), np.zeros(3), np.full(3, NodeKind.OWN))
    assert model.co_runner([replace(model, tracks=nothing)]) == (0.0, 1.0, pytest.approx([]))
    for alone, others, expected_ms in ((middle, [short], 1.0 + 0.76), (long, [short], 5.0 + 3 * 0.76),
                                       (middle, [short, short], 1.0 + 2 * 0.76)):
        assert alone.beside(others).percentiles_ms[50] == pytest.approx(expected_ms, abs=0.05)


def test_two_models_that_share_the_gpu(model: SharedModel, workspace: Workspace) -> None:
    pair = Predictor(workspace, TARGET).pair("resnet18.onnx", "resnet18.onnx")
    first, second = pair.models
    assert first == second
    assert first.idle_ms == model.prediction.latency_ms < first.under_load.mean_ms
    assert (first.under_load, pair.warnings) == (model.beside([model]), model.prediction.warnings)
    assert json.loads(stdout_of(shell(workspace, "pair_latency", "--beside-model", "resnet18.onnx", "--json"))
                      ) == pair.model_dump(mode="json")
    assert len(stdout_of(shell(workspace, "pair_latency", "--beside-model", "resnet18.onnx")).splitlines()) == 3
    low, high = model.prediction.interval_ms  # alone; beside another model less is known
    assert first.interval_ratios[0] < low / first.idle_ms < high / first.idle_ms < first.interval_ratios[1]


def test_a_target_whose_sharing_is_not_known(workspace: Workspace, torch_models: dict[str, Path], tmp_path: Path) -> None:
    """It meets an objective alone, and nobody knows up to which load; so it is with tensors on the host."""
    shutil.copytree(SHIPPED / TARGET, Workspace(tmp_path).predictors(TARGET), ignore=shutil.ignore_patterns("sharing.json"))
    unshared, predictor, path = Predictor(Workspace(tmp_path), TARGET), Predictor(workspace, TARGET), torch_models["resnet18"]
    with pytest.raises(NotShared, match=r"nothing was learned of how it is shared.*fit_sharing\.py"):
        unshared.shared(path)
    unknown = unshared.objective(path, 5.0)
    assert (unknown.met, unknown.highest_busy_share) == (True, None)
    assert "nothing was learned of how it is shared" in (unknown.unknown_because or "")
    copied = predictor.objective(predictor.run(path, run_mode=RunMode(io="host")), 5.0)
    assert copied.unknown_because == "a model run with tensors on the host was not measured while the GPU was shared"


def test_an_objective_under_load_and_idle(model: SharedModel) -> None:
    shared = UnderLoad(mean_ms=5.0, percentiles_ms=tuple(place / 10 for place in range(101)), busy_share=0.5, told_by="metrics")
    loaded = model.prediction.model_copy(update={"under_load": shared, "latency_ms": 5.0, "interval_ms": (4.0, 6.0)})
    missed, met = check_slo(loaded, 5.0), check_slo(loaded, 5.0, 40.0)
    assert (missed.met, missed.latency_ms, missed.headroom_ms, missed.headroom_percent) == (
        False, pytest.approx(9.5), pytest.approx(-4.5), pytest.approx(-90.0))
    assert (met.met, met.headroom_ms, met.could_be_ms) == (True, pytest.approx(1.0), pytest.approx(4.0 * 6.0 / 5.0))
    alone = check_slo(model.prediction, 2 * model.prediction.latency_ms, 99.0)
    assert (alone.met, alone.latency_ms, alone.headroom_percent) == (True, model.prediction.latency_ms, pytest.approx(50.0))
    assert missed.chance == check_slo(loaded.model_copy(update={"under_load": None}), 5.0 * 5.0 / 9.5).chance < 0.01
    assert check_slo(loaded, 9.5 * 6.0 / 5.0).chance == pytest.approx(0.95)  # at the upper end of the interval


def test_the_highest_load_that_meets_an_objective(model: SharedModel) -> None:
    """Alone 1 ms, beside work that never pauses at most 3.4 ms. Once more than 5 % of the runs meet it, p95 is above 1.1."""
    worked = working(model, 1.0)
    assert highest_busy_share(worked, 0.99) is None
    assert highest_busy_share(worked, 3.5) == 1.0
    share = highest_busy_share(worked, 1.1) or 0.0
    assert 0.02 < share < 0.15
    assert worked.at_share(share).percentile_ms(95) <= 1.1 < worked.at_share(share + 0.02).percentile_ms(95)
    assert (highest_busy_share(worked, 1.1, 50.0) or 0.0) > 4 * share


def test_the_command_says_whether_an_objective_is_met(workspace: Workspace, model: SharedModel, tmp_path: Path) -> None:
    files.write_json(tmp_path / "busy.json", {BUSY: 0.4})
    predictor = Predictor(workspace, TARGET)
    run = predictor.run("resnet18.onnx", load={BUSY: 0.4})
    shared = run.prediction.under_load
    assert shared == model.at_share(0.4).model_copy(update={"told_by": "metrics"})
    options = ("--metrics", tmp_path / "busy.json", "--slo-ms", "2", "--slo-percentile", "90")
    (answer,) = json.loads(stdout_of(shell(workspace, "predict_model_latency", *options, "--json")))
    assert answer == run.prediction.model_dump(mode="json") | {
        "slo": predictor.objective(run, 2.0, 90.0).model_dump(mode="json")}
    verdict = stdout_of(shell(workspace, "predict_model_latency", *options, "--top", "0")).splitlines()[-1]
    assert verdict.startswith(f"{run.prediction.model}: p90 {shared.percentile_ms(90):.4g} ms (it could be ")
    assert ") meets the SLO of 2 ms by " in verdict
    idle = shell(workspace, "predict_model_latency", "--slo-ms", "0.01")
    assert (idle.returncode, "latency (ms)" in idle.stdout) == (EXIT_SLO_MISSED, True)
    assert "that it is met is very unlikely (under 1 %)" in idle.stdout
    assert idle.stdout.rstrip().endswith("beside other work it is missed by more")


def test_a_curve_over_the_load(workspace: Workspace, model: SharedModel, tmp_path: Path) -> None:
    curve = Predictor(workspace, TARGET).curve("resnet18.onnx", points=5)
    first, *_, last = curve.points
    assert [point.busy_share for point in curve.points] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [first.mean_ms, first.p50_ms, first.p99_ms] == pytest.approx([model.prediction.latency_ms] * 3, rel=1e-4)
    always = model.beside_co_runner(CoRunner(1.0, 0.0, np.array(SHARING.waits_ms)), "share")
    assert (last.mean_ms, last.p95_ms) == (always.mean_ms, always.percentile_ms(95))
    written = stdout_of(shell(workspace, "load_curve", "--points", "5", "--json", "--out", tmp_path / "curve.csv", "--plot",
                              tmp_path / "curve.png", "--slo-ms", "5"))
    assert json.loads(written) == curve.model_dump(mode="json")
    rows = csv.DictReader((tmp_path / "curve.csv").read_text().splitlines())
    assert [float(row["p95_ms"]) for row in rows] == [point.p95_ms for point in curve.points]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("mode", ["mps", "mig"])
def test_a_mode_of_sharing_that_was_not_measured_is_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch,
                                                            mode: str) -> None:
    """Pretended: this machine is the target, and its GPU is shared in this mode."""
    target = fitted_for(workspace, TARGET).target
    monkeypatch.setattr("hase.inference.prediction.targets.local_targets", lambda: (target,))
    monkeypatch.setattr("hase.inference.prediction.under_load.sharing_mode", lambda: mode)
    with pytest.raises(UserError, match=f"sharing mode {mode}: .* measured in time slices only"):
        predict("resnet18.onnx", target=TARGET, load={BUSY: 0.5}, workspace=workspace)
    if mode == "mig":  # what two models do through MPS is predicted
        with pytest.raises(UserError, match="sharing mode mig"):
            Predictor(workspace, TARGET).pair("resnet18.onnx", "resnet18.onnx")


def test_the_command_follows_a_prometheus(workspace: Workspace, model: SharedModel, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """While the load is known: a line per interval and the prediction to scrape. Then lines that give the reason, and 503."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    replayed = Exporter(recorded(tmp_path / "gpu.jsonl", [{BUSY: 0.4, "DCGM_FI_DEV_GPU_UTIL": 50.0}] * int(60 / STEP_S)),
                        device_labels("GPU-a"))
    with prometheus(tmp_path / "prometheus", {"gpu": (replayed.address, "metrics")}) as port:
        wait_for(lambda: value(port, BUSY) is not None)
        (tmp_path / "config.yaml").write_text(
            f"prometheus: {{url: 'http://127.0.0.1:{port}', max_age_s: 5, on_failure: idle}}\n")
        export = free_port()
        process = subprocess.Popen(
            [sys.executable, "inference/predict_model_latency.py", "--workspace", str(workspace.root), "--target", TARGET,
             "--model", "resnet18.onnx", "--config", str(tmp_path / "config.yaml"), "--watch", str(WATCH_S), "--slo-ms", "5",
             "--export", f"127.0.0.1:{export}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("time\tbusy share\tmean (ms)\tp50 (ms)")
            shared = model.at_share(0.4)
            line = process.stdout.readline().rstrip("\n").split("\t")
            expected = [f"{figure:.4g}" for figure in (shared.mean_ms, shared.percentile_ms(50), shared.percentile_ms(95))]
            assert line[1:] == ["40%", *expected, "no", "-", "met", "-"]
            address = f"http://127.0.0.1:{export}/metrics"
            served = {family.name: family for family in text_string_to_metric_families(requests.get(address, timeout=5).text)}
            assert {LATENCY, MEAN, PREDICTED, FAILED, ROUGH, LIMIT, AT_PERCENTILE, CHANCE} <= served.keys()
            first = {name: family.samples[0] for name, family in served.items()}
            assert {sample.labels["quantile"]: sample.value for sample in served[LATENCY].samples} == pytest.approx(
                {f"{percent / 100:g}": shared.percentile_ms(percent) / 1e3 for percent in (50, 95, 99)})
            assert first[MEAN].labels == {"model": model.prediction.model, "target": TARGET}
            assert [first[name].value for name in (MEAN, LIMIT, AT_PERCENTILE, ROUGH)] == pytest.approx(
                [shared.mean_ms / 1e3, 0.005, shared.percentile_ms(95) / 1e3, 0])
            replayed.close()
            while (line := process.stdout.readline().rstrip("\n").split("\t"))[8] == "-":
                pass
            assert line[8].startswith("reading failed (1 so far): prometheus: ")
            wait_for(lambda: requests.get(address, timeout=5).status_code == 503, seconds=10 * STALE_INTERVALS * WATCH_S)
            assert "the last prediction is" in requests.get(address, timeout=5).text
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=20)
            assert (process.returncode, "Traceback" in stderr) == (0, False), stderr
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(("options", "status", "message"), [
    (["--watch"], 1, "nothing says what else runs"), (["--export", "9401"], 2, ""), (["--watch", "--dim", "batch=1,2"], 2, ""),
    (["--watch", "0"], 2, ""), (["--measure-missing", "--probe"], 2, ""), (["--slo-percentile", "99"], 2, ""),
    pytest.param(["--watch", "--probe"], 1, "the probe has to run on the GPU in question", marks=pytest.mark.skipif(
        has_cuda(), reason="needs a machine that is not the target"))])
def test_options_that_do_not_fit(workspace: Workspace, options: list[str], status: int, message: str) -> None:
    done = shell(workspace, "predict_model_latency", *options)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines()) == 1 or status == 2) == (status, "", True), done.stderr
    assert message in done.stderr
