"""The command `hase`: `hase predict --model resnet50.onnx --on l4`. Each of its commands is the `main` of a script."""

from __future__ import annotations

import argparse
import difflib
import gc
import os
import runpy
import sys
from importlib.metadata import version

from hase.utils.cli import EXIT_USAGE
from hase.utils.commands import COMMANDS, run_as
from hase.utils.lazy import argcomplete

USAGE = "usage: hase COMMAND [options]      hase COMMAND --help      hase --version"
PURPOSE = "How long ONNX Runtime takes to run a model on a device, without running it there."
EXAMPLES = """
examples:
hase predict --model resnet50.onnx --on h200
hase predict --model resnet50.onnx --on l4 --batch 1,8,32 --dtype fp16
hase devices --model resnet50.onnx --on h200,l4,rtx-4090 --slo-ms 10
hase gate --baseline main.json --max-regression 5%
hase doctor
"""


def overview() -> str:
    """What `hase --help` prints."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}}  {command.purpose}" for name, command in COMMANDS.items())
    return f"{USAGE}\n\n{PURPOSE}\n\n{listed}\n{EXAMPLES}"


def main() -> None:
    """Runs the command that the first argument names, and exits with its status."""
    completing = "_ARGCOMPLETE" in os.environ  # a shell asks what could be typed next
    words = os.environ["COMP_LINE"][:int(os.environ["COMP_POINT"])].split(" ")[1:] if completing else sys.argv[1:]
    name = words[0] if words else "--help"
    if name in COMMANDS and (not completing or len(words) > 1):
        del sys.argv[1:2]
        run_as(name)
        gc.disable()  # until the script has imported what it needs: none of it is garbage
        runpy.run_module(f"hase.{COMMANDS[name].script.replace('/', '.')}", run_name="__main__", alter_sys=True)
    elif completing:
        complete(list(COMMANDS))
    elif name in ("--help", "-h", "help"):
        print(overview())
    elif name == "--version":
        print(f"hase {version('hase')}")
    else:
        similar = difflib.get_close_matches(name.lower(), COMMANDS, 1)
        print(f"error: no command {name}{f'; did you mean hase {similar[0]}?' if similar else ''} (see hase --help)",
              file=sys.stderr)
        sys.exit(EXIT_USAGE)


def complete(names: list[str]) -> None:
    """Tells the shell which commands could be typed."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("command", choices=names)
    argcomplete.autocomplete(parser)


if __name__ == "__main__":
    main()
