"""Keeps the fastest of several measurements of each kernel on a shared host.

Other tenants slow the host of a virtual machine down by up to 1.8 times, for seconds to minutes. The canary, the reference
workload before and after each block, hardly shows that: it keeps all cores busy, but most of these kernels only one.
Disturbances only make a kernel slower, so the fastest of several measurements is the nearest to a host at its usual pace. Reads
the only dataset in each workspace that --from names. Writes one to --workspace, with the kernels of the first.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from statistics import median

from hase.records.dataset_files import (
    collected_targets,
    header_path,
    kernel_lines,
    read_header,
    read_journal,
    write_journal,
    write_kernels,
)
from hase.records.dataset_tables import write_dataset_tables
from hase.records.measurement import Block
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

LABEL = "kernel_time"  # its times are compared; a kernel's other labels come from the same block
EXAMPLES = """
python recipes/h200/quiet_host_kernels.py --from out/host --from out/host_again --workspace out/h200/host
"""


def fastest_measurements(blocks: Sequence[Block], kernels: Collection[str]) -> list[Block]:
    """The blocks with only the fastest measurement of each of `kernels`, without blocks that then are empty."""
    medians_ms: dict[str, list[tuple[float, int]]] = defaultdict(list)  # with the block's index
    for index, block in enumerate(blocks):
        for measured in block.measurements:
            if measured.label == LABEL and measured.status == "ok" and measured.id in kernels:
                medians_ms[measured.id].append((median(measured.samples_ms), index))
    best_block = {kernel: min(medians)[1] for kernel, medians in medians_ms.items()}
    kept = [block.model_copy(update={"measurements": tuple(
        measured for measured in block.measurements if best_block.get(measured.id) == index)})
        for index, block in enumerate(blocks)]
    return [block for block in kept if block.measurements]


def only_dataset(workspace: Workspace) -> Path:
    """The folder of the only dataset in a workspace."""
    targets = collected_targets(workspace)
    if len(targets) > 1:
        raise UserError(f"{workspace.root}: {len(targets)} datasets ({', '.join(targets)}); exactly one is expected")
    return workspace.dataset(targets[0])


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--from", dest="sources", type=Path, action="append", required=True, metavar="DIR",
                        help="a workspace with measured kernels; the first one decides which kernels are kept (repeatable)")
    args = parser.parse_args()
    workspace, folders = cli.start(args, begins=True), [only_dataset(Workspace(source)) for source in args.sources]
    header, lines = read_header(folders[0]), kernel_lines(folders[0])
    if other := next((folder for folder in folders if folder.name != folders[0].name), None):
        raise UserError(f"{other}: a dataset of another target than {folders[0]}; name workspaces with the same target")
    journals = [read_journal(folder) for folder in folders]
    blocks = fastest_measurements(list(itertools.chain(*journals)), lines)
    kept = sorted({measured.id for block in blocks for measured in block.measurements})
    into = workspace.dataset(folders[0].name)
    files.write_json(header_path(into), header)
    write_kernels(into, (lines[name] for name in kept))
    write_journal(into, blocks)
    write_dataset_tables(into, header, blocks)
    counts = [{"workspace": str(source), "blocks": len(blocks)} for source, blocks in zip(args.sources, journals, strict=True)]
    cli.print_rows(counts, args.json, f"{len(kept)} of {len(lines)} kernels were measured well; the fastest time of each")
    return 0


if __name__ == "__main__":
    cli.run(main)
