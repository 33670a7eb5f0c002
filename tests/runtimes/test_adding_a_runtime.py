"""docs/adding_a_runtime.md lists the files of OpenVINO's support: all of them, and no others."""

from __future__ import annotations

import re

from test_layers import FILES

from hase.utils.paths import ROOT

PAGE = ROOT / "docs" / "adding_a_runtime.md"
FOLDERS = ("runtimes/openvino", "recipes/openvino", "tests/openvino_analysis")


def listed(mark: str) -> set[str]:
    """The files in those rows of the page's table that have a mark, `added` or `edited`."""
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return {name for row in rows if f"**{mark}**" in row[2] for name in re.findall(r"`([^`]+)`", row[1])}


def test_added_files_are_all_listed() -> None:
    in_folders = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*")
                  if path.is_file() and "__pycache__" not in path.parts}
    assert listed("added") == in_folders | {"requirements-openvino.txt", "docs/openvino.md"}


def test_edited_files_name_the_runtime() -> None:
    edited = listed("edited")
    assert edited == {"runtimes/__init__.py", "requirements-stages.txt", "benchmark/config.yaml", "README.md",
                      "docs/packages.md"}
    assert all("openvino" in (ROOT / name).read_text(encoding="utf-8") for name in edited)


def test_no_other_module_names_it() -> None:
    """Graph networks in stages also run under OpenVINO, but without this runtime."""
    modules = {str(path.relative_to(ROOT)) for path in FILES if "openvino" in path.read_text(encoding="utf-8").lower()}
    outside = {name for name in modules if not name.startswith(("runtimes/openvino/", "extras/graph_stages/", "tests/"))}
    assert outside == {"runtimes/__init__.py", "utils/lazy.py"}
