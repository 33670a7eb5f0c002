"""A model's latency as a function of the load: mean, p50, p95 and p99, from an idle GPU to one that is always busy.

Reads the model and what training learned for the target, above all how its GPU is shared. The load is the share of the time
for which the background is busy while the model is idle. Only this share varies: the waits are those next to an average of the
measured backgrounds, and the length of the cycle is their median. Prints a table, with the 90 % interval of p95; writes it to
--out, draws it to --plot, and makes a page of it with --html.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hase.inference.library.predictor import POINTS, Predictor
from hase.inference.reporting.comparisons import curve_chart, load_page
from hase.inference.sharing.shared_models import LoadPoint
from hase.utils import cli, files
from hase.utils.logger import get_logger
from hase.utils.pages.charts import write_plot
from hase.utils.pages.rendering import write_page

EXAMPLES = """
python inference/load_curve.py --model resnet18.onnx --on h200
python inference/load_curve.py --model resnet18.onnx --on h200 --batch 8 --out curve.csv
python inference/load_curve.py --model resnet18.onnx --on h200 --plot curve.svg --slo-ms 5 --html page.html
"""

log = get_logger("load_curve")


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    cli.add_model(parser)
    cli.add_dim(parser)
    cli.add_static(parser)
    cli.add_target(parser)
    parser.add_argument("--points", type=cli.count, default=POINTS, metavar="N",
                        help=f"loads, from idle to always busy (default: {POINTS})")
    parser.add_argument("--out", type=cli.out_file, metavar="FILE", help="write the curve as CSV")
    parser.add_argument("--plot", type=cli.plot_file, metavar="FILE", help="draw it: an .svg, .png or .pdf")
    cli.add_html(parser)
    parser.add_argument("--slo-ms", type=cli.positive, metavar="MS", help="a line at this latency in the plot and on the page")
    cli.add_trust(parser)
    args = parser.parse_args()
    if args.points < 2:
        parser.error("--points: two at least, idle and always busy")
    if args.slo_ms and not (args.plot or args.html):
        parser.error("--slo-ms is a line in the plot: it goes with --plot FILE or --html FILE")
    workspace = cli.start(args)
    predictor = Predictor(workspace, args.target, strict=args.strict, force=args.force, any_device=True)
    curve = predictor.curve(args.model, args.points, dims=cli.one_size_dims(args.dim), static=args.static)
    for warning in curve.warnings:
        log.warning("%s", warning)
    if args.out:
        ends = "p95_low_ms", "p95_high_ms"
        files.write_csv(args.out, [*LoadPoint.model_fields, *ends, "rough_estimate"], [
            point.model_dump() | dict(zip(ends, curve.interval_ms(point.p95_ms), strict=True)) | {
                "rough_estimate": curve.rough_estimate} for point in curve.points])
    rough = " (a rough estimate)" if curve.rough_estimate else ""
    if args.plot:
        write_plot([curve_chart(curve, args.slo_ms)], args.plot, f"{curve.model}\n{curve.target}{rough}")
    if args.html:
        write_page(load_page(curve, predictor.fitted, args.slo_ms), args.html)
    if args.json:
        cli.print_json(curve)
    else:
        cli.print_table(curve.rows, f"{curve.model} on {curve.target}{rough}")
    return 0


if __name__ == "__main__":
    cli.run(main)
