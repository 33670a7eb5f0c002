"""Adds kernels of another card to a training set, carried over to the set's own card: of forms that nobody measured there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hase.learned.data_sheet.adjusted import AdjustedRatios, adjust
from hase.learned.data_sheet.ratios import OWN
from hase.learned.data_sheet.saved import read_sheet
from hase.learned.data_sheet.work import Floats, work_of
from hase.learned.kernels.settings import LAUNCHES
from hase.learned.kernels.sidecar import Carried
from hase.records.dataset_files import collected_targets, read_kernels
from hase.records.gpu_catalogue import Gpu
from hase.records.kernel_record import Kernel
from hase.records.measurement import GPU_LABEL
from hase.training.data_sheet.tables import Table, card, read_tables
from hase.training.kernels.training_set import TrainingSet, read_training_set
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("train")
PAIRS = 1500  # kernels that both cards have: so many correct what the data sheets say of the ratio, the others judge that


class WithCarried(NamedTuple):
    """A training set with further rows, their kernels by id, and what the sidecar says of them."""

    rows: TrainingSet
    kernels: dict[str, Kernel]
    about: Carried


def with_carried(rows: TrainingSet, workspace: Workspace, tables: Path) -> WithCarried:
    """The training set, and the idle kernels of another card whose forms it lacks.

    Their times are multiplied by the ratio of both cards, which kernels that both measured correct. How far off that is with
    other kernels of both is drawn for each row (`carried_errors`), so that doubt counts it.

    Args:
        rows: of the card's own dataset.
        workspace: with the other card's dataset.
        tables: measured kernels of both cards.

    Raises:
        UserError: the workspace has not one dataset of another card, or the tables lack one of the cards.
    """
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
    log.info("%d kernels of %s are carried over to %s; %s", len(kernels), base.name, gpu.name, said_of(errors))
    return WithCarried(_joined(rows, other, times_ms, drawn), kernels, Carried(
        card=base.name, kernels=len(kernels), dataset_sha256=other.sha256))


def ratios_between(base: Gpu, gpu: Gpu, table: Table | None) -> tuple[AdjustedRatios, Floats]:
    """How times go from one card to another by kernels that both measured, and the errors of others of them, as logarithms.

    Raises:
        UserError: the table has fewer than twice PAIRS kernels of both.
    """
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


def said_of(errors: Floats) -> str:
    """How far off kernels are that are carried over, in words, by the logarithms of measured over carried times of kernels that
    both cards measured."""
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
        times_ms={label: np.concatenate([of_label, carried.get(label, nothing)]) for label, of_label in rows.times_ms.items()},
        drifts={label: np.concatenate([drifts, np.zeros(count)]) for label, drifts in rows.drifts.items()},
        flops=np.concatenate([rows.flops, other.flops]), bytes_moved=np.concatenate([rows.bytes_moved, other.bytes_moved]),
        dtypes=tuple(sorted({*rows.dtypes, *other.dtypes})), carried_errors=np.concatenate([rows.carried_errors, errors]))
