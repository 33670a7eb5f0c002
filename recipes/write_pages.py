"""Writes the parts of the pages in docs/ that follow from the code: commands.md, json.md, figures, and with --questions the
answers in questions.md.

commands.md lists every script by its purpose, from its docstring. json.md has the fields of what --json prints, from the
classes of the records. Figures are those of docs/figures.yaml, which the README and the pages quote. For questions.md each
block of `bash` on the page is run, and what it prints replaces the block of `text` after it, with the columns of tables
aligned; that needs the models of `make demo` in the workspace, and in it a folder `llama-int4` with a language model as
onnxruntime-genai's builder writes it. Tests compare the pages with the code.

With --pictures, it draws the pictures of HTML pages in docs/ instead: of a prediction, two models, a load curve, and with
--recorded an evaluation. It runs the commands with --html for models of `make demo`, opens their pages in Chromium, and writes
what it shows as WebP to <page>_page.webp.
"""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import os
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hase.recipes.figures import FIGURES, figure_pages, fill_figures, read_figures, update_figures
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.files import temporary_folder
from hase.utils.fingerprint import WITHOUT_GPU
from hase.utils.logger import progress
from hase.utils.paths import ROOT
from hase.utils.text import markdown_table

COMMANDS_PAGE, JSON_PAGE, QUESTIONS_PAGE = (ROOT / "docs" / name for name in ("commands.md", "json.md", "questions.md"))
EXAMPLES = """
python recipes/write_pages.py
python recipes/write_pages.py --measured kinds=printed.json  # needs what their command prints with --json
python recipes/write_pages.py --questions --workspace out/demo  # needs make demo, and a language model in llama-int4
python recipes/write_pages.py --pictures docs --workspace out/demo  # needs make demo
python recipes/write_pages.py --pictures docs --workspace out/demo --recorded out/h200  # needs recipes/h200/learn.sh, too
"""

# docs/commands.md

PURPOSES = {  # by purpose, the folders and scripts at the top that serve it
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
COMMANDS_INTRODUCTION = """# Commands

Every script, by its purpose. `python SCRIPT --help`, from the repository's root, says what it reads and writes, with all
options and examples. `--workspace DIR` puts that into another folder than the repository. Only one command at a time writes to
a folder or measures on a device: the next ends with an error that names the process, or with `--wait` waits for it.
`python recipes/write_pages.py` writes this page.
"""


@dataclass(frozen=True)
class Command:
    """A script that can be run: path from the repository's root, and the parts of its docstring and examples."""

    path: str
    summary: str
    details: str
    examples: str


def is_script(text: str) -> bool:
    """Whether this is the text of a script that can be run."""
    return re.search(r"^    cli\.run\(main\b", text, re.MULTILINE) is not None


def read_command(path: Path) -> Command:
    """Reads a script as a command. Raises UserError without a docstring or examples."""
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
    """The commands in a folder, or the script of that name, in alphabetical order."""
    top = ROOT / folder
    for path in [top] if top.is_file() else sorted(top.rglob("*.py")):
        if is_script(path.read_text(encoding="utf-8")):
            yield read_command(path)


def all_commands() -> dict[str, list[Command]]:
    """The repository's commands by purpose. Raises UserError if one has no purpose."""
    by_purpose = {purpose: [command for folder in folders for command in commands(folder)]
                  for purpose, folders in PURPOSES.items()}
    served = {folder for folders in PURPOSES.values() for folder in folders}
    tops = {path.name if path.parent == ROOT else path.parent.name for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]
            if is_script(path.read_text(encoding="utf-8"))} - {"tests", "hase"}  # hase has links to the scripts
    if tops - served:
        raise UserError(f"{', '.join(sorted(tops - served))}: commands without a purpose; add it to PURPOSES in {__file__}")
    return {purpose: chosen for purpose, chosen in by_purpose.items() if chosen}


def commands_page() -> str:
    """The text of docs/commands.md: a table per purpose, a row per command."""
    parts = [COMMANDS_INTRODUCTION]
    for purpose, chosen in all_commands().items():
        rows = [{"command": f"[{command.path}](../{command.path})", "what it does": command.summary} for command in chosen]
        parts += [f"## {purpose}", "", markdown_table(rows), ""]
    return "\n".join(parts)


# docs/json.md

JSON_INTRODUCTION = """# What --json prints

The fields of every record, from the classes themselves (`python recipes/write_pages.py` writes this page). Names end with their
unit (`_ms`, `_mib`, `_j`, `_w`). Shares and ratios are fractions: 1 is all of it. `?`: null where a value is not known or does
not apply; `[]`: a list.
"""
PRINTED = {  # by command: what it prints, the record's module and class
    "inference/predict_model_latency.py": (
        "a list with an object for each row. Besides the fields of `Prediction`: `file` with several models, `best_for` where "
        "a table has several batches, `slo` with `--slo-ms` (`SloUnderLoad`), and `energy` with `--energy` "
        "(`EnergyPrediction`)",
        ("hase.inference.prediction.answers.Prediction", "hase.inference.sharing.shared_models.SloUnderLoad",
         "hase.inference.prediction.energy.EnergyPrediction")),
    "inference/predict_model_latency.py --watch": ("an object a line", ("hase.inference.live.watch.WatchLine",)),
    "inference/compare_devices.py": ("one object", ("hase.inference.compare.devices.DeviceComparison",)),
    "inference/compare_models.py": ("one object", ("hase.inference.compare.model_differences.ModelDifference",)),
    "inference/gate.py": ("one object", ("hase.inference.compare.regressions.GateResult",)),
    "inference/load_curve.py": ("one object", ("hase.inference.sharing.shared_models.LoadCurve",)),
    "inference/pair_latency.py": ("one object, or a list for several ways", ("hase.inference.sharing.shared_models.Pair",)),
    "benchmark/dataset.py": ("one object", ("hase.records.dataset_tables.DatasetCoverage",)),
    "inference/sharing_advice.py": ("one object", ("hase.inference.sharing.advice.SharingAdvice",)),
    "inference/predict_llm.py": ("a list with an object for each request", ("hase.inference.llm.answers.LlmPrediction",)),
}
VERSION_MEANING = "of the record's form"
ATTRIBUTE = re.compile(r"^    (\w+(?:, \w+)*): (.*)$")


def json_page() -> str:
    """The text of docs/json.md. Raises UserError if a docstring does not explain a field."""
    parts, written = [JSON_INTRODUCTION], set[type]()
    for command, (what, names) in PRINTED.items():
        parts += [f"## {command}", "", f"`--json` prints {what}.", ""]
        for name in names:
            module, _, class_name = name.rpartition(".")
            for record in _with_parts(getattr(__import__(module, fromlist=[class_name]), class_name)):
                if record not in written:
                    written.add(record)
                    summary = inspect.cleandoc(record.__doc__ or "").partition("Attributes:")[0]
                    parts += [f"### {record.__name__}", "", " ".join(summary.split()), "", markdown_table(_rows(record)), ""]
    return "\n".join(parts)


def _with_parts(record: type) -> Iterator[type]:
    """A record's class, and recursively those of its fields."""
    yield record
    for kind in _types(record).values():
        for part in _classes_in(kind):
            yield from _with_parts(part)


def _types(record: type) -> dict[str, typing.Any]:
    """The type of each field as written."""
    hints = typing.get_type_hints(record)
    names = [field.name for field in fields(record)] if is_dataclass(record) else list(
        record.model_fields)  # type: ignore[attr-defined]
    return {name: hints[name] for name in names}


def _classes_in(kind: typing.Any) -> Iterator[type]:
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "model_fields")):
        yield kind
    for part in typing.get_args(kind):
        yield from _classes_in(part)


def _rows(record: type) -> list[dict[str, str]]:
    """A row per field; neighbouring fields with the same type and meaning share one."""
    meanings = {name: meaning for base in reversed(record.__mro__) for name, meaning in field_meanings(base).items()}
    kinds = _types(record)
    if missing := [name for name in kinds if name not in meanings and name != "version"]:
        raise UserError(f"{record.__module__}.{record.__name__}: its docstring says nothing of {', '.join(missing)}")
    alike = itertools.groupby(kinds, key=lambda name: (json_type(kinds[name]), meanings.get(name, VERSION_MEANING)))
    return [{"field": ", ".join(f"`{name}`" for name in names), "type": kind, "meaning": meaning}
            for (kind, meaning), names in alike]


def field_meanings(record: type) -> dict[str, str]:
    """The meaning of each field, from the section `Attributes` of a class's docstring."""
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(record.__dict__.get("__doc__") or "").partition("Attributes:\n")[2].splitlines():
        if found := ATTRIBUTE.match(line):
            names = found[1].split(", ")
            meanings |= dict.fromkeys(names, found[2])
        elif line.startswith("        "):
            meanings |= {name: f"{meanings[name]} {line.strip()}" for name in names}
        else:
            break
    return {name: re.sub(r"\bNone\b", "null", meaning).replace("|", "\\|") for name, meaning in meanings.items()}


def json_type(kind: typing.Any) -> str:
    """A type in TypeScript's notation, but `number?` if it can be null."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        optional = "?" if type(None) in args else ""
        return " or ".join(json_type(part) for part in args if part is not type(None)) + optional
    if origin is typing.Literal:
        return " or ".join(f'"{value}"' for value in args)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return f"{json_type(args[0])}[]"
        return f"[{', '.join(map(json_type, args))}]"
    if origin is dict:
        return f"{{{json_type(args[0])}: {json_type(args[1])}}}"
    plain = {float: "number", int: "integer", str: "string", bool: "boolean"}
    return plain.get(kind) or f"[{kind.__name__}](#{kind.__name__.lower()})"


# docs/questions.md

QUESTION = re.compile(r"^```bash\n(?P<command>.*?)\n```\n\n```text\n(?P<answer>.*?)```\n", re.MULTILINE | re.DOTALL)
BLOCKS = "```bash\n{}\n```\n\n```text\n{}```\n"
TABLE_OR_LINE = re.compile(r"((?:^.*\t.*\n)+)|(?:^[^\t\n]*\n)", re.MULTILINE)
DEMO, LANGUAGE_MODEL = "out/demo", "llama-int4"  # as the pages name them


def questions_page(text: str, workspace: Path) -> str:
    """The page with the current output of its commands. Raises UserError if one fails."""
    return QUESTION.sub(lambda found: BLOCKS.format(found["command"], command_output(found["command"], workspace)), text)


def command_output(command: str, workspace: Path) -> str:
    """The output of a command for models in a workspace, on a machine without a GPU. Raises UserError if it fails."""
    local = command.replace(DEMO, str(workspace)).replace(f"{LANGUAGE_MODEL}/", f"{workspace / LANGUAGE_MODEL}/")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", WITHOUT_GPU: "1"}
    result = subprocess.run(["bash", "-c", local], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UserError(f"{command}: {result.stderr.strip().splitlines()[-1] if result.stderr.strip() else result.returncode}")
    return aligned(result.stdout.replace(str(workspace / LANGUAGE_MODEL), LANGUAGE_MODEL).replace(str(workspace), DEMO))


def aligned(printed: str) -> str:
    """A command's output with the tab-separated cells of tables aligned in columns."""
    lines: list[str] = []
    for found in TABLE_OR_LINE.finditer(printed):
        if found[1] is None:
            lines.append(found[0].rstrip())
            continue
        rows = [line.split("\t") for line in found[1].splitlines()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "".join(f"{line}\n" for line in lines)


# Pictures of HTML pages

CHROMIUM = "/usr/bin/chromium"  # Debian's
WIDTH, PHONE_WIDTH = 1180, 375
WEBP_QUALITY = 70
RESNET, MNASNET = "resnet18_fp32_b8_224x224.onnx", "mnasnet1_0.onnx"
PICTURES = {  # by the page's name: the command that makes it with --html, and how many pixels from its top the picture shows
    "prediction": (f"inference/predict_model_latency.py --model {RESNET} --host-pace 1 --slo-ms 5", 2080),
    "compared": (f"inference/compare_models.py {MNASNET} {RESNET} --dim batch=8", 1960),
    "load": (f"inference/load_curve.py --model {RESNET} --slo-ms 2", 1400),
}
EVALUATION_HEIGHT = 1900  # pixels


def write_pictures(out: Path, workspace: Path, target: str, recorded: Path | None, phone: bool) -> None:
    """Writes screenshots of pages into a folder, each cut to its height; with `phone` in full, as on a phone."""
    from PIL import Image  # noqa: PLC0415 - needs a package that the options do not
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - needs a package that the options do not

    if not Path(CHROMIUM).exists():
        raise UserError(f"{CHROMIUM}: not there; install it with: apt-get install --no-install-recommends chromium")
    pictures = {name: (f"{command} --workspace {DEMO} --target {target}", height)
                for name, (command, height) in PICTURES.items()}
    if recorded is not None:
        pictures["evaluation"] = (f"evaluator.py --workspace {recorded.resolve()} --recorded --target {target}",
                                  EVALUATION_HEIGHT)
    out.mkdir(parents=True, exist_ok=True)
    with temporary_folder() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": PHONE_WIDTH if phone else WIDTH, "height": 900})
        for name, (command, height) in progress(pictures.items(), "pictures"):
            page = folder / f"{name}.html"
            command_output(f"python {command} --quiet --html {page}", workspace)
            tab.goto(page.as_uri())
            shown: Image.Image = Image.open(io.BytesIO(tab.screenshot(full_page=True, animations="disabled")))
            if not phone:
                shown = shown.crop((0, 0, shown.width, min(height, shown.height)))
            shown.save(out / f"{name}_page.webp", quality=WEBP_QUALITY)
        browser.close()


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--measured", action="append", default=[], metavar="GROUP=FILE",
                        help="first take the figures GROUP_… from what their command printed with --json (repeatable)")
    parser.add_argument("--questions", action="store_true", help="write only questions.md, with what its commands print now")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="write only pictures of HTML pages, into this folder")
    parser.add_argument("--target", default="nvidia-h200", metavar="NAME", help="of the pictures (default: %(default)s)")
    parser.add_argument("--recorded", type=Path, metavar="DIR",
                        help="with --pictures, also the evaluation of the target's dataset in this workspace")
    parser.add_argument("--phone", action="store_true", help="with --pictures: as a phone shows them, in full")
    args = parser.parse_args()
    workspace = cli.start(args).root.resolve()
    if args.pictures:
        write_pictures(args.pictures, workspace, args.target, args.recorded, args.phone)
        return
    if args.questions:
        pages = {QUESTIONS_PAGE: questions_page(QUESTIONS_PAGE.read_text(encoding="utf-8"), workspace)}
    else:
        for measured in args.measured:
            group, _, path = measured.partition("=")
            files.write_text(FIGURES, update_figures(FIGURES.read_text(encoding="utf-8"), group, files.read_json(Path(path))))
        figures = read_figures()
        pages = {path: fill_figures(path.read_text(encoding="utf-8"), figures) for path in figure_pages()}
        pages |= {COMMANDS_PAGE: commands_page(), JSON_PAGE: json_page()}
    for path, text in pages.items():
        if path.read_text(encoding="utf-8") != text:
            files.write_text(path, text)
            print(path)


if __name__ == "__main__":
    cli.run(main)
