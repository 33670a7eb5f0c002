"""Files of kernels and models reach another machine once, at whatever path, whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from conftest import build_workspace, small_model

from hase.benchmark.collecting import ray_actors
from hase.benchmark.collecting.plans import CollectionWork, Item, ModelItem, find_work
from hase.benchmark.collecting.ray_actors import Sender, at_paths, files_of, receive
from hase.records.measurement import Background
from hase.runtimes import local_target
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.ort_sessions import open_session
from hase.utils.paths import Workspace


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


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> CollectionWork:
    workspace = Workspace(tmp_path_factory.mktemp("work"))
    build_workspace(workspace, {"anet_b1": small_model()})
    return find_work(workspace, local_target("cpu"), ())


def with_weights_beside(work: CollectionWork) -> ModelItem:
    """The model of `work`, its weights in a folder below its own."""
    [model] = work.models
    path = model.path.with_name("apart.onnx")
    (path.parent / "weights").mkdir()
    onnx.save_model(onnx.load(model.path), path, save_as_external_data=True, location="weights/all.bin", size_threshold=0)
    return replace(model, path=path)


def at(places: Any) -> Callable[[Path], Path]:
    return lambda path: places[str(path)]


def test_what_was_sent_lies_there_under_its_name(work: CollectionWork, store: Store, tmp_path: Path) -> None:
    model = with_weights_beside(work)
    items: list[Item] = [*work.kernels[:3], model]
    sent = Sender(store.put).files_for("there", items)
    places = receive(tmp_path / "there", sent, store.get)
    for item in items:
        moved = at_paths(item, at(places))
        assert moved.path != item.path
        assert moved.path.name == item.path.name
        assert moved.path.read_bytes() == item.path.read_bytes()
        assert [path.is_relative_to(tmp_path / "there") for group in files_of(moved) for path in group]
    moved = at_paths(model, at(places))
    assert (moved.path.parent / "weights" / "all.bin").read_bytes() == (model.path.parent / "weights" / "all.bin").read_bytes()
    assert moved.record_path.read_bytes() == model.record_path.read_bytes()
    assert open_session(moved.path, "cpu").get_outputs()
    background = Background(name="a", kind="model", model=model.path)
    moved_background = at_paths(background, at(receive(tmp_path / "there", Sender(store.put).files_for("there", [background]),
                                                       store.get)))
    assert moved_background.model == moved.path


def test_a_machine_gets_a_file_once(work: CollectionWork, store: Store, tmp_path: Path) -> None:
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


def test_a_large_file_travels_in_pieces(tmp_path: Path, store: Store, work: CollectionWork,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actors, "PIECE_BYTES", 1000)
    [model] = work.models
    sent = Sender(store.put).files_for("there", [model])
    assert max(map(len, store.kept)) == 1000
    assert len(sent[0].pieces) == -(-model.path.stat().st_size // 1000)
    places = receive(tmp_path / "there", sent, store.get)
    assert files.sha256(places[str(model.path)]) == sent[0].sha256


def test_content_that_changed_or_is_gone_is_an_error(work: CollectionWork, store: Store, tmp_path: Path) -> None:
    sent = Sender(store.put).files_for("there", work.kernels[:1])
    store.kept[0] += b"more"
    with pytest.raises(UserError, match="it was changed while it was sent; run again"):
        receive(tmp_path / "there", sent, store.get)
    assert os.listdir(tmp_path / "there") == []
    with pytest.raises(UserError, match="it was removed from"):
        receive(tmp_path / "there", [file._replace(pieces=()) for file in sent], store.get)


def test_a_missing_file_is_left_to_who_opens_it(work: CollectionWork, store: Store) -> None:
    gone = replace(work.kernels[0], path=Path("/nowhere/kernel.onnx"))
    assert Sender(store.put).files_for("there", [gone, None]) == ()
    assert at_paths(None, Path) is None
