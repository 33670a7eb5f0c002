"""The outcomes of each case of a campaign, their counts, and a process that calls functions of a module, one after another, on
what is wrong: `python -m fuzz.reading fuzz.damaged_models`."""

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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from hase.utils.errors import UserError, user_can_fix
from hase.utils.paths import ROOT

HANG_S = 60.0
MOST_MIB = 4096.0
FAULTS = ("traceback", "crash", "hang", "memory", "another answer")  # the last: a changed answer, or one that is nonsense
ADDRESS_SPACE = 24 << 30  # bytes: ORT and numpy map far more than they touch


@dataclass
class Outcome:
    """The outcome of one case: `answer`, `error` (one for the user), or one of FAULTS; a remark says what else was found."""

    what: str
    case: str
    message: str = ""
    answers: tuple[float, ...] = ()
    seconds: float = 0.0
    peak_mib: float = 0.0
    remark: str = ""

    @property
    def fault(self) -> bool:
        return self.what in FAULTS

    def __str__(self) -> str:
        return f"{self.what}: {self.case}: {self.message.strip()[-1500:]}"


Parts = Iterator[tuple[str, Iterable[Outcome]]]  # of a campaign: what each tries, and its outcomes as they come


def counted(parts: Parts) -> list[dict[str, Any]]:
    """A line of the report for each part of a campaign; faults are printed on stderr as they come."""
    rows = []
    for tried, outcomes in parts:
        row: dict[str, Any] = {"tried": tried, "cases": 0, **dict.fromkeys(("answer", "error", *FAULTS), 0),
                               "slowest (s)": 0.0, "most memory (MiB)": 0.0, "remark": ""}
        for outcome in outcomes:
            row["cases"] += 1
            row[outcome.what] += 1
            row["slowest (s)"] = max(row["slowest (s)"], outcome.seconds)
            row["most memory (MiB)"] = max(row["most memory (MiB)"], outcome.peak_mib)
            row["remark"] = outcome.remark or row["remark"]
            if outcome.fault:
                print(outcome, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def family() -> list[psutil.Process]:
    """This process and those that it started."""
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def peak_mib(process: psutil.Process) -> float:
    with suppress(OSError):  # it has just ended
        return float(Path(f"/proc/{process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return 0.0


def serve(module: ModuleType) -> None:
    """Calls functions, each by a line of JSON with its name and arguments, and prints what comes of each as JSON.

    They return numbers that must be right, or None.
    """
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", file=sys.__stdout__, flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        for process in family():  # the peak so far does not count
            with suppress(OSError):  # it has just ended
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")
        before_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        reply: dict[str, Any]
        try:
            reply = {"what": "answer", "answers": getattr(module, name)(*arguments) or []}
        except UserError as error:
            reply = {"what": "error", "message": str(error)}
        except OSError as error:
            reply = {"what": "error" if user_can_fix(error) else "traceback", "message": traceback.format_exc()}
        except BaseException:  # noqa: BLE001 - this looks for whatever escapes
            reply = {"what": "traceback", "message": traceback.format_exc()}
        ended_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        peaks_mib = [*map(peak_mib, family()), ended_mib if ended_mib > before_mib else 0.0]
        print(json.dumps(reply | {"peak_mib": max(peaks_mib)}), file=sys.__stdout__, flush=True)


class Reader:
    """A process that calls a module's functions; a new one is started where it ends. Use as a context manager."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def read(self, call: tuple[Any, ...], case: str, wanted: list[float] | None = None) -> Outcome:
        """The outcome of a call, a function's name and its arguments; `wanted` are the right answers, if they are known."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fuzz.reading", self.module], cwd=ROOT / "tests", text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL)
            assert self.process.stdout is not None
            self.process.stdout.readline()
        process, began_s = self.process, time.monotonic()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([call[0], call[1:]]) + "\n")
        process.stdin.flush()
        in_time = select.select([process.stdout], [], [], HANG_S)[0]
        text, seconds = process.stdout.readline() if in_time else "", time.monotonic() - began_s
        if not text:
            self.__exit__()
            return Outcome("crash" if in_time else "hang", case, f"exit code {process.returncode}", seconds=seconds)
        reply = {"message": "", "answers": ()} | json.loads(text)
        what, answers = reply["what"], tuple(reply["answers"])
        if reply["peak_mib"] > MOST_MIB:
            what = "memory"
            self.__exit__()
        right = answers if wanted is None else wanted
        if what == "answer" and not (len(answers) == len(right) and all(
                0.0 <= value < math.inf and math.isclose(value, known, rel_tol=1e-9)
                for value, known in zip(answers, right, strict=True))):
            what = "another answer"
        return Outcome(what, case, reply["message"], answers, seconds, reply["peak_mib"])

    def answers(self, call: tuple[Any, ...]) -> list[float]:
        """The answers where nothing is wrong."""
        outcome = self.read(call, "none")
        if outcome.what != "answer":
            raise RuntimeError(f"{call}: {outcome.message}")
        return list(outcome.answers)


if __name__ == "__main__":
    serve(importlib.import_module(sys.argv[1]))
