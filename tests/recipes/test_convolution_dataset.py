"""The shipped tables of convolution algorithms, which must agree with extras/convolutions/README.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command import run_script

from hase.extras.convolutions.choosing.choice import left_out_times, mean_regret, regret_rows
from hase.extras.convolutions.choosing.tables import read_cases, read_table, unpacked
from hase.extras.convolutions.profiling.algorithms import ON_GPU, unexpected
from hase.extras.convolutions.profiling.listing import MODELS
from hase.extras.convolutions.profiling.results import LAYERS, LAYERS_MORE, OVERALL, OVERALL_MORE
from hase.utils.errors import UserError
from hase.utils.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SHIPPED = ROOT / "recipes" / "convolutions"
TABLES = SHIPPED / "nvidia-h200.tar.xz"
NEVER = {"direct", "winograd"}


@pytest.fixture(scope="module")
def results() -> Iterator[Path]:
    with unpacked(TABLES) as folder:
        yield folder


@pytest.fixture(scope="module")
def overall(results: Path) -> Any:
    return read_table(results, "overall")


@pytest.fixture(scope="module")
def layers(results: Path) -> Any:
    return read_table(results, "layers")


def test_the_dataset_is_small_and_has_todays_columns(overall: Any, layers: Any) -> None:
    assert TABLES.stat().st_size < 1e6
    assert tuple(overall.columns) == (*OVERALL, *OVERALL_MORE)
    assert tuple(layers.columns) == (*LAYERS, *LAYERS_MORE)


def test_every_combination_at_batch_16(overall: Any) -> None:
    table = overall[(overall.batch == 16) & overall.model.isin(MODELS)]
    assert (len(table), table.model.nunique(), table.algorithm.nunique()) == (54, 6, 9)
    assert set(table[table.status != "ok"].algorithm) == NEVER == set(overall[overall.status != "ok"].algorithm)
    assert len(table[table.status != "ok"]) == 12
    assert table[table.status == "ok"].layers_ms.min() > 0


def test_times_by_events_and_by_cupti(overall: Any, layers: Any) -> None:
    """Times of layers with one CUDA kernel agree. With several, only events count the time between them."""
    short = layers[(layers.launches == 1) & (layers.cupti_ms < 0.1)]
    assert len(short) > 4000
    assert abs(1e3 * (short.median_ms - short.cupti_ms)).median() < 0.3  # us
    table = overall[(overall.batch == 16) & overall.model.isin(MODELS)]
    gpu_bound = table[table.layers_ms > 0.5 * table["mean"]]  # the GPU is the slower track
    assert len(gpu_bound) >= 26
    assert gpu_bound.layers_to_cupti.between(0.95, 1.05).all()
    assert (table.late_layers.dropna() == 0).all()  # the GPU was held long enough before each layer
    assert table.event_overhead_ms.dropna().between(0.0038, 0.0041).all()  # measured on the device


def test_energy_agrees_with_the_counter(overall: Any) -> None:
    sampled = overall[overall.energy_to_counter.notna()]
    assert len(sampled) >= 140
    assert sampled.energy_to_counter.between(0.92, 1.08).all()
    assert (sampled.power_mean_w > sampled.idle_power_w).all()


def test_outputs_are_torchs(layers: Any) -> None:
    assert layers[layers.mean_ms.notna()].output_error.max() < 0.02


def test_kernels_of_other_algorithms(layers: Any) -> None:
    """Kernels that cuDNN launches for an algorithm although they belong to another; no others are unexpected."""
    traced = layers[layers.cupti_ms.notna() & layers.model.isin(MODELS)]
    strange = traced[traced.unexpected_kernels.notna()]
    assert set(strange.ran) == {"gemm", "implicit gemm", "implicit precomp gemm"}
    direct = strange[strange.ran != "implicit precomp gemm"]
    assert direct.unexpected_kernels.str.contains("conv2d_grouped_direct_kernel").all()
    assert (strange.workspace_mib == 0).all()  # cuDNN asks for none: no matrix of windows, no indices
    for row in traced.sample(200, random_state=0).itertuples():
        pointwise = (row.kernel_size, row.stride, row.padding) == ("1x1", "1x1", "0x0")
        written = "" if pd.isna(row.unexpected_kernels) else row.unexpected_kernels
        assert unexpected(row.ran, row.cuda_kernels.split("|"), pointwise) == written


def test_regret_of_predicted_choices(results: Path) -> None:
    cases = read_cases(results)
    rows = regret_rows(cases, left_out_times(cases))
    regret = mean_regret(rows)
    assert regret is not None
    assert 0 <= regret < 5
    finished = [row for row in rows if row["algorithms"] == 8]  # guess is not a separate algorithm
    assert {row["model"] for row in finished} >= set(MODELS)
    for model in MODELS:
        assert (mean_regret([row for row in finished if row["model"] == model]) or 0.0) < 4, model


def test_a_file_that_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "x.tar.xz").write_text("no")
    with pytest.raises(UserError, match=r"x\.tar\.xz: no archive of tables"), unpacked(tmp_path / "x.tar.xz"):
        pass


def test_the_page_of_all_runs(tmp_path: Path) -> None:
    """The page equals the shipped one and shows what can't run and which runs the host delayed."""
    done = run_script("recipes/convolutions/publish_table.py", "page", "--results", TABLES, "--markdown",
                      tmp_path / "measured.md")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "measured.md").read_text(encoding="utf-8")
    assert page == (SHIPPED / "measured.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert sum(row[0] in ON_GPU for row in rows) == 54 + 6 * 9  # the study's models and more
    assert all(row[1] == "every layer" and set(row[2:]) == {"no layer"} for row in rows if row[0] in NEVER)
    assert "–" not in {cell for row in rows for cell in row}  # every run was measured
    assert "| fft | 0 to 4 of 13: 3x3 from 310 pixels on | 18.9* (76.6, 241 W, 15 J) | 191* (313) |" in page
