"""profile_stages.py on real graphs: it exports, measures with real runtimes, resumes, falls back, and reports missing units.

Feature widths are small. This machine may have no GPU or NPU: tests that need one pretend.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from command import run_script
from optional_packages import needs

from hase.extras.graph_stages.measuring import profiling
from hase.extras.graph_stages.measuring import units as opening
from hase.extras.graph_stages.measuring.layer import STAGES, GraphSize, GraphSource
from hase.extras.graph_stages.measuring.models import export_stages, model_files
from hase.extras.graph_stages.measuring.records import RawMeasurements, read_raw
from hase.extras.graph_stages.measuring.units import OpenedStage, Refused, StageTask, choose_units, find_units, open_stage
from hase.extras.graph_stages.measuring.worker import RESIDENT, measure_stage
from hase.utils.errors import UserError
from hase.utils.ort_sessions import open_session
from hase.utils.paths import ROOT, Workspace
from hase.utils.processes import WorkerFailed

pytestmark = pytest.mark.slow

SCRIPT = "extras/graph_stages/profile_stages.py"
CASES = {"feature_dim": 8, "hidden_dim": 4, "test_cases": [{"nodes": 60, "edges": 200}, {"nodes": 90, "edges": 100}]}
QUICK = ("--warmup", "1", "--runs", "3")
HIDING = """
import sys
import psutil, subprocess, multiprocessing, tempfile, shutil  # their imports depend on the system
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
"""  # as on Windows, in the script and in its worker
AS_ON_WINDOWS = """
import os, signal, sys
kill = signal.SIGKILL
for module, names in ((signal, ("SIGKILL", "SIGHUP", "SIGCHLD")), (os, ("fork", "getuid", "geteuid"))):
    for name in names:
        delattr(module, name)
from hase.extras.graph_stages import profile_stages
from hase.utils import cli
signal.SIGKILL = kill  # Python's own subprocess needs it here
sys.argv = ["profile_stages.py", *sys.argv[1:]]
cli.run(profile_stages.main)
"""


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(CASES), encoding="utf-8")
    return path


def raw_of(folder: Path) -> RawMeasurements:
    return read_raw(Workspace(folder).stage_results / "raw_measurements.json")


@pytest.mark.parametrize("runtime", ["torch", "ort", "openvino"])
def test_export_and_measure(runtime: str, cases: Path, tmp_path: Path) -> None:
    if runtime == "openvino":
        needs("openvino", "requirements-stages.txt")
    options = (SCRIPT, "--workspace", tmp_path, "--cases", cases, "--units", "CPU", "--cpu-runtime", runtime, *QUICK)
    done = run_script(*options, "--export", "--measure", "--graph", "power_law", "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 14
    raw = raw_of(tmp_path)
    assert [(record.nodes, record.edges, record.stage) for record in raw.records] == [
        (*size, stage) for size in ((60, 200), (90, 100)) for stage in range(1, 8)]
    assert raw.versions[runtime]
    for record in raw.records:
        assert (record.runtime, record.ran_on, record.fallback, record.status) == (runtime, "CPU", "", "ok"), record
        assert (record.graph, record.threads, record.precision, record.inference_precision) == ("power_law", 1, "FP32", "f32")
        assert len(record.samples_ms) == 3
        assert 0 < record.statistics["min"] <= record.statistics["median"] <= record.statistics["max"]
        assert record.bytes_in == record.definition.bytes_in(record.size)
        assert bool(record.model) == (runtime != "torch")
    assert {unit.name: unit.present for unit in raw.units if unit.name == "CPU"} == {"CPU": True}
    assert all(unit.why for unit in raw.units if not unit.present)
    models = Workspace(tmp_path).stage_models / "onnx_models"
    assert len(list(models.glob("*.onnx"))) == 14 + 2 * 7
    before = (models / "stage1_gather_cpu_fp32.onnx").stat().st_mtime_ns
    rerun = run_script(*options, "--export", "--measure", "--graph", "power_law", "--threads", "1", "--json")
    assert raw_of(tmp_path) == raw  # nothing was measured again
    assert (json.loads(rerun.stdout), (models / "stage1_gather_cpu_fp32.onnx").stat().st_mtime_ns) == (
        json.loads(done.stdout), before)


def task_of(folder: Path, stage: int = 2, **changes: Any) -> StageTask:
    size = GraphSize(nodes=300, edges=3000, features=16, hidden=8)
    export_stages(folder, [file for file in model_files([size], 0) if file.stage.id == stage])
    return StageTask(**{"size": size, "source": GraphSource(), "graph": "uniform", "unit": "CPU", "stage": stage,
                        "runtime": "ort", "warmup": 1, "runs": 4, "models": str(folder), **changes})


def test_pytorch_runs_what_openvino_cant(tmp_path: Path) -> None:
    """This machine has no NPU, so OpenVINO (or its absence) refuses it; the record says why and where the stage ran."""
    measured = measure_stage(task_of(tmp_path, unit="NPU", runtime="openvino"))
    assert (measured.status, len(measured.samples_ms)) == ("ok", 4)
    facts = measured.facts
    assert (facts["runtime"], facts["ran_on"], facts["unit"], facts["precision"]) == ("torch", "CPU", "NPU", "FP16")
    assert facts["inference_precision"] == "f32"
    assert re.match(r"openvino: (?!Exception from).*(NPU|VCL|not installed)", str(facts["fallback"]))


def test_a_runtime_that_computes_something_else_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(task: StageTask) -> OpenedStage:
        return OpenedStage(task, "CPU", "ort", "f32", lambda feed: np.zeros_like(feed["sums"]))

    task = task_of(tmp_path)
    monkeypatch.setitem(opening.OPENERS, "ort", zeros)
    opened, why = open_stage(task)
    assert (opened.runtime, why) == ("torch", "ort: its output is wrong by 1 of the largest value")
    monkeypatch.setitem(opening.OPENERS, "torch", zeros)
    with pytest.raises(Refused, match=r"ort: its output .*; torch: its output"):
        open_stage(task)
    failed = measure_stage(task)
    assert (failed.status, failed.samples_ms) == ("failed", ())
    assert "its output is wrong" in failed.error


def test_pytorch_replaces_a_runtime_that_crashes(tmp_path: Path) -> None:
    """The worker is pretended: nothing here crashes by itself."""
    class Crashing:
        def ask(self, request: Any) -> Any:
            if request.task.runtime == "openvino":
                raise WorkerFailed("timeout", "no answer within 600 s")
            return measure_stage(request.task)

    task = task_of(tmp_path, runtime="openvino")
    measured = profiling.time_stage(task, Crashing())  # type: ignore[arg-type]
    assert (measured.id, measured.status, measured.facts["runtime"]) == (task.id, "ok", "torch")
    assert measured.facts["fallback"] == "openvino: no answer within 600 s"
    record = profiling.record_of(task, measured)
    assert (record.runtime, record.model, len(record.samples_ms)) == ("torch", "", 4)


def test_one_thread_of_onnx_runtime_adds_up(tmp_path: Path) -> None:
    """Several threads sometimes lose additions to one node (microsoft/onnxruntime#18048)."""
    for stage in (2, 3):
        measured = measure_stage(task_of(tmp_path, stage, threads=2))
        assert (measured.facts["runtime"], measured.facts["threads"], measured.facts["fallback"]) == ("ort", 1, "")


class OrtOnCpu(opening.OrtOnCuda):
    """The class for a GPU, with the CPU's memory in place of the GPU's."""

    place = ("cpu", 0)


@pytest.mark.parametrize("runtime", ["ort", "torch", "ort on a GPU"])
def test_values_stay_on_a_unit_from_stage_to_stage(runtime: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {}
    for stage in STAGES:
        task = task_of(tmp_path, stage.id, runtime=runtime.partition(" ")[0])
        opened = open_stage(task)[0] if runtime != "ort on a GPU" else OrtOnCpu(
            task, open_session(task.file.onnx(tmp_path), "cpu", threads=1), lambda feed: feed["x"])
        values |= {name: opened.to_unit(name, task.tensors[name]) for name in stage.inputs if name not in values}
        values |= opened.run_resident(values)
    assert isinstance(values["output"], onnxruntime.OrtValue) or runtime != "ort on a GPU"
    np.testing.assert_allclose(opened.to_host("output", values["output"]), task.tensors["output"], atol=1e-4)


def test_a_graph_from_a_file_of_edges_by_two_runtimes(cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary of one runtime is no standard for a slower one: the second command does not wait."""
    waited: list[float] = []

    def steady(time_ms: Callable[[], Sequence[float]], best_ms: float, *limits: object) -> Sequence[float]:
        waited.append(best_ms)
        return time_ms()

    monkeypatch.setattr("hase.benchmark.measuring.blocks.wait_until_steady", steady)
    (tmp_path / "ring.txt").write_text("# from to\n" + "".join(f"{node}\t{(node + 1) % 100}\n" for node in range(100)))
    for runtime in ("torch", "ort"):
        done = run_script(SCRIPT, "--workspace", tmp_path, "--cases", cases, "--edges", tmp_path / "ring.txt", "--units", "CPU",
                          "--cpu-runtime", runtime, "--export", "--measure", *QUICK)
        assert done.returncode == 0, done.stderr
        assert waited[0] == 0.0  # no earlier time of this canary
        waited.clear()
        records = raw_of(tmp_path).records
        assert {(record.nodes, record.edges, record.features, record.status) for record in records} == {(100, 100, 8, "ok")}
        assert records[0].graph.startswith("ring-")


@pytest.mark.skipif(not find_units("torch")[-1].present, reason="needs an NVIDIA GPU")
def test_cuda_has_times_with_and_without_copies(tmp_path: Path) -> None:
    for stage in range(1, 8):
        measured = measure_stage(task_of(tmp_path, stage, unit="CUDA"))
        assert (measured.status, measured.facts["runtime"], measured.facts["ran_on"]) == ("ok", "ort", "CUDA"), measured.error
        assert len(measured.quantities[RESIDENT]) == 4


def test_units_by_openvinos_names() -> None:
    """The devices are pretended."""
    units = find_units("torch", {"CPU": "a CPU", "GPU.0": "a small one", "GPU.1": "a large one", "NPU": "AI Boost"})
    listed = {unit.name: (unit.present, unit.runtime, unit.inference_precision) for unit in units if unit.name != "CUDA"}
    assert listed == {"CPU": (True, "torch", "f32"), "GPU.0": (True, "openvino", "f16"), "GPU.1": (True, "openvino", "f16"),
                      "NPU": (True, "openvino", "f16")}
    assert [unit.name for unit in choose_units(units, ["GPU"])] == ["GPU.0", "GPU.1"]
    assert [unit.name for unit in choose_units(units, ["NPU", "GPU.1"])] == ["GPU.1", "NPU"]
    with pytest.raises(UserError, match=r"--units TPU: no such unit.*GPU\.1"):
        choose_units(units, ["TPU"])


def test_without_a_unit_the_error_says_why_each_is_missing() -> None:
    absent = [unit for unit in find_units("torch", {}) if unit.name in ("GPU", "NPU")]
    with pytest.raises(UserError, match=r"no unit to measure: GPU: the package openvino.*-stages.*NPU: the package"):
        choose_units(absent, [])
    with pytest.raises(UserError, match=r"NPU: OpenVINO .* finds none \(it finds CPU\); it needs an Intel Core Ultra"):
        choose_units(find_units("torch", {"CPU": "a CPU"}), ["NPU"])


@pytest.mark.parametrize(("options", "code", "part"), [
    ((), 2, "say what to do: --all, or one or more of --export, --measure and --analyze"),
    (("--measure", "--cpu-runtime", "ort"), 1, "add --export to the same command"),
    (("--measure", "--units", "TPU"), 1, "--units TPU: no such unit"),
    (("--measure", "--cases", "none.json"), 1, "none.json: no such"),
    (("--export", "--edges", "none.txt"), 1, "none.txt: no such file"),
    (("--analyze",), 1, "make it with: python extras/graph_stages/profile_stages.py --measure"),
    (("--all", "--runs", "0"), 2, "--runs: '0' is not a whole number, 1 or more")])
def test_wrong_options(options: Sequence[str], code: int, part: str, tmp_path: Path) -> None:
    done = run_script(SCRIPT, "--workspace", tmp_path, *options)
    assert done.returncode == code, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert part in last


def test_it_runs_with_what_windows_has(cases: Path, tmp_path: Path) -> None:
    """Modules that only POSIX has are hidden, in the worker too; in the script, so are such functions."""
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding" / "sitecustomize.py").write_text(HIDING, encoding="utf-8")
    command = [sys.executable, "-c", AS_ON_WINDOWS, "--workspace", str(tmp_path), "--cases", str(cases), "--units", "CPU",
               "--cpu-runtime", "torch", "--all", *QUICK]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "hiding"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(raw_of(tmp_path).records) == 14


def test_the_batch_file() -> None:
    """Its form, since there is no Windows here to run it."""
    raw = (ROOT / "extras" / "graph_stages" / "run_profiling.bat").read_bytes()
    text = raw.decode("ascii")
    assert raw.count(b"\n") == raw.count(b"\r\n")
    assert r"python extras\graph_stages\profile_stages.py %OPTIONS%" in text
    assert "%~dp0" not in text[text.index("shift\r\n"):]  # after `shift` that is no longer this file
    assert set(re.findall(r"goto (\w+)", text)) == set(re.findall(r"^:(\w+)", text, re.MULTILINE))
