"""How the kernels of held-out models differ from those that were learned from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from training.composition.error_sources import KNOWN, Sources, Stranger, sources
from training.composition.left_out import Fold
from training.kernels.beyond import times_beyond
from training.kernels.uncertainty import Uncertainty

if TYPE_CHECKING:
    from records.kernel_record import Kernel
    from training.kernels.training_set import TrainingSet


def strangers(fold: Fold, rows: TrainingSet, label: str) -> dict[str, Stranger]:
    """How the kernels of a fold differ from those of its training, by id; kernels that do not differ are left out.

    Args:
        rows: those of which the fold says which may be learned from.
        label: the label that is learned.
    """
    seen = fold.seen & np.isfinite(rows.times_ms[label])
    types = set(rows.types[seen].tolist())
    pairs = set(zip(rows.types[seen].tolist(), rows.forms[seen].tolist(), strict=True))
    forms: dict[str, tuple[str, ...]] = {}
    for name, form in pairs:
        forms[name] = (*forms.get(name, ()), form)
    known = Uncertainty(dataset_sha256="", ranges={}, forms=forms)
    features = rows.features[seen]
    moving = [kernel for kernel in fold.kernels.values() if kernel.moves_data]
    if not moving:
        return {}
    beyond = times_beyond(rows.schema, rows.schema.matrix(moving), features.min(axis=0), features.max(axis=0))
    found = {kernel.id: Stranger("beyond", float(times)) for kernel, times in zip(moving, beyond, strict=True) if times > 1.0}
    for kernel in moving:
        if kernel.type not in types:
            found[kernel.id] = Stranger("unmeasured")
        elif known.of_other_form(kernel) is not None:
            found[kernel.id] = Stranger("other form")
    return found


def sources_of_model(times_ms: Sequence[tuple[Kernel, float]], differs: Mapping[str, Stranger], measured: Iterable[str],
                     latency_ms: float) -> Sources:
    """`sources` of a held-out model.

    Args:
        times_ms: each kernel with the GPU's time for all its runs.
        differs: as `strangers` gives it.
        measured: ids of the kernels whose measured time was taken.
        latency_ms: the prediction.
    """
    taken = set(measured)
    return sources(((time_ms, None if kernel.id in taken or not time_ms else differs.get(kernel.id, KNOWN))
                    for kernel, time_ms in times_ms), latency_ms)
