"""Exports models of timm (PyTorch Image Models) to ONNX, so that predictors learn from more than torchvision.

Reads model_zoo/pool.yaml, or takes names of any models that timm has. Writes `<model>.onnx` and, with --dtype fp16,
`<model>_fp16.onnx` to model_zoo/models, with a dynamic batch and the image size that the model is made for. Each file is
checked by onnx.checker, and by runs at two batch sizes whose outputs agree with those of torch. Weights are random, so nothing
is downloaded. Finished files are kept by the next run. Needs timm: pip install -r requirements-pool.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from model_zoo.exporting.network_command import export_as_asked, network_parser
from utils import cli

EXAMPLES = """
  python model_zoo/timm_exporter.py --jobs 4
  python model_zoo/timm_exporter.py --model seresnet50 --dtype fp32 --dtype fp16
"""


def main() -> int:
    return export_as_asked(network_parser(__doc__, EXAMPLES).parse_args(), ["timm"])


if __name__ == "__main__":
    cli.run(main, kept="what was exported")
