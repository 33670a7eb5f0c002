"""The ground floor: files that are never half written, configs, command lines, statistics, and paths."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from command import run_main
from pydantic import Field

from hase.utils import cli, files, fingerprint, logger, timing
from hase.utils.config import Config
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour, Target, has_cuda, resolve_device, slug
from hase.utils.paths import ROOT, Workspace, model_files
from hase.utils.text import distinct, names_by_warning

# files -------------------------------------------------------------------------------------------------------------------

def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    files.write_json(path, {"old": 1})
    with contextlib.suppress(RuntimeError), files.replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert files.read_json(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_flushed_files_are_open_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows refuses to flush anything else. A write of nothing to a file that is only read fails here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.write(descriptor, b""))
    files.write_text(tmp_path / "a.txt", "written")
    assert (tmp_path / "a.txt").read_text() == "written"


def test_a_temporary_file_keeps_its_suffix_and_is_no_model(workspace: Workspace) -> None:
    path = workspace.models / "net.onnx"
    with files.replacing(path) as temporary:
        assert temporary.suffix == ".onnx"
        temporary.write_bytes(b"model")
        assert model_files([workspace.models]) == []
    assert path.read_bytes() == b"model"
    assert path.stat().st_mode & 0o777 == 0o644


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


def test_lines_that_are_no_text_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(UserError, match="line 2: damaged"):
        files.read_lines(path)


def test_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for whole, torn in ((b"", b"torn within a c\xc3"), (b'{"a": 1}\n{"a": 2}\n', b'{"a":')):
        path.write_bytes(whole + torn)
        assert files.read_lines(path) == whole.decode().splitlines()
        files.append_line(path, '{"a": 3}')
        assert path.read_bytes() == whole + b'{"a": 3}\n'
    assert files.read_lines(tmp_path / "none") == []


def test_csv_cells(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    files.write_csv(path, ["a", "b"], [{"a": 'x,"y"', "b": None}])
    files.add_to_csv(path, ["a", "b"], [{"b": 0.5}])
    assert path.read_text() == 'a,b\n"x,""y""",\n,0.5\n'
    with pytest.raises(ValueError, match="c"):
        files.write_csv(path, ["a"], [{"c": 1}])


class Thing(Config):
    version: int = 1
    size: int = Field(2, ge=1)


@pytest.mark.parametrize(("text", "message"), [
    ('{"version": 1, "size": 3', "not valid JSON"),
    ('{"version": 2, "size": 3}', "version 2, this Hase reads version 1; make it anew: make thing"),
    ('{"version": 0, "size": 3}', "version 0, this Hase reads version 1; make it anew: make thing"),
    ('{"version": 1, "size": 3}', "damaged or changed by hand: its digest does not match .*; make it anew: make thing"),
    ('{"version": 1, "size": 3, "digest": null}', "damaged or changed by hand"),
    ('{"size": 3}', "not a file that Hase wrote, as it has no version; make it anew: make thing"),
    ("[1]", "it has no version"),
    ('{"version": 1, "size": "many"}', "damaged at size: .*; make it anew: make thing"),
    ('{"version": 1, "weight": 3}', "damaged at weight"),
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
    files.write_json(path, document)
    with pytest.raises(UserError, match="damaged or changed by hand: its digest does not match its contents"):
        files.read_record(path, Thing, 1, "make thing")
    files.write_json(path, files.with_digest(document))
    assert files.read_record(path, Thing, 1, "make thing") == Thing(size=8)
    path.unlink()
    with pytest.raises(UserError, match="no such file"):
        files.read_record(path, Thing, 1, "make thing")


def test_cache_forgets_the_oldest() -> None:
    cache: dict[int, int] = {}
    numbers = iter(range(10))
    made = [files.cached(cache, key, lambda: next(numbers), limit=2) for key in (1, 2, 1, 3, 1)]
    assert made == [0, 1, 0, 2, 3]


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
    (print, ("--workspace", "/dev/null"), 1, "error: --workspace /dev/null: a file, not a folder"),
    (lambda workspace: files.write_text(workspace.root / "here", "x"), (), 1, "error: /proc"),
    (lambda _: Path("/dev/full").write_text("x" * 100_000), (), 1, "the disk is full; free some space"),
    (raises(PermissionError(errno.EACCES, "denied", "/some/where")), (), 1, "error: /some/where: no permission"),
])
def test_exit_codes(body: Callable[[Workspace], int | None], arguments: tuple[str, ...], code: int,
                    message: str | None) -> None:
    done = ended(body, *arguments)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == (message is not None)
    assert (message or "") in done.stderr


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="a bug"):
        ended(raises(ValueError("a bug")))


def test_a_reader_that_closed_its_pipe_is_no_error() -> None:
    script = "from hase.utils import cli\ncli.run(lambda: print('line\\n' * 100000))"
    done = subprocess.run(f'"{sys.executable}" -c "{script}" | head -1; echo "${{PIPESTATUS[0]}}"', shell=True, cwd=ROOT,
                          executable="/bin/bash", capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("line\n0\n", "")


def test_dims() -> None:
    assert cli.parse_dims(["batch=1,2", "height=224", "past=0"]) == {"batch": [1, 2], "height": [224], "past": [0]}
    assert cli.one_size_dims(["batch=16"]) == {"batch": 16}


@pytest.mark.parametrize("text", ["batch", "batch=", "=1", "batch=one", "batch=-1", "batch=1,,2", "batch=1.5"])
def test_dims_without_a_valid_size(text: str) -> None:
    with pytest.raises(UserError, match=f"--dim {text}: write NAME=SIZE .*--dim batch=16"):
        cli.parse_dims([text])


def test_table_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    cli.print_table([{"a": 1.23456, "b": None}, {"a": 123456.7, "b": "x"}])
    assert capsys.readouterr().out == "a\tb\n1.235\t-\n123457\tx\n"


@pytest.mark.parametrize("width", [60, 120])
def test_table_on_a_terminal(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """FAKE: the terminal. No number is broken or cut, and every line fits."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    row = {"model": "mnasnet1_0@batch=16,height=224,width=224", "batch": 16, "latency (ms)": 54.41, "measured": "99.5 %",
           "90 % between (ms)": "3.012 and 4.123", "items/s": 1234.5, "peak memory (MiB)": 88.13, "Σ kernels (ms)": 3.142,
           "kernel": "Conv-" + "64x" * 20}
    cli.print_table([row, row | {"model": "short"}], "a title")
    out = capsys.readouterr().out
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in out.splitlines()) <= width
    assert all(out.count(number) == 2 for number in ("54.41", "3.012 and 4.123", "1234", "88.13", "3.142", "99.5 %"))
    assert ("…" in out, out.count("a title")) == (False, 1)


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_draws_no_progress_on_a_terminal(quiet: bool) -> None:
    """In a process whose stderr is a terminal."""
    pty = pytest.importorskip("pty")
    shown = "from hase.utils import logger; logger.configure(None, quiet={}); print(sum(logger.progress(range(5), 'counting')))"
    ours, its = pty.openpty()
    done = subprocess.run([sys.executable, "-c", shown.format(quiet)], cwd=ROOT, stdout=subprocess.PIPE, stderr=its, text=True)
    os.close(its)
    drawn = b""
    with contextlib.suppress(OSError):  # Linux raises where the other end is closed
        while piece := os.read(ours, 4096):
            drawn += piece
    os.close(ours)
    assert done.stdout == "10\n"
    assert (b"counting" in drawn) is not quiet
    assert drawn == b"" or not quiet


# log ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "logs" / "hase.log"
    logger.configure(None)


def test_the_log_goes_to_stderr_and_in_full_to_its_file(log_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger.configure(log_file)
    log = logger.get_logger("test")
    log.debug("detail")
    log.info("going on")
    log.warning("look")
    assert capsys.readouterr() == ("", "going on\nwarning: look\n")
    lines = log_file.read_text().splitlines()
    assert [line.partition(": ")[2] for line in lines] == ["detail", "going on", "look"]
    assert f"WARNING hase.test[{os.getpid()}]" in lines[2]


def test_log_rotates(log_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "MAX_LOG_BYTES", 2000)
    logger.configure(log_file, quiet=True)
    for number in range(200):
        logger.get_logger("test").info("line %d", number)
    assert sorted(path.name for path in log_file.parent.iterdir()) == [
        "hase.log", *(f"hase.log.{n}" for n in range(1, logger.KEPT_LOGS + 1))]
    assert all(path.stat().st_size <= 2000 for path in log_file.parent.iterdir())


def test_a_log_that_cannot_be_written_stops_nothing(log_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_file.parent.write_text("a file")
    logger.configure(log_file)
    logger.get_logger("test").warning("still here")
    assert "still here" in capsys.readouterr().err


# statistics --------------------------------------------------------------------------------------------------------------

def test_statistics_of_timings() -> None:
    statistics = timing.summarize([4.0, 1.0, 2.0, 3.0, 10.0])
    assert statistics.runs == 5
    assert (statistics.mean_ms, statistics.median_ms, statistics.min_ms, statistics.max_ms) == (4.0, 3.0, 1.0, 10.0)
    assert statistics.std_ms == pytest.approx(12.5 ** 0.5)  # of a sample: divided by n − 1
    assert statistics.p95_ms == pytest.approx(8.8)
    assert statistics.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert statistics.unstable
    assert timing.summarize([2.0]).std_ms == 0.0
    assert not timing.summarize([1.0] * 9 + [50.0]).unstable  # p95 and max show one outlier
    assert not timing.summarize([1.0, 1.05, 1.1]).unstable


def test_statistics_of_errors() -> None:
    errors = timing.error_statistics([1.0, 2.08, 0.92, 1.5], [1.0, 2.0, 1.0, 1.0])
    assert errors.count == 4
    assert errors.mape == pytest.approx((0.0 + 0.04 + 0.08 + 0.5) / 4)
    assert errors.median == pytest.approx(0.06)
    assert errors.worst == pytest.approx(0.5)
    assert errors.within_10 == 0.75
    assert errors.within_5 == 0.5


# paths and fingerprints --------------------------------------------------------------------------------------------------

def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def test_a_bare_name_is_searched_among_the_exported_models(workspace: Workspace, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="export some with: python model_zoo/torchvision_exporter"):
        workspace.find_model(Path("net.onnx"))
    touch(workspace.models / "net.onnx", workspace.models / "net.cpu-avx2-ort1.31-all.ort.onnx")
    assert workspace.find_model(Path("net.onnx")) == workspace.models / "net.onnx"
    monkeypatch.chdir(tmp_path)
    touch(tmp_path / "net.onnx")
    assert workspace.find_model(Path("net.onnx")).resolve() == tmp_path / "net.onnx"
    with pytest.raises(UserError, match=r"other\.onnx: no such model, .*\(exported: net\.onnx\)"):
        workspace.find_model(Path("other.onnx"))


def test_optimised_graphs_are_never_models(workspace: Workspace) -> None:
    touch(*(workspace.models / name for name in (
        "b.onnx", "a.onnx", "a.cpu-avx2-ort1.31-all.ort.onnx", "a.onnx.data", ".c.tmp.onnx", "notes.txt")))
    wanted = [workspace.models / "a.onnx", workspace.models / "b.onnx"]
    assert model_files([workspace.models]) == wanted
    assert workspace.find_models([workspace.models]) == wanted
    assert workspace.find_models([Path("models")]) == wanted  # as in: evaluator.py models/
    assert workspace.find_models([Path("b.onnx"), Path("models")]) == [wanted[1], *wanted]


def test_names_of_flavours_and_targets() -> None:
    cpu = Flavour(device="cpu", runtime_version="1.31", instruction_set="avx2")
    assert cpu.name == "cpu-avx2-ort1.31-all"
    assert Flavour(device="cuda", runtime_version="1.31").name == "cuda-ort1.31-all"
    assert Target(device_name="Some CPU @ 2.0GHz", flavour=cpu, threads=2).name == "some-cpu-2.0ghz-2t-cpu-avx2-ort1.31-all"
    assert slug(" NVIDIA H200 / x ") == "nvidia-h200-x"


@pytest.mark.skipif(has_cuda(), reason="this machine has a GPU")
def test_cuda_is_refused_without_a_gpu() -> None:
    assert resolve_device("auto") == "cpu"
    with pytest.raises(UserError, match="no NVIDIA GPU"):
        resolve_device("cuda")


@pytest.mark.parametrize("machine_id", ["", "\n", None])
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
    assert [files.kept_sha256(path) for _ in range(3)] == [hashlib.sha256(b"one").hexdigest()] * 3
    sha256.assert_called_once()
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # with the same age and length
    assert files.kept_sha256(path) == hashlib.sha256(b"two").hexdigest()
    with pytest.raises(FileNotFoundError):
        files.kept_sha256(tmp_path / "missing")


@pytest.mark.parametrize(("pause_s", "tries_to_sleep"), [(0.05, True), (0.0, False), (-1.0, False)])
def test_a_pause(pause_s: float, tries_to_sleep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps back, for which sleeping fails, does not end it; without time left to wait, the core is kept."""
    sleep = Mock(side_effect=OSError(errno.EINVAL, os.strerror(errno.EINVAL)))
    monkeypatch.setattr(time, "sleep", sleep)
    began_s = time.monotonic()
    timing.pause(pause_s)
    assert time.monotonic() - began_s > 0.8 * pause_s
    assert sleep.called == tries_to_sleep


def test_warnings_that_differ_in_nothing_but_numbers_are_one() -> None:
    of_a = ["3 of its kernels, 4.8%, are less sure: Conv_3x3_in1x64 …", "Relu: never measured"]
    of_b = ["12 of its kernels, 20%, are less sure: Gemm_in1x8_fp32_0c2d …", "Tanh: never measured"]
    assert names_by_warning([("a", of_a), ("b", of_b), ("a", of_a)]) == {
        f"{of_a[0]} (and 1 like it)": ["a", "b"], "Relu: never measured": ["a"], "Tanh: never measured": ["b"]}
    assert distinct([*of_a, *of_b]) == [*of_a, of_b[1]]
    others = ["float16: never measured", "bfloat16: never measured", "Col2Im: never measured", "Im2Col: never measured"]
    assert distinct(others) == others
