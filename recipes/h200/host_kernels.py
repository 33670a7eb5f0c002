"""Lists the kernels that the CPU provider runs in CUDA sessions, so that they can be measured on the GPU machine's host.

Reads the records of CUDA graphs in the workspace. Writes an index of those kernels into another workspace, --into, as kernels
of the host's own CPU flavour. There `kernel_builder.py`, `kernel_sampler.py` and `collector.py` treat them like any CPU's
kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from hase.learned.composition.cuda_nodes import is_copy, reads_shape
from hase.records.kernel_costs import is_control_flow
from hase.records.kernel_record import ModelRecord
from hase.records.kernel_record_files import build_index, index_path, read_model_record
from hase.runtimes import local_flavour
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("host")
EXAMPLES = """
python recipes/h200/host_kernels.py --workspace out/pool --into out/pool/host
python kernel_model/kernel_builder.py --workspace out/pool/host
python benchmark/collector.py --workspace out/pool/host --config recipes/h200/collect_host_kernels.yaml
"""


def only_host_kernels(record: ModelRecord) -> ModelRecord:
    """The record of a CUDA graph with only those kernels that the CPU provider runs and that take time."""
    on_cpu = {node.kernel_id for node in record.nodes if node.provider == "cpu"}
    kernels = {name: kernel for name, kernel in record.kernels.items() if name in on_cpu and kernel.moves_data
               and not is_copy(kernel) and not is_control_flow(kernel) and not reads_shape(kernel)}
    return record.model_copy(update={"kernels": kernels, "nodes": ()})


def cuda_records(workspace: Workspace) -> list[ModelRecord]:
    """The records of all CUDA graphs in a workspace."""
    paths = [path for path in sorted(workspace.kernel_records.glob("cuda-*/*.json")) if path.name != "index.json"]
    if not paths:
        raise UserError(f"{workspace.kernel_records}: no records of CUDA graphs; make them with: "
                        "python recipes/h200/pool_records.py")
    return list(map(read_model_record, paths))


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--into", type=Path, required=True, metavar="DIR", help="the workspace to write the index to")
    args = parser.parse_args()
    workspace = cli.start(args)
    flavour = local_flavour("cpu")
    index = build_index(flavour, [record for record in map(only_host_kernels, cuda_records(workspace)) if record.kernels])
    files.write_json(index_path(Workspace(args.into), flavour), index)
    log.info("%d kernels of %d models", len(index.entries()), len(index.groups))
    return 0


if __name__ == "__main__":
    cli.run(main)
