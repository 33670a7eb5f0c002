"""Compares predicted requests to language models with those measured with onnxruntime-genai: times, memory, energy.

Reads the models of `<workspace>/llm/models` (weights are not read), their measurements (`llm/measured`), and the predictors of
--target. Every kernel is predicted. Times are predicted for the pace that the host had meanwhile. Prints a row for each point,
and the errors.

With --measure-missing, this machine is the target, and the kernels of all points are measured first, as predict_llm.py does.
With --again, also prints a second measurement of the same points, and how much it differs from the first one.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hase.inference.library.predictor import Predictor
from hase.inference.llm.answers import LlmPrediction
from hase.inference.llm.language_model import LanguageModel, language_model
from hase.inference.llm.predicting import measure_missing, predict_requests
from hase.inference.llm.requests import request_at_point
from hase.inference.prediction.conditions import given_pace, ratio_of
from hase.records.generations import (
    REMEDY,
    Generation,
    GenerationMemory,
    Phase,
    StepEnergy,
    measured_file,
    measured_model_names,
    measured_points,
)
from hase.training.fits.generation import step_time
from hase.utils import cli, files
from hase.utils.logger import progress
from hase.utils.paths import Workspace
from hase.utils.timing import error_statistics

EXAMPLES = """
python recipes/llm/judge.py --workspace out/judged
python recipes/llm/judge.py --workspace out/genai --json
python recipes/llm/judge.py --workspace out/llm-cpu --measure-missing --again out/llm-cpu/again
"""
Row = dict[str, Any]
TARGET = "nvidia-h200"
TIMES: dict[Phase, str] = {"first": "first token (ms)", "token": "further token (ms)"}
PEAK, FIRST_J, FURTHER_J = "peak (MiB)", "first step (J)", "further step (J)"
QUANTITIES = (*TIMES.values(), PEAK, FIRST_J, FURTHER_J)


def compared(what: str, point: Generation | GenerationMemory, measured: float, predicted: float,
             interval: tuple[float, float] | None = None, rough: bool = False) -> Row:
    """A row: one number of a point, measured and predicted."""
    return {"model": point.model, "batch": point.batch, "prompt": point.prompt, "what": what, "measured": measured,
            "predicted": predicted, "error_%": 100 * (predicted / measured - 1),
            "from": interval and interval[0], "to": interval and interval[1],
            "held": None if interval is None else "yes" if interval[0] <= measured <= interval[1] else "no",
            "rough": "yes" if rough else "no"}


def times_of(predictor: Predictor, model: LanguageModel, point: Generation) -> Iterator[Row]:
    """Rows for a point's times, each at the pace of its host."""
    for phase, what in TIMES.items():
        measured_ms, probe_us = step_time(point, phase)
        pace = None if probe_us is None else given_pace(ratio_of(probe_us, predictor.fitted))
        answer, = predict_requests(predictor, model, [request_at_point(model, point, point.generated)], pace)
        time = answer.ttft if phase == "first" else answer.tpot
        if time is not None:
            yield compared(what, point, measured_ms, time.ms, time.interval_ms, answer.rough_estimate)


def energies_of(predictor: Predictor, model: LanguageModel, point: Generation) -> Iterator[Row]:
    """Rows for a point's energies."""
    def per_step(energy: StepEnergy) -> float:
        return energy.joules / energy.steps

    if point.first_energy is None or point.token_energy is None:
        return
    pace = given_pace(ratio_of(sum(point.probe_us) / len(point.probe_us), predictor.fitted))
    tokens = point.token_energy.steps
    answer, = predict_requests(predictor, model, [request_at_point(model, point, tokens + 1)], pace)
    if energy := answer.energy:
        yield compared(FIRST_J, point, per_step(point.first_energy), energy.prompt_j)
        yield compared(FURTHER_J, point, per_step(point.token_energy), (energy.request_j - energy.prompt_j) / tokens)


def memory_of(predictor: Predictor, model: LanguageModel, points: Sequence[GenerationMemory]) -> Iterator[Row]:
    """Rows for memory."""
    measured = [point for point in points if not point.failed]
    answers: list[LlmPrediction] = predict_requests(predictor, model, [
        request_at_point(model, point, point.generated) for point in measured]) if measured else []
    for point, answer in zip(measured, answers, strict=True):
        yield compared(PEAK, point, point.peak_mib, answer.memory.peak_mib)


def rows_of(predictor: Predictor, workspace: Workspace, name: str) -> Iterator[Row]:
    """All rows of a model."""
    model = language_model(workspace.root / "llm" / "models" / name)
    for point in measured_points(workspace, name):
        yield from times_of(predictor, model, point)
        yield from energies_of(predictor, model, point)
    memory = measured_file(workspace, name, memory=True)
    yield from memory_of(predictor, model, files.read_records(memory, GenerationMemory, REMEDY) if memory.is_file() else [])


def measured_again(workspace: Workspace, rows: Iterable[Row]) -> list[Row]:
    """Rows of times with the same time from another measurement added (NaN if it is missing there)."""
    points = {(point.model, point.batch, point.prompt): point for name in measured_model_names(workspace)
              for point in measured_points(workspace, name)}
    phases = {what: phase for phase, what in TIMES.items()}
    extended = []
    for row in rows:
        point, phase = points.get((row["model"], row["batch"], row["prompt"])), phases.get(row["what"])
        extended.append({**row, "again": step_time(point, phase)[0] if point and phase else math.nan})
    return extended


def errors_of(rows: Iterable[Row]) -> list[Row]:
    """Errors of each kind of number, in per cent."""
    rows, table = list(rows), []
    for what in QUANTITIES:
        chosen = [row for row in rows if row["what"] == what]
        if not chosen:
            continue
        errors = error_statistics([row["predicted"] for row in chosen], [row["measured"] for row in chosen])
        held = [row["held"] == "yes" for row in chosen if row["held"]]
        again = [abs(row["again"] / row["measured"] - 1) for row in chosen if "again" in row and not math.isnan(row["again"])]
        widths = sorted(row["to"] / row["from"] - 1 for row in chosen if row["from"])
        table.append({"what": what, **errors.columns(),
                      "held_%": 100 * sum(held) / len(held) if held else None,
                      "width_%": 100 * widths[len(widths) // 2] if widths else None,
                      "rough": sum(row["rough"] == "yes" for row in chosen),
                      **({"again_%": 100 * sum(again) / len(again)} if again else {})})
    return table


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", metavar="NAME",
                        help=f"the target (default: {TARGET}, or this machine with --measure-missing)")
    parser.add_argument("--model", action="append", default=[], metavar="NAME", help="(repeatable; default: all)")
    parser.add_argument("--measure-missing", action="store_true",
                        help="measure the kernels of all points on this machine first")
    parser.add_argument("--again", type=Path, metavar="DIR", help="a workspace where the same points were measured again")
    args = parser.parse_args()
    workspace, local = cli.start(args), args.measure_missing
    predictor = Predictor(workspace, args.target or (None if local else TARGET), strict=not local, any_device=local,
                          no_weights=not local)
    names = [name for name in measured_model_names(workspace) if not args.model or name in args.model]
    for name in names if local else ():
        model = language_model(workspace.root / "llm" / "models" / name)
        measure_missing(predictor, model, [
            request_at_point(model, point, point.generated) for point in measured_points(workspace, name)])
    rows = [row for name in progress(names, "judging") for row in rows_of(predictor, workspace, name)]
    if args.again:
        rows = measured_again(Workspace(args.again), rows)
    if args.json:
        cli.print_json({"points": rows, "errors": errors_of(rows)})
    else:
        cli.print_table(rows, "predicted and measured")
        cli.print_table(errors_of(rows), "errors, kernels measured here" if local else
                        "errors, all kernels predicted, at the host's pace as measured")
    return 0


if __name__ == "__main__":
    cli.run(main)
