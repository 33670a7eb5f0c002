"""Writes into JSON records, as they stand, the digest that Hase checks as it reads them.

For records of a Hase that wrote none yet, and for such as were changed on purpose. Reads and writes the files named.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from utils import cli, files

EXAMPLES = """
python recipes/digests/add_digests.py training/shipped/*/*.json
"""


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("records", nargs="+", type=Path, metavar="JSON")
    args = parser.parse_args()
    cli.start(args)
    for path in args.records:
        document = files.read_json(path)
        document.pop(files.DIGEST, None)
        files.write_json(path, document | {files.DIGEST: files.digest_of(document)})
    return 0


if __name__ == "__main__":
    cli.run(main)
