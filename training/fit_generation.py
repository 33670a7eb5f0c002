"""Learns what generation with onnxruntime-genai takes beside a language model's kernels, and the energy of language models.

Reads the predictors and the composition of a GPU target; of each --generations workspace what was measured of language models
(recipes/llm/measure_genai.py) and the kernel records of their steps (recipes/llm/record_steps.py); and of --energy the dataset
from which the energy of other models was learned. Writes generation.json and generation_energy.json into the predictors'
folder: the time of genai's loop, what dispatching costs in such runs, and how a run at the power limit becomes longer. Each
family is held out in turn. Of --loops, such as decoders of one small layer, it learns too, but counts no errors; and
of --captured what tokens take that run as a CUDA graph.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from hase.learned import target_files
from hase.learned.composition.fitted import Composition, read_composition
from hase.learned.energy import EnergyModel
from hase.learned.kernels.predictors import Predictors, read_predictors
from hase.learned.llm import LearnedGeneration
from hase.records.generations import PHASES
from hase.training.fits.energy import fit_energy, measured_energies
from hase.training.fits.generation import MeasuredStep, fit_captured, fit_generation, measured_step_energies, measured_steps
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.timing import error_statistics

EXAMPLES = """
python training/fit_generation.py --target nvidia-h200-cuda-ort1.31-all --workspace out/h200 --generations out/genai
"""
log = get_logger("generation")


def fit_energies(steps: list[MeasuredStep], predictors: Predictors, composition: Composition, folder: Path, models: Workspace,
                 generation: LearnedGeneration | None = None) -> EnergyModel:
    """The energy of language models, fitted together with the other models of `models`. With `generation`, also the errors for
    predicted latencies."""
    name, learned = predictors.sidecar.target.name, target_files.ENERGY.needed(folder)
    others = measured_energies(models, name, predictors, composition)
    return fit_energy(name, [*others, *measured_step_energies(steps, generation)], learned.models_sha256, learned.limit_w)


def shown(fitted: LearnedGeneration) -> list[dict[str, Any]]:
    """A row of the table for each learned number, with its unit."""
    rows = [("a matrix product, beside its launches", 1e3 * fitted.product_ms, "µs"),
            ("attention by a library, beside its launches", 1e3 * fitted.attention_ms, "µs"),
            *((f"genai's loop: {name.removesuffix('_ms').replace('_', ' ')}", 1e3 * value, "µs")
              for name, value in fitted.loop.model_dump().items())]
    if captured_tokens := fitted.captured:
        rows += [("a CUDA graph: pause after a launch", 1e3 * captured_tokens.gap_ms, "µs"),
                 ("a CUDA graph: genai's loop", 1e3 * captured_tokens.step_ms, "µs"),
                 ("a CUDA graph: million logits", 1e3 * captured_tokens.million_logits_ms, "µs")]
    if limit := fitted.power_limit:
        rows += [("clocks are kept for", limit.hold_ms, "ms"), ("power limit", limit.limit_w, "W"),
                 ("exponent of what is beyond it", limit.exponent, "")]
    return [{"what": what, "value": value, "unit": unit} for what, value, unit in rows]


def errors(fitted: LearnedGeneration) -> list[dict[str, Any]]:
    """Errors of steps with their family held out, in per cent: of all, and of those with a measured pace of the host. The
    latter also with the share inside the interval that was fitted without their family."""
    rows = []
    for phase, errors_of_phase in fitted.left_out.items():
        rows.append({"step": phase, "pace": "all", **errors_of_phase.columns(), "held_%": None})
        if paced := [step for step in fitted.steps if step.phase == phase and step.paced]:
            errors_of_phase = error_statistics([step.predicted_ms for step in paced], [step.measured_ms for step in paced])
            interval = fitted.intervals.get(phase)
            rows.append({"step": phase, "pace": "read meanwhile", **errors_of_phase.columns(),
                         "held_%": 100 * interval.coverage if interval else None})
    if (graph := fitted.captured) and graph.left_out:
        rows.append({"step": "token, as a CUDA graph", "pace": "read meanwhile", **graph.left_out.columns(),
                     "held_%": 100 * graph.interval.coverage if graph.interval else None})
    return rows


def errors_of_energy(energy: EnergyModel) -> list[dict[str, Any]]:
    """Errors (per cent) of steps' energy with the family held out, for measured and for predicted latencies."""
    rows = []
    for phase in PHASES:
        steps = [model for model in energy.models if model.model.endswith(f"-{phase}")]
        for latency, name in (("as measured", "predicted_j"), ("predicted", "with_latency_j")):
            pairs = [(predicted, model.measured_j) for model in steps if (predicted := getattr(model, name)) is not None]
            if pairs:
                errors_of_phase = error_statistics(*(list(column) for column in zip(*pairs, strict=True)))
                rows.append({"step": phase, "latency": latency, **errors_of_phase.columns()})
    return rows


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", required=True, help="name of a target in training/predictors")
    parser.add_argument("--predictors", type=Path, metavar="DIR",
                        help="read predictors from this folder and write there (default: the target's own)")
    parser.add_argument("--generations", type=Path, action="append", required=True, metavar="DIR",
                        help="a workspace with measured language models (repeatable)")
    parser.add_argument("--loops", type=Path, action="append", default=[], metavar="DIR",
                        help="the same of models whose errors don't count (repeatable)")
    parser.add_argument("--captured", type=Path, action="append", default=[], metavar="DIR",
                        help="the same of models whose tokens ran as a CUDA graph (repeatable)")
    parser.add_argument("--energy", type=Path, metavar="DIR",
                        help="the workspace with the energy of other models (default: nothing is learned of energy)")
    args = parser.parse_args()
    workspace = cli.start(args)
    folder = args.predictors or workspace.predictors(args.target)
    predictors = read_predictors(folder)
    composition = read_composition(folder, predictors.sidecar.dataset_sha256)
    if composition.costs is None or composition.probe_us is None:
        raise UserError(f"{folder}: its composition does not know the host apart from the device, so nothing can be learned of "
                        "generation on it")
    steps = [step for paths, counted in ((args.generations, True), (args.loops, False)) for path in paths
             for step in measured_steps(Workspace(path), predictors, composition.probe_us, counted)]
    energy = fit_energies(steps, predictors, composition, folder, Workspace(args.energy)) if args.energy else None
    fitted = fit_generation(args.target, steps, composition.costs, energy, predictors.sidecar.created,
                            composition.calibrated)
    captured = [step for path in args.captured
                for step in measured_steps(Workspace(path), predictors, composition.probe_us, captured=True)]
    if captured and composition.cuda_graph is not None:
        fitted = fitted.model_copy(update={"captured": fit_captured(captured, composition.cuda_graph)})
    files.write_json(target_files.GENERATION.path(folder), fitted)
    if args.energy:
        energy = fit_energies(steps, predictors, composition, folder, Workspace(args.energy), fitted)
        files.write_json(target_files.GENERATION_ENERGY.path(folder), energy)
    log.info("saved %s", target_files.GENERATION.path(folder))
    if args.json:
        cli.print_json(fitted.model_dump(mode="json"))
        return 0
    cli.print_table(shown(fitted), f"{args.target}: generation")
    cli.print_table(errors(fitted), "errors of steps, each family held out in turn")
    if energy is not None:
        cli.print_table(errors_of_energy(energy), "errors of energy, each family held out in turn")
    return 0


if __name__ == "__main__":
    cli.run(main)
