"""Sizes that depend on data (the given one, else the largest that ONNX allows, else an error), and sizes of open dimensions:
the message about a missing one suggests some that fit."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command import run_script
from onnx import helper
from small_graphs import BOOL, CONTRIB, FLOAT, INT32, INT64, graph, model, node, unranked, value

from hase.inference import predict
from hase.inference.prediction.sources import source_record
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.parsing import parse_graph
from hase.ort_analysis.isolated.analysis import own_sizes
from hase.runtimes import local_flavour
from hase.utils.errors import UserError


def detector(boxes: int = 50, classes: int = 3, limit: int = 20) -> onnx.ModelProto:
    """Boxes and scores, the best of them selected, and their boxes gathered, as at the end of detectors."""
    nodes = [node("NonMaxSuppression", ["boxes", "scores", "limit", "overlap", "least"], "selected"),
             node("Slice", ["selected", "from", "to", "axis"], "place"), node("Squeeze", ["place", "axis"], "flat"),
             node("Gather", ["boxes", "flat"], axis=1)]
    made = model(nodes, [value("boxes", 1, boxes, 4), value("scores", 1, classes, boxes)], [value("y", 1, "kept", 4)],
                 {"limit": [limit], "overlap": [0.5], "least": [0.1], "from": [2], "to": [3], "axis": [1]}, 17)
    made.graph.name = "detector"
    return made


def test_detections_are_bounded_by_their_limit() -> None:
    record = analyze(detector(), "cpu")
    assert record.assumed["selected"] == (3 * 20, 3)
    assert record.outputs["y"].shape == (1, 60, 4)
    assert analyze(detector(limit=200), "cpu").outputs["y"].shape == (1, 3 * 50, 4)


@pytest.mark.parametrize("name", ["detections", "selected.0"])
def test_detections_that_are_given(name: str, tmp_path: Path) -> None:
    record = analyze(detector(), "cpu", {name: 7})
    assert record.outputs["y"].shape == (1, 7, 4)
    assert (record.assumed, record.dims) == ({}, {name: 7})
    onnx.save(detector(), tmp_path / "detector.onnx")
    assert own_sizes(tmp_path / "detector.onnx", {name: [1, 7], "batch": [2]}) == [{name: 1}, {name: 7}]
    with pytest.raises(UserError, match="no dynamic dimension detectoins"):
        analyze(detector(), "cpu", {"detectoins": 7})


def single_node(op_type: str, outputs: list[str], inputs: list[str], **attributes: Any) -> onnx.ModelProto:
    """A model of one node, with inputs x, float32[4, 6], c, six truth values, and size, a whole number."""
    return model([node(op_type, inputs, outputs, **attributes)],
                 [value("x", 4, 6), value("c", 6, kind=BOOL), value("size", 1, kind=INT64)], outputs, opset=17)


@pytest.mark.parametrize(("proto", "shapes"), [
    (single_node("NonZero", ["y"], ["x"]), [(2, 24)]), (single_node("Compress", ["y"], ["x", "c"], axis=1), [(4, 6)]),
    (single_node("Unique", ["y", "i", "j", "n"], ["x"]), [(24,)] * 4),
    (single_node("TopK", ["y", "i"], ["x", "size"]), [(4, 6)] * 2)], ids=["NonZero", "Compress", "Unique", "TopK"])
def test_the_largest_that_onnx_allows(proto: onnx.ModelProto, shapes: list[tuple[int, ...]]) -> None:
    assert [tensor.shape for tensor in analyze(proto, "cpu").outputs.values()] == shapes


def test_assumed_sizes_give_a_rough_estimate() -> None:
    """On the shipped H200: detections at their largest."""
    for dims, assumed in (({}, True), ({"detections": 7}, False)):
        prediction = predict(detector(), target="nvidia-h200-cuda-ort1.31-all", dims=dims)
        assert any("largest possible" in warning for warning in prediction.warnings) is assumed
        assert prediction.rough_estimate >= assumed


def test_a_size_computed_from_one_that_depends_on_data() -> None:
    """As in detectors that choose the best boxes above a threshold: all of them, or as many as the limit. That number follows
    from the first size, however late in the graph it is read."""
    nodes = [node("Greater", ["x", "zero"], "passed"), node("NonZero", ["passed"], "where"),
             node("Transpose", ["where"], "places", perm=[1, 0]), node("GatherND", ["x", "places"], "some"),
             node("Shape", ["some"], "count"), node("Min", ["count", "limit"], "k"),
             node("TopK", ["some", "k"], ["best", "which"]), node("Shape", ["best"], "chosen"),
             node("ConstantOfShape", ["chosen"], "zeros"), node("Add", ["best", "zeros"])]
    best = model(nodes, [value("x", 40)], ["y"], {"zero": 0.0, "limit": [5]}, 17)
    record = analyze(best, "cpu")
    assert (record.assumed, record.outputs["y"].shape) == ({"where": (1, 40)}, (5,))
    assert analyze(best, "cpu", {"where.1": 3}).outputs["y"].shape == (3,)


def test_an_operator_that_onnx_defines_by_other_operators_has_a_shape() -> None:
    """ONNX infers none for LessOrEqual of operator set 14."""
    compared = model([node("LessOrEqual", ["x", "z"], "le"), node("Cast", ["le"], to=FLOAT)],
                     [value("x", 3, 1), value("z", 1, 4)], opset=14)
    assert parse_graph(compared, "cpu").tensors["y"].shape == (3, 4)


def in_a_branch(constant_condition: bool) -> onnx.ModelProto:
    """A branch whose size depends on data. ONNX Runtime replaces the If by the branch where the condition is a constant."""
    if_true = graph([node("ConstantOfShape", ["size"], "zeros"), node("Neg", ["zeros"], "a")], [], ["a"])
    if_false = graph([node("Flatten", ["x"], "flat"), node("Exp", ["flat"], "b")], [], ["b"])
    return model([node("If", ["c"], name="pick", then_branch=if_true, else_branch=if_false)],
                 [value("x", 2, 3), value("size", 2, kind=INT64), *([] if constant_condition else [value("c", kind=BOOL)])],
                 ["y"], {"c": True} if constant_condition else {}, 17)


def in_a_function() -> onnx.ModelProto:
    rows = helper.make_function("mine", "Rows", ["n"], ["b"], [node("ConstantOfShape", ["n"], "zeros"), node(
        "Relu", ["zeros"], "b")], [helper.make_opsetid("", 17)])
    made = model([node("Rows", ["size"], domain="mine")], [value("size", 2, kind=INT64)], opset=17, functions=[rows])
    made.opset_import.append(helper.make_opsetid("mine", 1))
    return made


@pytest.mark.parametrize("proto", [single_node("ConstantOfShape", ["y"], ["size"]), in_a_branch(True), in_a_branch(False),
                                   in_a_function()], ids=["plain", "inlined branch", "branch", "function"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_following_the_advice_gives_an_answer(proto: onnx.ModelProto, device: str, tmp_path: Path) -> None:
    onnx.save(proto, tmp_path / "model.onnx")
    dims: dict[str, int] = {}
    for _ in range(3):
        try:
            record = analyze(tmp_path / "model.onnx", device, dims)
        except UserError as error:
            advised = {name: int(size) - 93 for name, size in re.findall(r"--dim (\S+)=(\d+)", str(error))}
            assert advised
            assert not advised.keys() & dims.keys()
            dims |= advised
            assert own_sizes(tmp_path / "model.onnx", {name: [size] for name, size in dims.items()}) == [dims]
    assert record.outputs["y"].shape == (7,) * len(dims)


def test_sizes_without_effect_give_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        analyze(single_node("NonZero", ["y"], ["x"]), "cpu", {"y.0": 5})
    assert "y.0=5 changes nothing" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING"):
        analyze(detector(), "cpu", {"detections": 7})
        analyze(in_a_branch(False), "cpu", {"pick/zeros.0": 7, "zeros.1": 7})
    assert not caplog.text
    with pytest.raises(UserError, match=r"no dynamic dimension spick/zeros\.0: there is no tensor spick/zeros"):
        analyze(in_a_branch(False), "cpu", {"spick/zeros.0": 7, "zeros.0": 7, "zeros.1": 7})


PROJECTIONS: list[Any] = [("MatMul", ["x", f"w{name}"], [name], {}) for name in "qkv"]
CACHED = {"x": ["batch", 1, 256], "pk": ["batch", 2, "past", "head"], "pv": ["batch", 2, "past", "head"]}
MODELS: dict[str, Any] = {  # nodes, inputs, the shapes of random weights, and the sizes that fit
    "a weight": ([("MatMul", ["x", "w"], ["y"], {})], {"x": ["batch", "features"]}, {"w": (48, 8)},
                 {"batch": 1, "features": 48}),
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
        CACHED | {"seen": ["batch"], "all": [1]}, {"wq": (256, 256), "wk": (256, 128), "wv": (256, 128)},
        {"batch": 1, "past": 1, "head": 64}),
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


def test_a_cache_may_be_empty_but_not_of_other_heads_and_a_batch_may_not() -> None:
    cached, sizes = fitting("a grouped attention's cache"), {"batch": 1, "past": 0, "head": 64}
    for device in ("cpu", "cuda"):
        with pytest.raises(UserError, match=r"head=1 contradicts the model: .*Attention.*; give --dim head=64$"):
            analyze(cached, device, {"batch": 1, "past": 1, "head": 1})
    assert source_record(cached, local_flavour("cuda"), sizes).outputs["y"].shape == (1, 1, 256)
    with pytest.raises(UserError, match=r"with batch=0, past=0 every output is empty, so there is nothing to run"):
        source_record(cached, local_flavour("cuda"), sizes | {"batch": 0})


@pytest.mark.slow
def test_the_command_says_the_whole_command(tmp_path: Path) -> None:
    """It can be pasted: it works, with the head size of the attention, and is one line."""
    onnx.save(fitting("a grouped attention's cache"), tmp_path / "two words.onnx")
    words = ["inference/predict_model_latency.py", "--model", str(tmp_path / "two words.onnx"), "--target", "nvidia-h200",
             "--quiet"]
    refused = run_script(*words)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1)
    said, _, whole = refused.stderr.strip().partition(": python ")
    assert re.search(r"\d dimensions are open \(\w+ and \d more\); give their sizes$", said)
    assert shlex.split(whole)[:len(words)] == words
    again = run_script(*shlex.split(whole))
    assert (again.returncode, again.stderr) == (0, "")
    assert "head=64" in again.stdout
