"""Writes docs/json.md: the fields that --json prints, with their types and meaning, a table for each record.

Reads the classes of the records: their fields, and what their docstrings say of them. A test compares the page with them.
Writes only that page.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hase.utils import cli, files
from hase.utils.cli.printing import markdown_table
from hase.utils.errors import UserError
from hase.utils.paths import ROOT

PAGE = ROOT / "docs" / "json.md"
EXAMPLES = """
python recipes/json_page.py
"""
INTRODUCTION = """# What --json prints

The fields of every record, from the classes themselves (`python recipes/json_page.py` writes this page). Names end with their
unit (`_ms`, `_mib`, `_j`, `_w`). Shares and ratios are fractions: 1 is all of it. `null` means that a value is not known or
does not apply.
"""
PRINTED = {  # by command: what it prints, the record's module and class
    "inference/predict_model_latency.py": (
        "a list with an object for each row. Besides the fields of `Prediction`: `file` with several models, `best_for` where "
        "a table has several batches, `slo` with `--slo-ms` (`SloUnderLoad`), and `energy` with `--energy` "
        "(`EnergyPrediction`)",
        ("hase.inference.core.answers.Prediction", "hase.inference.sharing.shared_models.SloUnderLoad",
         "hase.inference.core.energy.EnergyPrediction")),
    "inference/predict_model_latency.py --watch": ("an object a line", ("hase.inference.live.watch.WatchLine",)),
    "inference/compare_models.py": ("one object", ("hase.inference.core.model_differences.ModelDifference",)),
    "inference/load_curve.py": ("one object", ("hase.inference.sharing.shared_models.LoadCurve",)),
    "inference/pair_latency.py": ("one object, or a list for several ways", ("hase.inference.sharing.shared_models.Pair",)),
    "benchmark/dataset_coverage.py": ("one object", ("hase.records.dataset_coverage.DatasetCoverage",)),
    "inference/sharing_advice.py": ("one object", ("hase.inference.sharing.advice.SharingAdvice",)),
    "inference/predict_llm.py": ("a list with an object for each request", ("hase.inference.llm.answers.LlmPrediction",)),
}
VERSION = "of the record's form"
ATTRIBUTE = re.compile(r"^    (\w+(?:, \w+)*): (.*)$")


def page() -> str:
    """The text of the page.

    Raises:
        UserError: a docstring says nothing of a field.
    """
    parts, written = [INTRODUCTION], set[type]()
    for command, (what, names) in PRINTED.items():
        parts += [f"## {command}", "", f"`--json` prints {what}.", ""]
        for name in names:
            module, _, of_class = name.rpartition(".")
            for record in _with_parts(getattr(__import__(module, fromlist=[of_class]), of_class)):
                if record not in written:
                    written.add(record)
                    parts += [f"### {record.__name__}", "", _summary(record), "", markdown_table(_rows(record)), ""]
    return "\n".join(parts)


def _with_parts(record: type) -> Iterator[type]:
    """A record's class, and those of its fields, and of theirs."""
    yield record
    for kind in _types(record).values():
        for part in _classes_in(kind):
            yield from _with_parts(part)


def _types(record: type) -> dict[str, typing.Any]:
    """The type of each field, as it is written."""
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
    said = {name: meaning for base in reversed(record.__mro__) for name, meaning in _meanings(base).items()}
    kinds = _types(record)
    if missing := [name for name in kinds if name not in said and name != "version"]:
        raise UserError(f"{record.__module__}.{record.__name__}: its docstring says nothing of {', '.join(missing)}")
    return [{"field": f"`{name}`", "type": shown(kind), "meaning": said.get(name, VERSION)} for name, kind in kinds.items()]


def _meanings(record: type) -> dict[str, str]:
    """What the section `Attributes` of a class's docstring says of each field."""
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


def _summary(record: type) -> str:
    """What a class's docstring says before its attributes, as one paragraph."""
    return " ".join(inspect.cleandoc(record.__doc__ or "").partition("Attributes:")[0].split())


def shown(kind: typing.Any) -> str:
    """A type in words of JSON."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(shown(part) for part in args)
    if origin is typing.Literal:
        return " or ".join(f'"{value}"' for value in args)
    if origin is tuple:
        several = len(args) == 2 and args[1] is Ellipsis
        return f"list of {shown(args[0])}" if several else f"list of {len(args)}: {', '.join(dict.fromkeys(map(shown, args)))}"
    if origin is dict:
        return f"object: {shown(args[0])} to {shown(args[1])}"
    plain = {float: "number", int: "whole number", str: "text", bool: "true or false", type(None): "null"}
    return plain.get(kind) or f"[{kind.__name__}](#{kind.__name__.lower()})"


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    cli.start(parser.parse_args())
    files.write_text(PAGE, page())
    print(PAGE)


if __name__ == "__main__":
    cli.run(main)
