"""Attacks Hase in every way that its tests know, by a seed, and counts what comes of each case.

A case must give an answer, or one error for the user. Everything else is a fault: a traceback, a crash, more than a minute or
4 GiB, an answer that differs from the right one, or measurements that are lost or stand twice. Campaigns: models (500 damaged
ONNX files, and those made to do harm), files (30 damages of every file of a workspace), servers (in Prometheus's place, and
clients of the exporter), kills (40 commands ended at a random moment, and run again), cluster (25 collections on two Ray
nodes of which something is killed), long (10,000 predictions in one process), and rewriting (50 processes that predict while
the predictors are trained again and again).

Prints a line for each part, and the faults on stderr. What they need is made in --out; damaged models that gave a fault stay
there. docs/robustness.md has the counts.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if not __package__:  # run as a file: the repo root and tests/ come first, as in pytest
    sys.path[:1] = [str(Path(__file__).resolve().parents[parent]) for parent in (2, 1)]

from fuzz.reading import FAULTS, counted
from hase.utils import cli
from hase.utils.paths import ROOT

CAMPAIGNS = {"models": "damaged_models", "files": "damaged_workspace", "servers": "hostile_servers", "kills": "kills",
             "cluster": "cluster_kills", "long": "long_run", "rewriting": "rewriting"}  # and the module of each
EXAMPLES = """
python tests/fuzz/campaigns.py
python tests/fuzz/campaigns.py models files --size 0.1 --seed 7
"""


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=f"of {', '.join(CAMPAIGNS)} (default: all)")
    parser.add_argument("--size", type=cli.positive, default=1.0, metavar="X",
                        help="as a multiple of the numbers above (default: 1)")
    parser.add_argument("--seed", type=cli.whole, default=1, metavar="N", help="of the random choices (default: 1)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "fuzz", metavar="DIR", help="where files are made")
    args = parser.parse_args()
    if unknown := [name for name in args.campaigns if name not in CAMPAIGNS]:
        parser.error(f"no campaign {', '.join(unknown)}; there are {', '.join(CAMPAIGNS)}")
    cli.start(args)
    rows = []
    for name in args.campaigns or CAMPAIGNS:
        module, folder = import_module(f"fuzz.{CAMPAIGNS[name]}"), args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        count = max(1, round(args.size * module.CASES))
        rows += [{"campaign": name} | row for row in counted(module.parts(count, args.seed, folder.resolve()))]
    if args.json:
        cli.print_json(rows)
    else:
        cli.print_table(rows, "campaigns")
    return 1 if any(row[fault] for row in rows for fault in FAULTS) else 0


if __name__ == "__main__":
    cli.run(main)
