"""Errors of predictions for models that were measured in another workspace, which nothing was learned from.

Reads the predictors of --workspace (those that come with Hase, if it has none). Of the workspace --measured, it reads only the
latencies of models on an idle device and their kernel records. Each model is predicted at the pace that its host had meanwhile
(column Probe_us): once with all kernels predicted, and once as a user gets it, with kernels looked up that the predictors' own
dataset holds. Prints a row for each model and size, and the errors.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from inference.core.answers import Prediction
from inference.core.host_pace import UNKNOWN, HostPace, given_pace, ratio_of
from inference.core.predictor import Predictor
from records.dataset_files import idle_rows, read_header
from records.dataset_tables import read_model_table
from records.kernel_record import REMAKE
from records.kernel_record_files import read_model_record, record_path
from utils import cli
from utils.errors import UserError
from utils.logger import get_logger
from utils.paths import Workspace
from utils.timing import error_statistics

log = get_logger("evaluator")
EXAMPLES = """
python recipes/h200/judge_dataset.py --measured out/anew
python recipes/h200/judge_dataset.py --workspace out/h200 --measured out/anew --target nvidia-h200 --json
"""


class Judged(NamedTuple):
    """A model's measured latency (the median of its sessions), and its predictions: all kernels predicted, and as a user gets
    it."""

    latency_ms: float
    strict: Prediction
    usual: Prediction


WAYS = {"strict": "all predicted", "usual": "looked up where the predictors' dataset holds them"}


def judge(predictor: Predictor, measured: Workspace) -> list[Judged]:
    """The models of another workspace's dataset, predicted; those without a record are named and left out.

    Args:
        predictor: of the target that was measured; not strict.
        measured: the workspace with the dataset and the records.

    Raises:
        UserError: there are no predictors, no dataset, or none of its models can be judged.
    """
    fitted = predictor.fitted
    name, folder = fitted.target.name, measured.dataset(fitted.target.name)
    seen = sorted({machine.uuid for machine in fitted.predictors.sidecar.machines} & read_header(folder).machines.keys())
    if seen:
        log.warning("%s: measured on %s, which the predictors were learned from, too", folder, cli.first_of(seen))
    strict = Predictor(predictor.workspace, name, strict=True, force=predictor.force)
    table = idle_rows(read_model_table(measured, name)).reindex(columns=["Model", "median_ms", "Probe_us"])
    judged = []
    for model, (latency_ms, probe_us) in table.groupby("Model").median().iterrows():
        path = record_path(measured, fitted.target.flavour, str(model))
        if not path.is_file():
            log.warning("%s: measured, but without a record (%s), so it is not judged; make one with: %s", model, path, REMAKE)
            continue
        record = read_model_record(path)
        pace: HostPace = UNKNOWN if math.isnan(probe_us) else given_pace(ratio_of(probe_us, fitted))
        judged.append(Judged(latency_ms, *(which.predict(record, host_pace=pace) for which in (strict, predictor))))
    if not judged:
        raise UserError(f"{folder}: no latency of a model on an idle device with a record to predict it from")
    return judged


def holds(latency_ms: float, prediction: Prediction) -> bool:
    """Whether a latency lies in the prediction's interval."""
    low_ms, high_ms = prediction.interval_ms
    return low_ms <= latency_ms <= high_ms


def row(model: Judged) -> dict[str, Any]:
    """A model as a row of the table."""
    latency_ms, strict, usual = model
    return {"model": strict.model, "measured (ms)": latency_ms, "pace": strict.host_pace, "predicted (ms)": strict.latency_ms,
            "from (ms)": strict.interval_ms[0], "to (ms)": strict.interval_ms[1],
            "error_%": 100 * (strict.latency_ms / latency_ms - 1), "held": "yes" if holds(latency_ms, strict) else "no",
            "rough": "yes" if strict.rough_estimate else "no", "looked up (ms)": usual.latency_ms,
            "looked up, error_%": 100 * (usual.latency_ms / latency_ms - 1),
            "looked up, held": "yes" if holds(latency_ms, usual) else "no", "measured_%": 100 * usual.time_share["measured"]}


def errors_of(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """The errors of all models, one row for each way of predicting, in per cent."""
    measured = [model.latency_ms for model in judged]
    rows = []
    for how, kernels in WAYS.items():
        predictions: list[Prediction] = [getattr(model, how) for model in judged]
        errors = error_statistics([prediction.latency_ms for prediction in predictions], measured)
        held = [holds(latency_ms, prediction) for latency_ms, prediction in zip(measured, predictions, strict=True)]
        widths = sorted(high_ms / low_ms - 1 for low_ms, high_ms in (prediction.interval_ms for prediction in predictions))
        rows.append({"kernels": kernels, **errors.columns(),
                     "held_%": 100 * sum(held) / len(held), "width_%": 100 * widths[len(widths) // 2]})
    return rows


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--measured", type=Path, required=True, metavar="DIR", help="the workspace with latencies and records")
    parser.add_argument("--target", default="nvidia-h200", metavar="NAME", help="the target (default: nvidia-h200)")
    args = parser.parse_args()
    judged = judge(Predictor(cli.start(args), args.target), Workspace(cli.existing_folder("--measured", args.measured)))
    if args.json:
        cli.print_json({"models": [row(model) for model in judged], "errors": errors_of(judged)})
    else:
        cli.print_table([row(model) for model in judged], "models of a dataset that nothing was learned from")
        cli.print_table(errors_of(judged), "errors, at the host's pace as measured")
    return 0


if __name__ == "__main__":
    cli.run(main)
