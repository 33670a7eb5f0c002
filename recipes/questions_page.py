"""Runs the commands of docs/questions.md, and writes what they print below them.

Reads the page, the models of `make demo`, and `llama-int4`, a language model's folder as onnxruntime-genai's builder writes it,
in the workspace. Each block of `bash` is run, and the block of `text` after it is what the command printed, with the columns of
tables aligned. A test compares the page with what the commands print. Writes only that page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from utils import cli, files
from utils.errors import UserError
from utils.fingerprint import WITHOUT_GPU
from utils.paths import ROOT

PAGE = ROOT / "docs" / "questions.md"
QUESTION = re.compile(r"^```bash\n(?P<command>.*?)\n```\n\n```text\n(?P<answer>.*?)```\n", re.MULTILINE | re.DOTALL)
BLOCKS = "```bash\n{}\n```\n\n```text\n{}```\n"
TABLE_OR_LINE = re.compile(r"((?:^.*\t.*\n)+)|(?:^[^\t\n]*\n)", re.MULTILINE)
DEMO, LANGUAGE_MODEL = "out/demo", "llama-int4"  # as the page names them
EXAMPLES = """
python recipes/questions_page.py --workspace out/demo  # needs make demo, and a language model's folder llama-int4 in it
"""


def page(text: str, workspace: Path) -> str:
    """The page with the answers of now.

    Raises:
        UserError: a command fails.
    """
    return QUESTION.sub(lambda found: BLOCKS.format(found["command"], answer(found["command"], workspace)), text)


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


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    workspace = cli.start(parser.parse_args())
    files.write_text(PAGE, page(PAGE.read_text(encoding="utf-8"), workspace.root.resolve()))
    print(PAGE)


if __name__ == "__main__":
    cli.run(main)
