"""Writes the kernel records of two steps of each measured point of a language model: its prompt and its middle token.

Reads `<workspace>/llm/models` and `<workspace>/llm/measured`. Weights are not read, and their files may be missing. Writes
`<workspace>/llm/records`, from which training/fit_generation.py learns. Existing records are kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Iterator

from hase.inference.llm.language_model import DecoderStep, LanguageModel, language_model
from hase.inference.llm.requests import request_at_point
from hase.ort_analysis.isolated import analysis
from hase.records.generations import PHASES, Generation, measured_file, measured_model_names, measured_points, step_record_file
from hase.runtimes import local_flavour
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.logger import get_logger, progress
from hase.utils.paths import Workspace

EXAMPLES = """
python recipes/llm/record_steps.py --workspace out/llm
"""
log = get_logger("llm")


def steps_of(model: LanguageModel, point: Generation) -> Iterator[DecoderStep]:
    """The step of the prompt, and that of the middle one of the generated tokens."""
    request = request_at_point(model, point, point.generated)
    yield model.step(request.batch, request.prompt, 0, request.max_length)
    yield model.step(request.batch, 1, request.middle_length, request.max_length)


def record_steps(workspace: Workspace, name: str, flavour: Flavour) -> int:
    """Writes the missing records of a model's points; returns their number."""
    folder, count = workspace.root / "llm" / "models" / name, 0
    wanted = [point for point in measured_points(workspace, name)
              if not all(step_record_file(workspace, point, phase).is_file() for phase in PHASES)]
    if not wanted:
        return 0
    model = language_model(folder)
    with analysis.optimized_once():
        for point in wanted:
            for phase, step in zip(PHASES, steps_of(model, point), strict=True):
                graph, path = model.decode if step.before else model.prefill, step_record_file(workspace, point, phase)
                record = analysis.record_of(graph.path, flavour, graph.dims(step), False, no_weights=True)
                files.write_json(path, record.model_copy(update={"model": path.stem, "group": point.family}))
                count += 1
    return count


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="that was measured (default: cuda)")
    args = parser.parse_args()
    workspace = cli.start(args)
    names = measured_model_names(workspace)
    if not names:
        raise UserError(f"{measured_file(workspace, '').parent}: nothing was measured; do: python recipes/llm/measure_genai.py")
    flavour = local_flavour(args.device)
    rows = [{"model": name, "records": record_steps(workspace, name, flavour)} for name in progress(names, "analysing")]
    cli.print_rows(rows, args.json, "records of steps")
    return 0


if __name__ == "__main__":
    cli.run(main)
