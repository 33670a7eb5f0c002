"""Analyses models under TVM: finds their operators, and the kernels into which TVM fuses them.

Reads ONNX files, and programs of PyTorch (.pt2, written by torch.export.save). Writes, for both flavours of TVM (unfused: one
kernel for each operator; fused: those that really run), the same kernel records as fusion_detector, and the functions of the
kernels to kernel_model/kernel_onnx/<flavour>/<kernel id>.tvm. Needs TVM: pip install '.[tvm]'
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections import Counter
from typing import Any

from hase.records.kernel_record import ModelRecord
from hase.records.kernel_record_files import update_index
from hase.records.operators import furthest_from_linear, linearity_class, network_kind
from hase.runtimes.tvm.compiling import FUSED, UNFUSED, check_tvm, tvm_flavour
from hase.runtimes.tvm.lowering import onnx_name
from hase.runtimes.tvm.recording import parse, write_parsed
from hase.runtimes.tvm.runtime import RUNTIME
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger, progress
from hase.utils.paths import model_files

log = get_logger("tvm")
EXAMPLES = """
python runtimes/tvm/relax_parser.py
python runtimes/tvm/relax_parser.py --model resnet18.onnx --dim batch=1
python runtimes/tvm/relax_parser.py --model my_network.pt2  # needs your own
python runtimes/tvm/relax_parser.py --device cuda
"""


def operators_in(record: ModelRecord, kernel_id: str) -> list[str]:
    """ONNX's names of the operators in the kernel with an id."""
    return [record.kernels[kernel_id].op_type] if "operators" not in record.kernels[kernel_id].attributes else [
        onnx_name(name) for name in record.kernels[kernel_id].attributes["operators"]]


def summary(unfused: ModelRecord, fused: ModelRecord) -> dict[str, Any]:
    """A model's row: its operators by class, and its kernels."""
    kinds = Counter(linearity_class(unfused.kernel_of(node).op_type) for node in unfused.nodes)
    return {"model": fused.model, "network": network_kind(unfused.kernel_of(node).op_type for node in unfused.nodes),
            "operators": len(unfused.nodes), **{kind: kinds[kind] for kind in ("linear", "multiplicative", "nonlinear")},
            "runs": len(fused.nodes), "kernels": len(fused.kernels),
            "GFLOP": sum(fused.kernel_of(node).flops for node in fused.nodes) / 1e9}


def node_rows(record: ModelRecord) -> list[dict[str, Any]]:
    """One row per kernel of a model, in execution order."""
    return [{"node": node.name, "type": record.kernel_of(node).type,
             "class": furthest_from_linear(operators_in(record, node.kernel_id)),
             "inputs": " ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in record.kernel_of(node).inputs),
             "outputs": " ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in record.kernel_of(node).outputs)}
            for node in record.nodes]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", type=Path, action="append",
                        help="an ONNX file or a program of PyTorch (repeatable; default: all in model_zoo/models)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="whose graphs; those of cuda need no GPU here (default: cpu)")
    cli.add_dim(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    check_tvm()
    paths = workspace.find_models(args.model) if args.model else model_files([workspace.models], RUNTIME.model_suffixes)
    if not paths:
        raise UserError(f"{workspace.models}: no models; export some with: python model_zoo/torchvision_exporter.py")
    parsed: list[list[ModelRecord]] = []
    failed = []
    with sole_writer(workspace.kernel_records):
        for path, dims in progress([(path, dims) for path in paths for dims in cli.combinations(cli.parse_dims(args.dim))],
                                   "analysing models"):
            try:
                parsed.append(write_parsed(workspace, parse(path, dims, device=args.device)))
            except UserError as error:
                log.error("%s", error)
                failed.append(path.name)
        if parsed:
            for level in (UNFUSED, FUSED):
                update_index(workspace, tvm_flavour(args.device, level))
    rows = [summary(*records) for records in parsed]
    if args.json:
        cli.print_json({"records": rows, "failed": failed})
    else:
        if len(parsed) == 1:
            for record in parsed[0]:
                cli.print_table(node_rows(record), f"{record.model}, {record.flavour.name}")
        cli.print_table(rows, "models under TVM")
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
