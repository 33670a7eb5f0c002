"""Judges predictions for GPUs that were never measured by NeuSight's own split.

Learns from the rows that NeuSight (sitar-lab/NeuSight, MIT, commit 6945927) trains on: small fp32 kernels on a P4, P100, V100,
T4 and A100. Predicts its test rows, which are larger, of cards that it does not train on: products (BMM, FC) of an H100, an L4
and an A100 with 80 GB, and other operators of the latter two. Prints a line for each operator beside NeuSight's error,
then one for the cards that it trains on, and one for each card. --validate leaves out each of the five cards in turn instead,
and judges no test row: by it the predictor was chosen. Takes less than a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recipes.gpus.by_shape import ByShape, Measured, Shaped, learn_by_shape
from recipes.gpus.public_tables import ROW_OPERATORS, neusight_rows
from training.data_sheet.tables import card, too_short
from training.data_sheet.work import DTYPES, KINDS, Floats, Work
from utils import cli
from utils.lazy import pandas as pd

EXAMPLES = """
python recipes/gpus/judge_neusight.py --external external  # needs it
python recipes/gpus/judge_neusight.py --external external --validate --json  # needs it
"""
GROUPS = {"BMM": ("bmm",), "FC": ("linear",), "softmax": ("softmax",), "layer norm": ("ln",),
          "elementwise": tuple(name for name in ROW_OPERATORS if name not in ("ln", "softmax"))}
PUBLISHED = {"BMM": 13.8, "FC": 13.9, "elementwise": 19.3, "softmax": 13.9, "layer norm": 56.7}  # MAPE, %, over its cards
# Products of Pascal cards teach nothing about newer ones: where N is over 40,000, FC reaches 13 % of the peak on the P4 and
# 26 % on the P100. With them, large FC of the V100 is predicted 35 % too long (median) when it is left out; without them, 13 %.
LEAST_CAPABILITY = {"BMM": 7.0, "FC": 7.0}


class Predicted(NamedTuple):
    """Kernels of a card: measured and predicted times in ms, and which of the measured ones can't be."""

    gpu: str
    trained_on: bool
    measured_ms: Floats
    predicted_ms: Floats
    impossible: npt.NDArray[np.bool_]


def measured(rows: pd.DataFrame, name: str) -> Measured:
    """The kernels of a card among the lines of a group's operators."""
    rows = rows[rows["gpu"] == name]
    operators = rows["operator"].map(ROW_OPERATORS.index) if rows["operator"].iloc[0] in ROW_OPERATORS else 0 * rows["flops"]
    flops, moved_bytes, outputs = (rows[column].to_numpy(float) for column in ("flops", "moved_bytes", "outputs"))
    work = Work(flops, moved_bytes, outputs, rows["kind"].map(KINDS.index).to_numpy(int),
                rows["dtype"].map(DTYPES.index).to_numpy(int), rows["launches"].to_numpy(float))
    sizes = [shape.removeprefix(operator).split("x") for operator, shape in zip(rows["operator"], rows["shape"], strict=True)]
    return Measured(Shaped(work, operators.to_numpy(int), np.array(sizes, dtype=float)), card(name), rows["ms"].to_numpy(float))


def impossible(of_card: Measured) -> npt.NDArray[np.bool_]:
    """Which times are shorter than the card's sheet allows."""
    return too_short(of_card.kernels.work, of_card.ms, of_card.gpu)


def learned(group: str, train: dict[str, Measured], without: Collection[str] = ()) -> ByShape:
    """What the training cards teach about a group of operators."""
    least = LEAST_CAPABILITY.get(group, 0.0)
    parts = []
    for name, of_card in train.items():
        if name not in without and of_card.gpu.compute_capability >= least:
            work, can_be = of_card.kernels.work, ~impossible(of_card)
            parts.append(Measured(Shaped(work.rows(can_be), of_card.kernels.operators[can_be], of_card.kernels.sizes[can_be]),
                                  of_card.gpu, of_card.ms[can_be]))
    return learn_by_shape(parts)


def predicted(of_card: Measured, name: str, trained_on: bool, model: ByShape) -> Predicted:
    return Predicted(name, trained_on, of_card.ms, model.times_ms(of_card.kernels, of_card.gpu), impossible(of_card))


def judged(group: str, rows: pd.DataFrame, validate: bool) -> list[Predicted]:
    """The test rows of each card; or, to validate, the training rows of each card, learned from the others."""
    train = {name: measured(rows[rows["split"] == "train"], name) for name in _cards(rows, "train")}
    if validate:
        return [predicted(of_card, name, False, learned(group, train, {name})) for name, of_card in train.items()]
    model, test = learned(group, train), rows[rows["split"] == "test"]
    return [predicted(measured(test, name), name, name in train, model) for name in _cards(rows, "test")]


def _cards(rows: pd.DataFrame, split: str) -> list[str]:
    return sorted(rows.loc[rows["split"] == split, "gpu"].unique())


def line(group: str, cards: str, of_cards: list[Predicted]) -> dict[str, Any]:
    """Errors in per cent, of times that can be and of all; the middle one of predicted over measured; NeuSight's."""
    ratios = np.concatenate([of_card.predicted_ms / of_card.measured_ms for of_card in of_cards])
    wrong = np.concatenate([of_card.impossible for of_card in of_cards])
    errors = 100 * np.abs(ratios - 1.0)
    return {"operator": group, "cards": cards, "kernels": len(ratios) - int(wrong.sum()), "impossible": int(wrong.sum()),
            "MAPE_%": float(errors[~wrong].mean()), "median_%": float(np.median(errors[~wrong])),
            "ratio": float(np.median(ratios[~wrong])), "MAPE_with_impossible_%": float(errors.mean()),
            "NeuSight_%": PUBLISHED[group]}


def lines(group: str, found: list[Predicted]) -> list[dict[str, Any]]:
    """A group's lines: all cards that were not trained on, all others, and each."""
    parts = {label: [of_card for of_card in found if of_card.trained_on == trained_on]
             for label, trained_on in (("not trained on", False), ("trained on", True))}
    return [*(line(group, label, part) for label, part in parts.items() if part),
            *(line(group, of_card.gpu, [of_card]) for of_card in sorted(found, key=lambda of_card: of_card.trained_on))]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--external", type=Path, required=True, help="the folder of the public tables")
    parser.add_argument("--validate", action="store_true", help="leave out each training card in turn, and see no test row")
    args = parser.parse_args()
    cli.start(args)
    cli.existing_folder("--external", args.external)
    tables = {str(rows["operator"].iloc[0]): rows for rows in neusight_rows(args.external)}
    found = {group: judged(group, pd.concat([tables[name] for name in GROUPS[group]]), args.validate)
             for group in cli.progress(list(GROUPS), "operators")}
    listed = [row for group, of_cards in found.items() for row in lines(group, of_cards)]
    summed = ("not trained on", "trained on")
    cli.print_rows(sorted(listed, key=lambda row: summed.index(row["cards"]) if row["cards"] in summed else len(summed)),
                   args.json, "errors of cards left out" if args.validate else "errors of NeuSight's test rows")
    return 0


if __name__ == "__main__":
    cli.run(main)
