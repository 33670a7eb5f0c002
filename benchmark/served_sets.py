"""How long requests take while several models are served on one device at the same time, under several ways of sharing it.

Reads a config with sets of models, and the models' files, by default in model_zoo/models. Each model of a set is served by a
process of its own. Its requests arrive at random (a Poisson process with a seed) and do not wait for answers; whenever the
process is free, it runs all that wait, up to the model's `batch`, padded to exactly that size. Requests whose run has not
begun when the time is over count as unserved.

Writes benchmark/served_sets/<target>.jsonl, one line for each set and way of sharing, and all requests to <target>/<key>.npz
beside it. What is there is not measured again, not on another machine of the target either; what failed is. Shows for each
model the latency of its requests (from arrival to answer), the share within its `slo_ms` (unserved ones are not), and `busy`,
the share of the time in which it ran.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hase.benchmark.serving.config import ServedSetsConfig
from hase.benchmark.serving.measure import measure_sets
from hase.utils import cli
from hase.utils.config import read_config
from hase.utils.logger import get_logger
from hase.utils.paths import ROOT

EXAMPLES = """
python benchmark/served_sets.py --config recipes/h200/served_sets.yaml --first 20  # needs a GPU
python benchmark/served_sets.py --config recipes/h200/served_sets.yaml --set 'ways=[slices]' --set device=cpu --first 1 --json
"""

log = get_logger("served_sets")


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    cli.add_config(parser, ROOT / "recipes" / "h200" / "served_sets.yaml", "ways=[slices, mps:50]",
                   "the sets, and how to measure them")
    parser.add_argument("--first", type=cli.count, metavar="N", help="only the first N sets (default: all)")
    args = parser.parse_args()
    workspace = cli.start(args)
    results = measure_sets(workspace, read_config(args.config, ServedSetsConfig, args.changes), args.first)
    if args.json:
        cli.print_json([{"set": number} | result.model_dump(mode="json") for number, result in results])
    else:
        cli.print_table([row for number, result in results for row in result.rows(number)])
    failed = [f"set {number} under {result.way}" for number, result in results if result.status != "ok"]
    if failed:
        log.error("%d failed, which their lines say: %s", len(failed), ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main, kept="what was measured")
