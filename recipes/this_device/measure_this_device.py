"""Measures the GPU or CPU at hand for some minutes, and learns to predict your models on it.

Reads ONNX files (--model, or those in the workspace's model_zoo/models). First measures the models and their kernels, then
kernels of further shapes, the most useful ones first. Then trains, fits the composition, and prints the errors to expect and
the command that predicts. On a GPU, training starts from the predictors of another GPU that come with Hase, if that lowers the
error.

With --start-from data-sheet, a minute is enough: the most informative kernels of a GPU are measured, and those of your models
if there are any. They correct what is predicted from the card's data sheet (`--gpu`).

Writes the files of the phases, and in benchmark/this_device/spent.json the time that was used. After Ctrl-C, the next call
continues; --minutes is the time of all calls together. With more minutes than before, it measures more, and prefers kernels
near those that the last training predicted worst.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import hashlib
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hase.kernel_model.sampling.draws import read_seeds
from hase.learned import target_files
from hase.ort_analysis.isolated.analysis import weight_files
from hase.recipes.this_device.steps import TRAINING_SHARE, Budget, build_chosen, correct, expected_errors, run_json
from hase.records.dataset_files import header_path
from hase.records.dataset_tables import read_model_table
from hase.records.kernel_record_files import index_path, read_index
from hase.runtimes import local_target
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.fingerprint import resolve_device
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger
from hase.utils.paths import ROOT, SHIPPED, Workspace, model_files

log = get_logger("this device")
MOST_GFLOP = {"cpu": 2.0, "cuda": 100.0}  # of a sampled kernel
FREE_SHARE = {"cpu": 0.0, "cuda": 0.5}  # of samples that are near no model; none on a CPU, where layouts and fusions differ
DATA_SHEET = "data-sheet"
FEW_MODELS = 8  # with fewer, the composition is fitted by --few-models
EXAMPLES = """
python recipes/this_device/measure_this_device.py --minutes 20 --model resnet18.onnx --dim batch=1,8
python recipes/this_device/measure_this_device.py --minutes 20 --workspace out/mine
python recipes/this_device/measure_this_device.py --minutes 40 --device cpu
python recipes/this_device/measure_this_device.py --minutes 1 --start-from data-sheet  # needs a GPU
"""


def link_models(workspace: Workspace, models: Sequence[Path]) -> list[Path]:
    """Links or copies models into the workspace, and returns all models there. Raises UserError if files of one name differ."""
    for model in models:
        model = workspace.find_model(model)
        for path in (model, *weight_files(model)):
            linked = workspace.models / path.relative_to(model.parent)
            if linked.exists() and not (linked.samefile(path) or files.sha256(linked) == files.sha256(path)):
                raise UserError(f"{linked} exists and differs from {path}; rename one of them, or use another --workspace")
            if not linked.exists():
                linked.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path.resolve(), linked)
                except OSError:  # another file system
                    files.write_bytes(linked, path.read_bytes())
    paths = model_files([workspace.models])
    if not paths:
        raise UserError(f"{workspace.models}: no models; name your own with --model")
    return paths


def analyse(workspace: Workspace, device: str, args: argparse.Namespace, budget: Budget) -> int:
    """Analyses the models and builds their kernels, unless already done; returns the number of kernels."""
    about = [[path.name, *(files.signature(path) or ())[1:3]] for path in link_models(workspace, args.model)]
    analysis = hashlib.sha256(repr((about, args.dim, args.static, device)).encode()).hexdigest()
    index = index_path(workspace, local_target(device).flavour)
    if budget.spent.analysed != analysis:
        options = [*(f"--dim={size}" for size in args.dim), *(["--static"] if args.static else [])]
        report = run_json(workspace, "ort_analysis/fusion_detector.py", "--device", device, *options)
        if not report["records"]:
            raise UserError("no model could be analysed; the lines above say why")
        run_json(workspace, "kernel_model/kernel_builder.py", "--record", str(index.absolute()))
        budget.save(analysed=analysis)
    return len(read_index(index).all_kernels())


def sampled_before(workspace: Workspace, device: str) -> tuple[int, int]:
    """How many kernels earlier calls sampled near kernels of models, and how many near no model."""
    families = read_seeds(workspace.kernel_onnx / local_target(device).flavour.name).values()
    free = sum(not names for names in families)
    return len(families) - free, free


def measure(workspace: Workspace, device: str, own_kernels: int, budget: Budget) -> dict[str, Any] | None:
    """Samples kernels, and measures until the time is over; returns the collector's totals, or None if no time was left."""
    if not budget.measuring_s():
        return None
    jobs = os.cpu_count() or 1
    if count := budget.samples(device, own_kernels, jobs):
        near, free = sampled_before(workspace, device)
        new_free = round(FREE_SHARE[device] * count)
        run_json(workspace, "kernel_model/kernel_sampler.py", "--count", str(near + count - new_free), "--free",
                 str(free + new_free), "--jobs", str(jobs), "--most-gflop", str(MOST_GFLOP[device]), "--seed",
                 str(near + free))
    return collect(workspace, device, budget)


def collect(workspace: Workspace, device: str, budget: Budget) -> dict[str, Any] | None:
    """Measures what was built until the time is over; returns as `measure` does."""
    if not (minutes := budget.measuring_s() / 60):
        return None
    log.info("%.1f minutes used; measuring for %.1f, then about %.1f for training", budget.used_s() / 60, minutes,
             TRAINING_SHARE * budget.total_s / 60)
    begun = header_path(workspace.dataset(local_target(device).name)).exists()  # without labels in the config, it keeps its own
    totals: dict[str, Any] = run_json(
        workspace, "benchmark/collector.py", "--config", str(ROOT / "recipes" / "this_device" / f"{device}.yaml"),
        *(["--set", "labels=[]"] if begun else []), "--minutes", str(minutes))
    budget.save(measured=True)
    return totals


def shipped_for(device: str, target: str) -> str | None:
    """The first target of this kind of device, other than `target`, whose predictors come with Hase; None without one."""
    names = [path.parent.name for path in sorted(SHIPPED.glob(f"*-{device}-*/{target_files.PREDICTORS.name}"))]
    return next((name for name in names if name != target), None)


def learn(workspace: Workspace, device: str, args: argparse.Namespace, budget: Budget) -> None:
    """Trains the predictors, and fits the composition."""
    target = local_target(device).name
    start = args.start_from or shipped_for(device, target)
    log.info("%.1f minutes used; training", budget.used_s() / 60)
    run_json(workspace, "training/train_kernel_model.py", "--target", target,
             *(["--start-from", start] if start and start != "nothing" else []))
    models = read_model_table(workspace, target)["Model"].nunique()
    run_json(workspace, "training/fit_composition.py", "--target", target, *(["--few-models"] if models < FEW_MODELS else []))


def prediction_command(workspace: Workspace, device: Sequence[str], model: str) -> str:
    """The command that predicts a model on this device, which the options `device` name."""
    words = ["python", "inference/predict_model_latency.py", *device, "--model", model]
    if (root := workspace.root) != ROOT:
        words += ["--workspace", str(root.relative_to(ROOT) if root.is_relative_to(ROOT) else root)]
    return shlex.join(words)


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--minutes", type=cli.positive, default=20.0, metavar="N",
                        help="time for everything, including earlier calls in this workspace (default: 20)")
    parser.add_argument("--model", type=Path, action="append", default=[],
                        help="an ONNX file (repeatable; default: all in the workspace's model_zoo/models)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto",
                        help="what is measured (default: the GPU, or the CPU where there is none)")
    parser.add_argument("--start-from", metavar="TARGET",
                        help="the target whose predictors training starts from, or: nothing (default: on a GPU, those of "
                             "another GPU that come with Hase; on a CPU, nothing); data-sheet: trains nothing, and corrects "
                             "what is predicted from the data sheet")
    parser.add_argument("--gpu", metavar="NAME|FILE", help="with --start-from data-sheet: the card (default: this machine's)")
    cli.add_dim(parser)
    cli.add_static(parser)
    args = parser.parse_args()
    if args.gpu and args.start_from != DATA_SHEET:
        parser.error(f"--gpu goes with --start-from {DATA_SHEET}")
    workspace, device = cli.start(args), resolve_device(args.device)
    target, from_sheet = local_target(device), args.start_from == DATA_SHEET
    if from_sheet and device != "cuda":
        raise UserError("--start-from data-sheet is for GPUs; on a CPU, leave it out")
    with sole_writer(workspace.this_device.parent):
        budget = Budget(workspace.this_device, args.minutes)
        log.info("%s: %.1f minutes, of which %.1f were used before", target.name, args.minutes, budget.spent.seconds / 60)
        try:
            if from_sheet:
                build_chosen(workspace, target, args.gpu, args.minutes)
                if args.model or model_files([workspace.models]):
                    analyse(workspace, device, args, budget)
                totals = collect(workspace, device, budget)
                expected, card = correct(workspace, target, args.gpu)
            else:
                own_kernels = analyse(workspace, device, args, budget)
                totals = measure(workspace, device, own_kernels, budget)
                learn(workspace, device, args, budget)
                expected = expected_errors(workspace, target.name)
        finally:
            with suppress(OSError):
                budget.save()
    model = next((path.name for path in model_files([workspace.models])), "model.onnx")
    command = prediction_command(workspace, ("--gpu", card) if from_sheet else ("--target", target.name), model)
    if args.json:
        cli.print_json({"target": target.name, "minutes": budget.spent.seconds / 60, "measured": totals, "expected": expected,
                        "predict": command})
        return 0
    cli.print_table(expected, f"{target.name}: expected errors, after {budget.spent.seconds / 60:.1f} minutes")
    print(f"\npredict with:\n{command}")
    return 0


if __name__ == "__main__":
    cli.run(main, kept="what was measured")
