"""The user's cache: where it lies, what damages it, and how it stays small."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from hase.utils import cache_folder
from hase.utils.cache_folder import entry_key, keeping_no_json, kept_json, read_entry, write_entry


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HASE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for hase, xdg, folder in (("", "", ".cache/hase"), ("", "relative", ".cache/hase"), ("", str(tmp_path / "xdg"), "xdg/hase"),
                              (str(tmp_path / "mine"), str(tmp_path / "xdg"), "mine"), ("off", "", None)):
        monkeypatch.setenv("HASE_CACHE", hase)
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert cache_folder.cache_folder() == (folder and tmp_path / folder)
    for nowhere in ("off", "/dev/null/below"):
        monkeypatch.setenv("HASE_CACHE", nowhere)
        write_entry("a", b"kept nowhere")
        assert read_entry("a") is None


def test_an_entry_is_read_back_and_a_damaged_one_is_not(folder: Path) -> None:
    key = entry_key("model", 1, ("a", "b"))
    write_entry(key, b"something")
    assert read_entry(key) == b"something"
    assert entry_key("model", 1, ("a", "b")) == key != entry_key("model", 1, ("a", "c"))
    for damage in (b"", b"short", (folder / key).read_bytes()[:-1], (folder / key).read_bytes() + b"x"):
        (folder / key).write_bytes(damage)
        assert read_entry(key) is None


def test_json_is_made_once(folder: Path) -> None:
    make = Mock(return_value={"third": 1 / 3})
    assert [kept_json("k", make) for _ in range(3)] == [{"third": 1 / 3}] * 3
    make.assert_called_once()
    with keeping_no_json():
        kept_json("another", make)
        kept_json("k", make)
    assert (make.call_count, read_entry("another")) == (3, None), "neither read nor written"


def test_many_write_and_read_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees half an entry, also while entries are removed."""
    monkeypatch.setattr(cache_folder, "MOST_BYTES", 20 * 4096)
    contents = {f"{number}": bytes([number]) * 3000 for number in range(40)}

    def use(key: str) -> bool:
        write_entry(key, contents[key])
        return all(read_entry(name) in (None, data) for name, data in contents.items())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, contents))
    assert not list(folder.glob(".*"))


def test_what_was_not_used_for_longest_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "MOST_BYTES", 10 * 8192)
    for number in range(10):
        write_entry(f"{number}", bytes(8000))
        os.utime(folder / f"{number}", (1000 + number, 1000 + number))
    assert read_entry("0") is not None  # used again
    write_entry("10", bytes(8000))
    kept = {path.name for path in folder.iterdir()}
    assert {"0", "10"} <= kept
    assert "1" not in kept
    assert len(kept) * 8192 <= cache_folder.MOST_BYTES
