"""What another program passes to the library, checked: one error that says what is wrong and what is expected."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hase.utils.errors import UserError
from hase.utils.paths import Workspace

SHOWN = 60  # characters of a wrong value
LARGEST_SIZE = 2**63 - 1  # of ONNX
FREE_CALLS = 300  # calls within calls that a prediction may need, most of them while packages are imported


def shown(value: object) -> str:
    """A wrong value, as errors show it."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"


def workspace_at(place: Workspace | str | os.PathLike[str] | None) -> Workspace:
    """A workspace, also from the path of its folder; without one the repository.

    Raises:
        UserError: it is neither.
    """
    if place is None or isinstance(place, Workspace):
        return place or Workspace()
    if not isinstance(place, (str, os.PathLike)):
        raise UserError(f"workspace={shown(place)}: give the path of a folder, or a Workspace")
    folder = Path(place)
    if not folder.is_dir():
        raise UserError(f"workspace={shown(str(place))}: no such folder; check its name, or make it first")
    return Workspace(folder)


def checked_target(target: object) -> str | None:
    """The name of a target, or a part of it; None for this machine.

    Raises:
        UserError: it is no text.
    """
    if target is None or isinstance(target, str):
        return target
    raise UserError(f"target={shown(target)}: give the name of a target or a part of it, such as \"nvidia-h200\"")


def checked_count(name: str, value: object) -> int:
    """A number of things, at least one.

    Raises:
        UserError: it is none.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise UserError(f"{name}={shown(value)}: give a whole number from 1 on")


def checked_dims(dims: object) -> dict[str, int]:
    """Sizes by the names of dynamic dimensions.

    Raises:
        UserError: they are no mapping of names to whole numbers.
    """
    if dims is None:
        return {}
    if not isinstance(dims, Mapping):
        raise UserError(f"dims={shown(dims)}: give sizes by name, such as {{\"batch\": 8}}")
    sizes = {}
    for name, size in dims.items():
        try:
            sizes[name] = operator.index(size)
        except TypeError:
            raise UserError(f"dims: {name}={shown(size)}: a size is one whole number; predict once for each size") from None
        if not isinstance(name, str) or not 0 <= sizes[name] <= LARGEST_SIZE:
            raise UserError(f"dims: {shown(name)}={shown(size)}: a name and a size from 0 to 2^63 - 1 are expected")
    return sizes


def check_calls() -> None:
    """Checks that Python allows the caller as many further calls as a prediction needs. In the middle of one, an import would
    be left half done.

    Raises:
        UserError: the caller is too deep in calls of its own.
    """
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    if depth + FREE_CALLS > sys.getrecursionlimit():
        raise UserError(f"asked {depth} calls deep, and Python allows {sys.getrecursionlimit()}: a prediction may need "
                        f"{FREE_CALLS} more; ask from a place that is less deep, or raise sys.setrecursionlimit")
