"""UBJSON (https://ubjson.org, draft 12), as far as XGBoost writes and reads it for its models."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import numpy as np

NUMBERS = {"i": ">i1", "U": ">u1", "I": ">i2", "l": ">i4", "L": ">i8", "d": ">f4", "D": ">f8"}  # by UBJSON's letter
HEADS = {np.dtype(kind): f"[${letter}#".encode() for letter, kind in NUMBERS.items()}  # of an array of such numbers
CONSTANTS = {"T": True, "F": False, "Z": None}


def read(data: bytes) -> Any:
    """The value in `data`. An array of numbers of one type becomes a numpy array, any other a list."""
    value, _ = _read(memoryview(data), 1, chr(data[0]))
    return value


def _read(data: memoryview, at: int, letter: str) -> tuple[Any, int]:
    """A value whose letter has been read, and where it ends."""
    if letter in CONSTANTS:
        return CONSTANTS[letter], at
    if letter in NUMBERS:
        kind = np.dtype(NUMBERS[letter])
        return np.frombuffer(data, kind, 1, at)[0].item(), at + kind.itemsize
    if letter == "S":
        return _read_text(data, at)
    if letter == "{":
        return _read_object(data, at)
    if letter == "[":
        return _read_array(data, at)
    raise ValueError(f"byte {at}: a value of type {letter!r}")


def _read_text(data: memoryview, at: int) -> tuple[str, int]:
    length, at = _read(data, at + 1, chr(data[at]))
    return bytes(data[at:at + length]).decode(), at + length


def _read_object(data: memoryview, at: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    while data[at] != ord("}"):
        key, at = _read_text(data, at)
        members[key], at = _read(data, at + 1, chr(data[at]))
    return members, at + 1


def _read_array(data: memoryview, at: int) -> tuple[Any, int]:
    letter = ""
    if data[at] == ord("$"):
        letter, at = chr(data[at + 1]), at + 2
    if data[at] != ord("#"):
        raise ValueError(f"byte {at}: an array without its length")
    count, at = _read(data, at + 2, chr(data[at + 1]))
    if letter:
        kind = np.dtype(NUMBERS[letter])
        return np.frombuffer(data, kind, count, at), at + count * kind.itemsize
    values = []
    for _ in range(count):
        value, at = _read(data, at + 1, chr(data[at]))
        values.append(value)
    return values, at


def write(value: Any) -> bytes:
    """The opposite of `read`, for texts, whole numbers, dictionaries, lists, and numpy arrays of one dimension with their bytes
    in UBJSON's order (`>`)."""
    parts: list[bytes] = []
    _write(value, parts)
    return b"".join(parts)


def _write(value: Any, parts: list[bytes]) -> None:
    if isinstance(value, str):
        parts += (b"S", _text(value))
    elif isinstance(value, int):
        parts.append(_count(value))
    elif isinstance(value, np.ndarray):
        parts += (HEADS[value.dtype], _count(len(value)), value.tobytes())
    elif isinstance(value, dict):
        parts.append(b"{")
        for key, member in value.items():
            parts.append(_text(key))
            _write(member, parts)
        parts.append(b"}")
    else:
        parts += (b"[#", _count(len(value)))
        for member in value:
            _write(member, parts)


def _count(number: int) -> bytes:
    return struct.pack(">cq", b"L", number)


@lru_cache(10_000)
def _text(text: str) -> bytes:
    encoded = text.encode()
    return _count(len(encoded)) + encoded
