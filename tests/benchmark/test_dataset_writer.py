"""A dataset as it grows: what is added to its tables, and when they are written anew."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pandas as pd
import pytest
from made_up_dataset import MACHINE, METRIC, TARGET, conv, draw_kernels, gemm, relu

from records import dataset_writer
from records.blocks import Block
from records.dataset_files import (
    DatasetHeader,
    DatasetKernel,
    header_path,
    journal_path,
    kernel_lines,
    kernel_table_path,
    kernels_path,
    model_table_path,
    read_header,
    read_journal,
    read_kernels,
)
from records.dataset_writer import DatasetWriter
from records.kernel_record import Kernel
from records.measurement import Measurement
from utils import files
from utils.errors import UserError

HEADER = DatasetHeader(target=TARGET, metrics=(METRIC,), machines={MACHINE.uuid: MACHINE}, labels=("run",))
FURTHER = "DCGM_FI_DEV_CPU_UTIL_SYS"  # a metric that comes later
FIRST, SECOND, THIRD = conv(), relu(), gemm()


def block_of(*kernels: Kernel, level: float = 0.0, model: str = "", status: str = "ok") -> Block:
    """A made-up block of kernels, or of a model."""
    stamps = {"started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:00:01+00:00", "status": status}
    samples = () if status != "ok" else (0.5, 0.25, 1.0)
    measurements = [Measurement(subject="kernel", id=kernel.id, label="run", context="alone", place="alone", samples_ms=samples,
                                **stamps)
                    for kernel in kernels]
    if model:
        measurements.append(Measurement(subject="model", id=model, label="latency", context=model, place="alone",
                                        samples_ms=samples, **stamps))
    return Block(level=level, key="made up", background={METRIC: 1.0}, during={}, canary_before_ms=1.0, canary_after_ms=1.0,
                 attempts=1, machine=MACHINE.uuid, measurements=tuple(measurements))


def open_writer(folder: Path, *kernels: Kernel, model: str = "net") -> DatasetWriter:
    return DatasetWriter(folder, HEADER, [DatasetKernel(kernel=kernel, models=(model,), groups=(model,)) for kernel in kernels])


def tables(folder: Path) -> list[str]:
    return [path.read_text() for path in (kernel_table_path(folder), model_table_path(folder))]


def rewritten(folder: Path) -> list[str]:
    """The tables made anew from the whole journal."""
    dataset_writer.write_tables(folder, read_header(folder), read_journal(folder))
    return tables(folder)


@pytest.fixture
def rewrites(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each time that the tables are written anew from here on: how many blocks they are made of."""
    written: list[int] = []
    write = dataset_writer.write_tables

    def noting(folder: Path, header: DatasetHeader, blocks: list[Block]) -> None:
        written.append(len(blocks))
        write(folder, header, blocks)

    monkeypatch.setattr(dataset_writer, "write_tables", noting)
    return written


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset of one kernel and one model, its tables up to date."""
    writer = open_writer(tmp_path, FIRST)
    writer.append(block_of(FIRST, model="net"))
    writer.write_tables()
    return tmp_path


def test_rows_of_further_kernels_and_models_are_added(folder: Path, rewrites: list[int]) -> None:
    """Both to rows that were there before and to this collector's own. A kernel that failed has a row too."""
    writer = open_writer(folder, SECOND, THIRD)
    writer.append(block_of(SECOND, model="net"))
    writer.write_tables()
    writer.append(block_of(THIRD, status="failed"))
    writer.write_tables()
    assert not rewrites
    assert writer.count_rows() == (3, 2)
    assert [text.count("\n") for text in tables(folder)] == [1 + 3, 1 + 2]
    assert tables(folder) == rewritten(folder)


def test_a_further_metric_is_a_column_that_is_empty_in_the_rows_before(folder: Path) -> None:
    """The config may name the metrics in any order. The journal keeps what was measured."""
    further = HEADER.model_copy(update={"metrics": (FURTHER, METRIC)})
    before = read_journal(folder)
    writer = DatasetWriter(folder, further, [DatasetKernel(kernel=SECOND, models=("net",), groups=("net",))])
    writer.append(block_of(SECOND, model="net").model_copy(update={"background": {METRIC: 2.0, FURTHER: 3.0}}))
    writer.write_tables()
    assert read_header(folder).metrics == (METRIC, FURTHER)
    assert read_journal(folder)[:1] == before
    for path, column in ((kernel_table_path(folder), "Kernel_ID"), (model_table_path(folder), "Model")):
        table = pd.read_csv(path)
        assert len(table) == 2, column
        assert table[METRIC].tolist() == [1.0, 2.0]
        assert table[FURTHER].tolist() == [pytest.approx(math.nan, nan_ok=True), 3.0]
    assert tables(folder) == rewritten(folder)


def test_a_metric_that_is_not_measured_any_more_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=rf"was collected with metrics {METRIC}; add {METRIC} to those of the config \(it may"):
        DatasetWriter(folder, HEADER.model_copy(update={"metrics": (FURTHER,)}), [])
    assert read_header(folder).metrics == (METRIC,)


def test_without_anything_new_nothing_is_written(folder: Path, rewrites: list[int]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path != header_path(folder)}
    open_writer(folder, FIRST).write_tables()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not rewrites


def test_a_kernel_measured_again_keeps_one_row(folder: Path, rewrites: list[int]) -> None:
    writer = open_writer(folder, FIRST, SECOND, THIRD)
    writer.append(block_of(FIRST, SECOND))
    writer.write_tables()
    assert rewrites == [2]
    assert writer.count_rows() == (2, 1)
    assert tables(folder)[0].count("\n") == 1 + 2
    writer.append(block_of(THIRD, SECOND, level=0.5))  # what this collector measured may come again too
    writer.write_tables()
    assert rewrites == [2, 3]
    assert tables(folder) == rewritten(folder)


def test_the_row_of_a_kernel_names_a_further_model(folder: Path, rewrites: list[int]) -> None:
    writer = open_writer(folder, FIRST, SECOND, model="other")
    writer.append(block_of(SECOND))
    writer.write_tables()
    assert rewrites == [2]
    assert [row.split(",")[0] for row in tables(folder)[0].splitlines() if "other" in row] == [FIRST.id, SECOND.id]


def test_blocks_of_a_collector_that_was_killed_are_not_forgotten(folder: Path, rewrites: list[int]) -> None:
    """It had appended to the journal, not to the tables."""
    open_writer(folder, SECOND).append(block_of(SECOND))
    writer = open_writer(folder, THIRD)
    writer.append(block_of(THIRD))
    writer.write_tables()
    assert rewrites == [3]
    assert tables(folder)[0].count("\n") == 1 + 3


def test_a_collector_killed_between_the_two_tables(folder: Path, rewrites: list[int]) -> None:
    writer = open_writer(folder, SECOND)
    writer.append(block_of(SECOND))
    writer.write_tables()
    older = journal_path(folder).stat().st_mtime_ns - 1
    os.utime(model_table_path(folder), ns=(older, older))
    open_writer(folder).write_tables()
    assert rewrites == [2]


@pytest.mark.parametrize("damage", ["gone", "other columns"])
def test_tables_that_are_gone_or_of_other_columns_are_written_anew(folder: Path, rewrites: list[int], damage: str) -> None:
    right, path = tables(folder), kernel_table_path(folder)
    if damage == "gone":
        path.unlink()
    else:
        path.write_text(right[0].replace("run_median_ms", "median"))
    open_writer(folder).write_tables()
    assert rewrites == [1]
    assert tables(folder) == right


def test_new_kernels_join_the_described_ones(folder: Path) -> None:
    """Sorted by id; the lines of the other kernels do not change."""
    kernels = draw_kernels(20)
    before = kernel_lines(folder)
    open_writer(folder, *kernels, model="later")
    assert [entry.kernel.id for entry in read_kernels(folder)] == sorted({FIRST.id, *(kernel.id for kernel in kernels)})
    assert {name: line for name, line in kernel_lines(folder).items() if name in before} == before
    wanted = {kernels[3].id, FIRST.id, "never described"}
    assert {entry.kernel.id: entry.models for entry in read_kernels(folder, wanted)} == {
        kernels[3].id: ("later",), FIRST.id: ("net",)}


@pytest.mark.parametrize("line", ["no json", "[]", '{"kernel": 1}', '{"models": []}'])
def test_a_line_that_describes_no_kernel_is_reported(folder: Path, line: str) -> None:
    files.append_line(kernels_path(folder), line)
    with pytest.raises(UserError, match=r"kernels\.jsonl: damaged .*; measure anew: python benchmark/collector\.py"):
        open_writer(folder, SECOND)
