"""Adds the datasets of other workspaces to this one, so that what several machines measured is one dataset.

Reads benchmark/dataset/<target>/ and the kernel records of its flavour from each workspace that --from names, and writes what
is new in them to --workspace, which may be empty; so a merge can be repeated. Refuses datasets of different targets, with other
labels, or without a metric that --workspace has, and two models of one name that differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from hase.records.dataset_files import collected_targets
from hase.records.dataset_writer import merge_dataset
from hase.records.kernel_record import ModelOrigin
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

EXAMPLES = """
python benchmark/merge_datasets.py --from out/h200 --collection torchvision --workspace out/all
python benchmark/merge_datasets.py --from out/pool --workspace out/all
"""


def read_origins(path: Path) -> dict[str, ModelOrigin]:
    """The groups and collections of models in a JSON file, by the models' file stems."""
    try:
        return {str(stem): ModelOrigin(**{key: str(value) for key, value in origin.items()})
                for stem, origin in files.read_json(path).items()}
    except (AttributeError, TypeError):
        raise UserError(f'{path}: not of the form {{"<file stem>": {{"group": "…", "collection": "…"}}, …}}') from None


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--from", dest="sources", type=Path, action="append", required=True, metavar="DIR",
                        help="a workspace whose datasets are added (repeatable)")
    parser.add_argument("--target", help="name of a dataset (default: all that DIR holds)")
    parser.add_argument("--collection", default="", metavar="NAME", help="the collection of those models of DIR that have none")
    parser.add_argument("--origins", type=Path, metavar="FILE",
                        help="JSON with the right group and collection of models of DIR, by the stem of their file")
    args = parser.parse_args()
    workspace = cli.start(args, begins=True)
    origins = read_origins(args.origins) if args.origins else {}
    rows: list[dict[str, Any]] = []
    for source in map(Workspace, args.sources):
        for target in [args.target] if args.target else collected_targets(source):
            merged = merge_dataset(source, workspace, target, origins, args.collection)
            rows.append({"from": str(source.root), "target": target, **{
                f"{name}_added" if name != "blocks_there" else name: value for name, value in merged._asdict().items()}})
    cli.print_rows(rows, args.json, f"added to {workspace.root}")
    return 0


if __name__ == "__main__":
    cli.run(main)
