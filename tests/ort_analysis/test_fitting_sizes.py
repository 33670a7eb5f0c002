"""Sizes of dynamic dimensions: the message about a missing one suggests sizes that fit, and sizes that can't be are refused."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command import run_script
from small_graphs import CONTRIB, FLOAT, INT32, model, node, unranked, value

from hase.inference.prediction.sources import record_of
from hase.ort_analysis.graph.analysis import analyze
from hase.runtimes import flavour_of
from hase.utils.errors import UserError

QKV = {"wq": (256, 256), "wk": (256, 128), "wv": (256, 128)}
PROJECTIONS: list[Any] = [("MatMul", ["x", f"w{name}"], [name], {}) for name in "qkv"]
CACHED = {"x": ["batch", 1, 256], "pk": ["batch", 2, "past", "head"], "pv": ["batch", 2, "past", "head"]}
MODELS: dict[str, Any] = {  # nodes, inputs, the shapes of random weights, and the sizes that fit
    "a weight": ([("MatMul", ["x", "w"], ["y"], {})], {"x": ["batch", "features"]}, {"w": (48, 8)},
                 {"batch": 1, "features": 48}),
    "a table that is added": ([("Add", ["x", "w"], ["y"], {})], {"x": ["batch", "tokens", 8]}, {"w": (1, 197, 8)},
                              {"batch": 1, "tokens": 197}),
    "channels in groups, and a wide window": (
        [("Conv", ["x", "w"], ["y"], {"group": 2})], {"x": ["batch", "channels", "height", "width"]}, {"w": (8, 3, 7, 7)},
        {"batch": 1, "channels": 6, "height": 32, "width": 32}),
    "a size that another dimension sets": (
        [("Concat", ["x", "z"], ["c"], {"axis": 1}), ("MatMul", ["c", "w"], ["y"], {})],
        {"x": ["batch", "length", "left"], "z": ["batch", 2, "right"]}, {"w": (24, 8)},
        {"batch": 1, "length": 1, "left": 24, "right": 24}),
    "a grouped attention's cache": (
        [*PROJECTIONS, ("GroupQueryAttention", ["q", "k", "v", "pk", "pv", "seen", "all"], ["y", "nk", "nv"],
                        {"num_heads": 4, "kv_num_heads": 2})],
        CACHED | {"seen": ["batch"], "all": [1]}, QKV, {"batch": 1, "past": 1, "head": 64}),
    "an attention's cache": (
        [*PROJECTIONS, ("MultiHeadAttention", ["q", "k", "v", "", "", "", "pk", "pv"], ["y", "nk", "nv"], {"num_heads": 2})],
        CACHED, {"wq": (256, 96), "wk": (256, 96), "wv": (256, 96)}, {"batch": 1, "past": 1, "head": 48}),
    "a cache that is joined": (
        [*PROJECTIONS[1:2], ("Reshape", ["k", "to"], ["heads"], {}), ("Transpose", ["heads"], ["new"], {"perm": [0, 2, 1, 3]}),
         ("Concat", ["pk", "new"], ["nk"], {"axis": 2}), ("Softmax", ["nk"], ["y"], {})],
        {name: CACHED[name] for name in ("x", "pk")}, {"wk": (256, 128)}, {"batch": 1, "past": 1, "head": 64}),
}


def fitting(name: str) -> onnx.ModelProto:
    nodes, inputs, weights, _ = MODELS[name]
    rng = np.random.default_rng(0)
    constants = {weight: rng.standard_normal(shape).astype(np.float32) for weight, shape in weights.items()}
    made = [node(op, reads, makes, domain=CONTRIB if "Attention" in op else "", **attributes)
            for op, reads, makes, attributes in nodes]
    return model(made, [value(x, *shape, kind=INT32 if x in ("seen", "all") else FLOAT) for x, shape in inputs.items()],
                 [unranked(out) for out in ("y", "nk", "nv") if any(out in entry.output for entry in made)],
                 {**constants, "to": [0, 0, 2, 64]}, 17)


@pytest.mark.parametrize("name", MODELS)
def test_the_message_suggests_sizes_that_fit(name: str) -> None:
    with pytest.raises(UserError, match=r"give (its size|their sizes), for example --dim") as refused:
        analyze(fitting(name), "cpu")
    suggested = {dim: int(size) for dim, size in re.findall(r"--dim (\w+)=(\d+)", str(refused.value))}
    assert suggested == MODELS[name][-1]
    assert all(0 not in tensor.shape for tensor in analyze(fitting(name), "cpu", suggested).outputs.values())


def test_an_image_that_is_smaller_than_a_window_is_refused() -> None:
    sizes = MODELS["channels in groups, and a wide window"][-1] | {"height": 3}
    with pytest.raises(UserError, match=r"\(Conv\) can't take an input of 1×6×3×32, which is smaller than its window"):
        analyze(fitting("channels in groups, and a wide window"), "cuda", sizes)


def test_given_sizes_are_not_suggested_again() -> None:
    with pytest.raises(UserError, match=r"for example --dim past=1 --dim head=64$"):
        analyze(fitting("a cache that is joined"), "cpu", {"batch": 3})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith("cache")])
def test_a_cache_of_other_heads_is_refused(name: str, device: str) -> None:
    right = MODELS[name][-1]
    with pytest.raises(UserError, match=rf"head=1 contradicts the model: .*Attention.*; give --dim head={right['head']}$"):
        analyze(fitting(name), device, right | {"head": 1})


def test_a_cache_may_be_empty_and_a_batch_may_not() -> None:
    cached, sizes = fitting("a grouped attention's cache"), {"batch": 1, "past": 0, "head": 64}
    assert record_of(cached, flavour_of("cuda"), sizes).outputs["y"].shape == (1, 1, 256)
    with pytest.raises(UserError, match=r"with batch=0, past=0 every output is empty, so there is nothing to run"):
        record_of(cached, flavour_of("cuda"), sizes | {"batch": 0})


def test_no_work_is_refused_although_an_output_is_left() -> None:
    """A sum over an empty batch is 0."""
    summed = model([node("Relu", ["x"], "r"), node("Exp", ["r"], "e"), node("ReduceSum", ["e", "axes"], keepdims=0)],
                   [value("x", "batch", 8)], [unranked("y")], {"axes": [0]})
    with pytest.raises(UserError, match=r"with batch=0 most of its nodes .* have nothing to do"):
        record_of(summed, flavour_of("cpu"), {"batch": 0})


@pytest.mark.slow
def test_the_command_says_the_whole_command(tmp_path: Path) -> None:
    """It can be pasted: it works, with the head size of the attention, and is one line."""
    name = next(name for name in MODELS if "head" in MODELS[name][-1])
    onnx.save(fitting(name), tmp_path / "two words.onnx")
    words = ["inference/predict_model_latency.py", "--model", str(tmp_path / "two words.onnx"), "--target", "nvidia-h200",
             "--quiet"]
    refused = run_script(*words)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1)
    said, _, whole = refused.stderr.strip().partition(": python ")
    assert re.search(r"\d dimensions are open \(\w+ and \d more\); give their sizes$", said)
    assert shlex.split(whole)[:len(words)] == words
    again = run_script(*shlex.split(whole))
    assert (again.returncode, again.stderr) == (0, "")
    assert f"head={MODELS[name][-1]['head']}" in again.stdout
