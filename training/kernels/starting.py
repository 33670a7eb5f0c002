"""Finds the predictors of another target to start from."""

from __future__ import annotations

from typing import NamedTuple

from training.kernels.estimators import KernelModel
from training.kernels.features import KERNEL_FEATURES
from training.kernels.predictors import Predictors, read_predictors
from training.kernels.settings import LAUNCHES
from training.kernels.sidecar import sidecar_path
from training.kernels.transfer import OtherPredictors
from utils.errors import UserError
from utils.paths import SHIPPED, Workspace


class StartFrom(NamedTuple):
    """Another target's predictors."""

    target: str
    predictors: Predictors

    @classmethod
    def named(cls, workspace: Workspace, name: str) -> StartFrom:
        """The predictors of target `name` in the workspace, or else those that come with Hase.

        Raises:
            UserError: there are none, or they read other features than this training computes.
        """
        folders = [folder for folder in (workspace.predictors(name), SHIPPED / name) if sidecar_path(folder).is_file()]
        if not folders:
            shipped = sorted(path.parent.name for path in SHIPPED.glob(f"*/{sidecar_path(SHIPPED).name}"))
            raise UserError(f"--start-from {name}: no predictors of that target in {workspace.predictors('')}, nor with Hase "
                            f"(which has: {', '.join(shipped) or 'none'})")
        predictors = read_predictors(folders[0])
        if predictors.schema.names != KERNEL_FEATURES.names:  # values of another version are corrected with the times
            raise UserError(f"--start-from {name}: its predictors read features {predictors.schema}, and a training computes "
                            f"{KERNEL_FEATURES}; train {name} again")
        return cls(name, predictors)

    def of(self, target: str, label: str) -> OtherPredictors | None:
        """The predictors to start from for a label of `target`: those of the same label, else of the other target's first one.

        None for the target itself, and where the labels mean different things: launches are no times.

        Raises:
            UserError: the predictors start from another target themselves.
        """
        labels = self.predictors.labels
        theirs = label if label in labels else labels[0]
        if target == self.target or (label == LAUNCHES) != (theirs == LAUNCHES):
            return None
        model = self.predictors.kernel_model(theirs)
        if not isinstance(model, KernelModel):
            raise UserError(f"--start-from {self.target}: its predictors start from {model.start.target} themselves; name that "
                            "target instead")
        return OtherPredictors(self.target, model)
