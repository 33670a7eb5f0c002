"""The seam between runtimes and the rest: the table, each runtime's description, and that nothing else compares names."""

from __future__ import annotations

import dataclasses
import subprocess
from importlib.util import find_spec

import pytest

import hase.runtimes
from hase.benchmark.collecting.config import CollectorConfig
from hase.runtimes import MODULES, local_flavour, local_target, runtime_named
from hase.utils.errors import UserError
from hase.utils.paths import ROOT

SEAM = ("runtimes/__init__.py", "benchmark/ort/", "runtimes/tvm/", "runtimes/openvino/")
APART = ("extras/graph_stages/", "extras/convolutions/")  # they feed no prediction and have their own runtimes


@pytest.mark.parametrize("name", MODULES)
def test_a_runtime_describes_itself(name: str) -> None:
    runtime = runtime_named(name)
    assert runtime.name == name
    assert find_spec(runtime.worker)
    assert runtime.levels
    for device, labels in runtime.devices.items():
        assert device in ("cpu", "cuda")
        assert set(labels.default_labels) <= set(labels.labels)
        assert set(labels.default_variants) <= set(labels.variants)
    for command in (runtime.analyze_with, runtime.build_with):
        assert (ROOT / command.removeprefix("python ").split()[0]).is_file()


def test_a_flavour_names_its_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    tvm = dataclasses.replace(runtime_named("tvm"), version=lambda: "0.20.1")
    monkeypatch.setattr(hase.runtimes, "runtime_named", lambda name: tvm)
    assert local_flavour("cuda", "tvm").name == "cuda-tvm0.20-fused"
    assert local_flavour("cuda", "tvm", "tuned").name == "cuda-tvm0.20-tuned"
    assert local_target("cpu", "tvm").flavour.runtime == "tvm"


def test_an_unknown_runtime_is_refused() -> None:
    with pytest.raises(UserError, match="runtime abacus: unknown to this version; it knows ort, tvm"):
        local_flavour("cpu", "abacus")
    with pytest.raises(ValueError, match="not a runtime of this version; it knows ort, tvm"):
        CollectorConfig(runtime="abacus")


def test_settings_are_for_runtimes_that_have_some() -> None:
    with pytest.raises(ValueError, match="setting: ONNX Runtime has none; leave it out"):
        CollectorConfig.model_validate({"setting": {"threads": 2}})
    with pytest.raises(ValueError, match="setting: TVM has no level all, but fused, unfused, tuned"):
        CollectorConfig.model_validate({"runtime": "tvm", "setting": {"level": "all"}})
    with pytest.raises(UserError, match="labels: kernel_time: TVM has no such labels on cpu; it has run"):
        CollectorConfig.model_validate({"runtime": "tvm", "labels": ["kernel_time"]}).labels_on("cpu")
    of_tvm = CollectorConfig.model_validate({"runtime": "tvm", "energy_s": 3})
    assert (of_tvm.variants_on("cpu"), of_tvm.variants_on("cuda"), of_tvm.with_energy_on("cpu").energy_s) == ((), (), 0)


def found(pattern: str, *apart: str) -> list[str]:
    """Lines of the package with a match, outside these folders."""
    done = subprocess.run(["git", "grep", "-inE", pattern, "--", "*.py", ":!tests"], cwd=ROOT, text=True, capture_output=True)
    return [line for line in done.stdout.splitlines() if not line.startswith(apart)]


def test_nothing_outside_the_seam_compares_a_runtimes_name() -> None:
    name = f"[\"']({'|'.join(MODULES)})[\"']"
    pattern = rf"[!=]= *{name}|{name} *[!=]=|\[{name}\]|{name}:|\bin [({{[]{name}|case {name}"
    assert found(pattern, *SEAM, *APART) == []
    assert found(pattern, *APART)  # the table of runtimes


def test_no_other_module_names_openvino() -> None:
    """Graph networks in stages also run under OpenVINO, but without this runtime."""
    modules = {line.partition(":")[0] for line in found("openvino", "runtimes/openvino/", "extras/")}
    assert modules == {"runtimes/__init__.py", "utils/lazy.py"}
