"""Packs the results of convolution algorithms: tables in one archive, every sample in another.

The tables in extras/convolutions/results/ are written anew from their journals first, so that they have today's columns. Without a
GPU. Writes <output-dir>/<name>.tar.xz and <name>-samples.tar.xz; extras/convolutions/choose_algorithms.py --results reads the first
unpacked.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from hase.extras.convolutions.results import JOURNAL, SETTINGS, read_settings, write_tables
from hase.records.blocks import read_blocks
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.logger import get_logger

EXAMPLES = """
python recipes/convolutions/pack.py --workspace out/convolutions --name nvidia-h200 --output-dir recipes/convolutions
"""
MEASURE = "python recipes/convolutions/measure_table.py"
log = get_logger("convolutions")


def rewrite_tables(results: Path) -> int:
    """Writes the tables of all folders with a journal below `results`; returns their number.

    Raises:
        UserError: a journal or its settings are damaged.
    """
    journals = sorted(results.glob(f"**/{JOURNAL}"))
    for journal in journals:
        if (settings := read_settings(journal.parent)) is None:
            raise UserError(f"{journal.parent}: a journal without {SETTINGS}; remove the folder and measure again")
        write_tables(journal.parent, settings.name, read_blocks(journal))
    return len(journals)


def pack(results: Path, patterns: tuple[str, ...], archive: Path) -> None:
    """Packs the files below `results` whose names fit one of `patterns`, under the folder's own name."""
    paths = sorted(path for pattern in patterns for path in results.glob(f"**/{pattern}"))
    files.pack(archive, ((str(Path(results.name, path.relative_to(results))), path.read_bytes()) for path in paths))


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--name", default="convolutions", help="how the archives' names begin (default: convolutions)")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="(default: the workspace)")
    args = parser.parse_args()
    workspace = cli.start(args)
    results = workspace.convolution_results
    if not rewrite_tables(results):
        raise UserError(f"{results}: no results of convolution algorithms; measure some with {MEASURE}")
    folder = args.output_dir or workspace.root
    for suffix, patterns in (("", ("*.csv",)), ("-samples", (JOURNAL, SETTINGS))):
        archive = folder / f"{args.name}{suffix}.tar.xz"
        pack(results, patterns, archive)
        log.info("%s: %.2f MB", archive, archive.stat().st_size / 1e6)


if __name__ == "__main__":
    cli.run(main)
