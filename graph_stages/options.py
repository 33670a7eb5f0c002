"""Options that the commands for plans of stages share."""

from __future__ import annotations

import argparse
from pathlib import Path

from graph_stages.interpolation import Size
from utils import cli
from utils.paths import Workspace


def add_results(parser: argparse.ArgumentParser) -> None:
    """`--results` and `--home`: the tables, and the unit that plans start from."""
    parser.add_argument("--results", type=labelled, action="append", default=[], metavar="[NAME=]DIR",
                        help="folder with the tables; of several, NAME is added to the names of a folder's units "
                             "(default: graph_stages/results)")
    parser.add_argument("--home", metavar="UNIT", help="where plans begin and end (default: CPU)")


def add_sizes(parser: argparse.ArgumentParser, what: str) -> None:
    """`--sizes`."""
    parser.add_argument("--sizes", type=size, nargs="+", metavar="NODES/EDGES", help=f"{what} (default: those measured)")


def folders_of(args: argparse.Namespace, workspace: Workspace) -> list[tuple[str, Path]]:
    """The folders of `--results` with their labels."""
    return args.results or [("", workspace.stage_results)]


def labelled(text: str) -> tuple[str, Path]:
    """An option that is a folder, or NAME=FOLDER."""
    label, _, folder = text.rpartition("=")
    return label, Path(folder)


def size(text: str) -> Size:
    """An option that is NODES/EDGES."""
    try:
        nodes, edges = map(cli.count, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NODES/EDGES, such as 4000/6000") from None
    return nodes, edges
