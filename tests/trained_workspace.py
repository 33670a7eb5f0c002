"""The small workspace of tests/fuzz, trained in this process."""

from __future__ import annotations

from pathlib import Path

from command import printed
from fuzz.small_workspace import (
    HELD_OUT,
    METRIC,
    OPSETS,
    TRAINING,
    conv_net,
    copies_ms,
    learning,
    made_up_ms,
    make_dataset,
    make_workspace,
    model_ms,
)

from hase.utils.paths import Workspace

__all__ = ["HELD_OUT", "METRIC", "OPSETS", "TRAINING", "conv_net", "copies_ms", "made_up_ms", "make_dataset", "model_ms",
           "train"]


def train(root: Path) -> Workspace:
    """Makes the workspace at `root`; the real commands train on its dataset."""
    workspace = make_workspace(root)
    for script, *options in learning(root):
        printed(str(script), *options)
    return workspace
