"""Judges predictions for a GPU from its data sheet by models that were measured on it.

Reads a dataset of that card (--workspace, --target) and learns from the tables without it, so that nothing of the card is known
but its sheet. Each model is predicted from its record, its kernels as on the H200 (or, with --strict, all predicted), at the
host pace that was measured with it. Prints a line for each model, and the errors. --base carries over from another card, whose
predictors are in a workspace. With --replay, also prints the errors once so many kernels of the card are measured: those that
are most useful for the models' kernels, and that no model has.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hase.inference.library.predictor import Predictor
from hase.inference.prediction.conditions import HostPace, ratio_of
from hase.inference.prediction.targets import Fitted, fitted_for, scale_predictors, scale_to_card, sheet_range
from hase.learned.data_sheet.ratios import AdjustedRatios, CardRatios, SheetRange, read_sheet
from hase.learned.kernels.measured import measured_times, times_under
from hase.learned.kernels.predictors import Predictors, leaves_gpu_idle
from hase.records.dataset_files import read_kernels
from hase.records.dataset_tables import read_model_table
from hase.records.devices import GpuDataSheet
from hase.records.host_pace import paced_rows
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.kernel_record_files import read_model_record, record_path
from hase.records.measurement import GPU_LABEL
from hase.training.fits.data_sheets import adjust_ratios, card, fit_card_ratios, most_useful, read_card_tables, work_on_base
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.logger import progress
from hase.utils.paths import Workspace
from hase.utils.timing import error_statistics

CANDIDATES, WANTED = 3000, 2500  # kernels to choose from, and kernels of the models for which they should be useful
EXAMPLES = """
python recipes/gpus/judge_models.py --workspace out/h100 --target nvidia-h100-80gb-hbm3-cuda-ort1.31-all --gpu h100  # needs it
python recipes/gpus/judge_models.py --workspace out/h200 --target nvidia-h200-cuda-ort1.31-all --gpu h200 \\
  --base out/h100 nvidia-h100-80gb-hbm3-cuda-ort1.31-all --replay 30,100,300,1000  # needs both
"""


class CardModel(NamedTuple):
    """A model measured on the card: its record, latency (ms) and the time of the host's probe (µs)."""

    record: ModelRecord
    latency_ms: float
    probe_us: float


def measured_models(workspace: Workspace, target: str, fitted: Fitted, most: int) -> list[CardModel]:
    """At most `most` models of a dataset, drawn by a fixed seed, each at all measured sizes."""
    times = paced_rows(read_model_table(workspace, target)).groupby("Model")[["median_ms", "Probe_us"]].median()
    if times.empty:
        raise UserError(f"{target}: no models were measured")
    chosen = times.sample(min(most, len(times)), random_state=0).sort_index()
    return [CardModel(read_model_record(record_path(workspace, fitted.target.flavour, str(name))), float(row["median_ms"]),
                     float(row["Probe_us"])) for name, row in chosen.iterrows()]


def with_gpu_work(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels that give the GPU work."""
    return [kernel for kernel in kernels if not leaves_gpu_idle(kernel, GPU_LABEL)]


def corrected(ratios: CardRatios, models: Sequence[CardModel], workspace: Workspace, target: str, base: Predictors,
              strict: bool, gpu: GpuDataSheet, counts: Sequence[int]) -> dict[int, AdjustedRatios]:
    """The ratios after measuring some of the card's kernels, by their number."""
    generator, base_gpu = np.random.default_rng(0), card(base.sidecar.target.device_name)
    model_kernels = {kernel.id: kernel for model in models for kernel in with_gpu_work(list(model.record.kernels.values()))}
    times_ms = times_under(GPU_LABEL, measured_times(workspace, target))
    names = sorted(times_ms.keys() - model_kernels.keys())
    candidate_ids = set(generator.choice(names, min(CANDIDATES, len(names)), replace=False).tolist())
    candidates = with_gpu_work([entry.kernel for entry in read_kernels(workspace.dataset(target), candidate_ids)])
    work, base_ms = work_on_base(candidates, base, strict)
    model_work, model_ms = work_on_base(list(model_kernels.values()), base, strict)
    drawn_rows = generator.choice(len(model_ms), WANTED, p=model_ms / model_ms.sum())
    order = most_useful(work, base_ms, model_work.rows(drawn_rows), model_ms[drawn_rows], base_gpu, max(counts))
    seen_ms = np.array([times_ms[kernel.id] for kernel in candidates])
    return {count: adjust_ratios(ratios, work.rows(chosen), base_ms[chosen], seen_ms[chosen], base_gpu, gpu)
            for count in counts if len(chosen := np.array(order[:count]))}


def judge(predictor: Predictor, fitted: Fitted, base: Fitted, models: Sequence[CardModel]) -> list[dict[str, Any]]:
    """A row per model, predicted with what was learned for the card, at the host pace relative to the base's."""
    predictor.__dict__["fitted"] = fitted
    rows = []
    for record, measured_ms, probe_us in models:
        predicted = predictor.predict(record, host_pace=HostPace(ratio_of(probe_us, base), "measured"))
        rows.append({"model": record.model, "measured_ms": measured_ms, "predicted_ms": predicted.latency_ms,
                     "error_%": 100 * (predicted.latency_ms / measured_ms - 1), "low_ms": predicted.interval_ms[0],
                     "high_ms": predicted.interval_ms[1]})
    return rows


def summary(predicted: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The errors of some predictions, in per cent."""
    errors = error_statistics([row["predicted_ms"] for row in rows], [row["measured_ms"] for row in rows]).columns()
    held = [row["low_ms"] <= row["measured_ms"] <= row["high_ms"] for row in rows]
    widths = [row["high_ms"] / row["low_ms"] for row in rows]
    return {"predicted": predicted, "models": errors.pop("count"), **errors,
            "held_%": 100 * float(np.mean(held)), "median_high_over_low": float(np.median(widths))}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", required=True, help="of the dataset")
    parser.add_argument("--gpu", required=True, help="the card that it was measured on")
    parser.add_argument("--base", nargs=2, metavar=("WORKSPACE", "TARGET"), help="carry over from another card (default: H200)")
    parser.add_argument("--tables", type=Path, default=Path(__file__).with_name("tables.csv.xz"),
                        help="kernels on several GPUs")
    parser.add_argument("--strict", action="store_true", help="don't look up the kernels' times on the base card")
    parser.add_argument("--replay", type=cli.counts, default=(), metavar="N,…",
                        help="also with so many kernels of the card measured, e.g. 30,300")
    parser.add_argument("--most", type=cli.count, default=300, help="models, drawn by a fixed seed (default: 300)")
    args = parser.parse_args()
    workspace, gpu = cli.start(args), card(args.gpu)
    base_workspace, base_name = (Workspace(Path(args.base[0])), args.base[1]) if args.base else (workspace, "h200")
    base = fitted_for(base_workspace, base_name)
    base_gpu = card(base.target.device_name)
    if base_gpu.slug == gpu.slug:
        raise UserError(f"--gpu {args.gpu}: is the card that times are carried over from; name another one with --base")
    sheet = read_sheet()[0]
    known = sheet.model_copy(update={"cards": tuple(name for name in sheet.cards if name != gpu.slug)})
    ratios = fit_card_ratios(read_card_tables(args.tables), without=(gpu.slug,), base=base_gpu.slug)
    models, target = measured_models(workspace, args.target, base, args.most), scale_to_card(base, gpu).target
    from_sheet = replace(base, target=target, predictors=scale_predictors(base.predictors, target, gpu, ratios),
                         sheet_range=sheet_range(gpu, known))
    ways = {"from the data sheet": from_sheet}
    if args.replay:
        for count, adjusted in corrected(ratios, models, workspace, args.target, base.predictors, args.strict, gpu,
                                         args.replay).items():
            ways[f"with {count} kernels"] = replace(
                from_sheet, predictors=scale_predictors(base.predictors, target, gpu, adjusted),
                sheet_range=SheetRange(low=adjusted.low, high=adjusted.high))
    ways[f"as on {base_gpu.name}"] = base
    predictor = Predictor(target=base.target.name, workspace=base_workspace, strict=args.strict)
    judged = {way: judge(predictor, fitted, base, models) for way, fitted in progress(list(ways.items()), "judging")}
    summaries = [summary(way, rows) for way, rows in judged.items()]
    if args.json:
        cli.print_json({"models": judged, "summary": summaries})
    else:
        cli.print_table(judged["from the data sheet"], f"models on {gpu.name}, from its data sheet")
        cli.print_table(summaries)
    return 0


if __name__ == "__main__":
    cli.run(main)
