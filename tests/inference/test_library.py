"""The library in another program: what it may pass, and its many threads and models."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import small_model
from fuzz.damaged_models import network

from hase.inference import Predictor, measure_missing, predict
from hase.inference.prediction import sources
from hase.inference.prediction.sources import FREE_CALLS, checked_dims
from hase.learned.kernels import predictors
from hase.ort_analysis.isolated.analysis import optimized_once
from hase.records.kernel_record_files import read_model_records, record_path
from hase.runtimes import local_flavour, local_target
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, Workspace

TARGET, HERE = "nvidia-h200", local_target("cpu").name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arguments") / "network.onnx"
    path.write_bytes(network().SerializeToString())
    return path


@pytest.mark.slow
def test_a_workspace_may_be_a_path_and_sizes_of_numpy(model: Path, tmp_path: Path) -> None:
    for place in (str(tmp_path), None):
        assert predict(str(model), target=TARGET, workspace=place).model == "network@batch=2,dynamic"
    assert Predictor(str(tmp_path)).workspace.root == tmp_path
    assert Predictor().workspace.root == ROOT
    sizes: Any = {"batch": np.int64(3)}
    with optimized_once():  # its folder goes to the child
        assert predict(model, target=TARGET, dims=sizes).model == "network@batch=3,dynamic"
    assert checked_dims({"batch": True}) == {"batch": 1}
    source: Any = os.fsencode(model)
    with pytest.raises(UserError, match="bytes is not a model: give the path of an ONNX file"):
        predict(source, target=TARGET)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"target": 5}, "target=5: give the name of a target"), ({"workspace": 5}, "workspace=5: give the path of a folder"),
    ({"workspace": "no/such/folder"}, "workspace='no/such/folder': no such folder"),
    ({"dims": {"batch": [1, 2]}}, r"dims: batch=\[1, 2\]: a size is one whole number; predict once"),
    ({"dims": {"batch": "2"}}, "dims: batch='2': a size is one whole number"),
    ({"dims": {"batch": 1.5}}, r"dims: batch=1\.5: a size is one whole number"),
    ({"dims": {"batch": 2**63}}, "dims: 'batch'=9223372036854775808: a name and a size from 0"),
    ({"dims": {"batch": -1}}, "dims: 'batch'=-1: a name and a size from 0"),
    ({"dims": {1: 1}}, "dims: 1=1: a name and a size from 0"), ({"dims": [1, 2]}, r"dims=\[1, 2\]: give sizes by name"),
    ({"dims": "batch=2"}, "dims='batch=2': give sizes by name")])
def test_wrong_arguments(arguments: dict[str, Any], message: str, model: Path) -> None:
    """Of both functions. A measurement takes several sizes."""
    with pytest.raises(UserError, match=f"^{message}"):
        predict(model, **{"target": TARGET, **arguments})
    if "dims" in arguments:
        arguments = {"sizes": [arguments["dims"]]}
    with pytest.raises(UserError, match=f"^{message}"):
        measure_missing(model, **{"target": TARGET, **arguments})


def test_a_caller_that_is_deep_in_calls(model: Path) -> None:
    def asked_from(depth: int) -> float:
        return asked_from(depth - 1) if depth else predict(model, target=TARGET).latency_ms

    assert asked_from(100) > 0
    before = sys.getrecursionlimit()
    with pytest.raises(UserError, match=rf"^called \d+ calls deep, and Python allows {before}: a prediction may need 300 more"):
        asked_from(before - FREE_CALLS)


@pytest.fixture(scope="module")
def files(trained_workspace: Workspace) -> list[str]:
    """The records of its models."""
    return [str(record_path(trained_workspace, record.flavour, record.model))
            for record in read_model_records(trained_workspace, local_flavour("cpu"))]


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_threads_predict_the_same_as_one(strict: bool, trained_workspace: Workspace, files: list[str],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted_ms(turn: int) -> float:
        return predict(files[turn % len(files)], target=HERE, workspace=trained_workspace, strict=strict).latency_ms

    alone = [predicted_ms(turn) for turn in range(len(files))]
    monkeypatch.setattr(sources, "KEPT_FILES", 3)  # the caches are emptied all the time
    monkeypatch.setattr(predictors, "MAX_CACHED_KERNELS", 4)
    monkeypatch.setattr(predictors, "MAX_CACHED_LOADS", 1)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            latencies_ms = list(threads.map(predicted_ms, range(160)))
    finally:
        sys.setswitchinterval(interval_s)
    assert latencies_ms == [alone[turn % len(files)] for turn in range(160)]


@pytest.mark.slow
def test_many_models_take_one_child() -> None:
    process, predictor, model = psutil.Process(), Predictor(target="nvidia-h200"), small_model()

    def predicted(numbers: range) -> tuple[int, int]:
        """Descriptors of this process, and bytes of its child."""
        for number in numbers:
            model.graph.name = f"m{number}"
            predictor.predict(model)
        (child,) = [child for child in process.children() if "hase.ort_analysis.isolated.worker" in child.cmdline()]
        return process.num_fds(), child.memory_info().rss

    descriptors, child_bytes = predicted(range(20))
    assert predicted(range(20, 60)) == (descriptors, pytest.approx(child_bytes, rel=0.1))
