"""docs/json.md: the fields of what --json prints, as the classes have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import onnx
import pytest
from command import run_script
from conftest import small_model

from hase.inference.core.answers import Prediction
from hase.recipes import json_page
from hase.recipes.json_page import PAGE, page, shown
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen


def section(heading: str) -> str:
    return PAGE.read_text(encoding="utf-8").partition(f"### {heading}\n")[2].partition("\n#")[0]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make it anew: python recipes/json_page.py"


@pytest.mark.slow
def test_what_a_command_prints_is_on_the_page(tmp_path: Path) -> None:
    onnx.save(small_model(), tmp_path / "net.onnx")
    done = run_script("inference/predict_model_latency.py", "--model", tmp_path / "net.onnx", "--target", "nvidia-h200",
                      "--slo-ms", "5", "--energy", "--json")
    (printed,) = json.loads(done.stdout)
    more = {"slo": "SloUnderLoad", "energy": "EnergyPrediction"}
    for record, of_class in ((printed, "Prediction"), *((printed[name], of_class) for name, of_class in more.items()),
                             (printed["kernels"][0], "KernelShare"), (printed["memory"], "Memory"),
                             (printed["composition"]["costs"], "PipelineCosts")):
        told = section(of_class)
        assert not [name for name in record if f"| `{name}` |" not in told and name not in more]
    assert set(more) <= printed.keys()


def test_types_are_those_of_json() -> None:
    assert shown(float | None) == "number or null"
    assert shown(tuple[float, float]) == "list of 2: number"
    assert shown(tuple[str, ...]) == "list of text"
    assert shown(dict[str, int]) == "object: text to whole number"
    assert shown(Literal["a", "b"]) == '"a" or "b"'
    assert shown(Prediction | None) == "[Prediction](#prediction) or null"


def test_a_field_that_nobody_explains_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Frozen):
        """A record.

        Attributes:
            said: it is
                explained.
        """

        said: int
        unsaid: int

    monkeypatch.setattr(json_page, "_with_parts", lambda _: [Silent])
    with pytest.raises(UserError, match="Silent: its docstring says nothing of unsaid"):
        page()
    assert json_page._meanings(Silent) == {"said": "it is explained."}
