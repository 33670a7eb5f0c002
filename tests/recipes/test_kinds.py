"""Recipes that make models of every kind and judge Hase's answers about them: the commands, on a few tiny models."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import run_script

from hase.learned.composition.fitted import read_composition
from hase.recipes.kinds.compare_on_gpu import compare_all, difference_rows, gpu_latency
from hase.recipes.kinds.judge import Ended
from hase.recipes.kinds.judgement import JUDGEMENT, MEASUREMENTS, StepResult, page, read_judgement, rows_of, summary
from hase.recipes.kinds.manifest import MadeModel, read_manifest
from hase.recipes.kinds.node_lists import NodeList, NodeRow, compare, derived_nodes, every_node, feed_of, named
from hase.utils.errors import UserError
from hase.utils.ort_sessions import open_session
from hase.utils.paths import ROOT, SHIPPED

TINY = ("tiny_add", "loop_constant_trips", "sklearn_linear")


def command(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return run_script(f"recipes/kinds/{script}", *options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with TINY, as the script makes them."""
    folder = tmp_path_factory.mktemp("kinds")
    done = command("make_models.py", "--out", str(folder), "--only", *TINY)
    assert done.returncode == 0, done.stderr
    return folder


def test_models_are_made_and_listed(made: Path) -> None:
    models = {model.name: model for model in read_manifest(made).models}
    assert set(models) == set(TINY)
    assert models["tiny_add"] == MadeModel(name="tiny_add", file="tiny_add.onnx", kind="tiny", opset=18, tiny=True)
    assert models["sklearn_linear"].dim_options == ["--dim", "rows=256"]
    for model in models.values():
        session = open_session(made / model.file, "cpu", dims=model.dims)
        feed = {value.name: np.ones(value.shape, np.float32) for value in session.get_inputs()}
        assert all(np.all(np.isfinite(output)) for output in session.run(None, feed))


def test_existing_models_are_kept(made: Path) -> None:
    before = (made / "tiny_add.onnx").stat().st_mtime_ns
    (made / "sklearn_linear.onnx").unlink()
    assert command("make_models.py", "--out", str(made), "--only", *TINY).returncode == 0
    assert (made / "tiny_add.onnx").stat().st_mtime_ns == before
    assert (made / "sklearn_linear.onnx").exists()


def test_an_unknown_model_is_an_error(made: Path) -> None:
    done = command("make_models.py", "--out", str(made), "--only", "no_such_model")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no_such_model: no such model; there are classify_resnet18" in done.stderr


def test_a_model_that_cannot_be_made_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hase.recipes.kinds import make_models
    from hase.recipes.kinds.recipe_list import Recipe

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise ValueError("no such\noperator")

    monkeypatch.setattr(make_models, "recipes", lambda: [Recipe("bad", "tiny", fail)])
    assert make_models.make("bad", tmp_path) == "ValueError: no such operator"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_mixed_half_precision_computes_the_same(tmp_path: Path) -> None:
    import torch

    from hase.recipes.kinds import conversions, networks

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(8, 4)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.head(torch.relu(self.conv(image)).mean((2, 3))), -1)

    torch.manual_seed(0)
    net, path, image = Net().eval(), tmp_path / "mixed.onnx", torch.randn(1, 3, 8, 8)
    conversions.write_mixed_fp16(path, lambda plain: networks.exporting.export(net, {"image": image}, plain, 17))
    types = {weight.name: weight.data_type for weight in onnx.load(path).graph.initializer}
    assert types["conv.weight"] == types["head.weight"] == onnx.TensorProto.FLOAT16
    session = open_session(path, "cpu")
    assert [value.type for value in (*session.get_inputs(), *session.get_outputs())] == ["tensor(float)"] * 2
    with torch.no_grad():
        assert np.allclose(session.run(None, {"image": image.numpy()})[0], net(image).numpy(), atol=2e-3)


MODELS = tuple(MadeModel(name=name, file=f"{name}.onnx", kind=kind, opset=18) for name, kind in (
    ("a", "U-Net"), ("b", "LSTM"), ("c", "torchvision classification"), ("d", "detector")))


def answer(model: str, step: str, latency_ms: float, **more: object) -> StepResult:
    return StepResult.model_validate({"model": model, "step": step, "outcome": "answered", "seconds": 1.0,
                                      "latency_ms": latency_ms, **more})


def timed(model: str, first_ms: float, second_ms: float) -> list[StepResult]:
    """Both measurements of a model."""
    return [StepResult.model_validate({"model": model, "step": step, "outcome": "answered", "seconds": 1.0,
                                       "measured_ms": time_ms})
            for step, time_ms in zip(MEASUREMENTS, (first_ms, second_ms), strict=True)]


def test_the_summary_counts_what_was_asked(tmp_path: Path) -> None:
    steps = [
        answer("a", "cpu", 15.0, interval_ms=(5.0, 20.0)), answer("a", "cpu_filled", 10.5), *timed("a", 10.0, 11.0),
        answer("b", "cpu", 2.1, rough=True, operators=("LSTM",)), answer("b", "cpu_filled", 2.4), *timed("b", 2.0, 2.0),
        answer("c", "h200", 1.0, rough=True), answer("c", "cpu", 1.2, rough=True), *timed("c", 1.0, 1.0),
        StepResult(model="d", step="h200", outcome="traceback", seconds=1.0, message="KeyError: 'x'"),
    ]
    (tmp_path / JUDGEMENT).write_text("".join(step.model_dump_json() + "\n" for step in steps) + '{"torn')
    rows = rows_of(MODELS, read_judgement(tmp_path), {"c": 1.4})
    assert {(row.model, row.step): row.error for row in rows if row.error is not None} == pytest.approx({
        ("a", "cpu"): 0.5, ("a", "cpu_filled"): 0.05, ("b", "cpu"): 0.05, ("b", "cpu_filled"): 0.2, ("c", "cpu"): 0.2,
        ("c", "h200"): 1 / 1.4 - 1})
    summarised = {line["what"]: (line["reached"], line["met"]) for line in summary(rows)}
    assert summarised["this CPU, kernels measured: median error of 2"] == ("12.5%", "no")
    assert summarised["this CPU, kernels measured: mean error"] == ("12.5%", "yes")
    assert summarised["this CPU, kernels measured: a second measurement, median / mean"] == ("5.0% / 5.0%", "-")
    assert summarised["answers: traceback"] == ("1: d (nvidia-h200)", "no")
    assert summarised["of 3 unmarked answers off by more than 30%"] == ("1: a (this CPU, +50.0%)", "no")
    assert summarised["of 3 marked answers within 15%: these needed no mark"] == ("33.3%, 1: b (this CPU, +5.0%)", "yes")
    needless = [answer("b", "h200", 1.4, rough=True), answer("c", "h200", 1.5, rough=True)]
    marked = {line["what"]: line for line in summary(rows_of(MODELS, {(step.model, step.step): step for step in needless},
                                                             {"b": 1.4, "c": 1.2}))}
    assert marked["of 2 marked answers within 15%: these needed no mark"] == {
        "what": "of 2 marked answers within 15%: these needed no mark", "bar": "at most 33.3%",
        "reached": "50.0%, 1: b (nvidia-h200, +0.0%)", "met": "no"}
    assert summarised["torchvision classification models marked"][1] == "no"
    assert summarised["this CPU: interval's width over the prediction, median / widest"] == ("100% / 100%", "-")
    text = page(rows, "python recipes/kinds/judge.py out/kinds", "Measured here.")
    assert text.startswith(
        "# Models of every kind\n\nHase was asked about 4 models of 4 kinds. On nvidia-h200: 1 of 2 were answered, 1 of these "
        "as rough estimates, 0 refused with a reason, 1 failed; median error 28.6%, ")
    assert "| b | LSTM | this CPU | 2.1 | - | rough estimate (LSTM) | 2 | +5.0% | +0.0% | yes |" in text


def test_what_is_confident_and_wrong_where_measurements_agree() -> None:
    """On a CPU whose kernels were measured first: `a` is wrong, `b` was measured while the machine changed, `c` is marked."""
    filled = [answer("a", "cpu_filled", 14.0, interval_ms=(10.0, 18.0)), *timed("a", 10.0, 10.9),
              answer("b", "cpu_filled", 14.0, interval_ms=(12.0, 18.0)), *timed("b", 10.0, 11.1),
              answer("c", "cpu_filled", 14.0, interval_ms=(7.0, 28.0), rough=True), *timed("c", 10.0, 10.0)]
    results = {(step.model, step.step): step for step in filled}
    assert [row.agrees for row in rows_of(MODELS, results)] == [True, False, True]
    with_canaries = {key: step.model_copy(update={"canaries_ms": (1.05, 1.2 if key == ("c", "measured") else 1.0)})
                     for key, step in results.items()}
    assert [row.agrees for row in rows_of(MODELS, with_canaries)] == [True, False, False], "it was slower than at its best"
    lines = {line["what"].removeprefix("this CPU, kernels measured: "): line for line in summary(rows_of(MODELS, results))}
    wrong = lines["of 1 unmarked answers whose two measurements agree, off by more than 30%"]
    assert (wrong["reached"], wrong["met"]) == ("1: a (this CPU, kernels measured, +40.0%)", "no")
    marked = lines["of 3 answers marked"]
    assert (marked["bar"], marked["met"]) == ("at most 15%", "no")
    assert marked["reached"] == "33.3%, 1: c (this CPU, kernels measured, +40.0%)"
    width = lines["interval's width over the prediction, median"]
    assert (width["bar"], width["reached"], width["met"]) == ("at most 55%", "57.1%", "no")


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / JUDGEMENT).write_text("{}\n")
    with pytest.raises(UserError, match=r"judgement.jsonl, line 1: damaged"):
        read_judgement(tmp_path)


@pytest.mark.parametrize(("ended", "outcome", "message"), [
    (Ended(1, "", "reading\nerror: m.onnx: no such file\n", 0.1), "refused", "m.onnx: no such file"),
    (Ended(1, "", "Traceback (most recent call last):\n  …\nKeyError: 3\n", 0.1), "traceback", "KeyError: 3"),
    (Ended(-11, "", "", 0.1), "died", ""),
    (Ended(None, "", "warning: slow\n", 60.0), "too long", "warning: slow"),
    (Ended(0, "{}", "warning: rough\n", 0.1), "answered", "warning: rough"),
])
def test_how_a_command_ended(ended: Ended, outcome: str, message: str) -> None:
    assert (ended.outcome, ended.message) == (outcome, message)


@pytest.mark.slow
def test_models_are_judged_and_a_second_run_asks_nothing(made: Path, tmp_path: Path) -> None:
    options = [str(made), "--workspace", str(tmp_path), "--only", "tiny_add", "--steps", "h200", "measured", "--rounds", "1",
               "--budget-s", "0.05", "--json"]
    done = command("judge.py", *options)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["models"]
    assert row["target"] == "nvidia-h200"
    assert 0.001 < row["predicted (ms)"] < 1.0
    judgement = read_judgement(made)
    assert judgement["tiny_add", "measured"].measured_ms is not None

    def keep(**canaries_ms: tuple[float, ...]) -> str:
        """Leaves the steps as if the canary had taken that long around some."""
        steps = [result.model_copy(update={"canaries_ms": canaries_ms.get(step, ())})
                 for (_, step), result in judgement.items()]
        (made / JUDGEMENT).write_text("".join(f"{step.model_dump_json()}\n" for step in steps))
        return (made / JUDGEMENT).read_text()

    lines = keep(measured=(1.0, 1.2))
    assert command("judge.py", *options).returncode == 0
    assert (made / JUDGEMENT).read_text().removeprefix(lines).count('"step":"measured"') == 1, "the machine was slower"
    lines = keep(measured=(1.0, 1.05))
    assert command("judge.py", *options).returncode == 0
    assert (made / JUDGEMENT).read_text() == lines
    older, paced = tmp_path / "older.json", tmp_path / "on_gpu.json"
    latency = {"model": "tiny_add", "way": "static", "latency_ms": 0.05}
    usual_us = read_composition(SHIPPED / "nvidia-h200-cuda-ort1.31-all").probe_us
    assert usual_us is not None
    older.write_text(json.dumps({"models": [latency]}))
    paced.write_text(json.dumps({"models": [latency | {"host_probe_us": 1.3 * usual_us}]}))
    assert command("judge.py", *options, "--gpu", str(older)).returncode == 0
    assert (made / JUDGEMENT).read_text() == lines
    done = command("judge.py", *options, "--gpu", str(paced), "--docs", str(tmp_path / "kinds.md"))
    (at_its_pace,) = json.loads(done.stdout)["models"]
    assert (at_its_pace["host pace"], at_its_pace["measured (ms)"]) == (1.3, 0.05)
    assert at_its_pace["predicted (ms)"] > 1.1 * row["predicted (ms)"]
    assert at_its_pace["90 % between (ms)"] != row["90 % between (ms)"]
    assert "*Host pace*: dispatch time of the GPU's host over its usual time" in (tmp_path / "kinds.md").read_text()
    assert read_judgement(made)["tiny_add", "h200"].host_pace == 1.3
    lines = (made / JUDGEMENT).read_text()
    assert command("judge.py", *options, "--gpu", str(paced)).returncode == 0
    assert (made / JUDGEMENT).read_text() == lines


def test_the_host_is_probed_beside_each_model(made: Path) -> None:
    """On the CPU provider, instead of a GPU."""
    (model,) = read_manifest(made).chosen(["tiny_add"])
    latency = gpu_latency(model, made / model.file, "static", 0.1, "cpu")
    assert latency.latency_ms
    assert latency.host_probe_us
    assert 1e-4 < latency.latency_ms < 10.0
    assert 1.0 < latency.host_probe_us < 1e4
    assert latency.runs >= 20


def rows(*lines: str) -> tuple[NodeRow, ...]:
    """`Conv cuda a` as a node that makes tensor a."""
    return tuple(NodeRow(name=f"{number}", op_type=line.split()[0], provider=line.split()[1], outputs=(line.split()[2],),
                         types=("float32[1,2]",)) for number, line in enumerate(lines))


def test_graphs_are_compared_node_by_node() -> None:
    real = NodeList(model="m", way="static", opsets={"": 17}, kernels={"k1": 2, "k2": 1}, nodes=rows(
        "MemcpyFromHost cuda x1", "Conv cuda a", "Shape cpu s", "MatMul cuda t7", "Gemm cuda g", "TopK cuda v"))
    derived = NodeList(model="m", way="static", opsets={"": 17}, kernels={"k1": 1, "k2": 1}, nodes=rows(
        "Conv cuda a", "Shape cuda s", "MatMul cuda other_name", "FusedGemm cuda g", "Relu cuda r"))
    comparison = compare(real, derived)
    assert (comparison.nodes, comparison.same, comparison.agrees) == (5, 2, False)
    assert (comparison.copies, comparison.derived_copies) == ((0, 1), (0, 0))
    assert (comparison.kernels, comparison.same_kernels) == (3, 2)
    differences = {(row.what, row.tensor, row.derived, row.real) for row in comparison.differences}
    assert differences == {
        ("provider", "s", "cuda", "cpu"), ("operator", "g", "FusedGemm cuda", "Gemm cuda"), ("only real", "v", "", "cuda"),
        ("only derived", "r", "cuda", "")}
    provider = next(row for row in difference_rows([comparison]) if row["difference"] == "provider")
    assert provider == {"difference": "provider", "operator": "Shape", "opset": 17, "types": "float32", "derived": "cuda",
                        "real": "cpu", "nodes": 1, "models": "m"}


def test_graphs_of_sessions_opened_alike_are_compared() -> None:
    static = NodeList(model="m", way="static", nodes=rows("Conv cuda a"))
    dynamic = NodeList(model="m", way="dynamic", nodes=rows("Conv cuda a", "Shape cpu s"))
    failed = NodeList(model="m", way="static", error="UserError: no")
    comparisons = compare_all([static, dynamic], [dynamic, failed, NodeList(model="unknown", way="static")])
    assert [(comparison.way, comparison.agrees, comparison.error) for comparison in comparisons] == [
        ("dynamic", True, ""), ("static", False, "derived: UserError: no")]


def test_a_derived_graph_agrees_with_itself_and_bodies_have_names(made: Path) -> None:
    model = next(model for model in read_manifest(made).models if model.name == "tiny_add")
    derived = derived_nodes(model, made / model.file, "static")
    assert [(node.op_type, node.provider, node.types[0]) for node in derived.nodes] == [
        ("Add", "cuda", "float32[1,8]"), ("Relu", "cuda", "float32[1,8]")]
    assert compare(derived, derived).agrees
    model_bytes = named(made / "loop_constant_trips.onnx")
    assert isinstance(model_bytes, bytes)
    loop = onnx.load_from_string(model_bytes)
    inner = [(node.name, inside) for node, inside in every_node(loop.graph) if inside]
    assert inner[0] == ("Loop_last/body/0_MatMul", "Loop_last")
    assert len({name for name, _ in inner}) == len(inner) == 5
    inside = {(node.op_type, node.inside) for node in derived_nodes(
        MadeModel.model_validate(model.model_dump() | {"name": "loop", "file": "loop_constant_trips.onnx"}),
        made / "loop_constant_trips.onnx", "static").nodes}
    assert {("Loop", ""), ("Gemm", "Loop_last"), ("Tanh", "Loop_last")} <= inside
    session = open_session(made / "sklearn_linear.onnx", "cpu")
    assert feed_of(session, {"rows": 3})["x"].shape == (3, 64)


@pytest.mark.slow
def test_without_real_nodes_the_comparison_is_an_error(made: Path, tmp_path: Path) -> None:
    done = command("compare_on_gpu.py", str(made), "--out", str(tmp_path), "--only", "tiny_add", "--derive-only")
    assert done.returncode == 1
    assert "real_nodes.json.gz: no such file" in done.stderr


def test_random_chains_are_the_ones_that_were_measured(tmp_path: Path) -> None:
    """A chain is the same each time, in its operator set, and runs; each that the script makes was measured on an H200."""
    done = command("random_chains.py", "--out", str(tmp_path), "--count", "3", "--json")
    assert done.returncode == 0, done.stderr
    models = read_manifest(tmp_path).models
    assert [(model.name, model.opset) for model in models] == [
        *((f"chain_{number}", 22) for number in range(3)), *((f"chain_{number}", 20) for number in range(1000, 1003))]
    for model in models:
        path = tmp_path / model.file
        onnx.checker.check_model(str(path), full_check=True)
        session = open_session(path, "cpu", name=model.name)
        [output] = session.run(None, feed_of(session, {}, {}))
        assert list(output.shape) == session.get_outputs()[0].shape
    nodes = onnx.load(tmp_path / "chain_0.onnx").graph.node
    assert " ".join(node.op_type for node in nodes) == "Conv LayerNormalization Erf Conv Erf Conv BatchNormalization"
    measured = json.loads((ROOT / "recipes" / "kinds" / "chains-nvidia-h200.json").read_text(encoding="utf-8"))["models"]
    assert [row["model"] for row in measured] == [f"chain_{n}" for n in (*range(150), *range(1000, 1300))]
