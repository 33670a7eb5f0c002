"""Measures how fast this machine's host dispatches work to its GPU, in two seconds.

With another host, or with other work on the same host, the same GPU gets its work up to 1.6 times more slowly, and small models
take that much longer. A fixed graph of many small kernels (benchmark/measuring/quiet_host.py) is dispatched again and again;
the median time is the host pace. Predictors are valid for one pace; a prediction takes the ratio to it (`--host-pace`).

Writes a record: by default into the workspace (benchmark/host_pace.json), where predictions for this machine use it for ten
minutes unless the machine restarts; with --out to another file, for predictions on another machine (`--machine FILE`).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import TYPE_CHECKING, Any, NamedTuple

from hase.benchmark.ort.probes import PACE_SECONDS, check_gpu, measure_pace
from hase.runtimes import local_target
from hase.utils import cli, files
from hase.utils.locks import measuring
from hase.utils.paths import COMPOSITION, SHIPPED, Workspace

if TYPE_CHECKING:
    from hase.records.host_pace import MachinePace

EXAMPLES = """
python benchmark/host_pace.py
python benchmark/host_pace.py --out machine.json
python inference/predict_model_latency.py --model resnet18.onnx --target nvidia-h200 --machine machine.json
"""


class LearnedPace(NamedTuple):
    """The probe's time (µs) at the pace for which a target's predictors are valid."""

    target: str
    probe_us: float


def learned_pace(workspace: Workspace, target: str) -> LearnedPace | None:
    """The pace of a target's predictors, from the workspace or shipped; None without predictors or a recorded pace."""
    for folder in (workspace.predictors(target), SHIPPED / target):
        if (path := folder / COMPOSITION).is_file():
            document = files.read_json(path)  # not by its class, which belongs to training, a later folder
            probe_us = document.get("probe_us") if isinstance(document, dict) else None
            return LearnedPace(target, float(probe_us)) if isinstance(probe_us, (int, float)) and probe_us > 0 else None
    return None


def pace_row(pace: MachinePace, learned: LearnedPace | None) -> dict[str, Any]:
    """A pace as a row to print."""
    return {"probe_us": pace.probe_us, "spread": pace.spread, "readings": pace.readings,
            "stalls_per_s": pace.stalls_per_s,
            "ratio": pace.probe_us / learned.probe_us if learned else None, "target": learned.target if learned else None}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--out", type=cli.out_file, metavar="FILE",
                        help="where the record goes (default: benchmark/host_pace.json of the workspace)")
    parser.add_argument("--seconds", type=cli.positive, default=PACE_SECONDS, metavar="S",
                        help=f"length of the measurement (default: {PACE_SECONDS:g})")
    args = parser.parse_args()
    workspace = cli.start(args)
    check_gpu()
    with measuring("cuda"):
        pace = measure_pace(seconds=args.seconds)
    files.write_json(args.out or workspace.host_pace, pace)
    row = pace_row(pace, learned_pace(workspace, local_target("cuda").name))
    if args.json:
        cli.print_json(pace.model_dump(mode="json") | row)
    else:
        cli.print_table([row], f"host pace; ratio: to the pace for which the predictors of {row['target']} hold"
                        if row["target"] else "host pace; there are no predictors for this machine's GPU to compare with")
    return 0


if __name__ == "__main__":
    cli.run(main)
