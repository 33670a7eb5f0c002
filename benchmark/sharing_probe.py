"""Phase 4.8: measures on the spot how long work on the device waits for other processes, with a fifth of a second of tiny work.

Live metrics say how busy a GPU is, and hide how long the other processes' bursts are, which is what one waits for when a
GPU is shared in time slices. So for half of the time a piece of work far shorter than any burst runs back to back, and for
the other half one of a third of a millisecond, which waits for longer: another process goes on queueing while it runs
(beside a model in a loop, on an H200, the tiny piece waits 0.5 ms and the long one 0.8).

Reads nothing and writes nothing but, with --out, the raw reading: when each run began and how long it took. Shown are runs,
median, 95th percentile, and `waited`: the share of the time that went into runs that had to wait.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from benchmark.load.probe_reading import ProbeReading
from benchmark.load.sharing_probe import SECONDS, probe
from utils import cli, files
from utils.errors import UserError
from utils.logger import get_logger
from utils.sharing_mode import check_sharing_mode
from utils.timing import summarize

EXAMPLES = """
  python benchmark/sharing_probe.py --device cuda
  python benchmark/sharing_probe.py --seconds 0.5 --device cuda --out reading.json
  python benchmark/sharing_probe.py --device cpu --json
"""

log = get_logger("sharing_probe")


def rows(reading: ProbeReading) -> list[dict[str, Any]]:
    """The reading as a table, a row for each piece of work."""
    found = []
    for piece, runs in (("tiny", reading.tiny), ("long", reading.long)):
        statistics = summarize(runs.latencies_ms)
        found.append({"work": piece, "runs": statistics.runs, "median_ms": statistics.median_ms, "p95_ms": statistics.p95_ms,
                      "waited": reading.waited[piece]})
    return found


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--seconds", type=cli.positive, default=SECONDS, metavar="S",
                        help=f"for both pieces of work together (default: {SECONDS:g})")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: the GPU where there is one")
    parser.add_argument("--out", type=cli.out_file, metavar="FILE", help="write the raw reading as JSON")
    args = parser.parse_args()
    cli.start(args)
    reading = probe(args.device, args.seconds)
    if reading.sharing is not None:
        try:
            check_sharing_mode(reading.sharing)
        except UserError as error:
            log.warning("%s", error)
    if args.out:
        files.write_json(args.out, reading)
    if args.json:
        cli.print_json(reading)
    else:
        cli.print_table(rows(reading), f"{reading.machine_uuid}, {reading.sharing or 'CPU'}")
    return 0


if __name__ == "__main__":
    cli.run(main)
