"""Exports architectures of the transformers library to ONNX: encoders, decoders, models of images and of speech.

Reads model_zoo/pool.yaml, or takes names; the small configurations are those of model_zoo/networks/from_transformers.py.
Writes `<model>.onnx` and, with --dtype fp16, `<model>_fp16.onnx` to model_zoo/models, with dynamic batch and sequence length.
A decoder is two models: `llama_prefill` takes a prompt, `llama_token` one token and the keys and values of `past` earlier ones.
Each file is checked by onnx.checker, and by runs at two sets of sizes whose outputs agree with those of torch. Weights are
random, so nothing is downloaded. Finished files are kept by the next run. Needs transformers: pip install -r
requirements-pool.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from model_zoo.exporting.network_command import export_as_asked, network_parser
from utils import cli

EXAMPLES = """
  python model_zoo/transformers_exporter.py --jobs 4
  python model_zoo/transformers_exporter.py --model llama_prefill --model llama_token
"""


def main() -> int:
    return export_as_asked(network_parser(__doc__, EXAMPLES).parse_args(), ["transformers"])


if __name__ == "__main__":
    cli.run(main, kept="what was exported")
