"""Judges predictions for GPUs from their data sheets by published inference rates of timm's models on them.

Draws models by a fixed seed from those that --rates has for both cards, exports each with random weights, takes it apart in
half precision at the batch size of its rates, and predicts it. Nothing is run on a GPU, and the rates only judge: they were
measured with PyTorch (AMP), predictions are for ONNX Runtime with fp16, so latencies are compared apart from a common factor.
Left out are images of more than 384 pixels and models of more than 350 million parameters; those that can't be exported or
analysed are named. Records and predictions stay in the workspace, so the same command goes on where it was stopped. Prints the
worst models of each card, and the errors.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from inference.core.from_data_sheet import gpu_of_target
from inference.core.predictor import Predictor
from model_zoo.exporting.network_export import trace_network
from model_zoo.exporting.onnx_export import short
from model_zoo.exporting.pool_export import network_source
from records.kernel_record import ModelRecord
from records.kernel_record_files import read_model_record, record_path
from utils import cli, files
from utils.errors import UserError
from utils.fingerprint import FROM_SHEET
from utils.frozen import Frozen
from utils.lazy import multiprocessing, onnx
from utils.lazy import pandas as pd
from utils.paths import Workspace
from utils.processes import process_pool

EXAMPLES = """
python recipes/gpus/judge_vision.py --workspace out/vision --rates timm_inference.csv.xz  # needs it
"""
CARDS = {"rtx-4090": "rtx_4090_pt291", "rtx-pro-6000-max-q": "rtx_pro_6000_maxq"}  # the name of each card's rates
COUNT, SEED = 224, 0
LARGEST_IMAGE, MOST_PARAMETERS = 384, 350.0  # pixels, millions
ROUNDED = 0.011  # millions: how far off the rates' number of parameters may be
LIMIT_S = 60.0
EACH_PROCESS = 40  # models that one process exports: torch keeps some of each
WITHIN = (15, 30)  # per cent
WORST = 10
T = TypeVar("T")
R = TypeVar("R")


class Asked(NamedTuple):
    """A model to predict.

    Attributes:
        image: height and width.
        parameters: millions, as the rates say.
        batches: the batch size of each card's rate, by the card's name.
    """

    model: str
    image: int
    parameters: float
    batches: dict[str, int]


class VisionPrediction(Frozen):
    """What came of one model for one card.

    Attributes:
        failure: why there is no prediction; "" where there is one.
        seconds: that export, analysis and prediction for all cards took; less where the record was there.
        rough: whether the prediction calls itself a rough estimate.
        time_share: of the kernels' time, by where it comes from.
        by_type: the share of each type of kernel in their time.
    """

    model: str
    image: int
    card: str
    batch: int
    failure: str = ""
    seconds: float = 0.0
    latency_ms: float = 0.0
    interval_ms: tuple[float, float] = (0.0, 0.0)
    rough: bool = False
    time_share: dict[str, float] = {}
    by_type: dict[str, float] = {}


def read_rates(path: Path) -> pd.DataFrame:
    """The published rates of models that all cards have, indexed by model and image. Columns, each by card: milliseconds an
    image, batch size, and millions of parameters."""
    rates = pd.read_csv(path)
    rates = rates[rates["gpu"].isin(list(CARDS.values()))]
    rates = rates.assign(card=rates["gpu"].map({there: card for card, there in CARDS.items()}),
                         ms=1000 / rates["infer_samples_per_sec"])
    wide = rates.pivot(index=["model", "infer_img_size"], columns="card", values=["ms", "infer_batch_size", "param_count"])
    if missing := set(CARDS) - set(wide["ms"].columns):
        raise UserError(f"{path}: no rates of {', '.join(sorted(missing))}")
    return wide.dropna()


def drawn(rates: pd.DataFrame, count: int) -> list[Asked]:
    """The models that judge, in the order in which they were drawn: with a larger count, the same ones come first."""
    small = np.all([rates["param_count", card] <= MOST_PARAMETERS for card in CARDS], axis=0)
    chosen = rates[small & (rates.index.get_level_values("infer_img_size") <= LARGEST_IMAGE)].sort_index()
    chosen = chosen.iloc[np.random.default_rng(SEED).permutation(len(chosen))[:count]]
    batches = [dict(zip(CARDS, sizes, strict=True))
               for sizes in zip(*(chosen["infer_batch_size", card].astype(int).tolist() for card in CARDS), strict=True)]
    counts = chosen["param_count", next(iter(CARDS))].tolist()
    return [Asked(str(model), int(image), count, sizes)
            for (model, image), count, sizes in zip(chosen.index.tolist(), counts, batches, strict=True)]


@functools.cache
def predictor_of(card: str, workspace: Workspace) -> Predictor:
    """The predictor of a card, which this process keeps."""
    return Predictor(workspace, f"{card}{FROM_SHEET}")


def exported(asked: Asked) -> onnx.ModelProto:
    """The model in memory, in float32 and for any batch; images have the size of the rates. Branches and BatchNorms that timm
    can merge for inference are merged, as they were when the rates were measured.

    Raises:
        UserError: it has another number of parameters than the one that was measured.
        Exception: it can't be exported.
    """
    from timm.utils.model import reparameterize_model

    network = network_source("timm").build_network(asked.model, asked.model)
    network = replace(network, module=reparameterize_model(network.module))
    parameters = sum(parameter.numel() for parameter in network.module.parameters()) / 1e6
    if abs(parameters - asked.parameters) > ROUNDED:
        raise UserError(f"it has {parameters:.2f} million parameters, and {asked.parameters:g} where it was measured")
    shapes = ((*spec.shape[:2], asked.image, asked.image) for spec in network.inputs)
    inputs = tuple(replace(spec, shape=shape) for spec, shape in zip(network.inputs, shapes, strict=True))
    return trace_network(replace(network, inputs=inputs), "fp32")


def records_of(asked: Asked, workspace: Workspace) -> dict[int, ModelRecord]:
    """The model's record at each batch, in half precision: read from the workspace, or made and written there.

    Raises:
        UserError: it can't be analysed.
        Exception: it can't be exported.
    """
    predictor = predictor_of(next(iter(asked.batches)), workspace)
    records, proto = dict[int, ModelRecord](), None
    for batch in dict.fromkeys(asked.batches.values()):
        path = record_path(workspace, predictor.fitted.target.flavour, f"{asked.model}@batch={batch},image={asked.image}")
        if path.exists():
            records[batch] = read_model_record(path)
            continue
        proto = proto or exported(asked)
        records[batch] = predictor.record(proto, {"batch": batch}, static=True, dtype="fp16")
        files.write_json(path, records[batch])
    return records


def predict_model(workspace: Workspace, asked: Asked) -> list[VisionPrediction] | str:
    """The model's predictions for all cards, made in this process; or why there are none."""
    began = time.monotonic()
    try:
        records = records_of(asked, workspace)
        found = []
        for card, batch in asked.batches.items():
            prediction = predictor_of(card, workspace).predict(records[batch])
            by_type: dict[str, float] = defaultdict(float)
            for kernel in prediction.kernels:
                by_type[kernel.type] += kernel.share
            found.append(VisionPrediction(
                model=asked.model, image=asked.image, card=card, batch=batch, seconds=round(time.monotonic() - began, 1),
                latency_ms=prediction.latency_ms, interval_ms=prediction.interval_ms, rough=prediction.rough_estimate,
                time_share={str(name): share for name, share in prediction.time_share.items()},
                by_type={name: round(share, 4) for name, share in by_type.items()}))
    except Exception as error:  # noqa: BLE001  (whatever a library stumbles on costs one model)
        return short(error)
    return found


def warm_up(workspace: Workspace) -> None:
    """Loads what all models need, so that none of them is charged for it."""
    network_source("timm")
    for card in CARDS:
        _ = predictor_of(card, workspace).fitted


def each_in_time(task: Callable[[T], R], items: Sequence[T], limit_s: float,
                 prepare: Callable[[], None]) -> Iterator[tuple[T, R | str]]:
    """Each item with its result, or with why there is none: it took longer than `limit_s`, or its process died. Computed one at
    a time in a process, which `prepare` prepares first."""
    left = list(items)
    while left:
        others = multiprocessing.active_children()
        with process_pool(1) as pool:
            pool.submit(prepare).result()
            for item in left[:EACH_PROCESS]:
                left = left[1:]
                result: R | str
                try:
                    result = pool.submit(task, item).result(limit_s)
                except (TimeoutError, BrokenExecutor) as error:
                    for child in set(multiprocessing.active_children()) - set(others):
                        child.kill()
                    took_long = isinstance(error, TimeoutError)
                    yield item, f"took more than {limit_s:g} s" if took_long else "its process died, likely for lack of memory"
                    break
                yield item, result


def judged(rates: pd.DataFrame, predictions: Sequence[VisionPrediction], card: str) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The models of a card, the worst first, with the published latency over the predicted one apart from the common factor;
    and a summary."""
    made = [prediction for prediction in predictions if prediction.card == card and not prediction.failure]
    if not made:
        raise UserError(f"{card}: no model was predicted")
    published = dict(zip(rates.index.tolist(), rates["ms", card].tolist(), strict=True))
    rows = pd.DataFrame([{
        "model": each.model, "image": each.image, "batch": each.batch, "predicted_us": 1000 * each.latency_ms / each.batch,
        "published_us": 1000 * published[each.model, each.image]} for each in made])
    factor = float((rows["published_us"] / rows["predicted_us"]).median())
    rows["predicted_over_published"] = factor * rows["predicted_us"] / rows["published_us"]
    errors = 100 * (rows["predicted_over_published"] - 1).abs()
    summary = {"card": card, "models": len(rows), "rank_correlation": f"{_rank_correlation(rows):.4f}",
               "factor": f"{factor:.3f}", "mean_%": float(errors.mean()), "median_%": float(errors.median()),
               **{f"within_{limit}_%": 100 * float((errors <= limit).mean()) for limit in WITHIN}}
    worst = np.log(rows["predicted_over_published"]).abs().sort_values(ascending=False).index
    return rows.loc[worst], summary


def _rank_correlation(rows: pd.DataFrame) -> float:
    return float(rows["predicted_us"].rank().corr(rows["published_us"].rank()))


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--rates", type=Path, required=True, help="the published rates of timm's models, a CSV file")
    parser.add_argument("--count", type=cli.count, default=COUNT, metavar="N", help=f"models to draw (default: {COUNT})")
    parser.add_argument("--limit-s", type=cli.positive, default=LIMIT_S, metavar="S",
                        help=f"leave a model out that takes longer than this (default: {LIMIT_S:g})")
    parser.add_argument("--again", action="store_true", help="try again those that failed")
    parser.add_argument("--table-only", action="store_true", help="judge what was predicted already")
    args = parser.parse_args()
    workspace = cli.start(args, begins=True)
    for card in CARDS:
        gpu_of_target(f"{card}{FROM_SHEET}")  # an unknown one ends the command before anything is exported
    rates, path = read_rates(args.rates), workspace.root / "vision.jsonl"
    asked = drawn(rates, args.count)

    def results() -> dict[tuple[str, int, str], VisionPrediction]:
        """The last result of each model that was drawn, for each card."""
        wanted = {(each.model, each.image) for each in asked}
        return {(line.model, line.image, line.card): line
                for line in files.read_records(path, VisionPrediction, "remove the line, and run this again")
                if (line.model, line.image) in wanted}

    known = results()
    todo = [each for each in asked if not args.table_only and any(
        (line := known.get((each.model, each.image, card))) is None or (args.again and line.failure) for card in CARDS)]
    answers = each_in_time(functools.partial(predict_model, workspace), todo, args.limit_s,
                           functools.partial(warm_up, workspace))
    for each, answer in cli.progress(answers, "predicting", len(todo)):
        files.append_records(path, answer if not isinstance(answer, str) else [
            VisionPrediction(model=each.model, image=each.image, card=card, batch=batch, failure=answer)
            for card, batch in each.batches.items()])
    predictions = list(results().values())
    failed = {f"{line.model} at {line.image}": line.failure for line in predictions if line.failure}
    tables, summaries = zip(*(judged(rates, predictions, card) for card in CARDS), strict=True)
    if args.json:
        cli.print_json({"models": {card: rows.to_dict("records") for card, rows in zip(CARDS, tables, strict=True)},
                        "summary": summaries, "drawn": len(asked), "failed": failed})
        return 0
    for card, rows in zip(CARDS, tables, strict=True):
        cli.print_table(rows.head(WORST).to_dict("records"), f"the worst models on {card}")
    cli.print_table([{"model": name, "why": why} for name, why in failed.items()], "models that were not predicted")
    cli.print_table(summaries, f"{len(asked)} models drawn; PyTorch (AMP) against predictions for ONNX Runtime (fp16)")
    return 0


if __name__ == "__main__":
    cli.run(main, kept="what was predicted")
