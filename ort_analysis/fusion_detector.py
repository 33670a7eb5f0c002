"""Finds the original nodes that the runtime fused into each node, and describes every kernel in a record.

Reads ONNX files, by default all in model_zoo/models. Writes one record per model to
ort_analysis/ort_kernel_record/<flavour>/<model>.json, and index.json next to them with every kernel of all models by type.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections import Counter
from typing import Any

from hase.ort_analysis.isolated.analysis import analyze_all
from hase.records.kernel_record import ModelOrigin, ModelRecord
from hase.records.kernel_record_files import index_path, update_index
from hase.runtimes import MODULES, runtime_named
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.fingerprint import DEFAULT_RUNTIME, graph_device
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger
from hase.utils.paths import model_files

log = get_logger("fusion")
EXAMPLES = """
python ort_analysis/fusion_detector.py
python ort_analysis/fusion_detector.py --model resnet18.onnx --dim batch=1,8,64
python ort_analysis/fusion_detector.py --model resnet18.onnx --device cuda --json
"""


def record_row(record: ModelRecord) -> dict[str, Any]:
    """A record's row in the table: numbers of nodes and different kernels, GFLOP, weights, and nodes per type."""
    counts = Counter(record.kernel_of(node).type for node in record.nodes)
    return {
        "model": record.model, "flavour": record.flavour.name, "nodes": len(record.nodes), "kernels": len(record.kernels),
        "GFLOP": sum(node.runs * record.kernel_of(node).flops for node in record.nodes) / 1e9,
        "weights_MiB": record.weight_bytes / 2**20,
        "types": " ".join(f"{name}×{count}" for name, count in counts.most_common()),
    }


def fusion_rows(record: ModelRecord) -> list[dict[str, Any]]:
    """One row per node: kernel type, id, and its original nodes."""
    return [{"node": node.name, "type": record.kernel_of(node).type, "kernel": node.kernel_id,
             "origins": " + ".join(f"{old.op_type}({old.name})" for old in node.origins) or "(inserted by the runtime)"}
            for node in record.nodes]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", type=Path, action="append",
                        help="an ONNX file (repeatable; default: all in model_zoo/models)")
    parser.add_argument("--runtime", choices=tuple(MODULES), default=DEFAULT_RUNTIME,
                        help="the runtime whose graph is analysed (default: ort, which is ONNX Runtime)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto",
                        help="the device whose graph is analysed; cuda also works without a GPU (default: auto)")
    cli.add_dim(parser)
    cli.add_static(parser)
    cli.add_no_weights(parser)
    parser.add_argument("--group", default="", metavar="NAME",
                        help="the group of these models: variants of one another, held out together (default: the one that the "
                             "exporter wrote into the file, else each model is a group of its own)")
    parser.add_argument("--collection", default="", metavar="NAME",
                        help="where these models' architectures come from (default: what the exporter wrote into the file)")
    parser.add_argument("--jobs", type=cli.count, default=1, metavar="N", help="models analysed at a time (default: 1)")
    args = parser.parse_args()
    workspace = cli.start(args)
    runtime = runtime_named(args.runtime)
    runtime.check()
    paths = workspace.find_models(args.model) if args.model else model_files([workspace.models], runtime.model_suffixes)
    if not paths:
        raise UserError(f"{workspace.models}: no models; export some with: python model_zoo/torchvision_exporter.py")
    work = [(path, dims) for path in paths for dims in cli.combinations(cli.parse_dims(args.dim))]
    with sole_writer(workspace.kernel_records):
        outcomes = analyze_all(workspace, args.runtime, work, graph_device(args.device), args.jobs, args.static,
                               ModelOrigin(args.group, args.collection), args.no_weights)
        records = [record for outcome in outcomes if not isinstance(outcome, UserError) for record in outcome]
        flavours = {record.flavour.name: record.flavour for record in records}
        indexes = [update_index(workspace, flavour) for flavour in flavours.values()]
    failed = []
    for (path, _), outcome in zip(work, outcomes, strict=True):
        if isinstance(outcome, UserError):
            log.error("%s", outcome)
            failed.append(path.name)
    for index in indexes:
        log.info("%s: %d kernels of %d types in the index", index_path(workspace, index.flavour),
                 len(index.all_kernels()), len(index.kernels))
    rows = [record_row(record) for record in records]
    if args.json:
        cli.print_json({"records": rows, "failed": failed})
    elif len(records) == 1:
        cli.print_table(fusion_rows(records[0]), f"{records[0].model}: what {runtime.title} fused")
    else:
        cli.print_table(rows, "kernel records")
    if failed:
        log.error("%d of %d models failed: %s", len(failed), len(work), ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
