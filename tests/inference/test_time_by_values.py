"""Operators whose time depends on values: measured with realistic inputs or the user's, and marked where they were not."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from command import run_script
from trained_workspace import conv_net

from hase.inference import measure_missing, predict
from hase.inference.evaluation.evaluate import MeasuringPlan, evaluate
from hase.inference.library.missing_kernels import kernels_by_values
from hase.inference.prediction.targets import fitted_for
from hase.inference.prediction.uncertainty import BY_VALUES, Span, kernel_uncertainties
from hase.learned.kernels.measured import measured_times, write_measured
from hase.learned.kernels.sidecar import read_measured, read_sidecar, write_sidecar
from hase.ort_analysis.graph.analysis import analyze
from hase.records.dataset_files import DatasetKernel, journal_path, read_header, read_journal
from hase.records.dataset_tables import kernel_rows, read_kernel_table
from hase.records.dataset_writer import write_tables
from hase.records.kernel_record import Kernel
from hase.records.measurement import Block, InputValues, Measurement, Placement
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import SHIPPED, Workspace
from tests.benchmark.test_inputs import COLUMNS, save, tree_model
from tests.inference.test_missing_kernels import CONFIG, TARGET

H200 = "nvidia-h200-cuda-ort1.31-all"
TREES = "TreeEnsembleRegressor"


@pytest.fixture
def sorting() -> Kernel:
    """A TopK."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[8, 100] x) => (float[8, 5] y, int64[8, 5] places) '
        "<int64[1] k = {5}> { y, places = TopK(x, k) }")
    [kernel] = analyze(model, "cpu").kernels.values()
    return kernel


def test_better_inputs_win(sorting: Kernel) -> None:
    """In the same place; a time in a model is better than one in a carrier, whatever the inputs."""
    def block(time_ms: float, inputs: InputValues, place: Placement = "in_model") -> Block:
        measured = Measurement(subject="kernel", id=sorting.id, label="node_span", context=place, place=place,
                               samples_ms=(time_ms,), inputs=inputs)
        return Block(level=0.0, key="k", background={}, during={}, canary_before_ms=1.0, canary_after_ms=1.0, attempts=1,
                     machine="here", measurements=(measured,))

    described = {sorting.id: DatasetKernel(kernel=sorting, models=("net",), groups=("net",))}
    old, made_up, given = block(1.0, ""), block(2.0, "standardised"), block(3.0, "given")
    for blocks, time_ms, inputs in (([old], 1.0, ""), ([made_up, old], 2.0, "node_span:standardised"),
                                    ([given, made_up, old], 3.0, "node_span:given"),
                                    ([block(4.0, "given", "carrier"), old], 1.0, "")):
        for order in (blocks, blocks[::-1]):
            [row] = kernel_rows(order, described)
            assert (row["node_span_ms"], row["Inputs"]) == (time_ms, inputs)
    assert "inputs" not in old.model_dump_json()


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["predicted", "measured", "estimated"])
def test_a_time_that_depends_on_values_is_uncertain(trained_workspace: Workspace, sorting: Kernel, origin: str) -> None:
    """On a CPU; the GPU's kernels are others."""
    fitted = fitted_for(trained_workspace, TARGET)
    [uncertainty] = kernel_uncertainties([sorting], [origin], fitted, "run").values()
    assert uncertainty.makes_rough
    assert uncertainty.reason == ("estimated" if origin == "estimated" else "by values")
    assert uncertainty.time.low <= BY_VALUES[0] + 1e-9
    assert uncertainty.time.high >= BY_VALUES[1] - 1e-9
    if origin == "measured":
        assert uncertainty.time == pytest.approx(Span(*BY_VALUES))
        on_gpu = fitted_for(Workspace(SHIPPED.parent.parent), H200)
        assert not kernel_uncertainties([sorting], [origin], on_gpu, "gpu")


def forget_inputs(workspace: Workspace) -> None:
    """Makes a dataset and its look-up as old as if inputs had not been recorded yet."""
    folder, predictors = workspace.dataset(TARGET), workspace.predictors(TARGET)
    blocks = [block.model_copy(update={"measurements": tuple(m.model_copy(update={"inputs": ""}) for m in block.measurements)})
              for block in read_journal(folder)]
    files.write_text(journal_path(folder), "".join(f"{block.model_dump_json()}\n" for block in blocks))
    write_tables(folder, read_header(folder), blocks)
    sidecar = read_sidecar(predictors)
    assert read_measured(predictors, sidecar).whole() != measured_times(workspace, TARGET)
    name, sha256 = write_measured(predictors, measured_times(workspace, TARGET))
    write_sidecar(predictors, sidecar.model_copy(update={"measured": name, "measured_sha256": sha256}))


@pytest.mark.measuring
@pytest.mark.slow
@pytest.mark.usefixtures("canary")
def test_trees_are_measured_with_realistic_rows_or_with_one_s_own(workspace: Workspace) -> None:
    path = tree_model(workspace.root / "trees.onnx", rows=256, scales=np.ones(COLUMNS), trees=50)
    zeros = save(workspace.root / "zeros.npz", {"x": np.zeros((256, COLUMNS))})

    record = analyze(path, "cpu")

    def doubtful() -> int:
        return len(kernels_by_values(fitted_for(workspace, TARGET), [record], given=False))

    assert measure_missing(path, target=TARGET, workspace=workspace, config=CONFIG).measured == 1
    by_default = predict(path, target=TARGET, workspace=workspace)
    assert (by_default.rough_estimate, by_default.doubtful_operators) == (False, ())
    assert set(read_kernel_table(workspace, TARGET)["Inputs"]) == {
        "kernel_time:standardised|node_span:standardised|unprofiled:standardised"}
    assert doubtful() == 0

    forget_inputs(workspace)
    old = predict(path, target=TARGET, workspace=workspace)
    assert (old.latency_ms, old.time_share["measured"]) == (by_default.latency_ms, 1.0)
    assert (old.rough_estimate, old.doubtful_operators) == (True, (TREES,))
    assert old.interval_ms[0] < by_default.interval_ms[0] < by_default.interval_ms[1] < old.interval_ms[1]
    [warning] = [text for text in old.warnings if TREES in text]
    assert warning.startswith(f"rough estimate: {TREES}: the time depends on the inputs' values, and was not measured with")
    assert doubtful() == 1

    assert measure_missing(path, target=TARGET, workspace=workspace, config=CONFIG, inputs=zeros).measured == 1
    with_zeros = predict(path, target=TARGET, workspace=workspace)
    assert with_zeros.latency_ms < 0.7 * by_default.latency_ms
    assert not with_zeros.rough_estimate
    assert "unprofiled:given" in read_kernel_table(workspace, TARGET)["Inputs"].iloc[0]
    assert doubtful() == 0  # the user's are the best
    [of_zeros] = evaluate(workspace, [path], target=TARGET, plan=MeasuringPlan(1, 0.05, 0.0, inputs=zeros)).comparisons
    assert of_zeros.measured_ms < 0.8 * by_default.latency_ms


@pytest.mark.slow
def test_inputs_that_do_not_fit_are_an_error_before_anything_is_measured(workspace: Workspace) -> None:
    path = conv_net(workspace.root / "net.onnx", channels=8)
    misshapen = save(workspace.root / "own.npz", {"x": np.zeros((1, 3))})
    with pytest.raises(UserError, match=r"own\.npz: x has shape \[1, 3\], and the model takes \[1, 8, 16, 16\]"):
        measure_missing(path, target=TARGET, workspace=workspace, config=CONFIG, inputs=misshapen)
    assert not read_journal(workspace.dataset(TARGET))
    with pytest.raises(UserError, match="a record can't be run; give the model file with --inputs"):
        measure_missing(analyze(path, "cpu"), target=TARGET, workspace=workspace, config=CONFIG, inputs=misshapen)


@pytest.mark.parametrize(("script", "options", "message"), [
    ("inference/predict_model_latency.py", ["--model", "net.onnx", "--inputs", "own.npz"], "--measure-missing measures with"),
    ("evaluator.py", ["net.onnx", "bnet.onnx", "--inputs", "own.npz"], "those of one MODEL"),
    ("evaluator.py", ["net.onnx", "--recorded", "--inputs", "own.npz"], "those of one MODEL"),
])
def test_inputs_that_nothing_would_read_are_refused(script: str, options: list[str], message: str) -> None:
    done = run_script(script, *options)
    assert done.returncode == 2
    assert message in done.stderr
