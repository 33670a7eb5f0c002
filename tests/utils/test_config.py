"""Configs: reading, extending and changing by `--set`, and errors that name the file and the key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import Field

from hase.utils.config import Config, read_config
from hase.utils.errors import UserError


class Inner(Config):
    budget_s: float = Field(1.0, gt=0)
    runs: int = Field(5, ge=1)


class Outer(Config):
    levels: tuple[float, ...] = Field((0.0,), min_length=1)
    kernel: Inner = Inner()
    limit_s: float | None = None
    device: str = Field("auto", pattern="^(auto|cpu|cuda)$")


@pytest.mark.parametrize(("text", "expected"), [
    ("levls: [0.5]", ["levls: unknown key; did you mean levels?", "allowed: levels, kernel, limit_s, device"]),
    ("kernel: {budgets: 1}", ["kernel.budgets: unknown key; did you mean budget_s?", "allowed: budget_s"]),
    ("kernel: {budget_s: long}", ["kernel.budget_s", "valid number", "got 'long'"]),
    ("levels: many", ["levels", "tuple", "got 'many'"]),
    ("device: tpu\nlevls: 1", ["device", "auto|cpu|cuda", "levls: unknown key"]),
    ("- 1", ["(the whole file)", "dictionary"]),
    ("levels: []", ["at least 1 item"]),
    ("levels: [1\nkernel: }", ["line 2", "not valid YAML"]),
])
def test_config_errors_name_file_key_and_what_is_allowed(tmp_path: Path, text: str, expected: Sequence[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        read_config(path, Outer)
    assert all(part in str(raised.value) for part in [str(path), *expected]), raised.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config and one in another folder that extends it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "base.yaml").write_text("levels: [0, 0.5]\nkernel: {budget_s: 2}\ndevice: cpu")
    (tmp_path / "mine" / "mine.yaml").write_text("extends: ../base.yaml\nkernel: {runs: 7}\nlevels: [0.25]")
    return tmp_path


def test_a_config_states_only_what_differs(folder: Path) -> None:
    """Mappings are merged, lists are replaced; a chain of configs and `--set` in their order."""
    mine = folder / "mine" / "mine.yaml"
    assert read_config(mine, Outer) == Outer(levels=(0.25,), kernel=Inner(budget_s=2.0, runs=7), device="cpu")
    (folder / "mine" / "third.yaml").write_text("extends: mine.yaml\nkernel: {budget_s: 3}")
    changes = ["device=auto", "kernel.runs=8", "kernel.runs=9", "levels=[0, 1]"]
    third = read_config(folder / "mine" / "third.yaml", Outer, changes)
    assert third == Outer(levels=(0.0, 1.0), kernel=Inner(budget_s=3.0, runs=9), device="auto")
    assert read_config(mine, Outer, ["kernel={runs: 2}", "limit_s=3"]).limit_s == 3.0
    assert read_config(mine, Outer, ["limit_s="]).limit_s is None
    mine.write_text("")
    assert read_config(mine, Outer) == Outer()


@pytest.mark.parametrize(("text", "changes", "message"), [
    ("extends: ../base.yaml\nlevls: [1]", [], r"mine\.yaml: levls: unknown key; did you mean levels\?"),
    ("extends: none.yaml", [], r"mine\.yaml: extends: \S+none\.yaml: no such config file"),
    ("extends: mine.yaml", [], r"mine\.yaml: extends: a config can't extend itself \(\S+mine\.yaml extends \S+mine\.yaml\)"),
    ("{}", ["levls=[1]"], r"^--set levls=\[1\]: levls: unknown key; did you mean levels\?"),
    ("{}", ["kernel.runs=many"], r"^--set kernel\.runs=many: kernel\.runs: .*integer.*\(got 'many'\)"),
    ("{}", ["runs"], r"--set runs: write KEY=VALUE, .*--set kernel\.budget_s=0\.1"),
    ("{}", ["levels=[1"], r"--set levels=\[1, line 1: not valid YAML"),
    ("{}", ["extends=a.yaml"], r"^--set extends=a\.yaml: extends: unknown key"),
    ("kernel: {runs: 0}", ["device=tpu"], r"mine\.yaml: kernel\.runs: .*; --set device=tpu: device: "),
    ("extends: ../bad.yaml", [], r"^\S+bad\.yaml: kernel\.budget_s: (?!.*mine\.yaml).*; levls: unknown key"),
    ("extends: ../circle.yaml", [], r"circle\.yaml: extends: a config can't extend itself \(\S+ extends \S+ extends \S+\)"),
    ("&b {extends: ../itself.yaml, kernel: *b}", [], r"mine\.yaml: (not a config: nested too deeply|kernel)"),
])
def test_an_error_names_the_file_or_the_change(folder: Path, text: str, changes: list[str], message: str) -> None:
    (folder / "mine" / "mine.yaml").write_text(text)
    (folder / "bad.yaml").write_text("kernel: {budget_s: 0}\nlevls: 1")
    (folder / "circle.yaml").write_text("extends: mine/mine.yaml")
    (folder / "itself.yaml").write_text("&a {kernel: *a}")
    with pytest.raises(UserError, match=message) as raised:
        read_config(folder / "mine" / "mine.yaml", Outer, changes)
    assert "\n" not in str(raised.value)
