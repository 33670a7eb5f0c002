"""Keeps the device busy for a share of the time, in another process (benchmark/stressor.py)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from hase.records.measurement import COMPUTE, Background
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, Workspace
from hase.utils.timing import pause

REPORT_SECONDS = 0.5  # interval of the reports of a stressor that `stress` started
READY_SECONDS = 120.0
STOP_SECONDS = 5.0
POLL_SECONDS = 0.2  # how often a starting stressor is checked
REPORT_PATIENCE_S = 60.0  # for the first report of a stressor that is ready


class Stress:
    """Stressors running in other processes, started by `stress`."""

    def __init__(self, intensity: float, processes: Sequence[subprocess.Popen[str]] = ()) -> None:
        self.intensity = intensity
        self._processes = processes
        self._loads: list[dict[str, float]] = []
        for index, process in enumerate(processes):
            threading.Thread(target=self._listen, args=(process, not index), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str], keep: bool) -> None:
        """Reads a stressor's reports, so that its pipe does not fill; keeps the latest load."""
        for line in process.stdout or ():
            if not keep:
                continue
            if line.endswith("\n") and (event := json.loads(line)).pop("event") == "load":  # a kill may cut the last line short
                self._loads[:] = [event]

    def reached(self) -> dict[str, float]:
        """Load over about the last half second: `duty` of the first process, and the device's metrics by DCGM field name."""
        if not self._processes:
            return {"duty": 0.0}
        deadline = time.monotonic() + REPORT_PATIENCE_S
        while True:
            for process in self._processes:
                if process.poll() is not None:
                    raise UserError(f"the stressor ended with exit code {process.returncode}: there is no load any more")
            if self._loads:
                return {name: value for name, value in self._loads[0].items() if name != "seconds"}
            if time.monotonic() > deadline:
                raise UserError(f"the stressor has not reported its load for {REPORT_PATIENCE_S:g} s: see its messages above")
            pause(0.02)


@contextlib.contextmanager
def stress(intensity: float, background: Background = COMPUTE, device: str = "auto", *,
           workspace: Workspace | None = None, environment: Mapping[str, str] | None = None) -> Iterator[Stress]:
    """Keeps the device busy during the block for the share `intensity` (0–1) of time; 0 starts nothing."""
    if intensity == 0.0:
        yield Stress(0.0)
        return
    command = [sys.executable, str(ROOT / "benchmark" / "stressor.py"), "--json", "--quiet", "--intensity", str(intensity),
               "--device", device, "--report-every", str(REPORT_SECONDS), *options(background)]
    if workspace is not None:
        command += ["--workspace", str(workspace.root)]
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(background.processes):
            processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                                              process_group=0 if os.name == "posix" else None,
                                              env=os.environ | dict(environment or {})))
            stack.callback(_end, processes[-1])
        for process in processes:
            _wait_until_ready(process)
        yield Stress(intensity, processes)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a stressor with its workers, which would survive if it were killed during start, and keep its pipe open."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def options(background: Background) -> list[str]:
    """The background as options of benchmark/stressor.py."""
    arguments = ["--kind", background.kind, "--queue", background.queue, "--burst-ms", str(background.burst_ms),
                 "--period-ms", str(background.period_ms)]
    if background.model is not None:
        arguments += ["--model", str(background.model)]
    return arguments + [word for dim, size in background.dims.items() for word in ("--dim", f"{dim}={size}")]


def _wait_until_ready(process: subprocess.Popen[str]) -> None:
    """Waits for a stressor's first line. Raises UserError if it ends or takes too long."""
    if process.stdout is None:
        raise RuntimeError("the stressor was started without a pipe")
    deadline = time.monotonic() + READY_SECONDS
    while not select.select([process.stdout], [], [], POLL_SECONDS)[0]:
        if process.poll() is not None:  # its workers may keep the pipe open
            raise UserError(f"the stressor ended with exit code {process.returncode}: see its message above")
        if time.monotonic() > deadline:
            raise UserError(f"the stressor was not ready within {READY_SECONDS:g} s")
    if '"ready"' not in process.stdout.readline():
        raise UserError(f"the stressor ended with exit code {process.wait()}: see its message above")
