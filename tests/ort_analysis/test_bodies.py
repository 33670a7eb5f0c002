"""Loop, If and Scan: their bodies are part of the graph and count as often as they run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from small_graphs import BOOL, INT64, graph, model, node, unranked, value

from hase.benchmark.ort.profile import CONDITION_MS, CUDA_TRIP_MS, labels_of, profile_model
from hase.benchmark.ort.runner import open_runner
from hase.graph_model.simulation.dag import build_dag, longest_path
from hase.inference import predict
from hase.learned.composition.fitted import working_nodes
from hase.ort_analysis.graph.analysis import analyze, kernel_of
from hase.ort_analysis.isolated.analysis import own_sizes
from hase.records.kernel_record import MOST_RUNS, ModelRecord, run_order, runs_in_order, shortest_cut
from hase.records.kernel_record_files import read_model_record
from hase.records.measurement import Effort
from hase.utils import cli, files
from hase.utils.errors import UserError

H200 = "nvidia-h200-cuda-ort1.31-all"
WIDTH = 256
WEIGHT = np.full((WIDTH, WIDTH), 0.001, np.float32)
STEP = [node("MatMul", ["state", "w"], "product"), node("Tanh", ["product"], "next")]


def body(nodes: Sequence[onnx.NodeProto], go_on: str = "go_on_out", **constants: object) -> onnx.GraphProto:
    """A Loop's body, which makes `next` of `state`."""
    return graph([*nodes, node("Identity", ["go_on"], "go_on_out")],
                 [value("step", kind=INT64), value("go_on", kind=BOOL), unranked("state")],
                 [value(go_on, kind=BOOL), unranked("next")], constants)


def loop(trips: int | None = 12, inside: onnx.GraphProto | None = None) -> onnx.ModelProto:
    """A Loop whose number of trips is a constant, or the input `trips`. A trip is: state ← tanh(state · w)."""
    return model([node("Loop", ["trips", "true", "x"], name="again", body=inside or body(STEP))],
                 [value("x", 8, WIDTH), *([value("trips", kind=INT64)] if trips is None else [])], ["y"],
                 {"w": WEIGHT, "true": True} | ({} if trips is None else {"trips": trips}), 18)


def chain(name: str, *operators: str) -> onnx.GraphProto:
    """Operators one after another, products with w among them."""
    names = ["x", *(f"{name}{place}" for place in range(len(operators)))]
    return graph([node(op, [before, "w"] if op == "MatMul" else [before], after)
                  for op, before, after in zip(operators, names[:-1], names[1:], strict=True)], [], [unranked(names[-1])])


def choice(if_true: onnx.GraphProto, if_false: onnx.GraphProto) -> onnx.ModelProto:
    return model([node("If", ["deep"], name="choose", then_branch=if_true, else_branch=if_false)],
                 [value("x", 8, WIDTH), value("deep", kind=BOOL)], ["y"], {"w": WEIGHT}, 18)


def products(if_true: int = 1, if_false: int = 3) -> onnx.ModelProto:
    """An If: so many products or so many."""
    return choice(chain("yes", *["MatMul"] * if_true), chain("no", *["MatMul"] * if_false))


def runs(record: ModelRecord) -> set[float]:
    return {entry.runs for entry in record.nodes}


def test_a_loops_body_runs_as_often_as_its_constant_says() -> None:
    record = analyze(loop(12), "cpu")
    inside = [entry for entry in record.nodes if entry.inside]
    assert {entry.inside for entry in inside} == {"again"}
    assert all(entry.runs == 12.0 and entry.name.startswith("again/") for entry in inside)
    product = next(entry for entry in inside if "MatMul" in record.kernel_of(entry).type)
    assert product.inputs == ("again/state", "w")
    assert record.kernel_of(product).inputs[1].constant
    assert product.origins[0].op_type == "MatMul"
    assert (record.outputs["y"].shape, record.guessed) == ((8, WIDTH), {})
    assert record.weight_bytes == 4 * WIDTH * WIDTH + 8 + 1


def test_trips_that_are_given_or_guessed(caplog: pytest.LogCaptureFixture) -> None:
    for name, trips in (("trips", 20), ("again.trips", 7), ("trips", 0)):
        assert runs(analyze(loop(None), "cpu", {name: trips})) == {trips}
    record = analyze(loop(None), "cpu")
    assert runs(record) == {10.0}
    assert (record.guessed["again"].low, record.guessed["again"].high) == (0.1, 10.0)
    with pytest.raises(UserError, match=r"no dynamic dimension others\.trips; .* of Loops and Ifs again\.trips, trips can be"):
        analyze(loop(None), "cpu", {"others.trips": 7})
    assert not caplog.text
    assert runs(analyze(loop(5), "cpu", {"trips": 7})) == {5.0}
    assert "trips=7 changes nothing" in caplog.text


def test_a_loop_that_data_may_end_runs_at_most_its_constant_of_trips() -> None:
    ends = loop(12, body([node("Constant", [], "few", value_int=3), node("Less", ["step", "few"], "goes"), *STEP], "goes"))
    guess = analyze(ends, "cpu").guessed["again"]
    assert (guess.taken, guess.low, guess.high) == ("12", 1 / 12, 1.0)
    assert analyze(ends, "cpu", {"trips": 4}).guessed == {}
    until = body([node("Add", ["state", "one"], "next"), node("Less", ["next", "limit"], "smaller")], "smaller",
                 one=1.0, limit=9.0)
    endless = model([node("Loop", ["", "true", "x"], name="until", body=until)], [value("x")], ["y"], {"true": True}, 18)
    assert (analyze(endless, "cpu").guessed["until"].taken, analyze(endless, "cpu", {"trips": 5}).guessed) == ("10", {})


def test_states_that_grow_are_taken_halfway() -> None:
    record = analyze(loop(11, body([node("Concat", ["state", "x"], "next", axis=0)])), "cpu")
    assert record.outputs["y"].shape == (8 * 12, WIDTH)
    joined = next(record.kernel_of(entry) for entry in record.nodes if record.kernel_of(entry).op_type == "Concat")
    assert joined.outputs[0].shape == (8 * 7, WIDTH)  # of 16, 24, … 96 rows


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_scan_runs_as_often_as_its_inputs_are_long(axis: int) -> None:
    inside = graph([node("Add", ["state", "item"], "next"), node("Relu", ["next"], "kept")],
                   [value("state", 4, 6), value("item", 4, 6)], [unranked("next"), unranked("kept")])
    shape = [4, 6]
    shape.insert(axis, 5)
    record = analyze(model([node("Scan", ["start", "items"], ["last", "all"], body=inside, num_scan_inputs=1,
                                 scan_input_axes=[axis], scan_output_axes=[-1])],
                           [value("start", 4, 6), value("items", *shape)], ["last", "all"], opset=18), "cpu")
    assert runs(record) == {5.0}
    assert (record.outputs["last"].shape, record.outputs["all"].shape) == ((4, 6), (4, 6, 5))


def test_an_ifs_branch() -> None:
    for dims, products_run in (({}, 3), ({"then": 1}, 1), ({"choose.then": 1}, 1), ({"else": 0}, 1)):
        record = analyze(products(), "cpu", dims)
        assert sum("MatMul" in record.kernel_of(entry).type for entry in record.nodes) == products_run
        assert {name: (guess.taken, guess.low) for name, guess in record.guessed.items()} == (
            {} if dims else {"choose": ("else", pytest.approx(1 / 3))})
    parser = cli.parser("A test.", "x")
    cli.add_dim(parser)
    args = parser.parse_args(["--dim", "batch=2", "--branch", "choose=else", "--branch", "then"])
    assert cli.parse_dims(args.dim) == {"batch": [2], "choose.else": [1], "then": [1]}


def test_nested_bodies_multiply(tmp_path: Path) -> None:
    """A Loop of 3 trips around one of 4, which reads a weight of the main graph and a tensor of the outer body."""
    inner = graph([node("MatMul", ["inner_state", "w"], "product"), node("Add", ["product", "scaled"], "inner_next"),
                   node("Identity", ["inner_on"], "inner_out")],
                  [value("inner_step", kind=INT64), value("inner_on", kind=BOOL), unranked("inner_state")],
                  [value("inner_out", kind=BOOL), unranked("inner_next")])
    outer = body([node("Sigmoid", ["state"], "scaled"), node("Loop", ["four", "true", "state"], "next", "within", body=inner)],
                 four=4)
    record = analyze(loop(3, outer), "cpu")
    by_operator = {record.kernel_of(entry).op_type: (entry.runs, entry.inside) for entry in record.nodes if entry.inside}
    assert by_operator["Sigmoid"] == (3.0, "again")
    assert by_operator["Loop"] == (12.0, "again")
    assert by_operator["Add" if "Add" in by_operator else "Gemm"] == (12.0, "again/within")
    order = [record.kernel_of(record.nodes[place]).op_type for place in run_order(record)]
    assert (order.count("Sigmoid"), order.count("Loop"), order[-1]) == (3, 3 + 12, "Loop")
    assert len(order) == runs_in_order(record)
    length, path = longest_path(build_dag(record), {entry.name: entry.runs for entry in record.nodes})
    assert path[0] == "again"
    assert length >= 3 + 12 + 12
    files.write_json(tmp_path / "nested.json", record)
    assert read_model_record(tmp_path / "nested.json") == record


@pytest.mark.slow
def test_what_a_loop_costs() -> None:
    """On the shipped H200: as much as its nodes unrolled, and the host's wait to read the condition in each iteration."""
    names = ["x", *(f"s{trip}" for trip in range(12))]
    unrolled = model([made for before, after in pairwise(names) for made in (
        node("MatMul", [before, "w"], f"p{after}"), node("Tanh", [f"p{after}"], after))], [value("x", 8, WIDTH)], names[-1:],
        {"w": WEIGHT}, 18)
    looped, flat = predict(loop(12), target=H200), predict(unrolled, target=H200)
    assert sum(kernel.total_ms for kernel in looped.kernels if "MatMul" in kernel.type) == pytest.approx(
        sum(kernel.total_ms for kernel in flat.kernels if "MatMul" in kernel.type))
    assert CUDA_TRIP_MS["Loop"] <= (looped.latency_ms - flat.latency_ms) / 12 <= CUDA_TRIP_MS["Loop"] + 0.03
    assert not looped.rough_estimate
    none, ten, many = (predict(loop(None), target=H200, dims={"trips": trips}).latency_ms for trips in (0, 10, 2 * MOST_RUNS))
    assert none < CUDA_TRIP_MS["Loop"] + CONDITION_MS  # an H200 took 0.017 ms for such a run
    assert many / (ten - none) == pytest.approx(2 * MOST_RUNS / 10, rel=0.05)


def test_long_loops_are_cut_short() -> None:
    record = analyze(loop(None), "cpu", {"trips": 100_000})
    cut = shortest_cut(record)
    assert runs_in_order(record) == sum(entry.runs for entry in record.nodes)
    assert MOST_RUNS / 2 - 10 <= len(run_order(record, cut)) == runs_in_order(record, cut) <= MOST_RUNS


def test_guesses_are_reported_and_widen_the_interval() -> None:
    prediction = predict(loop(None), target=H200)
    assert prediction.rough_estimate
    assert any("again runs its body can't be known; 10 trips" in warning and "--dim again.trips=N" in warning
               for warning in prediction.warnings)
    assert prediction.interval_ms[0] < prediction.latency_ms / 3
    assert prediction.interval_ms[1] > prediction.latency_ms * 5


SMALL = chain("small", *["Abs"] * 30)  # takes longer than a product on a GPU


@pytest.mark.parametrize("either", [choice(chain("p", "MatMul", "Tanh"), SMALL), products(1, 3), products(3, 1)],
                         ids=["dear", "1 or 3", "3 or 1"])
def test_the_interval_of_an_if_holds_both_branches(either: onnx.ModelProto) -> None:
    unsure, *sure = (predict(either, target=H200, dims=dims) for dims in ({}, {"then": 1}, {"else": 1}))
    assert all(unsure.interval_ms[0] <= each.latency_ms <= unsure.interval_ms[1] for each in sure)
    assert [any("--branch choose=" in warning for warning in each.warnings) for each in (unsure, *sure)] == [True, False, False]


def test_bodies_have_providers_and_copies_in_a_cuda_session() -> None:
    """A body with an operator that CUDA lacks, and its result read by one that CUDA has."""
    inside = body([node("Det", ["state"], "d"), node("Mul", ["state", "d"], "next")])
    record = analyze(model([node("Loop", ["trips", "true", "x"], name="again", body=inside)], [value("x", 16, 16)], ["y"],
                           {"trips": 4, "true": True}, 18), "cuda")
    placed = {record.kernel_of(entry).op_type: entry for entry in record.nodes}
    assert (placed["Det"].provider, placed["Mul"].provider) == ("cpu", "cuda")
    assert (placed["MemcpyFromHost"].inside, placed["MemcpyFromHost"].runs) == ("again", 4.0)
    assert working_nodes(record) == sum(entry.runs for entry in record.nodes if record.kernel_of(entry).moves_data) - 4


def test_a_run_does_the_given_trips_and_the_branch_that_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(loop(None), path)
    assert own_sizes(path, {"trips": [3], "batch": [1]}) == [{"trips": 3}]
    assert open_runner(path, "cpu", dims={"trips": 3}, io="host").feed["trips"] == 3
    onnx.save(products(), path)
    assert open_runner(path, "cpu", dims={"then": 1}, io="host").feed["deep"]
    for if_true, if_false in ((1, 3), (3, 1)):
        onnx.save(products(if_true, if_false), path)
        for dims in ({}, analyze(path, "cpu").dims_run):
            assert open_runner(path, "cpu", dims=dims, io="host").feed["deep"] == (if_true > if_false)


def test_profiled_times_of_a_body_are_those_of_a_trip(tmp_path: Path) -> None:
    """A sample per run: the mean of its trips, of which there are as many as the record counts."""
    path = tmp_path / "loop.onnx"
    onnx.save(loop(None), path)
    record = analyze(path, "cpu", {"trips": 20})
    profiled, parsed, _ = profile_model(path, "cpu", {"trips": 20}, Effort(warmup=1, least_runs=3, most_runs=3))
    ids = {entry.name: kernel_of(parsed, entry).id for entry in parsed.nodes if entry.op_type != "Loop"}
    samples = {m.id: m.samples_ms for m in labels_of(profiled, ids, "net", "in_model") if m.label == "kernel_time"}
    inside = [entry for entry in record.nodes if entry.inside]
    assert {entry.kernel_id for entry in inside} == samples.keys()
    for entry in inside:
        trips_ms = [[event.duration_us / 1000 for event in run.nodes if event.node == entry.name] for run in profiled]
        assert [len(times) for times in trips_ms] == [entry.runs] * 3
        assert samples[entry.kernel_id] == pytest.approx([sum(times) / len(times) for times in trips_ms], abs=1e-5)
