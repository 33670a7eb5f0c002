"""Keeps the fastest measurement of each kernel of a shared host, out of several.

Other tenants slow the host of a virtual machine down by up to 1.8 times, for seconds to minutes. Its canary hardly shows that:
it keeps all cores busy, and most of these kernels keep one. Disturbances only make a kernel slower, so the fastest of several
measurements is the nearest to a host at its usual pace. Reads the only dataset in each workspace that --from names. Writes one
to --workspace, with the kernels of the first.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import itertools
from collections.abc import Collection, Iterable
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

LABEL = "kernel_time"  # what decides; the other labels of a kernel are of the same block
EXAMPLES = """
python recipes/h200/quiet_host_kernels.py --from out/host --from out/host_again --workspace out/h200/host
"""


def fastest(blocks: Iterable[Block], kernels: Collection[str]) -> list[Block]:
    """The blocks with only the fastest measurement of each of `kernels`; blocks that keep none are left out."""
    blocks = list(blocks)
    best: dict[str, tuple[float, int]] = {}
    for index, block in enumerate(blocks):
        for m in block.measurements:
            if m.label == LABEL and m.status == "ok" and m.id in kernels:
                best[m.id] = min((median(m.samples_ms), index), best.get(m.id, (float("inf"), index)))
    kept = [block.model_copy(update={"measurements": tuple(
        m for m in block.measurements if m.id in best and best[m.id][1] == index)}) for index, block in enumerate(blocks)]
    return [block for block in kept if block.measurements]


def dataset_of(workspace: Workspace) -> Path:
    """The folder of the only dataset in a workspace."""
    targets = collected_targets(workspace)
    if len(targets) > 1:
        raise UserError(f"{workspace.root}: {len(targets)} datasets ({', '.join(targets)}); exactly one is expected")
    return workspace.dataset(targets[0])


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--from", dest="sources", type=Path, action="append", required=True, metavar="DIR",
                        help="a workspace with such measurements; the first says which kernels (repeatable)")
    args = parser.parse_args()
    workspace, folders = cli.start(args, begins=True), [dataset_of(Workspace(source)) for source in args.sources]
    header, lines = read_header(folders[0]), kernel_lines(folders[0])
    if other := next((folder for folder in folders if folder.name != folders[0].name), None):
        raise UserError(f"{other}: of another target than {folders[0]}")
    journals = [read_journal(folder) for folder in folders]
    blocks = fastest(itertools.chain(*journals), lines)
    kept = sorted({m.id for block in blocks for m in block.measurements})
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
