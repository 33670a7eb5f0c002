"""Learns the time that generation with onnxruntime-genai adds to a language model's kernels, and the energy of language models.

Reads the predictors and the composition of a GPU target; from each --generations workspace, the measurements of language models
(recipes/llm/measure_genai.py) and the kernel records of their steps (recipes/llm/record_steps.py); and from --energy, the
dataset from which the energy of other models was learned. Writes generation.json and generation_energy.json into the
predictors' folder: the time of genai's loop, what dispatching costs in such runs, and how much longer a run at the power limit
takes. Each family is held out in turn. It also learns from --loops (such as decoders of one small layer), whose errors do not
count, and from --captured (models whose tokens run as a CUDA graph).
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
    """Fits the energy of language models together with that of the models in workspace `models`. With `generation`, the result
    also has errors for predicted latencies."""
    name, learned = predictors.sidecar.target.name, target_files.ENERGY.needed(folder)
    others = measured_energies(models, name, predictors, composition)
    return fit_energy(name, [*others, *measured_step_energies(steps, generation)], learned.models_sha256, learned.limit_w)


def learned_rows(fitted: LearnedGeneration) -> list[dict[str, Any]]:
    """A row of the table for each learned number, with its unit."""
    rows = [("a matrix product, beside its launches", 1e3 * fitted.product_ms, "µs"),
            ("attention by a library, beside its launches", 1e3 * fitted.attention_ms, "µs"),
            *((f"genai's loop: {name.removesuffix('_ms').replace('_', ' ')}", 1e3 * value, "µs")
              for name, value in fitted.loop.model_dump().items())]
    if graph := fitted.captured:
        rows += [("a CUDA graph: pause after a launch", 1e3 * graph.gap_ms, "µs"),
                 ("a CUDA graph: genai's loop", 1e3 * graph.step_ms, "µs"),
                 ("a CUDA graph: million logits", 1e3 * graph.million_logits_ms, "µs")]
    if limit := fitted.power_limit:
        rows += [("clocks are kept for", limit.hold_ms, "ms"), ("power limit", limit.limit_w, "W"),
                 ("exponent of the power above it", limit.exponent, "")]
    return [{"what": what, "value": value, "unit": unit} for what, value, unit in rows]


def error_rows(fitted: LearnedGeneration) -> list[dict[str, Any]]:
    """Errors (per cent) of steps with their family held out: of all, and of those with a measured pace of the host. The latter
    also have the share of steps inside the interval that was fitted without their family (`held_%`)."""
    rows = []
    for phase, errors in fitted.left_out.items():
        rows.append({"step": phase, "pace": "all", **errors.columns(), "held_%": None})
        if paced := [step for step in fitted.steps if step.phase == phase and step.paced]:
            errors = error_statistics([step.predicted_ms for step in paced], [step.measured_ms for step in paced])
            interval = fitted.intervals.get(phase)
            rows.append({"step": phase, "pace": "read meanwhile", **errors.columns(),
                         "held_%": 100 * interval.coverage if interval else None})
    if (graph := fitted.captured) and graph.left_out:
        rows.append({"step": "token, as a CUDA graph", "pace": "read meanwhile", **graph.left_out.columns(),
                     "held_%": 100 * graph.interval.coverage if graph.interval else None})
    return rows


def energy_error_rows(energy: EnergyModel) -> list[dict[str, Any]]:
    """Errors (per cent) of steps' energy with the family held out, for measured and for predicted latencies."""
    rows = []
    for phase in PHASES:
        steps = [model for model in energy.models if model.model.endswith(f"-{phase}")]
        for latency, name in (("as measured", "predicted_j"), ("predicted", "with_latency_j")):
            if known := [model for model in steps if getattr(model, name) is not None]:
                errors = error_statistics([getattr(model, name) for model in known], [model.measured_j for model in known])
                rows.append({"step": phase, "latency": latency, **errors.columns()})
    return rows


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", required=True, help="name of a target in training/predictors")
    parser.add_argument("--predictors", type=Path, metavar="DIR",
                        help="read predictors from this folder and write there (default: the target's own)")
    parser.add_argument("--generations", type=Path, action="append", required=True, metavar="DIR",
                        help="a workspace with measured language models (repeatable)")
    parser.add_argument("--loops", type=Path, action="append", default=[], metavar="DIR",
                        help="a workspace with models whose errors don't count (repeatable)")
    parser.add_argument("--captured", type=Path, action="append", default=[], metavar="DIR",
                        help="a workspace with models whose tokens ran as a CUDA graph (repeatable)")
    parser.add_argument("--energy", type=Path, metavar="DIR",
                        help="the workspace with the energy of other models (default: energy is not learned)")
    args = parser.parse_args()
    workspace = cli.start(args)
    folder = args.predictors or workspace.predictors(args.target)
    predictors = read_predictors(folder)
    composition = read_composition(folder, predictors.sidecar.dataset_sha256)
    if composition.costs is None or composition.probe_us is None:
        raise UserError(f"{folder}: its composition does not separate the host from the device, so nothing can be learned of "
                        "generation; fit a composition on models of a GPU (training/fit_composition.py)")
    steps = [step for paths, counted in ((args.generations, True), (args.loops, False)) for path in paths
             for step in measured_steps(Workspace(path), predictors, composition.probe_us, counted)]
    energy = fit_energies(steps, predictors, composition, folder, Workspace(args.energy)) if args.energy else None
    fitted = fit_generation(args.target, steps, composition.costs, energy, predictors.sidecar.created, composition.calibrated)
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
    cli.print_table(learned_rows(fitted), f"{args.target}: generation")
    cli.print_table(error_rows(fitted), "errors of steps, each family held out in turn")
    if energy is not None:
        cli.print_table(energy_error_rows(energy), "errors of energy, each family held out in turn")
    return 0


if __name__ == "__main__":
    cli.run(main)
