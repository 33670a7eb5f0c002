"""Networks of the search space `ofa` as torchvision builds them and torch exports them: are their records those that the search
builds itself? And networks' ONNX files, to train or to measure them.

Draws networks at random, builds each with torchvision's `MobileNetV3`, with weights and statistics drawn at random, exports it,
and has ONNX Runtime optimise the graph, as for any model. Compares the kernels in their order, the providers, which node reads
which one's output, and the bytes of weights with the record of inference/search/ofa.py, and then the predictions: latency,
energy and peak memory.

Prints a row per network; the exit status is 1 if one differs. With --network, it writes these networks into a folder instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
from typing import Any

from inference import Predictor
from inference.search import ofa
from recipes.search.spaces.ofa_in_torch import exported
from records.kernel_record import ModelRecord
from utils import cli
from utils.errors import UserError
from utils.files import replacing
from utils.lazy import onnx
from utils.logger import get_logger

log = get_logger("exported")
TARGET = "nvidia-h200"
EXAMPLES = """
python recipes/search/exported.py --count 3
python recipes/search/exported.py --count 50 --seed 1 --json
python recipes/search/exported.py --network ofa_r128_w1.0_33.33_33.33_33.33_33.33_33.33 --out out/networks
"""


def graph_of(record: ModelRecord) -> list[tuple[str, str, tuple[int, ...]]]:
    """Each node's kernel, its provider, and the places of the nodes whose outputs it reads (-1: the model's input)."""
    maker = {name: place for place, node in enumerate(record.nodes) for name in node.outputs} | dict.fromkeys(record.inputs, -1)
    return [(node.kernel_id, node.provider, tuple(maker[name] for name in node.inputs if name in maker))
            for node in record.nodes]


def differences(built: ModelRecord, of_file: ModelRecord) -> str:
    """How two records of one network differ; "" where they do not."""
    if (first := graph_of(built)) != (second := graph_of(of_file)):
        pairs = [(one, other) for one, other in zip(first, second, strict=False) if one != other]
        return f"{len(first)} and {len(second)} nodes, {len(pairs)} differ, e.g. {pairs[:1]}"
    if built.weight_bytes != of_file.weight_bytes:
        return f"{built.weight_bytes} and {of_file.weight_bytes} bytes of weights"
    return "" if built.kernels == of_file.kernels else "kernels of the same ids"


def compared(predictor: Predictor, name: str) -> dict[str, Any]:
    """A row about a network: its record as it is built, and as it is exported."""
    built, model = ofa.make(name, predictor.fitted.target.flavour), exported(name)
    of_file = predictor.record(model)
    first, second = predictor.predict_briefly([built, of_file], energy=True, memory=True)
    found = differences(built, of_file)
    if not found and first[1:] != second[1:]:
        found = f"{first[1:]} and {second[1:]}"
    return {"network": name, "nodes": len(built.nodes), "latency (ms)": first.latency_ms, "differs": found or "no"}


def options() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--count", type=cli.count, default=10, help="networks (default: 10)")
    parser.add_argument("--seed", type=cli.whole, default=0, help="of the networks (default: 0)")
    parser.add_argument("--network", nargs="+", metavar="NAME", help="write these networks as ONNX files instead (with --out)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where")
    return parser


def main() -> int:
    parser = options()
    args = parser.parse_args()
    cli.start(args)
    if bool(args.network) != bool(args.out):
        parser.error("--network and --out go together")
    if args.network:
        for name in cli.progress(args.network, "exporting"):
            with replacing(args.out / f"{name}.onnx") as path:
                onnx.save(exported(name), path)
        return 0
    predictor = Predictor(target=TARGET)
    rows = [compared(predictor, name) for name in cli.progress(list(ofa.choices(args.count, args.seed)), "exporting")]
    cli.print_rows(rows, args.json, "records as they are built and as they are exported")
    if wrong := [row["network"] for row in rows if row["differs"] != "no"]:
        raise UserError(f"{len(wrong)} of {len(rows)} networks differ: {cli.first_of(wrong)}")
    return 0


if __name__ == "__main__":
    cli.run(main)
