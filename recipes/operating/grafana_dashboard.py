"""Writes the Grafana dashboard of what Hase exports: recipes/operating/hase_dashboard.json, which docs/operating.md explains.

It is made of recipes/operating/grafana_panels.py with Grafana's own builders, in the classic form, which Grafana 10 and later
import. Run this after changing a panel or a metric; a test compares the file with what this script makes.

Needs grafana-foundation-sdk: pip install '.[operating]'
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.paths import ROOT

OUT = ROOT / "recipes" / "operating" / "hase_dashboard.json"
EXAMPLES = """
  python recipes/operating/grafana_dashboard.py
  python recipes/operating/grafana_dashboard.py --out out/hase_dashboard.json
"""


def dashboard_json() -> str:
    """The dashboard as JSON. Raises UserError if Grafana's builders are not installed."""
    try:
        from hase.recipes.operating.grafana_panels import dashboard_json  # noqa: PLC0415 - needs a package that --help does not
    except ModuleNotFoundError as error:
        raise UserError(f"this needs the package {error.name}: pip install '.[operating]'") from None
    return dashboard_json()


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--out", type=cli.out_file, default=OUT, metavar="FILE",
                        help=f"file to write (default: {OUT.relative_to(ROOT)})")
    args = parser.parse_args()
    cli.start(args)
    files.write_text(args.out, dashboard_json())
    if args.json:
        cli.print_json({"file": str(args.out)})
    else:
        print(args.out)
    return 0


if __name__ == "__main__":
    cli.run(main)
