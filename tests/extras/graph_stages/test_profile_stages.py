"""profile_stages.py on real graphs: it exports, measures with real runtimes, resumes, falls back, and reports missing units;
and its tables from times with a known law. This machine may have no GPU or NPU: tests that need one pretend."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run_script
from optional_packages import needs

from hase.extras.graph_stages.measuring import units as opening
from hase.extras.graph_stages.measuring.analysis import (
    BANDWIDTH,
    LOOKUP,
    PLOT,
    REGRESSION,
    REPORT,
    LookupKey,
    analyze,
    fit_line,
    read_lookup,
)
from hase.extras.graph_stages.measuring.layer import STAGES, GraphSize, GraphSource, LayerStage
from hase.extras.graph_stages.measuring.models import export_stages, stage_model_files
from hase.extras.graph_stages.measuring.records import RAW, RawMeasurements, StageRecord, UnitReport, read_raw
from hase.extras.graph_stages.measuring.units import OpenedStage, Refused, StageTask, choose_units, find_units, open_stage
from hase.extras.graph_stages.measuring.worker import measure_stage
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, Workspace

pytestmark = pytest.mark.slow

SCRIPT = "extras/graph_stages/profile_stages.py"
CASES = {"feature_dim": 8, "hidden_dim": 4, "test_cases": [{"nodes": 60, "edges": 200}, {"nodes": 90, "edges": 100}]}
QUICK = ("--warmup", "1", "--runs", "3")


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    (tmp_path / "cases.json").write_text(json.dumps(CASES), encoding="utf-8")
    return tmp_path / "cases.json"


def raw_of(folder: Path) -> RawMeasurements:
    return read_raw(Workspace(folder).stage_results)


@pytest.mark.parametrize("runtime", ["torch", "ort", "openvino"])
def test_export_and_measure(runtime: str, cases: Path, tmp_path: Path) -> None:
    if runtime == "openvino":
        needs("openvino", "stages")
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
    models = Workspace(tmp_path).stage_models / "onnx_models"
    assert len(list(models.glob("*.onnx"))) == 14 + 2 * 7
    before = (models / "stage1_gather_cpu_fp32.onnx").stat().st_mtime_ns
    rerun = run_script(*options, "--export", "--measure", "--graph", "power_law", "--threads", "1", "--json")
    assert raw_of(tmp_path) == raw  # nothing was measured again
    assert (json.loads(rerun.stdout), (models / "stage1_gather_cpu_fp32.onnx").stat().st_mtime_ns) == (
        json.loads(done.stdout), before)


def task_of(folder: Path, stage: int = 2, **changes: Any) -> StageTask:
    size = GraphSize(nodes=300, edges=3000, features=16, hidden=8)
    export_stages(folder, [file for file in stage_model_files([size], 0) if file.stage.id == stage])
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


def test_one_thread_of_onnx_runtime_adds_up(tmp_path: Path) -> None:
    """Several threads sometimes lose additions to one node (microsoft/onnxruntime#18048)."""
    for stage in (2, 3):
        measured = measure_stage(task_of(tmp_path, stage, threads=2))
        assert (measured.facts["runtime"], measured.facts["threads"], measured.facts["fallback"]) == ("ort", 1, "")


def test_a_graph_from_a_file_of_edges(cases: Path, tmp_path: Path) -> None:
    (tmp_path / "ring.txt").write_text("# from to\n" + "".join(f"{node}\t{(node + 1) % 100}\n" for node in range(100)))
    done = run_script(SCRIPT, "--workspace", tmp_path, "--cases", cases, "--edges", tmp_path / "ring.txt", "--units", "CPU",
                      "--cpu-runtime", "torch", "--export", "--measure", *QUICK)
    assert done.returncode == 0, done.stderr
    records = raw_of(tmp_path).records
    assert {(record.nodes, record.edges, record.features, record.status) for record in records} == {(100, 100, 8, "ok")}
    assert records[0].graph.startswith("ring-")


def test_it_runs_without_the_modules_that_windows_lacks(cases: Path, tmp_path: Path) -> None:
    """In its worker, too."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, psutil, subprocess, multiprocessing, tempfile, shutil\n"  # their imports depend on the system
        "sys.modules.update(dict.fromkeys(('fcntl', 'resource', 'termios', 'pwd', 'grp')))\n")
    done = subprocess.run([sys.executable, SCRIPT, "--workspace", tmp_path, "--cases", cases, "--units", "CPU", "--cpu-runtime",
                           "torch", "--all", *QUICK], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(raw_of(tmp_path).records) == 14


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
    with pytest.raises(UserError, match=r"no unit to measure: GPU: the package openvino.*stages.*NPU: the package"):
        choose_units(absent, [])
    with pytest.raises(UserError, match=r"NPU: OpenVINO .* finds none \(it finds CPU\); it needs an Intel Core Ultra"):
        choose_units(find_units("torch", {"CPU": "a CPU"}), ["NPU"])


@pytest.mark.parametrize(("options", "code", "part"), [
    ((), 2, "say what to do: --all, or one or more of --export, --measure and --analyze"),
    (("--measure", "--cpu-runtime", "ort"), 1, "add --export to the same command"),
    (("--export", "--edges", "none.txt"), 1, "none.txt: no such file"),
    (("--analyze",), 1, "make it with: python extras/graph_stages/profile_stages.py --measure"),
    (("--all", "--runs", "0"), 2, "--runs: '0' is not a whole number, 1 or more")])
def test_wrong_options(options: Sequence[str], code: int, part: str, tmp_path: Path) -> None:
    done = run_script(SCRIPT, "--workspace", tmp_path, *options)
    assert done.returncode == code, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert part in last


STEPS = (1000, 2000, 3000, 5000, 10000)
SIZES = [GraphSize(nodes=nodes, edges=edges) for nodes in STEPS for edges in STEPS if edges >= nodes]
MB_PER_S = 8000.0
UNITS = (UnitReport(name="CPU", present=True, device_name="Test CPU", runtime="openvino", inference_precision="f32"),
         UnitReport(name="NPU", present=False, why="OpenVINO lists no NPU"))


def timed(stage: LayerStage, size: GraphSize, **more: object) -> StageRecord:
    """0.2 ms and 8000 MB/s, with 1 % of noise. Stage 3 takes any time; 5 and 6 ten times as long as their bytes."""
    noise = random.Random(f"{stage.id} {size}")
    moving_ms = 1e3 * (stage.bytes_in(size) + stage.bytes_out(size)) / 1024**2 / MB_PER_S
    mean_ms = {3: noise.uniform(0.1, 0.9), 5: 0.2 + 10 * moving_ms, 6: 0.2 + 10 * moving_ms}.get(stage.id, 0.2 + moving_ms)
    mean_ms *= noise.gauss(1, 0.01)
    facts = {"unit": "CPU", "runtime": "openvino", "ran_on": "CPU", "samples_ms": (0.9 * mean_ms, mean_ms, 1.1 * mean_ms)}
    return StageRecord.model_validate(facts | {
        **size.model_dump(), "graph": "uniform", "stage": stage.id, "stage_name": stage.name, "precision": "FP32",
        "inference_precision": "f32", "bytes_in": stage.bytes_in(size), "bytes_out": stage.bytes_out(size)} | more)


def written(folder: Path, records: list[StageRecord]) -> Workspace:
    workspace = Workspace(folder)
    files.write_json(workspace.stage_results / RAW, RawMeasurements(
        machine={}, versions={"openvino": "1"}, warmup=1, runs=3, seed=0, units=UNITS, records=tuple(records)))
    return workspace


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = written(tmp_path_factory.mktemp("law"), [timed(stage, size) for size in SIZES for stage in STAGES])
    rows = analyze(workspace)
    assert [(row["unit"], row["stage"]) for row in rows] == [("CPU", stage) for stage in range(1, 8)]
    return workspace.stage_results


def test_the_plain_regression_is_written_and_marked(tmp_path: Path) -> None:
    workspace = written(tmp_path, [timed(stage, size) for size in SIZES for stage in STAGES])
    analyze(workspace, plain=True)
    folder = workspace.stage_results
    bandwidths, fits, table = files.read_json(folder / BANDWIDTH), files.read_json(folder / REGRESSION), read_lookup(folder)
    assert list(bandwidths.pop("doubtful")) == ["CPU_stage3", "CPU_stage5", "CPU_stage6"]
    for key, fit in fits.items():
        assert bandwidths[key] == fit["bandwidth"] == pytest.approx(1000 / fit["slope_ms_per_byte"] / 1024**2)
        assert fit["plain"] is bool(fit["reason"]) is (fit["stage"] in (3, 5, 6))
    for key, record in table.items():
        is_plain = key.stage in (3, 5, 6)
        assert (record.transfer_by, bool(record.reason)) == ("plain regression" if is_plain else "regression", is_plain)
    shown = (folder / REPORT).read_text()
    assert re.search(r"CPU +3 count .* -?\d+\*  (R²|the slope)", shown)
    assert "* --plain-regression" in shown


def test_each_stage_has_a_bandwidth_or_a_reason(results: Path) -> None:
    bandwidths, fits = files.read_json(results / BANDWIDTH), files.read_json(results / REGRESSION)
    assert list(bandwidths) == [f"CPU_stage{stage}" for stage in range(1, 8)]
    for stage in (1, 2, 4, 7):
        fit = fits[f"CPU_stage{stage}"]
        assert bandwidths[f"CPU_stage{stage}"] == pytest.approx(MB_PER_S, rel=0.05)
        assert fit["slope_low"] < 1e3 / MB_PER_S / 1024**2 < fit["slope_high"]
        assert fit["intercept_ms"] == pytest.approx(0.2, abs=0.05)
    assert [bandwidths[f"CPU_stage{stage}"] for stage in (3, 5, 6)] == [None] * 3
    assert "includes 0" in fits["CPU_stage3"]["reason"]
    assert fits["CPU_stage5"]["reason"].startswith("bound by arithmetic: 85 operations per byte, and stage")
    assert fits["CPU_stage5"]["r2"] > 0.99  # a perfect line is not enough


def test_computing_is_the_total_less_the_transfer_in_the_table_and_the_report(results: Path) -> None:
    table = read_lookup(results)
    assert len(table) == 15 * 7
    entry = files.read_json(results / LOOKUP)["1000,2000,CPU,4"]
    assert entry["compute_time"] + entry["transfer_time"] == pytest.approx(entry["total_time"])
    assert entry["compute_time"] == pytest.approx(0.2, abs=0.05)
    for key, record in table.items():
        has_bandwidth = key.stage not in (3, 5, 6)
        assert (record.transfer_by == "regression") is has_bandwidth
        assert has_bandwidth is (record.transfer_time is not None) is (record.compute_time is not None) is (not record.reason)
    text = (results / REPORT).read_text(encoding="utf-8")
    for part in ("NPU: not measured: OpenVINO lists no NPU", "105 by openvino on CPU, FP32 weights, computing in f32",
                 "bound by arithmetic", "1000/1000, 1000/2000", "not known"):
        assert part in text
    assert (results / PLOT).read_bytes().startswith(b"\x89PNG")


def test_runs_with_the_data_on_the_unit_give_the_transfer(tmp_path: Path) -> None:
    """A failed record has a row. A stage that another runtime ran at some sizes has no bandwidth."""
    changes: dict[int, dict[str, object]] = {
        1: {"resident_samples_ms": (0.1, 0.3)}, 2: {"samples_ms": (), "status": "failed", "error": "no memory"},
        7: {"runtime": "torch"}}
    sizes = SIZES[:5]
    records = [timed(stage, size, unit="CUDA", ran_on="CUDA", **(changes.get(stage.id, {}) if size == sizes[0] else {}))
               for size in sizes for stage in STAGES]
    workspace = written(tmp_path, records)
    analyze(workspace)
    table = read_lookup(workspace.stage_results)
    first = table[LookupKey(1000, 1000, "CUDA", 1)]
    assert (first.transfer_by, first.compute_time) == ("measured", pytest.approx(0.2))
    assert first.transfer_time == pytest.approx(records[0].statistics["mean"] - 0.2)
    failed = table[LookupKey(1000, 1000, "CUDA", 2)]
    assert (failed.total_time, failed.reason) == (None, "failed: no memory")
    assert "its sizes ran differently: openvino on CUDA, torch on CUDA" in table[LookupKey(1000, 2000, "CUDA", 7)].reason


def test_without_scikit_learn_the_regression_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    workspace = written(tmp_path, [timed(stage, size) for size in SIZES[:4] for stage in STAGES])
    analyze(workspace)
    folder = workspace.stage_results
    expected = "scikit-learn is not installed"
    assert f"{expected}: the regression was skipped" in (folder / REPORT).read_text(encoding="utf-8")
    assert [record.message.startswith(expected) for record in caplog.records if record.levelno >= logging.WARNING] == [True]
    assert set(files.read_json(folder / BANDWIDTH).values()) == {None}
    record = read_lookup(folder)[LookupKey(1000, 1000, "CPU", 1)]
    assert record.total_time is not None
    assert (record.transfer_time, expected in record.reason) == (None, True)
    assert not (folder / PLOT).exists()


def test_too_few_sizes_and_falling_times() -> None:
    assert "a line needs 3" in fit_line("CPU", 1, [10, 10, 20], [1.0, 1.1, 2.0]).reason
    assert fit_line("CPU", 1, [10, 20, 30, 40], [4.0, 3.0, 2.1, 1.0]).reason == "larger sizes take less time"
    bent = fit_line("CPU", 1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 5, 2, 6, 3, 7, 4, 8, 5, 9])
    assert bent.reason == "R² 0.51 is below 0.8: the time does not follow the bytes"


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"profile_stages\.py --analyze"):
        read_lookup(tmp_path)
    for value, message in (({}, r"damaged at 1,2,CPU\.compute_time"), (
            {"compute_time": 1, "transfer_time": 2, "total_time": 3, "std": 0}, "'1,2,CPU' is not nodes,edges,unit,stage")):
        files.write_json(tmp_path / LOOKUP, {"1,2,CPU": value})
        with pytest.raises(UserError, match=message):
            read_lookup(tmp_path)
    records = [timed(STAGES[0], SIZES[0]), timed(STAGES[0], SIZES[0], graph="power_law")]
    with pytest.raises(UserError, match="measured twice, on the graphs uniform and power_law"):
        analyze(written(tmp_path, records))
