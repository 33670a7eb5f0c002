"""Exports further networks to ONNX: torchvision models for other tasks, kinds that image and text collections lack,
and networks drawn at random.

Reads model_zoo/pool.yaml, or takes names. Collection torchvision holds segmentation, detection and video; other holds
recommenders, recurrent networks, U-Nets, super-resolution, and convolutions over sequences and volumes; random holds networks
that their names fix, such as random_conv_7. Writes `<model>.onnx` and, with --dtype fp16, `<model>_fp16.onnx` to
model_zoo/models. Each file is checked by onnx.checker, and by runs at two sets of sizes whose outputs agree with those of torch
(those of a detector are not compared: how many boxes it finds depends on rounding). Finished files are kept by the next run.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from model_zoo.exporting.network_command import export_as_asked, network_parser
from model_zoo.exporting.pool_config import Collection
from utils import cli

COLLECTIONS: tuple[Collection, ...] = ("torchvision", "other", "random")
EXAMPLES = """
  python model_zoo/network_exporter.py --jobs 4
  python model_zoo/network_exporter.py --collection random --model random_conv_7 --dtype fp16
"""


def main() -> int:
    parser = network_parser(__doc__, EXAMPLES)
    parser.add_argument("--collection", choices=COLLECTIONS, action="append", help="(repeatable; default: all three)")
    args = parser.parse_args()
    if args.model and len(args.collection or ()) != 1:
        parser.error("--model needs one --collection, to which it belongs")
    return export_as_asked(args, args.collection or COLLECTIONS)


if __name__ == "__main__":
    cli.run(main, kept="what was exported")
