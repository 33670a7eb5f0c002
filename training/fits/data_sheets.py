"""Learns how kernels' times differ between cards, from tables of several cards and from kernels measured on one card.

A time on another card is that on the base card, times the ratio of their bounds (learned/data_sheet/work.py). A booster
corrects products and attention, which public tables have for many cards. It learns from all pairs of cards, and from other
operators too, since these bring further cards. Other kinds are not corrected: their tables are fp32, from older cards and
PyTorch, and make predictions for ONNX Runtime worse (an H100's: 12.5 % with them, 9.1 % without).

Kernels measured on a card correct the others by a Gaussian process (`adjust`). `most_useful` chooses them. `with_carried` adds
another card's kernels to a training set, for forms that were not measured on its own card.
"""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hase.learned.data_sheet.ratios import (
    BASE,
    OWN,
    SHORTEST_US,
    AdjustedRatios,
    CardRatios,
    Correction,
    GaussianProcess,
    SheetModel,
    SheetRange,
    process_features,
    read_sheet,
    similarity,
)
from hase.learned.data_sheet.work import (
    DTYPES,
    KINDS,
    Floats,
    Work,
    bounds_of,
    features_of,
    peaks_flop_s,
    ratio_of_bounds,
    work_of,
)
from hase.learned.kernels.interface import TrainingSet
from hase.learned.kernels.predictors import Predictors
from hase.learned.kernels.saved_form import as_arrays
from hase.learned.kernels.sidecar import Carried
from hase.records.dataset_files import collected_targets, read_kernels
from hase.records.devices import GpuDataSheet, gpu_named, named_or_in_file
from hase.records.kernel_record import Kernel
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.lazy import pandas as pd
from hase.utils.lazy import sklearn, xgboost
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

PAIR_KERNELS = 2500  # of a table, for each pair of cards
ROUNDS = 300
BOOSTER: dict[str, Any] = {"max_depth": 5, "learning_rate": 0.07, "subsample": 0.7, "colsample_bytree": 0.6,
                           "min_child_weight": 20, "objective": "reg:absoluteerror", "lambda": 5.0, "seed": 0}
BASE_WEIGHT = 3.0  # of pairs that begin at the card that Hase predicts from
MOST_LEFT = 1.5  # logarithm at which errors of the bounds are clipped


def learn(tables: Sequence[Table], without: Collection[str] = (), base: str = BASE, most: int = PAIR_KERNELS,
          threads: int | None = None) -> CardRatios:
    """Learns from all pairs of cards of each table, except those `without`. `base` is the card whose times are converted; at
    most `most` kernels of a table count for each pair."""
    generator = np.random.default_rng(0)
    features, left, weights = [], [], []
    for table in tables:
        for begin, end in itertools.permutations([name for name in table.ms if name not in without], 2):
            both = np.flatnonzero(np.isfinite(table.ms[begin]) & np.isfinite(table.ms[end]))
            if not len(both):
                continue
            chosen = generator.choice(both, min(most, len(both)), replace=False)
            work, begin_s, end_s = table.work.rows(chosen), 1e-3 * table.ms[begin][chosen], 1e-3 * table.ms[end][chosen]
            cards = card(begin), card(end)
            here, there = (bounds_of(work, of, SHORTEST_US[table.name]) for of in cards)
            features.append(features_of(work, begin_s, here, there, *cards))
            left.append(np.log(end_s / begin_s / ratio_of_bounds(work, begin_s, here, there, *cards)))
            weights.append(np.full(len(chosen), BASE_WEIGHT if begin == base else 1.0))
    rows = xgboost.DMatrix(np.concatenate(features), np.clip(np.concatenate(left), -MOST_LEFT, MOST_LEFT),
                           weight=np.concatenate(weights))
    settings = BOOSTER if threads is None else BOOSTER | {"nthread": threads}
    return CardRatios(xgboost.train(settings, rows, ROUNDS))


MOST_ADJUSTED = 0.8  # logarithm at which errors are clipped: larger ones are wrong labels or cliffs
OF_CARD, NEARBY, LENGTH, NOISE = 0.05, 0.05, 3.0, 0.02  # the process's priors
HELD = 0.9  # share of times in a range
SUMMED, DRAWS = 4, 4000  # kernels in a sum that stands for a model (few, since its kernels are alike), and sums


def scale_of(features: Floats) -> tuple[Floats, Floats]:
    """Means and spreads that scale features; kinds are scaled already."""
    means, spreads = features.mean(axis=0), features.std(axis=0)
    kind_columns = np.arange(features.shape[1]) >= features.shape[1] - len(KINDS)
    return np.where(kind_columns, 0.0, means), np.where(kind_columns | (spreads < 1e-9), 1.0, spreads)


def adjust(ratios: CardRatios, work: Work, base_ms: Floats, measured_ms: Floats, base: GpuDataSheet, gpu: GpuDataSheet,
           table: str = OWN) -> AdjustedRatios:
    """The ratios, corrected by kernels measured on a card. `base_ms` and `measured_ms` are their times on the base card and on
    this one."""
    kernels, process = sklearn.gaussian_process.kernels, sklearn.gaussian_process.GaussianProcessRegressor
    left = np.clip(np.log(measured_ms / ratios.times_ms(work, base_ms, base, gpu, table)), -MOST_ADJUSTED, MOST_ADJUSTED)
    features = process_features(work, base_ms, base, gpu, table)
    means, spreads = scale_of(features)
    of_card, nearby = kernels.ConstantKernel(OF_CARD, (1e-3, 1.0)), kernels.ConstantKernel(NEARBY, (1e-3, 1.0))
    learned = process(of_card + nearby * kernels.RBF(LENGTH, (1.0, 30.0)) + kernels.WhiteKernel(NOISE, (1e-3, 0.3)))
    with warnings.catch_warnings():  # the optimum may be at a bound of the plausible range if there are few kernels
        warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)
        learned.fit((features - means) / spreads, left)
    fitted, inverse = learned.kernel_.k1, np.linalg.inv(learned.L_ @ learned.L_.T)
    left_out = learned.alpha_ / np.diag(inverse)
    low, high = _ends(left_out, measured_ms / np.exp(left_out))
    return AdjustedRatios(ratios.booster, GaussianProcess(
        learned.X_train_, learned.alpha_, means, spreads, float(fitted.k1.constant_value), float(fitted.k2.k1.constant_value),
        float(fitted.k2.k2.length_scale)), gpu, table, low, high, left_out)


def _ends(left_out: Floats, times_ms: Floats) -> tuple[float, float]:
    """The multiples that contain 90 % of models' times, from the errors of each measured kernel left out. A model's time is a
    sum over kernels, whose errors partly cancel, so sums of SUMMED kernels stand for models. With fewer kernels, the range is
    wider."""
    drawn = np.random.default_rng(0).integers(len(left_out), size=(DRAWS, SUMMED))
    sums = (np.exp(left_out) * times_ms)[drawn].sum(axis=1) / times_ms[drawn].sum(axis=1)
    low, high = np.log(np.quantile(sums, [(1 - HELD) / 2, (1 + HELD) / 2])) * (1.0 + 1.0 / np.sqrt(len(left_out)))
    return float(np.exp(min(low, 0.0))), float(np.exp(max(high, 0.0)))


def write_sheet(folder: Path, ratios: CardRatios, base: str, cards: tuple[str, ...], own: tuple[str, ...], alike: SheetRange,
                unlike: SheetRange) -> None:
    """Writes what was learned; the arguments are those of `SheetModel`."""
    numbers, arrays = as_arrays(ratios.booster)
    packed = io.BytesIO()
    np.savez_compressed(packed, allow_pickle=False, **arrays)
    path = folder / "booster.npz"
    files.write_bytes(path, packed.getvalue())
    files.write_json(folder / "data_sheet.json", SheetModel(
        base=base, cards=cards, own=own, alike=alike, unlike=unlike, booster=numbers, sha256=files.sha256(path)))


def correction_of(ratios: AdjustedRatios, target: str, base: str, measured_ms: dict[str, float]) -> Correction:
    """The file of corrected ratios; the arguments are its fields."""
    process = ratios.process
    return Correction(
        gpu=ratios.gpu.slug, target=target, base=base, created=datetime.now(UTC).isoformat(timespec="seconds"),
        known=tuple(map(tuple, process.known.tolist())), pulls=tuple(process.pulls.tolist()),
        means=tuple(process.means.tolist()), spreads=tuple(process.spreads.tolist()), of_card=process.of_card,
        nearby=process.nearby, length=process.length,
        low=ratios.low, high=ratios.high, measured_ms=measured_ms)

LEAST_SHARE = 0.9  # of the time at a card's peak: shorter times are impossible
ABOUT = ("kind", "dtype", "operator", "shape", "flops", "moved_bytes", "outputs", "launches", "split")
COLUMNS = ("table", *ABOUT, "gpu", "ms")


class Table(NamedTuple):
    """The same kernels on several cards. `ms` has the times by the card's short name (NaN if not measured), `splits` the
    source's own split of each kernel ("" without one)."""

    name: str
    operators: list[str]
    splits: list[str]
    work: Work
    ms: dict[str, Floats]


def read_tables(path: Path) -> list[Table]:
    """The tables in a file of COLUMNS, with a line for each kernel on each card. Impossible times are left out."""
    try:
        rows = pd.read_csv(path, keep_default_na=False, dtype={"table": "category", "gpu": "category"})
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no table of kernels on several cards ({error}); make it with recipes/gpus/derive_tables.py"
                        ) from None
    if missing := [column for column in COLUMNS if column not in rows]:
        raise UserError(f"{path}: lacks the columns {', '.join(missing)}")
    for name in rows["gpu"].unique():
        card(str(name))
    return [_table(str(name), table_rows) for name, table_rows in rows.groupby("table", sort=True, observed=True)]


def _table(name: str, rows: pd.DataFrame) -> Table:
    table = _as_written(name, rows)
    for gpu, wrong in impossible(table).items():
        table.ms[gpu][wrong] = np.nan
    return table


def _as_written(name: str, rows: pd.DataFrame) -> Table:
    times = rows.pivot_table(index=list(ABOUT), columns="gpu", values="ms", aggfunc="median", observed=True)
    about = times.index.to_frame(index=False)
    flops, moved_bytes, outputs = (about[column].to_numpy(float) for column in ("flops", "moved_bytes", "outputs"))
    work = Work(flops, moved_bytes, outputs,
                np.array([KINDS.index(kind) for kind in about["kind"]], dtype=int),
                np.array([DTYPES.index(dtype) for dtype in about["dtype"]], dtype=int), about["launches"].to_numpy(float))
    return Table(name, about["operator"].tolist(), about["split"].tolist(), work,
                 {str(gpu): times[gpu].to_numpy(float, copy=True) for gpu in times.columns})


def impossible(table: Table) -> dict[str, npt.NDArray[np.bool_]]:
    """Which times of each card are shorter than its data sheet allows, so that they must be wrong."""
    return {name: too_short(table.work, ms, card(name)) for name, ms in table.ms.items()}


def too_short(work: Work, ms: Floats, gpu: GpuDataSheet) -> npt.NDArray[np.bool_]:
    """Which times (ms) of kernels are shorter than the card's data sheet allows."""
    return np.asarray(ms * 1e-3 < LEAST_SHARE * work.flops / peaks_flop_s(work, gpu))


def card(name: str) -> GpuDataSheet:
    """The card with this name in a table."""
    gpu = gpu_named(name)
    if gpu is None:
        raise UserError(f"{name}: not in the catalogue of GPUs (records/gpus.yaml)")
    return gpu

def card_of(name: str | None, device_name: str) -> GpuDataSheet:
    """The card that the user names, from the catalogue or a file; by default the one with the device's name."""
    gpu = named_or_in_file(name) if name else gpu_named(device_name)
    if gpu is None:
        raise UserError(f"{name or device_name}: no such card is known; give its data sheet with --gpu FILE.yaml (a list "
                        "`gpus:` like that of records/gpus.yaml)")
    return gpu


def on_base(kernels: Sequence[Kernel], base: Predictors, strict: bool = False) -> tuple[Work, Floats]:
    """The work of kernels, and their times on the base card (ms); with `strict`, all predicted."""
    times_ms, launches = (base.predict(kernels, {}, label, strict).latency_ms for label in (GPU_LABEL, LAUNCHES))
    return work_of(kernels, launches), np.array(times_ms)

# How near kernels have to be to tell of each other, in standard deviations of their features. Shorter than what the process
# begins with: with 1, thirty chosen kernels of an H100 leave an error of 6.5 % of the others, with 3 one of 7.0 %, and thirty
# that are drawn at random 7.1 %.
CHOOSING_LENGTH = 1.0


def most_useful(work: Work, base_ms: Floats, wanted: Work, wanted_ms: Floats, base: GpuDataSheet, count: int) -> list[int]:
    """The indices of the kernels to measure, in the order in which they reduce the uncertainty of the wanted kernels most.
    `work` and `base_ms` are of the kernels to choose from, `wanted` and `wanted_ms` of those to predict well, each as often as
    it counts. Times are on the base card."""
    candidates, others = process_features(work, base_ms, base, base), process_features(wanted, wanted_ms, base, base)
    means, spreads = scale_of(others)
    candidates, others = (candidates - means) / spreads, (others - means) / spreads
    with_wanted, among = (OF_CARD + NEARBY * similarity(candidates, other, CHOOSING_LENGTH) for other in (others, candidates))
    left = np.ones(len(candidates), dtype=bool)
    chosen: list[int] = []
    for _ in range(min(count, len(candidates))):
        gains = (with_wanted**2).sum(axis=1) / (np.diag(among) + NOISE)
        index = int(np.argmax(np.where(left, gains, -1.0)))
        left[index] = False
        chosen.append(index)
        share = among[:, index] / (among[index, index] + NOISE)
        with_wanted -= np.outer(share, with_wanted[index])
        among -= np.outer(share, among[index])
    return chosen

log = get_logger("train")
PAIRS = 1500  # common kernels that correct the ratio from the data sheets; the others measure its error


class WithCarried(NamedTuple):
    """A training set with further rows, their kernels by id, and their entry in the sidecar."""

    rows: TrainingSet
    kernels: dict[str, Kernel]
    about: Carried


def with_carried(rows: TrainingSet, workspace: Workspace, tables: Path) -> WithCarried:
    """Adds idle kernels of another card (in `workspace`) to the training set, for forms that it lacks. Their times are
    multiplied by the ratio of both cards, corrected by kernels that both measured (`tables`). The error on other common kernels
    is drawn for each row (`carried_errors`), so that doubt includes it."""
    targets = [target for target in collected_targets(workspace) if target != rows.header.target.name]
    if len(targets) != 1:
        raise UserError(f"{workspace.root}: has {len(targets)} datasets of other cards; one is needed to carry kernels over")
    other = read_training_set(workspace, targets[0])
    base, gpu = (card(header.target.device_name) for header in (other.header, rows.header))
    known = set(zip(rows.types.tolist(), rows.forms.tolist(), strict=True))
    new = np.array([form not in known for form in zip(other.types.tolist(), other.forms.tolist(), strict=True)])
    other = other.rows(new & other.idle & np.isfinite(other.times_ms[GPU_LABEL]))
    kernels = {entry.kernel.id: entry.kernel for entry in read_kernels(workspace.dataset(targets[0]), set(other.ids.tolist()))}
    work = work_of([kernels[name] for name in other.ids.tolist()], np.nan_to_num(other.times_ms[LAUNCHES], nan=1.0).tolist())
    ratios, errors = ratios_between(base, gpu, next((table for table in read_tables(tables) if table.name == OWN), None))
    times_ms = ratios.times_ms(work, other.times_ms[GPU_LABEL], base, gpu)
    drawn = np.random.default_rng(0).choice(errors, len(other))
    log.info("%d kernels of %s are carried over to %s; %s", len(kernels), base.name, gpu.name, carried_error_text(errors))
    return WithCarried(_joined(rows, other, times_ms, drawn), kernels, Carried(
        card=base.name, kernels=len(kernels), dataset_sha256=other.sha256))


def ratios_between(base: GpuDataSheet, gpu: GpuDataSheet, table: Table | None) -> tuple[AdjustedRatios, Floats]:
    """The ratios from one card to another, fitted to PAIRS kernels that both measured. Also returns the errors of the other
    common kernels, as logarithms. Raises UserError: the table has fewer than twice PAIRS kernels of both."""
    if table is None or not {base.slug, gpu.slug} <= set(table.ms):
        raise UserError(f"the tables have no kernels of ONNX Runtime on both {base.name} and {gpu.name}")
    begin_ms, end_ms = table.ms[base.slug], table.ms[gpu.slug]
    both = np.flatnonzero(np.isfinite(begin_ms) & np.isfinite(end_ms))
    if len(both) < 2 * PAIRS:
        raise UserError(f"the tables have {len(both)} kernels of both {base.name} and {gpu.name}; {2 * PAIRS} are needed")
    order = np.random.default_rng(0).permutation(both)
    learned, judged = order[:PAIRS], order[PAIRS:]
    ratios = adjust(read_sheet()[1], table.work.rows(learned), begin_ms[learned], end_ms[learned], base, gpu)
    carried_ms = ratios.times_ms(table.work.rows(judged), begin_ms[judged], base, gpu)
    return ratios, np.log(end_ms[judged] / carried_ms)


def carried_error_text(errors: Floats) -> str:
    """The error of converted kernels in words, from the logarithms of measured over converted times."""
    (low, high), middle = np.expm1(np.quantile(errors, (0.05, 0.95))), np.median(np.abs(np.expm1(errors)))
    return (f"of {len(errors)} others that both measured, half are within {middle:.1%}, nine of ten within {low:+.0%} and "
            f"{high:+.0%}")


def _joined(rows: TrainingSet, other: TrainingSet, times_ms: Floats, errors: Floats) -> TrainingSet:
    """The rows, and those of another card with these times and drawn errors."""
    count = len(other)
    nothing = np.full(count, np.nan)
    carried = {GPU_LABEL: times_ms, LAUNCHES: other.times_ms[LAUNCHES]}
    return replace(
        rows, ids=np.concatenate([rows.ids, other.ids]), types=np.concatenate([rows.types, other.types]),
        forms=np.concatenate([rows.forms, other.forms]), groups=(*rows.groups, *other.groups),
        collections=(*rows.collections, *other.collections), backgrounds=np.concatenate([rows.backgrounds, other.backgrounds]),
        idle=np.concatenate([rows.idle, other.idle]), features=np.concatenate([rows.features, other.features]),
        load=np.concatenate([rows.load, np.tile(list(rows.idle_load.values()), (count, 1))]),
        times_ms={label: np.concatenate([own_ms, carried.get(label, nothing)]) for label, own_ms in rows.times_ms.items()},
        drifts={label: np.concatenate([drifts, np.zeros(count)]) for label, drifts in rows.drifts.items()},
        flops=np.concatenate([rows.flops, other.flops]), bytes_moved=np.concatenate([rows.bytes_moved, other.bytes_moved]),
        dtypes=tuple(sorted({*rows.dtypes, *other.dtypes})), carried_errors=np.concatenate([rows.carried_errors, errors]))
