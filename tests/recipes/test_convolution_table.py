"""The full table of models × convolution algorithms at a tiny size on a CPU, and the shipped tables, which must agree with
extras/convolutions/README.md."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command import printed, run_script

from hase.extras.convolutions.choosing.choice import left_out_times, mean_regret, regret_rows
from hase.extras.convolutions.choosing.tables import read_cases, read_table, unpacked
from hase.extras.convolutions.profiling.algorithms import GPU_ALGORITHMS, describe_unexpected
from hase.extras.convolutions.profiling.listing import MODELS
from hase.extras.convolutions.profiling.results import LAYERS, LAYERS_MORE, OVERALL, OVERALL_MORE
from hase.utils.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SCRIPT, PUBLISH = "recipes/convolutions/measure_table.py", "recipes/convolutions/publish_table.py"
TINY = ("--device", "cpu", "--model", "squeezenet1_1", "--algorithm", "default", "--sizes", "64,72", "--warmup", "1",
        "--measure", "2", "--energy-seconds", "0", "--json")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with one combination at two sizes."""
    workspace = tmp_path_factory.mktemp("table")
    assert not json.loads(printed(SCRIPT, *TINY, "--workspace", workspace, "--minutes", "1e-9"))  # no time, so nothing begins
    (row,) = json.loads(printed(SCRIPT, *TINY, "--workspace", workspace))
    assert (row["model"], row["algorithm"], row["layers"], row["not supported"], row["why"]) == (
        "squeezenet1_1", "default", "26", "0", None)
    assert min(row["64 (ms)"], row["72 (ms)"]) > 0
    return workspace


def folder_in(workspace: Path) -> Path:
    return workspace / "extras" / "convolutions" / "results" / "4_table_b1" / "squeezenet1_1_default_cpu"


def tables_in(workspace: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder_in(workspace).glob("*.csv")}


def test_tables_are_packed_and_resume_from_the_samples(measured: Path, tmp_path: Path) -> None:
    """The tables are written again. A workspace unpacked from the samples is complete, so nothing is measured."""
    tables = tables_in(measured)
    for name in tables:
        (folder_in(measured) / name).unlink()
    printed(PUBLISH, "pack", "--workspace", measured, "--name", "x", "--output-dir", tmp_path)
    assert tables_in(measured) == tables
    with tarfile.open(tmp_path / "x.tar.xz") as packed:
        assert sorted(Path(member.name).name for member in packed) == sorted(tables)
        assert {(member.uname, member.mtime) for member in packed} == {("", 0)}
    with tarfile.open(tmp_path / "x-samples.tar.xz") as packed:
        packed.extractall(tmp_path / "extras" / "convolutions", filter="data")
    (row,) = json.loads(printed(SCRIPT, *TINY, "--workspace", tmp_path))
    assert row["model"] == "squeezenet1_1"
    assert tables_in(tmp_path) == tables
    assert len((folder_in(tmp_path) / "measurements.jsonl").read_text().splitlines()) == 2


SHIPPED = ROOT / "recipes" / "convolutions"
TABLES = SHIPPED / "nvidia-h200.tar.xz"
NEVER = {"direct", "winograd"}


@pytest.fixture(scope="module")
def results() -> Iterator[Path]:
    with unpacked(TABLES) as folder:
        yield folder


def test_the_dataset_is_small_and_has_todays_columns(results: Path) -> None:
    overall, layers = read_table(results, "overall"), read_table(results, "layers")
    assert TABLES.stat().st_size < 1e6
    assert tuple(overall.columns) == (*OVERALL, *OVERALL_MORE)
    assert tuple(layers.columns) == (*LAYERS, *LAYERS_MORE)
    assert set(overall[overall.status != "ok"].algorithm) == NEVER
    assert layers[layers.mean_ms.notna()].output_error.max() < 0.02  # outputs are torch's


def test_kernels_of_other_algorithms(results: Path) -> None:
    """Kernels that cuDNN launches for an algorithm although they belong to another; no others are unexpected."""
    layers = read_table(results, "layers")
    traced = layers[layers.cupti_ms.notna() & layers.model.isin(MODELS)]
    assert set(traced[traced.unexpected_kernels.notna()].ran) == {"gemm", "implicit gemm", "implicit precomp gemm"}
    row: Any
    for row in traced.sample(200, random_state=0).itertuples():
        pointwise = (row.kernel_size, row.stride, row.padding) == ("1x1", "1x1", "0x0")
        written = "" if pd.isna(row.unexpected_kernels) else row.unexpected_kernels
        assert describe_unexpected(row.ran, row.cuda_kernels.split("|"), pointwise) == written


def test_regret_of_predicted_choices(results: Path) -> None:
    cases = read_cases(results)
    rows = regret_rows(cases, left_out_times(cases))
    assert 0 <= (mean_regret(rows) or 0.0) < 5
    assert {row["model"] for row in rows if row["algorithms"] == 8} >= set(MODELS)  # guess is not a separate algorithm


def test_the_page_of_all_runs(tmp_path: Path) -> None:
    """The page equals the shipped one and shows what can't run and which runs the host delayed."""
    done = run_script("recipes/convolutions/publish_table.py", "page", "--results", TABLES, "--markdown",
                      tmp_path / "measured.md")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "measured.md").read_text(encoding="utf-8")
    assert page == (SHIPPED / "measured.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert sum(row[0] in GPU_ALGORITHMS for row in rows) == 54 + 6 * 9  # the study's models and more
    assert all(row[1] == "every layer" and set(row[2:]) == {"no layer"} for row in rows if row[0] in NEVER)
    assert "–" not in {cell for row in rows for cell in row}  # every run was measured
    assert "| fft | 0 to 4 of 13: 3x3 from 310 pixels on | 18.9* (76.6, 241 W, 15 J) | 191* (313) |" in page
