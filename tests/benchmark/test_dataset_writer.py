"""A dataset as it grows: what is added to its tables, and when they are written anew; and what it holds."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from command import printed, run_script
from made_up_dataset import MACHINE, METRIC, TARGET, conv, gemm, relu, true_ms, write_dataset

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
    write_digests,
)
from hase.records.dataset_tables import read_kernel_table
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


def open_writer(folder: Path, *kernels: Kernel, model: str = "net", header: DatasetHeader = HEADER) -> DatasetWriter:
    return DatasetWriter(folder, header, [DatasetKernel(kernel=kernel, models=(model,), groups=(model,)) for kernel in kernels])


def add(folder: Path, *kernels: Kernel, measured: Kernel, model: str = "") -> DatasetWriter:
    """A further collector, of `kernels`, measures one of them, and perhaps a model."""
    writer = open_writer(folder, *kernels)
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
    dataset_writer.write_dataset_tables(folder, read_header(folder), read_journal(folder))
    return tables(folder)


@pytest.fixture
def rewrites(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each time that the tables are written anew from here on: how many blocks they are made of."""
    written: list[int] = []
    write = dataset_writer.write_dataset_tables

    def noting(folder: Path, header: DatasetHeader, blocks: list[Block], add: bool = False) -> None:
        if not add:
            written.append(len(blocks))
        write(folder, header, blocks, add)

    monkeypatch.setattr(dataset_writer, "write_dataset_tables", noting)
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
    assert (rewrites, writer.count_rows()) == ([], (3, 2))
    assert [text.count("\n") for text in tables(folder)] == [1 + 3, 1 + 2]
    assert tables(folder) == rewritten(folder)


def test_a_further_metric_is_a_column_that_is_empty_in_the_rows_before(folder: Path) -> None:
    """The config may name the metrics in any order. The journal keeps what was measured."""
    before = read_journal(folder)
    writer = open_writer(folder, SECOND, header=HEADER.model_copy(update={"metrics": (FURTHER, METRIC)}))
    writer.append(block_of(SECOND, model="net").model_copy(update={"background": {METRIC: 2.0, FURTHER: 3.0}}))
    writer.write_tables()
    assert (read_header(folder).metrics, read_journal(folder)[:1]) == ((METRIC, FURTHER), before)
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


def test_without_anything_new_nothing_is_written(folder: Path, rewrites: list[int]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path != header_path(folder)}
    open_writer(folder, FIRST).write_tables()
    assert ({path: path.stat().st_mtime_ns for path in before}, rewrites) == (before, [])


def test_a_kernel_measured_again_keeps_one_row(folder: Path, rewrites: list[int]) -> None:
    """Whichever collector measured it before; the row names the models of both."""
    writer = open_writer(folder, FIRST, SECOND, THIRD, model="other")
    writer.append(block_of(FIRST, SECOND))
    writer.write_tables()
    assert (rewrites, writer.count_rows(), tables(folder)[0].count("\n")) == ([2], (2, 1), 1 + 2)
    assert [row.split(",")[0] for row in tables(folder)[0].splitlines() if "other" in row] == [FIRST.id, SECOND.id]
    writer.append(block_of(THIRD, SECOND, level=0.5))
    writer.write_tables()
    assert rewrites == [2, 3]
    assert tables(folder) == rewritten(folder)


def test_blocks_of_a_collector_that_was_killed_are_not_forgotten(folder: Path, rewrites: list[int]) -> None:
    """It had appended to the journal, not to the tables."""
    open_writer(folder, SECOND).append(block_of(SECOND))
    add(folder, THIRD, measured=THIRD)
    assert (rewrites, tables(folder)[0].count("\n")) == ([3], 1 + 3)


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
    assert (rewrites, tables(folder)) == ([2], right)


def test_tables_that_are_gone_or_of_an_earlier_versions_columns_are_made_anew(folder: Path, rewrites: list[int]) -> None:
    right, path = tables(folder), kernel_table_path(folder)
    path.unlink()
    open_writer(folder).write_tables()
    assert (rewrites, tables(folder)) == ([1], right)
    path.write_text(right[0].replace("run_median_ms", "median"))
    write_digests(folder)  # that version did
    open_writer(folder).write_tables()
    assert (rewrites, tables(folder)) == ([1, 1], right)


def change_table(folder: Path) -> None:
    path = kernel_table_path(folder)
    path.write_text(path.read_text().replace("0.5", "0.7"))


def test_who_reads_a_changed_table_gets_the_right_one_and_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    right = tables(folder)
    change_table(folder)
    assert read(folder)["run_median_ms"][0] == 0.5
    assert tables(folder) == right
    assert "the tables are not those of the journal" in caplog.text


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


def test_a_changed_table_without_its_journal_is_refused(folder: Path) -> None:
    digests_path(folder).write_text(json.dumps(files.with_digest(files.read_json(digests_path(folder)) | {"files": {}})))
    journal_path(folder).unlink()
    change_table(folder)
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
    journal.write_text(journal.read_text() + lines)
    assert len(read_journal(folder)) == 1
    assert "measurements.jsonl: 1 lines stand there twice" in caplog.text
    open_writer(folder).write_tables()
    assert tables(folder) == right


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize(("path_of", "right", "wrong", "message"), [
    *((journal_path, "0.25", time, r"measurements\.jsonl, line 1: not a block .*measurements\.0\.samples_ms\.1: ")
      for time in ("NaN", "1e400", "null", "-1.0", '"fast"')),
    (journal_path, "[0.5,0.25,1.0]", "[]", "has status ok and no samples of label run"),
    (kernels_path, "}\n", "", r"kernels\.jsonl: damaged \(its last line is cut short\)"),
    (kernels_path, '"pads":[1,1,1,1]', '"pads":[1,1,1,"1"]',
     r"kernels\.jsonl: damaged at kernel\.attributes: .*attribute pads must be whole")])
def test_damage_is_reported_with_its_place(folder: Path, digests: bool, path_of: Callable[[Path], Path], right: str, wrong: str,
                                           message: str) -> None:
    """By the digest of its line, or, in a file of an earlier version, by what it says."""
    path = path_of(folder)
    if not digests:
        old_lines(path)
    path.write_text(path.read_text().replace(right, wrong, 1))
    by_digest = rf"{path.name}, line 1: damaged .*its digest does not match its contents"
    with pytest.raises(UserError, match=by_digest if digests and wrong else message):
        (read_journal if path_of is journal_path else read_kernels)(folder)


@pytest.mark.parametrize("line", ["no json", "[]", '{"kernel": 1}', '{"models": []}'])
def test_a_line_that_describes_no_kernel_is_reported(folder: Path, line: str) -> None:
    files.append_line(kernels_path(folder), line)
    with pytest.raises(UserError, match=r"kernels\.jsonl, line 2: damaged .*; measure anew: python benchmark/collector\.py"):
        open_writer(folder, SECOND)


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


def test_new_kernels_join_the_described_ones(folder: Path) -> None:
    """Sorted by id; the lines of the other kernels do not change."""
    before = kernel_lines(folder)
    open_writer(folder, SECOND, THIRD, model="later")
    assert [entry.kernel.id for entry in read_kernels(folder)] == sorted(kernel.id for kernel in (FIRST, SECOND, THIRD))
    assert kernel_lines(folder).items() > before.items()
    assert {entry.kernel.id: entry.models for entry in read_kernels(folder, {SECOND.id, FIRST.id, "never described"})} == {
        SECOND.id: ("later",), FIRST.id: ("net",)}


# what it holds -----------------------------------------------------------------------------------------------------------

SCRIPT = "benchmark/dataset.py"
LITTLE, LARGE, FAILED = relu(1, 8, 8), relu(4, 64, 112), gemm()  # of 4 kB, 25.7 MB, and one whose measurements fail


@pytest.fixture
def made_up(workspace: Workspace) -> Workspace:
    """Two Relus, a product that failed, and nine convolutions; idle and at a load."""
    kernels = [LITTLE, LARGE, FAILED, *(conv(out=8 * size) for size in range(1, 10))]
    write_dataset(workspace, {kernel.id: kernel for kernel in kernels}, {LITTLE.id: ["anet"], LARGE.id: ["sampled:anet"]},
                  {"anet": 10.0, "bnet": 5.0}, {0.0: 0.0, 0.5: 50.0}, failed=(FAILED.id,), noise=0.0)
    return workspace


def test_kernels_are_counted_by_operator_and_size(made_up: Workspace, tmp_path: Path) -> None:
    page = tmp_path / "dataset.html"
    coverage = json.loads(printed(SCRIPT, "--workspace", made_up.root, "--json", "--html", page))
    assert "11 kernels of 2 operators were measured on Made Up, and 2 models" in page.read_text()
    assert (coverage["kernels"], coverage["measured"], coverage["models"]) == (12, 11, 2)
    by_operator = {row["operator"]: row for row in coverage["operators"]}
    assert list(by_operator) == ["Conv", "Relu", "Gemm"]
    sizes = dict(zip(coverage["sizes"], by_operator["Relu"]["by_size"], strict=True))
    assert {size: count for size, count in sizes.items() if count} == {"below 10 kB": 1, "to 100 MB": 1}
    assert by_operator["Relu"]["in_models"] == 1  # the other was sampled
    assert [by_operator["Relu"][name] for name in ("least_ms", "most_ms")] == pytest.approx([true_ms(LITTLE), true_ms(LARGE)])
    assert [by_operator["Gemm"][name] for name in ("kernels", "measured", "failed", "least_ms")] == [1, 0, 1, None]
    assert [(load["level"], load["kernels"], load["models"]) for load in coverage["loads"]] == [(0.0, 11, 2), (0.5, 11, 0)]
    assert sum(sum(row["by_size"]) for row in coverage["operators"]) == coverage["measured"]


def test_a_dataset_is_named_where_there_are_several(made_up: Workspace) -> None:
    files.write_json(made_up.dataset("other-cpu") / "dataset.json", {})
    done = run_script(SCRIPT, "--workspace", made_up.root)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "there are several datasets: choose one with --target" in done.stderr
    assert run_script(SCRIPT, "--workspace", made_up.root, "--target", TARGET.name).returncode == 0
