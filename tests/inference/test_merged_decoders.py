"""Decoders whose two graphs are merged: an If takes the branch with or without a cache of keys and values, as an input says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hase.benchmark.ort.runner import open_runner
from hase.inference import measure_missing, predict
from hase.inference.prediction.sources import record_otherwise
from hase.ort_analysis.graph.analysis import analyze
from hase.utils.paths import Workspace
from tests.inference.test_missing_kernels import CONFIG, TARGET

HEADS, WIDTH, WORDS, NAME = 4, 16, 100, "optimum::if"
INNER = HEADS * WIDTH
DIMS = {"batch": 2, "sequence": 5, "past_sequence": 40}
WEIGHTS = {"words": (WORDS, INNER), "query": (INNER, INNER), "key": (INNER, INNER), "head": (INNER, WORDS)}


def branch(name: str, cached: bool) -> onnx.GraphProto:
    """A layer of attention; its outputs are the logits and the keys."""
    def node(op_type: str, inputs: list[str], output: str, **attributes: object) -> onnx.NodeProto:
        return helper.make_node(op_type, [text.replace("@", f"{name}_") for text in inputs], [f"{name}_{output}"],
                                f"{name}_{output}", **attributes)  # type: ignore[arg-type]

    nodes = [node("Gather", ["words", "input_ids"], "x")]
    for part in ("query", "key"):
        nodes += [node("MatMul", ["@x", part], f"{part}_product"),
                  node("Reshape", [f"@{part}_product", "split_heads"], f"{part}_heads"),
                  node("Transpose", [f"@{part}_heads"], f"{part}_moved", perm=[0, 2, 1, 3])]
    nodes += [node("Concat", ["past", "@key_moved"], "keys", axis=2) if cached else node("Identity", ["@key_moved"], "keys"),
              node("Transpose", ["@keys"], "turned", perm=[0, 1, 3, 2]), node("MatMul", ["@query_moved", "@turned"], "scores"),
              node("Softmax", ["@scores"], "shares", axis=-1), node("MatMul", ["@shares", "@keys"], "mixed"),
              node("Transpose", ["@mixed"], "back", perm=[0, 2, 1, 3]), node("Reshape", ["@back", "join_heads"], "joined"),
              node("MatMul", ["@joined", "head"], "logits")]
    return helper.make_graph(nodes, name, [], [
        helper.make_tensor_value_info(f"{name}_logits", TensorProto.FLOAT, ["batch", "sequence", WORDS]),
        helper.make_tensor_value_info(f"{name}_keys", TensorProto.FLOAT, ["batch", HEADS, f"{name}_total", WIDTH])])


def merged_decoder() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name) for name, shape in WEIGHTS.items()]
    weights += [numpy_helper.from_array(np.array(shape), name)
                for name, shape in (("split_heads", [0, 0, HEADS, WIDTH]), ("join_heads", [0, 0, INNER]))]
    choice = helper.make_node("If", ["use_cache_branch"], ["logits", "present"], NAME, then_branch=branch("with_past", True),
                              else_branch=branch("no_past", False))
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"]),
              helper.make_tensor_value_info("past", TensorProto.FLOAT, ["batch", HEADS, "past_sequence", WIDTH]),
              helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", WORDS]),
               helper.make_tensor_value_info("present", TensorProto.FLOAT, ["batch", HEADS, "total", WIDTH])]
    return helper.make_model(helper.make_graph([choice], "decoder", inputs, outputs, weights), ir_version=10,
                             opset_imports=[helper.make_opsetid("", 17)])


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    onnx.save(merged_decoder(), tmp_path / "decoder.onnx")
    return tmp_path / "decoder.onnx"


@pytest.mark.slow
@pytest.mark.parametrize(("given", "cached"), [
    ({}, True), ({"then": 1}, True), ({"else": 1}, False), ({f"{NAME}.else": 1}, False)])
def test_the_branch_is_the_given_one_or_the_one_with_the_cache(decoder: Path, given: dict[str, int], cached: bool) -> None:
    """In the record, and in a real run with the same sizes."""
    record = analyze(decoder, "cpu", DIMS | given)
    keys = DIMS["sequence"] + (DIMS["past_sequence"] if cached else 0)
    assert record.outputs["present"].shape == (DIMS["batch"], HEADS, keys, WIDTH)
    assert any(kernel.op_type == "Concat" for kernel in record.kernels.values()) == cached
    assert bool(record.guessed) == (not given)
    runner = open_runner(decoder, "cpu", dims=record.dims_run, io="host")
    assert runner.feed["use_cache_branch"].tolist() == [cached]
    assert runner.session.run(["present"], runner.feed)[0].shape == record.outputs["present"].shape


@pytest.mark.slow
def test_the_branch_that_is_not_assumed(decoder: Path) -> None:
    record = analyze(decoder, "cpu", DIMS)
    otherwise = record_otherwise(decoder, record)
    assert otherwise is not None
    assert otherwise.outputs["present"].shape[2] == DIMS["sequence"]
    assert not otherwise.guessed
    assert record_otherwise(decoder, otherwise) is None, "the branch is given"
    assert record_otherwise(record, record) is None, "a record is not analysed again"


@pytest.mark.slow
@pytest.mark.measuring
@pytest.mark.usefixtures("canary")
def test_both_branches_are_measured_and_in_the_interval(decoder: Path, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "out")
    workspace.root.mkdir()
    measure_missing(decoder, [DIMS], target=TARGET, workspace=workspace, config=CONFIG)
    open_prediction, cached, uncached = (predict(decoder, dims=DIMS | given, target=TARGET, workspace=workspace)
                                         for given in ({}, {"then": 1}, {"else": 1}))
    for prediction in (open_prediction, cached, uncached):
        assert prediction.time_share["measured"] > 0.85, "the If itself is not measured"
    assert open_prediction.latency_ms == cached.latency_ms
    assert cached.interval_ms[1] <= open_prediction.interval_ms[1]
    assert open_prediction.interval_ms[0] <= min(cached.interval_ms[0], uncached.interval_ms[0])
    assert open_prediction.interval_ms[1] >= uncached.interval_ms[1]
    assert open_prediction.rough_estimate or uncached.latency_ms == pytest.approx(cached.latency_ms, rel=0.3)
    warned = f"which branch {NAME} takes can't be known; the more expensive one, then, is counted, and the interval holds both"
    assert any(warned in text for text in open_prediction.warnings)
    assert not any("which branch" in text for prediction in (cached, uncached) for text in prediction.warnings)
