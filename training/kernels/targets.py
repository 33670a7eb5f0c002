"""What the scripts in training/ share: their options, and a loop over targets with one result each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hase.learned.kernels.sidecar import TRAIN, sidecar_path
from hase.utils import cli
from hase.utils.paths import ROOT, Workspace, targets_in

CONFIG = ROOT / "training" / "config.yaml"
Show = Callable[[Sequence[Mapping[str, Any]], str], None]  # prints rows as a table, under a title


def add_options(parser: argparse.ArgumentParser, target: str = "") -> None:
    """Adds `--target`, with the help text `target`, `--config` and `--set`."""
    parser.add_argument("--target", help=target or "name of a target in training/predictors (default: all)")
    add_config(parser)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds `--config` and `--set`, for a TrainingConfig."""
    cli.add_config(parser, CONFIG, "xgboost.trees=100", "how to train")


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
        work: takes a target and a function that prints a table; returns the target's result.
        as_json: whether tables are not printed, since the caller prints the results as JSON.
    """
    def show(rows: Sequence[Mapping[str, Any]], title: str) -> None:
        if not as_json:
            cli.print_table(rows, title)

    return {target: work(target, show) for target in targets}
