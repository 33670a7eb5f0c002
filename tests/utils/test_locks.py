"""Locks that end with their process, and temporary folders that are removed after theirs."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from command import run_script

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.units import start_workers
from hase.inference.evaluation.evaluate import EvaluationLoads, MeasuringPlan, measure_all
from hase.inference.evaluation.models import Failures
from hase.inference.prediction.conditions import AS_USUAL
from hase.runtimes import local_target
from hase.utils import locks
from hase.utils.errors import UserError
from hase.utils.files import remove_left_over, shared_folder, temporary_folder
from hase.utils.locks import measuring, sole_writer
from hase.utils.paths import ROOT, Workspace
from tests.conftest import build_workspace, small_model

HOLDER = """
import subprocess, sys, time
from contextlib import ExitStack
from pathlib import Path
from hase.utils.locks import measuring, sole_writer
from hase.utils.files import temporary_folder
with ExitStack() as held:
    for folder in sys.argv[1:]:
        held.enter_context(sole_writer(Path(folder)))
    held.enter_context(measuring("cpu"))
    folder = held.enter_context(temporary_folder())
    (folder / "large").write_bytes(bytes(1000))
    child = subprocess.Popen(["sleep", "60"])  # outlives its parent
    print(child.pid, folder, flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(*folders: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds folders, the CPU and a temporary folder, and has a child that outlives it."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, *map(str, folders)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"TMPDIR": tempfile.gettempdir()})
    assert process.stdout is not None
    child, temporary = process.stdout.readline().split()
    try:
        yield process, Path(temporary)
    finally:
        process.kill()
        process.wait()
        os.kill(int(child), 9)


def test_the_error_names_the_process_and_locks_end_with_it(tmp_path: Path) -> None:
    with holder(tmp_path / "data") as (process, _):
        message = rf"in use by process {process.pid} \(-c .*data, since 20\d\d-.*wait until"
        for block in (sole_writer(tmp_path / "data"), measuring("cpu")):
            with pytest.raises(UserError, match=message), block:
                pass
        process.kill()
        process.wait()  # its child is still alive
        with sole_writer(tmp_path / "data"), measuring("cpu"):
            pass


@pytest.mark.slow
def test_a_process_may_hold_a_lock_several_times(tmp_path: Path) -> None:
    """Others may take it once it has left it as often."""
    program = "import sys\nfrom pathlib import Path\nfrom hase.utils.locks import sole_writer\n" \
              "with sole_writer(Path(sys.argv[1])): print('mine')"
    with sole_writer(tmp_path):
        with sole_writer(tmp_path):
            pass
        assert "in use by process" in subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT,
                                                     capture_output=True, text=True).stderr
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "mine\n", done.stderr


@pytest.mark.slow
def test_a_lock_is_waited_for_where_the_option_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(locks.WAIT_VARIABLE, "")
    onnx.save(small_model(), tmp_path / "net.onnx")
    folder = tmp_path / "ort_analysis" / "ort_kernel_record"
    with holder(folder) as (process, _):
        options = ("ort_analysis/fusion_detector.py", "--workspace", tmp_path, "--model", tmp_path / "net.onnx")
        refused = run_script(*options)
        assert (refused.returncode, f"in use by process {process.pid}" in refused.stderr) == (1, True)
        assert "(--wait does)" in refused.stderr
        threading.Timer(0.5, process.kill).start()
        waited = run_script(*options, "--wait")
        assert (waited.returncode, waited.stderr.count("waiting: ")) == (0, 1), waited.stderr
        assert f"waiting: {folder}: this folder is in use by process {process.pid}" in waited.stderr
        assert "wait until" not in waited.stderr


@pytest.mark.slow
def test_every_script_locks_what_it_writes_or_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(tmp_path)
    build_workspace(workspace, {"anet_b1": small_model()})
    (tmp_path / "config.yaml").write_text("device: cpu\n")
    kernels, learned = tmp_path / "kernel_model" / "kernel_onnx", tmp_path / "training" / "predictors"
    dataset, records = workspace.dataset(local_target("cpu").name), tmp_path / "ort_analysis" / "ort_kernel_record"
    fitted: Any = SimpleNamespace(target=local_target("cpu"))
    models: Any = [SimpleNamespace()]
    with holder(dataset, kernels, records, learned) as (process, _):
        cpu = f"device cpu: it is in use by process {process.pid} "
        for script, place, *options in (
                ("benchmark.collector", dataset, "--config", str(tmp_path / "config.yaml")),
                ("benchmark.ort_kernel_runner", None, "--model", "anet_b1.onnx"),
                ("kernel_model.kernel_builder", kernels), ("kernel_model.kernel_sampler", kernels, "--count", "1"),
                ("ort_analysis.fusion_detector", records), ("training.train_kernel_model", learned, "--target", "one"),
                ("training.fit_composition", learned, "--target", "one"), ("training.fit_sharing", learned, "--target", "one")):
            monkeypatch.setattr(sys, "argv", [script, "--workspace", str(tmp_path), "--quiet", *options])
            refused = f"{place}: this folder is in use by process {process.pid} " if place else cpu
            with pytest.raises(UserError, match=re.escape(refused)):
                import_module(f"hase.{script}").main()
        with pytest.raises(UserError, match=cpu):
            measure_all(models, fitted, AS_USUAL, EvaluationLoads(), MeasuringPlan(), workspace, False, Failures())
        with pytest.raises(UserError, match=cpu), start_workers(CollectorConfig(), "cpu", ()):
            pass


def test_files_half_written_before_a_kill_are_removed(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "below"):
        folder.mkdir(exist_ok=True)
        (folder / ".index.a1b2c3.tmp.json").write_text("{")
        (folder / "index.json").write_text("{}")
    with sole_writer(tmp_path):
        assert {path.name for path in tmp_path.rglob("*")} == {"index.json", "below", locks.WRITER}


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_a_planted_devices_lock_is_neither_followed_nor_waited_for(planted: str, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(locks.FOLDER_VARIABLE, str(tmp_path))
    lock, precious = tmp_path / "hase-cpu.lock", tmp_path / "precious"
    precious.write_text("kept")
    if planted == "link":
        lock.symlink_to(precious)
    else:
        os.mkfifo(lock)
    with pytest.raises(UserError, match=r"hase-cpu\.lock: can't be locked"), measuring("cpu"):
        pass
    assert precious.read_text() == "kept"
    lock.unlink()
    umask = os.umask(0o077)
    with measuring("cpu"):
        assert lock.stat().st_mode & 0o777 == 0o666  # every user may write the usual one
    os.umask(umask)


def test_the_temporary_folder_of_a_dead_process_is_removed_and_that_of_a_living_one_stays(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # else any other command of Hase on this machine may clean up first
    with holder(tmp_path / "one") as (process, temporary), temporary_folder() as living:
        assert remove_left_over() == []
        assert (temporary / "large").exists()
        assert living.is_dir()
        process.kill()
        process.wait()
        assert (temporary / "large").exists()
        with temporary_folder():
            assert not temporary.exists()
        assert living.is_dir()
    assert not living.exists()


SHARER = """
import sys
from hase.utils.files import shared_folder
with shared_folder("together") as folder:
    (folder / sys.argv[1]).touch()
    print(folder, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_shared_folder_is_removed_by_the_last_who_leaves_it_or_by_whoever_comes_after_a_kill(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def sharer(name: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", SHARER, name], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)},
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert Path(process.stdout.readline().strip()) == tmp_path / "hase-temp-together"
        return process

    with shared_folder("together") as folder:
        other = sharer("other")
        assert [path.name for path in folder.iterdir()] == ["other"]
        assert remove_left_over() == []
        other.communicate("leave\n")
        assert folder.is_dir()
    assert not folder.exists()
    killed, stays = sharer("killed"), sharer("stays")
    killed.kill()
    killed.communicate()
    assert remove_left_over() == []
    stays.kill()
    stays.communicate()
    assert remove_left_over() == [folder]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(("held", "mode", "message"), [
    (True, 0o666, r"this folder is in use by process {pid} \(-c .*; wait until"),
    (True, 0o644, r"this folder is in use by process {pid} \(-c .* of user {user}; wait until"),
    (True, 0o600, "{lock}: can't be read, so it is not known whether a process of user {user} is running"),
    (False, 0o644, "{lock}: can't be written, since it is user {user}'s; no process holds it: remove it"),
    (False, 0o666, None)])
def test_the_lock_of_another_user(held: bool, mode: int, message: str | None) -> None:
    """It is taken where it can be written; else the process or the file, and the user, are named."""
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:  # every user may write it, as pytest's own may not be
        os.chmod(shared, 0o777)
        lock, user = Path(shared, "data", locks.WRITER), pwd.getpwuid(0).pw_name
        with holder(lock.parent) as (process, _):
            lock.chmod(mode)
            lock.parent.chmod(0o777)
            if not held:
                process.kill()
                process.wait()
            os.seteuid(pwd.getpwnam("nobody").pw_uid)
            try:
                if message is None:
                    with sole_writer(lock.parent):
                        assert f'"pid": {os.getpid()}' in lock.read_text()
                else:
                    with pytest.raises(UserError, match=message.format(pid=process.pid, user=user, lock=lock)), \
                            sole_writer(lock.parent):
                        pass
            finally:
                os.seteuid(0)
