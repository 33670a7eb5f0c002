"""Measurements and the blocks that hold them, as a journal keeps them."""

from __future__ import annotations

import pytest

from hase.records.measurement import Block, Measurement


def test_a_measurement_names_its_place() -> None:
    """Nothing is guessed from the context."""
    with pytest.raises(ValueError, match="place"):
        Measurement.model_validate({"subject": "kernel", "id": "x", "label": "run", "context": "alone", "samples_ms": [1.5]})


def test_a_block_keeps_quantities_and_the_length_of_its_windows() -> None:
    measured = Measurement(subject="convolution", id="c1", label="run", context="vgg16", place="in_model",
                           samples_ms=(1.0, 2.0), quantities={"energy_j": (3.5,), "power_w": (300.0, 310.0)})
    block = Block(level=0.0, key="k", background={"m": 0.5}, background_s=0.25, during={"m": 0.7}, during_s=3.0,
                  canary_before_ms=1.0, canary_after_ms=1.0, attempts=1, machine="here", measurements=(measured,))
    assert Block.model_validate_json(block.model_dump_json()) == block


def test_only_what_was_queued_says_so() -> None:
    measured = Measurement(subject="kernel", id="a", label="gpu", context="carrier", place="carrier", samples_ms=(1.0,))
    assert "queued" not in measured.model_dump_json()
    queued = measured.model_copy(update={"queued": True})
    assert Measurement.model_validate_json(queued.model_dump_json()).queued
