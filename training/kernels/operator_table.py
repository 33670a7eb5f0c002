"""A table of measured operators: how many kernels of each, and how far off they are, held out alone or with their operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kernel_model.sampling.kernel_errors import KernelError
from records.kernel_record import Kernel
from records.kernel_types import operator_of
from records.operators import VIEWS, operator_row
from runtimes.ort.cuda.placement import cuda_operators
from training.kernels.operators_left_out import LeftOutOperator
from training.kernels.training_set import TrainingSet
from utils.markdown import markdown_table

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
    "(`runtimes/ort/cuda/cuda_kernels.json`, by `recipes/cuda_kernels/probe_kernels.py`). Predictors learn an operator's kind: "
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
        f"`python training/leave_operators_out.py --target {target} --markdown docs/operators.md`.", "",
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
