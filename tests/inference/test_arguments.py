"""What another program may pass to the library: its own types are taken where they say the same, else one error."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz.damaged_models import network

from hase.inference import Predictor, measure_missing, predict
from hase.inference.prediction.sources import FREE_CALLS, checked_dims
from hase.ort_analysis.isolated.analysis import optimized_once
from hase.utils.errors import UserError
from hase.utils.paths import ROOT

TARGET = "nvidia-h200"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arguments") / "network.onnx"
    path.write_bytes(network().SerializeToString())
    return path


def test_a_workspace_may_be_a_path(model: Path, tmp_path: Path) -> None:
    for place in (str(tmp_path), tmp_path, None):
        assert predict(str(model), target=TARGET, workspace=place).model == "network@batch=2,dynamic"
    assert Predictor(str(tmp_path)).workspace.root == tmp_path
    assert Predictor().workspace.root == ROOT


def test_sizes_may_be_of_numpy(model: Path) -> None:
    sizes: Any = {"batch": np.int64(3)}
    with optimized_once():  # its folder goes to the child
        assert predict(model, target=TARGET, dims=sizes).model == "network@batch=3,dynamic"
    assert checked_dims({"batch": True}) == {"batch": 1}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a target that is a number": ({"target": 5}, r"target=5: give the name of a target"),
    "a target that is bytes": ({"target": b"h200"}, r"target=b'h200': give the name of a target"),
    "a workspace that is a number": ({"workspace": 5}, "workspace=5: give the path of a folder"),
    "a workspace that is missing": ({"workspace": "no/such/folder"}, "workspace='no/such/folder': no such folder"),
    "a list of sizes": ({"dims": {"batch": [1, 2]}}, r"dims: batch=\[1, 2\]: a size is one whole number; predict once"),
    "a size that is text": ({"dims": {"batch": "2"}}, "dims: batch='2': a size is one whole number"),
    "a size with decimals": ({"dims": {"batch": 1.5}}, r"dims: batch=1\.5: a size is one whole number"),
    "no size": ({"dims": {"batch": None}}, "dims: batch=None: a size is one whole number"),
    "a size beyond 64 bits": ({"dims": {"batch": 2**63}}, r"dims: 'batch'=9223372036854775808: a name and a size from 0"),
    "a negative size": ({"dims": {"batch": -1}}, "dims: 'batch'=-1: a name and a size from 0"),
    "a name that is a number": ({"dims": {1: 1}}, "dims: 1=1: a name and a size from 0"),
    "sizes without names": ({"dims": [1, 2]}, r"dims=\[1, 2\]: give sizes by name"),
    "sizes that are text": ({"dims": "batch=2"}, r"dims='batch=2': give sizes by name"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str, model: Path) -> None:
    """Of both functions. A measurement takes several sizes."""
    arguments, message = WRONG[name]
    with pytest.raises(UserError, match=f"^{message}"):
        predict(model, **{"target": TARGET, **arguments})
    if "dims" in arguments:
        arguments = {"sizes": [arguments["dims"]]}
    with pytest.raises(UserError, match=f"^{message}"):
        measure_missing(model, **{"target": TARGET, **arguments})


def asked_from(depth: int, model: Path) -> float:
    return asked_from(depth - 1, model) if depth else predict(model, target=TARGET).latency_ms


def test_a_caller_that_is_deep_in_calls(model: Path) -> None:
    assert asked_from(100, model) > 0
    before = sys.getrecursionlimit()
    with pytest.raises(UserError, match=rf"^asked \d+ calls deep, and Python allows {before}: a prediction may need 300 more"):
        asked_from(before - FREE_CALLS, model)


def test_a_path_in_bytes_is_no_model(model: Path) -> None:
    source: Any = os.fsencode(model)
    with pytest.raises(UserError, match="bytes is not a model: give the path of an ONNX file"):
        predict(source, target=TARGET)
