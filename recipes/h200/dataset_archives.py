"""Unpacks the dataset of the H200 from its archives, or packs what a workspace holds beyond them as a further archive.

Archives are never written again, so that git keeps each of them once: `<target>.tar.xz` is the first, and each further
collecting adds `<target>-<number>-<day>.tar.xz`, with its own blocks, kernels and kernel records alone. `unpack` joins all of
them in the workspace, as benchmark/merge_datasets.py does; `pack` reads them and the workspace, and writes the further one.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from hase.records.dataset_files import (
    DatasetHeader,
    DatasetKernel,
    copies_path,
    digests_path,
    header_path,
    journal_path,
    kernel_lines,
    kernel_table_path,
    kernels_path,
    model_table_path,
    read_header,
    read_journal,
    write_journal,
    write_kernels,
)
from hase.records.dataset_tables import write_dataset_tables
from hase.records.dataset_writer import merge_dataset
from hase.records.kernel_record_files import index_path, record_path
from hase.records.measurement import Block
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.files import pack, temporary_folder, unpack
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("archives")
HERE = Path(__file__).resolve().parent
TARGET = "nvidia-h200-cuda-ort1.31-all"
DICTIONARY_BYTES = 512 << 20  # large, since names recur hundreds of megabytes apart
EXAMPLES = """
python recipes/h200/dataset_archives.py unpack --workspace out/h200
python recipes/h200/dataset_archives.py pack --workspace out/h200
"""


class Addition(NamedTuple):
    """What a dataset holds beyond another: its header; new blocks, kernels (as lines) and kernel records (as paths)."""

    header: DatasetHeader
    blocks: list[Block]
    kernels: list[str]
    records: list[Path]


def archives_in(folder: Path, target: str) -> list[Path]:
    """The archives of a target's dataset in the order of collection; none without a first one."""
    first = folder / f"{target}.tar.xz"
    return [first, *sorted(folder.glob(f"{target}-[0-9][0-9][0-9]-*.tar.xz"))] if first.exists() else []


def unpack_archives(archives: list[Path], workspace: Workspace, target: str) -> None:
    """Adds the dataset in some archives to a workspace. Raises UserError if two contradict each other (`merge_dataset`)."""
    if not archives:
        raise UserError(f"no archive of target {target}; give their folder with --archives")
    folder, further = workspace.dataset(target), archives
    if not header_path(folder).exists():
        first, *further = archives
        unpack(first, workspace.root)
        if not further:  # a merge would have written these with their digests, and the tables
            blocks = read_journal(folder)
            write_journal(folder, blocks)
            write_kernels(folder, kernel_lines(folder).values())
            write_dataset_tables(folder, read_header(folder), blocks)
    for archive in further:
        with temporary_folder() as unpacked:
            unpack(archive, unpacked)
            merged = merge_dataset(Workspace(unpacked), workspace, target, origins={}, collection="")
        log.info("%s: %d blocks, %d kernels and %d kernel records more", archive.name, merged.blocks, merged.kernels,
                 merged.records)


def find_addition(workspace: Workspace, packed: Workspace, target: str) -> Addition:
    """What a workspace's dataset holds beyond that of `packed`. Raises UserError if it lacks a block of `packed`."""
    folder, before = workspace.dataset(target), packed.dataset(target)
    header = read_header(folder)
    blocks, packed_blocks = ({block.model_dump_json(): block for block in read_journal(path)} for path in (folder, before))
    if missing := packed_blocks.keys() - blocks.keys():
        raise UserError(f"{journal_path(folder)}: {len(missing)} blocks of the archives are not in it, and archives are never "
                        "written again; unpack them into this workspace first, then add what is new with "
                        "benchmark/merge_datasets.py")
    packed_kernels = kernel_lines(before)
    kernels = [line for name, line in kernel_lines(folder).items()
               if line != packed_kernels.get(name) and _has_more_owners(line, packed_kernels.get(name))]
    index = index_path(workspace, header.target.flavour)  # no record: a merge makes it from the records
    records = [path for path in sorted(index.parent.glob("*.json"))
               if path != index and not _same_file(path, packed.root / path.relative_to(workspace.root))]
    return Addition(header, [block for line, block in blocks.items() if line not in packed_blocks], kernels, records)


def _same_file(path: Path, candidate: Path) -> bool:
    return candidate.is_file() and candidate.read_bytes() == path.read_bytes()


def _has_more_owners(line: str, packed: str | None) -> bool:
    """Whether a line of `kernels.jsonl` names owners of the kernel that the packed line, if there is one, lacks."""
    if packed is None:
        return True
    before = DatasetKernel.model_validate_json(packed)
    joined = DatasetKernel.model_validate_json(line).with_owners_of(before)
    return (set(joined.models), joined.groups, joined.sampled) != (set(before.models), before.groups, before.sampled)


def write_addition(new: Addition, into: Workspace, target: str) -> None:
    """Writes an addition as a separate dataset, without tables."""
    folder = into.dataset(target)
    files.write_json(header_path(folder), new.header)
    write_journal(folder, new.blocks)
    write_kernels(folder, sorted(new.kernels))
    for path in new.records:
        files.write_bytes(record_path(into, new.header.target.flavour, path.stem), path.read_bytes())


def packed_files(workspace: Workspace, target: str) -> Iterator[tuple[str, bytes]]:
    """A dataset's files by name in the archive, without derived tables and digests. The measured times of copies between host
    and GPU are left out, too: recipes/h200/learn.sh packs them."""
    folder = workspace.dataset(target)
    left_out = {copies_path(folder), kernel_table_path(folder), model_table_path(folder), digests_path(folder)}
    for part in (folder, workspace.kernel_records / read_header(folder).target.flavour.name):
        for path in sorted(part.glob("*")):
            if path.name.startswith(".") or path in left_out:
                continue
            contents = path.read_bytes()
            if path in (kernels_path(folder), journal_path(folder)):
                contents = "".join(f"{files.line_without_digest(line)}\n" for line in files.read_lines(path)).encode()
            yield str(path.relative_to(workspace.root)), contents


def pack_addition(workspace: Workspace, folder: Path, target: str) -> Path | None:
    """Packs what a dataset holds beyond the archives in `folder`, and returns the new archive; None if there is nothing more.

    Raises UserError if the dataset contradicts the archives.
    """
    archives = archives_in(folder, target)
    if not archives:
        archive, members = folder / f"{target}.tar.xz", list(packed_files(workspace, target))
        pack(archive, members, min(DICTIONARY_BYTES, max(sum(len(contents) for _, contents in members), 1 << 20)))
        return archive
    with temporary_folder() as packed, temporary_folder() as more:
        unpack_archives(archives, Workspace(packed), target)
        new = find_addition(workspace, Workspace(packed), target)
        if not (new.blocks or new.kernels or new.records):
            return None
        write_addition(new, Workspace(more), target)
        # what can't be joined is refused before it is packed
        merge_dataset(Workspace(more), Workspace(packed), target, origins={}, collection="")
        numbers = [int(matched[1]) for path in archives if (matched := re.search(r"-(\d{3})-[\d-]+\.tar", path.name))]
        archive = folder / f"{target}-{max(numbers, default=1) + 1:03d}-{datetime.now(UTC):%Y-%m-%d}.tar.xz"
        pack(archive, packed_files(Workspace(more), target))
    log.info("%d blocks, %d kernels, %d kernel records", len(new.blocks), len(new.kernels), len(new.records))
    return archive


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("what", choices=("unpack", "pack"))
    parser.add_argument("--target", default=TARGET, help=f"whose dataset (default: {TARGET})")
    parser.add_argument("--archives", type=Path, default=HERE, metavar="DIR", help="their folder (default: recipes/h200)")
    args = parser.parse_args()
    workspace = cli.start(args, begins=args.what == "unpack")
    if args.what == "unpack":
        archives = archives_in(args.archives, args.target)
        unpack_archives(archives, workspace, args.target)
    else:
        archive = pack_addition(workspace, args.archives, args.target)
        archives = [archive] if archive else []
    cli.print_rows([{"archive": str(path), "MB": round(path.stat().st_size / 1e6, 3)} for path in archives], args.json,
                   f"{args.what}ed")
    return 0


if __name__ == "__main__":
    cli.run(main)
