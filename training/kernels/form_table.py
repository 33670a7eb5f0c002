"""A page about the forms in which operators were measured: how many, how far off a form is that was never measured, and the
cliffs between neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hase.kernel_model.sampling.cliffs import LEAST_HEIGHT, Cliff, NothingBetween, Timed, between, find_cliffs, timed_kernels
from hase.learned.kernels.settings import TrainingConfig
from hase.learned.kernels.sidecar import read_sidecar
from hase.ort_analysis.cuda.placement import cuda_operators
from hase.records.kernel_types import form_of
from hase.records.measurement import GPU_LABEL
from hase.records.operators import CONTROL_FLOW, VIEWS, operator_row
from hase.training.kernels.forms_left_out import LeftOutForm, leave_forms_out
from hase.training.kernels.targets import Show
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.cli.printing import markdown_table
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

FAR_OFF = 0.30  # an error from which an answer should be marked
ENOUGH = 12  # kernels of a form that count as covering it
HIGHEST = 60  # cliffs that a page shows
Rows = list[dict[str, Any]]


def left_out_rows(forms: Sequence[LeftOutForm]) -> Rows:
    """One row per class of operators, and one for all: errors of kernels whose form was left out, in per cent."""
    table: Rows = []
    for kind in [*sorted({form.kind for form in forms}), "all"] if forms else ():
        chosen = [form for form in forms if kind in (form.kind, "all")]
        errors = np.concatenate([form.errors for form in chosen])
        table.append({"class": kind, "forms": len(chosen), "kernels": len(errors), "median_%": 100 * float(np.median(errors)),
                      f"off_by_over_{round(100 * FAR_OFF)}_%": 100 * float((errors > FAR_OFF).mean())})
    return table


def form_rows(timed: Sequence[Timed]) -> Rows:
    """One row per kernel type: its kernels and forms, and how many forms have at least ENOUGH kernels."""
    counts = Counter((entry.kernel.type, form_of(entry.kernel)) for entry in timed)
    table = []
    for name in sorted({kind for kind, _ in counts}):
        of_type = [count for (kind, _), count in counts.items() if kind == name]
        table.append({"type": name, "kernels": sum(of_type), "forms": len(of_type),
                      f"with_{ENOUGH}_kernels": sum(count >= ENOUGH for count in of_type)})
    return table


def never_measured(types: Collection[str]) -> list[str]:
    """The operators of ONNX Runtime's CUDA provider that move data and are not among the kernel types that were measured."""
    return sorted(name for name in cuda_operators() - VIEWS - CONTROL_FLOW if (operator_row(name).base or name) not in types)


def cliff_rows(cliffs: Sequence[Cliff]) -> Rows:
    """One row per cliff: how many times as long the slower kernel takes as its work explains, both kernels with their times and
    the CUDA kernels that ran, and whether the edge is known, with no kernel between."""
    return [{"times": round(cliff.height, 1), "slower": cliff.slower.kernel.id, "slower_ms": cliff.slower.time_ms,
             "slower_ran": _shown(cliff.slower.cuda_kernels), "faster": cliff.faster.kernel.id,
             "faster_ms": cliff.faster.time_ms, "faster_ran": _shown(cliff.faster.cuda_kernels),
             "edge": _edge(cliff)} for cliff in cliffs]


def _shown(names: str) -> str:
    """The first CUDA kernel that computes something, without arguments, shortened."""
    parts = [name.removeprefix("void ").partition("(")[0].partition("<")[0] for name in names.split("|")]
    chosen = next((name for name in parts if not name.startswith(("Memcpy", "Memset"))), parts[0])
    return chosen[:60]


def _edge(cliff: Cliff) -> str:
    """Whether the edge of a cliff is known: no kernel lies between the two. Not all kernels can be drawn."""
    try:
        between(cliff.slower.kernel, cliff.faster.kernel)
    except NothingBetween:
        return "known"
    except UserError:
        return "not drawn"
    return "between"


def markdown(target: str, forms: Rows, left_out: Rows, cliffs: Sequence[Cliff]) -> str:
    """The page about the forms of a target."""
    by_type = Counter(cliff.slower.kernel.type for cliff in cliffs)
    missing, highest = never_measured({row["type"] for row in forms}), cliff_rows(cliffs[:HIGHEST])
    digits = [{name: f"{value:.3g}" if isinstance(value, float) else value for name, value in row.items()} for row in highest]
    kernels, of_forms, covered = (sum(row[name] for row in forms) for name in ("kernels", "forms", f"with_{ENOUGH}_kernels"))
    return "\n".join([
        "# Forms and cliffs", "",
        f"What `{target}` was measured in (label `{GPU_LABEL}`). Written by `python training/held_out.py --by form --target "
        f"{target} --markdown docs/forms.md`.", "",
        "A form is what libraries choose their algorithms by, other than sizes: an operator's element type and rank, a "
        "convolution's groups and the width of its window, and whether a reduction works along the last axis. A prediction "
        "that rests on a form that was never measured has a wider interval, and is a rough estimate where such kernels take "
        "more than a tenth of its time, or may move it by more than a tenth.", "",
        "## A form that was never measured", "",
        "Forms were left out of the training of their operators, a fifth of them at a time.", "", markdown_table(left_out), "",
        "## Cliffs", "",
        "Neighbours differ in sizes alone. The slower one may take as many times as long as it moves more bytes or computes "
        f"more; a cliff is where it takes {LEAST_HEIGHT:g} times that, or more. {len(cliffs):,} pairs of neighbours are left "
        "(each kernel is in one at most). The edge is *known* where no kernel lies between the two; some can't be drawn.", "",
        *(["By type: " + ", ".join(f"{name} {count}" for name, count in by_type.most_common()) + ".", ""] if cliffs else []),
        f"The {len(highest)} highest:", "", markdown_table(digits), "",
        "## Measured forms", "",
        f"{kernels:,} kernels in {of_forms:,} forms, {covered:,} of which have at least {ENOUGH} kernels.", "",
        markdown_table(forms), "",
        "## Not covered", "",
        f"{len(missing)} operators that ONNX Runtime's CUDA provider has were never measured: {', '.join(missing)}.", ""])


def form_report(workspace: Workspace, target: str, config: TrainingConfig, page: Path | None, show: Show) -> dict[str, Any]:
    """The tables of one target: its forms, each left out in turn, and its cliffs; also writes them to `page`.

    Raises:
        UserError: it is not a GPU's.
    """
    timed = timed_kernels(workspace, target)
    chosen = read_sidecar(workspace.predictors(target)).labels[GPU_LABEL].chosen
    forms, rows = form_rows(timed), read_training_set(workspace, target)
    left_out = left_out_rows(leave_forms_out(rows, GPU_LABEL, chosen, config))
    cliffs = find_cliffs(timed)
    show(forms, f"{target}: kernels and forms by type")
    highest = cliff_rows(cliffs[:HIGHEST])
    show(highest, f"{target}: the highest of {len(cliffs)} cliffs")
    show(left_out, f"{target}: a form left out; errors in per cent")
    if page is not None:
        files.write_text(page, markdown(target, forms, left_out, cliffs))
    return {"forms": forms, "left_out": left_out, "cliffs": highest}
