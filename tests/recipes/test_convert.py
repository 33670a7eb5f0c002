"""A workspace of version 1 is refused with the command that converts it; converted, it predicts what it predicted.

`version_1.tar.xz` is cut out of a CPU's workspace that Hase wrote when its records were of version 1: one model, five kernels,
predictors of one label. `version_1_expected.json` holds what that Hase made of it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inference import predict
from inference.core import targets
from kernel_model.sampling.kernel_errors import read_errors
from recipes.convert.convert_files import main
from records.dataset_files import read_header, read_journal, read_kernels
from records.dataset_reading import read_model_table
from records.host_pace import read_pace
from records.kernel_record_files import read_index, read_model_record
from records.probe_reading import read_reading
from training.composition.fitted import read_composition
from training.kernels.sidecar import read_sidecar
from training.kernels.training_set import read_training_set
from training.sharing.learned import DEFAULT_SWITCH_MS, read_sharing
from utils.errors import UserError
from utils.paths import Workspace

HERE = Path(__file__).parent
TARGET, FLAVOUR = "amd-epyc-2t-cpu-avx512-ort1.31-all", "cpu-avx512-ort1.31-all"
MODEL = "resnet18_fp32_b1_64x64"


def convert(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["convert_files.py", *map(str, arguments)])
    return main()


@pytest.fixture
def older(tmp_path: Path) -> Workspace:
    """The workspace of version 1."""
    with tarfile.open(HERE / "version_1.tar.xz") as archive:
        archive.extractall(tmp_path / "older", filter="data")
    return Workspace(tmp_path / "older")


def answers(workspace: Workspace) -> dict[str, Any]:
    """What version_1_expected.json holds: a model's prediction, and the rows that a training learns from."""
    record = workspace.kernel_records / FLAVOUR / f"{MODEL}.json"
    found: dict[str, Any] = {}
    for name, strict in (("with look-up", False), ("strict", True)):
        answer = predict(record, target=TARGET, workspace=workspace, strict=strict)
        found[name] = {"latency_ms": answer.latency_ms, "interval_ms": list(answer.interval_ms),
                       "warnings": list(answer.warnings)}
    rows = read_training_set(workspace, TARGET)
    found["rows"] = sorted([name, sorted(groups), float(time_ms)] for name, groups, time_ms in zip(
        rows.ids.tolist(), rows.groups, rows.times_ms["run"], strict=True))
    return found


READERS: dict[str, Callable[[Workspace], object]] = {
    f"ort_analysis/ort_kernel_record/{FLAVOUR}/{MODEL}.json":
        lambda workspace: read_model_record(workspace.kernel_records / FLAVOUR / f"{MODEL}.json"),
    f"ort_analysis/ort_kernel_record/{FLAVOUR}/index.json":
        lambda workspace: read_index(workspace.kernel_records / FLAVOUR / "index.json"),
    f"benchmark/dataset/{TARGET}/dataset.json": lambda workspace: read_header(workspace.dataset(TARGET)),
    "benchmark/host_pace.json": lambda workspace: read_pace(workspace.host_pace),
    f"training/predictors/{TARGET}/predictors.json": lambda workspace: read_sidecar(workspace.predictors(TARGET)),
    f"training/predictors/{TARGET}/composition.json": lambda workspace: read_composition(workspace.predictors(TARGET)),
    "training/predictors/other-gpu/sharing.json": lambda workspace: read_sharing(workspace.predictors("other-gpu")),
    f"training/kernel_errors/{TARGET}.json": lambda workspace: read_errors(workspace.kernel_errors(TARGET)),
}


@pytest.mark.parametrize("name", READERS)
def test_an_older_file_is_refused_with_the_command_that_converts_it(name: str, older: Workspace,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"python recipes/convert/convert_files.py {older.root}"
    with pytest.raises(UserError, match=r"version \d, this Hase reads version \d; convert it") as raised:
        READERS[name](older)
    message = str(raised.value)
    assert message.startswith(str(older.root / name))
    assert command in message
    assert "\n" not in message
    assert convert(monkeypatch, older.root) == 0
    assert READERS[name](older)


def test_a_converted_workspace_predicts_the_same(older: Workspace, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """To the last bit; and a training learns from the same rows, each of the same groups."""
    monkeypatch.setattr(targets, "is_here", lambda target: True)  # as on the machine that wrote the workspace: no notice of it
    convert(monkeypatch, older.root, "--json")
    assert {row["kind"]: row["files"] for row in json.loads(capsys.readouterr().out)} == dict.fromkeys((
        "composition", "dataset", "host pace", "index", "kernel errors", "other", "predictors", "record", "sharing"), 1)
    assert answers(older) == json.loads((HERE / "version_1_expected.json").read_text())
    files_now = {path: path.read_bytes() for path in older.root.rglob("*") if path.is_file()}
    assert convert(monkeypatch, older.root) == 0  # nothing is left to do
    assert {path: path.read_bytes() for path in older.root.rglob("*") if path.is_file()} == files_now


def test_what_a_converted_file_says(older: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = older.root / "probe.json"
    convert(monkeypatch, older.root, reading)
    record, index = (READERS[name](older) for name in list(READERS)[:2])
    assert (record.group, record.file_stem, record.flavour.runtime) == ("resnet", MODEL, "ort")  # type: ignore[attr-defined]
    assert record.flavour.name == FLAVOUR  # type: ignore[attr-defined]
    assert index.groups == {MODEL: "resnet"}  # type: ignore[attr-defined]
    folder = older.dataset(TARGET)
    header = read_header(folder)
    assert (header.target.name, header.groups) == (TARGET, {MODEL: "resnet"})
    found = {(tuple(entry.models), entry.groups, entry.sampled) for entry in read_kernels(folder)}
    assert found == {((MODEL,), ("resnet",), False), ((), ("resnet", "vgg"), True), ((), (), True)}
    blocks = read_journal(folder)
    assert {(m.subject, m.place) for block in blocks for m in block.measurements} == {
        ("kernel", "alone"), ("kernel", "carrier"), ("kernel", "in_model"), ("model", "alone")}
    assert next(block.probe for block in blocks if block.probe) == read_reading(reading)
    assert read_reading(reading).sharing == "time_slices"
    assert set(read_model_table(older, TARGET)["Groups"]) == {"resnet"}
    sharing = read_sharing(older.predictors("other-gpu"))
    assert sharing is not None
    assert sharing.switch_ms == DEFAULT_SWITCH_MS


def test_predictors_and_their_dataset_still_belong_together(older: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A composition names the tables that it was fitted to by their hashes, which change with column Groups."""
    convert(monkeypatch, older.root)
    sha256 = read_training_set(older, TARGET).sha256
    assert read_sidecar(older.predictors(TARGET)).dataset_sha256 == sha256
    assert read_composition(older.predictors(TARGET)).dataset_sha256 == sha256


def test_an_archive_is_converted_as_its_files_are(older: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Path(shutil.copy(HERE / "version_1.tar.xz", tmp_path))
    convert(monkeypatch, "--archive", archive)
    convert(monkeypatch, older.root)
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    for path in (path for path in older.root.rglob("*") if path.is_file() and "logs" not in path.parts):
        assert (tmp_path / "unpacked" / path.relative_to(older.root)).read_bytes() == path.read_bytes()


def test_a_damaged_file_is_named(older: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    path = older.predictors(TARGET) / "composition.json"
    path.write_text(path.read_text().replace('"beta_ms": 0.0', '"beta_ms": 1.0', 1))
    with pytest.raises(UserError, match=r"composition\.json: damaged or changed by hand"):
        convert(monkeypatch, older.root)
    path.write_text('{"version": 1, "candidates": [], "left_out": "family"}')
    with pytest.raises(UserError, match=r"composition\.json: a damaged composition \(KeyError: 'models'\)"):
        convert(monkeypatch, older.root)
