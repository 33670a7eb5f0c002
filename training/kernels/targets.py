"""What the scripts in training/ share: their options, and the loop over targets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hase.learned import target_files
from hase.learned.target_files import TRAIN
from hase.utils import cli
from hase.utils.paths import ROOT, Workspace, targets_in

CONFIG = ROOT / "training" / "config.yaml"
Show = Callable[[Sequence[Mapping[str, Any]], str], None]  # prints rows as a table, under a title


def add_options(parser: argparse.ArgumentParser, target: str = "a target in training/predictors (default: all)") -> None:
    """Adds `--target`, with the help text `target`, `--config` and `--set`."""
    parser.add_argument("--target", help=target)
    add_training_config(parser)


def add_training_config(parser: argparse.ArgumentParser) -> None:
    """Adds `--config` and `--set`, for a TrainingConfig."""
    cli.add_config(parser, CONFIG, "xgboost.trees=100", "how to train")


def trained_targets(workspace: Workspace) -> list[str]:
    """The names of all targets that have predictors."""
    return targets_in(workspace.predictors(""), target_files.PREDICTORS.name, f"no predictors; train them with: {TRAIN}")


def for_each_target(targets: Iterable[str], work: Callable[[str, Show], Any], as_json: bool, as_list: bool = False) -> None:
    """Calls `work` for each target, and prints its tables or, with `as_json`, the results. `work` takes a target and a function
    that prints a table; it returns the result for JSON, which is an object by target, or a list with `as_list`."""
    show: Show = (lambda rows, title: None) if as_json else cli.print_table
    results = {target: work(target, show) for target in targets}
    if as_json:
        cli.print_json(list(results.values()) if as_list else results)
