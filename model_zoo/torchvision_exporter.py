"""Exports torchvision classification models to ONNX, to be analysed and measured.

For every model × dtype × batch size × image size of the config it writes, to model_zoo/models/:
  <model>_<dtype>_b<batch>_<H>x<W>.onnx                    the model as torch exports it
  <model>_<dtype>_b<batch>_<H>x<W>.<flavour>.ort.onnx      the graph that ONNX Runtime makes of it (ORT_ENABLE_ALL)
and, for each model and dtype, `<model>.onnx` (`<model>_fp16.onnx`) with dynamic batch, height and width. A model that
works at only one image size gets a dynamic batch alone. A dynamic file has no optimised graph: later phases give it
sizes (--dim) and optimise it then.

Each file is checked by onnx.checker and by a run, whose outputs must agree with torch's. Weights are random (they do not
change the latency), so nothing is downloaded. The next run keeps finished files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hase.model_zoo.exporting.onnx_export import ExportProcess
from hase.model_zoo.exporting.zoo_config import CONFIG_FILE, ZooConfig
from hase.runtimes import local_flavour
from hase.utils import cli
from hase.utils.config import read_config, validate
from hase.utils.errors import UserError
from hase.utils.fingerprint import resolve_device
from hase.utils.logger import get_logger, progress
from hase.utils.paths import Workspace

EXAMPLES = """
python model_zoo/torchvision_exporter.py
python model_zoo/torchvision_exporter.py --model mnasnet1_0 --batch-size 1 --batch-size 8 --image-size 224 --no-dynamic
python model_zoo/torchvision_exporter.py --model resnet18 --set 'batch_sizes=[16]' --set dynamic=batch --set fixed=false
python model_zoo/torchvision_exporter.py --model resnet18 --dtype fp16 --device cuda  # needs a GPU
"""
log = get_logger("exporter")


def export_all(workspace: Workspace, config: ZooConfig, force: bool = False) -> list[dict[str, Any]]:
    """Writes all requested files; returns one row per file. If a model fails, the others are still exported."""
    device = resolve_device(config.device)
    if config.device == "auto" and device == "cpu":
        log.info("no NVIDIA GPU here: the optimised graphs are those of the CPU provider (%s)", local_flavour("cpu").name)
    workspace.models.mkdir(parents=True, exist_ok=True)
    rows = []
    with ExportProcess(workspace, device, force) as process:
        process.check_names(config.models)
        for export in progress(list(config.exports()), "exporting"):
            try:
                rows += process.write(export)
            except UserError as error:
                log.error("%s: %s", export.stem, error)
                rows.append({"model": export.model, "file": str(workspace.models / f"{export.stem}.onnx"),
                             "status": "failed", "mb": None, "difference": None, "error": str(error)})
    return rows


def command_line() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__, EXAMPLES)
    cli.add_config(parser, CONFIG_FILE, "fixed=false", "what to export")
    parser.add_argument("--model", action="append", help="a torchvision classification model (repeatable)")
    parser.add_argument("--batch-size", action="append", type=int, metavar="N", help="(repeatable)")
    parser.add_argument("--image-size", action="append", metavar="H[xW]", help="(repeatable)")
    parser.add_argument("--dtype", action="append", choices=("fp32", "fp16"), help="(repeatable)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), help="whose optimised graph to write")
    parser.add_argument("--dynamic", action=argparse.BooleanOptionalAction, default=None,
                        help="also write <model>.onnx with dynamic sizes")
    parser.add_argument("--force", action="store_true", help="export existing files again")
    return parser


def asked_config(args: argparse.Namespace) -> ZooConfig:
    """The config with values from the command line."""
    config = read_config(args.config, ZooConfig, args.changes)
    options = {"models": args.model, "batch_sizes": args.batch_size, "image_sizes": args.image_size, "dtypes": args.dtype,
               "device": args.device, "dynamic": args.dynamic}
    return validate(config.model_dump() | {key: value for key, value in options.items() if value is not None}, ZooConfig,
                    "command line")


def main() -> int:
    args = command_line().parse_args()
    workspace = cli.start(args, begins=True)
    rows = export_all(workspace, asked_config(args), args.force)
    return cli.print_files(rows, workspace.models, args.json)


if __name__ == "__main__":
    cli.run(main, kept="what was exported")
