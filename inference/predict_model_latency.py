"""How long ONNX Runtime takes to run a model on a target, without running it there.

Reads the model (any ONNX file; a bare name is also looked for in model_zoo), or its graph as dag_critical_path.py wrote it
(--dag), what training learned for the target, and inference/config.yaml. Prints the latency, where it comes from and which
kernels dominate. With several sizes of a dynamic dimension it prints one row per size, which helps to choose a batch; --sizes
names sizes that go together. Writes nothing, except with --html a page to look at, with --trace the predicted timeline, and
with --beside a real run in the same file.

Answers hold for one GPU or one CPU, and for the version of ONNX Runtime that each names, with its CPU and CUDA providers; not
for TensorRT or other providers. Tensors may be float32, float16, bfloat16, float64 or integers; other types are refused. More
in docs/questions.md, "What is not answered".

Several models (files, folders, patterns; --model may be repeated) have a row each, the fastest first: by latency, or by latency
per item where batches differ; a line below says which. Each takes those sizes of --dim that it has. A model that can't be
predicted has an error and no row, and the exit status is 1.

Below a table of several batches, a line names the best one for throughput, and with --slo-ms the best that keeps to it, with
the chance that it does, by the interval.

While other work shares the GPU, the latency is a distribution: the row holds its mean and percentiles. --slo-ms says whether an
objective is met, by how much, and up to which load it still would be. --watch repeats the prediction as the load changes, until
Ctrl-C, and --export serves the latest one to Prometheus. A prediction that fails has a line too; the device is never taken for
idle then.

On a machine that is the target, --measure-missing first measures the model's kernels that were never measured, and again those
that were measured while the machine was unsteady: the collector adds them to the target's dataset (as benchmark/config.yaml
says, idle), and they are looked up from then on, without a training. Where nothing was trained yet, default constants say how
kernels add up, until a training replaces them. The time of some operators depends on values (trees, TopK, NonZero …): it is
measured with standardised random inputs, or with those in a file (--inputs).

On a GPU the latency of small models depends on how fast the host dispatches (--host-pace, --machine; benchmark/host_pace.py).
Where that is unknown, the interval covers slow and fast hosts.

An answer that rests on operators that were never measured is marked as a rough estimate
(inference/prediction/uncertainty.py). Exit status: 0 done, 1 an error that the message explains, 2 wrong usage, 3 a rough
estimate (with --fail-on-rough), 4 a missed --slo-ms.

With --energy it also prints what a run takes of the device's energy, per run and per item, and the mean power (docs/energy.md).

--json prints a list with one object per size, even for a single size; of several models in the order of the rows, and with
the model's file. With --watch, it prints one object per line.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # until everything is imported: none of it is garbage, and looking for some takes a tenth of the time
if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hase.inference.compare.choices import best_batches, order_of
from hase.inference.library.predictor import Predictor
from hase.inference.live.load import CONFIG_FILE, InferenceConfig, LiveSources, LoadReading
from hase.inference.prediction.answers import PERCENTILE, Prediction, widen_to_smaller_sizes
from hase.inference.prediction.conditions import PaceAsked, RunMode
from hase.inference.prediction.run import predicted_trace
from hase.inference.prediction.sources import Question, pair_with_sizes
from hase.inference.prediction.targets import local_targets
from hase.inference.reporting.predictions import prediction_page
from hase.inference.reporting.printed import Answer, answers_json, basis, headline, log_notes, print_answers, print_watch
from hase.ort_analysis.isolated.analysis import optimized_once
from hase.records.host_pace import read_pace
from hase.records.traces import MEASURED, document, read_processes
from hase.utils import cli
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.files import write_json
from hase.utils.logger import get_logger, progress
from hase.utils.pages.rendering import write_page
from hase.utils.paths import default_root
from hase.utils.text import names_by_warning

if TYPE_CHECKING:
    from hase.inference.prediction.conditions import LoadOptions
    from hase.inference.prediction.run import PredictedRun
    from hase.inference.prediction.sources import Precision

log = get_logger("predict")

WATCH_S = 15.0
EXAMPLES = """
python inference/predict_model_latency.py --model resnet18.onnx
python inference/predict_model_latency.py --model resnet18.onnx --batch 1,2,4,8
python inference/predict_model_latency.py --model model_zoo/models --on h200 --batch 1,8
python inference/predict_model_latency.py --model decoder.onnx --sizes seq=1,past=128 seq=1,past=1024  # needs your own
python inference/predict_model_latency.py --model resnet18_b8.onnx --batch 1,16,64  # needs a model of a fixed batch
python inference/predict_model_latency.py --model resnet18.onnx --strict --top 10 --json
python inference/predict_model_latency.py --dag graph_model/model_DAG/*/resnet18_fp32_b16_224x224.json
python inference/predict_model_latency.py --model resnet18.onnx --measure-missing
python inference/predict_model_latency.py --model trees.onnx --measure-missing --inputs rows.npz  # needs your own
python inference/predict_model_latency.py --model resnet18.onnx --on h200 --batch 1,2,4,8 --energy
python inference/predict_model_latency.py --model resnet18.onnx --on h200 --host-pace 1.15 --slo-ms 50
python inference/predict_model_latency.py --model resnet18.onnx --on h200 --dtype fp32,fp16
python inference/predict_model_latency.py --model resnet18.onnx --on l40s --batch 1,8
python inference/predict_model_latency.py --model resnet18.onnx --on h200 --cuda-graph
python inference/predict_model_latency.py --model resnet18.onnx --on h200 --trace timeline.json
python inference/predict_model_latency.py --model resnet18.onnx --batch 1,2,4,8 --on h200 --html page.html
python inference/predict_model_latency.py --model resnet18.onnx --trace t.json --beside real.json  # needs run_anatomy.py
python inference/predict_model_latency.py --model resnet18.onnx --on h200 --metrics busy.json  # needs its load, in a file
python inference/predict_model_latency.py --model resnet18.onnx --config my.yaml --watch --export 9401  # needs a Prometheus
python inference/predict_model_latency.py --model resnet18.onnx --probe --watch 5  # needs a GPU
python inference/predict_model_latency.py --model resnet18.onnx --host-pace measure  # needs a GPU
python inference/predict_model_latency.py --model resnet18.onnx --on h200 --machine host.json  # needs host_pace.py
"""


def option_parser() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    parser = cli.parser(__doc__, EXAMPLES)
    source = parser.add_mutually_exclusive_group(required=True)
    cli.add_models(source, required=False)
    source.add_argument("--dag", type=Path, metavar="FILE", help="a model's graph of kernels, as dag_critical_path.py wrote "
                        "it; its kernel record must still be there")
    cli.add_dim(parser)
    cli.add_sizes(parser)
    cli.add_rebatch(parser)
    cli.add_static(parser)
    cli.add_no_weights(parser)
    cli.add_target(parser)
    cli.add_load(parser, CONFIG_FILE)
    cli.add_run_mode(parser)
    cli.add_dtype(parser)
    parser.add_argument("--explain", action="store_true",
                        help="also print what the answer rests on: the kernels with the most time, every note in full, and how "
                             "the latency was put together")
    parser.add_argument("--top", type=cli.whole, metavar="N",
                        help="show the N kernels with the most time (default: 5 with --explain, else none)")
    parser.add_argument("--show-sum", action="store_true",
                        help="show the plain α·Σ+β beside the prediction (--json always has it as sum_latency_ms)")
    parser.add_argument("--trace", type=cli.out_file, metavar="FILE",
                        help="write the predicted timeline, for ui.perfetto.dev or chrome://tracing")
    parser.add_argument("--measure-missing", action="store_true",
                        help="first measure the kernels that were never measured, or only unsteadily; this machine must be the "
                             "target")
    cli.add_html(parser)
    cli.add_inputs(parser)
    parser.add_argument("--beside", type=Path, metavar="REAL",
                        help="put a real run into --trace's file too, as benchmark/run_anatomy.py --trace wrote it")
    cli.add_host_pace(parser, "from the config's Prometheus, else what benchmark/host_pace.py measured here in the last ten "
                              "minutes; with --watch on the target, measured each time")
    parser.add_argument("--slo-ms", type=cli.positive, metavar="MS",
                        help="say whether the latency meets this limit, and by how much")
    parser.add_argument("--slo-percentile", type=cli.percentile, metavar="P",
                        help="the percentile of the latency that --slo-ms limits (default: 95)")
    parser.add_argument("--probe", nargs="?", const="", metavar="FILE",
                        help="learn what else runs from the sharing probe: read it now on this machine, which must be the "
                             "target (with --watch, each time), or take FILE, which benchmark/sharing_probe.py --out wrote "
                             "(default: the config's Prometheus, if its exporter reads a probe)")
    parser.add_argument("--watch", type=cli.positive, nargs="?", const=WATCH_S, metavar="S",
                        help=f"a line with the load and the prediction every S seconds (default: {WATCH_S:g}), until Ctrl-C")
    parser.add_argument("--export", type=cli.address, metavar="[ADDRESS:]PORT",
                        help="with --watch: serve the latest prediction to Prometheus, on this machine alone unless an address "
                             "is given (0.0.0.0: to all); port 0: a free one")
    cli.add_web_config(parser)
    parser.add_argument("--energy", action="store_true",
                        help="also predict energy and power, of a device that does nothing else")
    parser.add_argument("--fail-on-rough", action="store_true",
                        help=f"end with status {cli.EXIT_ROUGH} where a prediction is a rough estimate")
    cli.add_trust(parser)
    cli.add_estimators(parser)
    return parser


def check_together(parser: argparse.ArgumentParser, args: argparse.Namespace, sizes: Sequence[Any]) -> None:
    """Ends the command with a usage error if options exclude each other; `sizes`: those to predict."""
    probe, measuring = args.probe is not None, args.measure_missing
    excluded = (
        (args.trace and len(sizes) > 1, "--trace draws one run: give each --dim one size, and --sizes one set"),
        (measuring and (args.strict or args.metrics),
         "--measure-missing: idle times are looked up neither with --strict nor under a load"),
        (measuring and args.no_weights,
         "--measure-missing may run the model itself, which needs its weights: leave --no-weights out"),
        (args.inputs and not measuring, "--inputs are what --measure-missing measures with; nothing else runs the model"),
        (args.dtype != [None] and (args.trace or args.watch or measuring or args.dag),
         "--dtype fp16 is predicted: leave --trace, --watch, --measure-missing and --dag out"),
        (args.beside and not args.trace, "--beside goes with --trace FILE, which then holds both runs"),
        (args.slo_percentile and not args.slo_ms, "--slo-percentile goes with --slo-ms MS"),
        (args.watch and (len(sizes) > 1 or args.trace or measuring),
         "--watch follows one size of one model, without --trace and --measure-missing"),
        (probe and measuring, "--measure-missing: idle times are not looked up while other work runs; leave --probe out"),
        (args.probe and args.watch, "--probe FILE is one reading of what else runs; with --watch, leave FILE out"),
        (args.energy and (args.watch or args.metrics or probe),
         "--energy is of a device that does nothing else: leave --watch, --metrics and --probe out"),
        (args.html and args.watch, "--html writes one answer, and --watch goes on: leave one of them out"),
        (args.export and not args.watch, "--export goes with --watch"),
        (args.web_config and not args.export, "--web-config goes with --export"))
    for wrong, message in excluded:
        if wrong:
            parser.error(message)


def check_several(parser: argparse.ArgumentParser, args: argparse.Namespace, models: Sequence[Path]) -> None:
    """Ends the command with a usage error if several models are given with an option for one."""
    for option, given, reason in (("--trace", args.trace, "draws one run"), ("--watch", args.watch, "follows one model"),
                                  ("--inputs", args.inputs, "are those of one model")):
        if given and len(models) > 1:
            parser.error(f"{option} {reason}, and --model names {len(models)}: {', '.join(map(str, models[:3]))}"
                         f"{', …' if len(models) > 3 else ''}")


def advise_measuring(args: argparse.Namespace, predictions: Sequence[Prediction]) -> None:
    """Logs the command that measures uncertain kernels, if this machine is the target and it would help."""
    uncertain = [prediction for prediction in predictions
                 if prediction.estimated_operators or prediction.doubtful_operators or prediction.unsteady_share]
    if (not uncertain or args.strict or args.measure_missing or uncertain[0].load != "idle"
            or uncertain[0].target not in {target.name for target in local_targets()}):
        return
    command = ["python", "inference/predict_model_latency.py", "--model", *map(str, args.model), "--measure-missing",
               *(["--static"] if args.static else [])]
    for option, values in (("--dim", args.dim), ("--target", [args.target] if args.target else []),
                           ("--workspace", [str(args.workspace)] if args.workspace != default_root() else [])):
        for value in values:
            command += [option, value]
    if args.sizes:
        command += ["--sizes", *(",".join(f"{name}={size}" for name, size in together.items()) for together in args.sizes)]
    log.warning("this machine is the target; have uncertain kernels measured with: %s", shlex.join(command))


def watch(args: argparse.Namespace, predictor: Predictor, sources: LiveSources, model: Path, dims: dict[str, int]) -> int:
    """Follows the load until Ctrl-C."""
    if not sources.change:
        raise UserError(f"--watch: nothing says what else runs; set prometheus.url in {args.config}, or "
                        "give --metrics FILE, which is read each time, or --probe on the GPU itself")
    if sources.asks_prometheus and not sources.fields():
        raise UserError("--watch: the predictors were trained without metrics, so they predict the same under any load")
    run_mode = sources.run_mode
    first = predictor.predict(model, dims=dims, static=args.static, run_mode=run_mode, **sources.with_load(LoadReading()))
    for warning in first.warnings:  # whatever can't be used has ended the command by now
        log.warning("%s", warning)
    print_watch(predictor.watch(model, sources.now, args.watch, args.slo_ms, args.slo_percentile or PERCENTILE, dims=dims,
                                static=args.static, run_mode=run_mode), args.export, args.json, args.web_config)
    return 0


def predict_all(args: argparse.Namespace, predictor: Predictor, sources: LiveSources,
                questions: Sequence[Question]) -> tuple[list[Answer], dict[Path, str]]:
    """The answers to all questions, for several models by rank; and the errors of models without an answer."""
    load = sources.load()
    with optimized_once():
        if args.measure_missing:  # before the rest is read: perhaps nothing was learned yet
            for question in questions:
                predictor.measure_missing(question.model, question.sizes, static=args.static, inputs=args.inputs).log()
        conditions = sources.with_load(load)
        if len(questions) == 1:
            return answers_to(questions[0], args, predictor, sources.run_mode, conditions), {}
        answers: list[Answer] = []
        failed: dict[Path, str] = {}
        for question in progress(questions, "models"):
            try:
                answers += answers_to(question, args, predictor, sources.run_mode, conditions)
            except UserError as error:
                log.error("%s", error)
                failed[question.model] = str(error)
    return [answers[index] for index in order_of([answer.prediction for answer in answers])], failed


def answers_to(question: Question, args: argparse.Namespace, predictor: Predictor, run_mode: RunMode,
               conditions: LoadOptions) -> list[Answer]:
    """The answers about one model at each of its sizes; `conditions`: the load, and the host's pace."""
    model, sizes = question
    by_type: list[list[tuple[Precision | None, PredictedRun]]] = []
    for dtype in args.dtype:
        runs = [predictor.run(model, dims=dims, static=args.static, run_mode=run_mode, dtype=dtype, **conditions)
                for dims in progress(sizes, "predicting")]
        in_order = widen_to_smaller_sizes([run.prediction for run in runs])
        by_type.append([(dtype, run._replace(prediction=prediction)) for run, prediction in zip(runs, in_order, strict=True)])
    return [Answer(model, dtype, run,
                   predictor.objective(run, args.slo_ms, args.slo_percentile or PERCENTILE, like=conditions["co_runner"])
                   if args.slo_ms else None,
                   predictor.energy(run) if args.energy else None)
            for same_size in zip(*by_type, strict=True) for dtype, run in same_size]


def report(args: argparse.Namespace, answers: Sequence[Answer], several: bool, failed: Mapping[Path, str]) -> int:
    """Prints the answers; returns the exit status. `failed`: the errors of models without an answer."""
    predictions, energies = [answer.prediction for answer in answers], [answer.energy for answer in answers if answer.energy]
    warned = names_by_warning([*((one.model, one.warnings) for one in predictions),
                               *((one.model, one.warnings) for one in energies)])
    log.info("%s", headline(answers))
    advise_measuring(args, predictions)
    best = best_batches(predictions, [answer.slo for answer in answers], [(answer.model, answer.dtype) for answer in answers])
    if args.html:
        write_page(prediction_page(answers, best, warned, several, failed), args.html)
    if args.json:
        cli.print_json(answers_json(answers, best, several))
    else:
        print_answers(answers, best, several, 5 * args.explain if args.top is None else args.top, args.show_sum)
    log_notes(warned, len(answers) if several else 1, args.explain)
    if args.explain:
        log.info("%s", basis(predictions[0]))
    if args.fail_on_rough and any(answer.prediction.rough_estimate or (answer.energy and answer.energy.rough_estimate)
                                  for answer in answers):
        return cli.EXIT_ROUGH
    return cli.EXIT_SLO_MISSED if any(answer.slo and not answer.slo.met for answer in answers) else 0


def main() -> int:
    parser = option_parser()
    args = parser.parse_args()
    sizes = cli.all_sizes(cli.parse_dims(args.dim), args.sizes)
    check_together(parser, args, sizes)
    workspace = cli.start(args)
    if args.dag:
        from hase.graph_model.simulation.dag import record_of_dag  # noqa: PLC0415 - most predictions do not need it

        args.model = [record_of_dag(args.dag, workspace)]
    models = list(dict.fromkeys(workspace.find_models(args.model)))  # before anything is measured: one may be missing
    check_several(parser, args, models)
    if args.machine:
        read_pace(args.machine)
    if __name__ == "__main__":  # modules live to the end, so the garbage collector need not look through them, at exit either
        gc.freeze()  # before xgboost and its boosters are loaded, since boosters must be collected at exit
        gc.enable()
    real = read_processes(args.beside, MEASURED, 2) if args.beside else []  # before the predictions: the file may hold no trace
    config = read_config(args.config, InferenceConfig, args.changes)
    if args.measure_missing and config.prometheus.url is not None:
        raise UserError("--measure-missing: idle times are not looked up under a load; leave prometheus.url out, or give "
                        "--set prometheus.url=null")
    predictor = Predictor(workspace, args.target, strict=args.strict, force=args.force, estimators=args.estimators,
                          any_device=True, no_weights=args.no_weights)
    sources = LiveSources(
        lambda: predictor.fitted, RunMode(io=args.io, cuda_graph=args.cuda_graph), config, args.metrics, args.probe,
        PaceAsked(args.host_pace, args.machine, watched=bool(args.watch)))
    if args.watch:
        return watch(args, predictor, sources, models[0], sizes[0])
    if args.energy:
        _ = predictor.learned_energy  # before the predictions: nothing may have been learned
    questions = pair_with_sizes(models, sizes)
    answers, failed = predict_all(args, predictor, sources, questions)
    if args.trace:
        write_json(args.trace, document([*predicted_trace(answers[0].run)["traceEvents"], *real]))
    status = report(args, answers, len(questions) > 1, failed) if answers else 0
    if failed:
        log.error("%d of %d models have no prediction", len(failed), len(questions))
    return 1 if failed else status


if __name__ == "__main__":
    cli.run(main)
