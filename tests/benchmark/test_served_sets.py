"""Models served at the same time: real sessions on the CPU in processes of their own, and what their requests show."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
import yaml
from command import printed, run_script
from conftest import small_model

from hase.benchmark.serving import sets
from hase.benchmark.serving.server import MODULE, ModelServer, Opening, Serving, open_model, serve
from hase.benchmark.serving.sets import ModelRequests, ServedRuns, ServedSetsConfig, arrivals_s, read_results
from hase.runtimes import local_target
from hase.utils import files
from hase.utils.config import read_config, validate
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, Workspace
from hase.utils.sharing_mode import THREADS, SetSharing

pytestmark = pytest.mark.measuring

SCRIPT = "benchmark/served_sets.py"
ONE = {"model": "one.onnx", "batch": 4, "rate_per_s": 200.0, "slo_ms": 50.0}
TWO = {"model": "two.onnx", "batch": 1, "rate_per_s": 50.0, "slo_ms": 50.0}
SETTINGS = {"device": "cpu", "seconds": 0.5, "warmup_s": 0.1, "seed": 3}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Two small models with a dynamic batch, and one without."""
    made = Workspace(tmp_path)
    made.models.mkdir(parents=True)
    for name, proto in (("one", small_model(batch="batch")), ("two", small_model(channels=16, batch="batch")),
                        ("fixed", small_model())):
        onnx.save(proto, made.models / f"{name}.onnx")
    return made


def config_of(*sets: list[dict[str, Any]], **changes: Any) -> ServedSetsConfig:
    return validate({**SETTINGS, "sets": list(sets), **changes}, ServedSetsConfig, "config")


def write_config(path: Path, *sets: list[dict[str, Any]], **changes: Any) -> Path:
    path.write_text(yaml.safe_dump({**SETTINGS, "sets": list(sets), **changes}))
    return path


def test_arrivals_are_a_poisson_process_with_a_seed() -> None:
    config = config_of([ONE | {"rate_per_s": 1000.0}, TWO], seconds=20.0, warmup_s=1.0)
    first, second = (arrivals_s(config.sets[0], number, config) for number in (0, 1))
    assert np.array_equal(first, arrivals_s(config.sets[0], 0, config))
    assert not np.array_equal(first, arrivals_s(config.sets[0], 0, config.model_copy(update={"seed": 4})))
    gaps_s = np.diff(first)
    assert gaps_s.std() == pytest.approx(gaps_s.mean(), rel=0.05)  # as of exponential gaps
    assert -1.0 <= first[0] < 0.0 < first[-1] < 20.0
    assert first.size == pytest.approx(21000, rel=0.03)  # four standard deviations
    assert second.size == pytest.approx(1050, rel=0.13)


def test_a_free_server_takes_all_that_wait_in_order() -> None:
    """Five requests come while the first runs: four go into the next run, the last into a third."""
    serving = Serving(arrivals_s=(0.0, 0.06, 0.07, 0.08, 0.09, 0.1), begin_s=time.monotonic() + 0.02, seconds=10.0)
    reply = serve(lambda: time.sleep(0.2), 4, serving)
    assert reply.counts == (1, 4, 1)
    assert 0.0 <= reply.starts_s[0] < 0.06
    assert all(later >= end for later, end in zip(reply.starts_s[1:], reply.ends_s, strict=False))
    assert len(set(ModelRequests.of(np.array(serving.arrivals_s), reply).ends_s)) == 3


def test_statistics() -> None:
    """Made-up runs: the first began in the warm-up, the last one ends after the counted second."""
    arrivals = np.array([-0.2, -0.01, 0.1, 0.2, 0.25, 0.9, 0.99])
    reply = ServedRuns(starts_s=(-0.2, 0.0, 0.3, 0.95), ends_s=(0.0, 0.3, 0.5, 1.05), counts=(1, 1, 3, 1))
    result = ModelRequests.of(arrivals, reply).result(slo_ms=310.0, seconds=1.0)
    assert (result.requests, result.served, result.unserved) == (5, 4, 1)
    assert result.latency is not None
    assert (result.latency.mean_ms, result.latency.p50_ms) == pytest.approx(((400 + 300 + 250 + 150) / 4, 275.0))
    assert (result.within_slo, result.busy, result.requests_per_run) == pytest.approx((3 / 5, 0.3 + 0.2 + 0.05, 5 / 3))
    assert result.runs is not None
    assert (result.runs.count, result.runs.mean_ms) == (3, pytest.approx(200.0))


@pytest.mark.slow
def test_sets_are_measured_and_kept(workspace: Workspace, tmp_path: Path) -> None:
    config = write_config(tmp_path / "sets.yaml", [ONE, TWO], [TWO])
    options = ("--workspace", tmp_path, "--config", config, "--json")
    first_only = json.loads(printed(SCRIPT, *options, "--first", "1"))
    path = workspace.served_sets(local_target("cpu").name)
    assert len(path.read_text().splitlines()) == len(first_only) == 1
    shown = json.loads(printed(SCRIPT, *options))
    assert [row["set"] for row in shown] == [1, 2]
    assert shown[0] == first_only[0]  # it was not measured again
    results = read_results(path)
    assert len(path.read_text().splitlines()) == len(results) == 2

    asked, result = read_config(config, ServedSetsConfig), next(iter(results.values()))
    with np.load(sets.requests_path(path, result.key)) as samples:
        for place, (model, row) in enumerate(zip(asked.sets[0], result.results, strict=True)):
            arrivals, starts, ends, counts = (samples[f"{name}_{place}"] for name in (
                "arrivals_s", "starts_s", "ends_s", "counts"))
            assert np.array_equal(arrivals, arrivals_s(asked.sets[0], place, asked))
            assert (starts >= arrivals[:len(starts)] - 1e-9).all()
            assert counts.max() <= model.batch
            counted = arrivals[:len(ends)] >= 0.0
            assert row.latency is not None
            assert row.latency.mean_ms == pytest.approx(1e3 * (ends - arrivals[:len(ends)])[counted].mean())
            assert (row.requests, row.served) == ((arrivals >= 0.0).sum(), counted.sum())
            assert sets.read_requests(path, result)[place].result(model.slo_ms, asked.seconds).latency == row.latency


@pytest.mark.slow
def test_a_failing_set_is_recorded_and_the_others_go_on(workspace: Workspace, tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    unread = [TWO, ONE | {"model": str(broken)}]
    config = write_config(tmp_path / "sets.yaml", [ONE, ONE | {"model": "none.onnx"}], unread, [TWO])
    done = run_script(SCRIPT, "--workspace", tmp_path, "--config", config, "--json")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "set 1 under slices: none.onnx: no such model" in done.stderr
    assert "2 failed, which their lines say: set 1 under slices, set 2 under slices" in done.stderr
    rows = json.loads(done.stdout)
    assert [row["status"] for row in rows] == ["failed", "failed", "ok"]
    assert ("broken.onnx: not an ONNX model" in rows[1]["error"], rows[1]["results"]) == (True, [])

    onnx.save(small_model(batch="batch"), broken)  # the next run tries again what failed, and nothing else
    again = run_script(SCRIPT, "--workspace", tmp_path, "--config", config, "--json")
    assert [row["status"] for row in json.loads(again.stdout)] == ["failed", "ok", "ok"]
    results = read_results(workspace.served_sets(local_target("cpu").name))
    assert sum(result.status == "ok" for result in results.values()) == 2


def test_results_of_another_version_or_damaged(tmp_path: Path) -> None:
    path, line = tmp_path / "cpu.jsonl", files.line_with_digest('{"version":1}')
    for text, message in ((line, "written by another version of Hase; move the file"),
                          (line.replace(":1", ":2", 1), "damaged or changed by hand")):
        path.write_text(text + "\n")
        with pytest.raises(UserError, match=rf"cpu\.jsonl, line 1: {message}"):
            read_results(path)


def test_settings_that_do_not_fit(workspace: Workspace, tmp_path: Path) -> None:
    config = write_config(tmp_path / "sets.yaml", [TWO], ways=["slices", "mps:50"])
    done = run_script(SCRIPT, "--workspace", workspace.root, "--config", config)
    assert done.stderr == "error: sharing mps:50: this is a way of sharing a GPU, and the target is a CPU; leave it out\n"
    with pytest.raises(UserError, match=r"sets\.0\.0\.dims: the size of batch has a key of its own"):
        config_of([ONE | {"dims": {"batch": 4}}])
    with pytest.raises(UserError, match=r"its file has another batch than 6"):
        open_model(Opening(model=workspace.models / "fixed.onnx", dims={}, batch=6, device="cpu", provider_options={}))


@pytest.mark.slow
def test_a_process_has_its_models_share_in_its_environment(workspace: Workspace) -> None:
    config = config_of([ONE])
    (environment,) = SetSharing.parse("mps:25").environments(1)
    with ModelServer(workspace.models / "one.onnx", config.sets[0][0], 60.0, environment) as server:
        assert server.open("cpu", {}) == ServedRuns()
        assert server.warm_up().alone_ms > 0.0
        own = [process for process in psutil.Process().children() if MODULE in process.cmdline()]
        assert [process.environ()[THREADS] for process in own] == ["25"]
        reply = server.serve([0.0, 0.001, 0.5], time.monotonic() + 0.05, 0.1)
        assert sum(reply.counts) == 2  # the third comes after the end


def test_ways_of_sharing() -> None:
    for text, shares in (("slices", [None] * 2), ("mps", ["100"] * 2), ("mps:50", ["50"] * 2), ("mps:25/75", ["25", "75"])):
        sharing = SetSharing.parse(text)
        assert [environment.get(THREADS) for environment in sharing.environments(2)] == shares
        assert [sharing.fits(models) for models in (1, 2, 3)] == ([False, True, False] if "/" in text else [True] * 3)
    for text in ("", "mig", "mps:", "mps:0", "mps:101", "mps:50/", "mps:25/0/75", "slices:50", "mps:²"):
        with pytest.raises(UserError, match=r"ways\.0: .*is no way of sharing a GPU: use slices, mps, mps:50"):
            config_of([ONE], ways=[text])


def serving_two(root: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A process that serves two models for a minute, and its servers, once they serve."""
    config = write_config(root / "sets.yaml", [ONE, TWO], seconds=60.0)
    running = subprocess.Popen([sys.executable, SCRIPT, "--workspace", str(root), "--config", str(config), "--json"],
                               cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until_s = time.monotonic() + 60.0
    while len(servers := psutil.Process(running.pid).children()) < 2:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    time.sleep(1.0)
    return running, servers


@pytest.mark.slow
def test_processes_that_are_killed_and_ctrl_c(workspace: Workspace, tmp_path: Path) -> None:
    printed(SCRIPT, "--workspace", tmp_path, "--config", write_config(tmp_path / "first.yaml", [TWO], seconds=0.1))
    path = workspace.served_sets(local_target("cpu").name)
    measured = read_results(path)
    running, servers = serving_two(tmp_path)
    running.send_signal(signal.SIGINT)  # it ends at once, with its processes, and keeps what was measured
    began = time.monotonic()
    out, err = running.communicate(timeout=20)
    assert time.monotonic() - began < 3.0
    assert (running.returncode, out) == (130, "")
    assert err.strip() == "stopped; what was measured is kept: run again to go on"
    assert not psutil.wait_procs(servers, timeout=5)[1]
    assert read_results(path) == measured

    running, servers = serving_two(tmp_path)
    for server in servers:
        server.kill()
    out, err = running.communicate(timeout=20)
    assert (running.returncode, "Traceback" in err) == (1, False)
    error = json.loads(out)[0]["error"]  # of the one that was asked first, of those that had not answered
    assert error in {f"{name}.onnx: the process that ran it ended with SIGKILL" for name in ("one", "two")}
