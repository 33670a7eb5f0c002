"""Two models on one GPU, each while the other one runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.sharing.co_runner import UnderLoad
from utils.frozen import Frozen

if TYPE_CHECKING:
    from inference.sharing.shared_models import SharedModel


class OneOfTwo(Frozen):
    """A model's latency alone, and its distribution while the other model runs in a loop. It is a rough estimate if the
    prediction of either model is."""

    model: str
    dims: dict[str, int]
    idle_ms: float
    under_load: UnderLoad
    rough_estimate: bool = False
    estimated_operators: tuple[str, ...] = ()


class Pair(Frozen):
    """Two models on one GPU, in the order in which they were given, with the warnings of both predictions."""

    target: str
    models: tuple[OneOfTwo, OneOfTwo]
    warnings: tuple[str, ...]


def pair(one: SharedModel, two: SharedModel) -> Pair:
    """Two models on one GPU, each in a process of its own that runs it again and again without a pause."""
    return Pair(target=one.prediction.target, models=(_of_pair(one, two), _of_pair(two, one)),
                warnings=tuple(dict.fromkeys((*one.prediction.warnings, *two.prediction.warnings))))


def _of_pair(model: SharedModel, other: SharedModel) -> OneOfTwo:
    of = model.prediction
    return OneOfTwo(model=of.model, dims=of.dims, idle_ms=model.alone_ms,
                    under_load=model.next_to(other.in_a_loop(model), "prediction"),
                    rough_estimate=of.rough_estimate or other.prediction.rough_estimate,
                    estimated_operators=of.estimated_operators)
