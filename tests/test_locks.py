"""Locks that end with their process, and temporary folders that go with theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from utils import locks
from utils.errors import UserError
from utils.locks import measuring, sole_writer
from utils.paths import ROOT
from utils.temporary import remove_left_over, temporary_folder

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from utils.locks import measuring, sole_writer
from utils.temporary import temporary_folder
with sole_writer(Path(sys.argv[1])), measuring("cpu"), temporary_folder() as folder:
    (folder / "large").write_bytes(bytes(1000))
    child = subprocess.Popen(["sleep", "60"])  # outlives its parent
    print(child.pid, folder, flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds a folder, the CPU and a temporary folder, and has a child that outlives it."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child, temporary = process.stdout.readline().split()
    try:
        yield process, Path(temporary)
    finally:
        process.kill()
        process.wait()
        os.kill(int(child), 9)


def test_the_other_is_named_and_its_locks_die_with_it(tmp_path: Path) -> None:
    with holder(tmp_path / "data") as (process, _):
        told = rf"in use by process {process.pid} \(-c .*data, since 20\d\d-.*wait until"
        for block in (sole_writer(tmp_path / "data"), measuring("cpu")):
            with pytest.raises(UserError, match=told), block:
                pass
        process.kill()
        process.wait()  # its child lives on
        with sole_writer(tmp_path / "data"), measuring("cpu"):
            pass


def test_a_process_may_hold_a_lock_several_times_over(tmp_path: Path) -> None:
    with sole_writer(tmp_path), sole_writer(tmp_path):
        pass
    done = subprocess.run([sys.executable, "-c", "import sys; from pathlib import Path; from utils.locks import sole_writer\n"
                           "with sole_writer(Path(sys.argv[1])): print('mine')", str(tmp_path)],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "mine\n", done.stderr


def test_a_device_s_lock_is_everybodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(locks.FOLDER_VARIABLE, str(tmp_path))
    before = os.umask(0o077)
    try:
        with measuring("cpu"):
            assert (tmp_path / "hase-cpu.lock").stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_what_somebody_planted_is_neither_followed_nor_waited_for(planted: str, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(locks.FOLDER_VARIABLE, str(tmp_path))
    precious = tmp_path / "precious"
    precious.write_text("kept")
    if planted == "link":
        (tmp_path / "hase-cpu.lock").symlink_to(precious)
    else:
        os.mkfifo(tmp_path / "hase-cpu.lock")
    with pytest.raises(UserError, match=r"hase-cpu\.lock: can't be locked"), measuring("cpu"):
        pass
    assert precious.read_text() == "kept"


def test_the_temporary_folder_of_a_dead_process_goes_and_a_living_one_s_stays(tmp_path: Path) -> None:
    with holder(tmp_path / "one") as (process, temporary), temporary_folder() as own:
        assert remove_left_over() == []
        assert (temporary / "large").exists()
        assert own.is_dir()
        process.kill()
        process.wait()
        assert (temporary / "large").exists()
        with temporary_folder():
            assert not temporary.exists()
        assert own.is_dir()
    assert not own.exists()


def test_a_folder_that_is_just_being_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    young, old = tmp_path / "hase-new-young", tmp_path / "hase-new-old"
    for folder in (young, old):
        folder.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    assert remove_left_over() == [old]
    assert young.is_dir()
