"""From times with a known law to tables: bandwidths, transfers and computing, and where they are unknown."""

from __future__ import annotations

import logging
import random
import re
import sys
from pathlib import Path

import pytest

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
from hase.extras.graph_stages.measuring.layer import STAGES, GraphSize, LayerStage
from hase.extras.graph_stages.measuring.records import RawMeasurements, StageRecord, UnitReport, raw_path
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

pytestmark = pytest.mark.slow

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
    raw = RawMeasurements(machine={"hostname": "here"}, versions={"openvino": "1"}, warmup=1, runs=3, seed=0, units=UNITS,
                          records=tuple(records))
    files.write_json(raw_path(workspace), raw)
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
        stage, size = STAGES[key.stage - 1], GraphSize(nodes=key.nodes, edges=key.edges)
        moved = stage.bytes_in(size) + stage.bytes_out(size)
        is_plain = key.stage in (3, 5, 6)
        assert (record.transfer_by, bool(record.reason)) == ("plain regression" if is_plain else "regression", is_plain)
        assert record.transfer_time == pytest.approx(fits[f"CPU_stage{key.stage}"]["slope_ms_per_byte"] * moved)
        assert record.compute_time == pytest.approx((record.total_time or 0) - (record.transfer_time or 0))
    shown = (folder / REPORT).read_text()
    assert re.search(r"CPU +3 count .* -?\d+\*  (R²|the slope)", shown)
    assert "* --plain-regression" in shown


def test_a_stage_that_only_moves_data_says_so(tmp_path: Path) -> None:
    """All of its time is proportional to its bytes, with some noise: at about half of the sizes nothing is left."""
    def proportional(size: GraphSize) -> StageRecord:
        stage, noise = STAGES[0], random.Random(size.name)
        mean_ms = 1e3 * (stage.bytes_in(size) + stage.bytes_out(size)) / 1024**2 / MB_PER_S * noise.gauss(1, 0.02)
        return timed(stage, size, samples_ms=(mean_ms, mean_ms))

    workspace = written(tmp_path, [proportional(size) for size in SIZES])
    analyze(workspace)
    table = read_lookup(workspace.stage_results)
    nothing_left = [record for record in table.values() if record.compute_time == 0]
    assert 0 < len(nothing_left) < len(table)
    assert all("only moves data" in record.reason for record in nothing_left)
    assert not any(record.reason for record in table.values() if record.compute_time)


def test_each_stage_has_a_bandwidth_or_a_reason(results: Path) -> None:
    bandwidths, fits = files.read_json(results / BANDWIDTH), files.read_json(results / REGRESSION)
    assert list(bandwidths) == [f"CPU_stage{stage}" for stage in range(1, 8)]
    for stage in (1, 2, 4, 7):
        fit = fits[f"CPU_stage{stage}"]
        assert bandwidths[f"CPU_stage{stage}"] == pytest.approx(MB_PER_S, rel=0.05)
        assert bandwidths[f"CPU_stage{stage}"] == pytest.approx(1000 / fit["slope_ms_per_byte"] / 1024**2)
        assert fit["slope_low"] < 1e3 / MB_PER_S / 1024**2 < fit["slope_high"]
        assert fit["r2"] > 0.99
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
    assert entry["std"] == pytest.approx(0.1 * entry["total_time"])
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


@pytest.mark.parametrize("broken", [False, True])
def test_without_scikit_learn_the_regression_is_skipped(broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    """It is not there; or it is found, but can't be imported: built for another numpy, or with a library that is missing."""
    if broken:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
            monkeypatch.delitem(sys.modules, name)
        (tmp_path / "sklearn").mkdir()
        (tmp_path / "sklearn" / "__init__.py").write_text(
            "raise ImportError('libgomp.so.1: cannot open\\nshared object file')\n")
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setitem(sys.modules, "sklearn", None)
    workspace = written(tmp_path, [timed(stage, size) for size in SIZES[:4] for stage in STAGES])
    analyze(workspace)
    folder = workspace.stage_results
    expected = "scikit-learn can't be loaded (libgomp.so.1: cannot open shared object file)" if broken else (
        "scikit-learn is not installed")
    assert f"{expected}: the regression was skipped" in (folder / REPORT).read_text(encoding="utf-8")
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert [message.startswith(expected) for message in warnings] == [True]
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
