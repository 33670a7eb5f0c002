"""Runs Hase's scripts one after another, as a person would type them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from typing import Any

from utils.errors import UserError
from utils.paths import ROOT, Workspace
from utils.processes import die_with_parent

ENDS_WITHIN_S = 2.0  # after a signal


def run_json(workspace: Workspace, script: str, *options: str) -> Any:
    """What `python SCRIPT --workspace … --json OPTIONS…` prints. Its progress and messages go to stderr.

    A script that could do only a part of its work, and says so in its exit code, has done its work here.

    Raises:
        UserError: it printed no result; it has said why.
    """
    command = [sys.executable, script, "--workspace", str(workspace.root.absolute()), "--json", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True,
                          preexec_fn=partial(die_with_parent, signal.SIGTERM) if sys.platform == "linux" else None) as process:
        try:
            out, _ = process.communicate()
        except BaseException:
            process.terminate()
            try:
                process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    try:
        return json.loads(out)
    except ValueError:
        raise UserError(f"{script} ended with exit code {process.returncode} and no result; the lines above say why") from None
