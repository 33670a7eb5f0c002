"""How often `hase gate` is right: commits that change a network, measured and judged.

Makes networks before and after a commit (another activation, one more block, other widths, another way to resize, a norm that
isn't fused, a cast or transpose more, another operator set, refactorings that ONNX Runtime optimises away); no dataset has one
of them. Measures both states in turn, A B A B, on this machine, and adds the ratios of all rounds and both kernel records to
OUT/commits.jsonl; what is in there is kept, so a stopped run goes on. With --target, it predicts both states from the records,
with every kernel predicted and with measured ones looked up, and prints for each limit how many regressions are found, left as
"maybe" and missed, the false alarms, and how many true changes are in the 90 % interval. --judge-only does that on any machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import quantiles
from typing import Any, NamedTuple

from pydantic import BaseModel

from hase.benchmark.ort.runner import Runner, open_runner
from hase.inference.compare.regressions import percent
from hase.inference.compare.snapshots import costs_of
from hase.inference.library.predictor import Predictor
from hase.learned.composition.differences import ratio_interval
from hase.ort_analysis.graph.analysis import analyze
from hase.recipes.gate.verdicts import JudgedChange, verdict_rows
from hase.records.kernel_record import ModelRecord
from hase.utils import cli, files
from hase.utils.fingerprint import resolve_device
from hase.utils.lazy import torch, torchvision
from hase.utils.locks import measuring
from hase.utils.logger import get_logger, progress
from hase.utils.processes import map_in_processes
from hase.utils.timing import timed, turns

log = get_logger("commits")
OPSET = 18  # unless a commit says otherwise
ROUNDS, SLOT_S = 15, 0.05  # in each round, both run for so long; the fastest run of each counts
EXAMPLES = """
python recipes/gate/judge_commits.py --out out/commits --jobs 8  # needs the machine for itself
python recipes/gate/judge_commits.py --out out/commits --judge-only --target nvidia-h200  # needs what the first wrote
"""


class MeasuredCommit(BaseModel):
    """A commit at one batch: the ratio after / before in each round, both latencies (ms), and both records. A latency is the
    lower quartile of the rounds: other work on the host slows runs, and never speeds one up."""

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
        return self.after_ms / self.before_ms - 1.0


def applied(function: Callable[[Any], Any]) -> torch.nn.Module:
    """A function as a layer."""
    class Applied(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return function(x)

    return Applied()


def replaced(module: torch.nn.Module, before: str, after: Callable[[], torch.nn.Module] | None) -> torch.nn.Module:
    """The module with every layer of a class replaced; None: as it is."""
    for name, layer in module.named_children() if after else ():
        if type(layer).__name__ == before and after:
            setattr(module, name, after())
        else:
            replaced(layer, before, after)
    return module


def image_net(act: str = "", width: int = 40, layers: Sequence[int] = (2, 2, 2, 1), groups: int = 1, norm: str = "batch",
              between: str = "") -> torch.nn.Module:
    """A residual network; `between` (of BETWEEN) happens after each of the first three stages."""
    nn, resnet = torch.nn, torchvision.models.resnet
    norms = {"batch": None, "group": partial(nn.GroupNorm, 4), "instance": partial(nn.InstanceNorm2d, affine=True)}
    model = resnet.ResNet(resnet.Bottleneck, list(layers), num_classes=100, groups=groups, width_per_group=width,
                          norm_layer=norms[norm])
    for stage in ("layer1", "layer2", "layer3") if between else ():
        setattr(model, stage, nn.Sequential(getattr(model, stage), applied(BETWEEN[between])))
    return replaced(model, "ReLU", getattr(nn, act) if act else None)


def upscaler(mode: str = "nearest", width: int = 40, skip: str = "add") -> torch.nn.Module:
    """Halves an image twice and enlarges it again, with skips."""
    nn = torch.nn

    class Upscaler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList(nn.Conv2d(inside, width, 3, stride, 1)
                                      for inside, stride in ((3, 1), (width, 2), (width, 2)))
            self.up = nn.ModuleList(nn.Conv2d(2 * width if skip == "concat" else width, width, 3, 1, 1) for _ in range(2))
            self.enlarge = nn.ModuleList(nn.ConvTranspose2d(width, width, 2, 2) if mode == "transposed" else
                                         nn.Upsample(scale_factor=2.0, mode=mode) for _ in range(2))

        def forward(self, image: Any) -> Any:
            kept, x = [], image
            for down in self.down:
                x = torch.relu(down(x))
                kept.append(x)
            for up, enlarge, other in zip(self.up, self.enlarge, kept[1::-1], strict=True):
                x = enlarge(x)
                x = torch.relu(up(torch.cat([x, other], 1) if skip == "concat" else x + other))
            return x

    return Upscaler()


def patch_encoder(act: str = "", width: int = 200, heads: int = 5, layers: int = 3, mlp: int = 800,
                  side: int = 224) -> torch.nn.Module:
    """A vision transformer."""
    nn = torch.nn
    model = torchvision.models.VisionTransformer(side, 16, layers, heads, width, mlp, num_classes=100)
    return replaced(model, "GELU", partial(nn.GELU, "tanh") if act == "tanh" else getattr(nn, act) if act else None)


NETWORKS: dict[str, Callable[..., torch.nn.Module]] = {"image": image_net, "upscaler": upscaler, "patches": patch_encoder}
BETWEEN: dict[str, Callable[[Any], Any]] = {
    "cast": lambda x: x.half().float(), "transpose": lambda x: x.transpose(2, 3), "softmax": lambda x: x.softmax(1),
    "clip": lambda x: x.clamp(-3.0, 3.0), "excitation": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "no-op transposes": lambda x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2), "no-op arithmetic": lambda x: x * 1.0 + 0.0,
    "no-op reshape": lambda x: x.flatten(2).reshape(x.shape), "no-op split": lambda x: torch.cat(x.chunk(1, 1), 1)}
Options = Mapping[str, Any]


class Commit(NamedTuple):
    """A change of a network: its options before and after; `opset` is the operator set of the file."""

    network: str
    before: Options
    after: Options


def _commits() -> Iterator[tuple[str, Commit]]:
    for between in BETWEEN:
        yield f"{between} between stages", Commit("image", {}, {"between": between})
    for act in ("SiLU", "GELU", "Hardswish", "LeakyReLU", "Mish"):
        yield f"ReLU to {act}", Commit("image", {}, {"act": act})
    for before, after in ((40, 48), (40, 44), (56, 48)):
        yield f"width {before} to {after}", Commit("image", {"width": before}, {"width": after})
    yield "a block more", Commit("image", {}, {"layers": (2, 2, 3, 1)})
    yield "a block less", Commit("image", {"layers": (2, 3, 2, 1)}, {})
    yield "groups 4 to 8", Commit("image", {"groups": 4}, {"groups": 8})
    yield "batch to group norm", Commit("image", {}, {"norm": "group"})
    yield "instance to batch norm", Commit("image", {"norm": "instance"}, {})
    yield "opset 17 to 20, image", Commit("image", {"act": "GELU", "opset": 17}, {"act": "GELU", "opset": 20})
    for mode, other in (("nearest", "bilinear"), ("bilinear", "bicubic"), ("nearest", "transposed")):
        yield f"{mode} to {other}", Commit("upscaler", {"mode": mode}, {"mode": other})
    yield "add to concat", Commit("upscaler", {}, {"skip": "concat"})
    yield "upscaler 40 to 44", Commit("upscaler", {}, {"width": 44})
    for name, options in (
            ("GELU to tanh", {"act": "tanh"}), ("GELU to ReLU", {"act": "ReLU"}), ("GELU to SiLU", {"act": "SiLU"}),
            ("a layer more", {"layers": 4}), ("mlp 800 to 640", {"mlp": 640}), ("heads 5 to 10", {"heads": 10}),
            ("width 200 to 240", {"width": 240})):
        yield name, Commit("patches", {}, options)
    yield "opset 17 to 20, patches", Commit("patches", {"opset": 17}, {"opset": 20})


COMMITS = dict(_commits())


def model_paths(folder: Path, commit: Commit) -> tuple[Path, Path]:
    """The files of both states of a commit; commits share those of equal states."""
    before, after = (
        re.sub(r"[^\w-]+", "-", "_".join([commit.network, *(f"{name}-{options[name]}" for name in sorted(options))]))
        for options in (commit.before, commit.after))
    return folder / f"{before}.onnx", folder / f"{after}.onnx"


def write_model(side: int, state: tuple[Path, str, dict[str, Any]]) -> str:
    """Writes a state of a network (path, network, options), unless it is there; returns the error, or ""."""
    from hase.recipes.kinds.exporting import export  # noqa: PLC0415 - it loads torch

    path, network, options = state
    if path.is_file():
        return ""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    opset = options.pop("opset", OPSET)
    options |= {"side": side} if network == "patches" else {}
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
    before_ms, after_ms = (quantiles(times, n=4)[0] for times in zip(*rounds, strict=True))
    return MeasuredCommit(commit=name, batch=batch, ratios=[round(b / a, 5) for a, b in rounds], before_ms=before_ms,
                          after_ms=after_ms, before=records[0], after=records[1])


def _slot_ms(runner: Runner) -> float:
    """The fastest run in a slot, ms."""
    run_s = timed(runner.run_once)
    return 1e3 * min(run_s() for _ in turns(3, SLOT_S))


def measure_all(out: Path, models: Path, names: Sequence[str], args: argparse.Namespace) -> None:
    """Measures what is not in the file `out` yet, for at most `args.minutes`."""
    ends, device = time.monotonic() + 60 * args.minutes, resolve_device(args.device)
    done = {(commit.commit, commit.batch) for commit in read_commits(out)}
    missing = [(name, batch) for batch in args.batches for name in names if (name, batch) not in done]
    models.mkdir(parents=True, exist_ok=True)
    states = {path: (path, COMMITS[name].network, dict(options)) for name, _ in missing
              for path, options in zip(model_paths(models, COMMITS[name]), COMMITS[name][1:], strict=True)}
    failed = map_in_processes(partial(write_model, args.side), list(states.values()), args.jobs,
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


def judge(commits: Sequence[MeasuredCommit], predictor: Predictor) -> list[JudgedChange]:
    """Predicts both states of each commit."""
    runs = predictor.runs([record for commit in commits for record in (commit.before, commit.after)])
    changes = []
    for commit, before, after in zip(commits, runs[::2], runs[1::2], strict=True):
        low, high = ratio_interval(costs_of(before), costs_of(after))
        changes.append(JudgedChange(commit.change, after.alone_ms / before.alone_ms - 1.0, low - 1.0, high - 1.0))
    return changes


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--out", type=Path, required=True, metavar="OUT", help="folder of the results")
    parser.add_argument("--models", type=Path, metavar="DIR", help="folder of the networks' files (default: OUT/models)")
    parser.add_argument("--judge-only", action="store_true", help="judge what OUT holds, without measuring")
    parser.add_argument("--only", nargs="+", choices=COMMITS, metavar="COMMIT", help="these commits (default: all)")
    parser.add_argument("--batches", type=cli.counts, default=[1, 32], metavar="N,…", help="batch sizes (default: 1,32)")
    parser.add_argument("--side", type=cli.count, default=224, metavar="PIXELS", help="side of the images (default: 224)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to measure (default: auto)")
    parser.add_argument("--jobs", type=cli.count, default=2, metavar="N", help="processes that export (default: 2)")
    parser.add_argument("--minutes", type=cli.positive, default=7.0, metavar="M", help="begin nothing after that (default: 7)")
    cli.add_target(parser)
    args = parser.parse_args()
    workspace, results = cli.start(args), args.out / "commits.jsonl"
    if not args.judge_only:
        measure_all(results, args.models or args.out / "models", args.only or list(COMMITS), args)
    if not args.target:
        return 0
    commits, answer = read_commits(results), dict[str, Any]()
    for strict, title in ((True, "every kernel predicted"), (False, "measured kernels looked up")):
        changes = judge(commits, Predictor(workspace, args.target, strict=strict))
        answer[title] = {
            "commits": [{"commit": commit.commit, "batch": commit.batch, "before (ms)": commit.before_ms, **{
                name: percent(size) for name, size in change._asdict().items()}, "inside": change.inside}
                for commit, change in zip(commits, changes, strict=True)],
            "inside": sum(change.inside for change in changes) / len(changes), "verdicts": verdict_rows(changes)}
        if not args.json:
            cli.print_table(answer[title]["commits"], title)
            cli.print_table(answer[title]["verdicts"], f"{title}; {percent(answer[title]['inside'], sign=False)} inside")
    if args.json:
        cli.print_json(answer)
    return 0


if __name__ == "__main__":
    cli.run(main)
