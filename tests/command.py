"""Runs a script as its command line does, but in this process.

A separate process takes half a second to a second longer, mostly for imports. Tests of the README, of signals, of crashes, and
of what a process imports have processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from hase.utils import cli
from hase.utils.paths import ROOT
from hase.utils.processes import SIGNALS


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Restores the log, the garbage collection and the signal handlers of this process after a script has set up its own."""
    log, threshold = logging.getLogger("hase"), gc.get_threshold()
    signals = {number: signal.getsignal(number) for number in SIGNALS}
    level, propagate, handlers = log.level, log.propagate, list(log.handlers)
    log.handlers.clear()
    try:
        yield
    finally:
        for handler in log.handlers:
            handler.close()
        log.handlers[:] = handlers
        log.setLevel(level)
        log.propagate = propagate
        gc.set_threshold(*threshold)
        for number, before in signals.items():
            signal.signal(number, before)


def run_script(script: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
    """The exit status of `python SCRIPT OPTIONS…`, and what it prints. A bug in the script raises its own error here.

    Args:
        script: its path in the repository, for instance `evaluator.py`.
    """
    main = importlib.import_module("hase." + script.removesuffix(".py").replace("/", ".")).main
    return run_main(main, script, *options)


def run_main(main: Callable[[], int | None], *words: str | Path) -> subprocess.CompletedProcess[str]:
    """The same of a `main`; `words` are its command line."""
    argv = [*map(str, words)]
    out, err = io.StringIO(), io.StringIO()
    with (_as_before(), mock.patch.object(sys, "argv", argv), mock.patch.object(cli, "begin_command"),
          contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)):
        try:
            cli.run(main)
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(argv, int(code or 0), out.getvalue(), err.getvalue())


def printed(script: str, *options: str | Path) -> str:
    """What a script prints on stdout; fails unless it ends well."""
    done = run_script(script, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout
