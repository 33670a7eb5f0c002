"""Options that commands share: their types, and how they are parsed."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn

from hase.utils import logger
from hase.utils.errors import UserError
from hase.utils.fingerprint import FROM_SHEET
from hase.utils.locks import wait_for_locks
from hase.utils.paths import ROOT, Workspace

LAST_PORT = 65535
EXIT_USAGE = 2
PLOTS = (".png", ".svg", ".pdf")  # how the names of plots end


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
        raise argparse.ArgumentTypeError(f"{text} needs matplotlib, which requirements-predict.txt leaves out; "
                                         f"{path.with_suffix('.svg')} needs nothing")
    return path


def html_file(text: str) -> Path:
    """An option that names a page to write."""
    path = out_file(text)
    if path.suffix not in (".html", ".htm"):
        raise argparse.ArgumentTypeError(f"{text}: a page is an .html file")
    return path


def address(text: str) -> tuple[str, int]:
    """An option that says where to listen: `[ADDRESS:]PORT`."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text}: write PORT or ADDRESS:PORT")
    return host, int(port)


def add_web_config(made: argparse.ArgumentParser) -> None:
    """`--web-config`: TLS and users of a server that Prometheus scrapes."""
    made.add_argument("--web-config", type=Path, metavar="FILE",
                      help="YAML with TLS and users, as Prometheus's own exporters take it; docs/operating.md says how "
                           "(default: plain HTTP for everyone who reaches the address)")


def add_model(made: argparse.ArgumentParser | argparse._MutuallyExclusiveGroup, required: bool = True) -> None:
    """`--model`: the model to predict."""
    made.add_argument("--model", type=Path, required=required,
                      help="an ONNX file, or a kernel record's JSON; a bare name is also looked for in model_zoo")


def add_models(made: argparse.ArgumentParser | argparse._MutuallyExclusiveGroup, required: bool = True) -> None:
    """`--model`: the models to predict."""
    made.add_argument("--model", type=Path, nargs="+", action="extend", required=required, metavar="MODEL",
                      help="ONNX files, kernel records' JSON, folders of models, or patterns such as 'zoo/*.onnx'; a bare name "
                           "is also looked for in model_zoo (repeatable)")


def sheet_name(name: str) -> str:
    """The target that stands for a card by its data sheet."""
    if not name.strip():
        raise argparse.ArgumentTypeError("the name of a card is expected, e.g. l40s")
    return f"{name.strip()}{FROM_SHEET}"


def add_target(made: argparse.ArgumentParser) -> None:
    """`--target` and `--gpu`: the device and software to predict for."""
    either = made.add_mutually_exclusive_group()
    either.add_argument("--gpu", dest="target", type=sheet_name, metavar="CARD", help="a GPU that was never measured, from its "
                        "data sheet, e.g. l40s or rtx-4090 (records/gpus.yaml), or a file with one's own; such answers are "
                        "marked")
    either.add_argument("--target", help="whose latency, by name or a part of it, e.g. h200, whose predictors come with Hase "
                        "(default: this machine, or the only target with predictors)")


def add_run_mode(parser: argparse.ArgumentParser) -> None:
    """`--io` and `--cuda-graph`: how a model is run."""
    parser.add_argument("--io", choices=("device", "host"), default="device",
                        help="device: tensors stay on the device; host: numpy in and out (default: device)")
    parser.add_argument("--cuda-graph", action="store_true", help="captured once as a CUDA graph, and replayed")


def add_host_pace(parser: argparse.ArgumentParser, default: str) -> None:
    """`--host-pace` and `--machine`: how fast a GPU's host launches work; `default` says where it comes from otherwise."""
    made = parser.add_mutually_exclusive_group()
    made.add_argument("--host-pace", type=pace, metavar="RATIO|measure",
                      help="how many times as long as usual the GPU's host takes to dispatch; measure: measure it now on this "
                           f"machine, which must be the target (default: {default})")
    made.add_argument("--machine", type=Path, metavar="FILE",
                      help="the machine's host pace, as benchmark/host_pace.py --out wrote it there")


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """`--inputs`: a file with a model's inputs."""
    parser.add_argument("--inputs", type=Path, metavar="FILE",
                        help="inputs of the model by name, as numpy.savez writes them (default: standardised random numbers, "
                             "and zeros for whole numbers); some operators' time depends on them")


def add_config(parser: argparse.ArgumentParser, default: Path, example: str, what: str = "settings") -> None:
    """`--config` and `--set` (as `changes`), for `hase.utils.config.read_config`.

    Args:
        default: the config that is read by default, a file of the repository.
        example: of a value of --set, for the help: `levels=[0.0]`.
        what: what the config says, for the help.
    """
    parser.add_argument("--config", type=Path, default=default, metavar="FILE",
                        help=f"{what} (default: {default.relative_to(ROOT)})")
    parser.add_argument("--set", action="append", dest="changes", default=[], metavar="KEY=VALUE",
                        help=f"a value in place of the config's, for example --set '{example}' (repeatable; see docs/files.md)")


def add_load(parser: argparse.ArgumentParser, config: Path) -> None:
    """`--config` (by default `config`), `--set` and `--metrics`: where the load (what else runs on the device) comes from."""
    add_config(parser, config, "prometheus.url=http://localhost:9090", "names a Prometheus that knows what else runs")
    parser.add_argument("--metrics", type=Path, metavar="FILE",
                        help="JSON of what else runs on the device, by DCGM field name (default: as the config says, idle)")


def add_html(made: argparse.ArgumentParser) -> None:
    """`--html`: the answer as a page."""
    made.add_argument("--html", type=html_file, metavar="FILE",
                      help="write the answer as a page to look at: one file, for any browser, without a network "
                           "(docs/reports.md)")


def add_trust(made: argparse.ArgumentParser) -> None:
    """`--strict` and `--force`: which measurements a prediction may use."""
    made.add_argument("--strict", action="store_true", help="predict every kernel, even those that were measured")
    made.add_argument("--force", action="store_true",
                      help="predict although element type or ONNX Runtime version are not the predictors'")


def add_estimators(made: argparse.ArgumentParser) -> None:
    """`--estimators`: the user's own estimators, which are run."""
    made.add_argument("--estimators", type=existing, action="append", default=[], metavar="PATH",
                      help="a file with estimators of your own, or a folder of them; they are run (repeatable)")


def add_dim(made: argparse.ArgumentParser) -> None:
    """`--dim NAME=SIZE[,SIZE…]` (repeatable): the sizes of a model's dynamic dimensions; and `--branch`, which is kept as such
    a size."""
    made.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE",
                      help="size of a dynamic dimension, e.g. --dim batch=16 (repeat for others); trips=20: how often Loops "
                           "run whose number of trips the model leaves open, NODE.trips=20: how often one does")
    made.add_argument("--branch", action="append", dest="dim", type=branch_as_size, metavar="[NODE=]then|else",
                      help="which branch an If takes (default: the more expensive one); NODE may be left out where there is "
                           "but one If")


def add_sizes(made: argparse.ArgumentParser) -> None:
    """`--sizes NAME=SIZE,NAME=SIZE …`: sizes of dynamic dimensions that go together, beside the product of all of `--dim`."""
    made.add_argument("--sizes", type=sizes_together, nargs="+", action="extend", default=[], metavar="NAME=SIZE,…",
                      help="sizes that go together, a row for each: --sizes seq=1,past=128 seq=1,past=1024 (sizes of --dim are "
                           "combined with each other, and with each of these)")


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
    """`--rebatch N[,N…]`: another batch than the fixed one that a model was exported at; kept as the size `rebatch`."""
    parser.add_argument("--rebatch", action="append", dest="dim", type=rebatch_as_size, metavar="N[,N…]",
                        help="another batch than the fixed one that a model was exported at; refused where its graph allows no "
                             "other")


def rebatch_as_size(text: str) -> str:
    """`1,16` as the sizes `rebatch=1,16`."""
    return f"rebatch={','.join(map(str, counts(text)))}"


def branch_as_size(text: str) -> str:
    """An option type: `NODE=else` becomes the size `NODE.else=1`, and `else` becomes `else=1`."""
    node, _, branch = text.rpartition("=")
    if branch not in ("then", "else"):
        raise argparse.ArgumentTypeError(f"{text!r}: write NODE=then or NODE=else, or then or else where there is one If")
    return f"{node}.{branch}=1" if node else f"{branch}=1"


def add_static(made: argparse.ArgumentParser) -> None:
    """`--static`: dynamic dimensions are fixed before ONNX Runtime optimises the model."""
    made.add_argument("--static", action="store_true",
                      help="take the model as exported at the sizes given (default: as a session that takes any sizes runs it, "
                           "shape computations and all)")


def add_no_weights(made: argparse.ArgumentParser) -> None:
    """`--no-weights`: files of a model's weights may be missing."""
    made.add_argument("--no-weights", action="store_true",
                      help="go on where a file of the model's weights is missing: kernels and sizes are those of the graph "
                           "(default: an error)")


def parse_dims(texts: Sequence[str]) -> dict[str, list[int]]:
    """`["batch=1,2", "height=224"]` as `{"batch": [1, 2], "height": [224]}`.

    Raises:
        UserError: a text is not NAME=SIZE, a size is not a whole number or is below 0, or a name is given twice.
    """
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
    """Every combination of the sizes: `{"batch": [1, 2], "width": [224]}` gives two; no dimension gives one, which is empty."""
    return [dict(zip(dims, sizes, strict=True)) for sizes in itertools.product(*dims.values())]


def all_sizes(dims: Mapping[str, Sequence[int]], together: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Every combination of the sizes `dims`, with each of the sizes that go together, if there are any.

    Raises:
        UserError: a size is in both.
    """
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
    """Stores the value of an option that takes one; the option given twice is an error, not the last one's value."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        if isinstance(parser, Parser) and option_string:
            if self.dest in parser.given:
                parser.error(f"{option_string} is given twice; this command takes one")
            parser.given.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line and suggest a known option for an unknown one.

    Options can't be abbreviated: a typo could be taken for another option, and a new option could break old commands. An option
    that takes one value can be given only once.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self.given: set[str] = set()  # the options of one value in the command line that is being parsed
        for name in (None, "store"):
            self.register("action", name, StoreOnce)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.given.clear()
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
    """An argument parser with the shared options. Its help begins with the script's docstring and ends with `examples`.

    Args:
        doc: the script's `__doc__`.
        examples: shell commands, one per line.
    """
    made = Parser(
        description=doc, epilog="examples:\n" + examples.strip("\n"), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = made.add_argument_group("shared options")
    shared.add_argument("--workspace", type=Path, default=ROOT, metavar="DIR",
                        help="folder that holds what the phases write (default: the repository)")
    shared.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    shared.add_argument("--wait", action="store_true",
                        help="wait while another process writes to the same folder or measures on the same device (default: "
                             "end with an error)")
    shared.add_argument("--verbose", action="store_true", help="debug lines on stderr too")
    shared.add_argument("--quiet", action="store_true", help="only errors on stderr")
    return made


def existing_folder(option: str, folder: Path, remedy: str = "") -> Path:
    """The folder that an option names.

    Args:
        option: its name, for the message.
        folder: its value.
        remedy: what to do where there is none.

    Raises:
        UserError: it is a file, or does not exist.
    """
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{option} {folder}: a file, not a folder")
    raise UserError(f"{option} {folder}: no such folder{remedy and '; '}{remedy}")


def start(args: argparse.Namespace, begins: bool = False) -> Workspace:
    """Configures logging by the shared options, and returns the workspace.

    Args:
        begins: the workspace need not exist: the script makes it.

    Raises:
        UserError: the workspace is a file, or does not exist.
    """
    folder = Path(args.workspace)
    if folder.exists() or not begins:
        existing_folder("--workspace", folder, f"check its name, or make it first: mkdir -p {folder}")
    workspace = Workspace(folder.resolve())
    logger.configure(workspace.log_file, verbose=args.verbose, quiet=args.quiet)
    if args.wait:
        wait_for_locks()
    return workspace
