"""A prediction without training: the kernels are measured in the model and composed with stated constants."""

from __future__ import annotations

import pytest
from trained_workspace import conv_net

from hase.inference import measure_missing, predict
from hase.learned.kernels.predictors import read_predictors
from hase.ort_analysis.graph.analysis import analyze
from hase.records.dataset_files import read_journal
from hase.records.dataset_tables import read_kernel_table
from hase.records.measurement import IN_MODEL_LABELS
from hase.utils.fingerprint import has_cuda
from hase.utils.paths import Workspace
from tests.inference.test_missing_kernels import CONFIG, TARGET, command
from tests.inference.test_uncertainty import recurrent

pytestmark = [pytest.mark.measuring, pytest.mark.slow, pytest.mark.usefixtures("canary")]


def test_its_kernels_are_measured_in_the_model(workspace: Workspace) -> None:
    """A convolutional network, then a recurrent one. Both keep their kernels; those of a third model are estimates."""
    paths = [conv_net(workspace.root / "net.onnx", channels=8, size=32, extra="Sinh"), recurrent(workspace.root / "gru.onnx")]
    for path in paths:
        record = analyze(path, "cpu")
        filled = measure_missing(path, target=TARGET, workspace=workspace, config=CONFIG)
        assert (filled.measured, filled.left) == (len(record.kernels), ())
        prediction = predict(path, target=TARGET, workspace=workspace)
        assert prediction.composition.assumed
        assert prediction.time_share["measured"] == pytest.approx(1.0)
        assert prediction.latency_ms == pytest.approx(prediction.kernel_sum_ms)
        assert prediction.interval_ms == pytest.approx((0.75 * prediction.latency_ms, 1.3 * prediction.latency_ms))
        assert any("no model was ever measured on this machine" in text for text in prediction.warnings)
    measurements = [m for block in read_journal(workspace.dataset(TARGET)) for m in block.measurements]
    assert {(m.subject, m.context) for m in measurements} == {("kernel", "net"), ("kernel", "gru")}
    table = read_kernel_table(workspace, TARGET).set_index("OpType")["Inputs"]
    assert table[table.notna()].index.tolist() == ["Sinh"]  # nothing but its time depends on values
    unmeasured = predict(conv_net(workspace.root / "other.onnx", channels=24, size=20), target=TARGET, workspace=workspace)
    assert "Conv_Relu" in unmeasured.estimated_operators

    # both nodes of a kernel are counted: each sample is a mean over its nodes, so the median times their number is their time
    net = analyze(paths[0], "cpu")
    assert len(net.kernels) < len(net.nodes)
    samples = {m.id: len(m.samples_ms) for m in measurements if (m.context, m.label) == ("net", "unprofiled")}
    assert set(samples) == set(net.kernels)
    assert len(set(samples.values())) == 1
    assert set(read_predictors(workspace.predictors(TARGET)).measured[net.nodes[0].kernel_id]) == set(IN_MODEL_LABELS)


@pytest.mark.parametrize("static", [False, True])
def test_sizes_of_a_dynamic_model(workspace: Workspace, static: bool) -> None:
    path, sizes = conv_net(workspace.root / "net.onnx", batch="batch", channels=8), [{"batch": 2}, {"batch": 3}]
    assert measure_missing(path, sizes, target=TARGET, workspace=workspace, config=CONFIG, static=static).left == ()
    for dims in sizes:
        prediction = predict(path, dims=dims, target=TARGET, workspace=workspace, static=static)
        assert prediction.time_share["measured"] == pytest.approx(1.0)
    contexts = {m.context for block in read_journal(workspace.dataset(TARGET)) for m in block.measurements}
    assert all(context.startswith("net@batch=") for context in contexts)


@pytest.mark.skipif(has_cuda(), reason="this machine's target is its GPU")
def test_the_command_in_a_fresh_workspace(workspace: Workspace) -> None:
    path = conv_net(workspace.root / "net.onnx", channels=16)
    arguments = ("inference/predict_model_latency.py", workspace, "--model", path)
    without = command(*arguments)
    assert without.returncode == 0  # a prediction for the only target that is shipped
    assert "the only target that comes with Hase (--measure-missing has" in without.stderr
    done = command(*arguments, "--measure-missing")
    assert done.returncode == 0, done.stderr
    assert "nothing was learned of this machine" in done.stderr
    assert done.stdout.splitlines()[1].split("\t")[0] == "net"
    assert command(*arguments).stdout.splitlines()[:2] == done.stdout.splitlines()[:2]
