"""Loop, If and Scan: their bodies are part of the graph and count as often as they run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hase.benchmark.ort.profile import CONDITION_MS, CPU_TRIP_MS, CUDA_TRIP_MS, labels_of
from hase.benchmark.ort.runner import open_runner
from hase.graph_model.simulation.dag import build_dag, longest_path
from hase.inference import Predictor, predict
from hase.inference.prediction.run import trace_of
from hase.learned.composition.fitted import working_nodes
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.isolated.analysis import own_sizes
from hase.records.kernel_record import MOST_RUNS, ModelRecord, run_order, runs_in_order, shortest_cut
from hase.records.kernel_record_files import read_model_record
from hase.records.measurement import Effort
from hase.utils import cli, files
from hase.utils.errors import UserError

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
H200 = "nvidia-h200-cuda-ort1.31-all"
WIDTH = 256
node, value = helper.make_node, helper.make_tensor_value_info


def weight(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.full(shape, 0.001, np.float32), name)


def int64_scalar(name: str, number: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(number, np.int64), name)


def model(nodes: Sequence[onnx.NodeProto], inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[str],
          constants: Sequence[onnx.TensorProto] = ()) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "g", list(inputs), [helper.ValueInfoProto(name=name) for name in outputs],
                              list(constants))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def step_body(extra: Sequence[onnx.NodeProto] = (), go_on: str = "go_on_out") -> onnx.GraphProto:
    """state ← tanh(state · w), as a Loop's body."""
    return helper.make_graph(
        [*extra, node("MatMul", ["state", "w"], ["product"]), node("Tanh", ["product"], ["next"]),
         node("Identity", ["go_on"], ["go_on_out"])], "body",
        [value("step", INT64, []), value("go_on", BOOL, []), value("state", FLOAT, None)],
        [value(go_on, BOOL, []), value("next", FLOAT, None)])


def loop(trips: int | None = 12, name: str = "again", body: onnx.GraphProto | None = None, rows: int = 8) -> onnx.ModelProto:
    """A Loop whose number of trips is a constant, or the input `trips`."""
    inputs = [value("x", FLOAT, [rows, WIDTH]), *([] if trips is not None else [value("trips", INT64, [])])]
    constants = [weight("w", WIDTH, WIDTH), numpy_helper.from_array(np.array(True), "true"),
                 *([int64_scalar("trips", trips)] if trips is not None else [])]
    return model([node("Loop", ["trips", "true", "x"], ["y"], name=name, body=body or step_body())], inputs, ["y"], constants)


def unrolled(trips: int) -> onnx.ModelProto:
    nodes, last = [], "x"
    for trip in range(trips):
        nodes += [node("MatMul", [last, "w"], [f"p{trip}"]), node("Tanh", [f"p{trip}"], [f"s{trip}"])]
        last = f"s{trip}"
    return model(nodes, [value("x", FLOAT, [8, WIDTH])], [last], [weight("w", WIDTH, WIDTH)])


def choice(if_true: int = 1, if_false: int = 3) -> onnx.ModelProto:
    """An If on an input: `if_true` products or `if_false`."""
    def branch(name: str, steps: int) -> onnx.GraphProto:
        nodes, last = [], "x"
        for step in range(steps):
            nodes.append(node("MatMul", [last, "w"], [f"{name}{step}"]))
            last = f"{name}{step}"
        return helper.make_graph(nodes, name, [], [value(last, FLOAT, None)])

    branches = {"then_branch": branch("yes", if_true), "else_branch": branch("no", if_false)}
    return model([node("If", ["deep"], ["y"], name="choose", **branches)],
                 [value("x", FLOAT, [8, WIDTH]), value("deep", BOOL, [])], ["y"], [weight("w", WIDTH, WIDTH)])


def scan(axis: int) -> onnx.ModelProto:
    body = helper.make_graph(
        [node("Add", ["state", "item"], ["next"]), node("Relu", ["next"], ["kept"])], "body",
        [value("state", FLOAT, [4, 6]), value("item", FLOAT, [4, 6])], [value("next", FLOAT, None), value("kept", FLOAT, None)])
    shape = [4, 6]
    shape.insert(axis, 5)
    return model([node("Scan", ["start", "items"], ["last", "all"], name="along", body=body, num_scan_inputs=1,
                       scan_input_axes=[axis], scan_output_axes=[-1])],
                 [value("start", FLOAT, [4, 6]), value("items", FLOAT, shape)], ["last", "all"])


def runs(record: ModelRecord) -> dict[str, float]:
    return {entry.name: entry.runs for entry in record.nodes}


def test_a_loops_body_runs_as_often_as_its_constant_says() -> None:
    record = analyze(loop(12), "cpu")
    inside = [entry for entry in record.nodes if entry.inside]
    assert {entry.inside for entry in inside} == {"again"}
    assert all(entry.runs == 12.0 and entry.name.startswith("again/") for entry in inside)
    assert {record.kernel_of(entry).op_type for entry in inside} >= {"Identity"}
    product = next(entry for entry in inside if "MatMul" in record.kernel_of(entry).type)
    assert product.inputs == ("again/state", "w")
    assert record.kernel_of(product).inputs[1].constant
    assert record.outputs["y"].shape == (8, WIDTH)
    assert record.weight_bytes == 4 * WIDTH * WIDTH + 8 + 1
    assert record.guessed == {}
    assert product.origins[0].op_type == "MatMul"


def test_trips_that_are_given_or_guessed() -> None:
    assert set(runs(analyze(loop(None), "cpu", {"trips": 20})).values()) == {20.0}
    assert set(runs(analyze(loop(None), "cpu", {"again.trips": 7})).values()) == {7.0}
    record = analyze(loop(None), "cpu")
    assert set(runs(record).values()) == {10.0}
    assert (record.guessed["again"].low, record.guessed["again"].high) == (0.1, 10.0)
    assert set(runs(analyze(loop(None), "cpu", {"trips": 0})).values()) == {0.0}
    with pytest.raises(UserError, match=r"no dynamic dimension others\.trips; .* of Loops and Ifs again\.trips, trips can be"):
        analyze(loop(None), "cpu", {"others.trips": 7})


def test_trips_without_effect_give_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        assert set(runs(analyze(loop(5), "cpu", {"trips": 7})).values()) == {5.0}
    assert "trips=7 changes nothing" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING"):
        analyze(loop(None), "cpu", {"trips": 7})
    assert not caplog.text


def test_a_timeline_shows_every_trip() -> None:
    record = analyze(loop(3), "cuda")
    names = [event["name"] for event in trace_of(Predictor(target=H200).run(record))["traceEvents"] if event["ph"] == "X"]
    assert sum(name.startswith("again/MatMul_0") for name in names) == 2 * 3  # dispatched by the host, run by the GPU
    assert sum(name.startswith("again (Loop)") for name in names) == 3


def test_a_loop_that_data_may_end_runs_at_most_its_constant_of_trips() -> None:
    ends = step_body([node("Less", ["step", "few"], ["goes"]), node("Constant", [], ["few"], value_int=3)][::-1], go_on="goes")
    record = analyze(loop(12, body=ends), "cpu")
    assert record.guessed["again"].taken == "12"
    assert (record.guessed["again"].low, record.guessed["again"].high) == (1 / 12, 1.0)
    assert analyze(loop(12, body=ends), "cpu", {"trips": 4}).guessed == {}


def test_states_that_grow_are_taken_halfway() -> None:
    body = helper.make_graph(
        [node("Concat", ["state", "x"], ["next"], axis=0), node("Identity", ["go_on"], ["go_on_out"])], "body",
        [value("step", INT64, []), value("go_on", BOOL, []), value("state", FLOAT, None)],
        [value("go_on_out", BOOL, []), value("next", FLOAT, None)])
    record = analyze(loop(11, body=body), "cpu")
    assert record.outputs["y"].shape == (8 * 12, WIDTH)
    joined = next(record.kernel_of(entry) for entry in record.nodes if record.kernel_of(entry).op_type == "Concat")
    assert joined.outputs[0].shape == (8 * 7, WIDTH)  # of 16, 24, … 96 rows


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_scan_runs_as_often_as_its_inputs_are_long(axis: int) -> None:
    record = analyze(scan(axis), "cpu")
    assert set(runs(record).values()) == {5.0}
    assert (record.outputs["last"].shape, record.outputs["all"].shape) == ((4, 6), (4, 6, 5))


def test_an_ifs_branch() -> None:
    def products(record: ModelRecord) -> int:
        return sum("MatMul" in record.kernel_of(entry).type for entry in record.nodes)

    record = analyze(choice(), "cpu")
    assert (products(record), record.guessed["choose"].taken) == (3, "else")
    assert record.guessed["choose"].low == pytest.approx(1 / 3)
    for dims in ({"then": 1}, {"choose.then": 1}, {"else": 0}):
        record = analyze(choice(), "cpu", dims)
        assert (products(record), record.guessed) == (1, {})
    parser = cli.parser("A test.", "x")
    cli.add_dim(parser)
    args = parser.parse_args(["--dim", "batch=2", "--branch", "choose=else", "--branch", "then"])
    assert cli.parse_dims(args.dim) == {"batch": [2], "choose.else": [1], "then": [1]}
    assert parser.parse_args([]).dim == []


def nested() -> onnx.ModelProto:
    """A Loop of 3 trips around one of 4, which reads a weight of the main graph and a tensor of the outer body."""
    inner = helper.make_graph(
        [node("MatMul", ["inner_state", "w"], ["product"]), node("Add", ["product", "scaled"], ["inner_next"]),
         node("Identity", ["inner_on"], ["inner_out"])], "inner",
        [value("inner_step", INT64, []), value("inner_on", BOOL, []), value("inner_state", FLOAT, None)],
        [value("inner_out", BOOL, []), value("inner_next", FLOAT, None)])
    outer = helper.make_graph(
        [node("Sigmoid", ["state"], ["scaled"]), node("Loop", ["four", "true", "state"], ["next"], name="within", body=inner),
         node("Identity", ["go_on"], ["go_on_out"])], "outer",
        [value("step", INT64, []), value("go_on", BOOL, []), value("state", FLOAT, None)],
        [value("go_on_out", BOOL, []), value("next", FLOAT, None)], [int64_scalar("four", 4)])
    return loop(3, body=outer)


def test_nested_bodies_multiply() -> None:
    record = analyze(nested(), "cpu")
    by_operator = {record.kernel_of(entry).op_type: (entry.runs, entry.inside) for entry in record.nodes if entry.inside}
    assert by_operator["Sigmoid"] == (3.0, "again")
    assert by_operator["Loop"] == (12.0, "again")
    assert by_operator["Add" if "Add" in by_operator else "Gemm"] == (12.0, "again/within")
    order = [record.kernel_of(record.nodes[place]).op_type for place in run_order(record)]
    assert len(order) == runs_in_order(record) == sum(entry.runs for entry in record.nodes)
    assert (order.count("Sigmoid"), order.count("Loop"), order[-1]) == (3, 3 + 12, "Loop")
    dag = build_dag(record)
    length, path = longest_path(dag, {entry.name: entry.runs for entry in record.nodes})
    assert path[0] == "again"
    assert length >= 3 + 12 + 12


def test_a_record_with_bodies_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = analyze(nested(), "cpu")
    files.write_json(tmp_path / "nested.json", record)
    assert read_model_record(tmp_path / "nested.json") == record
    plain = analyze(unrolled(2), "cpu")
    files.write_json(tmp_path / "plain.json", plain)
    document = files.read_json(tmp_path / "plain.json")
    assert set(document["nodes"][0]) == {"name", "kernel_id", "provider", "inputs", "outputs", "origins"}
    assert "guessed" not in document


@pytest.mark.slow
def test_a_loop_costs_as_much_as_its_nodes_unrolled() -> None:
    """On the shipped H200, where the host also waits to read the condition in each iteration."""
    looped, flat = predict(loop(12), target=H200), predict(unrolled(12), target=H200)
    products = {name: sum(kernel.total_ms for kernel in prediction.kernels if "MatMul" in kernel.type) for name, prediction in (
        ("looped", looped), ("flat", flat))}
    assert products["looped"] == pytest.approx(products["flat"])
    per_trip = (looped.latency_ms - flat.latency_ms) / 12
    assert CUDA_TRIP_MS["Loop"] <= per_trip <= CUDA_TRIP_MS["Loop"] + 0.03
    assert not looped.rough_estimate


def test_twice_the_trips_cost_twice_as_much() -> None:
    none, ten, twenty = (predict(loop(None), target=H200, dims={"trips": trips}).latency_ms for trips in (0, 10, 20))
    assert none < CUDA_TRIP_MS["Loop"] + CONDITION_MS  # an H200 took 0.017 ms for such a run
    assert (twenty - none) / (ten - none) == pytest.approx(2.0, rel=0.05)
    many, twice = (predict(loop(None), target=H200, dims={"trips": trips}).latency_ms for trips in (MOST_RUNS, 2 * MOST_RUNS))
    assert many / (twenty - ten) == pytest.approx(MOST_RUNS / 10, rel=0.02)
    assert twice / many == pytest.approx(2.0, rel=0.01)


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
    either = predict(choice(), target=H200)
    shorter = predict(choice(), target=H200, dims={"then": 1})
    assert either.rough_estimate
    assert any("--branch choose=then" in warning for warning in either.warnings)
    assert either.interval_ms[0] < shorter.latency_ms < either.latency_ms
    assert not any("choose" in warning for warning in shorter.warnings)


def test_bodies_have_providers_and_copies_in_a_cuda_session() -> None:
    """A body with an operator that CUDA lacks, and its result read by one that CUDA has."""
    body = helper.make_graph(
        [node("Det", ["state"], ["d"]), node("Mul", ["state", "d"], ["next"]), node("Identity", ["go_on"], ["go_on_out"])],
        "body",
        [value("step", INT64, []), value("go_on", BOOL, []), value("state", FLOAT, None)],
        [value("go_on_out", BOOL, []), value("next", FLOAT, None)])
    square = model([node("Loop", ["trips", "true", "x"], ["y"], name="again", body=body)], [value("x", FLOAT, [16, 16])], ["y"],
                   [int64_scalar("trips", 4), numpy_helper.from_array(np.array(True), "true")])
    record = analyze(square, "cuda")
    placed = {record.kernel_of(entry).op_type: entry for entry in record.nodes}
    assert (placed["Det"].provider, placed["Mul"].provider) == ("cpu", "cuda")
    assert placed["MemcpyFromHost"].inside == "again"
    assert placed["MemcpyFromHost"].runs == 4.0
    assert working_nodes(record) == sum(entry.runs for entry in record.nodes if record.kernel_of(entry).moves_data) - 4


def test_a_body_in_half_precision_is_derived_for_cuda() -> None:
    constants = [numpy_helper.from_array(np.ones(shape, np.float16), name) for name, shape in (("w", (8, 8)), ("bias", (8,)))]
    body = helper.make_graph(
        [node("MatMul", ["state", "w"], ["product"]), node("Add", ["product", "bias"], ["next"]),
         node("Identity", ["go_on"], ["go_on_out"])], "body",
        [value("step", INT64, []), value("go_on", BOOL, []), value("state", TensorProto.FLOAT16, [4, 8])],
        [value("go_on_out", BOOL, []), value("next", TensorProto.FLOAT16, [4, 8])], constants[1:])
    halved = model([node("Loop", ["trips", "true", "x"], ["y"], name="again", body=body)],
                   [value("x", TensorProto.FLOAT16, [4, 8])], ["y"],
                   [constants[0], int64_scalar("trips", 3), numpy_helper.from_array(np.array(True), "true")])
    record = analyze(halved, "cuda")
    product = next(record.kernel_of(entry) for entry in record.nodes if record.kernel_of(entry).op_type == "Gemm")
    assert [tensor.dtype for tensor in (*product.inputs, *product.outputs)] == ["float16"] * 4
    assert record.outputs["y"].dtype == "float16"


def test_a_loop_without_a_number_of_trips_and_sequences_in_bodies() -> None:
    body = helper.make_graph(
        [node("Add", ["state", "one"], ["next"]), node("Less", ["next", "limit"], ["go_on_out"])], "body",
        [value("step", INT64, []), value("go_on", BOOL, []), value("state", FLOAT, [])],
        [value("go_on_out", BOOL, []), value("next", FLOAT, [])])
    numbers = [numpy_helper.from_array(np.array(number, np.float32), name) for name, number in (("one", 1), ("limit", 9))]
    ends = model([node("Loop", ["", "true", "x"], ["y"], name="until", body=body)], [value("x", FLOAT, [])], ["y"],
                 [numpy_helper.from_array(np.array(True), "true"), *numbers])
    assert (analyze(ends, "cpu").guessed["until"].taken, analyze(ends, "cpu", {"trips": 5}).guessed) == ("10", {})

    def branch(name: str, made: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph([made], name, [], [value(name, INT64, [])])

    counted = model([node("SequenceConstruct", ["x", "x"], ["both"]), node(
        "If", ["c"], ["y"], name="choose", then_branch=branch("a", node("SequenceLength", ["both"], ["a"])),
        else_branch=branch("b", node("Constant", [], ["b"], value_int=3)))],
        [value("x", FLOAT, [2, 3]), value("c", BOOL, [])], ["y"])
    assert "choose/SequenceLength_0" in runs(analyze(counted, "cpu", {"then": 1}))


def test_a_run_does_the_given_trips(tmp_path: Path) -> None:
    path = tmp_path / "loop.onnx"
    onnx.save(loop(None), path)
    assert own_sizes(path, {"trips": [3], "batch": [1]}) == [{"trips": 3}]
    runner = open_runner(path, "cpu", dims={"trips": 3}, io="host")
    assert runner.feed["trips"] == 3
    onnx.save(choice(), tmp_path / "choice.onnx")
    assert open_runner(tmp_path / "choice.onnx", "cpu", dims={"then": 1}, io="host").feed["deep"]
    for products in ((1, 3), (3, 1)):  # by default the branch that is predicted
        onnx.save(choice(*products), tmp_path / "choice.onnx")
        sizes = analyze(tmp_path / "choice.onnx", "cpu").dims_run
        assert open_runner(tmp_path / "choice.onnx", "cpu", dims=sizes, io="host").feed["deep"] == (products == (3, 1))


def test_measured_on_the_cpu(tmp_path: Path) -> None:
    """The kernels of a body, as profiled in the model and added up, against a run. The fastest ones count, since other work may
    run on this machine."""
    from hase.benchmark.ort.profile import profile_model
    from hase.ort_analysis.graph.analysis import kernel_of

    path = tmp_path / "loop.onnx"
    onnx.save(loop(None, rows=256), path)  # the profiler's overhead is small beside such products
    record = analyze(path, "cpu", {"trips": 20})
    effort = Effort(warmup=3, least_runs=15, most_runs=15)
    profiled, graph, _ = profile_model(path, "cpu", {"trips": 20}, effort)
    samples = labels_of(profiled, {entry.name: kernel_of(graph, entry).id for entry in graph.nodes if entry.op_type != "Loop"},
                        "net", "in_model")
    times = {m.id: min(m.samples_ms) for m in samples if m.label == "kernel_time"}
    assert {len(m.samples_ms) for m in samples if m.label == "kernel_time"} == {15}  # a sample per run, not per iteration
    predicted = sum(entry.runs * times.get(entry.kernel_id, CPU_TRIP_MS["Loop"]) for entry in record.nodes)
    runner = open_runner(path, "cpu", dims={"trips": 20})
    for _ in range(20):  # until other work on the machine does not disturb the runs
        run_ms = min(runner.time_as(effort).samples_ms)
        if 0.4 < predicted / run_ms < 2.5:
            return
    pytest.fail(f"{predicted:.2f} ms predicted, {run_ms:.2f} ms measured")


def test_the_counted_branch_is_the_one_that_runs(tmp_path: Path) -> None:
    for products in ((1, 3), (3, 1)):
        onnx.save(choice(*products), tmp_path / "choice.onnx")
        assert open_runner(tmp_path / "choice.onnx", "cpu", io="host").feed["deep"] == (products == (3, 1))


@pytest.mark.parametrize("dear_first", [True, False])
def test_the_interval_of_an_if_holds_both_branches(dear_first: bool) -> None:
    """One product, first or last in its branch, against thirty small nodes, which take longer on a GPU."""
    small = [node("Abs", [f"a{place}" if place else "x"], [f"a{place + 1}"]) for place in range(30)]
    if_false = helper.make_graph(small, "small", [], [value("a30", FLOAT, None)])
    steps = [node("MatMul", ["x", "w"], ["p"]), node("Tanh", ["p"], ["t"])] if dear_first else [
        node("Tanh", ["x"], ["p"]), node("MatMul", ["p", "w"], ["t"])]
    if_true = helper.make_graph(steps, "product", [], [value("t", FLOAT, None)])
    either = model([node("If", ["c"], ["y"], name="choose", then_branch=if_true, else_branch=if_false)],
                   [value("x", FLOAT, [8, WIDTH]), value("c", BOOL, [])], ["y"], [weight("w", WIDTH, WIDTH)])
    prediction = predict(either, target=H200)
    for branch in ("then", "else"):
        latency_ms = predict(either, target=H200, dims={branch: 1}).latency_ms
        assert prediction.interval_ms[0] <= latency_ms <= prediction.interval_ms[1]
    first = choice(1, 3) if dear_first else choice(3, 1)
    prediction = predict(first, target=H200)
    for branch in ("then", "else"):
        latency_ms = predict(first, target=H200, dims={branch: 1}).latency_ms
        assert prediction.interval_ms[0] <= latency_ms <= prediction.interval_ms[1]
