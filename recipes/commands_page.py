"""Writes docs/commands.md: every command of the repository by its purpose, with what it reads and writes and an example.

Reads the docstrings and examples of the scripts, the same that --help shows. A test compares the page with them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hase.utils import cli, files
from hase.utils.cli.printing import markdown_table
from hase.utils.errors import UserError
from hase.utils.paths import ROOT

PAGE = ROOT / "docs" / "commands.md"
PURPOSES = {  # and the folders and scripts at the top that serve it
    "Get models": ("model_zoo",),
    "See the graph that really runs, and its kernels": ("ort_analysis", "runtimes", "kernel_model"),
    "Measure": ("benchmark",),
    "Learn from what was measured": ("training",),
    "See a run as a graph of kernels": ("graph_model", "overlap_simulator.py"),
    "Predict, and compare with measurements": ("inference", "evaluator.py"),
    "Choose convolution algorithms": ("extras/convolutions",),
    "Place the stages of a graph network": ("extras/graph_stages",),
    "Recipes: several commands for one result, and what makes the pages of docs/": ("recipes",),
}
INTRODUCTION = """# Commands

Every command, by its purpose. `--help` shows the same text and all options. `--workspace DIR` puts what a command reads and
writes into another folder than the repository. Only one command at a time writes to a folder or measures on a device: the next
ends with an error that names the process, or with `--wait` waits for it. This page is written by
`python recipes/commands_page.py`.
"""
EXAMPLES = """
python recipes/commands_page.py
"""


@dataclass(frozen=True)
class Command:
    """A script that can be run.

    Attributes:
        path: from the repository's root.
        summary: the first paragraph of its docstring, in one line.
        details: the rest of it; what it reads and writes.
        examples: shell commands, one a line.
    """

    path: str
    summary: str
    details: str
    examples: str

    @property
    def section(self) -> str:
        """Its section of the page."""
        details = f"{self.details}\n\n" if self.details else ""
        return f"### {self.path}\n\n{self.summary}\n\n```text\n{details}examples:\n{self.examples}\n```\n"


def is_command(text: str) -> bool:
    """Whether a module's text is that of a script that can be run."""
    return re.search(r"^    cli\.run\(main\b", text, re.MULTILINE) is not None


def read_command(path: Path) -> Command:
    """The command of a script.

    Raises:
        UserError: it has no docstring, or no examples.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    examples = [node.value for node in tree.body if isinstance(node, ast.Assign)
                and any(isinstance(target, ast.Name) and target.id == "EXAMPLES" for target in node.targets)]
    doc = ast.get_docstring(tree)
    if not doc or not examples:
        raise UserError(f"{path}: a command has a docstring and a constant EXAMPLES")
    summary, _, details = doc.partition("\n\n")
    lines = str(ast.literal_eval(examples[0])).strip().splitlines()
    return Command(path.relative_to(ROOT).as_posix(), " ".join(summary.split()), details, "\n".join(map(str.strip, lines)))


def commands(folder: str) -> Iterator[Command]:
    """The commands of a folder, or the script of that name, in alphabetical order."""
    top = ROOT / folder
    for path in [top] if top.is_file() else sorted(top.rglob("*.py")):
        if is_command(path.read_text(encoding="utf-8")):
            yield read_command(path)


def all_commands() -> dict[str, list[Command]]:
    """The commands of the repository by their purpose.

    Raises:
        UserError: a command belongs to no purpose, or has no docstring or examples.
    """
    by_purpose = {purpose: [command for folder in folders for command in commands(folder)]
                  for purpose, folders in PURPOSES.items()}
    served = {folder for folders in PURPOSES.values() for folder in folders}
    tops = {path.name if path.parent == ROOT else path.parent.name for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]
            if is_command(path.read_text(encoding="utf-8"))} - {"tests"}
    if tops - served:
        raise UserError(f"{', '.join(sorted(tops - served))}: commands without a purpose; add it to PURPOSES in {__file__}")
    return {purpose: chosen for purpose, chosen in by_purpose.items() if chosen}


def page(by_purpose: Mapping[str, Sequence[Command]]) -> str:
    """The text of docs/commands.md."""
    parts = [INTRODUCTION]
    for purpose, chosen in by_purpose.items():
        rows = [{"command": f"[{command.path}](#{anchor(command.path)})", "what it does": command.summary}
                for command in chosen]
        parts += [f"## {purpose}", "", markdown_table(rows), "", *(command.section for command in chosen)]
    return "\n".join(parts)


def anchor(heading: str) -> str:
    """The link target that GitHub gives a heading."""
    return re.sub(r"[^\w-]", "", heading.lower())


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    cli.start(parser.parse_args())
    files.write_text(PAGE, page(all_commands()))
    print(PAGE)


if __name__ == "__main__":
    cli.run(main)
