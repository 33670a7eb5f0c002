"""An example for `inference/search_models.py --space`: once-for-all networks, scored better the fewer blocks they have."""

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
    """The model of a candidate for a flavour of graphs: here a kernel record; a path or an onnx.ModelProto also works."""
    return ofa.make(choice, flavour)


def score(choice: str) -> float:
    """How good a candidate is; larger is better."""
    return -float(sum(map(len, ofa.network_named(choice).stages)))
