"""Packages that a user may leave out: tests that need one are skipped, or fail where HASE_NEEDS_PACKAGES is set. Some are
hidden."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDED = "HASE_NEEDS_PACKAGES"


def needs(package: str, extra: str) -> None:
    """Skips or fails a test or fixture that needs a package which is missing. A folder of tests with its name is none."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        message = f"needs the package {package}: pip install '.[{extra}]'"
        pytest.fail(message) if os.environ.get(NEEDED) else pytest.skip(message)


def without(packages: Iterable[str], folder: Path) -> dict[str, str]:
    """The environment of processes, and of those that they start, for which some packages are missing. Files go to `folder`."""
    folder.mkdir()
    for package in packages:
        (folder / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}', name={package!r})\n")
    return os.environ | {"PYTHONPATH": str(folder)}
