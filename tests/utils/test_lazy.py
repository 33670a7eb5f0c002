"""hase.utils.lazy: packages at the top of a module that load at their first use."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hase.utils import lazy
from hase.utils.lazy import LazyPackage
from hase.utils.paths import ROOT

INTERRUPTED = """
import os
try:
    os.kill(os.getpid(), {number})
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


def test_missing_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        lazy.onnx.no_such_thing  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        LazyPackage("bisect").no_such_thing  # noqa: B018  a module without submodules
    with pytest.raises(ImportError, match="cannot import name 'no_such_package'"):
        from hase.utils.lazy import no_such_package  # noqa: F401
    assert not hasattr(LazyPackage("no_such_package"), "__wrapped__")  # asks without loading


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
    package, values = LazyPackage("slow_to_load"), []
    threads = [threading.Thread(target=lambda: values.append(package.value)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [7] * 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_a_package_is_imported(number: signal.Signals, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is interrupted while it is loaded, and would take the error for one of its own."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED.format(number=int(number)))
    monkeypatch.syspath_prepend(str(tmp_path))

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(number, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            _ = LazyPackage("interrupted").whole
        assert sys.modules["interrupted"].whole is True
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)
        sys.modules.pop("interrupted", None)
