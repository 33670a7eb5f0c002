"""Models that come from anywhere are parsed in a child with limits; what goes wrong there is one error here. The next question
about the same content is answered from the user's cache."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import psutil
import pytest
from conftest import small_model
from fuzz.damaged_models import calls, choice, folded, large_constants, loop, network

from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.isolated import analysis
from hase.ort_analysis.isolated.analysis import Analyst
from hase.ort_analysis.isolated.messages import AnalysisFailure, AnalysisReply, AnalysisTask
from hase.records.kernel_record import ModelRecord
from hase.runtimes import local_flavour
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.files import write_bytes
from hase.utils.paths import ROOT

CPU = local_flavour("cpu")


@pytest.fixture(scope="module", autouse=True)
def own_analyst() -> Iterator[Analyst]:
    analyst = Analyst()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis, "_analyst", analyst)
        yield analyst
    analyst.stop()


def saved(model: onnx.ModelProto, path: Path) -> Path:
    write_bytes(path, model.SerializeToString())
    return path


def record_of(path: Path, **dims: int) -> ModelRecord:
    return analysis.record_of(path, CPU, dims, False)


def child_of(analyst: Analyst) -> psutil.Process:
    process = analyst._child._process
    assert process is not None
    return psutil.Process(process.pid)


@pytest.mark.slow
def test_a_record_from_the_child_is_the_one_made_here(tmp_path: Path) -> None:
    path = saved(network(), tmp_path / "network.onnx")
    assert record_of(path, batch=3) == analyze(path, "cpu", {"batch": 3})
    assert analysis.record_of(network(), CPU, {"batch": 3}, True) == analyze(network(), "cpu", {"batch": 3}, static=True)
    assert analysis.own_sizes(path, {"batch": [1, 2], "width": [3]}) == [{"batch": 1}, {"batch": 2}]
    assert [node["op_type"] for node in analysis.graph_of(path, "cpu", {}, True)["nodes"]][-1] == "Softmax"


@pytest.mark.slow
def test_weights_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a model in memory: they lie in the current folder."""
    onnx.save(network(), tmp_path / "n.onnx", save_as_external_data=True, location="n.weights", size_threshold=64)
    monkeypatch.chdir(tmp_path)
    assert analysis.weight_files(Path("n.onnx")) == [Path("n.weights")]
    record = record_of(Path("n.onnx"))
    in_memory = analysis.record_of(onnx.load("n.onnx", load_external_data=False), CPU, {}, False)
    assert record.kernels == in_memory.kernels
    Path("n.weights").unlink()
    for ask in (lambda: record_of(Path("n.onnx")), lambda: analysis.weight_files(Path("n.onnx"))):
        with pytest.raises(UserError, match=r"^n.onnx: its weights lie in n.weights, which is missing"):
            ask()


@pytest.mark.skipif(sys.platform != "linux", reason="file names of other systems are text")
def test_a_file_whose_name_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime opens it only by a name that is text, such as one that begins in the current folder."""
    folder = tmp_path / os.fsdecode(b"\xff\xfe %41")
    folder.mkdir()
    path = saved(small_model(), folder / "small.onnx")
    for ask in (lambda: record_of(path), lambda: analysis.weight_files(path), lambda: analysis.own_sizes(path, {"batch": [1]})):
        with pytest.raises(UserError, match="its name is not UTF-8, and ONNX Runtime opens no such file; rename it"):
            ask()
    monkeypatch.chdir(folder)
    assert len(record_of(Path("small.onnx")).nodes) > 1


@pytest.mark.slow
def test_models_made_to_do_harm(tmp_path: Path, own_analyst: Analyst) -> None:
    for model, message in ((choice(22), "more than 16 deep"), (loop(22), "more than 16 deep"),
                           (calls(40, 2), "more than 50,000 nodes"), (calls(3000), "more than 100 deep")):
        with pytest.raises(UserError, match=message):
            record_of(saved(model, tmp_path / "harmful.onnx"))
        assert own_analyst._child.memory_use_mib() < 500


@pytest.mark.slow
def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_analyst: Analyst) -> None:
    """Constants that are folded for hours meet the limit of time, and large ones that of memory. The next model is read."""
    monkeypatch.setattr(analysis, "LIMIT_S", 1.0)
    slow = saved(folded(), tmp_path / "slow.onnx")
    with pytest.raises(UserError, match=r"slow.onnx: its analysis was ended: no answer within 1 s; if you trust this model"):
        analysis.graph_of(slow, "cpu", {}, True)
    monkeypatch.setattr(analysis, "LIMIT_S", 50.0)
    monkeypatch.setattr(analysis, "LIMIT_MIB", 300.0)
    with pytest.raises(UserError, match=r"slow.onnx: its analysis was ended: it took more than 0.3 GiB of memory"):
        analysis.graph_of(slow, "cpu", {}, True)
    monkeypatch.setattr(analysis, "LIMIT_MIB", 3584.0)
    assert len(record_of(saved(small_model(), tmp_path / "small.onnx")).nodes) > 1
    assert len(record_of(saved(large_constants(320), tmp_path / "large.onnx")).nodes) > 1
    assert own_analyst._child.memory_use_mib() < 500


def test_the_limits_of_a_file_with_holes_and_their_factor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terabyte of holes is no reason to allow a child more."""
    sizes_gib: list[float] = []

    def asked(self: Analyst, task: AnalysisTask, size_gib: float, limit_s: float) -> AnalysisReply:
        sizes_gib.append(size_gib)
        return AnalysisReply()

    monkeypatch.setattr(Analyst, "ask", asked)
    with (tmp_path / "holes.onnx").open("wb") as file:
        file.truncate(1 << 40)
    analysis._ask(AnalysisTask(do="graph", model=tmp_path / "holes.onnx"))
    assert sizes_gib[0] < 0.01
    monkeypatch.setenv("HASE_LIMITS", "4")
    assert analysis._factor() == 4.0
    for wrong in ("", "x", "0", "nan", "inf"):
        monkeypatch.setenv("HASE_LIMITS", wrong)
        with pytest.raises(UserError, match=f"^HASE_LIMITS={wrong}: not a positive number"):
            analysis._factor()


@pytest.mark.slow
def test_a_child_that_died_is_replaced_and_an_interrupted_question_not_answered_later(tmp_path: Path, own_analyst: Analyst
                                                                                      ) -> None:
    path, network_file = saved(small_model(), tmp_path / "small.onnx"), saved(network(), tmp_path / "network.onnx")
    record = record_of(path)
    first = child_of(own_analyst)
    first.kill()
    first.wait()
    assert record_of(path) == record
    second = child_of(own_analyst)
    second.suspend()
    threading.Timer(0.3, second.kill).start()  # while it is asked
    assert record_of(path) == record
    third = child_of(own_analyst)
    third.suspend()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        record_of(path)
    assert record_of(network_file).file_stem == "network"


@pytest.mark.slow
def test_threads_share_the_child_and_may_end_and_a_forked_process_has_its_own(tmp_path: Path, own_analyst: Analyst) -> None:
    """Linux ends the child of a thread that ends, if the thread started it."""
    paths = [saved(small_model(batch), tmp_path / f"m{batch}.onnx") for batch in range(1, 7)]
    with ThreadPoolExecutor(3) as threads:
        records = list(threads.map(record_of, paths))
    assert [record.file_stem for record in records] == [path.stem for path in paths]
    child = child_of(own_analyst)
    time.sleep(0.1)
    assert child.status() != psutil.STATUS_ZOMBIE
    assert record_of(paths[0]) == records[0]
    assert child_of(own_analyst).pid == child.pid
    if not hasattr(os, "fork"):
        return
    forked = os.fork()
    if not forked:
        same = False
        try:
            same = record_of(paths[0]) == records[0] and analysis._analyst is not own_analyst
            analysis._analyst.stop()
            own_analyst.stop()  # not its own
        finally:
            os._exit(0 if same else 1)
    assert os.waitpid(forked, 0)[1] == 0
    assert child_of(own_analyst).is_running()
    assert record_of(paths[0]) == records[0]


def test_a_bug_and_a_full_disk_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = AnalysisFailure(kind="bug", text="Traceback …\nKeyError: 1")
    full = AnalysisFailure(kind="system", text="No space left on device", number=28, path=Path("/x"))
    replies = iter([AnalysisReply(failure=bug), AnalysisReply(failure=full)])
    monkeypatch.setattr(analysis.WorkerProcess, "ask", lambda self, task: next(replies))
    path = saved(small_model(), tmp_path / "small.onnx")
    with pytest.raises(RuntimeError, match=r"met a bug:\nTraceback …\nKeyError: 1"):
        record_of(path)
    with pytest.raises(OSError, match="No space left on device: '/x'") as raised:
        record_of(path)
    assert raised.value.errno == 28


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """Whatever is asked of the model: onnx gives such names as bytes."""
    path = tmp_path / "m.onnx"
    onnx.save(network(), path, save_as_external_data=True, location="n.weights", size_threshold=64)
    for name in (b"conv", b"Conv", b"n.weights"):
        whole = path.read_bytes()
        path.write_bytes(whole.replace(name, b"\xff" + name[1:]))
        for ask in (lambda: analysis.own_sizes(path, {"batch": [1]}), lambda: analysis.weight_files(path),
                    lambda: analysis.graph_of(path, "cpu", {}, False), lambda: analysis.check_opens(path, "cpu", {}, False)):
            with contextlib.suppress(UserError):
                ask()
        with pytest.raises(UserError, match="not UTF-8"):
            record_of(path)
        path.write_bytes(whole)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the child was asked for."""
    monkeypatch.setenv("HASE_CACHE", str(tmp_path / "cache"))
    kinds: list[str] = []
    ask = Analyst.ask

    def counted(self: Analyst, task: AnalysisTask, size_gib: float, limit_s: float) -> AnalysisReply:
        kinds.append(task.do)
        return ask(self, task, size_gib, limit_s)

    monkeypatch.setattr(Analyst, "ask", counted)
    return kinds


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(small_model(batch="batch"), tmp_path / "net.onnx")


def kept(path: Path, device: str = "cuda", static: bool = False, half: bool = False, **dims: int) -> ModelRecord:
    return analysis.record_of(path, local_flavour(device), {"batch": 2} | dims, static, analysis.weight_files(path), half=half)


def test_a_file_is_taken_apart_once(asked: list[str], model: Path, tmp_path: Path) -> None:
    first = kept(model)
    assert kept(model) == first
    assert asked == ["record"]
    (tmp_path / "elsewhere").mkdir()
    assert kept(Path(shutil.copy(model, tmp_path / "elsewhere" / "net.onnx"))) == first  # by its content
    assert analysis.own_names(model, ["batch"]) == analysis.own_names(model, ["batch"]) == {"batch"}
    assert asked == ["record", "sizes"]


def test_what_a_record_depends_on(asked: list[str], model: Path, tmp_path: Path) -> None:
    records = [kept(model), kept(model, batch=3), kept(model, static=True), kept(model, "cpu"),
               kept(model, half=True)]
    assert len(asked) == len({record.model_dump_json() for record in records}) == len(records)
    assert kept(Path(shutil.copy(model, tmp_path / "other.onnx"))).model == "other@batch=2,dynamic"
    onnx.save(small_model(channels=16, batch="batch"), model)
    assert kept(model).kernels.keys() != records[0].kernels.keys()


@pytest.mark.parametrize("of", ["ort_version", "instruction_set", "code_version"])
def test_another_version_takes_it_apart_anew(of: str, asked: list[str], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(model)
    monkeypatch.setattr(analysis, of, lambda *_: "another")
    analysis._versions_and_code.cache_clear()
    try:
        kept(model)
        assert asked == ["record", "record"]
    finally:
        analysis._versions_and_code.cache_clear()


def test_weights_in_files(asked: list[str], model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A link to another folder is refused although the model was answered before."""
    onnx.save(onnx.load(model), model, save_as_external_data=True, location="weights", size_threshold=16)
    first, weights = kept(model), model.parent / "weights"
    assert kept(model) == first
    assert asked == ["weights", "record"]
    os.utime(weights, (1000, 1000))
    kept(model)
    assert asked == ["weights", "record", "record"]
    moved = shutil.move(weights, tmp_path_factory.mktemp("outside"))
    with pytest.raises(UserError, match="which is missing"):
        kept(model)
    weights.symlink_to(moved)
    with pytest.raises(UserError, match="outside its own folder"):
        kept(model)


def test_failures_are_not_kept_and_damage_is_mended(asked: list[str], model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="no dynamic dimension depth"):
            kept(model, depth=3)
    first = kept(model)
    for entry in (tmp_path / "cache").iterdir():
        files.write_bytes(entry, entry.read_bytes()[:50])
    assert kept(model) == first
    assert asked == ["record"] * 4


def test_what_the_analysis_said_is_said_again(asked: list[str], model: Path, caplog: pytest.LogCaptureFixture,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("hase"), "propagate", True)
    said = []
    for _ in range(2):
        caplog.clear()
        analysis.record_of(model, local_flavour("cuda"), {"batch": 2, "p.0": 7}, False)
        said.append([record.getMessage() for record in caplog.records])
    assert any("p.0=7 changes nothing" in line for line in said[0])
    assert said[0] == said[1]
    assert asked == ["record"]


@pytest.mark.slow
def test_the_second_command_starts_no_child_and_reads_no_booster(model: Path, tmp_path: Path) -> None:
    """Its answer is the same to the last digit."""
    def command(cache: str | Path, *python: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *python, "inference/predict_model_latency.py", "--model", model, "--dim",
                               "batch=2", "--target", "nvidia-h200", "--json"], cwd=ROOT, capture_output=True, text=True,
                              env=os.environ | {"HASE_CACHE": str(cache)}, check=True)

    answers = [command(*words) for words in (("off",), (tmp_path / "cache",), (tmp_path / "cache", "-X", "importtime"))]
    assert json.loads(answers[0].stdout) == json.loads(answers[1].stdout) == json.loads(answers[2].stdout)
    imported = {line.rpartition("|")[2].strip() for line in answers[2].stderr.splitlines()
                if line.startswith("import time:")}
    assert "numpy" in imported
    assert not imported & {"onnx", "onnxruntime", "xgboost", "scipy"}
