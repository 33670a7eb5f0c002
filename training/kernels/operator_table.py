"""A table of measured operators: how many kernels of each, and how far off they are, held out alone or with their operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hase.kernel_model.sampling.kernel_errors import REMAKE, KernelError, read_errors
from hase.learned.kernels.settings import LAUNCHES, TrainingConfig
from hase.ort_analysis.cuda.placement import cuda_operators
from hase.records.dataset_files import read_kernels
from hase.records.kernel_record import Kernel
from hase.records.kernel_types import operator_of
from hase.records.measurement import GPU_LABEL
from hase.records.operators import VIEWS, operator_row
from hase.training.kernels.operators_left_out import LeftOutOperator, leave_operators_out
from hase.training.kernels.targets import Show
from hase.training.kernels.training_set import TrainingSet, read_training_set
from hase.utils import files
from hase.utils.cli.printing import markdown_table
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("training")
BAR = 0.30  # median error that an estimate should stay below
Rows = list[dict[str, Any]]
HOW = (
    "A kernel whose operator was never measured is predicted by the operator's class: element by element, reduction, "
    "normalisation, recurrent, gather and scatter, data movement, product, or convolution. Boosters of the class learn how "
    "many times as long as its roofline a kernel takes, from the bytes, sizes, rank and layout of the operators that were "
    "measured; nothing that they see names an operator. Where operators of a class are clearly closer to the median of their "
    "class than to their boosters, that median is the estimate. An answer counts such kernels as estimated, names their "
    "operators, and has a wider interval.")
NO_ROW = "no row"  # in place of a class
ADDING = (
    "One row in one file, `records/operators.py`: the operator's class and kind, the rule for its operations and bytes, "
    "how often it launches work, which inputs it reads by value (indices, sizes, a shape), and what else Hase asks of an "
    "operator; what a row leaves out is the default. A new rule for operations is one case of `flops` in "
    "`records/kernel_costs.py`. Which operators, versions and types the CUDA provider has is generated "
    "(`ort_analysis/cuda/cuda_kernels.json`, by `recipes/cuda_kernels/probe_kernels.py`). Predictors learn an operator's kind: "
    "after a change of kinds or classes, train anew.")
# Why a kernel of the models that were collected is in no dataset, though its operator is common.
APART = (
    ("Reshape, Squeeze, Unsqueeze, Flatten, Identity", "rename a tensor and give the GPU no work; their time is zero"),
    ("MemcpyToHost, MemcpyFromHost", "copies between host and GPU; measured apart, see how_it_works.md"),
    ("Col2Im, ArgMax of whole numbers, NonMaxSuppression", "the CUDA provider has no kernel for them: they run on the CPU"),
    ("If, Loop, Scan", "their time is that of the nodes in their bodies"))


def operator_rows(rows: TrainingSet, label: str, kernels: Mapping[str, Kernel], errors: Iterable[KernelError],
                  held_out: Iterable[LeftOutOperator]) -> Rows:
    """One row per operator and element type, sorted by class and operator; errors in per cent.

    Args:
        rows: of the dataset.
        label: whose times.
        kernels: all of the dataset by id.
        errors: of kernels that were held out alone.
        held_out: operators that were left out.
    """
    measured = set(rows.ids[rows.idle & np.isfinite(rows.times_ms[label])].tolist())
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in measured:
        operator = operator_of(kernels[name].type)
        groups.setdefault((operator_row(operator).operator_class, operator, kernels[name].dtype), []).append(name)
    alone = {error.kernel.id: abs(error.predicted_ms / error.measured_ms - 1) for error in errors}
    left_out = {each.operator: dict(zip(each.ids.tolist(), each.errors.tolist(), strict=True)) for each in held_out}
    table: Rows = []
    for (kind, operator, dtype), names in sorted(groups.items()):
        row: dict[str, Any] = {"class": kind, "operator": operator, "type": dtype, "kernels": len(names)}
        for column, by_id in (("cross_validated", alone), ("operator_left_out", left_out.get(operator, {}))):
            values = [by_id[name] for name in names if name in by_id]
            row[f"{column}_median_%"] = 100 * float(np.median(values)) if values else None
        table.append(row)
    return table


def summary_rows(held_out: Sequence[LeftOutOperator]) -> Rows:
    """One row per class of operators that were left out in turn, and one for all: medians over operators of their median
    errors, in per cent, and the share of operators below BAR; each operator counts alike."""
    table: Rows = []
    for kind in [*sorted({operator.kind for operator in held_out}), "all"]:
        chosen = [operator for operator in held_out if kind in (operator.kind, "all")]
        if not chosen:
            continue
        medians, roofline = ([float(np.median(errors)) for errors in of] for of in (
            [operator.errors for operator in chosen], [operator.roofline_errors for operator in chosen]))
        table.append({"class": kind, "operators": len(chosen), "median_%": 100 * float(np.median(medians)),
                      "worst_%": 100 * max(medians), "worst": chosen[int(np.argmax(medians))].operator,
                      f"below_{round(100 * BAR)}_%": 100 * float(np.mean([median < BAR for median in medians])),
                      "roofline_median_%": 100 * float(np.median(roofline))})
    return table


def markdown(target: str, label: str, operators: Rows, summary: Rows, launches: Rows, kernels: Iterable[Kernel]) -> str:
    """The page about the operators of a target."""
    measured = {operator_of(kernel.type) for kernel in kernels}
    absent: dict[str, list[str]] = {}
    for row in map(operator_row, sorted(cuda_operators() - measured - VIEWS)):
        if row.base_name not in measured:  # what is fused into an operator is no other operator
            absent.setdefault(row.operator_class if row.listed else NO_ROW, []).append(row.name)
    parts = [
        "# Operators", "",
        f"What the predictors of `{target}` know of each operator (label `{label}`). Written by "
        f"`python training/held_out.py --by operator --target {target} --markdown docs/operators.md`.", "",
        "*Cross-validated*: the median error of kernels that were held out one by one. *Left out*: the median error when no "
        "kernel of the operator was seen at all, so that its time is estimated from the other operators of its class.", "",
        "## An operator that was never measured", "", HOW, "",
        "Each measured operator was left out of everything in turn. The medians are over operators, each counted alike.", "",
        markdown_table(summary), ""]
    if launches:
        parts += ["The same for the number of launches:", "", markdown_table(launches), ""]
    total = f"{sum(row['kernels'] for row in operators):,} kernels of {len({row['operator'] for row in operators})} operators."
    parts += ["## Measured operators", "", total, "", markdown_table(operators), "", "## Not measured", "",
              "Operators that the CUDA provider has and no dataset holds. They are estimated from their class, and the answer "
              "says so. Those without a row in the table of operators count as of class other.", ""]
    parts += [f"- {kind}: {', '.join(names)}" for kind, names in sorted(absent.items())]
    parts += ["", "In models, but in no dataset of kernels:", "", *(f"- {names}: {why}" for names, why in APART), "",
              "## Adding an operator", "", ADDING, ""]
    return "\n".join(parts)


def cross_validated(workspace: Workspace, target: str, rows: TrainingSet, label: str) -> tuple[KernelError, ...]:
    """The errors of kernels held out alone in training. None, and a warning, where it wrote none of this dataset and label."""
    path = workspace.kernel_errors(target)
    errors = read_errors(path) if path.is_file() else None
    if errors is not None and (errors.label, errors.dataset_sha256) == (label, rows.sha256):
        return errors.kernels
    log.warning("%s: %s, so the table has no cross-validated errors; make them with: %s", path,
                "no such file" if errors is None else "not of the present dataset", REMAKE)
    return ()


def operator_report(workspace: Workspace, target: str, config: TrainingConfig, page: Path | None, show: Show) -> dict[str, Any]:
    """The tables of one target, each measured operator left out of everything in turn; also writes them to `page`, with the
    operators of the CUDA provider that no dataset holds."""
    rows = read_training_set(workspace, target)
    kernels = {entry.kernel.id: entry.kernel for entry in read_kernels(workspace.dataset(target))}
    label = GPU_LABEL if GPU_LABEL in rows.times_ms else next(iter(rows.times_ms))
    held_out = leave_operators_out(rows, label, config)
    operators = operator_rows(rows, label, kernels, cross_validated(workspace, target, rows, label), held_out)
    summary = summary_rows(held_out)
    launches = summary_rows(leave_operators_out(rows, LAUNCHES, config)) if LAUNCHES in rows.times_ms else []
    show(operators, f"{target}, label {label}: kernels by operator and type; errors in per cent")
    show(summary, f"{target}, label {label}: an operator left out, its time estimated from its class")
    if launches:
        show(launches, f"{target}: an operator left out, its launches estimated from its class")
    if page is not None:
        files.write_text(page, markdown(target, label, operators, summary, launches, kernels.values()))
    return {"operators": operators, "classes": summary, "launches": launches}
