"""Protobuf's wire format, for files that are too large to be parsed whole: the fields of a message, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5  # wire types
FIXED_BYTES = {FIXED_64: 8, FIXED_32: 4}
LONGEST_VARINT = 10  # bytes


class Field(NamedTuple):
    """A field of a message in some bytes: its number, its wire type, and where it begins, where its contents begin and end."""

    number: int
    wire: int
    begin: int
    contents: int
    end: int


def fields(content: memoryview, begin: int, end: int) -> Iterator[Field]:
    """The fields of the message between two places.

    Raises:
        ValueError: there is no message.
    """
    place = begin
    while place < end:
        tag, contents = _varint(content, place, end)
        wire = tag & 7
        if wire == VARINT:
            stop = _varint(content, contents, end)[1]
        elif wire == BYTES:
            size, contents = _varint(content, contents, end)
            stop = contents + size
        elif wire in FIXED_BYTES:
            stop = contents + FIXED_BYTES[wire]
        else:
            raise ValueError(f"wire type {wire}")
        if stop > end:
            raise ValueError("cut short")
        yield Field(tag >> 3, wire, place, contents, stop)
        place = stop


def _varint(content: memoryview, place: int, end: int) -> tuple[int, int]:
    """The number at a place, seven bits a byte, the lowest first; and the place after it."""
    value = 0
    for count in range(min(LONGEST_VARINT, end - place)):
        byte = content[place + count]
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value, place + count + 1
    raise ValueError("cut short")


def varint(number: int) -> bytes:
    """A number that is not negative as the wire format holds it."""
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    made.append(number)
    return bytes(made)


def with_contents(number: int, contents: bytes) -> bytes:
    """A field that holds these bytes."""
    return varint(number << 3 | BYTES) + varint(len(contents)) + contents
