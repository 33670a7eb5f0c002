"""Configs: reading, extending and changing by `--set`, and errors that name the file and the key."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import Field

from hase.utils.config import Config, read_config
from hase.utils.errors import UserError
from hase.utils.paths import ROOT


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
    ("kernel: {budget_s: -1}", ["kernel.budget_s", "greater than 0", "got -1"]),
    ("levels: many", ["levels", "tuple", "got 'many'"]),
    ("device: tpu\nlevls: 1", ["device", "auto|cpu|cuda", "levls: unknown key"]),
    ("- 1", ["(the whole file)", "dictionary"]),
    ("levels: [1\nkernel: }", ["line 2", "not valid YAML"]),
])
def test_config_errors_name_file_key_and_what_is_allowed(tmp_path: Path, text: str, expected: Sequence[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        read_config(path, Outer)
    assert all(part in str(raised.value) for part in [str(path), *expected]), raised.value


def test_a_list_is_not_called_too_short_because_of_an_entry_that_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text, expected in (("levels: [high]", "got 'high'"), ("levels: []", "at least 1 item")):
        path.write_text(text)
        with pytest.raises(UserError, match=expected) as raised:
            read_config(path, Outer)
        assert ("at least" in str(raised.value)) == (text == "levels: []")


def test_config_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("levels: [0, 0.5]  # a comment\nkernel: {budget_s: 2}")
    assert read_config(path, Outer) == Outer(levels=(0.0, 0.5), kernel=Inner(budget_s=2.0))
    path.write_text("")
    assert read_config(path, Outer) == Outer()
    with pytest.raises(UserError, match="no such config file"):
        read_config(tmp_path / "none.yaml", Outer)


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
    (folder / "mine" / "empty.yaml").write_text("extends: mine.yaml")
    assert read_config(folder / "mine" / "empty.yaml", Outer) == read_config(mine, Outer)
    assert read_config(mine, Outer, ["kernel={runs: 2}", "limit_s=3"]).limit_s == 3.0
    assert read_config(mine, Outer, ["limit_s="]).limit_s is None


@pytest.mark.parametrize(("text", "changes", "message"), [
    ("extends: ../base.yaml\nlevls: [1]", [], r"mine\.yaml: levls: unknown key; did you mean levels\?"),
    ("extends: ../base.yaml\nkernel: {budgets: 1}", [], r"mine\.yaml: kernel\.budgets: unknown key; did you mean budget_s\?"),
    ("extends: ../base.yaml\nkernel: {runs: 0}", [], r"mine\.yaml: kernel\.runs: .* \(got 0\)"),
    ("extends: none.yaml", [], r"mine\.yaml: extends: \S+none\.yaml: no such config file"),
    ("extends: mine.yaml", [], r"mine\.yaml: extends: a config can't extend itself \(\S+mine\.yaml extends \S+mine\.yaml\)"),
    ("extends: [a, b]", [], r"mine\.yaml: extends: the path of another config is expected \(got \['a', 'b'\]\)"),
    ("extends: ../base.yaml\nkernel: 3", [], r"mine\.yaml: kernel: .* \(got 3\)"),
    ("{}", ["levls=[1]"], r"^--set levls=\[1\]: levls: unknown key; did you mean levels\?"),
    ("{}", ["kernel.runs=many"], r"^--set kernel\.runs=many: kernel\.runs: .*integer.*\(got 'many'\)"),
    ("levels: [1]", ["levels.0=1"], r"^--set levels\.0=1: levels: .*tuple"),
    ("{}", ["runs"], r"--set runs: write KEY=VALUE, .*--set kernel\.budget_s=0\.1"),
    ("{}", [".runs=1"], r"--set \.runs=1: write KEY=VALUE"),
    ("{}", ["levels=[1"], r"--set levels=\[1, line 1: not valid YAML"),
    ("{}", ["extends=a.yaml"], r"^--set extends=a\.yaml: extends: unknown key"),
    ("kernel: {runs: 0}", ["device=tpu"], r"mine\.yaml: kernel\.runs: .*; --set device=tpu: device: "),
])
def test_an_error_names_the_file_or_the_change(folder: Path, text: str, changes: list[str], message: str) -> None:
    (folder / "mine" / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as raised:
        read_config(folder / "mine" / "mine.yaml", Outer, changes)
    assert "\n" not in str(raised.value)


def test_an_error_of_the_base_names_the_base(folder: Path) -> None:
    (folder / "base.yaml").write_text("kernel: {budget_s: 0}\nlevls: 1")
    with pytest.raises(UserError, match=r"^\S+base\.yaml: kernel\.budget_s: .*; levls: unknown key") as raised:
        read_config(folder / "mine" / "mine.yaml", Outer)
    assert "mine.yaml" not in str(raised.value)


def test_a_cycle_is_refused(folder: Path) -> None:
    (folder / "base.yaml").write_text("extends: mine/mine.yaml")
    with pytest.raises(UserError, match=r"base\.yaml: extends: a config can't extend itself \(\S+ extends \S+ extends \S+\)"):
        read_config(folder / "mine" / "mine.yaml", Outer)


def test_yaml_that_contains_itself_is_refused(folder: Path) -> None:
    (folder / "base.yaml").write_text("&a {kernel: *a}")
    (folder / "mine" / "mine.yaml").write_text("&b {extends: ../base.yaml, kernel: *b}")
    with pytest.raises(UserError, match=r"mine\.yaml: (not a config: nested too deeply|kernel)"):
        read_config(folder / "mine" / "mine.yaml", Outer)


@pytest.mark.parametrize("module", ["benchmark.collector", "runtimes.tvm.operator_sampler", "training.train_kernel_model"])
def test_help_shows_how_a_config_is_changed(module: str, capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(f"hase.{module}").main()
    assert "for example --set '" in " ".join(capsys.readouterr().out.split())


def test_every_config_of_a_command_line_can_be_changed() -> None:
    """`--config` is added together with `--set`, and both are read."""
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        if not parts[0].startswith(".") and parts[0] != "tests" and path.name != "cli.py":  # environments begin with a dot
            text = path.read_text(encoding="utf-8")
            assert 'add_argument("--config"' not in text, path
            assert "read_config(args.config" not in text or "args.changes)" in text, path
