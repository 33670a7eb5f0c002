"""Exports further models to ONNX, so that predictors learn from more than torchvision's classification models.

Reads model_zoo/pool.yaml, which lists the models of five collections, or takes names:
- timm: any model of timm (PyTorch Image Models), at its own image size;
- transformers: encoders, decoders, and models for images and speech, in the small configurations of
  model_zoo/networks/libraries.py; a decoder is two models: `llama_prefill` takes a prompt, `llama_token` one token and
  the keys and values of earlier ones;
- torchvision: segmentation, detection and video;
- other: recommenders, recurrent networks, U-Nets, super-resolution, and convolutions over sequences and volumes;
- random: random networks, which their names determine, such as random_conv_7.

Writes `<model>.onnx` and, with --dtype fp16, `<model>_fp16.onnx` to model_zoo/models, with dynamic batch (and sequence length).
Each file is checked by onnx.checker, and by runs at two sets of sizes whose outputs agree with those of torch (those of a
detector are not compared: how many boxes it finds depends on rounding). Weights are random, so nothing is downloaded. Finished
files are kept by the next run. timm and transformers come with pip install '.[pool]'.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hase.model_zoo.exporting.network_export import export_networks
from hase.model_zoo.exporting.zoo_config import COLLECTIONS, POOL_FILE, read_pool
from hase.utils import cli

EXAMPLES = """
python model_zoo/pool_exporter.py --collection timm --model seresnet50 --dtype fp32 --dtype fp16
python model_zoo/pool_exporter.py --collection transformers --model llama_prefill --model llama_token
python model_zoo/pool_exporter.py --collection other --collection random --jobs 4
"""


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--collection", choices=COLLECTIONS, action="append", help="(repeatable; default: all five)")
    parser.add_argument("--pool", type=Path, default=POOL_FILE, metavar="FILE",
                        help="which models, where none are named (default: model_zoo/pool.yaml)")
    parser.add_argument("--model", action="append", default=[], metavar="NAME", help="this one, of one collection (repeatable)")
    parser.add_argument("--dtype", action="append", choices=("fp32", "fp16"), help="(repeatable; default: fp32)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="cpu",
                        help="where the files are checked (default: cpu)")
    parser.add_argument("--jobs", type=cli.count, default=1, metavar="N", help="models at a time (default: 1)")
    parser.add_argument("--force", action="store_true", help="export existing files again")
    args = parser.parse_args()
    if args.model and len(args.collection or ()) != 1:
        parser.error("--model needs one --collection, to which it belongs")
    workspace, pool = cli.start(args, begins=True), read_pool(args.pool)
    rows: list[dict[str, Any]] = []
    for collection in args.collection or COLLECTIONS:
        rows += export_networks(workspace, collection, pool.chosen(collection, args.model), args.dtype or ["fp32"], args.device,
                                args.jobs, args.force)
    return cli.print_files(rows, workspace.models, args.json)


if __name__ == "__main__":
    cli.run(main, kept="what was exported")
