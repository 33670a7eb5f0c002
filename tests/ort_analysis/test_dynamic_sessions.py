"""Models with dynamic dimensions: run by a session that takes any sizes, or exported at the given sizes; decoders, whose
attention reads how many tokens it attends to; and models exported at a fixed batch, predicted at another one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command import run_script
from conftest import small_model
from decoders import DecoderSize, write_decoder
from onnx import helper
from small_graphs import graph, model, node, value

from hase.benchmark.ort.profile import profile_model
from hase.benchmark.ort.runner import open_runner
from hase.inference.prediction.sources import source_record
from hase.kernel_model.building.dummy_data import dummy_inputs
from hase.kernel_model.building.kernel_models import build_model
from hase.ort_analysis.graph import parsing
from hase.ort_analysis.graph.analysis import analyze, kernel_of
from hase.ort_analysis.graph.parsing import kept_in, parse_graph
from hase.records.attention import kernel_grouped_query_sizes
from hase.records.kernel_record import ModelRecord
from hase.records.measurement import Effort
from hase.runtimes import local_flavour
from hase.utils.errors import UserError
from hase.utils.ort_sessions import open_session

WIDTH, HEADS = 16, 4
SIZES = {"batch": 2, "new": 3, "past": 5}


def decoder() -> onnx.ModelProto:
    """One attention layer of a decoder with a cache, as torch's tracer writes it: sizes of heads, the mask's place and
    positions are computed from the shapes of the inputs."""
    constants = {"zero": 0, "one": 1, "two": 2, "first": [0], "heads": [HEADS], "depth": [WIDTH // HEADS], "width": [WIDTH],
                 "rest": [-1], "axis_2": [2], "axis_3": [3], "table": np.zeros((64, WIDTH), np.float32),
                 "weight": np.full((WIDTH, WIDTH), 0.1, np.float32), "low": -1e4,
                 "mask": np.tril(np.ones((1, 1, 64, 64), bool))}
    nodes = [node("Shape", ["x"], "sizes"), node("Gather", ["sizes", "zero"], "b"), node("Gather", ["sizes", "one"], "n"),
             node("Unsqueeze", ["b", "first"], "b1"), node("Unsqueeze", ["n", "first"], "n1"),
             node("Shape", ["cache"], "cached"), node("Gather", ["cached", "two"], "p"), node("Add", ["p", "n"], "total"),
             node("Range", ["p", "total", "one"], "places"), node("Gather", ["table", "places"], "positions"),
             node("Add", ["x", "positions"], "placed"), node("MatMul", ["placed", "weight"], "q"),
             node("Concat", ["b1", "n1", "heads", "depth"], "split", axis=0), node("Reshape", ["q", "split"], "q4"),
             node("Transpose", ["q4"], "query", perm=[0, 2, 1, 3]), node("Concat", ["cache", "query"], "keys", axis=2),
             node("Transpose", ["keys"], "turned", perm=[0, 1, 3, 2]), node("MatMul", ["query", "turned"], "scores"),
             node("Unsqueeze", ["p", "first"], "p1"), node("Unsqueeze", ["total", "first"], "t1"),
             node("Slice", ["mask", "p1", "t1", "axis_2"], "rows"), node("Slice", ["rows", "first", "t1", "axis_3"], "seen"),
             node("Where", ["seen", "scores", "low"], "masked"), node("Softmax", ["masked"], "weights", axis=-1),
             node("MatMul", ["weights", "keys"], "mixed"), node("Transpose", ["mixed"], "back", perm=[0, 2, 1, 3]),
             node("Concat", ["b1", "n1", "width"], "joined", axis=0), node("Reshape", ["back", "joined"])]
    made = model(nodes, [value("x", "batch", "new", WIDTH), value("cache", "batch", HEADS, "past", WIDTH // HEADS)],
                 [value("y", "batch", "new", WIDTH), value("keys", "batch", HEADS, "all", WIDTH // HEADS)], constants, 17)
    made.graph.name = "decoder"
    return made


@pytest.mark.parametrize("past", [5, 0])
def test_shapes_are_those_of_a_run(past: int) -> None:
    """Every tensor of a real session against the computed shapes and values."""
    graph, traced = parse_graph(decoder(), "cpu", SIZES | {"past": past}), decoder()
    outputs = {value.name for value in traced.graph.output}
    traced.graph.output.extend(helper.ValueInfoProto(name=name) for made_by in traced.graph.node for name in made_by.output
                               if name in graph.tensors and name not in outputs)
    session = open_session(traced.SerializeToString(), "cpu", optimize="none")
    feed = {"x": np.ones((2, 3, WIDTH), np.float32), "cache": np.ones((2, HEADS, past, WIDTH // HEADS), np.float32)}
    made = dict(zip([out.name for out in session.get_outputs()], session.run(None, feed), strict=True))
    assert len(made) > 15
    assert {name: graph.tensors[name].shape for name in made} == {name: value.shape for name, value in made.items()}
    assert all(tuple(np.ravel(made[name])) == values for name, values in graph.computed.items() if name in made)


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_shape_computations_are_part_of_the_graph_unless_static(provider: str) -> None:
    opened, fixed = (analyze(decoder(), provider, SIZES, static=static) for static in (False, True))
    assert (opened.static, fixed.static) == (False, True)
    assert (opened.model, fixed.model) == ("decoder@batch=2,new=3,past=5,dynamic", "decoder@batch=2,new=3,past=5")
    assert [{"Shape", "Slice"} & {kernel.op_type for kernel in record.kernels.values()} for record in (opened, fixed)] == [
        {"Shape", "Slice"}, set()]
    assert opened.outputs == fixed.outputs


def test_fixed_sizes_are_the_same_both_ways() -> None:
    dynamic, static_record = (analyze(small_model(), "cpu", static=static) for static in (False, True))
    assert (dynamic, dynamic.static) == (static_record, True)
    opened = analyze(small_model(batch="batch"), "cuda", {"batch": 1})  # keeps all kernels that take time
    assert {name for name, kernel in analyze(small_model(), "cuda").kernels.items() if kernel.moves_data} <= set(opened.kernels)
    assert not opened.static


def test_kernels_whose_inputs_set_sizes_run_alone() -> None:
    record = analyze(decoder(), "cpu", SIZES)
    for kernel in record.kernels.values():
        session = open_session(build_model(kernel).SerializeToString(), "cpu", optimize="none", name=kernel.id)
        made = session.run(None, dummy_inputs(kernel))
        assert [out.shape for out in made] == [out.shape for out in kernel.outputs], kernel.id


def test_sessions_match_their_analysis(tmp_path: Path) -> None:
    path = tmp_path / "decoder.onnx"
    onnx.save(decoder(), path)
    nodes = {}
    for static in (False, True):
        runner = open_runner(path, "cpu", dims=SIZES, static=static)
        assert [value.shape[0] for value in runner.session.get_inputs()] == ([2, 2] if static else ["batch", "batch"])
        assert [out.shape for out in runner.run_once() or ()] in ([], [(2, 3, WIDTH), (2, HEADS, 8, WIDTH // HEADS)])
        runs, graph, _ = profile_model(path, "cpu", SIZES, Effort(warmup=0, least_runs=2, most_runs=2), static=static)
        nodes[static] = {kernel_of(graph, entry).id for entry in graph.nodes}
        assert {event.node for event in runs[0].nodes} <= {entry.name for entry in graph.nodes}
        assert nodes[static] == set(analyze(path, "cpu", SIZES, static=static).kernels)
    assert nodes[True] != nodes[False]


def test_several_sizes_of_one_model_are_optimised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proto, runs = small_model(batch="batch"), list[object]()
    apart = [analyze(proto, "cpu", {"batch": batch}) for batch in (1, 2, 8)]

    def counted(*arguments: Any, **options: Any) -> Any:
        runs.append(arguments)
        return open_session(*arguments, **options)

    monkeypatch.setattr(parsing, "open_session", counted)
    with kept_in(tmp_path / "kept"):
        together = [analyze(proto, "cpu", {"batch": batch}) for batch in (1, 2, 8)]
    assert (len(runs), together) == (1, apart)


TINY = DecoderSize(layers=1, hidden=64, intermediate=64, heads=4, key_heads=2, words=64, positions=4096)
CASES = {  # sizes of batch, sequence, past and total, and the tokens for which the present has room
    "a prompt, empty cache": ((1, 1024, 0, 1024), 1024), "decoding in a buffer": ((2, 1, 2048, 1025), 2048),
    "decoding, cache of its length": ((2, 1, 1024, 1025), 1025), "a part in a buffer": ((1, 16, 64, 32), 64)}


@pytest.mark.parametrize("case", CASES)
def test_lengths_are_those_of_the_dimensions_and_a_run_writes_into_the_buffer_of_the_past(tmp_path: Path, case: str) -> None:
    """However the model is optimised, the kernel is the same."""
    (batch, queries, past, total), present = CASES[case]
    path, shares = write_decoder(tmp_path, TINY, "fp32"), past >= total
    dims = TINY.dims(batch, queries, past) | {"total_sequence_length": total}
    kernel, other = (next(kernel for kernel in analyze(path, device, dims, static=static).kernels.values()
                          if kernel.op_type == "GroupQueryAttention") for device, static in (("cpu", False), ("cuda", True)))
    assert kernel.id == other.id
    assert [tensor.values for tensor in kernel.inputs[5:7]] == [(total - 1,) * batch, (total,)]
    assert [tensor.shape for tensor in kernel.outputs] == [
        (batch, queries, TINY.hidden), *[(batch, TINY.key_heads, present, TINY.head)] * 2]
    sizes = kernel_grouped_query_sizes(kernel)
    assert sizes is not None
    assert (sizes.total, sizes.cache, sizes.rotary, sizes.shares_buffer) == (total, past, TINY.head, shares)
    runner = open_runner(path, "cpu", dims=dims)
    assert runner.shared == ({f"present.0.{name}": f"past_key_values.0.{name}" for name in ("key", "value")} if shares else {})
    before = {name: array.copy() for name, array in runner.feed.items()}
    runner.run_once()
    for name in ("past_key_values.0.key", "past_key_values.0.value"):  # a bound input on the CPU is the array itself
        changed = (runner.feed[name] != before[name]).any(axis=(0, 1, 3))
        assert changed.tolist() == [shares and total - queries <= place < total for place in range(past)]


def record_at(path: Path, **dims: int) -> ModelRecord:
    return source_record(path, local_flavour("cuda"), dims)


def test_another_batch_has_the_kernels_of_an_open_one(tmp_path: Path) -> None:
    onnx.save(small_model(batch=4), tmp_path / "fixed.onnx")
    onnx.save(small_model(batch="batch"), tmp_path / "open.onnx")
    made = record_at(tmp_path / "fixed.onnx", rebatch=16)
    opened = source_record(tmp_path / "open.onnx", local_flavour("cuda"), {"batch": 16}, static=True)
    assert made.kernels.keys() == opened.kernels.keys()
    assert (made.model, made.static, made.inputs["input"].shape[0]) == ("fixed@rebatch=16", True, 16)


def at_batch(path: Path, nodes: Sequence[onnx.NodeProto], given: Sequence[int], made: Sequence[int],
             constants: Mapping[str, Any]) -> Path:
    """A model of these nodes, named after their operators, with the input x and the output y, as a file."""
    for each in nodes:
        each.name = f"the_{each.op_type.lower()}"
    onnx.save(model(nodes, [value("x", *given)], [value("y", *made)], constants, 17), path)
    return path


@pytest.mark.parametrize(("target", "made"), [([2, -1], [6, 48]), ([4, 6, 4], [12, 6, 4]), ([-1, 4], [72, 4]),
                                              ([0, -1, 2], [6, 24, 2])])
def test_constant_shapes_grow_with_the_batch(target: list[int], made: list[int], tmp_path: Path) -> None:
    """Heads may be put together with the batch, and a shape may be shared with a tensor that has no batch."""
    path = at_batch(tmp_path / "m.onnx", [node("Reshape", ["x", "shape"], "r"), node("Relu", ["r"])], [2, 12, 4],
                    list(np.zeros([2, 12, 4]).reshape([size or 2 for size in target]).shape), {"shape": np.array(target)})
    assert record_at(path, rebatch=6).outputs["y"].shape == tuple(made)


BRANCHES = [graph([node(op, ["x"], op)], [], [value(op, 2, 3)]) for op in ("Relu", "Neg")]
REFUSED: dict[str, Any] = {  # the nodes, shapes of the input and the output, constants, and a part of the message
    "a token for each item": ([node("Concat", ["token", "x"], axis=1)], [2, 3, 4], [2, 4, 4],
                              {"token": np.zeros((2, 1, 4), np.float32)}, "Concat"),
    "the first item": ([node("Gather", ["x", "first"])], [2, 3], [3], {"first": np.array(0)},
                       "what the_gather (Gather) makes does not grow with the batch"),
    "a batch in the middle": ([node("Transpose", ["x"], "t", perm=[1, 0, 2]), node("Reshape", ["t", "shape"])],
                              [2, 3, 4], [3, 2, 2, 2], {"shape": np.array([3, 2, 2, 2])},
                              "what the_reshape (Reshape) makes does not grow"),
    "an initial state": ([node("Transpose", ["x"], "t", perm=[1, 0, 2]),
                          node("GRU", ["t", "w", "r", "", "", "state"], hidden_size=2)], [2, 3, 4], [3, 1, 2, 2],
                         {"w": np.zeros((1, 6, 4), np.float32), "r": np.zeros((1, 6, 2), np.float32),
                          "state": np.zeros((1, 2, 2), np.float32)}, "state, which the_gru (GRU) reads, holds the batch"),
    "a graph within a node": ([node("If", ["flag"], then_branch=BRANCHES[0], else_branch=BRANCHES[1])], [2, 3], [2, 3],
                              {"flag": True}, "the_if (If) holds a graph of its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_graph_that_holds_its_batch_is_refused_by_name(case: str, tmp_path: Path) -> None:
    nodes, given, made, constants, part = REFUSED[case]
    path = at_batch(tmp_path / "m.onnx", nodes, given, made, constants)
    with pytest.raises(UserError) as refusal:
        record_at(path, rebatch=5)
    message = str(refusal.value)
    assert message.startswith(f"{path}: it was exported at batch {given[0]}, and its graph does not allow 5: ")
    assert part in message
    assert message.endswith("; export it with an open batch, or at this one")


def test_an_open_batch_and_a_record_are_refused(tmp_path: Path) -> None:
    onnx.save(small_model(batch="n"), tmp_path / "open.onnx")
    with pytest.raises(UserError, match="no fixed batch"):
        record_at(tmp_path / "open.onnx", n=1, rebatch=2)
    onnx.save(small_model(), tmp_path / "fixed.onnx")
    with pytest.raises(UserError, match="a record's shapes are fixed"):
        source_record(record_at(tmp_path / "fixed.onnx"), local_flavour("cuda"), {"rebatch": 2})
    with pytest.raises(UserError, match=r"all its dimensions are fixed \(--batch 8"):
        record_at(tmp_path / "fixed.onnx", width=8)
    with pytest.raises(UserError, match="a batch of 1 or more"):
        record_at(tmp_path / "fixed.onnx", rebatch=0)


def test_a_dimension_named_rebatch_is_the_models_own(tmp_path: Path) -> None:
    onnx.save(small_model(batch="rebatch"), tmp_path / "own.onnx")
    record = record_at(tmp_path / "own.onnx", rebatch=8)
    assert (record.inputs["input"].shape[0], record.static) == (8, False)


@pytest.mark.slow
def test_the_prediction_has_a_row_for_each_batch(tmp_path: Path) -> None:
    onnx.save(small_model(), tmp_path / "fixed.onnx")
    onnx.save(small_model(batch="batch"), tmp_path / "open.onnx")
    options = ("--model", tmp_path / "fixed.onnx", "--target", "nvidia-h200", "--host-pace", "1", "--rebatch", "1,4")
    table = run_script("inference/predict_model_latency.py", *options)
    assert (table.returncode, "fixed: the best batch for throughput is 4" in table.stdout) == (0, True), table.stderr
    both = run_script("inference/predict_model_latency.py", *options, "--model", tmp_path / "open.onnx", "--dim", "batch=2",
                      "--json")
    assert [(row["file"].rsplit("/")[-1], row["dims"]) for row in sorted(json.loads(both.stdout), key=lambda row: row["model"])
            ] == [("fixed.onnx", {"rebatch": 1}), ("fixed.onnx", {"rebatch": 4}), ("open.onnx", {"batch": 2})]
