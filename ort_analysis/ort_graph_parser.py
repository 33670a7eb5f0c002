"""Prints the graph that ONNX Runtime really runs, node by node, with all shapes.

Reads any ONNX file. ONNX Runtime optimises it and saves the result to a temporary file, which is read back. Shapes come from
ONNX Runtime itself, since the saved graph has none and ONNX's own inference stops at ONNX Runtime's operators. Writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hase.ort_analysis.isolated.analysis import graph_of
from hase.utils import cli
from hase.utils.logger import get_logger

log = get_logger("parser")

EXAMPLES = """
python ort_analysis/ort_graph_parser.py --model resnet18.onnx --dim batch=1
python ort_analysis/ort_graph_parser.py --model resnet18.onnx --device cuda --json
"""


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", type=Path, required=True, help="an ONNX file; a bare name is also looked for in model_zoo")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto",
                        help="the provider that runs the graph; cuda also works without a GPU (default: auto)")
    cli.add_dim(parser)
    cli.add_static(parser)
    cli.add_no_weights(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    graph = graph_of(workspace.find_model(args.model), args.device, cli.one_size_dims(args.dim), args.static,
                     args.no_weights)
    if graph["derived"]:
        log.info("this graph was derived on the CPU provider, as the CUDA provider would run it")
    if args.json:
        cli.print_json(graph)
    else:
        sizes = "" if graph["static"] else ", sizes left open"
        cli.print_table(graph["nodes"], f"{graph['model']} as {graph['flavour']} runs it{sizes}: {len(graph['nodes'])} nodes")
    return 0


if __name__ == "__main__":
    cli.run(main)
