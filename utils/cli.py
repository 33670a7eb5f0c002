"""What every command line of Hase shares: arguments, tables, progress, and how errors reach the user."""

from __future__ import annotations

import argparse
import difflib
import errno
import gc
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from utils import logger
from utils.errors import UserError
from utils.lazy import rich
from utils.paths import ROOT, Workspace
from utils.stopping import asked_by, say, stop_at_signals

T = TypeVar("T")
EXIT_USAGE = 2
EXIT_ROUGH = 3  # asked for (--fail-on-rough): an answer is a rough estimate
EXIT_SLO_MISSED = 4  # a latency objective is not met
LAST_PORT = 65535
FRAME = 1  # characters of a table's frame,
PADDING = 3  # and for each column, its lines and blanks
FOLDED = 16  # characters that a column of words keeps at least
GARBAGE_EVERY = 100_000  # new objects: Python looks for garbage every 700, which takes a fifth of what a short script does
_QUIET_SECONDS = 15.0  # between two progress lines where stderr is no terminal
_GROWING_COLUMN = 10  # characters that a column has at least in a table whose cells are not all known yet
LEFT_OUT = ("torch", "torchvision", "onnxscript", "pandas", "sklearn", "matplotlib")  # of a light install
_is_command = False

OS_ERROR_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again: what was finished is kept",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EACCES: "no permission; choose another --workspace or change the permissions",
    errno.EPERM: "not permitted; choose another --workspace or change the permissions",
    errno.EROFS: "the file system is read-only; choose another --workspace",
    errno.EEXIST: "a file stands where a folder is needed",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.ENOENT: "no such file or folder",
    errno.EISDIR: "this is a folder, a file was expected",
}


class Parser(argparse.ArgumentParser):
    """Refuses a wrong command line in one line, and suggests what an unknown option was meant to be.

    Options can't be abbreviated: a typo would pass for another option, and a new option would break old commands.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for word in itertools.takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if re.fullmatch(r"--?[a-zA-Z][\w-]*", name) and name not in self._option_string_actions:
                self.error(f"unknown option {name}{self._suggestion(name)}")
        return super().parse_known_args(words, namespace)

    def _suggestion(self, name: str) -> str:
        known = [option for option in self._option_string_actions if option.startswith("--")]
        asked = "--" + name.lstrip("-").lower().replace("_", "-")
        near = [option for option in known if option.startswith(asked)] or difflib.get_close_matches(asked, known, 1, 0.7)
        return f"; did you mean {' or '.join(near)}?" if near else ""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"error: {message} (see {self.prog} --help)\n")


def parser(doc: str | None, examples: str) -> argparse.ArgumentParser:
    """An argument parser that shows the script's own docstring first and `examples` last, and knows the shared options.

    Args:
        doc: the script's `__doc__`.
        examples: shell lines to paste, one a line.
    """
    made = Parser(
        description=doc, epilog="examples:\n" + examples.strip("\n"), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = made.add_argument_group("shared options")
    shared.add_argument("--workspace", type=Path, default=ROOT, metavar="DIR",
                        help="folder that holds what the phases write (default: the repository)")
    shared.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    shared.add_argument("--verbose", action="store_true", help="debug lines on stderr too")
    shared.add_argument("--quiet", action="store_true", help="only warnings and errors on stderr")
    return made


def start(args: argparse.Namespace, begins: bool = False) -> Workspace:
    """Sets logging up as the shared options ask, and returns the workspace.

    Args:
        begins: the script makes a workspace that is not there.

    Raises:
        UserError: the workspace is a file, or not there.
    """
    folder = Path(args.workspace)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--workspace {folder}: a file; a workspace is a folder")
    if not folder.exists() and not begins:
        raise UserError(f"--workspace {folder}: no such folder; check its name, or make it first: mkdir -p {folder}")
    workspace = Workspace(folder.resolve())
    logger.configure(workspace.log_file, verbose=args.verbose, quiet=args.quiet)
    return workspace


def add_way(parser: argparse.ArgumentParser) -> None:
    """`--io` and `--cuda-graph`: how a model is run."""
    parser.add_argument("--io", choices=("device", "host"), default="device",
                        help="device: tensors stay on the device; host: numpy in and out (default: device)")
    parser.add_argument("--cuda-graph", action="store_true", help="captured once as a CUDA graph, and replayed")


def add_load(parser: argparse.ArgumentParser) -> None:
    """`--config` and `--metrics`: where what else runs on the device is learned from."""
    parser.add_argument("--config", type=Path, metavar="FILE",
                        help="names a Prometheus that knows what else runs (default: inference/config.yaml)")
    parser.add_argument("--metrics", type=Path, metavar="FILE",
                        help="JSON of what else runs on the device, by DCGM field name (default: as the config says, idle)")


def add_model(made: argparse.ArgumentParser) -> None:
    """`--model`: whose latency is asked for."""
    made.add_argument("--model", type=Path, required=True,
                      help="an ONNX file, or a kernel record's JSON; a bare name is also looked for in model_zoo")


def add_target(made: argparse.ArgumentParser) -> None:
    """`--target`: of what is predicted."""
    made.add_argument("--target", help="whose latency, by name or a part of it, e.g. h200, whose predictors come with Hase "
                      "(default: this machine, or the only target with predictors)")


def add_trust(made: argparse.ArgumentParser) -> None:
    """`--strict` and `--force`: how much of what was measured a prediction builds on."""
    made.add_argument("--strict", action="store_true", help="predict every kernel, even those that were measured")
    made.add_argument("--force", action="store_true",
                      help="predict although element type or ONNX Runtime version are not the predictors'")


def positive(text: str) -> float:
    """The type of an option that is a positive number."""
    value = _number(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def pace(text: str) -> float | Literal["measure"]:
    """The type of an option that is the pace of a host: a ratio, or `measure`."""
    try:
        return "measure" if text == "measure" else positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a ratio, such as 1.15, nor the word measure") from None


def percentile(text: str) -> float:
    """The type of an option that is a percentile, in per cent."""
    value = _number(text)
    if not 0.0 < value <= 100.0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 100")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def whole(text: str) -> int:
    """The type of an option that is a whole number, 0 or more."""
    if not re.fullmatch(r"\+?[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def count(text: str) -> int:
    """The type of an option that is a whole number, 1 or more."""
    if not re.fullmatch(r"\+?0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def counts(text: str) -> list[int]:
    """The type of an option that is several of them, with commas between."""
    return [count(part) for part in text.split(",")]


def port(text: str) -> int:
    """The type of an option that is a port to listen at; 0 is a free one."""
    if not text.isdecimal() or int(text) > LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to {LAST_PORT}")
    return int(text)


def out_file(text: str) -> Path:
    """The type of an option that names a file to write: looked at before the work starts."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no folder {path.parent}; make it first, or check its name")
    return path


def address(text: str) -> tuple[str, int]:
    """The type of an option that says where to listen, `[ADDRESS:]PORT`."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text}: write PORT or ADDRESS:PORT")
    return host, int(port)


def add_dim(made: argparse.ArgumentParser) -> None:
    """Adds `--dim NAME=SIZE[,SIZE…]` (repeatable), the sizes of a model's dynamic dimensions, and `--branch`, which is such a
    size too."""
    made.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE",
                      help="size of a dynamic dimension, e.g. --dim batch=16 (repeat for others); trips=20: how often Loops "
                           "run whose number of trips the model leaves open, NODE.trips=20: how often one does")
    made.add_argument("--branch", action="append", dest="dim", type=branch_as_size, metavar="[NODE=]then|else",
                      help="which branch an If takes (default: the more expensive one); NODE may be left out where there is "
                           "but one If")


def branch_as_size(text: str) -> str:
    """`--branch NODE=else` as the size `NODE.else=1`, and `--branch else` as `else=1`; for argparse."""
    node, _, branch = text.rpartition("=")
    if branch not in ("then", "else"):
        raise argparse.ArgumentTypeError(f"{text!r}: write NODE=then or NODE=else, or then or else where there is one If")
    return f"{node}.{branch}=1" if node else f"{branch}=1"


def add_static(made: argparse.ArgumentParser) -> None:
    """Adds `--static`: dynamic dimensions are fixed before ONNX Runtime optimises the model."""
    made.add_argument("--static", action="store_true",
                      help="take the model as exported at the sizes given (default: as a session that takes any sizes runs it, "
                           "shape computations and all)")


def parse_dims(texts: Sequence[str]) -> dict[str, list[int]]:
    """`["batch=1,2", "height=224"]` as `{"batch": [1, 2], "height": [224]}`.

    Raises:
        UserError: a text that is no NAME=SIZE, a size that is no whole number, or below 0, or a name given twice.
    """
    dims: dict[str, list[int]] = {}
    for text in texts:
        name, _, sizes = text.partition("=")
        try:
            values = [int(size) for size in sizes.split(",")]
        except ValueError:
            values = []
        if not name or not values or min(values) < 0:
            raise UserError(f"--dim {text}: write NAME=SIZE with whole numbers, for example --dim batch=16")
        if name in dims:
            raise UserError(f"--dim {text}: {name} is given twice; give several sizes as {name}=1,2,4")
        dims[name] = values
    return dims


def combinations(dims: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Every combination of the sizes: `{"batch": [1, 2], "width": [224]}` gives two; no dimension at all gives one."""
    return [dict(zip(dims, sizes, strict=True)) for sizes in itertools.product(*dims.values())]


def one_size_dims(texts: Sequence[str]) -> dict[str, int]:
    """Like `parse_dims`, for commands that take one size a dimension."""
    dims = parse_dims(texts)
    for name, sizes in dims.items():
        if len(sizes) > 1:
            raise UserError(f"--dim {name}: this command takes one size, not {len(sizes)}")
    return {name: sizes[0] for name, sizes in dims.items()}


def first_of(names: Sequence[str]) -> str:
    """The first name, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def print_json(value: Any) -> None:
    """One JSON document on stdout; pydantic models are dumped by field name."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    print(json.dumps(value, indent=2, default=str))


def cell(value: Any) -> str:
    """A table cell: four significant digits for floats, a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)


def print_table(rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
    """Rows as a table on a terminal, and as tab-separated lines with a header in a pipe.

    On a narrow terminal words are folded, and where that is not enough the columns are printed as several tables; a number is
    never broken.
    """
    if not rows:
        return
    columns = list(rows[0])
    if not sys.stdout.isatty():
        print("\t".join(columns))
        for row in rows:
            print("\t".join(cell(row.get(column)) for column in columns))
        return
    console = rich.console.Console()
    cells = {column: [cell(row.get(column)) for row in rows] for column in columns}
    numeric = {column: all(_is_number(row.get(column)) for row in rows) for column in columns}
    parts = [columns] if column_widths(cells, numeric, console.width) else _split(cells, numeric, console.width)
    for number, part in enumerate(parts):
        shown = {column: cells[column] for column in part}
        table = rich.table.Table(title=title or None if number == 0 else None, title_justify="left", header_style="bold")
        for column, width in (column_widths(shown, numeric, console.width) or dict.fromkeys(part)).items():
            table.add_column(column, justify="right" if numeric[column] else "left", overflow="fold", width=width)
        for line in zip(*shown.values(), strict=True):
            table.add_row(*line)
        console.print(table)


def _is_number(value: Any) -> bool:
    """Whether a cell holds numbers, perhaps with a unit or an `and` between, and no words: it is never broken."""
    return not isinstance(value, str) or not re.search(r"[^\W\d_]{4}", value)


def column_widths(cells: Mapping[str, Sequence[str]], numeric: Mapping[str, bool], room: int) -> dict[str, int | None]:
    """The width of each column of a table `room` characters wide: numbers get what they need, headings break between words, and
    columns of words, folded, share what is left. Empty where that is too little.

    Args:
        cells: by column.
        numeric: by column, whether its cells must not be broken.
    """
    needed = {name: max(len(text) for text in [*name.split(), *column]) for name, column in cells.items()}
    widths = {name: width if numeric[name] else min(width, FOLDED) for name, width in needed.items()}
    left = room - FRAME - sum(width + PADDING for width in widths.values())
    if left < 0:
        return {}
    for most in (needed, {name: max(width, len(name)) for name, width in needed.items()}):  # cells first, then headings
        while left > 0 and (short := [name for name, width in most.items() if widths[name] < width]):
            widths[min(short, key=lambda name: widths[name])] += 1
            left -= 1
    return dict(widths)


def _split(cells: Mapping[str, Sequence[str]], numeric: Mapping[str, bool], room: int) -> list[list[str]]:
    """The columns in several tables, one below another; each begins with the first column, which says what a row is of."""
    first, *others = cells
    parts: list[list[str]] = [[first]]
    for column in others:
        longer = [*parts[-1], column]
        if len(parts[-1]) > 1 and not column_widths({name: cells[name] for name in longer}, numeric, room):
            parts.append([first])
        parts[-1].append(column)
    return parts


def print_line(row: Mapping[str, Any], heading: bool = False) -> None:
    """One row of a table that grows, at once; its column names before it with `heading`. Tabs part the cells in a pipe."""
    names, cells = list(row), [cell(value) for value in row.values()]
    widths = [max(len(name), len(text), _GROWING_COLUMN) for name, text in zip(names, cells, strict=True)]
    for line in (names, cells) if heading else (cells,):
        if sys.stdout.isatty():
            line = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
        print(("  " if sys.stdout.isatty() else "\t").join(line), flush=True)


def print_rows(rows: Sequence[Mapping[str, Any]], as_json: bool, title: str = "") -> None:
    """Rows as one JSON document, or as a table."""
    if as_json:
        print_json(rows)
    else:
        print_table(rows, title)


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Passes `items` on while a bar with its ETA stands on stderr (a line every 15 s where that is no terminal)."""
    if total is None:
        total = len(items) if hasattr(items, "__len__") else None  # type: ignore[arg-type]
    if sys.stderr.isatty():
        console = rich.console.Console(stderr=True)
        yield from rich.progress.track(items, description, total=total, console=console, transient=True)
        return
    log = logger.get_logger("progress")
    began = said = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - said > _QUIET_SECONDS and done:
            said = now
            eta = f", {(now - began) / done * (total - done):.0f} s left" if total else ""
            log.info("%s: %d%s%s", description, done, f" of {total}" if total else "", eta)
        yield item


def explain(error: OSError) -> str:
    """An operating-system error in the user's words: the file, what is wrong, what to do."""
    where = f"{error.filename}: " if error.filename else ""
    return where + OS_ERROR_ADVICE.get(error.errno or 0, error.strerror or str(error))


def is_command() -> bool:
    """Whether this process is one of Hase's scripts, and not somebody's program that imports Hase."""
    return _is_command


def run(main: Callable[[], int | None], kept: str = "") -> NoReturn:
    """Runs a script's `main` and exits: 0 done, 1 the user's to mend (one line on stderr), 2 usage, or another EXIT_… that
    `main` returns. Ctrl-C gives 130 and SIGTERM 143, each after tidying up and within a second.

    Bugs keep their traceback: only `UserError` and file-system errors that a user can mend are turned into a line.

    Args:
        kept: what is not lost when the script is stopped and goes on from when it is run again, in words; "" for nothing.
    """
    global _is_command
    _is_command = True
    stopped = f"stopped; {kept} is kept: run again to go on" if kept else "stopped"
    stop_at_signals(stopped)
    gc.set_threshold(GARBAGE_EVERY)
    try:
        code = main() or 0
        sys.stdout.flush()
    except BaseException as error:
        told = _told(error, stopped)
        if told is None:
            raise
        code = told
    sys.exit(code)


def _told(error: BaseException, stopped: str) -> int | None:
    """Tells the user of an error, or that the script was stopped, and returns the exit code; None for a bug."""
    if asked_by() or isinstance(error, KeyboardInterrupt):
        say(stopped)
        return 128 + (asked_by() or signal.SIGINT)
    if isinstance(error, BrokenPipeError):  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr)
    elif isinstance(error, OSError) and error.errno in OS_ERROR_ADVICE:
        print(f"error: {explain(error)}", file=sys.stderr)
    elif isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in LEFT_OUT:
        print(f"error: needs the package {error.name}, which requirements-predict.txt leaves out; "
              "pip install -r requirements.txt", file=sys.stderr)
    else:
        return None
    return 1
