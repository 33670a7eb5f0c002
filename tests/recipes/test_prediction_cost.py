"""The recipe that says what a prediction of a large language model takes."""

from __future__ import annotations

import sys

import pytest

from recipes.large_models.decoders import SMALL
from recipes.large_models.prediction_cost import cost_of, row
from utils.errors import UserError


@pytest.mark.slow
def test_the_cost_of_a_prediction() -> None:
    made = row("small", SMALL, "int4", "nvidia-h200", no_weights=True, repeats=1)
    assert made["size (GB)"] == pytest.approx(0.0034, rel=0.02)
    assert made["predicted weights (MiB)"] == pytest.approx(made["size (GB)"] * 1e9 / 2**20, rel=0.01)
    assert 0 < made["predicted (ms)"] < 1
    assert 50 < made["memory (MiB)"] < 1024


def test_a_command_that_fails_is_an_error() -> None:
    with pytest.raises(UserError, match=r"^no$"):
        cost_of([sys.executable, "-c", "import sys; sys.exit('error: no')"])
