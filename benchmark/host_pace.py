"""Phase 4.9: measures how fast this machine's host dispatches work to its GPU, in two seconds.

The same GPU beside another host, or beside neighbours on it, gets its work up to 1.6 times more slowly, and small models take
as much longer. A fixed graph of many small kernels (benchmark/measuring/quiet_host.py) is dispatched again and again; the
median of what that takes is the host's pace. Predictors hold for one pace: the ratio to that is what a prediction takes
(`--host-pace`).

Writes a record: by default into the workspace (benchmark/host_pace.json), where predictions for this machine find it for ten
minutes, until it is started anew; with --out elsewhere, for a prediction on another machine (`--machine FILE`).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import TYPE_CHECKING, Any, NamedTuple

from benchmark.runtimes.ort.host_pace import SECONDS, check_gpu, measure_pace
from utils import cli, files
from utils.fingerprint import local_target
from utils.locks import measuring
from utils.paths import COMPOSITION, SHIPPED, Workspace

if TYPE_CHECKING:
    from benchmark.load.pace_reading import MachinePace

EXAMPLES = """
  python benchmark/host_pace.py
  python benchmark/host_pace.py --out machine.json
  python inference/predict_model_latency.py --model model.onnx --target nvidia-h200 --machine machine.json
"""


class LearnedPace(NamedTuple):
    """What the probe takes (µs) at the pace that the predictors of a target hold for."""

    target: str
    probe_us: float


def learned_pace(workspace: Workspace, target: str) -> LearnedPace | None:
    """That of the target's predictors, of the workspace or else shipped; None where there are none, or none was recorded."""
    for folder in (workspace.predictors(target), SHIPPED / target):
        if (path := folder / COMPOSITION).is_file():
            document = files.read_json(path)  # its class is training's, which comes later
            found = document.get("probe_us") if isinstance(document, dict) else None
            return LearnedPace(target, float(found)) if isinstance(found, (int, float)) and found > 0 else None
    return None


def shown(pace: MachinePace, learned: LearnedPace | None) -> dict[str, Any]:
    """What is printed of a pace."""
    return {"probe_us": pace.probe_us, "spread": pace.spread, "readings": pace.readings,
            "ratio": pace.probe_us / learned.probe_us if learned else None, "target": learned.target if learned else None}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--out", type=cli.out_file, metavar="FILE",
                        help="where the record goes (default: benchmark/host_pace.json of the workspace)")
    parser.add_argument("--seconds", type=cli.positive, default=SECONDS, metavar="S",
                        help=f"that the readings take (default: {SECONDS:g})")
    args = parser.parse_args()
    workspace = cli.start(args)
    check_gpu()
    with measuring("cuda"):
        pace = measure_pace(seconds=args.seconds)
    files.write_json(args.out or workspace.host_pace, pace)
    row = shown(pace, learned_pace(workspace, local_target("cuda").name))
    if args.json:
        cli.print_json(pace.model_dump(mode="json") | row)
    else:
        cli.print_table([row], f"the host's pace; ratio: to the pace that predictions for {row['target']} hold for"
                        if row["target"] else "the host's pace; no predictors for this machine's GPU to compare with")
    return 0


if __name__ == "__main__":
    cli.run(main)
