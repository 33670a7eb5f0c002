"""The exporter: the names, contents and outputs of its files; resuming; and failures, which cost only themselves."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
from command import run_script

from hase.model_zoo.exporting import onnx_export
from hase.model_zoo.exporting.onnx_export import Exporter, ExportProcess, check_outputs, trace
from hase.model_zoo.exporting.torch_models import build, reference
from hase.model_zoo.exporting.zoo_config import Export, ZooConfig
from hase.model_zoo.torchvision_exporter import export_all
from hase.runtimes import flavour_of
from hase.utils import fingerprint
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, Workspace, model_files

MODEL, SIZE = "squeezenet1_1", (64, 96)
FLAVOUR = flavour_of("cpu").name
FIXED = f"{MODEL}_fp32_b2_64x96"
Exported = tuple[Workspace, list[dict[str, Any]]]


def run_exporter(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "model_zoo/torchvision_exporter.py", "--workspace", str(root), "--device", "cpu", "--json", *options],
        cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A workspace with one small model, at a batch of 2 and with open sizes; and the exporter's report."""
    root = tmp_path_factory.mktemp("exported")
    done = run_exporter(root, "--model", MODEL, "--image-size", "64x96", "--batch-size", "2")
    assert (done.returncode, "leaked" in done.stderr) == (0, False), done.stderr  # semaphores of a killed process
    return Workspace(root), json.loads(done.stdout)


def outputs(path: Path, images: np.ndarray) -> np.ndarray:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"input": images})[0]


@pytest.mark.slow
def test_every_file_is_reported_and_computes_what_torch_does(exported: Exported) -> None:
    """Open sizes are any size. Convolutions keep their bias, as in a trained model, where the batch normalisation folded into a
    convolution leaves one."""
    workspace, rows = exported
    names = [f"{MODEL}.onnx", f"{FIXED}.onnx", f"{FIXED}.{FLAVOUR}.ort.onnx"]
    assert [Path(row["file"]).name for row in rows] == names
    assert {path.name for path in workspace.models.iterdir()} == set(names)
    assert all(row["status"] == "written" and row["difference"] < 1e-4 for row in rows)
    assert [path.stem for path in model_files([workspace.models])] == [MODEL, FIXED]
    model = build(MODEL, "fp32", SIZE)
    for name, shape in zip(names, ((3, 3, 80, 112), (2, 3, *SIZE), (2, 3, *SIZE)), strict=True):
        images = np.random.default_rng(5).standard_normal(shape, dtype=np.float32)
        np.testing.assert_allclose(outputs(workspace.models / name, images), reference(model, images, "cpu"), atol=1e-4)
    dims = onnx.load(workspace.models / names[0]).graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["batch", 3, "height", "width"]
    fixed = workspace.models / names[1]
    assert {len(node.input) for node in onnx.load(fixed).graph.node if node.op_type == "Conv"} == {3}
    with pytest.raises(UserError, match="differ from torch's by"):
        check_outputs(fixed, "cpu", "all", images, outputs(fixed, images) * 1.01, "fp32")


@pytest.mark.slow
def test_metadata_describes_a_file(exported: Exported) -> None:
    workspace, _ = exported
    plain, optimized = ({prop.key: prop.value for prop in onnx.load(workspace.models / f"{FIXED}{suffix}").metadata_props}
                        for suffix in (".onnx", f".{FLAVOUR}.ort.onnx"))
    assert (plain["hase.model"], plain["hase.dtype"], plain["hase.batch"], plain["hase.size"]) == (MODEL, "fp32", "2", "64x96")
    assert json.loads(optimized["hase.flavour"]) == flavour_of("cpu").model_dump()
    assert optimized["hase.target"].endswith(FLAVOUR)
    assert plain.items() <= optimized.items()
    assert b"stack_trace" not in (workspace.models / f"{MODEL}.onnx").read_bytes()


@pytest.mark.slow
def test_a_second_run_keeps_intact_files_and_a_failure_costs_only_itself(exported: Exported) -> None:
    workspace, _ = exported
    torn = workspace.models / f"{FIXED}.onnx"
    before = {path.name: path.stat().st_mtime_ns for path in workspace.models.iterdir()}
    torn.write_bytes(torn.read_bytes()[:100_000])
    done = run_script("model_zoo/torchvision_exporter.py", "--workspace", workspace.root, "--device", "cpu", "--json",
                      "--model", "vit_b_32", "--model", MODEL, "--image-size", "64x96", "--batch-size", "2")
    assert done.returncode == 1
    status = {Path(row["file"]).name: row["status"] for row in json.loads(done.stdout)}
    remade = {f"{FIXED}.onnx", f"{FIXED}.{FLAVOUR}.ort.onnx"}
    assert {name for name, outcome in status.items() if outcome == "written"} == remade
    assert {name for name, outcome in status.items() if outcome == "failed"} == {"vit_b_32.onnx", "vit_b_32_fp32_b2_64x96.onnx"}
    assert "vit_b_32_fp32_b2_64x96: vit_b_32 takes square images" in done.stderr
    after = {path.name: path.stat().st_mtime_ns for path in workspace.models.iterdir()}
    assert {name for name in after if after[name] != before[name]} == remade


@pytest.mark.slow
def test_a_process_that_dies_is_an_error_and_is_replaced(exported: Exported) -> None:
    """The next one makes the files anew, since that is forced here."""
    with ExportProcess(exported[0], "cpu", force=True) as process:
        def kill() -> None:
            while process._process is None or not process._process.is_alive():
                time.sleep(0.01)
            process._process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(UserError, match="killed, most likely for lack of memory"):
            process.write(Export("resnet18", "fp32", 1, (32, 32)))
        killer.join()
        assert [row["status"] for row in process.write(Export(MODEL, "fp32", 2, SIZE))] == ["written", "written"]


@pytest.mark.slow
def test_fp16_with_only_the_batch_open(tmp_path: Path) -> None:
    config = ZooConfig(models=(MODEL,), image_sizes=((64, 64), (64, 96)), batch_sizes=(2,), dynamic="batch", fixed=False,
                       dtypes=("fp16",))
    first, second = config.exports()
    assert (first.stem, second.stem) == (f"{MODEL}_fp16", f"{MODEL}_fp16_64x96")
    [row] = Exporter(Workspace(tmp_path), "cpu", force=False).write(second)
    assert Path(row["file"]).stem == second.stem
    assert row["difference"] < 0.01
    images = onnx.load(row["file"]).graph.input[0].type.tensor_type
    assert images.elem_type == onnx.TensorProto.FLOAT16
    assert [dim.dim_param or dim.dim_value for dim in images.shape.dim] == ["batch", 3, 64, 96]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["googlenet", "mobilenet_v3_small", "vit_b_32"])
def test_random_models_behave_like_trained_ones(name: str) -> None:
    """Activations stay in range, and auxiliary heads are gone. No parameter stays zero: a bias of zeros would be dropped on
    export, and with it the kernel that adds it."""
    model = build(name, "fp32", (64, 64))
    output = reference(model, np.random.default_rng(0).standard_normal((2, 3, 64, 64), dtype=np.float32), "cpu")
    assert output.shape == (2, 1000)
    assert 1e-3 < np.abs(output).max() < 1e3
    assert all(bool(parameter.any()) for parameter in model.parameters())
    if name == "vit_b_32":  # its head is of zeros in torchvision
        assert 0.01 < float(model.get_parameter("heads.head.weight").detach().std()) < 0.03


def test_the_same_weights_every_time() -> None:
    first, second = (build(MODEL, "fp32", SIZE).state_dict() for _ in range(2))
    assert all(bool((first[name] == second[name]).all()) for name in first)


def test_a_model_over_2_gb_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "LARGEST_FILE", 1e6)
    with pytest.raises(UserError, match=r"weights in fp32; one ONNX file holds 2 GB at most"):
        trace(build(MODEL, "fp32", SIZE), Export(MODEL, "fp32", 1, SIZE), {})


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full disk is pretended: saving raises its error."""
    def save(proto: onnx.ModelProto, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(onnx, "save", save)
    with pytest.raises(OSError, match="No space left"):
        Exporter(Workspace(tmp_path), "cpu", force=False).write(Export(MODEL, "fp32", 1, SIZE))
    assert list(Workspace(tmp_path).models.iterdir()) == []


@pytest.mark.parametrize(("text", "message"), [
    ("model: [resnet18]", "model: unknown key; did you mean models"),
    ("batch_sizes: [0]", r"batch_sizes\.0: input should be greater than or equal to 1"),
    ("image_sizes: [224x]", "an image size is written 224 or 224x320"),
    ("image_sizes: [16]", "greater than or equal to 32"),
])
def test_a_config_that_does_not_fit(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_config(path, ZooConfig)
    assert str(path) in str(caught.value)


def test_cuda_without_a_gpu(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "has_cuda", lambda: False)
    with pytest.raises(UserError, match="device cuda: no NVIDIA GPU"):
        export_all(workspace, ZooConfig(device="cuda"))


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_script("model_zoo/torchvision_exporter.py", "--workspace", tmp_path / "file", "--model", MODEL)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of its parent to a process")
def test_the_exporting_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """Also in the middle of an export, and when the parent is killed."""
    script = ("import sys; from hase.model_zoo.exporting.onnx_export import ExportProcess; "
              "from hase.utils.paths import Workspace; from pathlib import Path; "
              f"process = ExportProcess(Workspace(Path({str(tmp_path)!r})), 'cpu', False); "
              "process.check_names(['resnet18']); print(process._process.pid, flush=True); sys.stdin.read()")
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    child.wait(20)
    assert not child.is_running()
