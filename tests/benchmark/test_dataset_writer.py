"""A dataset as it grows: what is added to its tables, and when they are written anew."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from made_up_dataset import MACHINE, METRIC, TARGET, conv, draw_kernels, gemm, relu

from hase.records import dataset_tables, dataset_writer
from hase.records.dataset_files import (
    DatasetHeader,
    DatasetKernel,
    digests_path,
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
from hase.records.dataset_tables import read_kernel_table, read_model_table
from hase.records.dataset_writer import DatasetWriter
from hase.records.kernel_record import Kernel
from hase.records.measurement import Block, Measurement, journal_line
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.locks import WRITER, try_lock
from hase.utils.paths import Workspace

HEADER = DatasetHeader(target=TARGET, metrics=(METRIC,), machines={MACHINE.uuid: MACHINE}, labels=("run",))
FURTHER = "DCGM_FI_DEV_CPU_UTIL_SYS"  # a metric that comes later
FIRST, SECOND, THIRD = conv(), relu(), gemm()


def block_of(*kernels: Kernel, level: float = 0.0, model: str = "", status: str = "ok") -> Block:
    """A made-up block of kernels, or of a model."""
    units = [("kernel", kernel.id, "run", "alone") for kernel in kernels] + [("model", model, "latency", model)] * bool(model)
    stamps = {"started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:00:01+00:00", "status": status}
    measurements = tuple(Measurement(subject=subject, id=name, label=label, context=context, place="alone",
                                     samples_ms=(0.5, 0.25, 1.0) if status == "ok" else (), **stamps)
                         for subject, name, label, context in units)
    return Block(level=level, key="made up", background={METRIC: 1.0}, during={}, canary_before_ms=1.0, canary_after_ms=1.0,
                 attempts=1, machine=MACHINE.uuid, measurements=measurements)


def described(*kernels: Kernel, model: str = "net") -> list[DatasetKernel]:
    return [DatasetKernel(kernel=kernel, models=(model,), groups=(model,)) for kernel in kernels]


def open_writer(folder: Path, *kernels: Kernel, model: str = "net") -> DatasetWriter:
    return DatasetWriter(folder, HEADER, described(*kernels, model=model))


def add(folder: Path, *kernels: Kernel, measured: Kernel, owner: str = "net", model: str = "") -> DatasetWriter:
    """A further collector, of `kernels`, measures one of them, and perhaps a model."""
    writer = open_writer(folder, *kernels, model=owner)
    writer.append(block_of(measured, model=model))
    writer.write_tables()
    return writer


def read(folder: Path) -> pd.DataFrame:
    """The kernel table, as training reads it."""
    return read_kernel_table(Workspace(folder.parents[2]), folder.name)


def old_lines(path: Path) -> None:
    """Writes the file's lines as earlier versions did, without digests."""
    path.write_text("".join(f"{files.line_without_digest(line)}\n" for line in files.read_lines(path)))


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
    folder = Workspace(tmp_path).dataset("made-up")
    writer = open_writer(folder, FIRST)
    writer.append(block_of(FIRST, model="net"))
    writer.write_tables()
    return folder


def test_rows_of_further_kernels_and_models_are_added(folder: Path, rewrites: list[int]) -> None:
    """Both to rows that were there before and to this collector's own. A kernel that failed has a row too."""
    writer = add(folder, SECOND, THIRD, measured=SECOND, model="net")
    writer.append(block_of(THIRD, status="failed"))
    writer.write_tables()
    assert not rewrites
    assert writer.count_rows() == (3, 2)
    assert [text.count("\n") for text in tables(folder)] == [1 + 3, 1 + 2]
    assert tables(folder) == rewritten(folder)


def test_a_further_metric_is_a_column_that_is_empty_in_the_rows_before(folder: Path) -> None:
    """The config may name the metrics in any order. The journal keeps what was measured."""
    before = read_journal(folder)
    writer = DatasetWriter(folder, HEADER.model_copy(update={"metrics": (FURTHER, METRIC)}), described(SECOND))
    writer.append(block_of(SECOND, model="net").model_copy(update={"background": {METRIC: 2.0, FURTHER: 3.0}}))
    writer.write_tables()
    assert read_header(folder).metrics == (METRIC, FURTHER)
    assert read_journal(folder)[:1] == before
    for path_of in (kernel_table_path, model_table_path):
        table = pd.read_csv(path_of(folder))
        assert table[METRIC].tolist() == [1.0, 2.0]
        assert table[FURTHER].tolist() == [pytest.approx(math.nan, nan_ok=True), 3.0]
    assert tables(folder) == rewritten(folder)


@pytest.mark.parametrize(("change", "message"), [
    ({"metrics": (FURTHER,)}, rf"was collected with metrics {METRIC}; add {METRIC} to those of the config \(it may"),
    ({"sharing": "mps:50"}, "was collected with sharing slices, not mps:50; move it away"),
    ({"target": TARGET.model_copy(update={"threads": 96})}, rf"is of {TARGET.name}, not of \S*-96t-\S*;")])
def test_another_way_of_measuring_is_refused(folder: Path, change: dict[str, object], message: str) -> None:
    before = header_path(folder).read_bytes()
    with pytest.raises(UserError, match=message):
        DatasetWriter(folder, HEADER.model_copy(update=change), [])
    assert header_path(folder).read_bytes() == before


def test_another_machine_of_the_target_joins(folder: Path) -> None:
    second = MACHINE.model_copy(update={"uuid": "another"})
    DatasetWriter(folder, HEADER.model_copy(update={"machines": {"another": second}}), [])
    assert set(read_header(folder).machines) == {MACHINE.uuid, "another"}


def test_without_anything_new_nothing_is_written(folder: Path, rewrites: list[int]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path != header_path(folder)}
    open_writer(folder, FIRST).write_tables()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not rewrites


def test_tables_are_updated_now_and_then_while_it_measures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_writer, "TABLES_EVERY_S", 0.0)
    writer = open_writer(folder, SECOND, THIRD)
    writer.append(block_of(SECOND))
    assert SECOND.id in tables(folder)[0]
    monkeypatch.setattr(dataset_writer, "TABLES_EVERY_S", 30.0)
    writer = open_writer(folder, THIRD)
    writer.append(block_of(THIRD))
    assert THIRD.id not in tables(folder)[0]


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
    add(folder, FIRST, SECOND, measured=SECOND, owner="other")
    assert rewrites == [2]
    assert [row.split(",")[0] for row in tables(folder)[0].splitlines() if "other" in row] == [FIRST.id, SECOND.id]


def test_blocks_of_a_collector_that_was_killed_are_not_forgotten(folder: Path, rewrites: list[int]) -> None:
    """It had appended to the journal, not to the tables."""
    open_writer(folder, SECOND).append(block_of(SECOND))
    add(folder, THIRD, measured=THIRD)
    assert rewrites == [3]
    assert tables(folder)[0].count("\n") == 1 + 3


@pytest.mark.parametrize("older", [[kernel_table_path], [model_table_path],
                                   [kernel_table_path, model_table_path, digests_path]])
def test_tables_of_an_older_journal_are_made_anew_whatever_their_times_say(
        folder: Path, rewrites: list[int], older: list[Callable[[Path], Path]]) -> None:
    """A collector was killed between the two tables, or they were restored from a copy."""
    before = {path_of(folder): path_of(folder).read_bytes() for path_of in older}
    add(folder, SECOND, measured=SECOND, model="net")
    right, later_ns = tables(folder), time.time_ns() + 10**12
    for path, contents in before.items():
        path.write_bytes(contents)
        os.utime(path, ns=(later_ns, later_ns))
    open_writer(folder).write_tables()
    assert rewrites == [2]
    assert tables(folder) == right


def change_table(folder: Path) -> None:
    path = kernel_table_path(folder)
    path.write_text(path.read_text().replace("0.5", "0.7"))


def test_who_reads_a_changed_table_gets_the_right_one_and_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    right = tables(folder)
    change_table(folder)
    assert read(folder)["run_median_ms"][0] == 0.5
    assert tables(folder) == right
    assert "the tables are not those of the journal" in caplog.text
    caplog.clear()
    assert read_model_table(Workspace(folder.parents[2]), folder.name)["median_ms"][0] == 0.5
    assert not caplog.text


def test_tables_that_were_never_checked_are_made_anew_where_that_is_possible(folder: Path,
                                                                             caplog: pytest.LogCaptureFixture) -> None:
    """Archives of earlier versions hold no digests; one of them holds no kernels either."""
    right = tables(folder)
    for path in (journal_path(folder), kernels_path(folder)):
        old_lines(path)
    digests_path(folder).unlink()
    change_table(folder)
    assert read(folder)["run_median_ms"][0] == 0.5
    assert tables(folder) == right
    digests_path(folder).unlink()
    kernels_path(folder).unlink()
    change_table(folder)
    assert read(folder)["run_median_ms"][0] == 0.7
    assert "its tables can't be checked without kernels.jsonl; they are used as they are" in caplog.text


def test_a_changed_table_without_a_journal_is_refused(folder: Path) -> None:
    digests = files.read_json(digests_path(folder)) | {"files": {}}
    digests_path(folder).write_text(json.dumps(files.with_digest(digests)))
    journal_path(folder).unlink()
    with pytest.raises(UserError, match=r"the tables were changed .* without measurements\.jsonl; measure anew"):
        read(folder)


def test_tables_are_read_while_another_process_measures(folder: Path, caplog: pytest.LogCaptureFixture,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """They lack its latest block, and are left to it. Tables that it is just writing are not read."""
    monkeypatch.setattr(dataset_tables, "PATIENCE_S", 0.0)
    files.append_line(journal_path(folder), journal_line(block_of(FIRST, level=0.5)))
    (folder / WRITER).touch()
    descriptor = try_lock(folder / WRITER)
    assert descriptor is not None
    try:
        assert len(read(folder)) == 1
        assert "another process measures; its latest blocks are not in the tables yet" in caplog.text
        change_table(folder)
        with pytest.raises(UserError, match=r"in use by"):
            read(folder)
    finally:
        os.close(descriptor)
    assert len(read(folder)) == 2


def test_a_reader_that_made_the_tables_does_not_make_a_writer_add_rows_twice(folder: Path) -> None:
    writer = open_writer(folder, SECOND)
    writer.append(block_of(SECOND))
    assert len(read(folder)) == 2
    writer.write_tables()
    assert tables(folder) == rewritten(folder)


def test_a_block_that_stands_twice_counts_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A journal was restored by appending to it; the first copy is of a version that wrote no digests."""
    right, journal = tables(folder), journal_path(folder)
    lines = journal.read_text()
    old_lines(journal)
    with journal.open("a") as appended:
        appended.write(lines)
    assert len(read_journal(folder)) == 1
    assert "measurements.jsonl: 1 lines stand there twice" in caplog.text
    open_writer(folder).write_tables()
    assert tables(folder) == right


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize(("path_of", "right", "wrong", "message"), [
    *((journal_path, "0.25", time, r"measurements\.jsonl, line 1: not a block .*measurements\.0\.samples_ms\.1: ")
      for time in ("NaN", "Infinity", "1e400", "null", "[0.5]", "-1.0", '"fast"')),
    (journal_path, "[0.5,0.25,1.0]", "[]", "has status ok and no samples of label run"),
    *((kernels_path, '"pads":[1,1,1,1]', f'"pads":{pads}',
       r"kernels\.jsonl: damaged at kernel\.attributes: .*attribute pads must be whole")
      for pads in ('"1"', '[1,1,1,"1"]', "1", "[0.5]"))])
def test_damage_is_reported_with_its_place(folder: Path, digests: bool, path_of: Callable[[Path], Path], right: str, wrong: str,
                                           message: str) -> None:
    """By the digest of its line, or, in a file of an earlier version, by what it says."""
    path = path_of(folder)
    if not digests:
        old_lines(path)
    before = path.read_text()
    path.write_text(before.replace(right, wrong, 1))
    assert path.read_text() != before
    by_digest = rf"{path.name}, line 1: damaged .*its digest does not match its contents"
    with pytest.raises(UserError, match=by_digest if digests else message):
        (read_journal if path_of is journal_path else read_kernels)(folder)


def test_a_label_that_the_dataset_does_not_have_is_refused(folder: Path) -> None:
    writer, block = open_writer(folder), block_of(FIRST)
    writer.append(block.model_copy(update={"measurements": (block.measurements[0].model_copy(update={"label": "odd"}),)}))
    with pytest.raises(UserError, match=r"measurements\.jsonl: damaged: it has odd_ms, which kernel_latency\.csv has no "):
        writer.write_tables()


def test_a_journal_that_lost_blocks_is_refused(folder: Path) -> None:
    add(folder, SECOND, measured=SECOND)
    path = journal_path(folder)
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    for use in (open_writer, read):
        with pytest.raises(UserError, match=r"blocks are missing: .*restore it, or remove .*tables\.json"):
            use(folder)
    digests_path(folder).unlink()
    open_writer(folder).write_tables()
    assert tables(folder)[0].count("\n") == 1 + 1


def test_a_line_that_a_kill_cut_short_is_no_lost_block(folder: Path) -> None:
    """Tables were made meanwhile; then a shorter line takes its place."""
    with journal_path(folder).open("a") as journal:
        journal.write('{"version":2,' + " " * 5000)
    assert len(read(folder)) == 1
    writer = open_writer(folder, SECOND)
    writer.append(block_of(SECOND))
    assert len(read_journal(folder)) == 2
    writer.write_tables()
    assert tables(folder) == rewritten(folder)


@pytest.mark.parametrize("contents", [None, "Kernel_ID,median_ms\n"])
def test_tables_that_are_gone_or_of_other_columns_are_written_anew(folder: Path, rewrites: list[int],
                                                                   contents: str | None) -> None:
    right, path = tables(folder), kernel_table_path(folder)
    path.unlink() if contents is None else path.write_text(contents)
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


@pytest.mark.parametrize(("added", "message"), [
    *((f"{line}\n", r"kernels\.jsonl, line 2: damaged .*; measure anew: python benchmark/collector\.py")
      for line in ("no json", "[]", '{"kernel": 1}', '{"models": []}')),
    ('{"kernel"', r"kernels\.jsonl: damaged \(its last line is cut short\)")])
def test_a_line_that_describes_no_kernel_is_reported(folder: Path, added: str, message: str) -> None:
    with kernels_path(folder).open("a") as kernels:
        kernels.write(added)
    with pytest.raises(UserError, match=message):
        open_writer(folder, SECOND)
