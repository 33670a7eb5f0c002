"""Networks beside torchvision's classification models: names fix random ones, and exported files compute the same as torch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from command import run_script
from torch import Tensor, nn

from hase.model_zoo.exporting.network_export import (
    OPTIONAL_PACKAGES,
    Network,
    NetworkInput,
    export_networks,
    network_source,
    outputs_of,
    write_network,
)
from hase.model_zoo.exporting.zoo_config import COLLECTIONS, PoolConfig, read_pool
from hase.model_zoo.networks import drawn, other
from hase.utils.errors import UserError
from hase.utils.model_files import read_metadata
from hase.utils.paths import Workspace

Exported = tuple[Workspace, list[dict[str, Any]]]
RANDOM = "random_conv_10"  # the smallest of the pool


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A workspace with a small random network in both data types, and the exporter's report."""
    workspace = Workspace(tmp_path_factory.mktemp("networks"))
    return workspace, export_networks(workspace, "random", {RANDOM: "random_conv"}, ["fp32", "fp16"], "cpu", jobs=1)


@pytest.mark.slow
def test_files_compute_what_torch_computes_at_any_batch(exported: Exported) -> None:
    _workspace, rows = exported
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
def test_a_file_describes_itself_and_is_kept(exported: Exported, tmp_path: Path) -> None:
    """A damaged file says nothing."""
    workspace, rows = exported
    metadata = read_metadata(Path(rows[1]["file"]))
    assert metadata == {prop.key: prop.value for prop in onnx.load(rows[1]["file"]).metadata_props}
    assert (metadata["hase.model"], metadata["hase.dtype"]) == (RANDOM, "fp16")
    assert (metadata["hase.collection"], metadata["hase.group"]) == ("random", "random_conv")
    assert json.loads(metadata["hase.pool_sizes"]) == {"batch": [1, 16]}
    before = [Path(row["file"]).stat().st_mtime_ns for row in rows]
    rows_again = export_networks(workspace, "random", {RANDOM: "random_conv"}, ["fp32", "fp16"], "cpu", jobs=1)
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
    assert output.any()
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
    odd = Network("odd", "other", "odd", Odd(), (NetworkInput("x", ("batch", 4)),), {"batch": (1,)})
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
        if importlib.util.find_spec(OPTIONAL_PACKAGES.get(collection, "torch")):
            network_source(collection).check_names(pool.family_of(collection))


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"random_conv_x: a random network is called random_conv_N"):
        drawn.check_names(["random_conv_x"])
    with pytest.raises(UserError, match="lists no models of timm"):
        PoolConfig().chosen("timm", [])
    done = run_script("model_zoo/pool_exporter.py", "--workspace", str(tmp_path), "--collection", "other", "--model", "lstm")
    assert done.returncode == 1
    assert "lstm: no such network; there are recommender_crossed" in done.stderr


@pytest.mark.parametrize("package", ["timm", "transformers"])
def test_without_its_package_a_collection_says_how_to_get_it(package: str, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *options: None if name == package else real(name, *options))
    done = run_script("model_zoo/pool_exporter.py", "--collection", package, "--workspace", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"error: {package} is not installed here; install it with: pip install -r requirements-pool.txt\n"


@pytest.mark.slow
def test_a_model_of_timm(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    network = network_source("timm").build_network("starnet_s1", "starnet")
    assert write_network(network, "fp32", tmp_path / "starnet.onnx", "cpu") < 1e-3


@pytest.mark.slow
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
