"""Explains why model B is predicted to take longer than model A, operator by operator.

Reads both models and what training learned for the target. For each operator it prints how often it runs and what that takes in
A and in B, the difference, its share of the whole, and what explains it: the number of runs, the operations or bytes of a run,
or the time that each of them takes (other shapes, which a library computes better or worse). Where one side was measured and
the other predicted, it says so. The time outside kernels (the host, launches, less what overlaps) has a row of its own, so that
all rows add up to the difference of the latencies. Writes nothing, except with --html a page to look at.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hase.inference.compare.model_differences import compare_runs, difference_sentences
from hase.inference.library.predictor import Predictor
from hase.inference.prediction.conditions import PaceAsked, RunMode
from hase.inference.prediction.sources import pair_with_sizes
from hase.inference.reporting.comparisons import difference_page, difference_rows
from hase.utils import cli
from hase.utils.logger import get_logger
from hase.utils.pages.rendering import write_page
from hase.utils.text import names_by_warning

log = get_logger("compare_models")
EXAMPLES = """
python inference/compare_models.py resnet18.onnx resnet18.onnx --on h200 --batch 1 --b-dim batch=8
python inference/compare_models.py mobilenet_v3_small.onnx resnet18.onnx --on h200 --by type  # needs both models
python inference/compare_models.py resnet18.onnx resnet18.onnx --on h200 --batch 1 --b-dim batch=8 --html page.html
"""


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
    cli.add_html(parser)
    cli.add_host_pace(parser, "what benchmark/host_pace.py measured here in the last ten minutes")
    cli.add_trust(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    a, b = pair_with_sizes([workspace.find_model(model) for model in args.models], [cli.one_size_dims(args.dim)])
    predictor = Predictor(workspace, args.target, strict=args.strict, force=args.force, any_device=True,
                          no_weights=args.no_weights)
    run_mode = RunMode(io=args.io, cuda_graph=args.cuda_graph)
    pace = PaceAsked(args.host_pace, args.machine).now(predictor.fitted, run_mode)
    runs = [predictor.run(model, dims=dims, static=args.static, run_mode=run_mode, host_pace=pace) for model, dims in (
        (a.model, a.sizes[0]), (b.model, b.sizes[0] | cli.one_size_dims(args.b_dim)))]
    warnings = names_by_warning((name, run.prediction.warnings) for name, run in zip("AB", runs, strict=True))
    for warning in warnings:
        log.warning("%s", warning)
    difference = compare_runs(runs[0], runs[1], (str(a.model), str(b.model)), args.by)
    if args.html:
        write_page(difference_page(difference, runs, (a.model, b.model), warnings), args.html)
    if args.json:
        cli.print_json(difference)
        return 0
    print(*difference_sentences(difference), sep="\n")
    print()
    cli.print_table(difference_rows(difference), f"{a.model.stem} and {b.model.stem} on {difference.target}")
    return 0


if __name__ == "__main__":
    cli.run(main)
