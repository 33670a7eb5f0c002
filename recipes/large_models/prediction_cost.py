"""How long a prediction of a large language model takes, and how much memory: for 1, 8 and 70 billion parameters.

Writes the graphs of decoders as onnxruntime-genai's builder writes them, with weights in a file that takes no disk, and
predicts one token with predict_model_latency.py. The memory is that of all processes of the command together, at its peak, and
so are the seconds of a processor, which other work on the machine hardly changes.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import json
import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import psutil

from recipes.large_models.decoders import DECODERS, WEIGHTS, DecoderSize, Precision, write_decoder
from utils import cli
from utils.cache_folder import OFF, VARIABLE
from utils.errors import UserError
from utils.paths import ROOT
from utils.temporary import temporary_folder
from utils.timing import summarize

EXAMPLES = """
python recipes/large_models/prediction_cost.py
python recipes/large_models/prediction_cost.py --size 8B --precision int4 --no-weights --json
"""
LOOK_EVERY_S = 0.01
PAST = 1024  # tokens before the one that is predicted


class Cost(NamedTuple):
    """What a command took: seconds, those of a processor, and MiB at its peak; and what it printed."""

    seconds: float
    processor_s: float
    peak_mib: float
    printed: str


def cost_of(command: Sequence[str]) -> Cost:
    """Runs a command, and looks at the memory of its processes.

    Raises:
        UserError: it failed; with its own message.
    """
    began, worked = time.perf_counter(), os.times()
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {VARIABLE: OFF}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    root, peak = psutil.Process(process.pid), 0
    while process.poll() is None:
        peak = max(peak, held_bytes(root))
        time.sleep(LOOK_EVERY_S)
    seconds = time.perf_counter() - began
    printed, complaints = process.communicate()
    if process.returncode:
        raise UserError(complaints.strip().removeprefix("error: "))
    now = os.times()
    processor_s = now.children_user + now.children_system - worked.children_user - worked.children_system
    return Cost(seconds, processor_s, peak / 2**20, printed)


def held_bytes(root: psutil.Process) -> int:
    """The memory of a process and of those that it started; pages that several of them share count for each."""
    total = 0
    try:
        for process in (root, *root.children(recursive=True)):
            total += process.memory_info().rss
    except psutil.NoSuchProcess:  # it has just ended
        pass
    return total


def row(name: str, size: DecoderSize, precision: Precision, target: str, no_weights: bool, repeats: int) -> dict[str, Any]:
    """What predicting one token of a decoder takes, and what was predicted."""
    with temporary_folder() as folder:
        path = write_decoder(folder, size, precision)
        gigabytes = path.with_name(WEIGHTS).stat().st_size / 1e9
        if no_weights:
            path.with_name(WEIGHTS).unlink()
        command = [sys.executable, "inference/predict_model_latency.py", "--model", str(path), "--target", target, "--json",
                   *(["--no-weights"] if no_weights else []),
                   *(f"--dim={dim}={value}" for dim, value in size.dims(1, 1, PAST).items())]
        costs = [cost_of(command) for _ in range(repeats)]
    predicted = json.loads(costs[0].printed)[0]
    return {"parameters": name, "weights": precision, "size (GB)": gigabytes,
            "prediction (s)": summarize([cost.seconds for cost in costs]).median_ms,
            "of a processor (s)": summarize([cost.processor_s for cost in costs]).median_ms,
            "memory (MiB)": max(cost.peak_mib for cost in costs), "predicted (ms)": predicted["latency_ms"],
            "predicted weights (MiB)": predicted["memory"]["weights_mib"]}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--size", choices=tuple(DECODERS), action="append", help="repeatable (default: all)")
    parser.add_argument("--precision", choices=get_args(Precision), action="append",
                        help="of the weights, repeatable (default: fp16 and int4)")
    parser.add_argument("--repeats", type=cli.count, default=3,
                        help="predictions of each, of which the median counts (default: 3)")
    cli.add_no_weights(parser)
    cli.add_target(parser)
    args = parser.parse_args()
    cli.start(args)
    rows = [row(name, DECODERS[name], precision, args.target or "nvidia-h200", args.no_weights, args.repeats)
            for name in args.size or DECODERS for precision in args.precision or ("fp16", "int4")]
    cli.print_rows(rows, args.json, "what a prediction of one token takes")
    return 0


if __name__ == "__main__":
    cli.run(main)
