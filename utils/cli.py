"""The command line that all scripts share: errors and exit codes, options, and printed results.

Only scripts import it; libraries raise `UserError`, and log.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn

from hase.utils import logger
from hase.utils.cache_folder import cache_folder
from hase.utils.commands import as_typed, command_line, command_name, program
from hase.utils.errors import OpenSizes, UserError, os_error_text, user_can_fix
from hase.utils.fingerprint import FROM_SHEET
from hase.utils.lazy import argcomplete, rich
from hase.utils.locks import wait_for_locks
from hase.utils.paths import IN_CLONE, ROOT, Workspace, default_root
from hase.utils.processes import begin_command, report_end, stop_signal
from hase.utils.project_file import project_words
from hase.utils.text import cell

EXIT_USAGE = 2
EXIT_ROUGH = 3  # an answer is a rough estimate (with --fail-on-rough)
EXIT_SLO_MISSED = 4  # a latency objective is not met
LEFT_OUT = {"torch": "export", "torchvision": "export", "onnxscript": "export", "matplotlib": "plot"}  # package: its extra
LAST_PORT = 65535
PLOTS = (".png", ".svg", ".pdf")  # suffixes of plots
FILE_COLUMNS = ("model", "file", "status", "mb", "difference")  # columns of the table of exported files
FRAME = 1  # width of a table's frame beside its columns, in characters
PADDING = 3  # width of the line and blanks beside a column, in characters
LEAST_WORDS_WIDTH = 16  # smallest width of a column of words, in characters
_GROWING_COLUMN = 10  # smallest width of a column in a table that is printed line by line


def run(main: Callable[[], int | None], kept: str = "") -> NoReturn:
    """Runs the `main` of a script and exits.

    Exit codes: 0 done, 1 an error that the user can fix (one line on stderr), 2 usage, or an EXIT_… that `main` returns. Ctrl-C
    gives 130 and SIGTERM 143, both within a second and after cleaning up. A bug keeps its traceback. `kept` names what a
    stopped script leaves for the next run to continue with.
    """
    stopped = f"stopped; {kept} is kept: run again to go on" if kept else "stopped"
    begin_command(stopped)
    try:
        code = main() or 0
        sys.stdout.flush()
    except BaseException as error:
        reported = _report(error, stopped)
        if reported is None:
            raise
        code = reported
    sys.exit(code)


def _report(error: BaseException, stopped: str) -> int | None:
    """Tells the user about an error or a stop, and returns the exit code; None for a bug."""
    if stop_signal() or isinstance(error, KeyboardInterrupt):
        report_end(stopped)
        return 128 + (stop_signal() or signal.SIGINT)
    if isinstance(error, BrokenPipeError):  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, OpenSizes):
        print(f"error: {error.problem}: {command_line()} {error.options}", file=sys.stderr)
    elif isinstance(error, UserError):
        print(f"error: {as_typed(str(error))}", file=sys.stderr)
    elif isinstance(error, OSError) and user_can_fix(error):
        print(f"error: {os_error_text(error)}", file=sys.stderr)
    elif isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in LEFT_OUT:
        extra = LEFT_OUT[str(error.name).partition(".")[0]]
        print(as_typed(f"error: needs the package {error.name}; pip install '.[{extra}]'"), file=sys.stderr)
    else:
        return None
    return 1


# option types ------------------------------------------------------------------------------------------------------------

def positive(text: str) -> float:
    """An option that is a positive number."""
    value = _number(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def pace(text: str) -> float | Literal["measure"]:
    """An option that is the pace of a host: a ratio, or `measure`."""
    try:
        return "measure" if text == "measure" else positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a ratio, such as 1.15, nor the word measure") from None


def percentile(text: str) -> float:
    """An option that is a percentile, 1 to 100."""
    value = _number(text)
    if not 1.0 <= value <= 100.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 100; write 95 for the 95th percentile")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def whole(text: str) -> int:
    """An option that is a whole number, 0 or more."""
    if not re.fullmatch(r"\+?[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def count(text: str) -> int:
    """An option that is a whole number, 1 or more."""
    if not re.fullmatch(r"\+?0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def counts(text: str) -> list[int]:
    """An option that is a list of whole numbers, 1 or more, separated by commas."""
    return [count(part) for part in text.split(",")]


def port(text: str) -> int:
    """An option that is a port to listen on; 0 is any free port."""
    if not text.isdecimal() or int(text) > LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to {LAST_PORT}")
    return int(text)


def existing(text: str) -> Path:
    """An option that names a file or folder to read."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or folder")
    return path


def out_file(text: str) -> Path:
    """An option that names a file to write; checked before the work starts."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no folder {path.parent}; make it first, or check its name")
    return path


def plot_file(text: str) -> Path:
    """An option that names a plot to write."""
    path = out_file(text)
    if path.suffix not in PLOTS:
        raise argparse.ArgumentTypeError(f"{text}: a {', '.join(PLOTS[:-1])} or {PLOTS[-1]}")
    if path.suffix != ".svg" and find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"{text} needs matplotlib (pip install '.[plot]'); "
                                         f"{path.with_suffix('.svg')} needs nothing")
    return path


def html_file(text: str) -> Path:
    """An option that names a page to write."""
    path = out_file(text)
    if path.suffix not in (".html", ".htm"):
        raise argparse.ArgumentTypeError(f"{text}: a page is an .html file")
    return path


def address(text: str) -> tuple[str, int]:
    """An option for the address to listen on: `[ADDRESS:]PORT`."""
    host, _, number = text.rpartition(":")
    if not number.isdecimal() or int(number) > LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text}: write PORT or ADDRESS:PORT")
    return host, int(number)


# options that several commands have --------------------------------------------------------------------------------------

def add_web_config(parser: argparse.ArgumentParser) -> None:
    """`--web-config`: TLS and users of a server that Prometheus scrapes."""
    parser.add_argument("--web-config", type=Path, metavar="FILE",
                        help="YAML with TLS and users, as Prometheus's own exporters take it; docs/operating.md says how "
                           "(default: plain HTTP for everyone who reaches the address)")


def add_model(parser: argparse.ArgumentParser | argparse._MutuallyExclusiveGroup, required: bool = True) -> None:
    """`--model`: the model to predict."""
    parser.add_argument("--model", type=Path, required=required,
                        help="an ONNX file, or a kernel record's JSON; a bare name is also looked for in model_zoo")


def add_models(parser: argparse.ArgumentParser | argparse._MutuallyExclusiveGroup, required: bool = True) -> None:
    """`--model`: the models to predict."""
    parser.add_argument("--model", type=Path, nargs="+", action="extend", required=required, metavar="MODEL",
                        help="ONNX files, kernel records' JSON, folders of models, or patterns such as 'zoo/*.onnx'; a bare "
                             "name is also looked for in model_zoo (repeatable)")


def sheet_name(name: str) -> str:
    """The target that stands for a card by its data sheet."""
    if not name.strip():
        raise argparse.ArgumentTypeError("the name of a card is expected, e.g. l40s")
    return f"{name.strip()}{FROM_SHEET}"


def add_target(parser: argparse.ArgumentParser) -> None:
    """`--on`: the device to predict for. `--target` is the same; `--gpu` takes a card from its data sheet even if measured."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--on", "--target", dest="target", metavar="DEVICE",
                        help="h200, whose predictors come with Hase; a GPU from its data sheet, e.g. l4 or rtx-4090; a YAML "
                             "file with one's own; a target that was trained; or `this` machine (default: this machine, or "
                             "the only target with predictors)")
    either.add_argument("--gpu", dest="target", type=sheet_name, help=argparse.SUPPRESS)


def add_run_mode(parser: argparse.ArgumentParser) -> None:
    """`--io` and `--cuda-graph`: how a model is run."""
    parser.add_argument("--io", choices=("device", "host"), default="device",
                        help="device: tensors stay on the device; host: numpy in and out (default: device)")
    parser.add_argument("--cuda-graph", action="store_true", help="captured once as a CUDA graph, and replayed")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """`--dtype fp32,fp16`: the precisions to predict, a row for each; None stands for the model as it is."""
    parser.add_argument("--dtype", type=dtypes, default=[None], metavar="fp32,fp16",
                        help="a row for each: fp32: the model as it is; fp16: in half precision, its float32 converted as "
                             "onnxconverter-common does; no file is written (default: as it is)")


def dtypes(text: str) -> list[Literal["fp16"] | None]:
    """`fp32,fp16` as `[None, "fp16"]`."""
    names: dict[str, Literal["fp16"] | None] = {"fp32": None, "fp16": "fp16"}
    if unknown := [name for name in text.split(",") if name not in names]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(names)}")
    return [names[name] for name in dict.fromkeys(text.split(","))]


def add_host_pace(parser: argparse.ArgumentParser, default: str) -> None:
    """`--host-pace` and `--machine`: how fast a GPU's host launches work; the help names the `default`."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--host-pace", type=pace, metavar="RATIO|measure",
                        help="how many times as long as usual the GPU's host takes to dispatch; measure: measure it now on "
                             f"this machine, which must be the target (default: {default})")
    either.add_argument("--machine", type=Path, metavar="FILE",
                        help="the machine's host pace, as benchmark/host_pace.py --out wrote it there")


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """`--inputs`: a file with a model's inputs."""
    parser.add_argument("--inputs", type=Path, metavar="FILE",
                        help="inputs of the model by name, as numpy.savez writes them (default: standardised random numbers, "
                             "and zeros for whole numbers); some operators' time depends on them")


def add_config(parser: argparse.ArgumentParser, default: Path, example: str, what: str = "settings") -> None:
    """`--config` and `--set` (as `changes`), for `hase.utils.config.read_config`. `example`: a value of --set for the help."""
    parser.add_argument("--config", type=Path, default=default, metavar="FILE",
                        help=f"{what} (default: {default.relative_to(ROOT)})")
    parser.add_argument("--set", action="append", dest="changes", default=[], metavar="KEY=VALUE",
                        help=f"a value in place of the config's, for example --set '{example}' (repeatable; see docs/files.md)")


def add_load(parser: argparse.ArgumentParser, config: Path) -> None:
    """`--config`, `--set` and `--metrics`: the load, which is what else runs on the device."""
    add_config(parser, config, "prometheus.url=http://localhost:9090", "names a Prometheus that knows what else runs")
    parser.add_argument("--metrics", type=Path, metavar="FILE",
                        help="JSON of what else runs on the device, by DCGM field name (default: as the config says, idle)")


def add_html(parser: argparse.ArgumentParser) -> None:
    """`--html`: the answer as a page."""
    parser.add_argument("--html", type=html_file, metavar="FILE",
                        help="write the answer as a page to look at: one file, for any browser, without a network "
                           "(docs/reports.md)")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """`--strict` and `--force`: which measurements a prediction may use."""
    parser.add_argument("--strict", action="store_true", help="predict every kernel, even those that were measured")
    parser.add_argument("--force", action="store_true",
                        help="predict although element type or ONNX Runtime version are not the predictors'")


def add_estimators(parser: argparse.ArgumentParser) -> None:
    """`--estimators`: the user's own estimators, which are run."""
    parser.add_argument("--estimators", type=existing, action="append", default=[], metavar="PATH",
                        help="a file with estimators of your own, or a folder of them; they are run (repeatable)")


def add_dim(parser: argparse.ArgumentParser) -> None:
    """`--batch`, `--dim NAME=SIZE[,SIZE…]` and `--branch`: sizes of a model; batch and branch are stored as such sizes, too."""
    parser.add_argument("--batch", action="append", dest="dim", default=[], type=batch_as_size, metavar="N[,N…]",
                        help="the model's batch, whatever its name: short for --dim batch=N; another one than a fixed batch is "
                           "refused where the graph allows no other")
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE",
                        help="size of a dynamic dimension, e.g. --dim batch=16 (repeat for others); trips=20: how often Loops "
                           "run whose number of trips the model leaves open, NODE.trips=20: how often one does")
    parser.add_argument("--branch", action="append", dest="dim", default=[], type=branch_as_size, metavar="[NODE=]then|else",
                        help="which branch an If takes (default: the more expensive one); NODE may be left out where there is "
                           "but one If")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """`--sizes NAME=SIZE,NAME=SIZE …`: sizes that belong together, combined with all those of `--dim`."""
    parser.add_argument("--sizes", type=sizes_together, nargs="+", action="extend", default=[], metavar="NAME=SIZE,…",
                        help="sizes that go together, a row for each: --sizes seq=1,past=128 seq=1,past=1024 (sizes of --dim "
                             "are combined with each other, and with each of these)")


def sizes_together(text: str) -> dict[str, int]:
    """An option type: `seq=1,past=128` as `{"seq": 1, "past": 128}`."""
    try:
        dims = parse_dims(text.split(","))
    except UserError:
        dims = {}
    if not dims:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=SIZE,NAME=SIZE with whole numbers and each name once, for "
                                         "example seq=1,past=128")
    return {name: size for name, (size,) in dims.items()}


def add_rebatch(parser: argparse.ArgumentParser) -> None:
    """`--rebatch N[,N…]`: another batch than the exported fixed one; `--batch` does the same."""
    parser.add_argument("--rebatch", action="append", dest="dim", default=[], type=rebatch_as_size, help=argparse.SUPPRESS)


def batch_as_size(text: str) -> str:
    """`1,16` as the sizes `batch=1,16`."""
    return f"batch={','.join(map(str, counts(text)))}"


def rebatch_as_size(text: str) -> str:
    """`1,16` as the sizes `rebatch=1,16`."""
    return f"rebatch={','.join(map(str, counts(text)))}"


def branch_as_size(text: str) -> str:
    """An option type: `NODE=else` becomes the size `NODE.else=1`, and `else` becomes `else=1`."""
    node, _, branch = text.rpartition("=")
    if branch not in ("then", "else"):
        raise argparse.ArgumentTypeError(f"{text!r}: write NODE=then or NODE=else, or then or else where there is one If")
    return f"{node}.{branch}=1" if node else f"{branch}=1"


def add_static(parser: argparse.ArgumentParser) -> None:
    """`--static`: dynamic dimensions are fixed before ONNX Runtime optimises the model."""
    parser.add_argument("--static", action="store_true",
                        help="take the model as exported at the sizes given (default: as a session that takes any sizes runs "
                             "it, shape computations and all)")


def add_no_weights(parser: argparse.ArgumentParser) -> None:
    """`--no-weights`: files of a model's weights may be missing."""
    parser.add_argument("--no-weights", action="store_true",
                        help="go on where a file of the model's weights is missing: kernels and sizes are those of the graph "
                           "(default: an error)")


def parse_dims(texts: Sequence[str]) -> dict[str, list[int]]:
    """`["batch=1,2", "height=224"]` as `{"batch": [1, 2], "height": [224]}`."""
    dims: dict[str, list[int]] = {}
    for text in texts:
        name, _, sizes = text.partition("=")
        if "=" in sizes and "," in sizes:
            repeated = " ".join(f"--dim {part.strip()}" for part in re.split(r",(?=[^,]*=)", text))
            raise UserError(f"--dim {text}: repeat --dim for each dimension: {repeated}")
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
    """Every combination of the sizes: `{"batch": [1, 2], "width": [224]}` gives two; no dimensions give an empty one."""
    return [dict(zip(dims, sizes, strict=True)) for sizes in itertools.product(*dims.values())]


def all_sizes(dims: Mapping[str, Sequence[int]], together: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Every combination of the sizes `dims` with each entry of `together`, if there are any."""
    if twice := [name for name in dims if any(name in sizes for sizes in together)]:
        raise UserError(f"{twice[0]} is given by --dim and by --sizes: leave it out of one of them")
    return [{**combination, **sizes} for combination in combinations(dims) for sizes in together or [{}]]


def one_size_dims(texts: Sequence[str]) -> dict[str, int]:
    """Like `parse_dims`, for commands that take one size per dimension."""
    dims = parse_dims(texts)
    for name, sizes in dims.items():
        if len(sizes) > 1:
            raise UserError(f"--dim {name}: this command takes one size, not {len(sizes)}")
    return {name: sizes[0] for name, sizes in dims.items()}


class StoreOnce(argparse.Action):
    """Stores the value of an option, and refuses the option if it is given twice."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        if isinstance(parser, Parser) and option_string:
            if self.dest in parser.given:
                parser.error(f"{option_string} is given twice; this command takes one")
            parser.given.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line and suggest a known option for an unknown one. Options can't be
    abbreviated, since a typo could be taken for another option and a new option could break old commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self.completing = False
        self.given: set[str] = set()  # the options of one value in the command line that is being parsed
        for name in (None, "store"):
            self.register("action", name, StoreOnce)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if os.environ.get("_ARGCOMPLETE") and not self.completing:  # a shell asks what could be typed next
            self.completing = True
            os.environ["_ARGCOMPLETE"] = "2" if program().startswith("hase ") else os.environ["_ARGCOMPLETE"]
            argcomplete.autocomplete(self)
        self.given.clear()
        words = list(sys.argv[1:] if args is None else args)
        if args is None:  # a command line, not a test or a program
            words = self._project_words(words) + words
        for word in itertools.takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if re.fullmatch(r"--?[a-zA-Z][\w-]*", name) and name not in self._option_string_actions:
                self.error(f"unknown option {name}{self._suggestion(name)}")
        return super().parse_known_args(words, namespace)

    def _project_words(self, words: list[str]) -> list[str]:
        try:
            return project_words(self, command_name(), words)
        except UserError as error:
            self.error(str(error))

    def _suggestion(self, name: str) -> str:
        known = [option for option in self._option_string_actions if option.startswith("--")]
        wanted = "--" + name.lstrip("-").lower().replace("_", "-")
        similar = [option for option in known if option.startswith(wanted)] or difflib.get_close_matches(wanted, known, 1, 0.7)
        return f"; did you mean {' or '.join(similar)}?" if similar else ""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, as_typed(f"error: {message} (see {self.prog} --help)\n"))


def parser(doc: str | None, examples: str) -> argparse.ArgumentParser:
    """An argument parser with the shared options. Its help begins with the script's docstring and ends with `examples`."""
    command_parser = Parser(
        prog=program(), description=as_typed(doc or ""), epilog=as_typed("examples:\n" + examples.strip("\n")),
        formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = command_parser.add_argument_group("shared options")
    shared.add_argument("--workspace", type=Path, default=default_root(), metavar="DIR",
                        help="folder that holds what the phases write (default: the "
                             f"{'repository' if IN_CLONE else 'current folder'})")
    shared.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    shared.add_argument("--wait", action="store_true",
                        help="wait while another process writes to the same folder or measures on the same device (default: "
                             "end with an error)")
    shared.add_argument("--verbose", action="store_true", help="debug lines on stderr too")
    shared.add_argument("--quiet", action="store_true", help="only errors on stderr")
    return command_parser


def existing_folder(option: str, folder: Path, remedy: str = "") -> Path:
    """The folder that an option names; `remedy` tells the user what to do if it does not exist."""
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{option} {folder}: a file, not a folder")
    raise UserError(f"{option} {folder}: no such folder{remedy and '; '}{remedy}")


def log_file(workspace: Workspace) -> Path | None:
    """Where a command logs: in its workspace, or in the user's cache if Hase is installed and no folder was named."""
    if IN_CLONE or workspace.root != default_root():
        return workspace.log_file
    folder = cache_folder()
    return folder and folder / "hase.log"


def start(args: argparse.Namespace, begins: bool = False) -> Workspace:
    """Configures logging by the shared options, and returns the workspace, which must exist unless the script `begins` it."""
    folder = Path(args.workspace)
    if folder.exists() or not begins:
        existing_folder("--workspace", folder, f"check its name, or make it first: mkdir -p {folder}")
    workspace = Workspace(folder.resolve())
    logger.configure(log_file(workspace), verbose=args.verbose, quiet=args.quiet)
    if args.wait:
        wait_for_locks()
    return workspace


# printed results ---------------------------------------------------------------------------------------------------------

def print_json(value: Any) -> None:
    """Prints one JSON document; pydantic models are dumped by field name."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    print(json.dumps(value, indent=2, default=str))


def print_table(rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
    """Prints rows as a table on a terminal, and as tab-separated lines with a header in a pipe. If the terminal is narrow, it
    folds words and then splits the columns into several tables. Numbers are never broken."""
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
    for index, part in enumerate(parts):
        part_cells = {column: cells[column] for column in part}
        table = rich.table.Table(title=title or None if index == 0 else None, title_justify="left", header_style="bold")
        for column, width in (column_widths(part_cells, numeric, console.width) or dict.fromkeys(part)).items():
            table.add_column(column, justify="right" if numeric[column] else "left", overflow="fold", width=width)
        for line in zip(*part_cells.values(), strict=True):
            table.add_row(*line)
        console.print(table)


def _is_number(value: Any) -> bool:
    """Whether a cell holds only numbers, perhaps with units; such a cell is never broken."""
    return not isinstance(value, str) or not re.search(r"[^\W\d_]{4}", value)


def column_widths(cells: Mapping[str, Sequence[str]], numeric: Mapping[str, bool], room: int) -> dict[str, int | None]:
    """The column widths of a table that is `room` characters wide; empty if there is not enough room. Numeric columns get the
    width they need; the other columns share the rest."""
    needed = {name: max(len(text) for text in [*name.split(), *column]) for name, column in cells.items()}
    widths = {name: width if numeric[name] else min(width, LEAST_WORDS_WIDTH) for name, width in needed.items()}
    unused = room - FRAME - sum(width + PADDING for width in widths.values())
    if unused < 0:
        return {}
    for limits in (needed, {name: max(width, len(name)) for name, width in needed.items()}):  # cells first, then headings
        while unused > 0 and (narrow := [name for name, width in limits.items() if widths[name] < width]):
            widths[min(narrow, key=lambda name: widths[name])] += 1
            unused -= 1
    return dict(widths)


def _split(cells: Mapping[str, Sequence[str]], numeric: Mapping[str, bool], room: int) -> list[list[str]]:
    """Splits the columns into several tables that fit; each begins with the first column, the row's name."""
    first, *others = cells
    parts: list[list[str]] = [[first]]
    for column in others:
        longer = [*parts[-1], column]
        if len(parts[-1]) > 1 and not column_widths({name: cells[name] for name in longer}, numeric, room):
            parts.append([first])
        parts[-1].append(column)
    return parts


def print_line(row: Mapping[str, Any], heading: bool = False) -> None:
    """Prints one row of a growing table at once, after the column names if `heading`; cells are tab-separated in a pipe."""
    names, cells = list(row), [cell(value) for value in row.values()]
    widths = [max(len(name), len(text), _GROWING_COLUMN) for name, text in zip(names, cells, strict=True)]
    for line in (names, cells) if heading else (cells,):
        if sys.stdout.isatty():
            line = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
        print(("  " if sys.stdout.isatty() else "\t").join(line), flush=True)


def print_rows(rows: Sequence[Mapping[str, Any]], as_json: bool, title: str = "") -> None:
    """Prints rows as one JSON document, or as a table."""
    if as_json:
        print_json(rows)
    else:
        print_table(rows, title)


def print_files(rows: Sequence[Mapping[str, Any]], folder: Path, as_json: bool) -> int:
    """Prints a row for each exported file (`written`, `kept` or `failed`), logs the counts, and returns 1 if a file failed."""
    if as_json:
        print_json(rows)
    else:
        print_table([{key: row[key] for key in FILE_COLUMNS} | {"file": Path(row["file"]).name} for row in rows], "models")
    failed = [Path(row["file"]).stem for row in rows if row["status"] == "failed"]
    totals = {status: sum(row["status"] == status for row in rows) for status in ("written", "kept", "failed")}
    logger.get_logger("exporter").info(
        "%s in %s%s", ", ".join(f"{count} {status}" for status, count in totals.items() if count), folder,
        f"; failed: {', '.join(failed)}" if failed else "")
    return 1 if failed else 0
