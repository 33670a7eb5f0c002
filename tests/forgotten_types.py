"""The predictors that come with Hase as if kernels of some types had never been measured, whatever its dataset holds by now."""

from __future__ import annotations

from hase.learned.kernels.sidecar import copy_predictors, read_sidecar, write_sidecar
from hase.utils.paths import SHIPPED, Workspace


def forget(workspace: Workspace, target: str, *types: str) -> None:
    """Puts predictors of a target that comes with Hase into a workspace, without kernel types."""
    folder = workspace.predictors(target)
    copy_predictors(SHIPPED / target, folder)
    sidecar = read_sidecar(folder)
    labels = {name: about.model_copy(update={
        "own_types": tuple(kind for kind in about.own_types if kind not in types),
        "learned": about.learned | {"predictor_of": {
            kind: predictor for kind, predictor in about.learned["predictor_of"].items() if kind not in types}}})
        for name, about in sidecar.labels.items()}
    write_sidecar(folder, sidecar.model_copy(update={"labels": labels}))
