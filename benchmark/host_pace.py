"""Phase 4.9: measures how fast this machine's host dispatches work to its GPU, in two seconds.

The same GPU beside another host, or beside neighbours on it, gets its work up to 1.6 times more slowly, and small models take
as much longer. A fixed graph of many small kernels (benchmark/quiet_host.py) is dispatched again and again; the median of what
that takes is the host's pace. Predictors hold for one pace: the ratio to that is what a prediction takes (`--host-pace`).

Writes a record: by default into the workspace (benchmark/host_pace.json), where predictions for this machine find it for ten
minutes, until it is started anew; with --out elsewhere, for a prediction on another machine (`--machine FILE`).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from utils import cli, files
from utils.errors import UserError
from utils.fingerprint import boot_id, has_cuda, local_target, machine
from utils.locks import measuring
from utils.paths import COMPOSITION, SHIPPED, Workspace

if TYPE_CHECKING:
    from benchmark.pace_reading import MachinePace

EXAMPLES = """
  python benchmark/host_pace.py
  python benchmark/host_pace.py --out machine.json
  python inference/predict_model_latency.py --model model.onnx --target nvidia-h200 --machine machine.json
"""
SECONDS = 2.0


def check_gpu() -> None:
    """`UserError` where this machine has no GPU whose host could be measured."""
    if not has_cuda():
        raise UserError("the host's pace is that of dispatching work to a GPU: measuring it needs a GPU, and this machine has "
                        "none that the driver can talk to; a CPU target's host is the target itself, so it needs no pace")


def measure_pace(execution_provider: str = "cuda", seconds: float = SECONDS) -> MachinePace:
    """The pace of this machine's host now.

    Args:
        execution_provider: `cuda`; `cpu` in tests.
        seconds: that the readings take; opening the probe takes longer the first time.

    Raises:
        UserError: there is no GPU.
    """
    if execution_provider == "cuda":
        check_gpu()
    from benchmark.pace_reading import MachinePace
    from benchmark.quiet_host import host_probe, readings_s
    from utils.timing import summarize

    found = summarize([1e3 * reading for reading in readings_s(host_probe(execution_provider), seconds)])
    return MachinePace(probe_us=round(1e3 * found.median_ms, 2), spread=round(found.spread, 4), readings=found.runs,
                       taken=datetime.now(UTC), boot_id=boot_id(), execution_provider=execution_provider,
                       machine=machine(execution_provider))


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
