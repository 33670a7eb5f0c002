"""Phase 7.1: how long ONNX Runtime takes to run a model on a target, without running it there.

Reads the model (any ONNX file; a bare name is also looked for in model_zoo), what training learned for the target, and
inference/config.yaml. Prints the latency, where it comes from and which kernels dominate; with several sizes of a
dynamic dimension a row for each, which is how to choose a batch. Writes nothing but, with --trace, the predicted timeline,
and with --beside a real run in the same file.

Beside other work the latency is a distribution: its mean and percentiles stand in the row. --slo-ms says whether an objective
is met, by how much, and beside how much other work it still would be. --watch predicts again and again as the load changes,
until Ctrl-C, and --export serves the latest prediction to Prometheus; a reading that fails is a line too, and none is idle.

On a machine that is the target, --measure-missing first has the model's kernels measured that never were: the collector adds
them to the target's dataset (as benchmark/config.yaml says, idle), and they are looked up from then on, without a training.
Where nothing was trained yet, that begins with stated constants for how kernels add up; a training replaces them.

How fast the host dispatches decides the latency of small models on a GPU (--host-pace, --machine; benchmark/host_pace.py).
Where it is not known, the interval is as wide as hosts differ.

An answer that rests on operators that were never measured is marked as a rough estimate (inference/core/doubt.py). Exit status:
0 done, 1 an error that the message explains, 2 wrong usage, 3 a rough estimate (with --fail-on-rough), 4 a missed --slo-ms.

--json prints a list with an object for each size, also where there is one; with --watch, an object a line.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import gc
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmark.load.pace_reading import read_pace
from benchmark.load.probe_reading import read_reading
from inference.core.host_pace import HostPace, PaceAsked
from inference.core.sizes import never_falling
from inference.core.sources import record_of
from inference.core.targets import fitted_for, local_targets
from inference.core.ways import WayOfRunning
from inference.live.load import CONFIG_FILE, InferenceConfig, Load, current_load, fields_asked
from inference.sharing.co_runner import probe_of, probed
from ort_analysis.graph.optimized_once import optimized_once
from utils import cli
from utils.config import load_config
from utils.errors import UserError
from utils.files import write_json
from utils.logger import get_logger
from utils.paths import ROOT
from utils.trace_events import MEASURED, document, read_processes

if TYPE_CHECKING:
    from graph_model.simulation.sharing import OtherWork
    from inference.core.answers import Prediction
    from inference.core.missing_kernels import Filled
    from inference.sharing.slo import SloUnderLoad

log = get_logger("predict")

WATCH_S = 15.0
EXAMPLES = """
python inference/predict_model_latency.py --model resnet18.onnx
python inference/predict_model_latency.py --model resnet18.onnx --dim batch=1,2,4,8
python inference/predict_model_latency.py --model model.onnx --strict --top 10 --json
python inference/predict_model_latency.py --model model.onnx --target nvidia-h200 --metrics busy.json --slo-ms 5
python inference/predict_model_latency.py --model model.onnx --config prometheus.yaml --watch --slo-ms 5 --export 9401
python inference/predict_model_latency.py --model model.onnx --probe --watch 5
python inference/predict_model_latency.py --model model.onnx --measure-missing
python inference/predict_model_latency.py --model model.onnx --target nvidia-h200 --trace timeline.json
python inference/predict_model_latency.py --model model.onnx --target nvidia-h200 --cuda-graph
python inference/predict_model_latency.py --model model.onnx --target nvidia-h200 --machine machine.json
python inference/predict_model_latency.py --model model.onnx --host-pace measure
python inference/predict_model_latency.py --model model.onnx --target nvidia-h200 --trace both.json --beside real.json
"""


def summary(found: Prediction) -> dict[str, Any]:
    """A prediction as one row of a table."""
    return {
        "model": found.model, "batch": found.batch,
        **({"sizes": "fixed" if found.static else "left open"} if found.dims else {}),
        **({"host pace": found.host_pace} if found.host_pace is not None else {}),
        **(found.under_load.columns() if found.under_load else {"latency (ms)": found.latency_ms}),
        "90 % between (ms)": "{:.4g} and {:.4g}".format(*found.interval_ms),
        "items/s": found.items_per_second, "peak memory (MiB)": found.peak_memory_mib,
        "Σ kernels (ms)": found.kernel_sum_ms,
        **{name: f"{share:.0%}" for name, share in found.time_share.items()},
    }


def kernel_rows(found: Prediction, top: int) -> list[dict[str, Any]]:
    """The `top` kernels that take most of the time, as rows of a table."""
    return [
        {"kernel": kernel.id, "type": kernel.type, "runs": kernel.count, "each (ms)": kernel.latency_ms,
         "total (ms)": kernel.total_ms, "share": f"{kernel.share:.1%}", "provenance": kernel.provenance}
        for kernel in found.kernels[:top]]


def print_predictions(found: Sequence[Prediction], top: int) -> None:
    """A row a prediction on stdout, the dominating kernels where there is one, and on stderr what they hold for."""
    first = found[0]
    used = first.composition
    base = "longest path" if used.kind == "critical_path" else "Σ"
    if used.kind == "sum_nodes":
        base += f" {1000 * used.node_ms:+.3g} µs a node"
    how = (f"{used.alpha:.4g}·{base} {used.beta_ms:+.4g} ms over kernels by label {used.label}" if used.costs is None
           else "the end of the host's and the GPU's track, kernels by label gpu")
    load = first.load if isinstance(first.load, str) else ", ".join(f"{k}={v:g}" for k, v in first.load.items())
    if first.under_load and first.under_load.told_by == "probe":
        load = ", ".join(filter(None, (load, "as the probe met it")))
    log.info("target %s, %s, load %s; latency = %s", first.target, first.way.in_words, load, how)
    mark = any(one.rough_estimate for one in found)
    cli.print_table([summary(one) | ({"rough estimate": "yes" if one.rough_estimate else "no"} if mark else {})
                     for one in found], "predicted latency")
    if len(found) == 1 and top:
        print()
        cli.print_table(kernel_rows(first, top), f"the kernels that take most of {first.kernel_sum_ms:.4g} ms")


def advise_measuring(args: argparse.Namespace, found: Sequence[Prediction]) -> None:
    """Logs the command that measures doubtful kernels, where this machine is the target and look-ups would help."""
    doubtful = [one for one in found if one.estimated_operators or one.doubtful_operators]
    if (not doubtful or args.strict or args.measure_missing or doubtful[0].load != "idle"
            or doubtful[0].target not in {target.name for target in local_targets()}):
        return
    command = ["python", "inference/predict_model_latency.py", "--model", str(args.model), "--measure-missing",
               *(["--static"] if args.static else [])]
    for option, values in (("--dim", args.dim), ("--target", [args.target] if args.target else []),
                           ("--workspace", [str(args.workspace)] if args.workspace != ROOT else [])):
        for value in values:
            command += [option, value]
    log.warning("this machine is the target; have them measured with: %s", shlex.join(command))


def verdict(found: Prediction, slo: SloUnderLoad) -> str:
    """A line that says whether an objective is met, by how much, and beside how much other work it still would be."""
    what = f"p{slo.percentile:g}" if found.under_load else "latency"
    could = f" (it could be {slo.could_be_ms:.4g})"
    said = (f"{found.model}: {what} {slo.latency_ms:.4g} ms{could} {'meets' if slo.met else 'misses'} the SLO of "
            f"{slo.limit_ms:g} ms by {abs(slo.headroom_ms):.4g} ms, {abs(slo.headroom_percent):.3g} %; ")
    if slo.unknown_because is not None:
        return said + f"what load still meets it is not known: {slo.unknown_because}"
    if slo.highest_busy_share is None:
        return said + f"p{slo.percentile:g} misses it on an idle device too"
    return said + f"p{slo.percentile:g} meets it beside a background busy for up to {slo.highest_busy_share:.1%} of the time"


def tell(filled: Filled) -> None:
    """What was measured for the prediction, on stderr."""
    if filled.measured:
        log.info("measured %d kernels in %.1f s; %.1f s with all that goes with it", filled.measured, filled.measuring_s,
                 filled.seconds)
    else:
        log.info("nothing to measure: every kernel was measured before, or tried")
    if filled.left:
        log.warning("%d kernels could not be measured and stay predicted: %s", len(filled.left), ", ".join(filled.left))


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    cli.add_model(parser)
    cli.add_dim(parser)
    cli.add_static(parser)
    cli.add_target(parser)
    cli.add_load(parser)
    cli.add_way(parser)
    parser.add_argument("--top", type=cli.whole, default=5, metavar="N", help="show the N dominating kernels (default: 5)")
    parser.add_argument("--trace", type=cli.out_file, metavar="FILE",
                        help="write the predicted timeline, to be opened at ui.perfetto.dev or chrome://tracing")
    parser.add_argument("--measure-missing", action="store_true",
                        help="first measure the kernels that never were; needs a machine that is the target")
    parser.add_argument("--beside", type=Path, metavar="REAL",
                        help="put a real run into --trace's file too, as benchmark/run_anatomy.py --trace wrote it")
    pace_options = parser.add_mutually_exclusive_group()
    pace_options.add_argument(
        "--host-pace", type=cli.pace, metavar="RATIO|measure",
        help="how many times as long as usual the GPU's host takes to dispatch; measure: on this machine now, which is the "
             "target (default: as the config's Prometheus says, else as benchmark/host_pace.py wrote here not longer than ten "
             "minutes ago; with --watch on the target, measured each time)")
    pace_options.add_argument("--machine", type=Path, metavar="FILE",
                              help="the machine's host pace, as benchmark/host_pace.py --out wrote it there")
    parser.add_argument("--slo-ms", type=cli.positive, metavar="MS", help="whether the latency keeps to this, and by how much")
    parser.add_argument("--slo-percentile", type=cli.percentile, metavar="P", help="… which percentile of it (default: 95)")
    parser.add_argument("--probe", nargs="?", const="", metavar="FILE",
                        help="learn what else runs from the sharing probe: read on this machine now (with --watch, each time), "
                             "which is the target, or from what benchmark/sharing_probe.py --out wrote (default: as the "
                             "config's Prometheus says, if its exporter reads one)")
    parser.add_argument("--watch", type=cli.positive, nargs="?", const=WATCH_S, metavar="S",
                        help=f"a line with the load and the prediction every S seconds (default: {WATCH_S:g}), until Ctrl-C")
    parser.add_argument("--export", type=cli.address, metavar="[ADDRESS:]PORT",
                        help="with --watch: serve the latest prediction to Prometheus, on this machine alone unless an address "
                             "is given (0.0.0.0: to all); port 0: a free one")
    parser.add_argument("--fail-on-rough", action="store_true",
                        help=f"end with status {cli.EXIT_ROUGH} where a prediction is a rough estimate")
    cli.add_trust(parser)
    args = parser.parse_args()
    sizes = cli.combinations(cli.parse_dims(args.dim))
    if args.trace and len(sizes) > 1:
        parser.error("--trace draws one run: give each --dim one size")
    if args.measure_missing and (args.strict or args.metrics):
        parser.error("--measure-missing: idle times are looked up neither with --strict nor under a load")
    if args.beside and not args.trace:
        parser.error("--beside goes with --trace FILE, which then holds both runs")
    if args.slo_percentile and not args.slo_ms:
        parser.error("--slo-percentile goes with --slo-ms MS")
    if args.watch and (len(sizes) > 1 or args.trace or args.measure_missing):
        parser.error("--watch follows one size of one model, without --trace and --measure-missing")
    if args.probe is not None and args.measure_missing:
        parser.error("--measure-missing: idle times are not looked up beside other work; leave --probe out")
    if args.probe and args.watch:
        parser.error("--probe FILE is one reading of what else runs; with --watch, leave FILE out")
    if args.export and not args.watch:
        parser.error("--export goes with --watch")
    workspace = cli.start(args)
    from inference.core.prediction import predict
    from inference.sharing.slo import PERCENTILE, slo_under_load

    workspace.find_model(args.model)  # what is not there is told before anything is measured
    if args.machine:
        read_pace(args.machine)
    if __name__ == "__main__":  # its modules stay to the end, so Python need not look through them then: a tenth of the time.
        gc.freeze()  # Boosters, which must still be found then, are not there yet, nor is xgboost
    real: list[dict[str, Any]] = []
    if args.beside:  # before the predictions: it may be no trace
        real = read_processes(args.beside, MEASURED, 2)
    config = load_config(args.config or CONFIG_FILE, InferenceConfig)
    if args.measure_missing and config.prometheus.url is not None:
        raise UserError("--measure-missing: idle times are not looked up under a load; set prometheus.url to null in "
                        f"{args.config or CONFIG_FILE}")
    asked = config.prometheus.url is not None and not args.metrics
    fields = fields_asked(fitted_for(workspace, args.target)) if asked else ()
    probe = asked and args.probe is None and fitted_for(workspace, args.target).sharing is not None
    way = WayOfRunning(io=args.io, cuda_graph=args.cuda_graph)
    host = PaceAsked(args.host_pace, args.machine, watched=bool(args.watch))
    percentile = args.slo_percentile or PERCENTILE

    def load_now(config: InferenceConfig) -> Load:
        asks_pace = asked and host.of_prometheus(fitted_for(workspace, args.target), way)
        return current_load(config, args.metrics, fields, probe, asks_pace)

    def pace_now(load: Load) -> float | HostPace | None:
        return host.now(fitted_for(workspace, args.target), way, load.host_probe_us)

    def other_than(load: Load) -> OtherWork | None:
        """As a probe met it: the one that --probe names, or else Prometheus's."""
        if args.probe is None:
            return probe_of(fitted_for(workspace, args.target), load)
        return probed(fitted_for(workspace, args.target), read_reading(Path(args.probe)) if args.probe else None)

    def predicted(dims: dict[str, int], load: Load, other: OtherWork | None, pace: float | HostPace | None) -> Prediction:
        return predict(args.model, dims=dims, target=args.target, strict=args.strict, load=load.metrics, workspace=workspace,
                       way=way, force=args.force, notices=load.notices, other=other, static=args.static, host_pace=pace)

    if args.watch:
        from inference.live.follow import follow
        from inference.live.watch import Watch

        if (not asked and not args.metrics and args.probe is None
                and not host.is_followed(fitted_for(workspace, args.target), way)):
            raise UserError(f"--watch: nothing says what else runs; set prometheus.url in {args.config or CONFIG_FILE}, or "
                            "give --metrics FILE, which is read each time, or --probe on the GPU itself")
        if asked and not fields:
            raise UserError("--watch: the predictors were trained without metrics, so no load changes what they say")
        unread = Load()  # what can't be used ends the command at once
        for warning in predicted(sizes[0], unread, other_than(unread), pace_now(unread)).warnings:
            log.warning("%s", warning)

        def followed() -> Prediction:
            load = load_now(config.never_idle())
            return predicted(sizes[0], load, other_than(load), pace_now(load))

        follow(Watch(followed, args.watch, args.slo_ms, percentile), args.export, args.json)
        return 0
    load = load_now(config)
    with optimized_once():
        if args.measure_missing:
            from inference.core.missing_kernels import measure_missing

            tell(measure_missing(args.model, sizes, target=args.target, workspace=workspace, force=args.force,
                                 static=args.static))
        other, pace = other_than(load), pace_now(load)
        found = never_falling([predicted(dims, load, other, pace) for dims in cli.track(sizes, "predicting")])
    slos = [slo_under_load(one, args.model, args.slo_ms, percentile, workspace, args.force, other) for one in found
            ] if args.slo_ms else [None] * len(found)
    if args.trace:
        from inference.core.timeline import trace_of

        provider = fitted_for(workspace, args.target).target.flavour.device
        record = record_of(workspace.find_model(args.model), provider, found[0].dims, args.static)
        write_json(args.trace, document([*trace_of(found[0], record)["traceEvents"], *real]))
    for warning in dict.fromkeys(warning for one in found for warning in one.warnings):
        log.warning("%s", warning)
    advise_measuring(args, found)
    if args.json:
        dumped = [one.model_dump(mode="json") | ({"slo": slo.model_dump(mode="json")} if slo else {})
                  for one, slo in zip(found, slos, strict=True)]
        cli.print_json(dumped)
    else:
        print_predictions(found, args.top)
        for one, slo in zip(found, slos, strict=True):
            if slo:
                print(verdict(one, slo))
    if args.fail_on_rough and any(one.rough_estimate for one in found):
        return cli.EXIT_ROUGH
    return cli.EXIT_SLO_MISSED if any(slo and not slo.met for slo in slos) else 0


if __name__ == "__main__":
    cli.run(main)
