"""Compares the sum of kernel times with the measured latency of whole models, for each label.

Reads the datasets in benchmark/dataset (by default of every target) and the kernel records of their models. For each model that
was measured idle it adds up the kernel times of its nodes, label by label, and if available the times measured within this
model. Prints one row per model, then one row per label; writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from records.blocks import Block
from records.dataset_files import collected_targets, model_table_path, read_header, read_journal, run_ms
from records.dataset_tables import UNFINISHED, read_kernel_table, read_model_table
from records.host_pace import idle_models
from records.kernel_costs import is_control_flow
from records.kernel_record import REMAKE, ModelRecord, Node
from records.kernel_record_files import read_model_record, record_path
from records.measurement import COLLECT, DISTURBANCE_ADMITTED, GPU_LABEL, LABELS
from utils import cli
from utils.errors import UserError
from utils.frozen import Frozen
from utils.logger import get_logger
from utils.paths import Workspace

if TYPE_CHECKING:
    import pandas as pd

log = get_logger("labels")
Times = dict[str, float]  # ms by kernel id
SOURCES = {
    "run": "wall time of the kernel's own session",
    "kernel_time": "ONNX Runtime's profile of the node, in a model or a carrier",
    "node_span": "from the node's start to the next one's, in the same profile",
    "unprofiled": "the same profile, minus the time that the profiler adds to the run",
    GPU_LABEL: "CUPTI: the CUDA kernels, copies and fills on the GPU",
}
OVERHEAD = {  # of the framework, in a label, by execution provider
    "cpu": {"run": "yes: that of a whole run", "kernel_time": "a little: the profiler's",
            "node_span": "yes: between nodes, and the profiler's", "unprofiled": "yes: a whole run's, in equal parts"},
    "cuda": {"run": "yes: that of a whole run, with its wait for the GPU",
             "kernel_time": "it is the host's dispatch (and the profiler's), not the GPU's work",
             "node_span": "the same, and what lies between nodes", GPU_LABEL: "no"},
}
EXAMPLES = """
python benchmark/label_table.py
python benchmark/label_table.py --workspace out/h200 --target nvidia-h200-cuda-ort1.31-all --model resnet18 vgg16
"""


class LabelSum(Frozen):
    """The sum of one label over the kernels of a model.

    Attributes:
        sum_ms: over the nodes whose kernel has the label.
        ratio: of the sum to the measured latency.
        lacking: number of nodes whose kernel lacks the label.
        in_model_ms: the sum of the times measured within this model; None if some are missing.
    """

    sum_ms: float
    ratio: float
    lacking: int
    in_model_ms: float | None = None


class ModelLabels(Frozen):
    """A model's idle latency (median, ms) and the sums of the labels of its kernels.

    Attributes:
        pace: time of the GPU's host meanwhile over its usual time, a ratio (see `idle_models`).
    """

    model: str
    nodes: int
    measured_ms: float
    pace: float = 1.0
    labels: dict[str, LabelSum]


class LabelSummary(Frozen):
    """One label over all models of a target.

    Attributes:
        models: number of models in which no node lacks it; the ratios, sum over measured, are of these (None without any).
    """

    label: str
    source: str
    overhead: str
    models: int
    median: float | None
    least: float | None
    most: float | None


def label_times(table: pd.DataFrame, device: str) -> dict[str, Times]:
    """The idle times of each label by kernel id, medians over the machines, from a kernel table; without labels that no kernel
    has. Kernels that are only partly measured count with the labels they have."""
    good = table[(table["Level"] == 0) & table["Status"].isin(("ok", UNFINISHED))]
    times_by_label: dict[str, Times] = {}
    for label in LABELS:
        if label == "run":
            of_label = good.assign(time_ms=run_ms(good, device))
        elif f"{label}_ms" in good.columns:
            of_label = good.assign(time_ms=good[f"{label}_ms"])
        else:
            continue
        of_label = of_label[np.isfinite(of_label["time_ms"].to_numpy(dtype=float))]
        if len(of_label):
            medians_ms = of_label.groupby("Kernel_ID")["time_ms"].median()
            times_by_label[label] = {str(name): float(time_ms) for name, time_ms in medians_ms.items()}
    return times_by_label


def in_model_times(blocks: Iterable[Block]) -> dict[str, dict[str, Times]]:
    """Times of kernels measured within models on an idle device: medians (ms) by model, label and kernel id."""
    samples: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for block in blocks:
        for m in block.measurements:
            if (m.subject, m.status, block.level) == ("kernel", "ok", 0.0) and m.place == "in_model":
                samples[m.context][m.label][m.id] += m.samples_ms
    return {model: {label: {kernel: float(np.median(samples_ms)) for kernel, samples_ms in of_label.items()}
                    for label, of_label in labels.items()} for model, labels in samples.items()}


def node_times(record: ModelRecord, label: str, times: Times) -> list[float | None]:
    """The time of each node under a label (ms, all its runs), None if its kernel has none. A view that moves no data takes the
    GPU no time; the time of a node with a body is that of the body's nodes."""
    def time_of(node: Node) -> float | None:
        kernel = record.kernel_of(node)
        if is_control_flow(kernel) or (label == GPU_LABEL and not kernel.moves_data):
            return 0.0
        time = times.get(node.kernel_id)
        return None if time is None else node.runs * time

    return [time_of(node) for node in record.nodes]


def add_up(record: ModelRecord, measured_ms: float, gpu_ms: float | None, times: Mapping[str, Times],
           within: Mapping[str, Times]) -> ModelLabels:
    """The sums of the labels of a model's kernels.

    Args:
        record: of the model.
        measured_ms: its latency.
        gpu_ms: label `gpu` of the whole model, if it was measured.
        times: by label, the time of each kernel (ms, by id).
        within: the same, measured within this model.
    """
    labels = {}
    for label in times:
        known = [time for time in node_times(record, label, times[label]) if time is not None]
        inside = node_times(record, label, within.get(label, {}))
        in_model = gpu_ms if label == GPU_LABEL else None if None in inside else sum(time or 0.0 for time in inside)
        labels[label] = LabelSum(sum_ms=sum(known), ratio=sum(known) / measured_ms, lacking=len(record.nodes) - len(known),
                                 in_model_ms=in_model)
    return ModelLabels(model=record.model, nodes=len(record.nodes), measured_ms=measured_ms, labels=labels)


def chosen(models: Sequence[str], wanted: Sequence[str] | None, folder: Path) -> list[str]:
    """The models whose names begin with one of `wanted`; all if none is given.

    Raises:
        UserError: no model's name begins with one of them.
    """
    for name in wanted or ():
        if not any(model.startswith(name) for model in models):
            raise UserError(f"--model {name}: no model measured idle in {model_table_path(folder)} has such a name; "
                            f"it holds: {', '.join(models[:5])}{' …' if len(models) > 5 else ''}")
    return [model for model in models if wanted is None or model in wanted or model.startswith(tuple(wanted))]


def model_labels(workspace: Workspace, target: str, wanted: Sequence[str] | None = None) -> list[ModelLabels]:
    """The models of a target that were measured idle, by name. Models without a kernel record are logged and left out.

    Args:
        workspace: holds the dataset and the records.
        target: name of a dataset.
        wanted: names of models, or how they begin.

    Raises:
        UserError: the dataset can't be read, a name fits none of its models, or no model is left.
    """
    folder = workspace.dataset(target)
    header = read_header(folder)
    idle = idle_models(read_model_table(workspace, target), with_disturbed=True)
    gpu_ms = {str(name): float(time) for name, time in idle["gpu_ms"].dropna().items()}
    times = label_times(read_kernel_table(workspace, target), header.target.flavour.device)
    within = in_model_times(read_journal(folder))
    models = []
    for name in chosen([str(model) for model in idle.index], wanted, folder):
        path = record_path(workspace, header.target.flavour, name)
        if not path.is_file():
            log.warning("%s: measured, but has no record (%s); left out. Make it with: %s", name, path, REMAKE)
            continue
        added_up = add_up(read_model_record(path), float(idle["median_ms"][name]), gpu_ms.get(name), times,
                          within.get(name, {}))
        models.append(added_up.model_copy(update={"pace": float(idle["pace"][name])}))
    if not models:
        raise UserError(f"{folder}: no model that was measured idle and has a kernel record; measure models with: "
                        f"{COLLECT}")
    return models


def summaries(models: Sequence[ModelLabels], device: str) -> list[LabelSummary]:
    """One summary per label, of at least one model. `device` is that of the target."""
    label_summaries = []
    for label in models[0].labels:
        ratios = [model.labels[label].ratio for model in models if not model.labels[label].lacking]
        median, least, most = (float(of(ratios)) if ratios else None for of in (np.median, min, max))
        label_summaries.append(LabelSummary(label=label, source=SOURCES[label], overhead=OVERHEAD[device].get(label, "no"),
                                            models=len(ratios), median=median, least=least, most=most))
    return label_summaries


def model_row(model: ModelLabels, in_model: Sequence[str], with_pace: bool = False) -> dict[str, Any]:
    """A model as one row of a table: sums with their share of the measured latency.

    Args:
        model: with the sums of its labels.
        in_model: the labels that some model of the table has with times measured within it.
        with_pace: whether to show how much slower than usual the host was.
    """
    def cell(time_ms: float | None, lacking: int = 0) -> str | None:
        if time_ms is None:
            return None
        return f"{time_ms:.4g} ({time_ms / model.measured_ms:.0%})" + (f", {lacking} lack" if lacking else "")

    row: dict[str, Any] = {"model": model.model, "nodes": model.nodes, "measured (ms)": model.measured_ms}
    if with_pace:
        row["host slower by"] = f"{model.pace - 1:.0%}" if model.pace - 1 > DISTURBANCE_ADMITTED else None
    for label, of_label in model.labels.items():
        row[f"Σ {label} (ms)"] = cell(of_label.sum_ms, of_label.lacking)
        if label in in_model:
            row[f"{label} in the model (ms)"] = cell(of_label.in_model_ms)
    return row


def percent(ratio: float | None) -> str | None:
    """A ratio for a cell."""
    return None if ratio is None else f"{ratio:.0%}"


def print_tables(target: str, models: Sequence[ModelLabels], labels: Sequence[LabelSummary]) -> None:
    """Prints one row per model, then one row per label."""
    in_model = [label.label for label in labels if any(model.labels[label.label].in_model_ms is not None for model in models)]
    with_pace = any(model.pace - 1 > DISTURBANCE_ADMITTED for model in models)
    cli.print_table([model_row(model, in_model, with_pace) for model in models],
                    f"{target}: sums over a model's nodes, and its latency (sums also as a share of it)")
    print()
    cli.print_table([{"label": label.label, "source": label.source, "framework's overhead": label.overhead,
                      "whole models": label.models, "Σ / measured: median": percent(label.median),
                      "least": percent(label.least), "most": percent(label.most)} for label in labels], "the labels")


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", help="name of a dataset in benchmark/dataset (default: all)")
    parser.add_argument("--model", nargs="+", metavar="NAME", help="models of the dataset by name, or how their names begin "
                        "(default: all)")
    args = parser.parse_args()
    workspace = cli.start(args)
    results = {}
    for target in [args.target] if args.target else collected_targets(workspace):
        models = model_labels(workspace, target, args.model)
        flavour = read_header(workspace.dataset(target)).target.flavour
        labels = summaries(models, flavour.device)
        results[target] = {"models": [model.model_dump(mode="json") for model in models],
                           "labels": [label.model_dump(mode="json") for label in labels]}
        if not args.json:
            print_tables(target, models, labels)
    if args.json:
        cli.print_json(results)
    return 0


if __name__ == "__main__":
    cli.run(main)
