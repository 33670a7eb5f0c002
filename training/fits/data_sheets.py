"""Learns how kernels' times differ between cards, from tables of several cards and from kernels measured on one card.

A kernel's time on another card is its time on the base card, multiplied by the ratio of its bounds on both cards
(learned/data_sheet/work.py). A booster corrects this for products and attention, which public tables have for many cards. It
learns from all pairs of cards, and from other operators too, since these bring further cards. Other kinds are not corrected:
their tables are fp32, from older cards and PyTorch, and make predictions for ONNX Runtime worse (an H100's: 12.5 % with them,
9.1 % without).

Kernels measured on a card correct the others by a Gaussian process (`adjust_ratios`). `most_useful` chooses them.
`with_carried` adds another card's kernels to a training set, for forms that were not measured on its own card.
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
from hase.learned.kernels.saved_form import booster_to_arrays
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

LEAST_SHARE = 0.9  # of the time at a card's peak: shorter times are impossible
ABOUT = ("kind", "dtype", "operator", "shape", "flops", "moved_bytes", "outputs", "launches", "split")
COLUMNS = ("table", *ABOUT, "gpu", "ms")
PAIR_KERNELS = 2500  # of a table, for each pair of cards
ROUNDS = 300
BOOSTER: dict[str, Any] = {"max_depth": 5, "learning_rate": 0.07, "subsample": 0.7, "colsample_bytree": 0.6,
                           "min_child_weight": 20, "objective": "reg:absoluteerror", "lambda": 5.0, "seed": 0}
BASE_WEIGHT = 3.0  # of pairs that begin at the card that Hase predicts from
CLIPPED_LOG_ERROR = 1.5  # of the bounds; larger errors count as this
CLIPPED_LOG_CORRECTION = 0.8  # of a card's measured kernels; larger errors are wrong labels or cliffs
CARD_VARIANCE, NEARBY_VARIANCE, LENGTH_SCALE, NOISE_VARIANCE = 0.05, 0.05, 3.0, 0.02  # the process's priors
# The length by which kernels to measure are chosen, in standard deviations of their features, is shorter than the prior: with
# 1, thirty chosen kernels of an H100 leave an error of 6.5 % of the others, with 3 one of 7.0 %, and thirty random ones 7.1 %.
CHOOSING_LENGTH = 1.0
COVERED = 0.9  # share of times in a range
SUM_KERNELS, SUMS = 4, 4000  # kernels in a sum that stands for a model (few, since a model's kernels are alike), and sums
PAIRS = 1500  # common kernels that correct the ratio from the data sheets; the others measure its error
log = get_logger("train")


class Table(NamedTuple):
    """The same kernels on several cards, with their times (NaN if not measured) by the card's short name."""

    name: str
    work: Work
    ms: dict[str, Floats]


def read_card_tables(path: Path) -> list[Table]:
    """The tables in a file of COLUMNS, with a line for each kernel on each card. Impossible times are left out."""
    try:
        rows = pd.read_csv(path, keep_default_na=False, dtype={"table": "category", "gpu": "category"})
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no table of kernels on several cards ({error}); make it with recipes/gpus/derive_tables.py"
                        ) from None
    if missing := [column for column in COLUMNS if column not in rows]:
        raise UserError(f"{path}: lacks the columns {', '.join(missing)}; make it with recipes/gpus/derive_tables.py")
    for name in rows["gpu"].unique():
        card(str(name))
    return [_table(str(name), table_rows) for name, table_rows in rows.groupby("table", sort=True, observed=True)]


def _table(name: str, rows: pd.DataFrame) -> Table:
    times = rows.pivot_table(index=list(ABOUT), columns="gpu", values="ms", aggfunc="median", observed=True)
    about = times.index.to_frame(index=False)
    flops, moved_bytes, outputs, launches = (about[column].to_numpy(float) for column in (
        "flops", "moved_bytes", "outputs", "launches"))
    kinds, dtypes = (np.array([known.index(value) for value in about[column]], dtype=int)
                     for column, known in (("kind", KINDS), ("dtype", DTYPES)))
    work = Work(flops, moved_bytes, outputs, kinds, dtypes, launches)
    times_ms = {str(gpu): times[gpu].to_numpy(float, copy=True) for gpu in times.columns}
    for gpu, ms in times_ms.items():
        ms[ms * 1e-3 < LEAST_SHARE * work.flops / peaks_flop_s(work, card(gpu))] = np.nan
    return Table(name, work, times_ms)


def card(name: str) -> GpuDataSheet:
    """The data sheet of a card, by its name in a table or that of a device."""
    gpu = gpu_named(name)
    if gpu is None:
        raise UserError(f"{name}: not in the catalogue of GPUs (records/gpus.yaml)")
    return gpu


def chosen_card(name: str | None, device_name: str) -> GpuDataSheet:
    """The data sheet of the card that the user names (in the catalogue or by a file), by default of the device."""
    gpu = named_or_in_file(name) if name else gpu_named(device_name)
    if gpu is None:
        raise UserError(f"{name or device_name}: no such card is known; give its data sheet with --gpu FILE.yaml (a list "
                        "`gpus:` like that of records/gpus.yaml)")
    return gpu


# ratios between cards ----------------------------------------------------------------------------------------------------

def fit_card_ratios(tables: Sequence[Table], without: Collection[str] = (), base: str = BASE,
                    threads: int | None = None) -> CardRatios:
    """Learns from all pairs of cards of each table, except cards in `without`. Pairs that begin at card `base` count most."""
    generator = np.random.default_rng(0)
    features, log_errors, weights = [], [], []
    for table in tables:
        for begin, end in itertools.permutations([name for name in table.ms if name not in without], 2):
            both = np.flatnonzero(np.isfinite(table.ms[begin]) & np.isfinite(table.ms[end]))
            if not len(both):
                continue
            chosen = generator.choice(both, min(PAIR_KERNELS, len(both)), replace=False)
            work, begin_s, end_s = table.work.rows(chosen), 1e-3 * table.ms[begin][chosen], 1e-3 * table.ms[end][chosen]
            cards = card(begin), card(end)
            here, there = (bounds_of(work, gpu, SHORTEST_US[table.name]) for gpu in cards)
            features.append(features_of(work, begin_s, here, there, *cards))
            log_errors.append(np.log(end_s / begin_s / ratio_of_bounds(work, begin_s, here, there, *cards)))
            weights.append(np.full(len(chosen), BASE_WEIGHT if begin == base else 1.0))
    rows = xgboost.DMatrix(np.concatenate(features), np.clip(np.concatenate(log_errors), -CLIPPED_LOG_ERROR, CLIPPED_LOG_ERROR),
                           weight=np.concatenate(weights))
    settings = BOOSTER if threads is None else BOOSTER | {"nthread": threads}
    return CardRatios(xgboost.train(settings, rows, ROUNDS))


def _means_and_spreads(features: Floats) -> tuple[Floats, Floats]:
    """The means and spreads that standardise features; those of kinds are standardised already."""
    means, spreads = features.mean(axis=0), features.std(axis=0)
    kind_columns = np.arange(features.shape[1]) >= features.shape[1] - len(KINDS)
    return np.where(kind_columns, 0.0, means), np.where(kind_columns | (spreads < 1e-9), 1.0, spreads)


def adjust_ratios(ratios: CardRatios, work: Work, base_ms: Floats, measured_ms: Floats, base: GpuDataSheet, gpu: GpuDataSheet,
                  table: str = OWN) -> AdjustedRatios:
    """The ratios, corrected by kernels that were measured on card `gpu` (`measured_ms`) and on the base card (`base_ms`)."""
    kernels = sklearn.gaussian_process.kernels
    log_errors = np.log(measured_ms / ratios.times_ms(work, base_ms, base, gpu, table))
    features = process_features(work, base_ms, base, gpu, table)
    means, spreads = _means_and_spreads(features)
    shared, nearby = (kernels.ConstantKernel(variance, (1e-3, 1.0)) for variance in (CARD_VARIANCE, NEARBY_VARIANCE))
    learned = sklearn.gaussian_process.GaussianProcessRegressor(
        shared + nearby * kernels.RBF(LENGTH_SCALE, (1.0, 30.0)) + kernels.WhiteKernel(NOISE_VARIANCE, (1e-3, 0.3)))
    with warnings.catch_warnings():  # the optimum may be at a bound of the plausible range if there are few kernels
        warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)
        learned.fit((features - means) / spreads, np.clip(log_errors, -CLIPPED_LOG_CORRECTION, CLIPPED_LOG_CORRECTION))
    fitted, inverse = learned.kernel_.k1, np.linalg.inv(learned.L_ @ learned.L_.T)
    left_out = learned.alpha_ / np.diag(inverse)
    low, high = _range_of_models(left_out, measured_ms / np.exp(left_out))
    return AdjustedRatios(ratios.booster, GaussianProcess(
        learned.X_train_, learned.alpha_, means, spreads, float(fitted.k1.constant_value), float(fitted.k2.k1.constant_value),
        float(fitted.k2.k2.length_scale)), gpu, table, low, high, left_out)


def _range_of_models(left_out: Floats, times_ms: Floats) -> tuple[float, float]:
    """The multiples that contain 90 % of models' times. Sums of SUM_KERNELS kernels stand for models, whose kernels' errors
    partly cancel. With fewer measured kernels, the range is wider."""
    drawn = np.random.default_rng(0).integers(len(left_out), size=(SUMS, SUM_KERNELS))
    sums = (np.exp(left_out) * times_ms)[drawn].sum(axis=1) / times_ms[drawn].sum(axis=1)
    low, high = np.log(np.quantile(sums, [(1 - COVERED) / 2, (1 + COVERED) / 2])) * (1.0 + 1.0 / np.sqrt(len(left_out)))
    return float(np.exp(min(low, 0.0))), float(np.exp(max(high, 0.0)))


def write_sheet(folder: Path, ratios: CardRatios, base: str, cards: tuple[str, ...], own: tuple[str, ...], alike: SheetRange,
                unlike: SheetRange) -> None:
    """Writes the learned ratios to a folder; the other arguments are fields of `SheetModel`."""
    numbers, arrays = booster_to_arrays(ratios.booster)
    packed = io.BytesIO()
    np.savez_compressed(packed, allow_pickle=False, **arrays)
    path = folder / "booster.npz"
    files.write_bytes(path, packed.getvalue())
    files.write_json(folder / "data_sheet.json", SheetModel(
        base=base, cards=cards, own=own, alike=alike, unlike=unlike, booster=numbers, sha256=files.sha256(path)))


def saved_correction(ratios: AdjustedRatios, target: str, base: str, measured_ms: dict[str, float]) -> Correction:
    """The record of corrected ratios that is saved; the other arguments are its fields."""
    process = ratios.process
    return Correction(
        gpu=ratios.gpu.slug, target=target, base=base, created=datetime.now(UTC).isoformat(timespec="seconds"),
        known=tuple(map(tuple, process.known.tolist())), pulls=tuple(process.pulls.tolist()),
        means=tuple(process.means.tolist()), spreads=tuple(process.spreads.tolist()), of_card=process.of_card,
        nearby=process.nearby, length=process.length, low=ratios.low, high=ratios.high, measured_ms=measured_ms)


# kernels of a card -------------------------------------------------------------------------------------------------------

def work_on_base(kernels: Sequence[Kernel], base: Predictors, strict: bool = False) -> tuple[Work, Floats]:
    """The work of kernels, and their times on the base card (ms); with `strict`, measured times are not used."""
    times_ms, launches = (base.predict(kernels, {}, label, strict).latency_ms for label in (GPU_LABEL, LAUNCHES))
    return work_of(kernels, launches), np.array(times_ms)


def most_useful(work: Work, base_ms: Floats, wanted: Work, wanted_ms: Floats, base: GpuDataSheet, count: int) -> list[int]:
    """The indices of the kernels to measure among those of `work`, the one first that most reduces the uncertainty of `wanted`
    kernels (each given as often as it counts). Times are on the base card."""
    candidates, others = process_features(work, base_ms, base, base), process_features(wanted, wanted_ms, base, base)
    means, spreads = _means_and_spreads(others)
    candidates, others = (candidates - means) / spreads, (others - means) / spreads
    with_wanted, among = (CARD_VARIANCE + NEARBY_VARIANCE * similarity(candidates, other, CHOOSING_LENGTH)
                          for other in (others, candidates))  # covariances
    chosen: list[int] = []
    for _ in range(min(count, len(candidates))):
        gains = (with_wanted**2).sum(axis=1) / (np.diag(among) + NOISE_VARIANCE)
        gains[chosen] = -1.0
        index = int(np.argmax(gains))
        chosen.append(index)
        share = among[:, index] / (among[index, index] + NOISE_VARIANCE)
        with_wanted -= np.outer(share, with_wanted[index])
        among -= np.outer(share, among[index])
    return chosen


# kernels carried over from another card ----------------------------------------------------------------------------------

class WithCarried(NamedTuple):
    """A training set with rows of another card, the kernels of these by id, and their entry in the sidecar."""

    rows: TrainingSet
    kernels: dict[str, Kernel]
    about: Carried


def with_carried(rows: TrainingSet, workspace: Workspace, tables: Path) -> WithCarried:
    """Adds idle kernels of another card (in `workspace`) to a training set, for forms that it lacks. Their times are multiplied
    by the ratio of both cards, which kernels in `tables` that were measured on both correct. Each row gets a random one of the
    errors of other common kernels (`carried_errors`), so that intervals include it."""
    targets = [target for target in collected_targets(workspace) if target != rows.header.target.name]
    if len(targets) != 1:
        raise UserError(f"{workspace.root}: has {len(targets)} datasets of other cards; exactly one is needed to carry kernels "
                        "over")
    other = read_training_set(workspace, targets[0])
    base, gpu = (card(header.target.device_name) for header in (other.header, rows.header))
    known = set(zip(rows.types.tolist(), rows.forms.tolist(), strict=True))
    new = np.array([form not in known for form in zip(other.types.tolist(), other.forms.tolist(), strict=True)])
    other = other.rows(new & other.idle & np.isfinite(other.times_ms[GPU_LABEL]))
    kernels = {entry.kernel.id: entry.kernel for entry in read_kernels(workspace.dataset(targets[0]), set(other.ids.tolist()))}
    work = work_of([kernels[name] for name in other.ids.tolist()], np.nan_to_num(other.times_ms[LAUNCHES], nan=1.0).tolist())
    ratios, errors = _ratios_between(base, gpu, next((table for table in read_card_tables(tables) if table.name == OWN), None))
    times_ms = ratios.times_ms(work, other.times_ms[GPU_LABEL], base, gpu)
    drawn = np.random.default_rng(0).choice(errors, len(other))
    log.info("%d kernels of %s are carried over to %s; %s", len(kernels), base.name, gpu.name, _carried_error_text(errors))
    return WithCarried(_joined(rows, other, times_ms, drawn), kernels, Carried(
        card=base.name, kernels=len(kernels), dataset_sha256=other.sha256))


def _ratios_between(base: GpuDataSheet, gpu: GpuDataSheet, table: Table | None) -> tuple[AdjustedRatios, Floats]:
    """The ratios from one card to another, fitted to PAIRS kernels that were measured on both, and the errors (logarithms) of
    the other common kernels. Raises UserError: the table has fewer than twice PAIRS kernels of both."""
    if table is None or not {base.slug, gpu.slug} <= set(table.ms):
        raise UserError(f"the tables have no kernels of ONNX Runtime on both {base.name} and {gpu.name}")
    begin_ms, end_ms = table.ms[base.slug], table.ms[gpu.slug]
    both = np.flatnonzero(np.isfinite(begin_ms) & np.isfinite(end_ms))
    if len(both) < 2 * PAIRS:
        raise UserError(f"the tables have {len(both)} kernels of both {base.name} and {gpu.name}; {2 * PAIRS} are needed")
    order = np.random.default_rng(0).permutation(both)
    learned, judged = order[:PAIRS], order[PAIRS:]
    ratios = adjust_ratios(read_sheet()[1], table.work.rows(learned), begin_ms[learned], end_ms[learned], base, gpu)
    carried_ms = ratios.times_ms(table.work.rows(judged), begin_ms[judged], base, gpu)
    return ratios, np.log(end_ms[judged] / carried_ms)


def _carried_error_text(errors: Floats) -> str:
    """The errors of carried times in words, from the logarithms of measured over carried times."""
    (low, high), middle = np.expm1(np.quantile(errors, (0.05, 0.95))), np.median(np.abs(np.expm1(errors)))
    return (f"of {len(errors)} others that both measured, half are within {middle:.1%}, nine of ten within {low:+.0%} and "
            f"{high:+.0%}")


def _joined(rows: TrainingSet, other: TrainingSet, times_ms: Floats, errors: Floats) -> TrainingSet:
    """The rows, and those of another card with these times and errors."""
    count = len(other)
    same: dict[str, Any] = {name: np.concatenate([getattr(rows, name), getattr(other, name)]) for name in (
        "ids", "types", "forms", "backgrounds", "idle", "features", "flops", "bytes_moved")}
    carried = {GPU_LABEL: times_ms, LAUNCHES: other.times_ms[LAUNCHES]}
    return replace(
        rows, **same, groups=(*rows.groups, *other.groups), collections=(*rows.collections, *other.collections),
        load=np.concatenate([rows.load, np.tile(list(rows.idle_load.values()), (count, 1))]),
        times_ms={label: np.concatenate([own_ms, carried.get(label, np.full(count, np.nan))])
                  for label, own_ms in rows.times_ms.items()},
        drifts={label: np.concatenate([drifts, np.zeros(count)]) for label, drifts in rows.drifts.items()},
        dtypes=tuple(sorted({*rows.dtypes, *other.dtypes})), carried_errors=np.concatenate([rows.carried_errors, errors]))
