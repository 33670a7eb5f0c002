"""The metadata of an ONNX file, read without its weights."""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO

from utils.lazy import onnx

METADATA_FIELD = 14  # of ModelProto in onnx.proto
VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5  # protobuf's wire types
FIXED_BYTES = {FIXED_64: 8, FIXED_32: 4}


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata in an ONNX file by key; empty where the file is none, or cut short. Takes a millisecond at any size."""
    found: dict[str, str] = {}
    end = path.stat().st_size
    with path.open("rb") as file:
        while (tag := _varint(file)) is not None:
            field, wire = tag >> 3, tag & 7
            size = _varint(file) if wire in (VARINT, BYTES) else FIXED_BYTES.get(wire)
            size = 0 if wire == VARINT else size
            if size is None or file.tell() + size > end:
                return {}
            if field == METADATA_FIELD and wire == BYTES:
                entry = onnx.StringStringEntryProto.FromString(file.read(size))
                found[entry.key] = entry.value
            else:
                file.seek(size, io.SEEK_CUR)
    return found


def _varint(file: BinaryIO) -> int | None:
    """The number that comes next, seven bits a byte, the lowest first; None at the end of the file."""
    value = 0
    for shift in range(0, 64, 7):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return value
    return None
