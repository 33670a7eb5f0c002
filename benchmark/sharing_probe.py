"""Measures how long work on the device waits for other processes now, with a fifth of a second of small work.

Metrics show how busy a GPU is, but not how long the bursts of the other processes are, for which work waits when a GPU is
shared in time slices. For half of the time the probe runs work that is far shorter than any burst, back to back. For the other
half it runs work of a third of a millisecond, which waits longer, since another process goes on queueing meanwhile. (On an H200
with a model in a loop, the tiny piece waits 0.5 ms and the long one 0.8 ms.)

Reads no files; writes only, with --out, the raw result: start and latency of each run. Prints the number of runs, median, 95th
percentile, and `waited`: the share of the time that belongs to runs that had to wait.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from hase.benchmark.ort.probes import PROBE_SECONDS, probe
from hase.records.probe_reading import ProbeReading
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.sharing_mode import check_sharing_mode
from hase.utils.timing import summarize

EXAMPLES = """
  python benchmark/sharing_probe.py --device cuda
  python benchmark/sharing_probe.py --seconds 0.5 --device cuda --out reading.json
  python benchmark/sharing_probe.py --device cpu --json
"""

log = get_logger("sharing_probe")


def rows(reading: ProbeReading) -> list[dict[str, Any]]:
    """The result as a table, one row per piece of work."""
    table = []
    for piece, runs in (("tiny", reading.tiny), ("long", reading.long)):
        statistics = summarize(runs.latencies_ms)
        table.append({"work": piece, "runs": statistics.runs, "median_ms": statistics.median_ms, "p95_ms": statistics.p95_ms,
                      "waited": reading.waited[piece]})
    return table


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--seconds", type=cli.positive, default=PROBE_SECONDS, metavar="S",
                        help=f"length, both pieces of work together (default: {PROBE_SECONDS:g})")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: the GPU if there is one")
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
