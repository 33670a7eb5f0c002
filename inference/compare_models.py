"""Why does model B take longer than model A? Their predicted times, operator by operator, and what explains each difference.

Reads both models and what training learned for the target. For each operator it prints how often it runs and what that takes in
A and in B, the difference, its share of the whole, and what explains it: the number of runs, the operations or bytes of a run,
or the time that each of them takes (other shapes, which a library computes better or worse). Where one side was measured and
the other predicted, it says so. The time outside kernels (the host, launches, less what overlaps) has a row of its own, so that
all rows add up to the difference of the latencies. Writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from inference.core.host_pace import PaceAsked
from inference.core.model_differences import ModelDifference, compare_runs, said_of_difference
from inference.core.predictor import Predictor
from inference.core.questions import questions_of
from inference.core.run_modes import RunMode
from utils import cli
from utils.logger import get_logger

log = get_logger("compare_models")
EXAMPLES = """
python inference/compare_models.py resnet18.onnx resnet18.onnx --target nvidia-h200 --dim batch=1 --b-dim batch=8
python inference/compare_models.py mobilenet_v3_small.onnx resnet18.onnx --target nvidia-h200 --by type  # needs both models
"""


def table(difference: ModelDifference) -> list[dict[str, Any]]:
    """A row for each operator and one for the time outside kernels, the largest difference first."""
    a, b, whole_ms = difference.a, difference.b, difference.difference_ms
    rows = [(row.difference_ms, {
        "operator": row.operator, "runs A": f"{row.a.runs:g}", "runs B": f"{row.b.runs:g}", "A (ms)": row.a.time_ms,
        "B (ms)": row.b.time_ms, "B - A (ms)": row.difference_ms, "share": _percent(row.share),
        "measured A": _percent(row.a.measured_share if row.a.runs else None),
        "measured B": _percent(row.b.measured_share if row.b.runs else None), "what explains it": row.explanation})
        for row in difference.operators]
    outside_ms = difference.outside_kernels_ms
    rows.append((outside_ms, {
        "operator": "outside kernels", "runs A": None, "runs B": None, "A (ms)": a.outside_kernels_ms,
        "B (ms)": b.outside_kernels_ms, "B - A (ms)": outside_ms,
        "share": _percent(outside_ms / whole_ms if whole_ms else None),
        "measured A": None, "measured B": None, "what explains it": f"{a.nodes:g} nodes in A, {b.nodes:g} in B"}))
    return [row for _, row in sorted(rows, key=lambda pair: -abs(pair[0]))]


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{round(100 * share)}%"


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("models", type=Path, nargs=2, metavar="MODEL",
                        help="A and B: ONNX files or kernel records' JSON; a bare name is also looked for in model_zoo")
    cli.add_dim(parser)
    parser.add_argument("--b-dim", action="append", default=[], metavar="NAME=SIZE",
                        help="a size of B only, in place of --dim's (repeatable)")
    cli.add_rebatch(parser)
    cli.add_static(parser)
    cli.add_no_weights(parser)
    cli.add_target(parser)
    cli.add_run_mode(parser)
    parser.add_argument("--by", choices=("operator", "type"), default="operator",
                        help="operator: Conv, with whatever is fused into it; type: Conv, Conv_Relu, … (default: operator)")
    cli.add_host_pace(parser, "what benchmark/host_pace.py measured here in the last ten minutes")
    cli.add_trust(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    a, b = questions_of([workspace.find_model(model) for model in args.models], [cli.one_size_dims(args.dim)])
    predictor = Predictor(workspace, args.target, strict=args.strict, force=args.force, any_device=True,
                          no_weights=args.no_weights)
    run_mode = RunMode(io=args.io, cuda_graph=args.cuda_graph)
    pace = PaceAsked(args.host_pace, args.machine).now(predictor.fitted, run_mode)
    runs = [predictor.run(model, dims=dims, static=args.static, run_mode=run_mode, host_pace=pace) for model, dims in (
        (a.model, a.sizes[0]), (b.model, b.sizes[0] | cli.one_size_dims(args.b_dim)))]
    for warning in dict.fromkeys(warning for run in runs for warning in run.prediction.warnings):
        log.warning("%s", warning)
    difference = compare_runs(runs[0], runs[1], (str(a.model), str(b.model)), args.by)
    if args.json:
        cli.print_json(difference)
        return 0
    print(*said_of_difference(difference), sep="\n")
    print()
    cli.print_table(table(difference), f"{a.model.stem} and {b.model.stem} on {difference.target}")
    return 0


if __name__ == "__main__":
    cli.run(main)
