"""Types of options for argparse: each turns an option's text into its value, or refuses it and says what it should be."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Literal

LAST_PORT = 65535


def positive(text: str) -> float:
    """The type of an option that is a positive number."""
    value = _number(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def pace(text: str) -> float | Literal["measure"]:
    """The type of an option that is the pace of a host: a ratio, or `measure`."""
    try:
        return "measure" if text == "measure" else positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a ratio, such as 1.15, nor the word measure") from None


def percentile(text: str) -> float:
    """The type of an option that is a percentile, in per cent."""
    value = _number(text)
    if not 0.0 < value <= 100.0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 100")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def whole(text: str) -> int:
    """The type of an option that is a whole number, 0 or more."""
    if not re.fullmatch(r"\+?[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def count(text: str) -> int:
    """The type of an option that is a whole number, 1 or more."""
    if not re.fullmatch(r"\+?0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def counts(text: str) -> list[int]:
    """The type of an option that is several of them, with commas between."""
    return [count(part) for part in text.split(",")]


def port(text: str) -> int:
    """The type of an option that is a port to listen at; 0 is a free one."""
    if not text.isdecimal() or int(text) > LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to {LAST_PORT}")
    return int(text)


def out_file(text: str) -> Path:
    """The type of an option that names a file to write: looked at before the work starts."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no folder {path.parent}; make it first, or check its name")
    return path


def address(text: str) -> tuple[str, int]:
    """The type of an option that says where to listen, `[ADDRESS:]PORT`."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text}: write PORT or ADDRESS:PORT")
    return host, int(port)
