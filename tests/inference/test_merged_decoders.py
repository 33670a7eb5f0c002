"""Decoders whose two graphs are merged: an If takes the branch with or without a cache of keys and values, as an input says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper, numpy_helper

from hase.benchmark.ort.runner import open_runner
from hase.inference import measure_missing, predict
from hase.ort_analysis.graph.analysis import analyze
from hase.utils.paths import Workspace
from tests.inference.test_missing_kernels import CONFIG, TARGET

HEADS, WIDTH, WORDS, NAME = 4, 16, 100, "optimum::if"
INNER = HEADS * WIDTH
DIMS = {"batch": 2, "sequence": 5, "past_sequence": 40}
WEIGHTS = {"words": (WORDS, INNER), "query": (INNER, INNER), "key": (INNER, INNER), "head": (INNER, WORDS)}


def branch(name: str, cached: bool) -> onnx.GraphProto:
    """A layer of attention; its outputs are the logits and the keys."""
    keys = "Concat <axis = 2> (past, @key)" if cached else "Identity(@key)"
    return onnx.parser.parse_graph(f"""
        {name} () => (float[batch, sequence, {WORDS}] @logits, float[batch, {HEADS}, @total, {WIDTH}] @keys) {{
            @x = Gather(words, input_ids)
            @q = MatMul(@x, query) @q_heads = Reshape(@q, split_heads) @query = Transpose <perm = [0, 2, 1, 3]> (@q_heads)
            @k = MatMul(@x, key) @k_heads = Reshape(@k, split_heads) @key = Transpose <perm = [0, 2, 1, 3]> (@k_heads)
            @keys = {keys}
            @turned = Transpose <perm = [0, 1, 3, 2]> (@keys) @scores = MatMul(@query, @turned)
            @shares = Softmax <axis = -1> (@scores) @mixed = MatMul(@shares, @keys)
            @back = Transpose <perm = [0, 2, 1, 3]> (@mixed) @joined = Reshape(@back, join_heads)
            @logits = MatMul(@joined, head) }}""".replace("@", f"{name}_"))


def merged_decoder() -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 17]>
        decoder (int64[batch, sequence] input_ids, float[batch, {HEADS}, past_sequence, {WIDTH}] past, bool[1] use_cache_branch)
        => (float[batch, sequence, {WORDS}] logits, float[batch, {HEADS}, total, {WIDTH}] present) {{ }}""")
    model.graph.node.append(helper.make_node(
        "If", ["use_cache_branch"], ["logits", "present"], NAME, then_branch=branch("with_past", True),
        else_branch=branch("no_past", False)))
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in WEIGHTS.items()} | {
        "split_heads": np.array([0, 0, HEADS, WIDTH]), "join_heads": np.array([0, 0, INNER])}
    model.graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in weights.items())
    return model


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    onnx.save(merged_decoder(), tmp_path / "decoder.onnx")
    return tmp_path / "decoder.onnx"


@pytest.mark.slow
@pytest.mark.parametrize(("given", "cached"), [({}, True), ({"then": 1}, True), ({f"{NAME}.else": 1}, False)])
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
    assert open_prediction.interval_ms[0] <= min(cached.interval_ms[0], uncached.interval_ms[0])
    assert open_prediction.interval_ms[1] >= max(cached.interval_ms[1], uncached.interval_ms[1])
    warned = f"which branch {NAME} takes can't be known; the more expensive one, then, is counted, and the interval holds both"
    assert any(warned in text for text in open_prediction.warnings)
    assert not any("which branch" in text for prediction in (cached, uncached) for text in prediction.warnings)
