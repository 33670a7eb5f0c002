"""The exporters: the names, contents and outputs of their files; resuming; failures, which cost only themselves; and networks
beside torchvision's classification models."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
import torch
from command import run_script
from torch import Tensor, nn

from hase.model_zoo.exporting import network_export, onnx_export
from hase.model_zoo.exporting.network_export import network_source, outputs_of, write_network
from hase.model_zoo.exporting.onnx_export import ExportProcess, check_outputs, trace
from hase.model_zoo.exporting.torch_models import build, reference
from hase.model_zoo.exporting.zoo_config import COLLECTIONS, Export, PoolConfig, ZooConfig, read_pool
from hase.model_zoo.networks import drawn, other
from hase.runtimes import local_flavour
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.model_files import read_metadata
from hase.utils.paths import ROOT, Workspace, model_files

MODEL, SIZE = "squeezenet1_1", (64, 96)
FLAVOUR = local_flavour("cpu").name
FIXED = f"{MODEL}_fp32_b2_64x96"
Exported = tuple[Workspace, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A workspace with one small model, at a batch of 2 and with open sizes; and the exporter's report."""
    root = tmp_path_factory.mktemp("exported")
    command = [sys.executable, "model_zoo/torchvision_exporter.py", "--workspace", str(root), "--device", "cpu", "--json",
               "--model", MODEL, "--image-size", "64x96", "--batch-size", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "leaked" in done.stderr) == (0, False), done.stderr  # semaphores of a killed process
    return Workspace(root), json.loads(done.stdout)


def outputs(path: Path, images: np.ndarray) -> np.ndarray:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"input": images})[0]


@pytest.mark.slow
def test_every_file_is_reported_and_computes_what_torch_does(exported: Exported) -> None:
    """Open sizes are any size. Convolutions keep their bias, as in a trained model, where the batch normalisation folded into a
    convolution leaves one."""
    workspace, rows = exported
    names = [f"{MODEL}.onnx", f"{FIXED}.onnx", f"{FIXED}.{FLAVOUR}.ort.onnx"]
    assert [Path(row["file"]).name for row in rows] == names
    assert {path.name for path in workspace.models.iterdir()} == set(names)
    assert all(row["status"] == "written" and row["difference"] < 1e-4 for row in rows)
    assert [path.stem for path in model_files([workspace.models])] == [MODEL, FIXED]
    model = build(MODEL, "fp32", SIZE)
    for name, shape in zip(names, ((3, 3, 80, 112), (2, 3, *SIZE), (2, 3, *SIZE)), strict=True):
        images = np.random.default_rng(5).standard_normal(shape, dtype=np.float32)
        np.testing.assert_allclose(outputs(workspace.models / name, images), reference(model, images, "cpu"), atol=1e-4)
    dims = onnx.load(workspace.models / names[0]).graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["batch", 3, "height", "width"]
    fixed = workspace.models / names[1]
    assert {len(node.input) for node in onnx.load(fixed).graph.node if node.op_type == "Conv"} == {3}
    with pytest.raises(UserError, match="differ from torch's by"):
        check_outputs(fixed, "cpu", "all", images, outputs(fixed, images) * 1.01, "fp32")


@pytest.mark.slow
def test_metadata_describes_a_file(exported: Exported) -> None:
    workspace, _ = exported
    plain, optimized = ({prop.key: prop.value for prop in onnx.load(workspace.models / f"{FIXED}{suffix}").metadata_props}
                        for suffix in (".onnx", f".{FLAVOUR}.ort.onnx"))
    assert (plain["hase.model"], plain["hase.dtype"], plain["hase.batch"], plain["hase.size"]) == (MODEL, "fp32", "2", "64x96")
    assert json.loads(optimized["hase.flavour"]) == local_flavour("cpu").model_dump()
    assert plain.items() <= optimized.items()
    assert b"stack_trace" not in (workspace.models / f"{MODEL}.onnx").read_bytes()


@pytest.mark.slow
def test_a_second_run_keeps_intact_files_and_a_failure_costs_only_itself(exported: Exported) -> None:
    workspace, _ = exported
    torn = workspace.models / f"{FIXED}.onnx"
    before = {path.name: path.stat().st_mtime_ns for path in workspace.models.iterdir()}
    torn.write_bytes(torn.read_bytes()[:100_000])
    done = run_script("model_zoo/torchvision_exporter.py", "--workspace", workspace.root, "--device", "cpu", "--json",
                      "--model", "vit_b_32", "--model", MODEL, "--image-size", "64x96", "--batch-size", "2")
    assert done.returncode == 1
    status = {Path(row["file"]).name: row["status"] for row in json.loads(done.stdout)}
    remade = {f"{FIXED}.onnx", f"{FIXED}.{FLAVOUR}.ort.onnx"}
    assert {name for name, outcome in status.items() if outcome == "written"} == remade
    assert {name for name, outcome in status.items() if outcome == "failed"} == {"vit_b_32.onnx", "vit_b_32_fp32_b2_64x96.onnx"}
    assert "vit_b_32_fp32_b2_64x96: vit_b_32 takes square images" in done.stderr
    after = {path.name: path.stat().st_mtime_ns for path in workspace.models.iterdir()}
    assert {name for name in after if after[name] != before[name]} == remade


@pytest.mark.slow
def test_a_process_that_dies_is_an_error_and_is_replaced(exported: Exported) -> None:
    """The next one makes the files anew, since that is forced here."""
    with ExportProcess(exported[0], "cpu", force=True) as process:
        def kill() -> None:
            while process._process is None or not process._process.is_alive():
                time.sleep(0.01)
            process._process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(UserError, match="killed, most likely for lack of memory"):
            process.write(Export("resnet18", "fp32", 1, (32, 32)))
        killer.join()
        assert [row["status"] for row in process.write(Export(MODEL, "fp32", 2, SIZE))] == ["written", "written"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["googlenet", "mobilenet_v3_small", "vit_b_32"])
def test_random_models_behave_like_trained_ones(name: str) -> None:
    """Activations stay in range, and auxiliary heads are gone. No parameter stays zero: a bias of zeros would be dropped on
    export, and with it the kernel that adds it."""
    model = build(name, "fp32", (64, 64))
    output = reference(model, np.random.default_rng(0).standard_normal((2, 3, 64, 64), dtype=np.float32), "cpu")
    assert output.shape == (2, 1000)
    assert 1e-3 < np.abs(output).max() < 1e3
    assert all(bool(parameter.any()) for parameter in model.parameters())
    if name == "vit_b_32":  # its head is of zeros in torchvision
        assert 0.01 < float(model.get_parameter("heads.head.weight").detach().std()) < 0.03


def test_a_model_over_2_gb_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "LARGEST_FILE", 1e6)
    with pytest.raises(UserError, match=r"weights in fp32; one ONNX file holds 2 GB at most"):
        trace(build(MODEL, "fp32", SIZE), Export(MODEL, "fp32", 1, SIZE), {})


@pytest.mark.parametrize(("text", "message"), [
    ("model: [resnet18]", "model: unknown key; did you mean models"),
    ("batch_sizes: [0]", r"batch_sizes\.0: input should be greater than or equal to 1"),
    ("image_sizes: [224x]", "an image size is written 224 or 224x320"),
    ("image_sizes: [16]", "greater than or equal to 32"),
])
def test_a_config_that_does_not_fit(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_config(path, ZooConfig)
    assert str(path) in str(caught.value)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of its parent to a process")
def test_the_exporting_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """Also in the middle of an export, and when the parent is killed."""
    script = ("import sys; from hase.model_zoo.exporting.onnx_export import ExportProcess; "
              "from hase.utils.paths import Workspace; from pathlib import Path; "
              f"process = ExportProcess(Workspace(Path({str(tmp_path)!r})), 'cpu', False); "
              "process.check_names(['resnet18']); print(process._process.pid, flush=True); sys.stdin.read()")
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    child.wait(20)
    assert not child.is_running()


RANDOM = "random_conv_10"  # the smallest of the pool


@pytest.fixture(scope="module")
def exported_random(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A workspace with a small random network in both data types, and the exporter's report."""
    workspace = Workspace(tmp_path_factory.mktemp("networks"))
    return workspace, network_export.export_networks(workspace, "random", {RANDOM: "random_conv"}, ["fp32", "fp16"], "cpu", 1)


@pytest.mark.slow
def test_files_compute_what_torch_computes_at_any_batch(exported_random: Exported) -> None:
    _, rows = exported_random
    assert [(Path(row["file"]).name, row["status"]) for row in rows] == [
        (f"{RANDOM}.onnx", "written"), (f"{RANDOM}_fp16.onnx", "written")]
    network = drawn.build_network(RANDOM, "random_conv")
    for dtype, row, tolerance in zip(("fp32", "fp16"), rows, (1e-4, 2e-2), strict=True):
        session = onnxruntime.InferenceSession(row["file"], providers=["CPUExecutionProvider"])
        inputs = network.draw({"batch": 5}, dtype)
        [wanted], [output] = outputs_of(network, inputs), session.run(None, inputs)
        assert output.dtype == (np.float16 if dtype == "fp16" else np.float32)
        assert output.shape == (5, drawn.CLASSES)
        assert np.abs(output - wanted).max() / np.abs(wanted).max() < tolerance


@pytest.mark.slow
def test_a_file_describes_itself_and_is_kept(exported_random: Exported, tmp_path: Path) -> None:
    """A damaged file says nothing."""
    workspace, rows = exported_random
    metadata = read_metadata(Path(rows[1]["file"]))
    assert metadata == {prop.key: prop.value for prop in onnx.load(rows[1]["file"]).metadata_props}
    assert (metadata["hase.model"], metadata["hase.dtype"]) == (RANDOM, "fp16")
    assert (metadata["hase.collection"], metadata["hase.group"]) == ("random", "random_conv")
    assert json.loads(metadata["hase.pool_sizes"]) == {"batch": [1, 16]}
    before = [Path(row["file"]).stat().st_mtime_ns for row in rows]
    rows_again = network_export.export_networks(workspace, "random", {RANDOM: "random_conv"}, ["fp32", "fp16"], "cpu", jobs=1)
    assert [row["status"] for row in rows_again] == ["kept", "kept"]
    assert [Path(row["file"]).stat().st_mtime_ns for row in rows_again] == before
    model_bytes = Path(rows[0]["file"]).read_bytes()
    for content in (b"", b"\xff" * 50, model_bytes[:len(model_bytes) // 2]):
        (tmp_path / "part.onnx").write_bytes(content)
        assert read_metadata(tmp_path / "part.onnx") == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["conv", "transformer", "mixed"])
def test_the_name_of_a_random_network_fixes_it(kind: str) -> None:
    first, second = (drawn.build_network(f"random_{kind}_11", "x") for _ in range(2))
    inputs = first.draw(first.default_sizes, "fp32")
    [output], [second_output] = outputs_of(first, inputs), outputs_of(second, inputs)
    assert np.isfinite(output).all()
    np.testing.assert_array_equal(output, second_output)


@pytest.mark.slow
def test_a_recurrent_network_is_exported_for_any_length(tmp_path: Path) -> None:
    network = other.build_network("gru_128_both", "recurrent")
    assert write_network(network, "fp32", tmp_path / "gru.onnx", "cpu") < 1e-4
    assert [node.op_type for node in onnx.load(tmp_path / "gru.onnx").graph.node].count("GRU") == 2
    session = onnxruntime.InferenceSession(tmp_path / "gru.onnx", providers=["CPUExecutionProvider"])
    assert session.run(None, network.draw({"batch": 3, "steps": 7}, "fp32"))[0].shape == (3, 7, 100)


class Odd(nn.Module):
    """Its output is wrong once it is exported: torch traces the value of a random number."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.default_rng().uniform(1, 100))


@pytest.mark.slow
def test_a_file_that_computes_something_else_is_not_put_in_place(tmp_path: Path) -> None:
    inputs = (network_export.NetworkInput("x", ("batch", 4)),)
    odd = network_export.Network("odd", "other", "odd", Odd(), inputs, {"batch": (1,)})
    with pytest.raises(UserError, match="differ from torch's"):
        write_network(odd, "fp32", tmp_path / "odd.onnx", "cpu")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_pool_names_models_that_exist() -> None:
    pool = read_pool()
    names = [name for collection in COLLECTIONS for name in pool.family_of(collection)]
    assert len(names) == len(set(names))
    for collection in COLLECTIONS:
        assert pool.family_of(collection)
        if importlib.util.find_spec(network_export.OPTIONAL_PACKAGES.get(collection, "torch")):
            network_source(collection).check_names(pool.family_of(collection))


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(UserError, match=r"random_conv_x: a random network is called random_conv_N"):
        drawn.check_names(["random_conv_x"])
    with pytest.raises(UserError, match="lists no models of timm"):
        PoolConfig().chosen("timm", [])
    with pytest.raises(UserError, match="lstm: no such network; there are recommender_crossed"):
        other.check_names(["lstm"])


def test_without_its_package_a_collection_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *options: None if name == "timm" else real(name, *options))
    done = run_script("model_zoo/pool_exporter.py", "--collection", "timm", "--workspace", str(tmp_path))
    assert done.stderr == "error: timm is not installed here; install it with: pip install '.[pool]'\n"


@pytest.mark.slow
@pytest.mark.nightly
def test_a_decoder_of_transformers_continues_its_prompt(tmp_path: Path) -> None:
    """The token after a prompt has the same scores with the prompt as with its keys and values."""
    pytest.importorskip("transformers")
    source = network_source("transformers")
    prefill, token = (source.build_network(name, "llama") for name in ("qwen2_prefill", "qwen2_token"))
    words = torch.arange(2 * 9).reshape(2, 9)
    with torch.inference_mode():
        _, *past = prefill.module(words[:, :8])
        wanted = prefill.module(words)[0]
        scores = token.module(words[:, 8:], *past)[0]
    assert [tuple(cache.shape) for cache in past] == [(2, 2, 8, 64)] * 8
    torch.testing.assert_close(scores, wanted, rtol=1e-3, atol=1e-4)
    assert write_network(token, "fp32", tmp_path / "token.onnx", "cpu") < 1e-3
