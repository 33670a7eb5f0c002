"""The sum of a model's kernel times, and the longest path through them, against the time of the whole network.

Reads the datasets of some targets, under any runtime, and their kernel records. For each model that was measured whole and by
kernels it adds the kernels up, and finds the longest path in linear time. Which of the two a target uses is chosen, for each
model, by the models of other families; with --choose-by by those of the families named, which then count in no mean error.
Where a composition was fitted, its prediction for the model (from predicted kernels, with the model's family held out of all
training) comes next to it. Under a target with searched schedules, `unsearched` kernels count with the times that they have
without. Mean errors are given for all networks and by `scale`: small, medium and large ones. Of several targets, one table has
each model under all of them. Prints tables; writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from hase.graph_model.simulation.dag import build_dag, longest_path
from hase.learned import target_files
from hase.learned.composition.fitted import Kind, base_times_ms, read_composition
from hase.learned.kernels.measured import measured_times
from hase.records.dataset_files import collected_targets, read_header, read_journal
from hase.records.dataset_tables import read_model_table
from hase.records.host_pace import idle_models
from hase.records.kernel_record import ModelRecord
from hase.records.kernel_record_files import read_model_record, record_path
from hase.records.measurement import Label
from hase.records.operators import SCALES, network_kind, network_scale
from hase.runtimes import runtime_named
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("sum_and_path")
IN_MODEL: Label = "kernel_time"  # on a CPU, times with this label add up to the model's; datasets may lack it
KINDS: tuple[Kind, ...] = ("sum", "critical_path")
EXAMPLES = """
python inference/sum_and_path.py
python inference/sum_and_path.py --choose-by densenet --choose-by efficientnet
python inference/sum_and_path.py --target amd-epyc-2t-cpu-avx512-tvm0.27-fused --target amd-epyc-2t-cpu-avx512-ort1.31-all
"""


def record_times_ms(record: ModelRecord, measured: Mapping[str, Mapping[str, float]], label: str) -> dict[str, float]:
    """The measured times (ms) of a record's kernels by id; 0 for those that only rename a tensor."""
    known = {name: measured.get(name, {}) for name in record.kernels}
    if missing := [name for name, kernel in record.kernels.items() if kernel.moves_data and label not in known[name]]:
        raise UserError(f"{record.model}: {len(missing)} of {len(known)} kernels were not measured, {missing[0]} for instance")
    return {name: times.get(label, 0.0) for name, times in known.items()}


def times_without_search(workspace: Workspace, target: Target) -> dict[str, dict[str, float]]:
    """The measured times (ms), by kernel id and label, of kernels that no schedule was searched for yet.

    A target with searched schedules runs these kernels as the target without search does, under which they were measured.
    """
    flavour, runtime = target.flavour, runtime_named(target.flavour.runtime)
    if (level := runtime.runs_as.get(flavour.optimization)) is None:
        return {}
    without = target.model_copy(update={"flavour": flavour.model_copy(update={"optimization": level})})
    if without.name not in collected_targets(workspace):
        return {}
    built = workspace.kernel_onnx / flavour.name
    return {name: times for name, times in measured_times(workspace, without.name).items()
            if not (built / f"{name}{runtime.kernel_suffix}").is_file()}


def chosen_by_others(rows: Sequence[Mapping[str, Any]], index: int, families: Sequence[str] = ()) -> str:
    """The composition with the smaller mean error on models of other families than that of the row `index`.

    It is the sum if there are no such models, or if both are equally good. Only `families` count, or all if none are named.
    """
    other_families = [row for row in rows
                      if row["family"] != rows[index]["family"] and (not families or row["family"] in families)]
    errors = {kind: fmean(abs(row[f"{kind}_error_%"]) for row in other_families) if other_families else 0.0 for kind in KINDS}
    return min(KINDS, key=errors.__getitem__)


def error_percent(composed_ms: float, whole_ms: float) -> float:
    return 100 * (composed_ms / whole_ms - 1)


def model_row(record: ModelRecord, whole_ms: float, times_ms: Mapping[str, float]) -> dict[str, Any]:
    """The sum, longest path and errors of one model; `chain` is the number of kernels in the longest path."""
    dag, composed = build_dag(record), base_times_ms(record, times_ms)
    path = longest_path(dag, {node.name: times_ms[node.kernel_id] for node in record.nodes})[1]
    return {"model": record.model, "family": record.group,
            "network": network_kind(kernel.op_type for kernel in record.kernels.values()),
            "scale": network_scale(len(record.nodes)), "nodes": len(record.nodes), "chain": len(path), "whole_ms": whole_ms,
            **{f"{kind}_ms": composed[kind] for kind in KINDS},
            **{f"{kind}_error_%": error_percent(composed[kind], whole_ms) for kind in KINDS}}


def target_rows(workspace: Workspace, target: str, families: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A row for each model of a target. The models of `families`, by default of all, choose the composition."""
    folder = workspace.dataset(target)
    header, searched = read_header(folder), measured_times(workspace, target)
    unsearched = {name: times for name, times in times_without_search(workspace, header.target).items() if name not in searched}
    measured = searched | unsearched
    label = IN_MODEL if IN_MODEL in header.labels else header.labels[0]
    memory = {m.id: m.facts.get("peak_memory_mib") for block in read_journal(folder) for m in block.measurements
              if m.subject == "model" and m.status == "ok"}
    predicted = {model.model: model.predicted_ms for model in read_composition(workspace.predictors(target)).models} if (
        target_files.COMPOSITION.path(workspace.predictors(target)).is_file()) else {}
    rows = []
    for name, times in idle_models(read_model_table(workspace, target)).iterrows():
        path = record_path(workspace, header.target.flavour, str(name))
        try:
            record = read_model_record(path)
            row = model_row(record, float(times["median_ms"]), record_times_ms(record, measured, label))
        except UserError as error:
            log.warning("%s: left out: %s", target, error)
            continue
        if header.target.flavour.optimization in runtime_named(header.target.flavour.runtime).runs_as:
            row["unsearched"] = len(unsearched.keys() & record.kernels.keys())
        rows.append({"target": target, "label": label, **row, "peak_MiB": memory.get(record.model)})
    if rows and (missing := set(families) - {row["family"] for row in rows}):
        log.warning("%s: no model of %s was measured, so it does not help to choose", target, ", ".join(sorted(missing)))
    for index, row in enumerate(rows):
        used = chosen_by_others(rows, index, families)
        row |= {"used": used, "used_error_%": row[f"{used}_error_%"]}
        if row["model"] in predicted:
            row |= {"predicted_ms": predicted[row["model"]],
                    "predicted_error_%": error_percent(predicted[row["model"]], row["whole_ms"])}
    return rows


def mean_errors(rows: Sequence[Mapping[str, Any]], families: Sequence[str] = ()) -> dict[str, Any]:
    """The mean absolute errors of a target over models of other families; over all models if there are no others."""
    rows = [row for row in rows if row["family"] not in families] or rows
    statistics: dict[str, Any] = {"target": rows[0]["target"], "models": len(rows)}
    for column in ("sum", "critical_path", "used", "predicted"):
        errors = [abs(row[f"{column}_error_%"]) for row in rows if f"{column}_error_%" in row]
        statistics |= {f"{column}_MAPE_%": fmean(errors) if errors else None, f"{column}_max_%": max(errors, default=None)}
    return statistics


def by_scale(rows: Sequence[Mapping[str, Any]], families: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The mean errors of a target for small, medium and large networks."""
    return [{"target": rows[0]["target"], "scale": scale} | mean_errors(part, families)
            for scale in SCALES if (part := [row for row in rows if row["scale"] == scale])]


def comparison(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each model that several targets have: its measured and its predicted latency under each.

    The prediction has the model's family held out. `tables` are the targets' rows, by the targets' short names.
    """
    by_model: dict[str, dict[str, Any]] = {}
    target_counts = Counter(row["model"] for rows in tables.values() for row in rows)
    for name, rows in tables.items():
        for row in rows:
            by_model.setdefault(row["model"], {"model": row["model"]}).update({
                f"{name}_ms": row["whole_ms"], f"{name}_predicted_ms": row.get("predicted_ms"),
                f"{name}_error_%": row.get("predicted_error_%")})
    return [row for model, row in sorted(by_model.items()) if target_counts[model] > 1]


def short_names(targets: Sequence[Target]) -> list[str]:
    """A distinct short name for each target: its runtime, or its full name if others have the same runtime."""
    runtimes = Counter(target.flavour.runtime for target in targets)
    return [target.flavour.runtime if runtimes[target.flavour.runtime] == 1 else target.name for target in targets]


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", action="append", metavar="NAME", help="whose dataset (repeatable; default: all)")
    parser.add_argument("--choose-by", action="append", default=[], metavar="FAMILY",
                        help="whose models choose between sum and path (repeatable; default: all other families)")
    args = parser.parse_args()
    workspace = cli.start(args)
    tables = [rows for target in args.target or collected_targets(workspace)
              if (rows := target_rows(workspace, target, args.choose_by))]
    if not tables:
        raise UserError("no model was measured together with its kernels; measure with: python benchmark/collector.py")
    families = {row["family"] for rows in tables for row in rows}
    if missing := set(args.choose_by) - families:
        raise UserError(f"--choose-by: no target has measured models of {', '.join(sorted(missing))}; there are: "
                        f"{', '.join(sorted(families))}")
    summaries = [mean_errors(rows, args.choose_by) for rows in tables]
    scales = [row for rows in tables for row in by_scale(rows, args.choose_by)]
    targets = [read_header(workspace.dataset(rows[0]["target"])).target for rows in tables]
    compared = comparison(dict(zip(short_names(targets), tables, strict=True)))
    if args.json:
        cli.print_json({"targets": summaries, "scales": scales, "models": [row for rows in tables for row in rows],
                        "compared": compared})
        return
    for rows in tables:
        cli.print_table([{name: value for name, value in row.items() if name not in ("target", "family")} for row in rows],
                        str(rows[0]["target"]))
    if compared:
        cli.print_table(compared, "measured, and predicted with the model's family held out (ms)")
    cli.print_table(scales, "mean errors against the whole network, by its size")
    cli.print_table(summaries, "mean errors against the whole network")


if __name__ == "__main__":
    cli.run(main)
