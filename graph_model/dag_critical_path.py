"""Writes the graph (DAG) of a model's kernels: which kernel waits for which.

Reads kernel records (by default all of ort_analysis/ort_kernel_record). Writes one DAG per record to
graph_model/model_DAG/<flavour>/<model>.json: its nodes in execution order and the tensors between them. Prints the numbers of
nodes and edges, and the length of the longest chain.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from hase.graph_model.simulation.dag import dag_file, dag_of, longest_path, record_paths
from hase.records.kernel_record import REMAKE
from hase.records.kernel_record_files import read_model_record
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.lazy import networkx as nx
from hase.utils.logger import get_logger, progress

log = get_logger("dag")
EXAMPLES = """
python graph_model/dag_critical_path.py
python graph_model/dag_critical_path.py --record ort_analysis/ort_kernel_record/*/resnet18_fp32_b16_224x224.json --json
"""


def summary(dag: nx.DiGraph) -> dict[str, Any]:
    """A DAG as a table row: number of nodes and edges, and number of nodes in its longest chain."""
    depth = int(longest_path(dag, dict.fromkeys(dag, 1.0))[0])
    return {"model": dag.graph["model"], "flavour": dag.graph["flavour"], "nodes": dag.number_of_nodes(),
            "edges": dag.number_of_edges(), "longest_chain": depth}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--record", type=Path, action="append", metavar="FILE",
                        help="a kernel record (repeatable; default: all records of all flavours)")
    args = parser.parse_args()
    workspace = cli.start(args)
    paths = args.record or record_paths(workspace)
    if not paths:
        raise UserError(f"{workspace.kernel_records}: no kernel records; make them with: {REMAKE}")
    rows = []
    for path in progress(paths, "building DAGs"):
        dag = dag_file(read_model_record(path))
        dag_path = workspace.model_dag(dag.flavour) / f"{dag.model}.json"
        files.write_json(dag_path, dag)
        rows.append(summary(dag_of(dag)) | {"file": str(dag_path)})
    cli.print_rows(rows, args.json, "DAGs")
    return 0


if __name__ == "__main__":
    cli.run(main)
