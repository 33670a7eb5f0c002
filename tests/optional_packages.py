"""Packages that a user may leave out: their tests are skipped, or fail where HASE_NEEDS_PACKAGES is set."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

NEEDED = "HASE_NEEDS_PACKAGES"


def needs(package: str, requirements: str) -> None:
    """Skips or fails a test or fixture that needs a package which is missing."""
    if find_spec(package) is None:
        message = f"needs the package {package}: pip install -r {requirements}"
        pytest.fail(message) if os.environ.get(NEEDED) else pytest.skip(message)
