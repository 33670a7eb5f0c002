"""The README's light install: requirements-predict.txt in a separate environment predicts the same as the full one.

Needs a package index. Without one the test of the install is skipped, or fails where HASE_NEEDS_PACKAGES is set.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from hase.utils import no_package
from hase.utils.cli import LEFT_OUT
from hase.utils.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

NEEDED = "HASE_NEEDS_PACKAGES"  # set where an index that can't be reached is a failure
NO_NETWORK = ("Retrying (Retry", "Temporary failure in name resolution", "Failed to establish a new connection")
FOLDER = ".venv-predict"  # its name in the README
FENCE = re.compile(r"^```shell\n(.*?)^```", re.MULTILINE | re.DOTALL)
SLOW = ("pandas", "sklearn", "networkx", "prometheus_client", "requests")  # installed, but a prediction must not wait for them
POSIX_ONLY = ("fcntl", "resource", "termios", "pwd", "grp")  # Windows has none of these
HIDE = """
import sys
import psutil, subprocess, multiprocessing, tempfile, shutil  # their imports depend on the system, Hase's must not
for name in {absent}:
    sys.modules[name] = None
"""  # in a file that every Python reads at its start, that of the child that analyses models too


def pins(name: str) -> dict[str, str]:
    """Versions by package of a requirements file, without the systems that they are for."""
    text = (ROOT / name).read_text(encoding="utf-8")
    lines = (line.partition("#")[0].partition(";")[0].strip() for line in text.splitlines())
    return dict(line.split("==") for line in lines if line)


def test_both_files_pin_the_same_versions() -> None:
    full, light = pins("requirements.txt"), pins("requirements-predict.txt")
    same_library = {"onnxruntime": "onnxruntime-gpu", "xgboost": "xgboost-cpu"}
    assert light == {name: full[same_library.get(name, name)] for name in light}
    assert not {"torch", "torchvision", "onnxscript"} & set(light)


@pytest.fixture
def relu(tmp_path: Path) -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 8, 8])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "relu.onnx")
    return tmp_path / "relu.onnx"


def ended(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300)


def test_a_prediction_imports_nothing_that_the_light_install_lacks(tmp_path: Path, relu: Path) -> None:
    """The same without a separate environment: all packages are installed here, and these are hidden."""
    prediction = predicted([sys.executable, "inference/predict_model_latency.py", "--strict", "--target", "nvidia-h200",
                            "--model", str(relu)], tmp_path, hidden=(*POSIX_ONLY, *LEFT_OUT, *SLOW))
    assert float(str(prediction["latency_ms"])) > 0


def predicted(command: list[str], temporary: Path, hidden: tuple[str, ...] = ()) -> dict[str, object]:
    """The prediction of a command without the modules `hidden`. It has its own temporary folder: without fcntl it can't lock
    one against other processes."""
    environment = {"TMPDIR": str(temporary)}
    if hidden:
        (temporary / "sitecustomize.py").write_text(HIDE.format(absent=hidden))
        environment["PYTHONPATH"] = str(temporary)
    done = ended(*command, "--json", **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    predictions: list[dict[str, object]] = json.loads(done.stdout)
    return predictions[0]


def test_the_light_install_predicts_the_same_as_the_full_one(tmp_path: Path) -> None:
    (block,) = FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    *install, predict = block.replace(FOLDER, str(tmp_path / "light")).strip().splitlines()
    assert len(install) == 2
    for command in install:
        done = ended("bash", "-c", command, PIP_NO_COMPILE="1", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_RETRIES="1")
        if done.returncode:
            message = f"$ {command}\n{done.stderr[-3000:]}"
            if any(sign in done.stderr + done.stdout for sign in NO_NETWORK):
                message = f"needs a package index, which can't be reached from here:\n{message}"
                pytest.fail(message) if os.environ.get(NEEDED) else pytest.skip(message)
            pytest.fail(message)
    python, *arguments = ended("bash", "-c", f"printf '%s\\n' {predict}").stdout.splitlines()
    assert shlex.split(predict)[0] == python
    light = predicted([python, *arguments], tmp_path, hidden=(*POSIX_ONLY, *LEFT_OUT, *SLOW))
    assert light["target"] == "nvidia-h200-cuda-ort1.31-all"
    assert 0.5 < float(str(light["latency_ms"])) < 3
    assert predicted([sys.executable, *arguments], tmp_path) == light  # whichever ONNX Runtime wheel derives the graph


@pytest.mark.skipif(find_spec("pip") is None, reason="without pip nothing can be installed")
def test_pip_says_in_a_sentence_what_to_do_instead() -> None:
    done = ended(sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", ".")
    said = [line.strip() for line in done.stderr.splitlines() if "Hase" in line]
    assert (done.returncode, said, "Traceback" in done.stderr) == (1, [no_package.MESSAGE], False)
