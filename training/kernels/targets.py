"""The targets that a script of this folder works on: its options, and one result per target."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.kernels.sidecar import TRAIN, sidecar_path
from utils import cli
from utils.paths import ROOT, Workspace, targets_in

CONFIG = ROOT / "training" / "config.yaml"
Show = Callable[[Sequence[Mapping[str, Any]], str], None]  # prints rows as a table with a title


def add_options(parser: argparse.ArgumentParser, target: str = "") -> None:
    """Adds `--target`, which is described by `target`, and `--config`."""
    parser.add_argument("--target", help=target or "name of a target in training/predictors (default: all)")
    parser.add_argument("--config", type=Path, default=CONFIG, help="settings (default: training/config.yaml)")


def trained_targets(workspace: Workspace) -> list[str]:
    """Every target that has predictors.

    Raises:
        UserError: none has.
    """
    return targets_in(workspace.predictors(""), sidecar_path(Path()).name, f"no predictors; train them with: {TRAIN}")


def for_each_target(targets: Iterable[str], work: Callable[[str, Show], Any], as_json: bool) -> dict[str, Any]:
    """The result of `work` by target, for JSON.

    Args:
        targets: their names, in the order of work.
        work: given a target and a function that prints a table (or does not, where `as_json`), returns the target's result.
        as_json: whether the results are printed as JSON later, in place of the tables.
    """
    def show(rows: Sequence[Mapping[str, Any]], title: str) -> None:
        if not as_json:
            cli.print_table(rows, title)

    return {target: work(target, show) for target in targets}
