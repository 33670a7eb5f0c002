"""`import hase`: a function for each command, whose answers are those of the commands."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from command import printed
from conftest import small_model

import hase
from hase.inference.compare.devices import DeviceComparison
from hase.utils.errors import UserError
from hase.utils.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "net.onnx"
    onnx.save(small_model(batch="n"), path)
    return path


def test_a_prediction_is_that_of_the_command(model: Path) -> None:
    (row,) = json.loads(printed("inference/predict_model_latency.py", "--model", model, "--on", "H200", "--batch", 8, "--json"))
    answer = hase.predict(model, batch=8, on="h200")
    assert answer.to_dict() | {"sum_latency_ms": row["sum_latency_ms"]} == {name: row[name] for name in answer.to_dict()}
    assert hase.predict_many([model, model], dims={"n": 8}, on="nvidia-h200") == [answer, answer]
    assert hase.predict(str(model), batch=8, on="RTX 4090").target.startswith("rtx-4090-from-data-sheet")


def test_a_comparison_is_that_of_the_command(model: Path) -> None:
    document = printed("inference/compare_devices.py", "--model", model, "--on", "h200,l4", "--batch", "1,8", "--json")
    comparison = hase.compare_devices(model, ["h200", "l4"], batch=[1, 8])
    assert DeviceComparison.model_validate_json(document) == comparison
    assert list(comparison.to_pandas()["latency (ms)"]) == sorted(answer.prediction.latency_ms for answer in comparison.answers)
    assert "<table" in comparison._repr_html_()


def test_models_are_compared_at_their_own_sizes(model: Path) -> None:
    difference = hase.compare_models(model, model, batch=1, b_batch=64, on="h200")
    assert (difference.a.dims, difference.b.dims) == ({"n": 1}, {"n": 64})
    assert difference.to_pandas()["difference_ms"].sum() == pytest.approx(
        difference.difference_ms - difference.outside_kernels_ms)


def test_advice_and_searches_have_results_with_tables(model: Path) -> None:
    advice = hase.sharing_advice([{"model": model, "rate_per_s": 10, "slo_ms": 50}], batches=[1, 2], on="h200", host_pace=1.0)
    assert advice.to_dict()["version"] == 1
    assert set(advice.to_pandas()["model"].dropna()) == {"net"}
    found = hase.search("ofa", latency_ms=5.0, count=3, on="h200", host_pace=1.0)
    assert (found.searched, len(found.to_pandas()), found.to_dict()["version"]) == (3, found.admitted, 1)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: hase.predict_many("a.onnx"), r"models='a.onnx': give a list of models, or call predict for one"),
    (lambda: hase.compare_devices("a.onnx", "l4"), r"on='l4': give a list of devices, or call predict for one"),
    (lambda: hase.predict("a.onnx", batch=0), "batch=0: give a whole number from 1 on"),
    (lambda: hase.predict("a.onnx", batch=8, dims={"batch": 4}), "batch=8: dims has a batch, too"),
    (lambda: hase.predict("a.onnx", on=4090), "target=4090: give the name"),  # type: ignore[arg-type]
    (lambda: hase.predict(small_model(), on="rtx-4900"), r"no GPU of records/gpus.yaml \(did you mean rtx-4090"),
    (lambda: hase.sharing_advice([{"model": "a.onnx", "slo_ms": 1}]), "rate_per_s")])
def test_wrong_arguments_get_one_sentence(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_importing_hase_imports_nothing_else() -> None:
    code = "import sys, hase; print([name for name in sys.modules if name.startswith('hase.') or name in ('numpy', 'onnx')])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", [name for name in hase.__all__ if name[0].islower()])
def test_help_documents_every_argument(name: str) -> None:
    """Arguments that another function describes are named there (`as for predict`)."""
    function = getattr(hase, name)
    documented = inspect.getdoc(function) or ""
    own = {argument for argument in inspect.signature(function).parameters if argument not in documented}
    assert own <= set(inspect.signature(hase.predict).parameters) | {"a", "b", "seed", "processes", "top"}
