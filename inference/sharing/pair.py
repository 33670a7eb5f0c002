"""Two models on one GPU, each while the other runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from inference.sharing.co_runner import UnderLoad
from inference.sharing.shared_models import SharedModel, shared_model
from ort_analysis.records.kernel_record import Frozen

if TYPE_CHECKING:
    from inference.core.sources import Source
    from utils.paths import Workspace


class OneOfTwo(Frozen):
    """A model's latency alone, and its distribution while the other one runs in a loop; a rough estimate where that of either
    model alone is one."""

    model: str
    dims: dict[str, int]
    idle_ms: float
    under_load: UnderLoad
    rough_estimate: bool = False
    estimated_operators: tuple[str, ...] = ()


class Pair(Frozen):
    """Two models on one GPU, in the order in which they were given; with the predictions' warnings."""

    target: str
    models: tuple[OneOfTwo, OneOfTwo]
    warnings: tuple[str, ...]


def predict_pair(source: Source, beside: Source, *, dims: Mapping[str, int] | None = None,
                 beside_dims: Mapping[str, int] | None = None, target: str | None = None, strict: bool = False,
                 workspace: Workspace | None = None, force: bool = False, static: bool = False) -> Pair:
    """Two models side by side, each in a process of its own that runs it again and again without a pause.

    Args:
        source, beside: the models, as `inference.predict` takes them; they may be the same.
        dims, beside_dims: sizes of their dynamic dimensions by name.

    The other arguments and the errors are those of `inference.shared_model`.
    """
    one, two = (shared_model(model, dims=sizes, target=target, strict=strict, workspace=workspace, force=force,
                             static=static)
                for model, sizes in ((source, dims), (beside, beside_dims)))
    return Pair(target=one.idle.target, models=(_beside(one, two), _beside(two, one)),
                warnings=tuple(dict.fromkeys((*one.idle.warnings, *two.idle.warnings))))


def _beside(model: SharedModel, other: SharedModel) -> OneOfTwo:
    return OneOfTwo(model=model.idle.model, dims=model.idle.dims, idle_ms=model.idle.latency_ms,
                    under_load=model.beside(other.in_a_loop(model), "prediction"),
                    rough_estimate=model.idle.rough_estimate or other.idle.rough_estimate,
                    estimated_operators=model.idle.estimated_operators)
