"""What a dataset holds, on made-up ones whose kernels are known, and its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chromium import column, opened
from command import printed, run_script
from made_up_dataset import TARGET, conv, gemm, relu, true_ms, write_dataset

from hase.utils.paths import Workspace

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SCRIPT = "benchmark/dataset.py"
SMALL, LARGE, FAILED = relu(1, 8, 8), relu(4, 64, 112), gemm()  # of 4 kB, 25.7 MB, and one whose measurements fail


@pytest.fixture
def made_up(workspace: Workspace) -> Workspace:
    """Two Relus, a product that failed, and nine convolutions; idle and at a load."""
    kernels = [SMALL, LARGE, FAILED, *(conv(out=8 * size) for size in range(1, 10))]
    write_dataset(workspace, {kernel.id: kernel for kernel in kernels}, {SMALL.id: ["anet"], LARGE.id: ["sampled:anet"]},
                  {"anet": 10.0, "bnet": 5.0}, {0.0: 0.0, 0.5: 50.0}, failed=(FAILED.id,), noise=0.0)
    return workspace


def test_kernels_are_counted_by_operator_and_size(made_up: Workspace) -> None:
    coverage = json.loads(printed(SCRIPT, "--workspace", made_up.root, "--json"))
    assert (coverage["kernels"], coverage["measured"], coverage["models"]) == (12, 11, 2)
    by_operator = {row["operator"]: row for row in coverage["operators"]}
    assert list(by_operator) == ["Conv", "Relu", "Gemm"]
    sizes = dict(zip(coverage["sizes"], by_operator["Relu"]["by_size"], strict=True))
    assert {size: count for size, count in sizes.items() if count} == {"below 10 kB": 1, "to 100 MB": 1}
    assert by_operator["Relu"]["in_models"] == 1  # the other was sampled
    assert by_operator["Relu"]["least_ms"] == pytest.approx(true_ms(SMALL))
    assert by_operator["Relu"]["most_ms"] == pytest.approx(true_ms(LARGE))
    assert [by_operator["Gemm"][name] for name in ("kernels", "measured", "failed", "least_ms")] == [1, 0, 1, None]
    assert [(load["level"], load["kernels"], load["models"]) for load in coverage["loads"]] == [(0.0, 11, 2), (0.5, 11, 0)]
    assert sum(sum(row["by_size"]) for row in coverage["operators"]) == coverage["measured"]


def test_a_dataset_is_named_where_there_are_several(made_up: Workspace) -> None:
    assert run_script(SCRIPT, "--workspace", made_up.root, "--target", TARGET.name).returncode == 0
    other = made_up.dataset("other-cpu")
    other.mkdir(parents=True)
    (other / "dataset.json").write_text("{}")
    done = run_script(SCRIPT, "--workspace", made_up.root)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "say which with --target" in done.stderr
    assert run_script(SCRIPT, "--workspace", made_up.root, "--target", "none").returncode == 1


@pytest.mark.slow
def test_the_page_of_a_dataset(made_up: Workspace, browser: Browser, tmp_path: Path) -> None:
    """Its numbers are those of --json; no network, nothing wider than a phone."""
    file = tmp_path / "dataset.html"
    coverage = json.loads(printed(SCRIPT, "--workspace", made_up.root, "--json", "--html", file))
    for width in (375, 1400):
        page, complaints = opened(browser, file, width)
        assert column(page, 0, "operator") == [row["operator"] for row in coverage["operators"]]
        assert [int(cell) for cell in column(page, 0, "measured")] == [row["measured"] for row in coverage["operators"]]
        cells = page.locator("figure.grid td").evaluate_all("cells => cells.map(cell => +(cell.dataset.value ?? 0))")
        assert cells == [count for row in coverage["operators"] if row["measured"] for count in row["by_size"]]
        assert "11 kernels of 2 operators were measured on Made Up, and 2 models" in page.inner_text("h1")
        assert "Fewer than 5 kernels were measured of Relu and 1 more" in page.inner_text("header")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert not complaints
