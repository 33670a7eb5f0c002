"""Option types for argparse: each turns the text of an option into its value, or says what the text should be."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Literal

LAST_PORT = 65535


def positive(text: str) -> float:
    """An option that is a positive number."""
    value = _number(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def pace(text: str) -> float | Literal["measure"]:
    """An option that is the pace of a host: a ratio, or `measure`."""
    try:
        return "measure" if text == "measure" else positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a ratio, such as 1.15, nor the word measure") from None


def percentile(text: str) -> float:
    """An option that is a percentile, in per cent."""
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
    """An option that is a whole number, 0 or more."""
    if not re.fullmatch(r"\+?[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def count(text: str) -> int:
    """An option that is a whole number, 1 or more."""
    if not re.fullmatch(r"\+?0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def counts(text: str) -> list[int]:
    """An option that is a list of whole numbers, 1 or more, separated by commas."""
    return [count(part) for part in text.split(",")]


def port(text: str) -> int:
    """An option that is a port to listen on; 0 is any free port."""
    if not text.isdecimal() or int(text) > LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to {LAST_PORT}")
    return int(text)


def existing(text: str) -> Path:
    """An option that names a file or folder to read."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or folder")
    return path


def out_file(text: str) -> Path:
    """An option that names a file to write; checked before the work starts."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no folder {path.parent}; make it first, or check its name")
    return path


def address(text: str) -> tuple[str, int]:
    """An option that says where to listen: `[ADDRESS:]PORT`."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text}: write PORT or ADDRESS:PORT")
    return host, int(port)
