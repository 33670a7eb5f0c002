"""Sizes that depend on data: the given one, else the largest that ONNX allows, else an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper
from small_graphs import BOOL, INT64, graph, model, node, value

from hase.inference import predict
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.parsing import parse_graph
from hase.ort_analysis.isolated.analysis import own_sizes
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


def test_the_largest_that_onnx_allows() -> None:
    def shapes(proto: onnx.ModelProto) -> list[tuple[int, ...]]:
        return [tensor.shape for tensor in analyze(proto, "cpu").outputs.values()]

    assert shapes(single_node("NonZero", ["y"], ["x"])) == [(2, 24)]
    assert shapes(single_node("Compress", ["y"], ["x", "c"], axis=1)) == [(4, 6)]
    assert shapes(single_node("Unique", ["y", "i", "j", "n"], ["x"])) == [(24,)] * 4
    assert shapes(single_node("TopK", ["y", "i"], ["x", "size"])) == [(4, 6)] * 2


def test_assumed_sizes_give_a_rough_estimate() -> None:
    """On the shipped H200: detections at their largest."""
    prediction = predict(detector(), target="nvidia-h200-cuda-ort1.31-all")
    assert prediction.rough_estimate
    assert any("largest possible" in warning for warning in prediction.warnings)
    assert not any("largest" in warning for warning in predict(
        detector(), target="nvidia-h200-cuda-ort1.31-all", dims={"detections": 7}).warnings)


def test_an_operator_that_onnx_defines_by_other_operators_has_a_shape() -> None:
    """ONNX infers none for LessOrEqual of operator set 14."""
    compared = model([node("LessOrEqual", ["x", "z"], "le"), node("Cast", ["le"], to=1)], [value("x", 3, 1), value("z", 1, 4)],
                     opset=14)
    assert parse_graph(compared, "cpu").tensors["y"].shape == (3, 4)


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


def of_unknown_rank() -> onnx.ModelProto:
    return model([node("NonZero", ["x"], "where"), node("Flatten", ["where"], "flat", axis=2),
                  node("Cast", ["flat"], "size", to=INT64), node("Squeeze", ["size"], "n"), node("ConstantOfShape", ["n"])],
                 [value("x", 2)], opset=17)


@pytest.mark.parametrize("proto", [single_node("ConstantOfShape", ["y"], ["size"]), in_a_branch(True), in_a_branch(False),
                                   in_a_function(), of_unknown_rank()],
                         ids=["plain", "inlined branch", "branch", "function", "rank"])
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
