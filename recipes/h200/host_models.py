"""Errors of models of which a CUDA session runs a part on the host: detectors, decoders, and others with nodes on the CPU.

Reads a workspace with a GPU's dataset, predictors and composition, and with --host the workspace with the host's kernels. Such
a model has kernels on the CPU or copies, or its host waits for the GPU at a Loop or inside a node. Each of their families is
held out: its kernels in the training of the GPU's and of the host's kernels, and its models (with those of all these families)
in the fit of the costs of a run. The detectors' records hold the numbers of boxes that really came.
Prints the errors; writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from inference.core.conditions import Conditions
from inference.core.kernels_in_model import KernelInModel, Placed, kernels_in_models
from inference.core.model_run import ModelRun
from inference.core.run_modes import AS_USUAL
from inference.core.targets import Fitted, fitted_for
from records.kernel_costs import is_control_flow
from records.kernel_record import ModelRecord
from training.composition.cuda_nodes import (
    guessed_ms,
    is_copy,
    reads_shape,
    row_selection_ms,
    selects_boxes,
    selects_in_rows,
    takes_no_time,
    waits_inside,
)
from training.composition.formulas import fit_pipeline
from training.composition.held_out import predict_as_learned
from training.composition.host_side import HOST_LABEL, host_predictors
from training.composition.measured_models import MeasuredModel, TimesOfModels, measured_models, tracks_of
from training.kernels.predictors import ON_GPU, read_predictors
from training.kernels.settings import TrainingConfig
from training.kernels.targets import add_config
from training.kernels.training_set import read_training_set
from utils import cli
from utils.config import read_config
from utils.errors import UserError
from utils.logger import get_logger
from utils.paths import Workspace
from utils.timing import error_statistics

log = get_logger("host")
PARTS = 4  # of the families, each held out at a time
EXAMPLES = "python recipes/h200/host_models.py --workspace out/h200 --host out/h200/host"


class Judged(NamedTuple):
    """A model's latency, measured and predicted, ms: with its family held out of everything; the same, but the host's kernels
    as measured; and all kernels as measured where they were."""

    model: MeasuredModel
    held_out_ms: float
    host_known_ms: float
    looked_up_ms: float


WAYS = {"held_out_ms": "families held out", "host_known_ms": "families held out, the host's kernels as measured",
        "looked_up_ms": "as measured"}
DETECTORS_AND_DECODERS = ("retinanet", "ssd", "fasterrcnn", "fcos", "one_stage", "loop_decoder", "beam", "ctc")


def uses_host(record: ModelRecord) -> bool:
    """Whether the host computes or copies for a model, or waits for the GPU within a run."""
    kernels = [(record.kernel_of(node), node.provider) for node in record.nodes]
    return any(is_copy(kernel) or waits_inside(kernel) or is_control_flow(kernel)
               or (provider == "cpu" and not takes_no_time(kernel) and not reads_shape(kernel)) for kernel, provider in kernels)


def held_out_kernels(known: Mapping[Placed, KernelInModel], record: ModelRecord, times: Mapping[str, TimesOfModels],
                     on_host: TimesOfModels, types_without: Callable[[str], set[str]]) -> dict[Placed, KernelInModel]:
    """The kernels of a model, with times of trainings without its family.

    Args:
        known: its kernels as the target's predictors have them.
        record: the model's.
        times: of GPU kernels, by label, model and kernel id.
        on_host: of the host's kernels, by model and kernel id; empty: as known.
        types_without: the types of the host's kernels that were measured for other families than this one; the time of a kernel
            of another type is guessed, as in any prediction.
    """
    kernels = dict(known)
    for name, provider in {(node.kernel_id, node.provider) for node in record.nodes}:
        known_time, kernel = known[name, provider], record.kernels[name]
        if is_control_flow(kernel) or is_copy(kernel) or selects_boxes(kernel):
            continue
        if selects_in_rows(kernel):
            kernels[name, provider] = known_time._replace(latency_ms=row_selection_ms(kernel), launches=1.0)
        elif not known_time.on_host:
            gpu_ms, launches = (times[label][record.model][name] for label in ON_GPU)
            kernels[name, provider] = known_time._replace(latency_ms=gpu_ms, launches=launches)
        elif on_host and not takes_no_time(kernel):
            known_type = kernel.type in types_without(record.group)
            time_ms = on_host[record.model][name] if known_type else guessed_ms(kernel)
            kernels[name, provider] = known_time._replace(latency_ms=time_ms)
    return kernels


def looked_up(fitted: Fitted, record: ModelRecord, label: str) -> dict[str, float]:
    """The times of a model's kernels under a label by id: as measured where they were, else predicted."""
    times = fitted.predictors.predict(list(record.kernels.values()), {}, label).latency_ms
    return dict(zip(record.kernels, times, strict=True))


def judge(workspace: Workspace, host: Workspace | None, target: str, config: TrainingConfig) -> list[Judged]:
    """The models that use their host, each predicted with its family held out.

    Raises:
        UserError: nothing was learned for the target, or no such model was measured.
    """
    fitted = fitted_for(workspace, target)
    sidecar = fitted.predictors.sidecar
    models = [model for model in measured_models(workspace, target, sidecar, for_judging=True) if uses_host(model.record)]
    if not models:
        raise UserError(f"{target}: no model was measured of which a CUDA session runs a part on the host")
    groups = [model.group for model in models]
    rows = read_training_set(workspace, target)
    times = predict_as_learned(fitted.predictors, ON_GPU, rows, models, groups, "family", config, "leaving families out")
    on_host: TimesOfModels = {}
    types_of: dict[str, set[str]] = {}  # by family, of the host's kernels
    if host is not None:
        folder = host_predictors(host)
        host_rows = read_training_set(host, folder.name)
        on_host = predict_as_learned(read_predictors(folder), (HOST_LABEL,), host_rows, models, groups, "family", config,
                                     "leaving families out")[HOST_LABEL]
        types_of = {group: {str(kind) for kind, families in zip(host_rows.types, host_rows.groups, strict=True)
                            if group not in families} for group in groups}
    others = [model for model in measured_models(workspace, target, sidecar) if model.group not in groups]
    costs = fit_pipeline(tracks_of(others, {label: {model.record.model: looked_up(fitted, model.record, label)
                                                    for model in others} for label in ON_GPU}))
    conditions = Conditions(fitted, fitted.composition, AS_USUAL, False, {}, None, None)
    known = kernels_in_models([model.record for model in models], conditions)

    def latency_ms(model: MeasuredModel, kernels: Mapping[Placed, KernelInModel]) -> float:
        run = ModelRun(model.record, kernels, fitted.composition, AS_USUAL, costs.at_pace(model.pace))
        return run.composed().latency_ms

    def held_out_ms(model: MeasuredModel, host_times: TimesOfModels) -> float:
        return latency_ms(model, held_out_kernels(known, model.record, times, host_times, lambda group: types_of[group]))

    return [Judged(model, held_out_ms(model, on_host), held_out_ms(model, {}), latency_ms(model, known)) for model in models]


def errors_of(judged: Sequence[Judged], what: str) -> list[dict[str, Any]]:
    """The errors of some models, one row for each way of predicting."""
    measured = [judgement.model.latency_ms for judgement in judged]
    rows = []
    for how, kernels in WAYS.items():
        errors = error_statistics([getattr(judgement, how) for judgement in judged], measured)
        rows.append({"models": what, "kernels": kernels, **errors.columns()})
    return rows


def on_cpu(record: ModelRecord) -> int:
    """The number of a model's nodes that the CPU runs and that take time, and of its copies."""
    return sum(is_copy(record.kernel_of(node)) or (node.provider == "cpu" and not takes_no_time(record.kernel_of(node)))
               for node in record.nodes)


def row(judged: Judged) -> dict[str, Any]:
    record, latency = judged.model.record, judged.model.latency_ms
    return {"model": record.model.partition("@")[0], "batch": record.dims.get("batch", ""), "family": judged.model.group,
            "nodes on the CPU and copies": on_cpu(record), "measured (ms)": latency, "pace": judged.model.pace,
            "held out (ms)": judged.held_out_ms, "error_%": 100 * (judged.held_out_ms / latency - 1),
            "host's as measured, error_%": 100 * (judged.host_known_ms / latency - 1),
            "kernels as measured, error_%": 100 * (judged.looked_up_ms / latency - 1)}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", default="nvidia-h200", metavar="NAME", help="the target (default: nvidia-h200)")
    parser.add_argument("--host", type=Path, metavar="DIR", help="the workspace with the host's kernels")
    parser.add_argument("--parts", type=cli.count, default=PARTS, metavar="N",
                        help=f"in how many parts families are held out (default: {PARTS})")
    add_config(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    fitted: Fitted = fitted_for(workspace, args.target)
    config = read_config(args.config, TrainingConfig, args.changes).model_copy(update={"folds": args.parts})
    judged = judge(workspace, Workspace(args.host) if args.host else None, fitted.target.name, config)
    with_cpu = [judgement for judgement in judged if on_cpu(judgement.model.record)]
    kinds = [judgement for judgement in with_cpu if judgement.model.group in DETECTORS_AND_DECODERS]
    table = [line for models, what in ((kinds, "detectors and decoders with nodes on the CPU"), (with_cpu, "all such models"),
                                       (judged, "all that wait or compute on the host")) if models
             for line in errors_of(models, what)]
    if args.json:
        cli.print_json({"models": [row(judgement) for judgement in judged], "errors": table})
    else:
        cli.print_table([row(judgement) for judgement in judged], "models of which a CUDA session runs a part on the host")
        cli.print_table(table, "errors, at the host's pace as measured")
    return 0


if __name__ == "__main__":
    cli.run(main)
