"""hase.utils.lazy: packages at the top of a module that load at their first use."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hase.utils import lazy
from hase.utils.lazy import LazyPackage
from hase.utils.paths import ROOT

INTERRUPTED = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
except BaseException:
    raise ImportError("failed")
whole = True
"""
LOADED = f"""
import sys
from hase.utils.lazy import {', '.join(lazy.__all__)}
def loaded(): return [name for name in (*{lazy.__all__!r}, "rich.table") if name in sys.modules]
print(loaded(), onnx.TensorProto.FLOAT, loaded(), rich.table.Table.__name__, loaded())
import hase.benchmark.ort.worker
print(loaded())
"""


@pytest.mark.slow
def test_nothing_is_loaded_before_its_first_use() -> None:
    """Nor is torch by the process that measures on a CPU: it would take most of its start, and a kernel that crashes needs
    another process."""
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=True)
    first, last = done.stdout.splitlines()
    assert first == "[] 1 ['onnx'] Table ['onnx', 'rich', 'rich.table']"
    assert "torch" not in last


def test_a_missing_package_is_an_error_at_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a light install; hase.utils.cli uses the error's name to say what to install."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    from hase.utils.lazy import pandas

    with pytest.raises(ModuleNotFoundError) as raised:
        pandas.DataFrame  # noqa: B018
    assert raised.value.name == "pandas"


def test_threads_may_load_a_package_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_load.py").write_text("import time\ntime.sleep(0.2)\nvalue = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = LazyPackage("slow_to_load")
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(lambda _: package.value, range(8))] == [7] * 8


def test_a_signal_waits_until_a_package_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is interrupted while it is loaded, and would take the error for one of its own."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(KeyboardInterrupt):
            _ = LazyPackage("interrupted").whole
        assert sys.modules["interrupted"].whole is True
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        sys.modules.pop("interrupted", None)
