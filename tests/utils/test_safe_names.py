"""Names and paths in files: none leads out of the workspace or to anything but a plain file. Weights beside a model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command import run_script
from onnx import TensorProto, helper, numpy_helper
from pydantic import TypeAdapter, ValidationError

from hase.benchmark.ort.runner import open_runner
from hase.inference.prediction.sources import source_record
from hase.learned import target_files
from hase.learned.kernels.sidecar import read_sidecar
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.source import built_kernel
from hase.records.kernel_record_files import index_path, kernels_in_file, read_model_record, record_path
from hase.runtimes import local_flavour
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.model_files import BYTES, METADATA_FIELD, read_metadata, with_values
from hase.utils.paths import LONGEST_BYTES, SHIPPED, FileName, Workspace, as_file_name
from tests.conftest import build_workspace, small_model

NAME = TypeAdapter(FileName)
BAD_NAMES = ("../../x", "/etc/x", "..", "", "a\\b", "a\0b", "a\nb", "\ud800", "x" * 300)
GOOD_NAMES = ("Conv_Add_Relu_56x56_in16x64x56x56_k3s1g1_fp32_1a2b3c4d", "resnet18@batch=16,height=224", "a.b", "größe", "..a")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="can't be the name of a file"):
        NAME.validate_python(name)
    assert NAME.validate_python(as_file_name(name))


def test_usual_names_stay_as_they_are_and_long_ones_stay_different() -> None:
    assert [NAME.validate_python(name) for name in GOOD_NAMES] == [*map(as_file_name, GOOD_NAMES)] == [*GOOD_NAMES]
    shorter, longer = as_file_name("x" * 300), as_file_name("x" * 301)
    assert shorter != longer
    assert len(shorter.encode()) <= LONGEST_BYTES


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("built"))
    build_workspace(workspace, {"anet_b1": small_model()})
    return workspace


def renamed(source: Path, to: Path, old: str, new: str) -> Path:
    """A copy of a JSON file with the string `old` replaced by `new` and the right digest, as an attacker would make it."""
    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {new if key == old else key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else new if value == old else value

    files.write_json(to, files.with_digest(walk(files.read_json(source))))
    return to


@pytest.mark.parametrize("kind", ["record", "index"])
def test_a_kernel_s_id_writes_nothing_outside_the_workspace(kind: str, built: Workspace, tmp_path: Path) -> None:
    flavour = local_flavour("cpu")
    source = index_path(built, flavour) if kind == "index" else record_path(built, flavour, "anet_b1")
    a_kernel = next(iter(read_model_record(record_path(built, flavour, "anet_b1")).kernels))
    planted = renamed(source, tmp_path / "planted.json", a_kernel, "../../../kernel")
    inside = tmp_path / "a" / "b" / "workspace"
    inside.mkdir(parents=True)
    done = run_script("kernel_model/kernel_builder.py", "--record", planted, "--workspace", inside)
    assert (done.returncode, "can't be the name of a file" in done.stderr) == (1, True)
    assert not list(tmp_path.rglob("*.onnx"))


@pytest.mark.parametrize("read", [built_kernel, open_runner])
def test_a_built_kernel_s_description_is_checked(read: Callable[[Path], object], built: Workspace, tmp_path: Path) -> None:
    path = next((built.kernel_onnx / local_flavour("cpu").name).glob("Conv*.onnx"))
    planted = tmp_path / "planted.onnx"
    planted.write_bytes(path.read_bytes().replace(f'"id":"{path.stem}"'.encode(), f'"id":"{"/" * len(path.stem)}"'.encode()))
    with pytest.raises(UserError, match=r"planted\.onnx: the description of its kernel is damaged"):
        read(planted)


@pytest.mark.parametrize(("old", "new"), [("anet_b1", "../x"), ("cpu", "../../cpu")])
def test_a_model_s_and_a_flavour_s_name_are_checked(old: str, new: str, built: Workspace, tmp_path: Path) -> None:
    planted = renamed(record_path(built, local_flavour("cpu"), "anet_b1"), tmp_path / "planted.json", old, new)
    with pytest.raises(UserError, match="can't be the name of a file"):
        kernels_in_file(planted)


def test_files_of_a_sidecar_are_beside_it(tmp_path: Path) -> None:
    source = target_files.PREDICTORS.path(next(SHIPPED.glob("*")))
    measured = json.loads(source.read_text())["measured"]
    renamed(source, target_files.PREDICTORS.path(tmp_path), measured, "../../measured.json.xz")
    with pytest.raises(UserError, match=r"damaged at measured: .*can't be the name of a file"):
        read_sidecar(tmp_path)


def test_names_in_models_become_file_names(tmp_path: Path) -> None:
    proto = small_model(batch="batch/2")
    proto.graph.name = "encoder/layer"
    record = analyze(proto, "cpu", {"batch/2": 1})
    assert record.model == "encoder_layer@batch_2=1,dynamic"


# weights in other files --------------------------------------------------------------------------------------------------

def with_weights_in(folder: Path, location: str, inside: str = "initializer") -> Path:
    """y = x + w, where w is in `location`: as an initializer, or in a Constant within a branch of an If."""
    weight = numpy_helper.from_array(np.ones(256, dtype=np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "1024")):
        weight.external_data.append(onnx.StringStringEntryProto(key=key, value=value))
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [256]) for name in "xy")
    if inside == "initializer":
        graph = helper.make_graph(nodes, "add", [x], [y], [weight])
    else:
        branch = helper.make_graph([helper.make_node("Constant", [], ["w"], value=weight), *nodes], "branch", [], [y])
        graph = helper.make_graph([helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)], "if",
                                  [helper.make_tensor_value_info("c", TensorProto.BOOL, []), x], [y])
    path = folder / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString())
    return path


@pytest.mark.parametrize(("location", "inside"), [
    *((location, "initializer") for location in ("/etc/passwd", "../weights.bin", "link.bin", "pipe", "folder",
                                                 "folder/../../weights.bin", "none.bin")),
    ("../weights.bin", "branch")])
def test_weights_elsewhere_are_refused_and_never_opened(location: str, inside: str, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "weights.bin").write_bytes(bytes(1024))
    (folder / "link.bin").symlink_to(tmp_path / "weights.bin")
    os.mkfifo(folder / "pipe")
    with pytest.raises(UserError, match=r"outside its own folder|a plain file is expected|missing from"):
        source_record(with_weights_in(folder, location, inside), local_flavour("cpu"))


def test_weights_beside_a_model_that_is_a_link_are_found(tmp_path: Path) -> None:
    """As in a download cache."""
    store, shown = tmp_path / "store", tmp_path / "shown"
    store.mkdir()
    shown.mkdir()
    with_weights_in(store, "weights.bin").rename(store / "1a2b")
    (store / "3c4d").write_bytes(np.ones(256, dtype=np.float32).tobytes())
    (shown / "model.onnx").symlink_to(store / "1a2b")
    (shown / "weights.bin").symlink_to(store / "3c4d")
    assert source_record(shown / "model.onnx", local_flavour("cpu")).kernels


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_model_is_a_plain_file(kind: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.onnx")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(UserError, match="a plain file is expected"):
        source_record(tmp_path / f"{kind}.onnx", local_flavour("cpu"))


# damage that leaves valid JSON -------------------------------------------------------------------------------------------

def test_a_changed_number_in_a_record_is_noticed(built: Workspace, tmp_path: Path) -> None:
    text = record_path(built, local_flavour("cpu"), "anet_b1").read_text()
    changed = tmp_path / "record.json"
    number = next(line for line in text.splitlines() if '"flops"' in line and "0" in line)
    changed.write_text(text.replace(number, number.replace("0", "1"), 1))
    with pytest.raises(UserError, match="damaged or changed by hand"):
        read_model_record(changed)
    changed.write_text(json.dumps(json.loads(text)))  # in another layout
    assert read_model_record(changed).model == "anet_b1"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_whose_files_have_several_names(device: str, tmp_path: Path) -> None:
    """As in the caches of model hubs; onnx's loader refuses these. In half precision all weights are read."""
    weight = numpy_helper.from_array(np.full((64, 64), 0.5, np.float16), "w")
    table = numpy_helper.from_array(np.arange(700, dtype=np.int64) % 64, "rows")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["product"]),
             helper.make_node("Gather", ["product", "rows"], ["y"], axis=1)]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["n", 64])],
                              [helper.ValueInfoProto(name="y")], [weight, table])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, tmp_path / "stored.onnx", save_as_external_data=True, location="stored.weights", size_threshold=16)
    os.link(tmp_path / "stored.weights", tmp_path / "again.weights")
    record = analyze(tmp_path / "stored.onnx", device, {"n": 2})
    assert record.outputs["y"].shape == (2, 700)
    gather = next(kernel for kernel in record.kernels.values() if kernel.op_type == "Gather")
    assert gather.inputs[1].value_range == (0, 63)
    content = (tmp_path / "stored.weights").read_bytes()
    (tmp_path / "stored.weights").unlink()
    (tmp_path / "stored.weights").write_bytes(content[:-8])
    with pytest.raises(UserError, match="too short for weight"):
        analyze(tmp_path / "stored.onnx", "cuda", {"n": 2})


def test_damaged_weights_and_metadata_are_errors(tmp_path: Path) -> None:
    (tmp_path / "stored.weights").write_bytes(bytes(64))
    for kind, sizes, message in (99, [1], "unknown type"), (1, [-1], "negative size"):
        damaged = TensorProto(name="w", data_location=TensorProto.EXTERNAL, data_type=kind, dims=sizes)
        damaged.external_data.add(key="location", value="stored.weights")
        with pytest.raises(UserError, match=message):
            with_values(damaged, tmp_path)
    (tmp_path / "m.onnx").write_bytes(bytes([METADATA_FIELD << 3 | BYTES, 3]) + b"\xff" * 3)
    with pytest.raises(UserError, match=r"m\.onnx: not an ONNX model, or cut short"):
        read_metadata(tmp_path / "m.onnx")
