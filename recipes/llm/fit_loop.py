"""Learns the time of onnxruntime-genai's loop on a CPU besides a model's runs: choosing tokens, memory for a prompt's logits.

Reads the small decoders of --loops, their measurements with onnxruntime-genai (recipes/llm/measure_genai.py), and their
measured kernels (judge.py --measure-missing). Writes generation.json beside this machine's predictors in --workspace, so that
predict_llm.py there counts the loop. Prints what was learned, and the errors of the decoders, each held out in turn.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Iterator

from hase.inference.library.predictor import Predictor
from hase.inference.llm.language_model import language_model
from hase.inference.llm.predicting import AnalysedModel
from hase.inference.llm.requests import count_other_logits, layers_with_cache, request_at_point
from hase.learned import target_files
from hase.records.generations import PHASES, Generation, measured_model_names, measured_points
from hase.training.fits.generation import LoopStep, fit_on_cpu, step_time
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.logger import get_logger, progress
from hase.utils.paths import Workspace

EXAMPLES = """
python recipes/llm/fit_loop.py --workspace out/llm-cpu --loops out/llm-cpu/loop  # after recipes/llm/on_cpu.sh
"""
log = get_logger("generation")


def loop_steps(predictor: Predictor, workspace: Workspace, name: str) -> Iterator[tuple[LoopStep, Generation]]:
    """The measured steps of a model: the prompt, and a token in the middle of the generation."""
    model = language_model(workspace.root / "llm" / "models" / name)
    analysed = AnalysedModel(predictor, model)
    for point in measured_points(workspace, name):
        request = request_at_point(model, point, point.generated)  # whose kernels judge.py measures
        steps = analysed.prompt_step(request), analysed.token_step(request, request.middle_length)
        for phase, step in zip(PHASES, steps, strict=True):
            file, record = analysed.file(step), analysed.record(step)
            run, = predictor.runs([record])
            yield LoopStep(name, point.family, phase, point.batch, point.prompt, file.vocabulary_size, layers_with_cache(file),
                           count_other_logits(record, file, step), run.prediction.latency_ms, step_time(point, phase)[0]), point


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--loops", type=Path, required=True, metavar="DIR",
                        help="a workspace with small decoders, measured with their kernels")
    args = parser.parse_args()
    workspace, loops = cli.start(args), Workspace(args.loops)
    predictor = Predictor(loops, any_device=True)
    target = predictor.fitted.target
    if target.flavour.device != "cpu":
        raise UserError(f"{target.name}: this learns the loop of CPUs; of a GPU's, training/fit_generation.py")
    if not workspace.predictors(target.name).is_dir():
        raise UserError(f"{workspace.predictors(target.name)}: no such folder; measure kernels there first: python "
                        "recipes/llm/judge.py --measure-missing")
    steps = [step for name in progress(measured_model_names(loops), "models")
             for step in loop_steps(predictor, loops, name)]
    if len({step.family for step, _ in steps}) < 2:
        raise UserError(f"{loops.root}: measurements of two decoders at least are needed; do: recipes/llm/on_cpu.sh")
    fitted = fit_on_cpu(target.name, [step for step, _ in steps], steps[0][1].machine.versions.get("onnxruntime-genai", ""),
                        predictor.fitted.predictors.sidecar.created)
    files.write_json(target_files.GENERATION.path(workspace.predictors(target.name)), fitted)
    log.info("saved %s", target_files.GENERATION.path(workspace.predictors(target.name)))
    if args.json:
        cli.print_json(fitted.model_dump(mode="json"))
        return 0
    cli.print_table([{"what": name.removesuffix("_ms").replace("_", " "), "µs": 1e3 * value}
                     for name, value in fitted.loop.model_dump().items()], f"{target.name}: genai's loop")
    cli.print_table([{"step": phase, **errors.columns()} for phase, errors in fitted.left_out.items()],
                    "errors of steps, each decoder held out in turn")
    return 0


if __name__ == "__main__":
    cli.run(main)
