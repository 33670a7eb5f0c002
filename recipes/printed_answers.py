"""What commands print, as pages of docs/ show it: run for the models of a workspace, with the columns of tables aligned."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hase.utils.errors import UserError
from hase.utils.fingerprint import WITHOUT_GPU
from hase.utils.paths import ROOT

TABLE_OR_LINE = re.compile(r"((?:^.*\t.*\n)+)|(?:^[^\t\n]*\n)", re.MULTILINE)
DEMO, LANGUAGE_MODEL = "out/demo", "llama-int4"  # as the pages name them


def answer(command: str, workspace: Path) -> str:
    """What a command prints for models in a workspace, on a machine without a GPU.

    Raises:
        UserError: it fails.
    """
    here = command.replace(DEMO, str(workspace)).replace(f"{LANGUAGE_MODEL}/", f"{workspace / LANGUAGE_MODEL}/")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", WITHOUT_GPU: "1"}
    done = subprocess.run(["bash", "-c", here], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{command}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}")
    printed = done.stdout.replace(str(workspace / LANGUAGE_MODEL), LANGUAGE_MODEL).replace(str(workspace), DEMO)
    return aligned(printed)


def aligned(printed: str) -> str:
    """What a command printed, with each table's cells, which tabs separate, in columns."""
    lines: list[str] = []
    for found in TABLE_OR_LINE.finditer(printed):
        if found[1] is None:
            lines.append(found[0].rstrip())
            continue
        rows = [line.split("\t") for line in found[1].splitlines()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "".join(f"{line}\n" for line in lines)
