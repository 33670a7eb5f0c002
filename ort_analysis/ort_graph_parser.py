"""The graph that ONNX Runtime really runs, node by node, with every shape known.

Reads any ONNX file (or a model in memory). ORT optimises it and saves the result to a temporary file, which is read
back; shapes come from ORT itself, since the saved graph has none and ONNX's own inference stops at ORT's operators.
Prints the nodes; writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from runtimes.ort.graph.parsing import ParsedGraph, parse_graph, shape_text
from utils import cli
from utils.logger import get_logger

log = get_logger("parser")

EXAMPLES = """
python ort_analysis/ort_graph_parser.py --model resnet18.onnx --dim batch=1
python ort_analysis/ort_graph_parser.py --model resnet18.onnx --device cuda --json
"""


def node_rows(graph: ParsedGraph) -> list[dict[str, Any]]:
    """One row a node: number, name, operator, provider, shapes of inputs and outputs, attributes."""
    return [
        {"#": number, "node": node.name, "op_type": (f"{node.domain}." if node.domain else "") + node.op_type,
         "provider": node.provider, "inputs": " ".join(shape_text(graph.tensors[i]) for i in node.inputs),
         "outputs": " ".join(shape_text(graph.tensors[o]) for o in node.outputs),
         "attributes": " ".join(f"{k}={v}" for k, v in node.attributes.items())}
        for number, node in enumerate(graph.nodes)]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", type=Path, required=True, help="an ONNX file; a bare name is also looked for in model_zoo")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto",
                        help="whose graph; cuda also works without a GPU (default: auto)")
    cli.add_dim(parser)
    cli.add_static(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    graph = parse_graph(workspace.find_model(args.model), args.device, cli.one_size_dims(args.dim), static=args.static)
    if graph.derived:
        log.info("no GPU here: this is the graph that the CUDA provider would run, derived on the CPU provider")
    rows = node_rows(graph)
    if args.json:
        cli.print_json({"model": graph.source.name, "flavour": graph.flavour.name, "derived": graph.derived,
                        "static": graph.static,
                        "dims": graph.source.dims, "nodes": rows})
    else:
        sizes = "" if graph.static else ", sizes left open"
        cli.print_table(rows, f"{graph.source.name} as {graph.flavour.name} runs it{sizes}: {len(rows)} nodes")
    return 0


if __name__ == "__main__":
    cli.run(main)
