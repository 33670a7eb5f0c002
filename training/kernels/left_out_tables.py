"""Tables and pages for `held_out.py --by operator`, `--by form` and `--by setting`.

They show how many kernels of each operator or form were measured, their errors when held out alone or with their operator or
form, and the cliffs between neighbours. Settings of threads and cores are left out of the datasets of one flavour of TVM; the
environment of each setting (threads, cores, frequency, memory limit, caches) is read as further features.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hase.kernel_model.sampling.cliffs import (
    LEAST_HEIGHT,
    Cliff,
    NothingBetween,
    TimedKernel,
    find_cliffs,
    kernel_between,
    timed_kernels,
)
from hase.kernel_model.sampling.usefulness import REMAKE, KernelError, read_errors
from hase.learned.kernels.interface import TrainingConfig, TrainingSet
from hase.learned.kernels.sidecar import read_sidecar
from hase.ort_analysis.cuda.placement import cuda_operators
from hase.records.dataset_files import collected_targets, read_header, read_kernels
from hase.records.devices import Environment
from hase.records.kernel_record import Kernel
from hase.records.kernel_types import kernel_form, operator_in_type
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.records.operators import CONTROL_FLOW, OPERATORS, VIEWS, operator_row
from hase.training.kernels.fitting import fit_kernel_model
from hase.training.kernels.left_out import LeftOutForm, LeftOutOperator, leave_forms_out, leave_operators_out
from hase.training.kernels.targets import Show
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.text import markdown_table
from hase.utils.timing import error_statistics, time_weighted_error

log = get_logger("training")
Rows = list[dict[str, Any]]

# operators ---------------------------------------------------------------------------------------------------------------

BAR = 0.30  # median error that an estimate should stay below
NO_ROW = "no row"  # in place of the class of operators that the operator table lacks
# Why a kernel of the collected models is in no dataset, although its operator is common.
APART = (
    ("Reshape, Squeeze, Unsqueeze, Flatten, Identity", "rename a tensor and give the GPU no work; their time is zero"),
    ("MemcpyToHost, MemcpyFromHost", "copies between host and GPU; measured apart, see how_it_works.md"),
    ("Col2Im, ArgMax of whole numbers, NonMaxSuppression", "the CUDA provider has no kernel for them: they run on the CPU"),
    ("If, Loop, Scan", "their time is that of the nodes in their bodies"))


def operator_rows(rows: TrainingSet, label: str, kernels: Mapping[str, Kernel], errors: Iterable[KernelError],
                  held_out: Iterable[LeftOutOperator]) -> Rows:
    """A row for each operator and type, sorted by class; errors (per cent) of kernels and of operators that were held out."""
    measured = set(rows.ids[rows.idle & np.isfinite(rows.times_ms[label])].tolist())
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in measured:
        operator = operator_in_type(kernels[name].type)
        groups.setdefault((operator_row(operator).operator_class, operator, kernels[name].dtype), []).append(name)
    alone = {error.kernel.id: abs(error.predicted_ms / error.measured_ms - 1) for error in errors}
    left_out = {operator.operator: dict(zip(operator.ids.tolist(), operator.errors.tolist(), strict=True))
                for operator in held_out}
    table: Rows = []
    for (kind, operator, dtype), names in sorted(groups.items()):
        row: dict[str, Any] = {"class": kind, "operator": operator, "type": dtype, "kernels": len(names)}
        for column, by_id in (("cross_validated", alone), ("operator_left_out", left_out.get(operator, {}))):
            values = [by_id[name] for name in names if name in by_id]
            row[f"{column}_median_%"] = 100 * float(np.median(values)) if values else None
        table.append(row)
    return table


def summary_rows(held_out: Sequence[LeftOutOperator]) -> Rows:
    """One row per class of left-out operators, and for all: medians of their median errors (per cent), the share below BAR."""
    table: Rows = []
    for kind in [*sorted({operator.kind for operator in held_out}), "all"]:
        chosen = [operator for operator in held_out if kind in (operator.kind, "all")]
        if not chosen:
            continue
        medians = [float(np.median(operator.errors)) for operator in chosen]
        roofline = [float(np.median(operator.roofline_errors)) for operator in chosen]
        table.append({"class": kind, "operators": len(chosen), "median_%": 100 * float(np.median(medians)),
                      "worst_%": 100 * max(medians), "worst": chosen[int(np.argmax(medians))].operator,
                      f"below_{round(100 * BAR)}_%": 100 * float(np.mean([median < BAR for median in medians])),
                      "roofline_median_%": 100 * float(np.median(roofline))})
    return table


def operator_page(target: str, label: str, operators: Rows, summary: Rows, launches: Rows, kernels: Iterable[Kernel]) -> str:
    """The page about the operators of a target."""
    measured = {operator_in_type(kernel.type) for kernel in kernels}
    absent: dict[str, list[str]] = {}
    for row in map(operator_row, sorted(cuda_operators() - measured - VIEWS)):
        if row.base_name not in measured:  # an operator with others fused into it is the same operator
            absent.setdefault(row.operator_class if row.name in OPERATORS else NO_ROW, []).append(row.name)
    by_operator = _by_operator(operators)
    parts = [
        "# Measured operators", "",
        f"What the predictors of `{target}` know of each operator (label `{label}`), by `python training/held_out.py "
        f"--by operator --target {target} --markdown FILE`; [operators.md](../operators.md) explains it. *Held out*: median "
        "error in per cent of kernels that were held out one by one. *Left out*: the same where no kernel of the operator was "
        "seen at all.", "",
        "## An operator left out, by class", "", "Medians over operators, each counted alike, in per cent.", "",
        markdown_table(summary), ""]
    if launches:
        parts += ["The same for the number of launches:", "", markdown_table(launches), ""]
    total = f"{sum(row['kernels'] for row in operators):,} kernels of {len(by_operator)} operators."
    parts += ["## Measured", "", total, "", markdown_table(by_operator), "", "## Not measured", "",
              "Operators that the CUDA provider has and no dataset holds; *no row*: not in `records/operators.py`, so of class "
              "other.", ""]
    parts += [f"- {kind}: {', '.join(names)}" for kind, names in sorted(absent.items())]
    parts += ["", "In models, but in no dataset of kernels:", "", *(f"- {names}: {why}" for names, why in APART), ""]
    return "\n".join(parts)


def _by_operator(operators: Rows) -> Rows:
    """One row per operator, with the values of its types as lists in the cells, in the same order."""
    table: Rows = []
    for (kind, operator), rows in itertools.groupby(operators, key=lambda row: (row["class"], row["operator"])):
        types = list(rows)
        table.append({"class": kind, "operator": operator, "type": ", ".join(row["type"] for row in types),
                      "kernels": ", ".join(str(row["kernels"]) for row in types),
                      "held_out_%": _listed(types, "cross_validated_median_%"),
                      "left_out_%": _listed(types, "operator_left_out_median_%")})
    return table


def _listed(rows: Rows, column: str) -> str:
    return ", ".join("–" if row[column] is None else f"{row[column]:.1f}" for row in rows)


def cross_validated(workspace: Workspace, target: str, rows: TrainingSet, label: str) -> tuple[KernelError, ...]:
    """The errors of kernels held out alone in training; empty, with a warning, if it wrote none for this dataset and label."""
    path = workspace.kernel_errors(target)
    errors = read_errors(path) if path.is_file() else None
    if errors is not None and (errors.label, errors.dataset_sha256) == (label, rows.sha256):
        return errors.kernels
    log.warning("%s: %s, so the table has no cross-validated errors; make them with: %s", path,
                "no such file" if errors is None else "not of the present dataset", REMAKE)
    return ()


def operator_report(workspace: Workspace, target: str, config: TrainingConfig, page: Path | None, show: Show) -> dict[str, Any]:
    """The tables of one target, each measured operator left out of everything in turn; also writes them to `page`. The page
    also lists the operators of the CUDA provider that are in no dataset."""
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
        files.write_text(page, operator_page(target, label, operators, summary, launches, kernels.values()))
    return {"operators": operators, "classes": summary, "launches": launches}


# forms and cliffs --------------------------------------------------------------------------------------------------------

FAR_OFF = 0.30  # an error from which a prediction should be marked
ENOUGH = 12  # kernels of a form that count as covering it
HIGHEST = 20  # cliffs that a page shows


def form_error_rows(forms: Sequence[LeftOutForm]) -> Rows:
    """One row per class of operators, and one for all: errors of kernels with their form left out, in per cent."""
    table: Rows = []
    for kind in [*sorted({form.kind for form in forms}), "all"] if forms else ():
        chosen = [form for form in forms if kind in (form.kind, "all")]
        errors = np.concatenate([form.errors for form in chosen])
        table.append({"class": kind, "forms": len(chosen), "kernels": len(errors), "median_%": 100 * float(np.median(errors)),
                      f"off_by_over_{round(100 * FAR_OFF)}_%": 100 * float((errors > FAR_OFF).mean())})
    return table


def form_rows(timed: Sequence[TimedKernel]) -> Rows:
    """One row per kernel type: its kernels and forms, and how many forms have at least ENOUGH kernels."""
    counts = Counter((entry.kernel.type, kernel_form(entry.kernel)) for entry in timed)
    table = []
    for name in sorted({kind for kind, _ in counts}):
        type_counts = [count for (kind, _), count in counts.items() if kind == name]
        table.append({"type": name, "kernels": sum(type_counts), "forms": len(type_counts),
                      f"with_{ENOUGH}_kernels": sum(count >= ENOUGH for count in type_counts)})
    return table


def never_measured(types: Collection[str]) -> list[str]:
    """The operators of ONNX Runtime's CUDA provider that move data and were not measured."""
    return sorted(name for name in cuda_operators() - VIEWS - CONTROL_FLOW if (operator_row(name).base or name) not in types)


def cliff_rows(cliffs: Sequence[Cliff]) -> Rows:
    """One row per cliff: both kernels, their times and CUDA kernels, the slowdown that work does not explain, and the edge."""
    return [{"times": round(cliff.height, 1), "slower": cliff.slower.kernel.id, "slower_ms": cliff.slower.time_ms,
             "slower_ran": _first_cuda_kernel(cliff.slower.cuda_kernels), "faster": cliff.faster.kernel.id,
             "faster_ms": cliff.faster.time_ms, "faster_ran": _first_cuda_kernel(cliff.faster.cuda_kernels),
             "edge": _edge(cliff)} for cliff in cliffs]


def _first_cuda_kernel(names: str) -> str:
    """The first CUDA kernel that computes something, without arguments, shortened."""
    parts = [name.removeprefix("void ").partition("(")[0].partition("<")[0] for name in names.split("|")]
    chosen = next((name for name in parts if not name.startswith(("Memcpy", "Memset"))), parts[0])
    return chosen[:60]


def _edge(cliff: Cliff) -> str:
    """Whether the edge of a cliff is known: no kernel lies between the two. Not all kernels can be sampled."""
    try:
        kernel_between(cliff.slower.kernel, cliff.faster.kernel)
    except NothingBetween:
        return "known"
    except UserError:
        return "not drawn"
    return "between"


def form_page(target: str, forms: Rows, left_out: Rows, cliffs: Sequence[Cliff]) -> str:
    """The page about the forms of a target."""
    by_type = Counter(cliff.slower.kernel.type for cliff in cliffs)
    missing, highest = never_measured({row["type"] for row in forms}), cliff_rows(cliffs[:HIGHEST])
    digits = [{name: f"{value:.3g}" if isinstance(value, float) else value for name, value in row.items()} for row in highest]
    kernels, form_count, covered = (sum(row[name] for row in forms) for name in ("kernels", "forms", f"with_{ENOUGH}_kernels"))
    return "\n".join([
        "# Forms and cliffs", "",
        f"What `{target}` was measured in (label `{GPU_LABEL}`), by `python training/held_out.py --by form --target {target} "
        "--markdown FILE`; [operators.md](../operators.md#forms) says what forms and cliffs are.", "",
        "## A form left out", "",
        "Forms were left out of the training of their operators, a fifth of them at a time.", "", markdown_table(left_out), "",
        "## Cliffs", "",
        f"Neighbours differ in sizes alone; a cliff is where the slower one takes at least {LEAST_HEIGHT:g} times as long as "
        f"its work explains. {len(cliffs):,} pairs of neighbours (each kernel is in one at most). The edge is *known* where no "
        "kernel lies between the two; some can't be drawn.", "",
        *(["By type: " + ", ".join(f"{name} {count}" for name, count in by_type.most_common()) + ".", ""] if cliffs else []),
        f"The {len(highest)} highest:", "", markdown_table(digits), "",
        "## Measured forms", "",
        f"{kernels:,} kernels in {form_count:,} forms, {covered:,} of which have at least {ENOUGH} kernels.", "",
        markdown_table(forms), "",
        "## Not covered", "",
        f"{len(missing)} operators that ONNX Runtime's CUDA provider has were never measured: {', '.join(missing)}.", ""])


def form_report(workspace: Workspace, target: str, config: TrainingConfig, page: Path | None, show: Show) -> dict[str, Any]:
    """The tables of one target: its forms, each left out in turn, and its cliffs; also writes them to `page`."""
    timed = timed_kernels(workspace, target)
    chosen = read_sidecar(workspace.predictors(target)).labels[GPU_LABEL].chosen
    forms, rows = form_rows(timed), read_training_set(workspace, target)
    left_out = form_error_rows(leave_forms_out(rows, GPU_LABEL, chosen, config))
    cliffs = find_cliffs(timed)
    show(forms, f"{target}: kernels and forms by type")
    highest = cliff_rows(cliffs[:HIGHEST])
    show(highest, f"{target}: the highest of {len(cliffs)} cliffs")
    show(left_out, f"{target}: a form left out; errors in per cent")
    if page is not None:
        files.write_text(page, form_page(target, forms, left_out, cliffs))
    return {"forms": forms, "left_out": left_out, "cliffs": highest}


# settings of threads and cores, for TVM ----------------------------------------------------------------------------------

ENVIRONMENT_FEATURES = ("threads", "cores", "mhz", "memory_limit_mib", "l1_kib", "l2_kib", "l3_kib")  # of an Environment
JOINED_COLUMNS = ("ids", "types", "forms", "backgrounds", "idle", "features", "load", "flops",
                  "bytes_moved")  # of a TrainingSet
LEAST_SETTINGS = 3


def environment_row(environment: Environment) -> list[float]:
    """The features of an environment: logarithms to base 2."""
    return [math.log2(1 + getattr(environment, name)) for name in ENVIRONMENT_FEATURES]


def with_environment(rows: TrainingSet, environment: Environment) -> TrainingSet:
    """The idle rows of a dataset, with the environment in place of the load."""
    idle = rows.rows(rows.idle)
    values = environment_row(environment)
    return replace(idle, load=np.tile(values, (len(idle), 1)), metrics=ENVIRONMENT_FEATURES,
                   idle_load=dict(zip(ENVIRONMENT_FEATURES, values, strict=True)))


def joined(parts: Sequence[TrainingSet]) -> TrainingSet:
    """The rows of several settings, concatenated; header and hash are those of the first."""
    def stacked(name: str) -> Any:
        return np.concatenate([getattr(part, name) for part in parts])

    label = parts[0].header.labels[0]
    return replace(
        parts[0], **{name: stacked(name) for name in JOINED_COLUMNS},
        groups=tuple(group for part in parts for group in part.groups),
        collections=tuple(owners for part in parts for owners in part.collections),
        times_ms={label: np.concatenate([part.times_ms[label] for part in parts])},
        drifts={label: np.concatenate([part.drifts[label] for part in parts])})


def setting_error_rows(settings: dict[str, TrainingSet], target: str, config: TrainingConfig) -> list[dict[str, Any]]:
    """The errors on one setting's kernels after training on the other settings: a row each for known and for new kernels."""
    learned, left_out = joined([rows for name, rows in settings.items() if name != target]), settings[target]
    label = left_out.header.labels[0]
    predicted_ms = fit_kernel_model(learned, label, {}, config).predict_ms(left_out.kernels)
    known, table = np.isin(left_out.ids, learned.ids), []
    for name, chosen in (("known", known), ("new", ~known)):
        if chosen.any():
            predicted, measured = predicted_ms[chosen], left_out.times_ms[label][chosen]
            errors = error_statistics(predicted.tolist(), measured.tolist())
            table.append({
                "left_out": target, "threads": left_out.header.target.threads, "cores": left_out.header.target.cores,
                "kernels": name, "count": len(measured), "learned_from": len(learned), "MAPE_%": 100 * errors.mape,
                "median_%": 100 * errors.median, "time_weighted_%": 100 * time_weighted_error(predicted, measured)})
    return table


def settings_of(workspace: Workspace, level: str) -> dict[str, TrainingSet]:
    """The datasets that have an environment and TVM's flavour with this optimisation level, by target."""
    settings = {}
    for target in collected_targets(workspace):
        header = read_header(workspace.dataset(target))
        if header.environment is not None and header.target.flavour.optimization == level:
            settings[target] = with_environment(read_training_set(workspace, target), header.environment)
    if len(settings) < LEAST_SETTINGS:
        raise UserError(f"{workspace.dataset('')}: {len(settings)} settings of level {level} were measured, and leaving one "
                        f"out needs {LEAST_SETTINGS}; measure under other threads and cores: python benchmark/collector.py "
                        "(docs/tvm.md)")
    return settings
