"""What onnxruntime-genai's loop takes on a CPU, from steps whose loop is known."""

from __future__ import annotations

import pytest

from hase.learned.llm import GenerationLoop
from hase.records.generations import PHASES, Phase
from hase.training.fits.generation import LoopStep, fit_loop, fit_on_cpu

LOOP = GenerationLoop(step_ms=0.02, sequence_ms=0.004, first_ms=0.3, first_layer_ms=0.01, first_sequence_ms=0.05,
                      million_logits_ms=0.6, million_other_logits_ms=0.8)


def step(family: str, phase: Phase, batch: int, prompt: int, words: int, layers: int) -> LoopStep:
    run_ms = 1e-5 * words * batch * (prompt if phase == "first" else 1)
    of = LoopStep(family, family, phase, batch, prompt, words, layers, batch * (prompt - 1) * words if phase == "first" else 0,
                  run_ms, 0.0)
    return of._replace(measured_ms=run_ms + of.loop_ms(LOOP))


STEPS = [step(f"w{words}l{layers}", phase, batch, prompt, words, layers)
         for words, layers in ((1000, 2), (32000, 12), (128000, 1))
         for phase in PHASES for batch, prompt in ((1, 16), (1, 512), (8, 64), (32, 16))]


def test_a_known_loop_is_found_again() -> None:
    found = fit_loop(STEPS)
    for name, value in LOOP.model_dump().items():
        assert getattr(found, name) == pytest.approx(value, rel=0.02), name


def test_each_family_is_held_out() -> None:
    """One whose tokens take three times as long is off by that, and the others hardly change."""
    odd = [one._replace(measured_ms=3 * one.measured_ms) if one.family == "w1000l2" and one.phase == "token" else one
           for one in STEPS]
    learned = fit_on_cpu("some-cpu", odd, "0.18.0", "2026-01-01")
    assert {(one.family, one.phase, one.batch, one.prompt) for one in learned.steps} == {
        (one.family, one.phase, one.batch, one.prompt) for one in odd}
    errors = {one.family: abs(one.predicted_ms / one.measured_ms - 1) for one in learned.steps if one.phase == "token"}
    assert errors["w1000l2"] > 0.4
    assert errors["w128000l1"] < 0.2
    assert learned.left_out["first"].mape < 0.2


def test_a_loop_never_takes_negative_time() -> None:
    found = fit_loop([one._replace(measured_ms=0.5 * one.run_ms) for one in STEPS])
    assert min(found.model_dump().values()) >= 0
    assert max(found.model_dump().values()) < 1e-3


def test_earlier_logits_of_a_prompt_count_once() -> None:
    with_them, without = (LOOP.time_ms("first", 2, 1000, 3, other_logits=others) for others in (30_000, 0))
    assert with_them - without == pytest.approx(0.8 * 0.03)
    assert LOOP.time_ms("token", 2, 1000, 3) == pytest.approx(0.02 + 2 * 0.004 + 0.6 * 0.002)
