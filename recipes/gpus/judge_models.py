"""Judges predictions for a GPU from its data sheet by models that were measured on it.

Reads a dataset of that card (--workspace, --target) and learns from the tables without it, so that nothing of the card is known
but its sheet. Each model is predicted from its record, its kernels as on the H200 (or, with --strict, all predicted), at the
host pace that was measured with it. Prints a line for each model, and the errors.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from dataclasses import replace
from typing import Any

import numpy as np

from inference.core.from_data_sheet import carried_predictors, sheet_range
from inference.core.host_pace import HostPace, ratio_of
from inference.core.predictor import Predictor
from inference.core.targets import carried_over
from records.dataset_tables import read_model_table
from records.host_pace import paced_rows
from records.kernel_record_files import read_model_record, record_path
from training.data_sheet.fit import learn
from training.data_sheet.saved import read_sheet
from training.data_sheet.tables import card, read_tables
from utils import cli
from utils.errors import UserError

EXAMPLES = """
python recipes/gpus/judge_models.py --workspace out/h100 --target nvidia-h100-80gb-hbm3-cuda-ort1.31-all --gpu h100  # needs it
"""


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", required=True, help="of the dataset")
    parser.add_argument("--gpu", required=True, help="the card that it was measured on")
    parser.add_argument("--tables", type=Path, default=Path(__file__).with_name("tables.csv.xz"),
                        help="kernels on several GPUs")
    parser.add_argument("--strict", action="store_true", help="don't look up the kernels' times on the H200")
    args = parser.parse_args()
    workspace = cli.start(args)
    gpu = card(args.gpu)
    measured = paced_rows(read_model_table(workspace, args.target)).groupby("Model")[["median_ms", "Probe_us"]].median()
    if measured.empty:
        raise UserError(f"{args.target}: no models were measured")
    unchanged, sheet = (Predictor(target="h200", workspace=workspace, strict=args.strict) for _ in range(2))
    base, model = unchanged.fitted, read_sheet()[0]
    without = model.model_copy(update={"cards": tuple(name for name in model.cards if name != gpu.slug)})
    fitted = carried_over(base, gpu)
    ratios = learn(read_tables(args.tables), without=(gpu.slug,))
    sheet.__dict__["fitted"] = replace(fitted, predictors=carried_predictors(base.predictors, fitted.target, gpu, ratios),
                                       sheet_range=sheet_range(gpu, without))
    rows: list[dict[str, Any]] = []
    for name, times in measured.iterrows():
        record = read_model_record(record_path(workspace, fitted.target.flavour, str(name)))
        pace = HostPace(ratio_of(float(times["Probe_us"]), base), "measured")
        there, here = (predictor.predict(record, host_pace=pace) for predictor in (sheet, unchanged))
        rows.append({"model": name, "measured_ms": float(times["median_ms"]), "predicted_ms": there.latency_ms,
                     "error_%": 100 * (there.latency_ms / times["median_ms"] - 1), "low_ms": there.interval_ms[0],
                     "high_ms": there.interval_ms[1], "as_on_h200_ms": here.latency_ms,
                     "as_on_h200_%": 100 * (here.latency_ms / times["median_ms"] - 1)})
    errors = np.array([abs(row["error_%"]) for row in rows])
    as_here = np.array([abs(row["as_on_h200_%"]) for row in rows])
    held = np.mean([row["low_ms"] <= row["measured_ms"] <= row["high_ms"] for row in rows])
    summary = {"models": len(rows), "MAPE_%": float(errors.mean()), "median_%": float(np.median(errors)),
               "within_10_%": 100 * float((errors <= 10).mean()), "worst_%": float(errors.max()), "held_%": 100 * float(held),
               "as_on_h200_MAPE_%": float(as_here.mean())}
    if args.json:
        cli.print_json({"models": rows, "summary": summary})
    else:
        cli.print_table(rows, f"models on {gpu.name}, from its data sheet")
        cli.print_table([summary])
    return 0


if __name__ == "__main__":
    cli.run(main)
