"""A process that reads wrong files one after another, and the outcome of each.

It has the names of a module: `python -m fuzz.reading fuzz.wrong_models`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import select
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from fuzz.reporting import HANG_S, MOST_MIB, Outcome
from hase.utils.errors import UserError, user_can_mend
from hase.utils.paths import ROOT

ADDRESS_SPACE = 24 << 30  # bytes: ORT and numpy map far more than they touch


def serve(names: dict[str, Any]) -> None:
    """Runs lines of Python from stdin, one after another, and prints the outcome of each as JSON.

    Args:
        names: what the lines may use. `answers`, a list of numbers, gathers what must be right.
    """
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        watched = [psutil.Process(), *psutil.Process().children(recursive=True)]
        for process in watched:  # the peak so far does not count
            with suppress(OSError):  # it has just ended
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")
        ended_mib = _ended_mib()
        answers: list[float] = []
        names["answers"] = answers
        reply: dict[str, Any] = {"what": "answer"}
        try:
            exec(json.loads(line), names)
        except UserError as error:
            reply = {"what": "error", "message": str(error)}
        except OSError as error:
            reply = {"what": "error" if user_can_mend(error) else "traceback", "message": traceback.format_exc()}
        except BaseException:  # noqa: BLE001 - this looks for whatever escapes
            reply = {"what": "traceback", "message": traceback.format_exc()}
        peaks_mib = [_peak_mib(process) for process in (psutil.Process(), *psutil.Process().children(recursive=True))]
        if _ended_mib() > ended_mib:
            peaks_mib.append(_ended_mib())
        print(json.dumps(reply | {"answers": answers, "peak_mib": max(peaks_mib)}), file=sys.__stdout__, flush=True)


def _ended_mib() -> float:
    """The most memory that a child which has ended ever held, in MiB."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def _peak_mib(process: psutil.Process) -> float:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:  # it has just ended
        return 0.0
    return float(status.partition("VmHWM:")[2].split()[0]) / 1024


class Reader:
    """A process that reads; a new one is started where it ends. Use as a context manager.

    Args:
        module: whose names the lines may use.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self, line: str, case: str, wanted: list[float] | None = None) -> Outcome:
        """The outcome of a line of Python; `wanted` are the right answers, if they are known."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fuzz.reading", self.module], cwd=ROOT / "tests", text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL)
            self._ask("pass", None)
        began = time.monotonic()
        text = self._ask(line, HANG_S)
        seconds = time.monotonic() - began
        if not text:
            process, hangs = self.process, text is None
            self.close()
            return Outcome("hang" if hangs else "crash", case, f"exit code {process.returncode}", seconds=seconds)
        reply = json.loads(text)
        what = reply["what"]
        if reply["peak_mib"] > MOST_MIB:
            what = "memory"
            self.close()
        if what == "answer" and wanted is not None and not (len(reply["answers"]) == len(wanted) and all(
                math.isclose(value, right, rel_tol=1e-9) for value, right in zip(reply["answers"], wanted, strict=True))):
            what = "another answer"
        if what == "answer" and not all(0.0 <= value < math.inf for value in reply["answers"]):
            what = "another answer"
        return Outcome(what, case, reply.get("message", ""), tuple(reply["answers"]), seconds, reply["peak_mib"])

    def _ask(self, line: str, timeout_s: float | None) -> str | None:
        """What the process writes for a line: "" where it has ended, None where it is too slow."""
        if self.process is None or self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline() if select.select([self.process.stdout], [], [], timeout_s)[0] else None

    def answers(self, line: str) -> list[float]:
        """The answers for an undamaged file."""
        outcome = self.read(line, "none")
        if outcome.what != "answer":
            raise RuntimeError(f"{line}: {outcome.message}")
        return list(outcome.answers)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


if __name__ == "__main__":
    serve(vars(importlib.import_module(sys.argv[1])))
