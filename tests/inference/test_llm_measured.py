"""A language model's kernels measured on this machine: at three lengths of the cache, between which times are interpolated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from command import printed
from decoder_models import TINY, genai_folder

from hase.inference.llm.predicting import predict_language_model
from hase.runtimes import local_target

pytestmark = [pytest.mark.slow, pytest.mark.measuring]
TARGET = local_target("cpu").name


@pytest.mark.usefixtures("canary")
def test_kernels_are_measured_at_three_lengths(tmp_path: Path) -> None:
    folder, workspace = genai_folder(tmp_path / "model", replace(TINY, layers=1), "int4-fp32", "cpu"), tmp_path / "out"
    workspace.mkdir()
    printed("inference/predict_llm.py", "--workspace", workspace, "--model", folder, "--target", TARGET, "--prompt", "200",
            "--generate", "60", "--measure-missing")
    answer = predict_language_model(folder, prompt=200, generate=60, workspace=workspace, target=TARGET)
    assert answer.token_share
    assert min(answer.prompt_share["measured"], answer.token_share["measured"]) > 0.98
    assert [token.cached for token in answer.tokens] == [200, 229, 258]  # 256, which is less sure, is left out
    assert answer.tpot
    # Two hundred tokens take about six times as long as one here; twenty may not, on a machine that others disturb.
    assert 0.0 < answer.tpot.ms < answer.ttft.ms
    assert answer.energy is None
    assert any("does not say how many threads" in warning for warning in answer.warnings)
