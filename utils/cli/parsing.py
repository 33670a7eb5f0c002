"""The command line of a script: the options that all scripts share, and the workspace."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from utils import logger
from utils.errors import UserError
from utils.paths import ROOT, Workspace

EXIT_USAGE = 2


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line and suggest a known option for an unknown one.

    Options can't be abbreviated: a typo could be taken for another option, and a new option could break old commands.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for word in itertools.takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if re.fullmatch(r"--?[a-zA-Z][\w-]*", name) and name not in self._option_string_actions:
                self.error(f"unknown option {name}{self._suggestion(name)}")
        return super().parse_known_args(words, namespace)

    def _suggestion(self, name: str) -> str:
        known = [option for option in self._option_string_actions if option.startswith("--")]
        asked = "--" + name.lstrip("-").lower().replace("_", "-")
        near = [option for option in known if option.startswith(asked)] or difflib.get_close_matches(asked, known, 1, 0.7)
        return f"; did you mean {' or '.join(near)}?" if near else ""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"error: {message} (see {self.prog} --help)\n")


def parser(doc: str | None, examples: str) -> argparse.ArgumentParser:
    """An argument parser with the shared options. Its help begins with the script's docstring and ends with `examples`.

    Args:
        doc: the script's `__doc__`.
        examples: shell commands, one per line.
    """
    made = Parser(
        description=doc, epilog="examples:\n" + examples.strip("\n"), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = made.add_argument_group("shared options")
    shared.add_argument("--workspace", type=Path, default=ROOT, metavar="DIR",
                        help="folder that holds what the phases write (default: the repository)")
    shared.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    shared.add_argument("--verbose", action="store_true", help="debug lines on stderr too")
    shared.add_argument("--quiet", action="store_true", help="only warnings and errors on stderr")
    return made


def start(args: argparse.Namespace, begins: bool = False) -> Workspace:
    """Configures logging by the shared options, and returns the workspace.

    Args:
        begins: the workspace need not exist: the script makes it.

    Raises:
        UserError: the workspace is a file, or does not exist.
    """
    folder = Path(args.workspace)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--workspace {folder}: a file; a workspace is a folder")
    if not folder.exists() and not begins:
        raise UserError(f"--workspace {folder}: no such folder; check its name, or make it first: mkdir -p {folder}")
    workspace = Workspace(folder.resolve())
    logger.configure(workspace.log_file, verbose=args.verbose, quiet=args.quiet)
    return workspace
