"""Reported uncertainty: what makes a rough estimate, what only widens an interval, and impossible answers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from command import run_script
from forgotten_types import forget
from onnx import numpy_helper
from trained_workspace import METRIC, conv_net

from hase.inference import Predictor, predict
from hase.inference.prediction.answers import Prediction, widen_to_smaller_sizes
from hase.inference.prediction.uncertainty import (
    BEYOND_POWER,
    FAR_OFF,
    shortness,
    source_warnings,
)
from hase.learned.composition.fitted import read_composition
from hase.learned.composition.intervals import Sources
from hase.runtimes import local_target
from hase.utils.cli import EXIT_ROUGH
from hase.utils.paths import SHIPPED, Workspace

H200 = "nvidia-h200-cuda-ort1.31-all"
TARGET = local_target("cpu").name


def parsed(shape: str, nodes: str, made: str = "", **weights: np.ndarray) -> onnx.ModelProto:
    """A model of nodes in ONNX's own notation, from x to y, which is of the same shape or as `made` says."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> g (float[{shape}] x) => (float[{made or shape}] y) {{ {nodes} }}')
    model.graph.initializer.extend(numpy_helper.from_array(of.astype(np.float32), name) for name, of in weights.items())
    return model


def recurrent(path: Path, hidden: int = 64) -> Path:
    """A GRU over forty steps, and a Flatten that costs nothing."""
    onnx.save(parsed(
        "40, 1, 32", f"s = GRU <hidden_size = {hidden}, linear_before_reset = 1> (x, w, r) f = Flatten(s) y = Relu(f)",
        f"40, {hidden}", w=np.zeros((1, 3 * hidden, 32)), r=np.zeros((1, 3 * hidden, hidden))), path)
    return path


@pytest.fixture(scope="module")
def workspace(trained_workspace: Workspace) -> Workspace:
    return trained_workspace


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("inference/predict_model_latency.py", *arguments)


@pytest.mark.slow
def test_an_operator_that_was_never_measured_is_a_rough_estimate(tmp_path: Path) -> None:
    forget(Workspace(tmp_path), H200, "LRN")
    onnx.save(parsed("32, 64, 56, 56", "n = LRN <size = 5> (x) f = Identity(n) y = Relu(f)"), tmp_path / "lrn.onnx")
    options = ("--workspace", tmp_path, "--model", tmp_path / "lrn.onnx", "--target", H200)
    done = command(*options, "--json", "--fail-on-rough")
    assert done.returncode == EXIT_ROUGH, done.stderr
    (answer,) = json.loads(done.stdout)
    assert (answer["rough_estimate"], answer["estimated_operators"]) == (True, ["LRN"])
    low, high = answer["interval_ms"]
    assert low < answer["latency_ms"] < high / 1.5
    assert "rough estimate: LRN: never measured" in done.stderr
    heading, row = (line.split("\t") for line in command(*options).stdout.splitlines()[:2])
    assert row[heading.index("rough estimate")] == "yes"


@pytest.mark.slow
def test_known_models_are_not_marked(torch_models: dict[str, Path]) -> None:
    for prediction in Predictor(target=H200, strict=True).predict_many(list(torch_models.values())):
        assert (prediction.rough_estimate, prediction.estimated_operators, prediction.doubtful_operators) == (False, (), ())


@pytest.mark.slow
def test_a_small_share_only_widens(workspace: Workspace) -> None:
    """And where this machine is the target, the command that measures it is said."""
    plain, path = (conv_net(workspace.root / f"erf{extra}.onnx", channels=64, size=32, extra=extra) for extra in ("", "Erf"))
    done = command("--workspace", workspace.root, "--model", path, "--target", TARGET, "--json")
    assert (f"python inference/predict_model_latency.py --model {path} --measure-missing --target {TARGET} "
            f"--workspace {workspace.root}") in done.stderr
    odd, usual = Prediction.model_validate(json.loads(done.stdout)[0]), predict(plain, target=TARGET, workspace=workspace)
    assert (odd.estimated_operators, odd.kernel_count["estimated"]) == (("Erf",), 1)
    assert 0 < odd.time_share["estimated"] < 1
    assert odd.interval_ms[1] / odd.interval_ms[0] > usual.interval_ms[1] / usual.interval_ms[0]


@pytest.mark.slow
def test_sizes_beyond_the_data_widen(workspace: Workspace) -> None:
    within, beyond = (predict(conv_net(workspace.root / f"wide{channels}.onnx", channels=channels), target=TARGET,
                              workspace=workspace, strict=True) for channels in (40, 1024))
    assert (within.rough_estimate, beyond.rough_estimate, beyond.estimated_operators) == (False, True, ())
    assert not any("beyond what was measured" in text for text in within.warnings)
    assert any("far beyond what was measured" in text for text in beyond.warnings)
    assert any("of its kernels, " in text and "are beyond what was measured" in text for text in beyond.warnings)
    assert beyond.interval_ms[1] / beyond.latency_ms > within.interval_ms[1] / within.latency_ms


@pytest.mark.slow
def test_a_larger_batch_that_takes_less_is_in_doubt(workspace: Workspace) -> None:
    single, double, four = (predict("dynnet.onnx", dims={"batch": batch}, target=TARGET, workspace=workspace, strict=True)
                            for batch in (1, 2, 4))
    sunk = double.model_copy(update={"latency_ms": 0.5 * single.latency_ms,
                                     "interval_ms": (0.4 * single.latency_ms, 0.6 * single.latency_ms)})
    first, widened, last = widen_to_smaller_sizes([four, sunk, single])
    assert (first, last, widened.latency_ms) == (four, single, sunk.latency_ms)
    assert widened.interval_ms == (sunk.interval_ms[0], single.interval_ms[1])
    assert "less than dynnet@batch=1,dynamic" in widened.warnings[-1]
    measured = [one.model_copy(update={"time_share": single.time_share | {"measured": 1.0}}) for one in (single, sunk)]
    assert widen_to_smaller_sizes(measured) == measured


def test_a_model_that_does_not_fit_has_a_warning() -> None:
    """An H200 has no memory for input and output of 125 GiB each. Those of 50 GiB may run, since the arena takes smaller
    regions where it must; but their peak is more than an H200 has."""
    huge = parsed("batch, 8, 2048, 2048", "y = Sigmoid(x)")
    fitting, doubtful, too_large = (predict(huge, dims={"batch": batch}, target=H200) for batch in (100, 400, 1000))
    for prediction in (fitting, doubtful, too_large):
        assert prediction.device_memory_mib == pytest.approx(143771)
        assert prediction.fits_memory == (prediction.peak_memory_mib <= 143771)
        assert prediction.latency_ms >= prediction.kernel_sum_ms > 0.1  # though the fitted lead of a run is negative
    assert (fitting.fits_memory, doubtful.fits_memory, too_large.fits_memory) == (True, False, False)
    assert any("it can't run there: it needs at least 250.1 GiB" in text for text in too_large.warnings)
    assert any("it does not fit in the memory: its peak is 178.1 GiB, and the device has 140.4 GiB" in text and
               "100.1 GiB at least" in text for text in doubtful.warnings)
    assert not any("memory" in text for text in fitting.warnings)


def test_a_model_shorter_than_any_of_the_fit_is_a_rough_estimate() -> None:
    """The cost of a run besides its nodes was learned from models of at least 0.23 ms; two Adds take a tenth of that."""
    tiny, net = (predict(parsed("8, 8", "t0 = Identity(x) " + " ".join(f"t{i + 1} = Add(t{i}, x)" for i in range(count)) +
                                f" y = Identity(t{count})"), target=H200) for count in (2, 60))
    used = read_composition(SHIPPED / H200)
    shortest_ms = min(model.predicted_ms for model in used.models)
    assert tiny.rough_estimate
    assert any("shorter than any model from which the cost of a run was learned" in text for text in tiny.warnings)
    assert tiny.interval_ms[1] / tiny.latency_ms > (shortest_ms / tiny.latency_ms) ** BEYOND_POWER
    assert not net.rough_estimate
    assert shortness(used, np.array([0.5, 2.0, 0.0]) * shortest_ms).tolist() == [2.0, 1.0, 1.0]


def test_a_kernel_near_a_cliff_makes_a_rough_estimate() -> None:
    """The depthwise convolution of a Conformer, for which cuDNN launches two kernels or hundreds: neighbours were far off. A
    usual one is predicted well."""
    near, usual = (predict(parsed(shape, f"c = Conv <group = {groups}, pads = {pads}> (x, w) y = Relu(c)", w=np.ones(weights)),
                           target=H200, host_pace=1.0, strict=True) for shape, groups, pads, weights in (
        ("1, 144, 99", 144, [15, 15], (144, 1, 31)), ("1, 64, 56, 56", 1, [1] * 4, (64, 64, 3, 3))))
    assert (near.rough_estimate, usual.rough_estimate) == (True, False)
    assert any("rest on kernels like these were off by" in text for text in near.warnings)
    assert near.interval_ms[1] / near.interval_ms[0] > 2 * usual.interval_ms[1] / usual.interval_ms[0]


def test_a_form_that_was_never_measured_makes_a_rough_estimate() -> None:
    """Relus of floats were measured at all ranks to 6. Beyond a tenth of the latency one of rank 7 marks an answer."""
    wide, usual = (parsed(shape, "y = Relu(x)") for shape in ("4,4,4,4,4,128,1024", "256,512,1024"))
    new, known = (predict(model, target=H200, host_pace=1.0) for model in (wide, usual))
    assert (new.rough_estimate, known.rough_estimate) == (True, False)
    assert any(text.startswith("rough estimate: kernels of forms that were never measured take ") for text in new.warnings)
    assert new.interval_ms[1] / new.latency_ms > 1.1 * known.interval_ms[1] / known.latency_ms
    (brief,) = Predictor(target=H200).predict_briefly([wide], host_pace=1.0)
    assert (brief.rough_estimate, brief.interval_ms) == (True, pytest.approx(new.interval_ms))
    assert source_warnings(Sources(other_form=0.1, doubt=FAR_OFF - 0.001)) == ()


@pytest.mark.slow
def test_an_interval_under_load_is_wider(workspace: Workspace) -> None:
    loaded = predict("anet_c16.onnx", target=TARGET, workspace=workspace, load={METRIC: 0.5})
    assert loaded.interval_ms[0] < loaded.latency_ms < loaded.interval_ms[1]
    net = parsed("1, 64, 56, 56", "c = Conv <pads = [1, 1, 1, 1]> (x, w) y = Relu(c)", w=np.ones((64, 64, 3, 3)))
    idle, beside = (predict(net, target=H200, load=load) for load in ({}, {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.5}))
    widths = [prediction.interval_ms[1] / prediction.latency_ms for prediction in (idle, beside)]
    assert 1.0 < widths[0] < widths[1]
