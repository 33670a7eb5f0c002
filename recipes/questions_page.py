"""Runs the commands of docs/questions.md, and writes what they print below them.

Reads the page, the models of `make demo`, and `llama-int4`, a language model's folder as onnxruntime-genai's builder writes it,
in the workspace. Each block of `bash` is run, and the block of `text` after it is what the command printed, with the columns of
tables aligned. A test compares the page with what the commands print. Writes only that page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hase.recipes.printed_answers import answer
from hase.utils import cli, files
from hase.utils.paths import ROOT

PAGE = ROOT / "docs" / "questions.md"
QUESTION = re.compile(r"^```bash\n(?P<command>.*?)\n```\n\n```text\n(?P<answer>.*?)```\n", re.MULTILINE | re.DOTALL)
BLOCKS = "```bash\n{}\n```\n\n```text\n{}```\n"
EXAMPLES = """
python recipes/questions_page.py --workspace out/demo  # needs make demo, and a language model's folder llama-int4 in it
"""


def page(text: str, workspace: Path) -> str:
    """The page with the answers of now.

    Raises:
        UserError: a command fails.
    """
    return QUESTION.sub(lambda found: BLOCKS.format(found["command"], answer(found["command"], workspace)), text)


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    workspace = cli.start(parser.parse_args())
    files.write_text(PAGE, page(PAGE.read_text(encoding="utf-8"), workspace.root.resolve()))
    print(PAGE)


if __name__ == "__main__":
    cli.run(main)
