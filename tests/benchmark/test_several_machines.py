"""Several machines of one target: files reach each once and whole, kernels tie them, and what they measured is joined."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from command import printed, run_script
from conftest import build_workspace, small_model
from made_up_dataset import TARGET, chain, conv, gemm, relu
from made_up_dataset import collect as made_up

from hase.benchmark.collecting import ray_actors
from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.plans import CollectionWork, KernelItem, find_work, takes_label
from hase.benchmark.collecting.ray_actors import Sender, at_paths, files_of, receive
from hase.benchmark.dataset import idle_times, tie_rows
from hase.benchmark.measuring.driver import choose_ties
from hase.records.dataset_files import read_header, read_journal, read_kernels, write_journal
from hase.records.dataset_tables import read_kernel_table
from hase.records.dataset_writer import merge_dataset
from hase.records.kernel_record import Kernel
from hase.records.kernel_record_files import index_path, read_index, read_model_record, record_path
from hase.records.measurement import Background, Block, Measurement
from hase.runtimes import local_target
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import machine
from hase.utils.ort_sessions import open_session
from hase.utils.paths import Workspace

# which kernels tie them, and how their times compare ---------------------------------------------------------------------

KERNELS = [conv(side=8 + place) for place in range(40)]
TAKES_RUN = functools.partial(takes_label, label="run")
ITEMS = [KernelItem(Path(f"{kernel.id}.onnx"), kernel) for kernel in KERNELS]


def block(uuid: str, *measurements: Measurement, level: float = 0.0) -> Block:
    """A block of the journal of a made-up machine."""
    return Block(level=level, key="k", background={}, during={}, canary_before_ms=1.0, canary_after_ms=1.0, attempts=1,
                 machine=uuid, measurements=measurements)


def timed(kernel: Kernel, time_ms: float = 1.0, **changes: Any) -> Measurement:
    """Label `run` of a kernel, around `time_ms`."""
    return Measurement.model_validate({"subject": "kernel", "id": kernel.id, "label": "run", "context": "alone",
                                       "place": "alone", "samples_ms": (0.5 * time_ms, time_ms, 3 * time_ms), **changes})


def chosen(blocks: list[Block], uuid: str, count: int) -> list[Kernel]:
    return [item.kernel for item in choose_ties(ITEMS, blocks, [uuid], count, TAKES_RUN)[uuid]]


def test_ties_are_some_of_another_machines_kernels_in_any_order() -> None:
    blocks = [block("a", *map(timed, KERNELS[:30]))]
    ties = chosen(blocks, "b", 10)
    assert len({kernel.id for kernel in ties} & {kernel.id for kernel in KERNELS[:30]}) == len(ties) == 10
    backwards = choose_ties(ITEMS[::-1], [block("a", *map(timed, KERNELS[29::-1]))], ["b"], 10, TAKES_RUN)
    assert [item.kernel for item in backwards["b"]] == ties
    assert [len(chosen(blocks, *asked)) for asked in (("b", 0), ("b", 100), ("a", 10))] == [0, 30, 0]  # none of its own


def test_machines_that_measure_at_the_same_time_are_tied_by_the_same_kernels() -> None:
    """Nobody has measured anything yet: all take the same ones."""
    ties = choose_ties(ITEMS, [], ["a", "b", "c"], 10, TAKES_RUN)
    assert ties["a"] == ties["b"] == ties["c"] != []


def test_ties_are_measured_once_and_the_rest_after_an_interruption() -> None:
    blocks = [block("a", *map(timed, KERNELS))]
    ties = chosen(blocks, "b", 10)
    blocks.append(block("b", *(timed(kernel) for kernel in ties[:4]), timed(ties[4], status="crashed", samples_ms=())))
    assert chosen(blocks, "b", 10) == ties[5:]
    blocks.append(block("b", *(timed(kernel) for kernel in ties[5:])))
    assert chosen(blocks, "b", 10) == chosen(blocks, "a", 10) == []  # tied by the same kernels
    assert {kernel.id for kernel in chosen(blocks, "c", 9)} == {kernel.id for kernel in ties} - {ties[4].id}  # both have them


def test_known_ratios() -> None:
    def net(time_ms: float, **changes: Any) -> Measurement:
        return Measurement(subject="model", id="net", label="latency", context="net", place="alone", samples_ms=(time_ms,),
                           **changes)

    blocks = [
        block("a", *(timed(kernel, 2.0) for kernel in KERNELS[:10]),
              *(timed(kernel, 1.0, label="node_span", context="net", place="in_model") for kernel in KERNELS[:2])),
        block("b", *(timed(KERNELS[place], 2.0 * ratio) for place, ratio in enumerate((0.90, 0.96, 1.00, 1.04, 1.30))),
              *(timed(kernel, 1.1, label="node_span", context="othernet", place="in_model") for kernel in KERNELS[:2]),
              timed(KERNELS[3], 9.0, label="node_span", context="carrier", place="carrier"),  # machine a has none in a carrier
              timed(KERNELS[9], status="crashed"), net(3.0)),
        block("a", net(9.0, disturbance=0.5)), block("a", net(4.0, disturbance=0.1)),
        block("b", timed(KERNELS[8], 50.0), level=0.5),  # under load
    ]
    rows = {(row["what"], row["label"], row["where"]): row for row in tie_rows(idle_times(blocks))}
    assert set(rows) == {("kernels", "run", "alone"), ("kernels", "node_span", "in_model"), ("models", "latency", "whole")}
    run = rows["kernels", "run", "alone"]
    assert (run["machine"], run["other"], run["count"]) == ("a", "b", 5)
    assert [run[name] for name in ("lower_quartile", "median", "upper_quartile", "within_5_%")] == pytest.approx(
        [0.96, 1.0, 1.04, 60.0])
    assert rows["kernels", "node_span", "in_model"]["median"] == pytest.approx(1.1)
    assert rows["models", "latency", "whole"]["median"] == pytest.approx(0.75)  # against the least disturbed


@pytest.mark.slow
def test_exactly_the_ties_are_measured_here_too(workspace: Workspace) -> None:
    """The journal is changed to be another machine's. Then this machine measures only the ties, and only on the idle device."""
    command = ("benchmark/dataset.py", "--machines", "--workspace", workspace.root)
    assert "no datasets; measure one with: python benchmark/collector.py" in run_script(*command).stderr
    build_workspace(workspace, {"anet_b1": small_model()})
    config = CollectorConfig.model_validate({
        "device": "cpu", "levels": [0.0], "window_s": 0.2, "attempts": 1, "patience_s": 0,
        "kernel": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.005, "least_runs": 3, "most_runs": 5},
        "model": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.02, "least_runs": 4, "most_runs": 6},
        "each_machine": False, "ties": 2})
    collect(workspace, config)
    config = config.model_copy(update={"levels": (0.0, 0.5)})
    this_machine = machine("cpu").uuid
    folder = workspace.dataset(local_target("cpu").name)
    write_journal(folder, [entry.model_copy(update={"machine": "elsewhere", **load}) for entry in read_journal(folder)
                           for load in ({}, {"level": 0.5, "background_name": "compute"})])
    items = [KernelItem(Path(), entry.kernel) for entry in read_kernels(folder)]
    expected = {item.kernel.id for item in choose_ties(items, read_journal(folder), [this_machine], 2, TAKES_RUN)[this_machine]}
    assert collect(workspace, config)["measured_kernels"] == len(expected) == 2
    assert {(entry.level, m.subject, m.id) for entry in read_journal(folder) if entry.machine == this_machine
            for m in entry.measurements} == {(0.0, "kernel", name) for name in expected}
    assert collect(workspace, config)["measured_kernels"] == 0
    rows = json.loads(printed(*command, "--json"))[local_target("cpu").name]["ties"]
    assert [(row["label"], row["where"], row["count"]) for row in rows] == [
        ("kernel_time", "carrier", 2), ("node_span", "carrier", 2), ("run", "alone", 2)]
    assert all({row["machine"], row["other"]} == {"elsewhere", this_machine} for row in rows)


# files that are sent -----------------------------------------------------------------------------------------------------

class Store:
    """Stands for Ray's object store: what was put and fetched."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []
        self.fetched = 0

    def put(self, piece: bytes) -> int:
        self.kept.append(piece)
        return len(self.kept) - 1

    def get(self, reference: int) -> bytes:
        self.fetched += 1
        return self.kept[reference]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> CollectionWork:
    workspace = Workspace(tmp_path_factory.mktemp("work"))
    build_workspace(workspace, {"anet_b1": small_model()})
    return find_work(workspace, local_target("cpu"), ())


def test_what_was_sent_lies_there_under_its_name(work: CollectionWork, tmp_path: Path) -> None:
    """With a model's weights, if these lie in a folder below its own."""
    [model], store = work.models, Store()
    model = replace(model, path=model.path.with_name("apart.onnx"))
    (model.path.parent / "weights").mkdir()
    onnx.save_model(onnx.load(work.models[0].path), model.path, save_as_external_data=True, location="weights/all.bin",
                    size_threshold=0)
    background = Background(name="a", kind="model", model=model.path)
    items: list[Any] = [*work.kernels[:3], model, background]
    places = receive(tmp_path / "there", Sender(store.put).files_for("there", items), store.get)
    *moved, moved_background = (at_paths(item, lambda path: places[str(path)]) for item in items)
    for item, there in zip(items, moved, strict=False):
        assert (there.path.name, there.path.read_bytes()) == (item.path.name, item.path.read_bytes())
        assert all(path.is_relative_to(tmp_path / "there") for group in files_of(there) for path in group)
    assert (moved[3].path.parent / "weights" / "all.bin").read_bytes() == (model.path.parent / "weights/all.bin").read_bytes()
    assert moved[3].record_path.read_bytes() == model.record_path.read_bytes()
    assert open_session(moved[3].path, "cpu").get_outputs()
    assert moved_background.model == moved[3].path


def test_a_machine_gets_a_file_once(work: CollectionWork, tmp_path: Path) -> None:
    store = Store()
    sender, kernels = Sender(store.put), work.kernels[:3]
    first = sender.files_for("there", kernels)
    assert sender.files_for("there", kernels) == first, "put once while it is on its way"
    assert len(store.kept) == len(kernels)
    receive(tmp_path / "there", first, store.get)
    receive(tmp_path / "there", first, store.get)  # a second actor of the machine
    assert store.fetched == len(kernels)
    sender.arrived("there", first, still_sent=())
    again = sender.files_for("there", work.kernels[:4])
    assert [bool(file.pieces) for file in again] == [False, False, False, True]
    assert len(receive(tmp_path / "there", again, store.get)) == 4
    assert all(file.pieces for file in sender.files_for("elsewhere", kernels))


def test_a_large_file_travels_in_pieces(tmp_path: Path, work: CollectionWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actors, "PIECE_BYTES", 1000)
    [model], store = work.models, Store()
    sent = Sender(store.put).files_for("there", [model])
    assert max(map(len, store.kept)) == 1000
    assert len(sent[0].pieces) == -(-model.path.stat().st_size // 1000)
    places = receive(tmp_path / "there", sent, store.get)
    assert files.sha256(places[str(model.path)]) == sent[0].sha256


def test_content_that_changed_or_is_gone_is_an_error(work: CollectionWork, tmp_path: Path) -> None:
    store = Store()
    sent = Sender(store.put).files_for("there", work.kernels[:1])
    store.kept[0] += b"more"
    with pytest.raises(UserError, match="it was changed while it was sent; run again"):
        receive(tmp_path / "there", sent, store.get)
    assert os.listdir(tmp_path / "there") == []
    with pytest.raises(UserError, match="it was removed from"):
        receive(tmp_path / "there", [file._replace(pieces=()) for file in sent], store.get)


# datasets that are merged ------------------------------------------------------------------------------------------------

SHARED = conv()


def test_two_machines_become_one_dataset(tmp_path: Path) -> None:
    """Blocks, kernels with all their owners, origins of models, records and their index; a second merge changes nothing."""
    old = made_up(tmp_path / "old", chain("resnet_a", [SHARED, relu()]))
    new = made_up(tmp_path / "new", chain("vit_b", [SHARED, gemm()]).model_copy(update={"collection": "timm"}), uuid="1")
    reports = [json.loads(printed("benchmark/merge_datasets.py", "--from", old.root, "--from", new.root, "--collection",
                                  "torchvision", "--workspace", tmp_path / "all", "--json")) for _ in range(2)]
    assert [row["blocks_added"] for row in reports[0]] == [1, 1]
    assert [(row["blocks_added"], row["blocks_there"], row["records_added"]) for row in reports[1]] == [(0, 1, 0)] * 2
    merged = Workspace(tmp_path / "all")
    header = read_header(merged.dataset(TARGET.name))
    assert (set(header.machines), header.groups, header.collections) == (
        {"0", "1"}, {"resnet_a": "resnet", "vit_b": "vit"}, {"resnet_a": "torchvision", "vit_b": "timm"})
    owners = {entry.kernel.id: (entry.models, entry.groups) for entry in read_kernels(merged.dataset(TARGET.name))}
    assert owners == {SHARED.id: (("resnet_a", "vit_b"), ("resnet", "vit")), relu().id: (("resnet_a",), ("resnet",)),
                      gemm().id: (("vit_b",), ("vit",))}
    table = read_kernel_table(merged, TARGET.name)
    times = {(row["Kernel_ID"], str(row["Machine"])): row["Latency_ms"] for _, row in table.iterrows()}
    assert times == {(name, uuid): 0.375 + float(uuid) for uuid, names in (("0", (SHARED.id, relu().id)),
                                                                          ("1", (SHARED.id, gemm().id))) for name in names}
    assert read_model_record(record_path(merged, TARGET.flavour, "resnet_a")).collection == "torchvision"
    index = read_index(index_path(merged, TARGET.flavour))
    assert (index.groups, index.collections) == (header.groups, header.collections)
    assert index.kernels["Conv"][SHARED.id].models == ("resnet_a", "vit_b")


def test_right_origins_replace_wrong_ones(tmp_path: Path) -> None:
    """In the header, the records and the groups of the kernels."""
    name = "dinov2@batch=1"
    source = made_up(tmp_path / "old", chain(name, [SHARED]).model_copy(update={"file_stem": "dinov2"}))
    files.write_json(tmp_path / "origins.json", {"dinov2": {"group": "vit", "collection": "transformers"}})
    printed("benchmark/merge_datasets.py", "--from", source.root, "--origins", tmp_path / "origins.json", "--workspace",
            tmp_path / "all")
    merged = Workspace(tmp_path / "all")
    folder = merged.dataset(TARGET.name)
    record, header = read_model_record(record_path(merged, TARGET.flavour, name)), read_header(folder)
    assert (record.group, record.collection) == ("vit", "transformers")
    assert (header.groups, header.collections) == ({name: "vit"}, {name: "transformers"})
    assert [entry.groups for entry in read_kernels(folder)] == [("vit",)]


def test_what_does_not_agree_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    into = made_up(tmp_path / "into", chain("resnet_a", [SHARED]))
    before = {path: path.read_bytes() for path in into.root.rglob("*.*") if path.is_file()}
    for name, record, labels, message in (
            ("labels", chain("vit_b", [SHARED]), ("gpu",), "collected with labels"),
            ("group", chain("resnet_a", [SHARED]).model_copy(update={"group": "vit"}), ("run",), "the group of resnet_a"),
            ("graph", chain("resnet_a", [SHARED, relu()]), ("run",), "its graph differs")):
        source = made_up(tmp_path / name, record, labels=labels, uuid="1")
        with pytest.raises(UserError, match=message):
            merge_dataset(source, into, TARGET.name, {}, "")
        assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(UserError, match="into itself"):
        merge_dataset(into, into, TARGET.name, {}, "")
