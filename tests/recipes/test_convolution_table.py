"""The full table of models × convolution algorithms, at a tiny size on a CPU."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from command import printed, run_script

from hase.recipes.convolutions.measure_table import summary_row

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
    assert row["64 (ms)"] > 0
    assert row["72 (ms)"] > 0
    (fewer,) = filter(None, [summary_row(folder_in(workspace), most_sizes=1)])
    assert set(row) - set(fewer) == {"72 (ms)", "72 (J)", "72 events/CUPTI"}
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


def test_nothing_to_pack(tmp_path: Path) -> None:
    assert "no results of convolution algorithms; measure some" in run_script(PUBLISH, "pack", "--workspace", tmp_path).stderr


def test_an_algorithm_that_a_cpu_lacks(tmp_path: Path) -> None:
    done = run_script(SCRIPT, "--device", "cpu", "--algorithm", "fft", "--workspace", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: cuDNN is not available: algorithm fft")
