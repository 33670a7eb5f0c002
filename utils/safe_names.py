"""Names of kernels, models, flavours and predictors that become file names. A name read from a file is not trusted.

A field of a schema that becomes a file name is a `FileName`: a record whose name points to another folder is refused when it is
read. Names taken from a model go through `as_file_name`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

from pydantic import AfterValidator

LONGEST_BYTES = 240  # of a name: file systems allow 255, and a suffix is added
_UNSAFE = re.compile(r'[/\\\x00-\x1f\x7f]')  # separates folders, or is not printable


def _checked(name: str) -> str:
    if name in ("", ".", ".."):
        raise ValueError(f"{name!r} can't be the name of a file")
    return _checked_part(name)


def _checked_part(name: str) -> str:
    if unsafe := _UNSAFE.search(name):
        raise ValueError(f"{name[:80]!r} can't be the name of a file: it holds {unsafe.group()!r}")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name[:80]!r} can't be the name of a file: it is no valid text") from None
    if length > LONGEST_BYTES:
        raise ValueError(f"{name[:80]!r}… can't be the name of a file: it is longer than {LONGEST_BYTES} bytes")
    return name


FileName = Annotated[str, AfterValidator(_checked)]
FileNamePart = Annotated[str, AfterValidator(_checked_part)]  # a part of a file name; may be empty


def as_file_name(name: str) -> str:
    """`name` as a `FileName`: characters that are not allowed become "_", and a name that is too long is cut and gets a
    hash."""
    safe = _UNSAFE.sub("_", name).encode("utf-8", "replace").decode()
    if safe in ("", ".", ".."):
        safe = f"_{safe}"
    if len(safe.encode()) <= LONGEST_BYTES:
        return safe
    digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8]
    return safe.encode()[:LONGEST_BYTES - 9].decode("utf-8", "ignore") + "~" + digest
