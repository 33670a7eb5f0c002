"""Measuring through MPS: the daemon, and what processes inherit. A small program stands in for NVIDIA's daemon, since this
machine may have no GPU; it listens where the real one would, and ends when it is told to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.load import mps
from hase.benchmark.load.mps import CONTROL, gpu_shared
from hase.utils.config import validate
from hase.utils.errors import UserError
from hase.utils.fingerprint import VISIBLE_GPUS
from hase.utils.sharing_mode import PIPE_DIRECTORY, THREADS, GpuSharing, mps_daemon_answers

DAEMON = """#!{python}
import os, socket, subprocess, sys, time
folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
if sys.argv[1:] == ["-d"]:
    if os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] != "100":
        sys.exit("the daemon must not be limited itself")
    serving = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not os.path.exists(folder + "/pid"):
        time.sleep(0.01)
elif sys.argv[1:] == ["serve"]:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(folder + "/control")
    listening.listen(1)
    with open(folder + "/pid.part", "w") as pid:
        pid.write(str(os.getpid()))
    os.rename(folder + "/pid.part", folder + "/pid")
    time.sleep(60)
else:
    if sys.stdin.read() != "quit\\n":
        sys.exit(1)
    with open(folder + "/pid") as pid:
        os.kill(int(pid.read()), 9)
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of NVIDIA's, found first on the path; and no daemon runs."""
    monkeypatch.setenv(PIPE_DIRECTORY, str(tmp_path / "nowhere"))
    program = tmp_path / CONTROL
    program.write_text(DAEMON.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return program


@pytest.mark.parametrize(("text", "sharing"), [
    ("slices", GpuSharing()), ("mps", GpuSharing(True, 100, 100)), ("mps:50", GpuSharing(True, 50, 50)),
    ("mps:25/75", GpuSharing(True, 25, 75)),
    *((text, None) for text in ("", "mig", "mps:", "mps:0", "mps:101", "mps:50/50/50"))])
def test_ways_of_sharing(text: str, sharing: GpuSharing | None) -> None:
    if sharing:
        assert GpuSharing.parse(text) == sharing
        return
    with pytest.raises(UserError, match=r"sharing: .*is no way of sharing a GPU: use slices, mps, mps:50"):
        validate({"sharing": text}, CollectorConfig, "config")


@pytest.mark.parametrize(("chosen", "inherited"), [("2", "GPU-of-two"), ("GPU-of", "GPU-of")])
def test_a_gpu_that_is_chosen_by_index_is_named_to_clients(control: Path, monkeypatch: pytest.MonkeyPatch, chosen: str,
                                                           inherited: str) -> None:
    """The daemon counts its GPUs from 0. What the driver says of the GPU is made up: this machine may have none."""
    monkeypatch.setattr(mps, "gpu_facts", lambda: {"uuid": "GPU-of-two"})
    monkeypatch.setenv(VISIBLE_GPUS, chosen)
    with gpu_shared(GpuSharing(True)):
        assert os.environ[VISIBLE_GPUS] == inherited
    assert os.environ[VISIBLE_GPUS] == chosen


def test_processes_inherit_the_daemon_and_their_share(control: Path) -> None:
    sharing = GpuSharing.parse("mps:25/75")
    with gpu_shared(sharing):
        assert mps_daemon_answers()
        folder = Path(os.environ[PIPE_DIRECTORY])
        shown = subprocess.run(["printenv", PIPE_DIRECTORY, THREADS], capture_output=True, text=True, check=True)
        assert shown.stdout.split() == [str(folder), "25"]
        assert sharing.co_runner_environment() == {THREADS: "75"}
    assert (folder.exists(), THREADS in os.environ, mps_daemon_answers()) == (False, False, False)


def test_a_daemon_that_runs_is_used_and_stays_and_time_slices_beside_it_are_refused(control: Path) -> None:
    with gpu_shared(GpuSharing(True)):
        folder = os.environ[PIPE_DIRECTORY]
        with gpu_shared(GpuSharing.parse("mps:50")):
            assert (os.environ[PIPE_DIRECTORY], os.environ[THREADS]) == (folder, "50")
        assert mps_daemon_answers()
        with pytest.raises(UserError, match="sharing slices: an MPS daemon runs"), gpu_shared(GpuSharing()):
            pass


@pytest.mark.parametrize(("program", "message"), [
    ("#!/bin/sh\necho 'no GPU here' >&2\nexit 1\n", "the MPS daemon does not start: no GPU here"),
    ("", f"{CONTROL} is not installed")])
def test_a_daemon_that_does_not_start(control: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str) -> None:
    monkeypatch.setenv("PATH", str(control.parent))  # without NVIDIA's, where that is installed
    control.write_text(program) if program else control.unlink()
    with pytest.raises(UserError, match=f"sharing mps: {message}"), gpu_shared(GpuSharing(True)):
        pass
    with pytest.raises(UserError, match="sharing mps:50: this is a way of sharing a GPU, and the target is a CPU"):
        CollectorConfig(sharing="mps:50").gpu_sharing("cpu")
