"""The stressor: reaches its share of the time, says so, and never outlives the process that wanted it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from threadpoolctl import threadpool_limits

from benchmark.burners import KINDS, bursts, cpu_step
from benchmark.stressor import stress
from utils.errors import UserError
from utils.paths import ROOT, Workspace

TOTAL = "DCGM_FI_DEV_CPU_UTIL_TOTAL"
HOLDER = """
import sys, time
from pathlib import Path
from benchmark.stressor import stress
from utils.paths import Workspace
with stress(0.3, "compute", "cpu", workspace=Workspace(Path(sys.argv[1]))):
    print("up", flush=True)
    time.sleep(60)
"""


def start(root: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "benchmark/stressor.py", "--workspace", str(root), "--device", "cpu", *options],
                            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=5)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_short(kind: str) -> None:
    step = cpu_step(kind)
    times_s = []
    with threadpool_limits(1):  # as the workers have it
        for _ in range(50):
            began = time.perf_counter()
            step()
            times_s.append(time.perf_counter() - began)
    assert min(times_s) < 2e-3


def test_bursts_take_their_share_of_each_period() -> None:
    began = time.monotonic()
    burnt = list(itertools.islice(bursts(lambda: time.sleep(0.0005), 0.4, 0.02), 20))
    periods = (time.monotonic() - began) / 0.02
    assert 18 < periods < 60
    assert 0.3 < sum(burnt) / len(burnt) / 0.02 < 0.6


def test_reaches_its_share_and_ends_with_the_block(workspace: Workspace) -> None:
    before = set(psutil.Process().children(recursive=True))
    with stress(0.5, "compute", "cpu", workspace=workspace) as stressor:
        children = sorted(set(psutil.Process().children(recursive=True)) - before, key=lambda child: child.pid)
        assert len(children) > len(os.sched_getaffinity(0))
        time.sleep(1.2)
        reached = stressor.reached()
    # other work on the machine takes time from the stressor, and adds to the device's own figure
    assert 0.15 < reached["duty"] < 0.65
    assert reached["duty"] - 0.1 < reached[TOTAL] <= 1.0
    assert gone(children)


def test_intensity_0_starts_nothing() -> None:
    before = psutil.Process().children(recursive=True)
    with stress(0.0, "compute", "cpu") as stressor:
        assert stressor.reached() == {"duty": 0.0}
        assert psutil.Process().children(recursive=True) == before


def test_a_stressor_that_died_is_told(workspace: Workspace) -> None:
    known = set(psutil.Process().children())
    with stress(0.1, "compute", "cpu", workspace=workspace) as stressor:
        (child,) = set(psutil.Process().children()) - known
        workers = child.children(recursive=True)
        child.kill()
        assert gone(workers)
        time.sleep(0.1)
        with pytest.raises(UserError, match="the stressor ended with exit code -9"):
            stressor.reached()


def test_dies_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) > 1
    parent.kill()
    parent.wait()
    assert gone(family)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_a_report(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "--kind", "mixed", "--intensity", "0.3", "--json")
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert (ready["event"], ready["kind"], ready["pid"]) == ("ready", "mixed", process.pid)
    workers = psutil.Process(process.pid).children(recursive=True)
    time.sleep(0.4)
    process.send_signal(number)
    rest, errors = process.communicate(timeout=10)
    end = json.loads(rest)
    assert (process.returncode, errors.count("Traceback")) == (0, 0)
    assert end["event"] == "end"
    assert 0.0 < end["duty"] < 1.0
    assert TOTAL in end
    assert gone(workers)


def test_duration_and_reports(tmp_path: Path) -> None:
    process = start(tmp_path, "--kind", "copy", "--intensity", "0.2", "--duration", "1", "--report-every", "0.3", "--json")
    out, errors = process.communicate(timeout=30)
    events = [json.loads(line) for line in out.splitlines()]
    assert process.returncode == 0, errors
    assert [event["event"] for event in events[:2]] == ["ready", "load"]
    assert events[-1]["event"] == "end"
    assert 0.9 < events[-1]["seconds"] < 2.0


@pytest.mark.parametrize(("options", "code", "message"), [
    (["--intensity", "1.5"], 2, "1.5 is not between 0 and 1"),
    (["--intensity", "0.5", "--duration", "-1"], 2, "-1 is not a positive number"),
    (["--intensity", "0.5", "--period-ms", "5000"], 1, "error: --period-ms 5000: 1000 at most"),
    (["--intensity", "0.5", "--report-every", "0.01"], 1, "error: --report-every 0.01: psutil needs 0.2 s at least"),
])
def test_impossible_options(tmp_path: Path, options: list[str], code: int, message: str) -> None:
    process = start(tmp_path, *options)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert message in errors
