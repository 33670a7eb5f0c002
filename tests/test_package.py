"""Hase as a package: what it needs, its wheel, and the README's light install, which predicts the same as the full one.

Needs a package index. Without one the test of the install is skipped, or fails where HASE_NEEDS_PACKAGES is set.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import hatchling.build
import onnx
import pytest
from onnx import TensorProto, helper
from optional_packages import without
from packaging.requirements import Requirement

from hase.runtimes import local_target
from hase.utils.cli import LEFT_OUT
from hase.utils.commands import COMMANDS
from hase.utils.paths import ROOT

pytestmark = pytest.mark.slow

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


def test_the_tested_versions_are_allowed() -> None:
    """requirements.txt pins what `.[export,dev]` brings, and nothing else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines())
    pinned = {pin.name: pin for line in lines if line and line != "-e ." for pin in [Requirement(line)]}
    extras = project["optional-dependencies"]
    allowed = [Requirement(text) for text in (*project["dependencies"], *extras["export"], *extras["plot"], *extras["dev"])]
    assert {one.name for one in allowed} - {"hase"} == set(pinned)
    for one in allowed:
        (version,) = pinned[one.name].specifier if one.name != "hase" else [None]
        assert version is None or version.version in one.specifier, one


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


@pytest.mark.parametrize("name", list(LEFT_OUT)[:2])
def test_a_script_that_needs_more_names_what_to_install(name: str) -> None:
    done = ended(sys.executable, "-c", "import sys\nfrom utils import cli\nsys.path[:] = [at for at in sys.path if "
                 f"'site-packages' not in at]\ncli.run(lambda: __import__({name!r}))")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert re.search(rf"needs the package {name}; pip install '\.\[export\]'", done.stderr)


@pytest.mark.measuring
def test_kernels_of_a_cpu_are_measured_without_torch(tmp_path: Path, relu: Path) -> None:
    """In the processes that measure, too."""
    done = ended(sys.executable, "inference/predict_model_latency.py", "--model", relu, "--measure-missing", "--json",
                 "--target", local_target("cpu").name, "--workspace", tmp_path, **without(LEFT_OUT, tmp_path / "hidden"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["time_share"]["measured"] == 1.0


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


@pytest.mark.nightly
def test_the_light_install_predicts_the_same_as_the_full_one(tmp_path: Path) -> None:
    (block,) = FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    *install, predict = block.replace(FOLDER, str(tmp_path / "light")).strip().splitlines()
    assert len(install) == 1
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
    assert predicted([sys.executable, "-m", "hase", *arguments], tmp_path) == light


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds Hase's wheel; its other packages are those of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    old = os.getcwd()
    os.chdir(ROOT)
    try:
        wheel = folder / hatchling.build.build_wheel(str(folder))
    finally:
        os.chdir(old)
    assert wheel.stat().st_size < 40e6
    venv.create(folder / "env", with_pip=False)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others))  # not as PYTHONPATH, which would bring the clone, too
    command = folder / "env" / "bin" / "hase"
    command.write_text(f"#!{folder / 'env' / 'bin' / 'python'}\nfrom hase.__main__ import main\nmain()\n")
    command.chmod(0o755)
    return command


def typed(command: Path, *options: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([command, *options], cwd=folder, capture_output=True, text=True, timeout=300,
                          env=os.environ | {"HASE_CACHE": str(folder / "cache")})


def test_the_wheel_predicts_in_any_folder(installed: Path, relu: Path, tmp_path: Path) -> None:
    """The same as the clone does. Nothing but the cache is written there."""
    options = ("--target", "nvidia-h200", "--model", relu, "--json")
    done = typed(installed, "predict", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    in_clone = predicted([sys.executable, "inference/predict_model_latency.py", *map(str, options[:-1])], tmp_path)
    assert json.loads(done.stdout)[0] == in_clone
    assert {path.name for path in tmp_path.iterdir()} == {"relu.onnx", "cache"}
    assert (tmp_path / "cache" / "hase.log").is_file()


def test_the_command_names_commands_as_one_types_them(installed: Path, tmp_path: Path) -> None:
    assert typed(installed, "--version", folder=tmp_path).stdout == f"hase {version('hase')}\n"
    overview = typed(installed, folder=tmp_path).stdout
    assert all(re.search(rf"^  {name} +{command.purpose}$", overview, re.MULTILINE) for name, command in COMMANDS.items())
    help_text = typed(installed, "predict", "--help", folder=tmp_path).stdout
    assert help_text.startswith("usage: hase predict ")
    assert "\nhase predict --model resnet18.onnx\n" in help_text
    assert "python inference" not in help_text
    for options, code, message in (
            (["predit"], 2, "no command predit; did you mean hase predict? (see hase --help)"),
            (["predict", "--modle", "a"], 2, "unknown option --modle; did you mean --model? (see hase predict --help)"),
            (["predict", "--model", "a"], 1,
             f"a: no such model, here or in {tmp_path}/model_zoo/models; export some with: hase export")):
        done = typed(installed, *options, folder=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", f"error: {message}\n")


@pytest.mark.parametrize(("line", "words"), [
    ("hase pre", {"predict "}), ("hase predict --cuda", {"--cuda-graph "}), ("hase predict --io ho", {"host "})])
def test_a_shell_completes_commands_and_options(installed: Path, tmp_path: Path, line: str, words: set[str]) -> None:
    out = tmp_path / "words"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(out), "COMP_LINE": line, "COMP_POINT": str(len(line))}
    subprocess.run([installed], cwd=tmp_path, env=os.environ | asked, check=False, timeout=60)
    assert set(out.read_text().split("\013")) == words
