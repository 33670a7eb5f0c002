"""Typing errors of new users: each script reports one in a single line and exits with code 2 or 1 before it works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from command import run_script
from conftest import small_model

from hase.inference import predict
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

PREDICT = "inference/predict_model_latency.py --model dyn.onnx"
H200 = f"{PREDICT} --target h200"
LONG = "x" * 300  # no file may have such a name
CASES = [  # the command, its exit code, and a part of the line; {here} is a workspace with dyn.onnx, a dynamic model
    (f"{PREDICT} --modle x", 2, "unknown option --modle; did you mean --model?"),
    (f"{PREDICT} --top -1", 2, "--top: '-1' is not a whole number, 0 or more"),
    ("inference/load_curve.py --model dyn.onnx --model dyn.onnx", 2, "--model is given twice; this command takes one"),
    (f"{H200} --slo-ms 5 --slo-percentile 0.95", 2, "0.95 is not between 1 and 100; write 95 for the 95th percentile"),
    (f"{PREDICT} --trace {{here}}/no/such/trace.json", 2, "--trace: {here}/no/such/trace.json: no folder {here}/no/such"),
    (f"{PREDICT} --target h20x", 1, "target h20x: no predictors for it"),
    ("inference/load_curve.py --target h200 --model {here}/model_zoo/models", 1, "name one of its models: dyn"),
    ("inference/predict_model_latency.py --model {here}/logs", 1, "no .onnx models in this folder"),
    ("inference/predict_model_latency.py --model {here}/text.onnx --target h200", 1, "text.onnx: not an ONNX model"),
    ("inference/predict_model_latency.py --model {here}/pointer.onnx --target h200", 1,
     "{here}/pointer.onnx: not an ONNX model: this is a git-lfs pointer in place of the model; fetch the model with: git lfs"),
    ("inference/predict_model_latency.py --model {here}/page.onnx --target h200", 1, "a web page, not the model behind it"),
    ("inference/predict_model_latency.py --model {here}/net.ort --target h200", 1, "ONNX Runtime's own format (.ort); give"),
    ("inference/predict_model_latency.py --model {here}/net.npz --target h200", 1, "this is a ZIP archive; unpack it"),
    ("inference/predict_model_latency.py --model {here}/empty.onnx --target h200", 1, "this is an empty file"),
    (f"inference/predict_model_latency.py --target h200 --model {LONG}", 1, "no such model"),
    (f"{H200} --config {{here}}/circle.yaml", 1, "links lead in a circle"),
    (f"{H200} --dim batch=1,2,height=224", 1, "repeat --dim for each dimension: --dim batch=1,2 --dim height=224"),
    (f"{H200} --dim batch=0", 1, "with batch=0 every output is empty, so there is nothing to run"),
    (f"{H200} --dim size=3", 1, "no dynamic dimension size; its dynamic dimensions are batch"),
    (f"{H200} --config {{here}}/none.yaml", 1, "none.yaml: no such config file"),
    ("inference/load_curve.py --model dyn.onnx --target h200 --dim batch=1,2", 1, "takes one size, not 2"),
    ("inference/sharing_advice.py", 2, "no models; give --model, --rate and --slo-ms for each, or --set FILE"),
    ("inference/sharing_advice.py --model dyn.onnx --rate 5", 2, "1 × --model, 1 × --rate, 0 × --slo-ms"),
    ("inference/sharing_advice.py --set set.yaml --model dyn.onnx", 2, "--set names the models"),
    ("benchmark/metrics_exporter.py --port 70000", 2, "--port: '70000' is not a port"),
    ("benchmark/ort_kernel_runner.py --model dyn.onnx --budget-s nan", 2, "--budget-s: nan is not a positive number"),
    ("kernel_model/kernel_builder.py --record {here}/none.json", 1, "none.json: no such file"),
    ("training/train_kernel_model.py --target none", 1, "none"),
    ("training/held_out.py --by family --level tuned", 2, "--level goes with --by setting"),
    ("training/fit_sharing.py --target none --beside {here}/no", 1, "no"),
    ("evaluator.py dyn.onnx --target h200", 1, "made: python benchmark/collector.py"),
    ("evaluator.py --recorded", 1, "no dataset of target nvidia-h200-cuda-ort1.31-all to compare with; unpack"),
    (f"{PREDICT} --host-pace fast", 2, "--host-pace: 'fast' is neither a ratio, such as 1.15, nor the word measure"),
    (f"{PREDICT} --host-pace 1.1 --machine machine.json", 2, "not allowed with argument"),
    (f"{PREDICT} --target h200 --host-pace 115", 1, "host pace 115: a ratio to the usual pace is expected"),
    (f"{PREDICT} --target h200 --host-pace measure", 1, "has to be measured on the machine in question"),
    (f"{PREDICT} --target cpu-", 1, "it is this machine: have the model's kernels measured, in seconds, with --measure"),
    ("benchmark/collector.py", 1, "index.json: no such file; make it with: python ort_analysis/fusion_detector.py"),
    ("model_zoo/pool_exporter.py --model seresnet50", 2, "--model needs one --collection"),
    pytest.param("model_zoo/torchvision_exporter.py --model resnet81", 1, "resnet81", marks=pytest.mark.slow),
    ("model_zoo/torchvision_exporter.py --batch-size -1", 1, "batch_sizes"),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here")
    files.write_bytes(folder / "model_zoo" / "models" / "dyn.onnx", small_model(batch="batch").SerializeToString())
    (folder / "logs").mkdir()
    (folder / "circle.yaml").symlink_to(folder / "circle.yaml")
    for name in ("text.onnx", "text.json"):
        (folder / name).write_text("just a text\n")
    (folder / "empty.onnx").touch()
    (folder / "any.json").write_text('{"a": 1}')
    (folder / "pointer.onnx").write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 46828\n")
    (folder / "page.onnx").write_text("\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n")
    np.savez(folder / "net.npz", x=np.zeros(3))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "net.ort")
    onnxruntime.InferenceSession(small_model().SerializeToString(), options, providers=["CPUExecutionProvider"])
    return folder


@pytest.mark.parametrize(("command", "code", "line"), CASES)
def test_the_error_is_a_single_line(command: str, code: int, line: str, here: Path) -> None:
    done = run_script(*command.format(here=here).split(), "--workspace", here, "--quiet")
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (code, "", 1), done.stderr
    assert lines[0].startswith("error: ")
    assert line.format(here=here) in lines[0]


@pytest.mark.slow
def test_a_model_of_pytorch(here: Path) -> None:
    import torch

    torch.save({"weight": torch.zeros(3)}, here / "net.pt")
    test_the_error_is_a_single_line("inference/predict_model_latency.py --model {here}/net.pt --target h200", 1,
                                    "a model of PyTorch (.pt); export it with", here)


def test_objects_that_are_no_model(tmp_path: Path) -> None:
    nothing: Any = [1]
    with pytest.raises(UserError, match="list is not a model: give the path of an ONNX file"):
        predict(nothing, target="h200")
    with pytest.raises(UserError, match="a folder, not a model"):
        predict(tmp_path, target="h200", workspace=Workspace(tmp_path))
