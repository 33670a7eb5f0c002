"""A runtime is its own folder and a line of the table: no other module names it."""

from __future__ import annotations

import subprocess

from hase.utils.paths import ROOT


def test_no_other_module_names_openvino() -> None:
    """Graph networks in stages also run under OpenVINO, but without this runtime."""
    found = subprocess.check_output(["git", "grep", "-il", "openvino", "--", "*.py"], cwd=ROOT, text=True)
    outside = {name for name in found.split() if not name.startswith(("runtimes/openvino/", "extras/", "tests/"))}
    assert outside == {"runtimes/__init__.py", "utils/lazy.py"}
