"""The stressor: it reaches its share of the time, reports it, and never outlives the process that started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import psutil
import pytest
from command import run_script
from conftest import small_model

from hase.benchmark.load import burners
from hase.benchmark.load.burners import AHEAD_S, BurstWork, bursts, queued_work
from hase.benchmark.load.stress import Stress, _end, _wait_until_ready, stress
from hase.records.measurement import BACKGROUND_QUEUES, COMPUTE, Background, BackgroundQueue
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.model_files import DEFAULT_DIMS_KEY
from hase.utils.paths import ROOT, Workspace

pytestmark = [pytest.mark.measuring, pytest.mark.slow]

TOTAL = "DCGM_FI_DEV_CPU_UTIL_TOTAL"
HOLDER = """
import sys, time
from pathlib import Path
from hase.benchmark.load.stress import stress
from hase.utils.paths import Workspace
with stress(0.3, device="cpu", workspace=Workspace(Path(sys.argv[1]))):
    print("up", flush=True)
    time.sleep(60)
"""


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=5)[1]


def model_background(folder: Path, **changes: Any) -> Background:
    """A small ONNX model of a dynamic batch as a background."""
    files.write_bytes(folder / "net.onnx", small_model(batch="batch").SerializeToString())
    return Background.model_validate({"name": "net", "kind": "model", "model": folder / "net.onnx"} | changes)


def test_reaches_its_share_and_ends_with_the_block(workspace: Workspace) -> None:
    before = set(psutil.Process().children(recursive=True))
    with stress(0.5, COMPUTE, "cpu", workspace=workspace) as stressor:
        children = list(set(psutil.Process().children(recursive=True)) - before)
        assert len(children) > len(os.sched_getaffinity(0))
        time.sleep(0.6)
        reached = stressor.reached()
    assert 0.0 < reached["duty"] < 0.8  # beside other work on the machine; the exact share is tested on a fake clock below
    assert gone(children)


def test_several_processes_each_with_the_given_environment(workspace: Workspace) -> None:
    """One that is killed is reported, and its workers end."""
    before = set(psutil.Process().children())
    twice = Background(name="twice", processes=2)
    with stress(0.1, twice, "cpu", workspace=workspace, environment={"HASE_TEST": "given"}) as stressor:
        started = set(psutil.Process().children()) - before
        assert [process.environ()["HASE_TEST"] for process in started] == ["given"] * 2
        assert 0.0 < stressor.reached()["duty"] < 0.8
        first = min(started, key=lambda process: process.pid)
        workers = first.children(recursive=True)
        first.kill()
        assert gone(workers)
        time.sleep(0.1)
        with pytest.raises(UserError, match="the stressor ended with exit code -9"):
            stressor.reached()
    assert gone(list(started))


def test_reports_that_never_come_or_are_torn_by_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of shells that stand in for stressors: each leads its own process group."""
    monkeypatch.setattr("hase.benchmark.load.stress.REPORT_PATIENCE_S", 0.3)
    silent, torn = (subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, process_group=0) for script in (
        """echo '{"event": "ready"}'; sleep 60""",
        """echo '{"event": "ready"}'; echo '{"event": "load", "duty": 0.5}'; printf '{"event": "lo'; sleep 60"""))
    for process in (silent, torn):
        _wait_until_ready(process)
    with pytest.raises(UserError, match=r"has not reported its load for 0\.3 s"):
        Stress(0.5, [silent]).reached()
    stressor = Stress(0.5, [torn])
    assert stressor.reached() == {"duty": 0.5}
    torn.kill()
    torn.wait()
    with pytest.raises(UserError, match="the stressor ended with exit code -9"):
        stressor.reached()
    for process in (silent, torn):
        _end(process)


def test_a_stressor_killed_as_its_workers_start_is_reported_at_once_and_they_end() -> None:
    """The child holds the pipe, like a worker that is still starting."""
    process = subprocess.Popen(["sh", "-c", "sleep 60 & kill -9 $$"], stdout=subprocess.PIPE, text=True, process_group=0)
    with pytest.raises(UserError, match="the stressor ended with exit code -9"):
        _wait_until_ready(process)
    [sleeper] = [child for child in psutil.process_iter() if os.getpgid(child.pid) == process.pid]
    _end(process)
    assert process.stdout is not None
    assert process.stdout.read() == ""  # nobody holds the pipe any more
    assert gone([sleeper])


def test_dies_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) > 1
    parent.kill()
    parent.wait()
    assert gone(family)


def test_it_ends_with_a_report_after_a_signal_or_its_time(tmp_path: Path) -> None:
    def start(kind: str, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "benchmark/stressor.py", "--workspace", str(tmp_path), "--device", "cpu", "--kind", kind,
             "--intensity", "0.2", "--json", *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    timed, process = start("memory", "--duration", "1", "--report-every", "0.3"), start("mixed")
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert (ready["event"], ready["kind"], ready["pid"]) == ("ready", "mixed", process.pid)
    workers = psutil.Process(process.pid).children(recursive=True)
    time.sleep(0.4)
    process.send_signal(signal.SIGTERM)
    stdout, errors = process.communicate(timeout=10)
    end = json.loads(stdout)
    assert (process.returncode, "Traceback" in errors, end["event"], TOTAL in end) == (0, False, "end", True)
    assert 0.0 < end["duty"] < 1.0
    assert gone(workers)
    out, errors = timed.communicate(timeout=30)
    events = [json.loads(line) for line in out.splitlines()]
    assert timed.returncode == 0, errors
    assert [event["event"] for event in (*events[:2], events[-1])] == ["ready", "load", "end"]


@pytest.mark.parametrize(("options", "message"), [
    (["--period-ms", "5000"], "error: the load asked for: period_ms: input should be less than"),
    (["--queue", "deep"], "queue deep: only a GPU has a queue to fill, and this is a CPU target"),
    (["--kind", "model"], "error: the load asked for: model: kind model needs one, an ONNX file"),
    (["--kind", "model", "--model", "gone.onnx"], "gone.onnx: no such model"),
    (["--report-every", "0.01"], "error: --report-every 0.01: psutil needs 0.2 s at least"),
])
def test_impossible_options(tmp_path: Path, options: list[str], message: str) -> None:
    done = run_script("benchmark/stressor.py", "--workspace", tmp_path, "--device", "cpu", "--intensity", "0.5", *options)
    assert (done.returncode, message in done.stderr) == (1, True)


def test_a_model_runs_in_a_loop_until_the_block_ends(workspace: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    """In one process, which runs the real model."""
    before = set(psutil.Process().children(recursive=True))
    background = model_background(workspace.models, model=Path("net.onnx"))
    with stress(0.5, background, "cpu", workspace=workspace) as stressor:
        children = list(set(psutil.Process().children(recursive=True)) - before)
        assert len([child for child in children if "spawn_main" in " ".join(child.cmdline())]) == 1
        time.sleep(0.4)
        assert 0.0 < stressor.reached()["duty"] <= 1.0
    assert gone(children)
    (workspace.models / "net.onnx").write_text("no model")
    with pytest.raises(UserError, match="ended with exit code 1"), stress(0.5, background, "cpu", workspace=workspace):
        pass
    errors = capfd.readouterr().err
    assert ("net.onnx: not an ONNX model" in errors, "Traceback" in errors) == (True, False)


def test_dimensions_are_1_or_as_given_or_the_models_own(tmp_path: Path) -> None:
    """The exporter writes all its usual sizes into a model, even if only its batch is open."""
    background = model_background(tmp_path)
    given = background.model_copy(update={"dims": {"batch": 3}})
    assert (burners.model_dims(background), burners.model_dims(given)) == ({"batch": 1}, {"batch": 3})
    proto = onnx.load(tmp_path / "net.onnx")
    onnx.helper.set_model_props(proto, {DEFAULT_DIMS_KEY: json.dumps({"batch": 4, "height": 224})})
    onnx.save(proto, tmp_path / "net.onnx")
    assert burners.model_dims(background) == {"batch": 4}


BURST_S = 5e-4


@dataclass
class FakeGpu:
    """Stands in for a GPU and the clock: bursts end one after another, and time passes only where somebody waits."""

    burst_s: float = BURST_S
    now_s: float = 100.0
    free_s: float = 0.0  # when what is queued will be over
    busy_s: float = 0.0
    most_ahead_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # idle times between bursts

    def wait_until(self, moment_s: float) -> None:
        self.now_s = max(self.now_s, moment_s)

    def launch(self) -> None:
        self.now_s += 2e-6  # the host's dispatch
        if self.free_s and self.free_s < self.now_s:
            self.gaps_s.append(self.now_s - self.free_s)
        self.free_s = max(self.free_s, self.now_s) + self.burst_s
        self.busy_s += self.burst_s
        self.most_ahead_s = max(self.most_ahead_s, self.free_s - self.now_s)

    def mark(self) -> Any:
        at_s = self.free_s
        return SimpleNamespace(query=lambda: self.now_s >= at_s, synchronize=lambda: self.wait_until(at_s))

    def wait(self) -> None:
        self.wait_until(self.free_s)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(burners.time, name, lambda: fake.now_s)
    monkeypatch.setattr(burners.time, "sleep", lambda seconds: fake.wait_until(fake.now_s + seconds))
    return fake


def burn(gpu: FakeGpu, queue: BackgroundQueue, intensity: float) -> tuple[float, float]:
    """Runs periods of 20 ms; the share of the time that the fake GPU was busy, and the share that the burner reports."""
    work = queued_work(Background(name="a", queue=queue), gpu.launch, gpu.mark, gpu.wait)
    turns = bursts(work, intensity, 0.02)
    next(turns)  # begins at the next period's beginning
    gpu.busy_s, gpu.most_ahead_s, began = 0.0, 0.0, gpu.now_s
    gpu.gaps_s.clear()
    busy_s = [next(turns) for _ in range(50)]
    return gpu.busy_s / (gpu.now_s - began), sum(busy_s) / (gpu.now_s - began)


def test_a_deep_queue_never_runs_dry_when_steady(gpu: FakeGpu) -> None:
    busy, reported = burn(gpu, "deep", 1.0)
    assert gpu.gaps_s == []
    assert AHEAD_S - BURST_S <= gpu.most_ahead_s <= AHEAD_S + BURST_S
    assert (busy, reported) == pytest.approx((1.0, 1.0), abs=0.01)
    burn(gpu, "synchronised", 1.0)
    assert gpu.most_ahead_s == pytest.approx(BURST_S)
    assert len(gpu.gaps_s) > 1000  # the GPU waits for the host after each


@pytest.mark.parametrize("intensity", [0.1, 0.4, 0.8])
def test_part_time_keeps_to_its_share(gpu: FakeGpu, intensity: float) -> None:
    """Nothing waits for the pause of the last period. Of 50 periods that is 2 % at most."""
    for queue in BACKGROUND_QUEUES:
        assert burn(gpu, queue, intensity) == pytest.approx((intensity, intensity), abs=0.04)
    work = queued_work(Background(name="a", queue="deep"), gpu.launch, gpu.mark, gpu.wait)
    turns = bursts(work, intensity, 0.02)
    for _ in range(10):  # a deep queue runs dry at the end of a share
        next(turns)
        assert gpu.free_s <= gpu.now_s
        assert gpu.now_s % 0.02 < intensity * 0.02 + BURST_S
    turns = bursts(BurstWork(lambda: gpu.wait_until(gpu.now_s + 2e-5)), intensity, 0.02)  # work that a CPU does
    next(turns)
    assert [next(turns) for _ in range(20)] == pytest.approx([intensity * 0.02] * 20, abs=5e-5)
