"""What labels add up to: on made-up datasets with known times, and on a small real collection of a CPU."""

from __future__ import annotations

import json

import pytest
from command import printed, run_script
from conftest import build_workspace, small_model
from made_up_dataset import FLAVOUR, TARGET, chain, draw_kernels, true_ms, write_dataset

from benchmark.collecting.collect import collect
from benchmark.collecting.config import CollectorConfig
from benchmark.label_table import add_up, in_model_times, model_labels, model_row, summaries
from records.blocks import Block
from records.dataset_tables import read_kernel_table, read_model_table
from records.kernel_record import Kernel, Tensor
from records.kernel_record_files import read_model_record, record_path
from records.kernel_types import describe_kernel
from records.measurement import Measurement
from runtimes import local_target
from utils import files
from utils.errors import UserError
from utils.paths import Workspace

pytestmark = pytest.mark.measuring

A, B, C = draw_kernels(3)
MADE_UP = {"anet": [A, B, A], "anet_large": [A, B, C], "bnet": [C]}


@pytest.fixture
def made_up(workspace: Workspace) -> Workspace:
    """A dataset without noise: `run` is a kernel's true time, `kernel_time` nine tenths of it, and every model takes 10 ms.
    Kernel C failed."""
    records = {name: chain(name, kernels) for name, kernels in MADE_UP.items()}
    for name, record in records.items():
        files.write_json(record_path(workspace, FLAVOUR, name), record)
    write_dataset(workspace, {kernel.id: kernel for kernel in (A, B, C)}, {}, dict.fromkeys(records, 10.0),
                  {0.0: 0.0, 0.5: 50.0}, failed=(C.id,), noise=0.0)
    return workspace


def test_sums_over_nodes_on_an_idle_device(made_up: Workspace) -> None:
    """A kernel counts as often as the model has it; the loaded rows of the made-up dataset do not count."""
    anet, large, bnet = model_labels(made_up, TARGET.name)
    assert [(model.model, model.nodes, model.measured_ms) for model in (anet, large, bnet)] == [
        ("anet", 3, 10.0), ("anet_large", 3, 10.0), ("bnet", 1, 10.0)]
    assert list(anet.labels) == ["run", "kernel_time"]  # what nobody measured is no label
    sum_ms = 2 * true_ms(A) + true_ms(B)
    assert anet.labels["run"].sum_ms == pytest.approx(sum_ms)
    assert anet.labels["run"].ratio == pytest.approx(sum_ms / 10)
    assert anet.labels["kernel_time"].sum_ms == pytest.approx(0.9 * sum_ms)
    assert anet.labels["run"].lacking == 0
    assert anet.labels["run"].in_model_ms is None
    assert (large.labels["run"].sum_ms, large.labels["run"].lacking) == (pytest.approx(true_ms(A) + true_ms(B)), 1)
    assert (bnet.labels["run"].sum_ms, bnet.labels["run"].lacking) == (0.0, 1)


def test_only_models_with_all_kernels_count_for_a_label(made_up: Workspace) -> None:
    models = model_labels(made_up, TARGET.name)
    run, kernel_time = summaries(models, "cpu")
    assert (run.label, run.models, run.median, run.least, run.most) == (
        "run", 1, *(pytest.approx(models[0].labels["run"].ratio),) * 3)
    assert kernel_time.median == pytest.approx(0.9 * (run.median or 0.0))
    assert [summary.median for summary in summaries(models[2:], "cpu")] == [None, None]
    twice = models[0].model_copy(update={"labels": {
        name: label.model_copy(update={"ratio": 3 * label.ratio}) for name, label in models[0].labels.items()}})
    wide = summaries([models[0], twice], "cpu")[0]
    assert (wide.median, wide.least, wide.most) == tuple(pytest.approx(n * models[0].labels["run"].ratio) for n in (2, 1, 3))


def test_models_by_name_or_beginning(made_up: Workspace) -> None:
    assert [model.model for model in model_labels(made_up, TARGET.name, ["anet"])] == ["anet", "anet_large"]
    assert [model.model for model in model_labels(made_up, TARGET.name, ["bnet", "anet_l"])] == ["anet_large", "bnet"]
    with pytest.raises(UserError, match=r"--model znet: no model .*model_latency\.csv.*it holds: anet, anet_large, bnet"):
        model_labels(made_up, TARGET.name, ["anet", "znet"])


def test_a_model_without_a_record_is_named(made_up: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    record_path(made_up, FLAVOUR, "bnet").unlink()
    assert [model.model for model in model_labels(made_up, TARGET.name)] == ["anet", "anet_large"]
    assert "bnet: measured, but has no record" in caplog.text
    with pytest.raises(UserError, match="no model that was measured idle and has a kernel record"):
        model_labels(made_up, TARGET.name, ["bnet"])


def view() -> Kernel:
    """A reshape, which moves no data."""
    return describe_kernel("Reshape", "", 14, {}, [A.inputs[0]], [Tensor(dtype="float32", shape=(A.inputs[0].elements,))])


def measurement(kernel: Kernel, label: str, context: str, *samples_ms: float, status: str = "ok") -> Measurement:
    place = context if context in ("alone", "carrier") else "in_model"
    return Measurement.model_validate({"subject": "kernel", "id": kernel.id, "label": label, "context": context, "place": place,
                                       "samples_ms": samples_ms, "status": status})


def test_a_gpu_s_views_and_what_was_measured_in_the_model() -> None:
    """Times as a GPU's dataset holds them, made up: the view needs no label `gpu`; C has that label, but no `node_span`."""
    reshape = view()
    assert not reshape.moves_data
    record = chain("net", [A, reshape, B, C])
    times = {"node_span": {A.id: 1.0, reshape.id: 0.25, B.id: 2.0}, "gpu": {A.id: 0.5, B.id: 1.5, C.id: 0.0}}
    within = {"node_span": {A.id: 1.5, reshape.id: 0.5, B.id: 2.5, C.id: 0.5}}
    labels = add_up(record, 4.0, 2.5, times, within).labels
    assert (labels["gpu"].sum_ms, labels["gpu"].ratio, labels["gpu"].lacking, labels["gpu"].in_model_ms) == (2.0, 0.5, 0, 2.5)
    assert (labels["node_span"].sum_ms, labels["node_span"].lacking, labels["node_span"].in_model_ms) == (3.25, 1, 5.0)
    assert add_up(record, 4.0, None, times, {"node_span": {A.id: 1.5}}).labels["node_span"].in_model_ms is None
    cells = model_row(add_up(record, 4.0, 2.5, times, within), ["node_span", "gpu"])
    assert {name: cell for name, cell in cells.items() if "(ms)" in name} == {
        "measured (ms)": 4.0, "Σ node_span (ms)": "3.25 (81%), 1 lack", "node_span in the model (ms)": "5 (125%)",
        "Σ gpu (ms)": "2 (50%)", "gpu in the model (ms)": "2.5 (62%)"}
    about = {summary.label: summary for summary in summaries([add_up(record, 4.0, 2.5, times, within)], "cuda")}
    assert (about["gpu"].overhead, about["gpu"].models, about["node_span"].models) == ("no", 1, 0)


def test_in_model_times_are_those_of_the_model_on_an_idle_device() -> None:
    """A made-up journal: neither a carrier's, nor another model's, nor those under load, nor what failed."""
    measurements = (
        measurement(A, "kernel_time", "net", 1.0, 3.0, 2.0), measurement(A, "kernel_time", "net", 5.0),
        measurement(A, "kernel_time", "carrier", 9.0), measurement(A, "run", "alone", 9.0),
        measurement(B, "kernel_time", "other", 7.0), measurement(B, "kernel_time", "net", status="failed"))
    blocks = [Block(level=level, key="", background={}, during={}, canary_before_ms=1.0, canary_after_ms=1.0,
                            attempts=1, machine="m", measurements=of_level)
              for level, of_level in ((0.0, measurements), (0.5, (measurement(A, "kernel_time", "net", 50.0),) * 9))]
    assert in_model_times(blocks) == {"net": {"kernel_time": {A.id: 2.5}}, "other": {"kernel_time": {B.id: 7.0}}}


@pytest.mark.slow
def test_a_real_collection(workspace: Workspace) -> None:
    """Three labels of a CPU. With one model, what counts of its kernels was measured in it, so both sums are equal."""
    flavour = build_workspace(workspace, {"anet_b1": small_model()})
    config = {"device": "cpu", "levels": [0.0], "window_s": 0.2, "attempts": 1, "patience_s": 0,
              "kernel": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.005, "least_runs": 3, "most_runs": 5},
              "model": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.05, "least_runs": 4, "most_runs": 10}}
    collect(workspace, CollectorConfig.model_validate(config))
    target = local_target("cpu").name
    command = ("benchmark/label_table.py", "--workspace", workspace.root)
    tables = json.loads(printed(*command, "--json"))
    (model,) = tables[target]["models"]
    nodes = read_model_record(record_path(workspace, flavour, "anet_b1")).nodes
    table = read_kernel_table(workspace, target).set_index("Kernel_ID")
    assert (model["model"], model["nodes"]) == ("anet_b1", len(nodes))
    assert model["measured_ms"] == read_model_table(workspace, target)["median_ms"][0]
    assert list(model["labels"]) == ["run", "kernel_time", "node_span"]
    for label, column in (("run", "run_median_ms"), ("kernel_time", "kernel_time_ms"), ("node_span", "node_span_ms")):
        sums = model["labels"][label]
        assert sums["lacking"] == 0
        assert sums["sum_ms"] == pytest.approx(sum(table[column][node.kernel_id] for node in nodes))
        assert sums["ratio"] == pytest.approx(sums["sum_ms"] / model["measured_ms"])
        assert sums["in_model_ms"] == (None if label == "run" else pytest.approx(sums["sum_ms"], rel=1e-3))
    assert [row["label"] for row in tables[target]["labels"]] == list(model["labels"])

    shown = printed(*command, "--target", target, "--model", "anet")
    models, labels = (part.splitlines() for part in shown.split("\n\n"))
    assert models[0].split("\t") == ["model", "nodes", "measured (ms)", "Σ run (ms)", "Σ kernel_time (ms)",
                                     "kernel_time in the model (ms)", "Σ node_span (ms)", "node_span in the model (ms)"]
    assert (len(models), len(labels)) == (2, 4)
    assert labels[1].split("\t")[:2] == ["run", "wall time of the kernel's own session"]


def test_without_a_dataset(workspace: Workspace) -> None:
    for options in ([], ["--target", "gpu-z"]):
        done = run_script("benchmark/label_table.py", "--workspace", workspace.root, *options)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
        assert "python benchmark/collector.py" in done.stderr
