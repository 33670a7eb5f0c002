"""An example for `inference/search_models.py --space`: once-for-all networks, of which those with few blocks are good."""

from __future__ import annotations

from collections.abc import Iterator

from hase.inference.search import ofa
from hase.records.kernel_record import ModelRecord
from hase.utils.fingerprint import Flavour

COUNT = 10_000


def choices() -> Iterator[str]:
    """The candidates, always in the same order."""
    yield from ofa.choices(COUNT, seed=7)


def make(choice: str, flavour: Flavour) -> ModelRecord:
    """The model of a candidate for a flavour of graphs: a kernel record here; a path or an onnx.ModelProto would do."""
    return ofa.make(choice, flavour)


def score(choice: str) -> float:
    """How good a candidate is, the larger the better."""
    return -float(sum(map(len, ofa.choice_of(choice).stages)))
