"""How often `hase gate` is right: commits that change a network, measured and judged.

Makes networks before and after a commit (another activation, one more block, other widths, another way to resize, a norm that
isn't fused, a cast or transpose more, another operator set, refactorings that ONNX Runtime optimises away); none of them is in
a dataset. Measures both states in turn, A B A B, on this machine, and adds the ratios of all rounds and both kernel records to
OUT/commits.jsonl; what is in there is kept, so a stopped run goes on. With --target, it predicts both states from their records,
with every kernel predicted and with measured ones looked up, and prints for each limit how many regressions are found, left as
"maybe" and missed, the false alarms, and how many true changes are in the 90 % interval. --judge-only does that on any machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from pydantic import BaseModel

from hase.benchmark.ort.runner import Runner, open_runner
from hase.inference.compare.regressions import percent, verdict_of
from hase.inference.compare.snapshots import costs_of
from hase.inference.library.predictor import Predictor
from hase.learned.composition.differences import ratio_interval
from hase.ort_analysis.graph.analysis import analyze
from hase.recipes.kinds.exporting import export
from hase.records.kernel_record import ModelRecord
from hase.utils import cli, files
from hase.utils.fingerprint import resolve_device
from hase.utils.lazy import torch
from hase.utils.locks import measuring
from hase.utils.logger import get_logger, progress
from hase.utils.processes import each_in_a_process
from hase.utils.timing import timed, turns

log = get_logger("commits")
OPSET = 18  # unless a commit says otherwise
LIMITS = (0.03, 0.05, 0.10)
ROUNDS, SLOT_S = 9, 0.06  # of a pair: in each round, both run for so long; the median of the rounds' ratios counts
EXAMPLES = """
python recipes/gate/judge_commits.py --out out/commits --jobs 8  # needs the machine for itself
python recipes/gate/judge_commits.py --out out/commits --judge-only --target nvidia-h200  # needs what the first wrote
"""


class MeasuredCommit(BaseModel):
    """A commit at one batch: the ratio after / before in each round, both median latencies (ms), and both records."""

    commit: str
    batch: int
    ratios: list[float]
    before_ms: float
    after_ms: float
    before: ModelRecord
    after: ModelRecord

    @property
    def change(self) -> float:
        """What was measured: after / before - 1."""
        return median(self.ratios) - 1.0


def image_net(act: str = "ReLU", width: int = 56, depth: int = 2, kernel: int = 3, norm: str = "batch", excite: bool = False,
              depthwise: bool = False, late_norm: bool = False, between: str = "nothing") -> torch.nn.Module:
    """A residual network of three stages; `between` (of BETWEEN) happens after each."""
    nn = torch.nn
    norms = {"batch": nn.BatchNorm2d, "group": partial(nn.GroupNorm, 8), "instance": partial(nn.InstanceNorm2d, affine=True)}

    class Block(nn.Module):
        def __init__(self, inside: int, out: int, stride: int) -> None:
            super().__init__()
            groups = out if depthwise else 1
            self.first = nn.Conv2d(inside, out, 1 if depthwise else 3, 1, 0 if depthwise else 1)
            self.second = nn.Conv2d(out, out, kernel, stride, kernel // 2, groups=groups)
            self.skip = nn.Conv2d(inside, out, 1, stride)
            self.norms = nn.ModuleList(norms[norm](out) for _ in range(2))
            self.act = getattr(nn, act)()
            self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(out, out // 4, 1), nn.ReLU(),
                                      nn.Conv2d(out // 4, out, 1), nn.Sigmoid()) if excite else None

        def forward(self, x: Any) -> Any:
            y = self.first(x)
            y = self.second(self.norms[0](self.act(y)) if late_norm else self.act(self.norms[0](y)))
            y = self.norms[1](y)
            return self.act((y * self.gate(y) if self.gate else y) + self.skip(x))

    class ImageNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, width, 5, 2, 2)
            sizes = [width, width, 2 * width, 3 * width]
            self.stages = nn.ModuleList(nn.Sequential(*(
                Block(sizes[stage + (place > 0)], sizes[stage + 1], 1 if place else 2) for place in range(depth)))
                for stage in range(3))
            self.head = nn.Linear(sizes[-1], 100)

        def forward(self, image: Any) -> Any:
            x = self.stem(image)
            for stage in self.stages:
                x = BETWEEN[between](stage(x))
            return self.head(x.mean((2, 3)))

    return ImageNet()


def upscaler(mode: str = "nearest", width: int = 40, skip: str = "add") -> torch.nn.Module:
    """Halves an image twice and enlarges it again, with skips."""
    nn = torch.nn

    class Upscaler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList(nn.Conv2d(inside, width, 3, stride, 1)
                                      for inside, stride in ((3, 1), (width, 2), (width, 2)))
            self.up = nn.ModuleList(nn.Conv2d(2 * width if skip == "concat" else width, width, 3, 1, 1) for _ in range(2))
            self.transposed = nn.ModuleList(nn.ConvTranspose2d(width, width, 2, 2) for _ in range(2))

        def forward(self, image: Any) -> Any:
            kept, x = [], image
            for down in self.down:
                x = torch.relu(down(x))
                kept.append(x)
            for up, transposed, other in zip(self.up, self.transposed, kept[1::-1], strict=True):
                x = transposed(x) if mode == "transposed" else nn.functional.interpolate(x, scale_factor=2.0, mode=mode)
                x = torch.relu(up(torch.cat([x, other], 1) if skip == "concat" else x + other))
            return x

    return Upscaler()


def patch_encoder(act: str = "gelu", dim: int = 200, heads: int = 5, layers: int = 3, mlp: int = 4, norm_first: bool = True,
                  joined: bool = False, patch: int = 16) -> torch.nn.Module:
    """A transformer over the patches of an image. `joined`: one product for queries, keys and values."""
    nn, functional = torch.nn, torch.nn.functional
    acts = {"gelu": functional.gelu, "tanh": partial(functional.gelu, approximate="tanh"), "relu": torch.relu,
            "silu": functional.silu}

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.ModuleList(nn.Linear(dim, out) for out in ([3 * dim] if joined else [dim] * 3))
            self.out, self.wide, self.narrow = nn.Linear(dim, dim), nn.Linear(dim, mlp * dim), nn.Linear(mlp * dim, dim)
            self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))

        def attend(self, x: Any) -> Any:
            parts = self.inside[0](x).chunk(3, -1) if joined else [linear(x) for linear in self.inside]
            q, k, v = (part.reshape(x.shape[0], x.shape[1], heads, dim // heads).transpose(1, 2) for part in parts)
            weights = torch.softmax(q @ k.transpose(2, 3) * (dim // heads) ** -0.5, -1)
            return self.out((weights @ v).transpose(1, 2).reshape(x.shape[0], x.shape[1], dim))

        def forward(self, x: Any) -> Any:
            if norm_first:
                x = x + self.attend(self.norms[0](x))
                return x + self.narrow(acts[act](self.wide(self.norms[1](x))))
            x = self.norms[0](x + self.attend(x))
            return self.norms[1](x + self.narrow(acts[act](self.wide(x))))

    class PatchEncoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, dim, patch, patch)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))

        def forward(self, image: Any) -> Any:
            x = self.patches(image).flatten(2).transpose(1, 2)
            for layer in self.layers:
                x = layer(x)
            return x.mean(1)

    return PatchEncoder()


NETWORKS: dict[str, Callable[..., torch.nn.Module]] = {"image": image_net, "upscaler": upscaler, "patches": patch_encoder}
BETWEEN: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda x: x, "cast": lambda x: x.half().float(), "transpose": lambda x: x.transpose(2, 3),
    "softmax": lambda x: x.softmax(1), "clip": lambda x: x.clamp(-3.0, 3.0),
    "no-op transposes": lambda x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2), "no-op arithmetic": lambda x: x * 1.0 + 0.0,
    "no-op reshape": lambda x: x.flatten(2).reshape(x.shape), "no-op split": lambda x: torch.cat(x.chunk(1, 1), 1)}
Options = Mapping[str, Any]


class Commit(NamedTuple):
    """A change of a network: its options before and after; `opset` is the operator set of the file."""

    network: str
    before: Options
    after: Options


def _commits() -> Iterator[tuple[str, Commit]]:
    for name in list(BETWEEN)[1:]:
        yield f"{name} between stages", Commit("image", {}, {"between": name})
    for act in ("SiLU", "GELU", "Hardswish", "LeakyReLU", "Mish"):
        yield f"ReLU to {act}", Commit("image", {}, {"act": act})
    thin = {"depthwise": True, "width": 80}
    yield "one block more", Commit("image", {}, {"depth": 3})
    yield "one block less", Commit("image", {"depth": 3}, {})
    yield "width 56 to 64", Commit("image", {}, {"width": 64})
    yield "width 56 to 60", Commit("image", {}, {"width": 60})
    yield "width 72 to 64", Commit("image", {"width": 72}, {"width": 64})
    yield "batch to group norm", Commit("image", {}, {"norm": "group"})
    yield "instance to batch norm", Commit("image", {"norm": "instance"}, {})
    yield "norm after activation", Commit("image", {}, {"late_norm": True})
    yield "excitation", Commit("image", {"depth": 1}, {"depth": 1, "excite": True})
    yield "depthwise 3 to 5", Commit("image", thin, {**thin, "kernel": 5})
    yield "kernel 5 to 3", Commit("image", {"kernel": 5}, {})
    yield "opset 17 to 20, image", Commit("image", {"act": "GELU", "opset": 17}, {"act": "GELU", "opset": 20})
    yield "nearest to bilinear", Commit("upscaler", {}, {"mode": "bilinear"})
    yield "bilinear to bicubic", Commit("upscaler", {"mode": "bilinear"}, {"mode": "bicubic"})
    yield "nearest to transposed", Commit("upscaler", {}, {"mode": "transposed"})
    yield "add to concat", Commit("upscaler", {}, {"skip": "concat"})
    yield "width 40 to 44", Commit("upscaler", {}, {"width": 44})
    for name, after in (("gelu to tanh", {"act": "tanh"}), ("gelu to relu", {"act": "relu"}), ("gelu to silu", {"act": "silu"}),
                        ("one layer more", {"layers": 4}), ("mlp 4 to 3", {"mlp": 3}), ("heads 5 to 10", {"heads": 10}),
                        ("joined products", {"joined": True}), ("norm last", {"norm_first": False}),
                        ("dim 200 to 240", {"dim": 240})):
        yield name, Commit("patches", {}, after)
    yield "opset 17 to 20, patches", Commit("patches", {"opset": 17}, {"opset": 20})


COMMITS = dict(_commits())


def model_paths(folder: Path, commit: Commit) -> tuple[Path, Path]:
    """The files of both states of a commit; commits share those of equal states."""
    before, after = (folder / f"{'_'.join([commit.network, *(f'{name}-{options[name]}' for name in sorted(options))])}.onnx"
                     for options in (commit.before, commit.after))
    return before, after


def write_model(side: int, state: tuple[Path, str, dict[str, Any]]) -> str:
    """Writes a state of a network (path, network, options), unless it is there; returns the error, or ""."""
    path, network, options = state
    if path.is_file():
        return ""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    opset = options.pop("opset", OPSET)
    try:
        with files.replacing(path) as temporary:
            export(NETWORKS[network](**options), {"image": torch.randn(2, 3, side, side)}, temporary, opset,
                   dynamic={"image": {0: "batch"}})
    except (RuntimeError, torch.onnx.OnnxExporterError) as error:
        return f"{path.stem}: {error}".splitlines()[0]
    return ""


def measure(before: Path, after: Path, name: str, batch: int, device: str) -> MeasuredCommit:
    """Runs both states in turn, and analyses both."""
    records = [analyze(path, device, {"batch": batch}, static=True) for path in (before, after)]
    runners = [open_runner(path, device, dims={"batch": batch}, static=True) for path in (before, after)]
    for runner in runners:
        runner.warm_up(5, 0.2)
    rounds = [[_slot_ms(runner) for runner in runners[::direction]][::direction]
              for number in range(ROUNDS) for direction in ((-1) ** number,)]
    before_ms, after_ms = (median(times) for times in zip(*rounds, strict=True))
    return MeasuredCommit(commit=name, batch=batch, ratios=[round(b / a, 5) for a, b in rounds], before_ms=before_ms,
                          after_ms=after_ms, before=records[0], after=records[1])


def _slot_ms(runner: Runner) -> float:
    """The median of the runs in a slot, ms; at least three."""
    run_s = timed(runner.run_once)
    return 1e3 * median([run_s() for _ in turns(3, SLOT_S)])


def measure_all(out: Path, models: Path, names: Sequence[str], args: argparse.Namespace) -> None:
    """Measures what is not in the file `out` yet, for at most `args.minutes`."""
    ends, device = time.monotonic() + 60 * args.minutes, resolve_device(args.device)
    done = {(commit.commit, commit.batch) for commit in read_commits(out)}
    missing = [(name, batch) for batch in args.batches for name in names if (name, batch) not in done]
    models.mkdir(parents=True, exist_ok=True)
    states = {path: (path, COMMITS[name].network, dict(options)) for name, _ in missing
              for path, options in zip(model_paths(models, COMMITS[name]), COMMITS[name][1:], strict=True)}
    failed = each_in_a_process(partial(write_model, args.side), list(states.values()), args.jobs,
                               lambda state: f"{state[0].stem}: the exporting process died", "exporting")
    for error in filter(None, failed):
        log.error("%s", error)
    with measuring(device):
        for name, batch in progress(missing, "measuring"):
            both = model_paths(models, COMMITS[name])
            if all(path.is_file() for path in both) and time.monotonic() < ends:
                files.append_records(out, [measure(*both, name, batch, device)])


def read_commits(path: Path) -> list[MeasuredCommit]:
    """What was measured so far."""
    return files.read_records(path, MeasuredCommit, "remove it and measure again") if path.exists() else []


def judge(commits: Sequence[MeasuredCommit], predictor: Predictor) -> list[dict[str, Any]]:
    """A row for each commit: its change, measured and predicted, and the interval."""
    runs = predictor.runs([record for commit in commits for record in (commit.before, commit.after)])
    rows = []
    for commit, before, after in zip(commits, runs[::2], runs[1::2], strict=True):
        low, high = ratio_interval(costs_of(before), costs_of(after))
        rows.append({"commit": commit.commit, "batch": commit.batch, "before_ms": commit.before_ms, "measured": commit.change,
                     "predicted": after.alone_ms / before.alone_ms - 1.0, "low": low - 1.0, "high": high - 1.0,
                     "inside": low - 1.0 <= commit.change <= high - 1.0})
    return rows


def figures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each limit: regressions found, left as maybe and missed; and false alarms."""
    table = []
    for limit in LIMITS:
        verdicts = [(row["measured"] > limit, verdict_of(row["predicted"], (row["low"], row["high"]), limit)) for row in rows]
        slower, others = ([verdict for is_slower, verdict in verdicts if is_slower is wanted] for wanted in (True, False))
        table.append({"limit": percent(limit, sign=False), "slower": len(slower), "found": slower.count("surely slower"),
                      "maybe": slower.count("maybe slower"),
                      "missed": len(slower) - slower.count("surely slower") - slower.count("maybe slower"),
                      "not slower": len(others), "false alarms": others.count("surely slower"),
                      "inside 90 %": percent(sum(row["inside"] for row in rows) / len(rows), sign=False)})
    return table


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--out", type=Path, required=True, metavar="OUT", help="folder of the results")
    parser.add_argument("--models", type=Path, metavar="DIR", help="folder of the networks' files (default: OUT/models)")
    parser.add_argument("--judge-only", action="store_true", help="judge what OUT holds, without measuring")
    parser.add_argument("--only", nargs="+", choices=COMMITS, metavar="COMMIT", help="these commits (default: all)")
    parser.add_argument("--batches", type=cli.counts, default=[1, 8], metavar="N,…", help="batch sizes (default: 1,8)")
    parser.add_argument("--side", type=cli.count, default=160, metavar="PIXELS", help="side of the images (default: 160)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to measure (default: auto)")
    parser.add_argument("--jobs", type=cli.count, default=2, metavar="N", help="processes that export (default: 2)")
    parser.add_argument("--minutes", type=cli.positive, default=7.0, metavar="M", help="begin nothing after that (default: 7)")
    cli.add_target(parser)
    args = parser.parse_args()
    workspace, results = cli.start(args), args.out / "commits.jsonl"
    if not args.judge_only:
        measure_all(results, args.models or args.out / "models", args.only or list(COMMITS), args)
    for strict in (True, False) if args.target else ():
        rows = judge(read_commits(results), Predictor(workspace, args.target, strict=strict))
        title = "every kernel predicted" if strict else "measured kernels looked up"
        cli.print_rows(rows, args.json, title)
        cli.print_rows(figures(rows), args.json, title)
    return 0


if __name__ == "__main__":
    cli.run(main)
