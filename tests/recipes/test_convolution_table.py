"""The full table of models × convolution algorithms, at a tiny size on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

from command import printed, run_script

SCRIPT = "recipes/convolutions/measure_table.py"
TINY = ("--device", "cpu", "--model", "squeezenet1_1", "--algorithm", "default", "--sizes", "64,72", "--warmup", "1",
        "--measure", "2", "--energy-seconds", "0", "--json")


def test_the_table_and_how_it_goes_on(tmp_path: Path) -> None:
    assert not json.loads(printed(SCRIPT, *TINY, "--workspace", tmp_path, "--minutes", "1e-9"))  # no time: nothing is begun
    (row,) = json.loads(printed(SCRIPT, *TINY, "--workspace", tmp_path))
    assert (row["model"], row["algorithm"], row["layers"], row["not supported"], row["why"]) == (
        "squeezenet1_1", "default", "26", "0", None)
    assert row["64 (ms)"] > 0
    assert row["72 (ms)"] > 0
    (again,) = json.loads(printed(SCRIPT, *TINY, "--workspace", tmp_path))
    assert again == row
    journal = tmp_path / "benchmark" / "results" / "4_table_b1" / "squeezenet1_1_default_cpu" / "measurements.jsonl"
    assert len(journal.read_text().splitlines()) == 2


def test_an_algorithm_that_a_cpu_lacks(tmp_path: Path) -> None:
    done = run_script(SCRIPT, "--device", "cpu", "--algorithm", "fft", "--workspace", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: cuDNN is not available: algorithm fft")
