"""What schedule.py lists is there: a test or fixture that was renamed would silently count as quick."""

from __future__ import annotations

from pathlib import Path

from schedule import LONGEST_FIRST, MEASURING, MEASURING_FILES, SLOW_FILES, SLOW_FIXTURES, SLOW_TESTS

TESTS = Path(__file__).resolve().parent


def test_listed_files_tests_and_fixtures_exist() -> None:
    listed = {*MEASURING_FILES, *SLOW_FILES, *SLOW_TESTS, *LONGEST_FIRST} - {MEASURING}
    assert not {file for file in listed if not (TESTS / file).is_file()}
    assert not [(file, name) for file, names in SLOW_TESTS.items() for name in names
                if f"def {name}(" not in (TESTS / file).read_text(encoding="utf-8")]
    text = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py"))
    assert not {name for name in SLOW_FIXTURES if f"\ndef {name}(" not in text}
