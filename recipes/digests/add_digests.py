"""Writes the digest into JSON records that Hase checks when it reads them.

For records of older versions without a digest, and for records that were changed on purpose. Reads and writes the given files.
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
