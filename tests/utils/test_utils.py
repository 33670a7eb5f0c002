"""The ground floor: files that are never half written, configs, command lines, statistics, and paths."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from command import run_main
from pydantic import Field

from hase.utils import cli, files, fingerprint, logger, timing
from hase.utils.config import Config
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda, resolve_device
from hase.utils.paths import ROOT, Workspace

# files -------------------------------------------------------------------------------------------------------------------

def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    files.write_json(path, {"old": 1})
    with contextlib.suppress(RuntimeError), files.replacing(path) as temporary:
        assert (temporary.suffix, temporary.name[0]) == (".json", ".")  # what is hidden is no model
        temporary.write_text("half")
        raise RuntimeError
    assert files.read_json(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_flushed_files_are_open_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows refuses to flush anything else. A write of nothing to a file that is only read fails here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.write(descriptor, b""))
    files.write_text(tmp_path / "a.txt", "written")
    assert (tmp_path / "a.txt").read_text() == "written"


@pytest.mark.parametrize("existed", [True, False])
def test_a_full_disk_loses_nothing(tmp_path: Path, existed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the data are forced to it (simulated)."""
    path = tmp_path / "table.csv"
    if existed:
        path.write_text("a\n1\n")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")))
    with pytest.raises(OSError, match="No space left"):
        files.write_csv(path, ["a"], [{"a": 1}, {"a": 2}])
    assert [p.name for p in tmp_path.iterdir()] == (["table.csv"] if existed else [])
    assert not existed or path.read_text() == "a\n1\n"


def test_append_to_a_disk_that_takes_half_a_line(tmp_path: Path) -> None:
    """A limit on the file's size stands in for a full disk: a part of the line is written before the error."""
    resource, path = pytest.importorskip("resource"), tmp_path / "journal.jsonl"
    files.append_line(path, "a" * 40)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.append_line(path, "b" * 40)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files.read_lines(path) == ["a" * 40]
    files.append_line(path, "c" * 40)
    assert path.read_text() == "a" * 40 + "\n" + "c" * 40 + "\n"


def test_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for whole, torn in ((b"", b"torn within a c\xc3"), (b'{"a": 1}\n{"a": 2}\n', b'{"a":')):
        path.write_bytes(whole + torn)
        assert files.read_lines(path) == whole.decode().splitlines()
        files.append_line(path, '{"a": 3}')
        assert path.read_bytes() == whole + b'{"a": 3}\n'
    assert files.read_lines(tmp_path / "none") == []
    path.write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(UserError, match="line 2: damaged"):
        files.read_lines(path)


class Thing(Config):
    version: int = 1
    size: int = Field(2, ge=1)


@pytest.mark.parametrize(("text", "message"), [
    ('{"version": 1, "size": 3', "not valid JSON"),
    ('{"version": 2, "size": 3}', "version 2, this Hase reads version 1; make it anew: make thing"),
    ('{"version": 1, "size": 3}', "damaged or changed by hand: its digest does not match .*; make it anew: make thing"),
    ('{"size": 3}', "not a file that Hase wrote, as it has no version; make it anew: make thing"),
    ('{"version": 1, "size": "many"}', "damaged at size: .*; make it anew: make thing"),
    (b"\xff\xfe{}", "not valid JSON"),
])
def test_records_that_do_not_fit(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "thing.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as raised:
        files.read_record(path, Thing, 1, "make thing")
    assert str(path) in str(raised.value)


def test_record_read_back(tmp_path: Path) -> None:
    path = tmp_path / "thing.json"
    files.write_json(path, Thing(size=7))
    assert files.read_record(path, Thing, 1, "make thing") == Thing(size=7)
    document = files.read_json(path) | {"size": 8}
    files.write_json(path, files.with_digest(document))
    assert files.read_record(path, Thing, 1, "make thing") == Thing(size=8)


# command lines -----------------------------------------------------------------------------------------------------------

def ended(body: Callable[[Workspace], int | None], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A script that parses the shared options and does `body`. It can't write a log, unless a workspace is given."""
    def main() -> int | None:
        return body(cli.start(cli.parser("what", "an example").parse_args()))

    return run_main(main, "it.py", *([] if "--workspace" in arguments else ["--workspace", "/proc"]), *arguments)


def raises(error: BaseException) -> Callable[[Workspace], None]:
    return Mock(side_effect=error)


@pytest.mark.parametrize(("body", "arguments", "code", "message"), [
    (lambda _: print("done"), (), 0, None),
    (lambda _: 1, (), 1, None),
    (raises(UserError("mend this")), (), 1, "error: mend this"),
    (print, ("--no-such",), 2, "error: unknown option --no-such (see "),
    (print, ("--workspace", "/no/such"), 1, "error: --workspace /no/such: no such folder; check its name, or make it first: "),
    (lambda workspace: files.write_text(workspace.root / "here", "x"), (), 1, "error: /proc"),
    (lambda _: Path("/dev/full").write_text("x" * 100_000), (), 1, "the disk is full; free some space"),
])
def test_exit_codes(body: Callable[[Workspace], int | None], arguments: tuple[str, ...], code: int,
                    message: str | None) -> None:
    done = ended(body, *arguments)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == (message is not None)
    assert (message or "") in done.stderr


@pytest.mark.slow
def test_a_bug_keeps_its_traceback() -> None:
    """And a user's error has none, whatever caused it."""
    for error, has_one in (("ValueError('a bug')", True), ("errors.UserError('mend this') from ValueError('a bug')", False)):
        script = f"from hase.utils import cli, errors\ndef main(): raise {error}\ncli.run(main)"
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr, "a bug" in done.stderr) == (1, has_one, has_one)


def test_a_reader_that_closed_its_pipe_is_no_error() -> None:
    script = "from hase.utils import cli\ncli.run(lambda: print('line\\n' * 100000))"
    done = subprocess.run(f'"{sys.executable}" -c "{script}" | head -1; echo "${{PIPESTATUS[0]}}"', shell=True, cwd=ROOT,
                          executable="/bin/bash", capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("line\n0\n", "")


@pytest.mark.parametrize("text", ["batch", "batch=", "=1", "batch=-1", "batch=1,,2", "batch=1.5"])
def test_dims_without_a_valid_size(text: str) -> None:
    assert cli.parse_dims(["batch=1,2", "height=224", "past=0"]) == {"batch": [1, 2], "height": [224], "past": [0]}
    with pytest.raises(UserError, match=f"--dim {text}: write NAME=SIZE .*--dim batch=16"):
        cli.parse_dims([text])


def test_the_log_goes_to_stderr_and_in_full_to_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that can't be written stops nothing."""
    file = tmp_path / "logs" / "hase.log"
    for path in (file, file / "below"):
        logger.configure(path)
        log = logger.get_logger("test")
        log.debug("detail")
        log.info("going on")
        log.warning("look")
        assert capsys.readouterr().err.endswith("going on\nwarning: look\n")
    logger.configure(None)
    lines = file.read_text().splitlines()
    assert [line.partition(": ")[2] for line in lines] == ["detail", "going on", "look"]
    assert f"WARNING hase.test[{os.getpid()}]" in lines[2]


# statistics --------------------------------------------------------------------------------------------------------------

def test_statistics_of_timings_and_errors() -> None:
    statistics = timing.summarize([4.0, 1.0, 2.0, 3.0, 10.0])
    assert (statistics.runs, statistics.mean_ms, statistics.median_ms, statistics.min_ms, statistics.max_ms) == (5, 4, 3, 1, 10)
    wanted = (12.5 ** 0.5, 8.8, (4.0 - 2.0) / 3.0)  # the first of a sample: divided by n − 1
    assert (statistics.std_ms, statistics.p95_ms, statistics.spread) == pytest.approx(wanted)
    assert statistics.unstable
    assert not any(timing.summarize(times).unstable for times in ([1.0] * 9 + [50.0], [1.0, 1.05, 1.1]))  # p95 shows an outlier
    errors = timing.error_statistics([1.0, 2.08, 0.92, 1.5], [1.0, 2.0, 1.0, 1.0])
    assert (errors.mape, errors.median, errors.worst) == pytest.approx(((0.04 + 0.08 + 0.5) / 4, 0.06, 0.5))
    assert (errors.count, errors.within_10, errors.within_5) == (4, 0.75, 0.5)


# paths and fingerprints --------------------------------------------------------------------------------------------------


def test_a_bare_name_is_searched_among_the_exported_models(workspace: Workspace) -> None:
    """Optimised graphs, weights and half-written files are none of them."""
    with pytest.raises(UserError, match="export some with: python model_zoo/torchvision_exporter"):
        workspace.find_model(Path("b.onnx"))
    workspace.models.mkdir(parents=True, exist_ok=True)
    for name in ("b.onnx", "a.onnx", "a.cpu-avx2-ort1.31-all.ort.onnx", "a.onnx.data", ".c.tmp.onnx", "notes.txt"):
        (workspace.models / name).touch()
    wanted = [workspace.models / "a.onnx", workspace.models / "b.onnx"]
    assert workspace.find_model(Path("a.onnx")) == wanted[0]
    assert workspace.find_models([Path("models")]) == workspace.find_models([workspace.models]) == wanted
    assert workspace.find_models([Path("b.onnx"), Path("models")]) == [wanted[1], *wanted]
    with pytest.raises(UserError, match=r"other\.onnx: no such model, .*\(exported: a\.onnx, b\.onnx\)"):
        workspace.find_model(Path("other.onnx"))


@pytest.mark.skipif(has_cuda(), reason="this machine has a GPU")
def test_cuda_is_refused_without_a_gpu() -> None:
    with pytest.raises(UserError, match="no NVIDIA GPU"):
        resolve_device("cuda")


@pytest.mark.parametrize("machine_id", ["\n", None])
def test_a_machine_without_an_id_still_has_a_name(machine_id: str | None, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty id would be the same for all such machines, and a missing value in the dataset."""
    if machine_id is not None:
        (tmp_path / "machine-id").write_text(machine_id)
    monkeypatch.setattr(fingerprint, "MACHINE_ID", tmp_path / "machine-id")
    assert fingerprint.machine("cpu").uuid == (platform.node() or "unknown")


def test_a_digest_is_kept_while_its_file_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sha256 = tmp_path / "model.onnx", Mock(wraps=files.sha256)
    monkeypatch.setattr(files, "sha256", sha256)
    path.write_bytes(b"one")
    assert [files.cached_sha256(path) for _ in range(3)] == [hashlib.sha256(b"one").hexdigest()] * 3
    sha256.assert_called_once()
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # with the same age and length
    assert files.cached_sha256(path) == hashlib.sha256(b"two").hexdigest()
    with pytest.raises(FileNotFoundError):
        files.cached_sha256(tmp_path / "missing")


class Clock:
    """A clock that moves only while something runs."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def run(self, seconds: float = 0.25) -> bool:
        self.now_s += seconds
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made_up = Clock()
    monkeypatch.setattr(timing, "time", made_up)
    return made_up


@pytest.mark.parametrize(("least", "seconds", "most", "count"), [
    (3, 0.0, 9, 3), (3, 1.0, 9, 4), (1, 5.0, 9, 9), (0, 0.0, 9, 0), (5, 1.0, 2, 5)])
def test_turns_are_at_least_so_many_and_as_many_as_begin_in_time(clock: Clock, least: int, seconds: float, most: int,
                                                                 count: int) -> None:
    assert [number for number in timing.turns(least, seconds, most) if clock.run()] == [*range(count)]


def test_every_run_is_kept_but_those_that_warm_up_and_nothing_else_is_timed(clock: Clock) -> None:
    lengths_s = iter([9.0, 9.0, 0.5, 0.25, 0.5])
    assert timing.time_runs_ms(lambda: clock.run(next(lengths_s)), 3, warmup=2) == [500.0, 250.0, 500.0]
    assert len(timing.time_runs_ms(clock.run, 1, 2.0)) == 8
    run_s = timing.timed(clock.run, before=lambda: clock.run(100.0))
    assert ([run_s(), run_s()], timing.warm_up(clock.run, 2, 1.0)) == ([0.25, 0.25], (4, 0.25))
