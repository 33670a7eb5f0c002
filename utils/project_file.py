"""Options that a project's `hase.toml` gives, so that nobody repeats them on each command line.

    on = "h200"                        # at the top: for every command that has the option
    slo-ms = 10

    [predict]                          # for one command of `hase`
    model = ["small.onnx", "large.onnx"]
    batch = [1, 8, 32]

The file is read from the current folder. What the command line gives wins.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hase.utils.errors import UserError

NAME = "hase.toml"


def project_words(parser: argparse.ArgumentParser, command: str, words: Sequence[str]) -> list[str]:
    """The words that the file adds to a command line. `command`: its name, as in `hase predict`; "" for other scripts.

    Raises:
        UserError: the file can't be read, or its table for the command names an option that the command does not have.
    """
    path = Path(NAME)
    if not path.is_file():
        return []
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{NAME}: not a TOML file: {error}") from None
    own = document.get(command, {}) if command else {}
    if not isinstance(own, Mapping):
        raise UserError(f"{NAME}: {command} is a table with the options of hase {command}")
    options = {option: action for action in parser._actions for option in action.option_strings}
    if unknown := [name for name in own if f"--{name}" not in options]:
        raise UserError(f"{NAME}: hase {command} has no option --{unknown[0]}")
    given = {options[word.partition("=")[0]].dest for word in words if word.partition("=")[0] in options}
    shared = {name: value for name, value in document.items() if not isinstance(value, Mapping) and f"--{name}" in options}
    return [word for name, value in (shared | dict(own)).items() if options[f"--{name}"].dest not in given
            for word in _words(f"--{name}", value, options[f"--{name}"])]


def _words(option: str, value: Any, action: argparse.Action) -> Iterator[str]:
    """An option and its value as words of a command line."""
    if isinstance(value, bool):
        yield from [option] if value else []
    elif not isinstance(value, list):
        yield from (option, str(value))
    elif action.nargs == "+":
        yield from (option, *map(str, value))
    else:
        yield from (option, ",".join(map(str, value)))
