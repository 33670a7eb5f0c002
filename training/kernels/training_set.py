"""A target's dataset as arrays, which predictors are trained on."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from hase.learned.kernels.features import KERNEL_FEATURES, FeatureSchema
from hase.learned.kernels.interface import TrainingSet
from hase.learned.kernels.measured import _drifts, _times
from hase.records.dataset_files import DatasetHeader, kernel_table_path, kernels_path, read_header, read_kernels
from hase.records.dataset_tables import read_kernel_table
from hase.records.kernel_record import Kernel
from hase.records.kernel_types import kernel_form
from hase.records.measurement import COLLECT
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.lazy import pandas as pd
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("training")


def read_training_set(workspace: Workspace, target: str, schema: FeatureSchema = KERNEL_FEATURES) -> TrainingSet:
    """The dataset of `target` as arrays, with kernels described by the features of `schema`."""
    folder = workspace.dataset(target)
    header, table = read_header(folder), _measured(read_kernel_table(workspace, target))
    described = {entry.kernel.id: entry for entry in read_kernels(folder)}
    kernels = {name: entry.kernel for name, entry in described.items()}
    excluded = table["Background"].isin(header.held_out_backgrounds)
    if header.held_out_backgrounds:
        log.info("%d kernel rows were measured next to held-out backgrounds (%s) and are not used", int(excluded.sum()),
                 ", ".join(header.held_out_backgrounds))
    table = table[~excluded]
    owners = [frozenset(filter(None, groups.split("|"))) for groups in table["Groups"].fillna("")]
    held_out = set(header.held_out)
    learned = np.array([not names or bool(names - held_out) for names in owners], dtype=bool)
    if held_out:
        log.info("%d kernel rows belong to held-out families alone (%s) and are not used", int((~learned).sum()),
                 ", ".join(sorted(held_out)))
    table = table[learned]
    owners = [names for names, kept in zip(owners, learned, strict=True) if kept]
    unknown = sorted(set(table["Kernel_ID"]) - set(kernels))
    if unknown:
        raise UserError(f"{kernels_path(folder)}: no description of kernel {unknown[0]} of the table; "
                        f"the dataset is damaged, make it anew: {COLLECT}")
    if not len(table):
        raise UserError(f"{kernel_table_path(folder)}: no measured kernel to learn from; measure with: {COLLECT}")
    kernel_collections = {name: header.collections_of(described[name]) for name in set(table["Kernel_ID"])}
    collections = tuple(kernel_collections[name] for name in table["Kernel_ID"])
    return _arrays(header, files.sha256(kernel_table_path(folder)), table, owners, collections, kernels, schema)


def _measured(table: pd.DataFrame) -> pd.DataFrame:
    """The rows with status ok. Others are counted and named in a warning."""
    failed = table[table["Status"] != "ok"]
    if len(failed):
        counts = Counter(failed["Status"].fillna("without a status"))
        names = sorted(set(failed["Kernel_ID"].astype(str)))
        log.warning("%d rows were not measured and are not used (%s): %s%s", len(failed),
                    ", ".join(f"{count} {status}" for status, count in counts.items()), ", ".join(names[:5]),
                    f" and {len(names) - 5} more kernels" if len(names) > 5 else "")
    return table[table["Status"] == "ok"]


def _arrays(header: DatasetHeader, sha256: str, table: pd.DataFrame, owners: list[frozenset[str]],
            collections: tuple[frozenset[str], ...], kernels: dict[str, Kernel], schema: FeatureSchema) -> TrainingSet:
    ids = table["Kernel_ID"].to_numpy(dtype=str)
    described = sorted(set(ids))
    form = {name: kernel_form(kernels[name]) for name in described}
    row_of = {name: row for row, name in enumerate(described)}
    idle = table["Level"].to_numpy(dtype=float) == 0.0
    if not idle.any():
        raise UserError(f"dataset {header.target.name}: no idle rows (Level 0); measure them with: {COLLECT}")
    metrics = _metrics_of(header, table, idle)
    try:
        load = np.array(table[list(metrics)], dtype=float).reshape(len(table), len(metrics))
    except (KeyError, ValueError) as error:
        raise UserError(f"the dataset of {header.target.name}: the metrics in kernel_latency.csv are damaged ({error}); make "
                        f"it anew: {COLLECT}") from None
    if np.isinf(load).any():
        raise UserError(f"the dataset of {header.target.name}: a metric in kernel_latency.csv is infinite; make it anew: "
                        f"{COLLECT}")
    times_ms = _times(table, header.target.flavour.device)
    idle_load = {name: float(np.nanmedian(load[idle, column])) for column, name in enumerate(metrics)}
    load[idle] = list(idle_load.values())
    return TrainingSet(
        header=header, sha256=sha256, ids=ids, types=np.array([kernels[name].type for name in ids]),
        forms=np.array([form[name] for name in ids]), groups=tuple(owners),
        collections=collections, backgrounds=table["Background"].fillna("").to_numpy(dtype=str), idle=idle,
        schema=schema, features=schema.matrix(kernels[name] for name in described)[[row_of[name] for name in ids]],
        load=load, metrics=metrics, idle_load=idle_load, times_ms=times_ms, drifts=_drifts(table, times_ms),
        flops=np.array([kernels[name].flops for name in ids], dtype=float),
        bytes_moved=np.array([kernels[name].bytes_read + kernels[name].bytes_written for name in ids], dtype=float),
        dtypes=tuple(sorted({kernels[name].dtype for name in set(ids)})), carried_errors=np.zeros(len(ids)))


def _metrics_of(header: DatasetHeader, table: pd.DataFrame, idle: npt.NDArray[np.bool_]) -> tuple[str, ...]:
    """The metrics that both idle and loaded rows have, which tell them apart. Metrics added late may be in few rows yet."""
    kinds = [kind for kind in (idle, ~idle) if kind.any()]
    in_table = [name for name in header.metrics if name in table.columns]
    metrics = tuple(name for name in in_table if all(table[name][kind].notna().any() for kind in kinds))
    if unused := sorted(set(header.metrics) - set(metrics)):
        log.warning("%s: no row that is idle, or none under load, has %s, so it is not learned from; kernels that are measured "
                    "from now on have it", header.target.name, ", ".join(unused))
    return metrics


