"""Predicts a language model's time to first token, time per further token, memory and energy, without running it there.

Reads a folder as onnxruntime-genai's builder writes it (genai_config.json and an ONNX file), a decoder's ONNX file with a cache
of keys and values, or a pair of files that run the prompt and the further tokens; and what training learned for the target.
It finds the sizes of all dimensions, and prints one row for each batch and each length of the prompt: the time to first token,
the time of a further token at the start, in the middle and at the end, the whole request, tokens per second, weights, cache and
peak memory, the largest batch and the longest context that fit, and joules per token. docs/llm.md explains the method, and what
is not known.

onnxruntime-genai allocates its cache for max_length tokens before the first run. The config's max_length is the model's longest
context, for which the memory often does not suffice; --max-length replaces it.

--sweep predicts all combinations of batches and prompts, one line each, by default those of a grid. --csv writes every number,
--plot draws times and tokens per second over the batch, and --html makes a page.

On a machine that is the target, --measure-missing first measures the model's kernels: those of the prompt, and those of a token
at three lengths of the cache, between which times are interpolated.

Exit status: 0 done, 1 an error that the message explains, 2 wrong usage, 3 a rough estimate (with --fail-on-rough), 4 a missed
--ttft-ms or --tpot-ms.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hase.inference.library.predictor import Predictor
from hase.inference.llm.language_model import LanguageModel, language_model
from hase.inference.llm.predicting import measure_missing, requests_with_runs
from hase.inference.llm.requests import LlmRequest, request_for
from hase.inference.prediction.conditions import AS_USUAL, PaceAsked
from hase.inference.reporting.language_models import print_answers, requests_page, sweep_charts, warned_requests, write_table
from hase.utils import cli
from hase.utils.logger import get_logger
from hase.utils.pages.charts import write_plot
from hase.utils.pages.rendering import write_page

if TYPE_CHECKING:
    from hase.inference.llm.answers import LlmPrediction

log = get_logger("predict")

BATCHES, PROMPTS = (1, 2, 4, 8, 16, 32), (128, 512, 2048, 8192)  # of a sweep
EXAMPLES = """
python inference/predict_llm.py --model llama-int4/ --prompt 1024 --generate 256 --batch 1,8 --on h200
python inference/predict_llm.py --model llama-int4/ --prompt 1024 --generate 256 --max-length 1280 --on h200 --json
python inference/predict_llm.py --model llama-int4/ --ttft-ms 200 --tpot-ms 20 --batch 16 --on h200
python inference/predict_llm.py --model llama-int4/ --sweep --csv sweep.csv --plot sweep.svg --on h200
python inference/predict_llm.py --model llama-int4/ --sweep --batch 1,4,16 --prompt 512,4096 --on h200 --html page.html
python inference/predict_llm.py --model decoder.onnx --prompt 512 --generate 128 --on h200  # needs your own
python inference/predict_llm.py --model prefill.onnx --decode-model decode.onnx --on h200  # needs your own pair
python inference/predict_llm.py --model llama-int4-cpu/ --prompt 128 --generate 64 --measure-missing  # on this CPU
"""


def options() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR|FILE",
                        help="a folder with genai_config.json, or with a decoder's one or two ONNX files; or such a file")
    parser.add_argument("--decode-model", type=Path, metavar="FILE",
                        help="the ONNX file that runs each further token, if --model runs prompts only")
    parser.add_argument("--prompt", type=cli.counts, metavar="N[,N…]",
                        help="tokens of each prompt; in a batch all are padded to the longest (default: 1024)")
    parser.add_argument("--generate", type=cli.count, default=256, metavar="N",
                        help="tokens generated for each prompt (default: 256)")
    parser.add_argument("--batch", type=cli.counts, metavar="N[,N…]", help="number of prompts that run together (default: 1)")
    parser.add_argument("--max-length", type=cli.count, metavar="N",
                        help="tokens of prompt and answer for which the cache is allocated (default: the config's)")
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE",
                        help="size of a dimension whose role is unknown; an error names such dimensions (repeatable)")
    cli.add_target(parser)
    parser.add_argument("--sweep", action="store_true",
                        help=f"one line for each batch and prompt (default: batches {', '.join(map(str, BATCHES))}; prompts "
                             f"{', '.join(map(str, PROMPTS))}, as far as the model's context allows)")
    parser.add_argument("--csv", type=cli.out_file, metavar="FILE", help="write every number as a table")
    parser.add_argument("--plot", type=cli.plot_file, metavar="FILE", help="draw times over the batch: an .svg, .png or .pdf")
    cli.add_html(parser)
    parser.add_argument("--ttft-ms", type=cli.positive, metavar="MS", help="say whether the time to first token is within this")
    parser.add_argument("--tpot-ms", type=cli.positive, metavar="MS",
                        help="say whether the mean time per further token is within this")
    cli.add_host_pace(parser, "what benchmark/host_pace.py measured here in the last ten minutes")
    parser.add_argument("--measure-missing", action="store_true",
                        help="first measure here the kernels that were never measured, or only unsteadily; this machine must "
                             "be the target")
    parser.add_argument("--fail-on-rough", action="store_true",
                        help=f"end with status {cli.EXIT_ROUGH} where an answer is a rough estimate")
    cli.add_no_weights(parser)
    cli.add_trust(parser)
    cli.add_estimators(parser)
    return parser


def requested(args: argparse.Namespace, model: LanguageModel) -> list[LlmRequest]:
    """The requests that the options describe. The default prompts of a sweep are only those that the model's context allows."""
    batches = args.batch or (BATCHES if args.sweep else (1,))
    prompts = args.prompt or (PROMPTS if args.sweep else (1024,))
    if args.sweep and not args.prompt:
        most = min((length for length in (args.max_length or model.max_length, model.context_length) if length),
                   default=args.generate + prompts[-1])
        prompts = [prompt for prompt in prompts if prompt + args.generate <= most] or [max(1, most - args.generate)]
    return [request_for(model, batch, prompt, args.generate, args.max_length)
            for batch in dict.fromkeys(batches) for prompt in dict.fromkeys(prompts)]


def report(args: argparse.Namespace, answers: Sequence[LlmPrediction]) -> int:
    """Prints, writes and draws the answers. Returns the exit status."""
    for warning in warned_requests(answers):
        log.warning("%s", warning)
    if args.csv:
        write_table(answers, args.csv)
    if args.plot:
        rough = " (rough estimates among them)" if any(answer.rough_estimate for answer in answers) else ""
        write_plot(sweep_charts(answers), args.plot, f"{answers[0].model} on {answers[0].target}\n{answers[0].generate} tokens "
                   f"generated{rough}; × does not fit in the memory")
    if args.json:
        cli.print_json([answer.model_dump(mode="json") for answer in answers])
    else:
        print_answers(answers, args.sweep)
    if args.fail_on_rough and any(answer.rough_estimate for answer in answers):
        return cli.EXIT_ROUGH
    return cli.EXIT_SLO_MISSED if any(not objective.met for answer in answers for objective in answer.objectives) else 0


def main() -> int:
    parser = options()
    args = parser.parse_args()
    if args.measure_missing and args.strict:
        parser.error("--measure-missing: with --strict, measured times are not used: leave one of them out")
    if args.measure_missing and args.no_weights:
        parser.error("--measure-missing may run the model itself, which needs the weights: leave --no-weights out")
    if args.tpot_ms and args.generate == 1:
        parser.error("--tpot-ms: a request for one token has no further tokens; raise --generate")
    workspace = cli.start(args)
    model = language_model(args.model, args.decode_model, cli.one_size_dims(args.dim), workspace)
    requests = requested(args, model)
    predictor = Predictor(workspace, args.target, strict=args.strict, force=args.force, estimators=args.estimators,
                          any_device=True, no_weights=args.no_weights)
    if args.measure_missing:
        measure_missing(predictor, model, requests)
    pace = PaceAsked(args.host_pace, args.machine).now(predictor.fitted, AS_USUAL)
    predicted = [(answer.judged(args.ttft_ms, args.tpot_ms), runs)
                 for answer, runs in requests_with_runs(predictor, model, requests, pace)]
    if args.html:
        write_page(requests_page(model, predicted, predictor.fitted), args.html)
    return report(args, [answer for answer, _ in predicted])


if __name__ == "__main__":
    cli.run(main)
