"""Predictions for the shipped H200 and for a recorded CPU dataset stay the same, whatever is rebuilt behind them.

After a change of predictions on purpose: python recipes/same_predictions/record.py
"""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest

from hase.recipes.same_predictions.record import TOLERANCE, changes, differences, read_answers
from hase.utils.paths import ROOT

RECORD = "recipes/same_predictions/record.py"


@pytest.mark.slow
def test_every_number_of_every_answer_is_as_recorded() -> None:
    done = subprocess.run([sys.executable, RECORD, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}\nIf that is on purpose: python {RECORD}"


def test_each_kind_of_change_is_reported() -> None:
    before = read_answers()
    question = next(iter(before))
    for change, message in (
            (lambda answer: answer.update(latency_ms=answer["latency_ms"] * (1 + 1e-11)), "latency_ms"),
            (lambda answer: answer.pop("interval_ms"), "interval_ms is missing"),
            (lambda answer: answer["kernels"].pop(), "kernels"),
            (lambda answer: answer["kernels"][2].update(provenance="guessed"), "kernels[2].provenance: "),
            (lambda answer: answer["memory"].update(peak_mib=None), "memory.peak_mib")):
        changed = {question: copy.deepcopy(before[question])}
        change(changed[question][0])
        (line,) = changes({question: before[question]}, changed, TOLERANCE)
        assert line.startswith(question)
        assert message in line
    assert not list(differences({"a": [1.0]}, {"a": [1.0 + 1e-15], "b": 2}, TOLERANCE))  # a new field is no change
    assert not changes({"q": 1}, {"q": 1, "another": 2}, TOLERANCE)
    assert changes({"q": 1}, {}, TOLERANCE) == ["q: is no longer asked"]
