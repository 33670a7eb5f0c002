"""A target's dataset as arrays, which predictors are trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hase.learned.kernels.features import KERNEL_FEATURES
from hase.learned.kernels.schema import FeatureSchema, KernelRows
from hase.learned.kernels.settings import LAUNCHES
from hase.records.blocks import labels_unsteady
from hase.records.dataset_files import DatasetHeader, kernel_table_path, kernels_path, read_header, read_kernels, run_ms
from hase.records.dataset_tables import UNFINISHED, read_kernel_table
from hase.records.kernel_record import Kernel
from hase.records.kernel_types import form_of
from hase.records.measurement import COLLECT, DRIFT_ADMITTED, GPU_LABEL, LABELS, drift_key, inputs_key
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.lazy import pandas as pd
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("training")
USUAL_ERROR = 0.1  # of a predicted time, as its logarithm: a row whose drift is as large counts half as much as a steady one
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TrainingSet:
    """The rows of the kernel table that may be learned from: measured successfully, not of held-out families alone, and not
    next to a held-out background.

    A kernel that several machines measured has one row per machine. The predictors minimise squared errors of logarithms, so
    they learn the middle of these rows; folds never separate them. A look-up takes their median (see `measured_times`), as the
    composition does for models.

    Attributes:
        header: of the dataset.
        sha256: of the kernel table, so that one can see what was learned from it.
        ids, types, forms: of the kernel of each row; its form is that of `form_of`.
        groups: of each row, the model families that have its kernel (or near whose shapes it was sampled).
        collections: of each row, those of the models that have its kernel, and those with a family near whose shapes it was
            sampled.
        backgrounds: name of the background of each row; "" for none.
        idle: mask of the rows without background.
        schema: of the features.
        features: rows × the schema's features.
        load: rows × `metrics`; all idle rows have `idle_load`, so that the noise of idle metrics is not learned.
        metrics: names of the columns of `load`.
        idle_load: median of each metric without background.
        times_ms: by label, NaN for rows without it; under LAUNCHES the number of launches.
        drifts: by label, of the unsteady blocks on which times rest (`Block.drift`); 0 for rows that were measured steadily. A
            label without any may be missing.
        flops, bytes_moved: of the kernel of each row.
        dtypes: element types of the kernels.
        carried_errors: of rows that were carried over from another card, an error of that, as a logarithm; 0 for measured rows.
    """

    header: DatasetHeader
    sha256: str
    ids: npt.NDArray[np.str_]
    types: npt.NDArray[np.str_]
    forms: npt.NDArray[np.str_]
    groups: tuple[frozenset[str], ...]
    collections: tuple[frozenset[str], ...]
    backgrounds: npt.NDArray[np.str_]
    idle: npt.NDArray[np.bool_]
    schema: FeatureSchema
    features: Floats
    load: Floats
    metrics: tuple[str, ...]
    idle_load: dict[str, float]
    times_ms: dict[str, Floats]
    drifts: dict[str, Floats]
    flops: Floats
    bytes_moved: Floats
    dtypes: tuple[str, ...]
    carried_errors: Floats

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def kernels(self) -> KernelRows:
        """The rows as estimators read them."""
        return KernelRows(types=self.types, features=self.features, flops=self.flops, bytes_moved=self.bytes_moved,
                          load=self.load)

    def weights(self, label: str) -> Floats | None:
        """How much each row counts where `label` is learned, 1 in the mean; None where all count alike. Rows that were measured
        on an idle device while it was unsteady count less. Under a load the canary itself varies, so its drift says little; and
        what a GPU's trace says of a kernel hardly depends on the host, which the canary is sensitive to."""
        if label not in self.drifts or label in (GPU_LABEL, LAUNCHES) or not self.drifts[label][self.idle].any():
            return None
        of_idle = 1.0 / (1.0 + (np.log1p(self.drifts[label][self.idle]) / USUAL_ERROR) ** 2)
        weights = np.ones(len(self))
        weights[self.idle] = of_idle / of_idle.mean()
        return weights

    def rows(self, mask: npt.NDArray[np.bool_]) -> TrainingSet:
        """The rows where `mask` is true."""
        return replace(
            self, ids=self.ids[mask], types=self.types[mask], forms=self.forms[mask], idle=self.idle[mask],
            features=self.features[mask], backgrounds=self.backgrounds[mask],
            groups=tuple(names for names, kept in zip(self.groups, mask, strict=True) if kept),
            collections=tuple(names for names, kept in zip(self.collections, mask, strict=True) if kept), load=self.load[mask],
            times_ms={label: times[mask] for label, times in self.times_ms.items()},
            drifts={label: drifts[mask] for label, drifts in self.drifts.items()}, flops=self.flops[mask],
            bytes_moved=self.bytes_moved[mask], carried_errors=self.carried_errors[mask])


def read_training_set(workspace: Workspace, target: str, schema: FeatureSchema = KERNEL_FEATURES) -> TrainingSet:
    """The dataset of `target` as arrays, with kernels described by the features of `schema`.

    Raises:
        UserError: there is no dataset, it is damaged, or it has no row to learn from.
    """
    folder = workspace.dataset(target)
    header = read_header(folder)
    table = read_kernel_table(workspace, target)
    described = {entry.kernel.id: entry for entry in read_kernels(folder)}
    kernels = {name: entry.kernel for name, entry in described.items()}
    table = _measured(table)
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
        raise UserError(f"{kernel_table_path(folder)}: no measured kernel to learn from; measure with: "
                        f"{COLLECT}")
    of_kernel = {name: header.collections_of(described[name]) for name in set(table["Kernel_ID"])}
    collections = tuple(of_kernel[name] for name in table["Kernel_ID"])
    return _arrays(header, files.sha256(kernel_table_path(folder)), table, owners, collections, kernels, schema)


def measured_times(workspace: Workspace, target: str) -> dict[str, dict[str, float]]:
    """Idle times (ms) by kernel id and label, for look-up: the median over the machines that measured a kernel.

    Where some machines measured it steadily, these alone count, and else the steadiest. Then the block's drift, a ratio, is
    there too, under `drift_key` of the label. Under `inputs_key` stands a 1 where the time depends on values and the inputs
    were realistic.

    These include kernels of held-out families and kernels that lack the dataset's first label, since nothing is learned from a
    look-up.

    Raises:
        UserError: there is no dataset, or it is damaged.
    """
    header, table = read_header(workspace.dataset(target)), read_kernel_table(workspace, target)
    idle = table[table["Status"].isin(["ok", UNFINISHED]) & (table["Level"] == 0)]
    measured: dict[str, dict[str, float]] = {}
    times_ms = _times(idle, header.target.flavour.device)
    drifts = _drifts(idle, times_ms)
    for label, times in times_ms.items():
        rows = pd.DataFrame({"id": idle["Kernel_ID"].to_numpy(), "time": times, "drift": drifts[label]}).dropna()
        steadiest = rows[rows["drift"] == rows.groupby("id")["drift"].transform("min")]
        for name, time_ms, drift in steadiest.groupby("id").median().itertuples():
            measured.setdefault(str(name), {})[label] = float(time_ms)
            if drift:
                measured[str(name)][drift_key(label)] = float(drift)
    inputs = idle.reindex(columns=["Kernel_ID", "Inputs"]).dropna()
    for name, labels in inputs[inputs["Inputs"] != ""].itertuples(index=False):
        for label in (part.partition(":")[0] for part in labels.split("|")):
            if label in measured.get(str(name), {}):
                measured[str(name)][inputs_key(label)] = 1.0
    return measured


def times_under(label: str, measured: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Of times for look-up (`measured_times`), those under one label, by kernel id; without kernels that take none."""
    return {name: labels[label] for name, labels in measured.items() if labels.get(label, 0.0) > 0}


def _measured(table: pd.DataFrame) -> pd.DataFrame:
    """The rows with status ok. The others are counted and named in a warning."""
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
    form = {name: form_of(kernels[name]) for name in described}
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
        collections=collections,
        backgrounds=table["Background"].fillna("").to_numpy(dtype=str), idle=idle,
        schema=schema, features=schema.matrix(kernels[name] for name in described)[[row_of[name] for name in ids]],
        load=load, metrics=metrics, idle_load=idle_load, times_ms=times_ms, drifts=_drifts(table, times_ms),
        flops=np.array([kernels[name].flops for name in ids], dtype=float),
        bytes_moved=np.array([kernels[name].bytes_read + kernels[name].bytes_written for name in ids], dtype=float),
        dtypes=tuple(sorted({kernels[name].dtype for name in set(ids)})), carried_errors=np.zeros(len(ids)))


def _metrics_of(header: DatasetHeader, table: pd.DataFrame, idle: npt.NDArray[np.bool_]) -> tuple[str, ...]:
    """The metrics that tell idle rows from loaded ones: those that rows of both kinds have. A metric that the dataset got late
    may be in few rows yet."""
    kinds = [kind for kind in (idle, ~idle) if kind.any()]
    in_table = [name for name in header.metrics if name in table.columns]
    metrics = tuple(name for name in in_table if all(table[name][kind].notna().any() for kind in kinds))
    if unused := sorted(set(header.metrics) - set(metrics)):
        log.warning("%s: no row that is idle, or none under load, has %s, so it is not learned from; kernels that are measured "
                    "from now on have it", header.target.name, ", ".join(unused))
    return metrics


def _times(table: pd.DataFrame, device: str) -> dict[str, Floats]:
    """The measured times (ms) by label."""
    times = {"run": run_ms(table, device)}
    for label in LABELS:
        if label != "run" and f"{label}_ms" in table.columns and table[f"{label}_ms"].notna().any():
            column = table[f"{label}_ms"].to_numpy(dtype=float)
            times[label] = np.where(column > 0, column, np.nan)  # nothing to learn from a kernel without work
    if "gpu_launches" in table.columns:
        launches = table["gpu_launches"].to_numpy(dtype=float)
        times[LAUNCHES] = np.where(launches > 0, launches, np.nan)
    return {label: times_ms for label, times_ms in times.items() if np.isfinite(times_ms).any()}


def _drifts(table: pd.DataFrame, labels: Iterable[str]) -> dict[str, Floats]:
    """By label, the drift of the unsteady blocks on which rows of a kernel table rest; 0 for the others.

    A table without column Unsteady is older: its column Drift says what the canary said of all labels of a row.
    """
    labels = [label for label in labels if label != LAUNCHES]  # their number does not depend on how steady the machine is
    drifts = {label: np.zeros(len(table)) for label in (*labels, LAUNCHES)}
    if "Unsteady" not in table.columns:
        drift = table["Drift"].to_numpy(dtype=float) if "Drift" in table.columns else np.zeros(len(table))
        return drifts | {label: np.where(drift > DRIFT_ADMITTED, drift, 0.0) for label in labels}
    unsteady = table["Unsteady"].fillna("").to_numpy(dtype=str)
    for row in np.flatnonzero(unsteady != ""):
        for label, ratio in labels_unsteady(unsteady[row]).items():
            if label in drifts:
                drifts[label][row] = ratio
    return drifts
