"""Analyses the exported models of the pool at the sizes that they are measured at.

Like ort_analysis/fusion_detector.py, but at each model's own sizes: its file names those of its dynamic dimensions
(model_zoo/exporting/network_export.py), and the number of boxes of a detector is what it finds in random images. Files that
other exporters wrote are left out. Writes ort_analysis/ort_kernel_record/, with its index.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

from hase.model_zoo.exporting.network_export import DATA_SIZED_KEY, POOL_SIZES_KEY
from hase.ort_analysis.isolated.analysis import analyze_all
from hase.records.kernel_record_files import update_index
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.fingerprint import DEFAULT_RUNTIME, graph_device
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger
from hase.utils.model_files import read_metadata
from hase.utils.paths import ROOT, model_files

log = get_logger("pool")
EXAMPLES = """
python recipes/h200/pool_records.py --workspace out/pool --device cuda --jobs 8
"""


def sizes_in_pool(path: Path) -> list[dict[str, int]] | UserError:
    """The sizes at which to analyse a file; none if it is not of the pool, an error if no run tells them."""
    metadata = read_metadata(path)
    if POOL_SIZES_KEY not in metadata:
        return []
    combinations = cli.combinations(json.loads(metadata[POOL_SIZES_KEY]))
    if DATA_SIZED_KEY in metadata:
        for sizes in combinations:
            command = [sys.executable, "benchmark/sizes_of_a_run.py", "--model", str(path.resolve()), "--static", "--json",
                       *(f"--dim={name}={size}" for name, size in sizes.items())]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                return UserError(f"{path.name}: {done.stderr.strip().splitlines()[-1]}")
            sizes |= json.loads(done.stdout)
    return combinations


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="whose graphs (default: auto)")
    parser.add_argument("--jobs", type=cli.count, default=1, metavar="N", help="models at a time (default: 1)")
    args = parser.parse_args()
    workspace = cli.start(args)
    paths = model_files([workspace.models])
    with ThreadPoolExecutor(args.jobs) as pool:
        sizes_by_path = list(pool.map(sizes_in_pool, paths))
    work = [(path, sizes) for path, path_sizes in zip(paths, sizes_by_path, strict=True)
            if not isinstance(path_sizes, UserError) for sizes in path_sizes]
    if not work:
        raise UserError(f"{workspace.models}: no models of the pool; export them with: python model_zoo/pool_exporter.py")
    with sole_writer(workspace.kernel_records):
        done = analyze_all(workspace, DEFAULT_RUNTIME, work, graph_device(args.device), args.jobs, static=True)
        written = [record for records in done if not isinstance(records, UserError) for record in records]
        for flavour in {record.flavour.name: record.flavour for record in written}.values():
            update_index(workspace, flavour)
    failed = [result for result in (*sizes_by_path, *done) if isinstance(result, UserError)]
    for error in failed:
        log.error("%s", error)
    log.info("%d records written, %d models and sizes failed", len(written), len(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
