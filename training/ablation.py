"""Which parts of the kernel predictors help: each is removed or replaced in turn.

Reads the dataset and the predictors of each target (default: of all). Holds out each family of models in turn, as
`training/held_out.py --by family` does, and predicts its kernels with a variant of the training on the rest. Predicts the
GPU's own times (label `gpu`) where they were measured, else those of the first label. Writes nothing; prints one row per
variant.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from records.dataset_files import read_kernels
from records.dataset_tables import read_kernel_table
from records.measurement import GPU_LABEL
from training.admission.interface import Estimator
from training.composition.held_out import kernel_errors, predict_out_of_fold
from training.composition.measured_models import MeasuredModel, TimesOfModels, left_out_groups, measured_models
from training.kernels.cuda_classes import cuda_class, fit_two_stages
from training.kernels.estimators import FLAT, FOREST, fit_kernel_model, learning_problem
from training.kernels.settings import TrainingConfig
from training.kernels.sidecar import read_sidecar
from training.kernels.targets import Show, add_options, for_each_target, trained_targets
from training.kernels.training_set import TrainingSet, measured_times, read_training_set
from utils import cli
from utils.config import read_config
from utils.logger import get_logger
from utils.paths import Workspace

log = get_logger("ablation")
OTHER_SEED = 1  # added to the config's seed: how much two trainings differ by chance
EXAMPLES = """
python training/ablation.py
python training/ablation.py --workspace out/h200 --variant shipped --variant forest
python training/ablation.py --workspace out/h200 --target nvidia-h200-cuda-ort1.31-all --json
"""


@dataclass(frozen=True)
class Variant:
    """A way of training; the defaults are the training that ships.

    Attributes:
        what: its description.
        without: groups of features (training/kernels/features.py) that are set to zero, so that no tree can use them.
        roofline: whether log(time / roofline) is learned; else log(time).
        kernels: what is learned from: `all`, `without free` (no kernels that were sampled near no model), or only kernels
            `of models`.
        learner: boosters, a random forest on the same numbers, or boosters after a classifier of CUDA kernels.
        other_settings: train the GPU's labels with the booster settings of the CPU's labels, and the other way round.
        dedicated: whether the kernel types that ship with a dedicated predictor have one here; else one predictor serves all.
        seed: added to the config's seed.
    """

    what: str
    without: tuple[str, ...] = ()
    roofline: bool = True
    kernels: Literal["all", "without free", "of models"] = "all"
    learner: Literal["boosters", "forest", "two stages"] = "boosters"
    other_settings: bool = False
    dedicated: bool = True
    seed: int = 0


VARIANTS = {
    "shipped": Variant("as it ships"),
    "seed": Variant("another seed: what chance does", seed=OTHER_SEED),
    "no-roofline": Variant("log(time) learned, not log(time / roofline)", roofline=False),
    "no-costs": Variant("without FLOPs, bytes and their kind as features", without=("costs",)),
    "no-roofline-costs": Variant("log(time), and without FLOPs, bytes and their kind", without=("costs",), roofline=False),
    "no-tiles": Variant("without tile features", without=("tiles",)),
    "no-alignment": Variant("without alignment features", without=("alignment",)),
    "no-tiles-alignment": Variant("without tile and alignment features", without=("tiles", "alignment")),
    "no-free": Variant("without the free kernels, of no family", kernels="without free"),
    "no-samples": Variant("without any sampled kernel", kernels="of models"),
    "other-settings": Variant("the other labels' settings (for gpu: depth 6, absolute error)", other_settings=True),
    "one-for-all": Variant("one predictor for all types", dedicated=False),
    "forest": Variant("a random forest on the same numbers", learner="forest"),
    "two-stages": Variant("the class of CUDA kernel predicted first", learner="two stages"),
}


@dataclass(frozen=True)
class Dataset:
    """A target's dataset, as the variants use it.

    Attributes:
        label: the label whose times are learned.
        chosen: what predicts the types that the shared predictor does not, as it ships.
        of_models: ids of the kernels that belong to a model; the others were sampled.
        cuda_class: class of CUDA kernel by kernel id; empty where the dataset has no names of CUDA kernels.
        measured: idle times (ms) by kernel id and label.
    """

    rows: TrainingSet
    models: Sequence[MeasuredModel]
    label: str
    chosen: Mapping[str, str]
    of_models: frozenset[str]
    cuda_class: Mapping[str, str]
    measured: Mapping[str, Mapping[str, float]]


def load(workspace: Workspace, target: str) -> Dataset:
    """The dataset of `target`.

    Raises:
        UserError: no dataset or predictors.
    """
    sidecar = read_sidecar(workspace.predictors(target))
    label = GPU_LABEL if GPU_LABEL in sidecar.labels else next(iter(sidecar.labels))
    rows = read_training_set(workspace, target)
    table = read_kernel_table(workspace, target)
    of_models = frozenset(described.kernel.id for described in read_kernels(workspace.dataset(target)) if described.models)
    names = table[["Kernel_ID", "gpu_kernels"]].dropna() if "gpu_kernels" in table.columns else table.iloc[:0]
    classes = {str(row[0]): cuda_class(str(row[1]).split("|")) for row in names.itertuples(index=False)}
    return Dataset(
        rows=rows.rows(np.isfinite(rows.times_ms[label])), models=measured_models(workspace, target, sidecar), label=label,
        chosen=sidecar.labels[label].chosen,
        of_models=of_models, cuda_class=classes, measured=measured_times(workspace, target))


def chosen_rows(data: Dataset, variant: Variant) -> TrainingSet:
    """The rows that a variant may learn from, with the features that it may use."""
    rows = data.rows
    if variant.kernels == "without free":
        rows = rows.rows(np.array([bool(families) for families in rows.groups]))
    elif variant.kernels == "of models":
        rows = rows.rows(np.array([str(name) in data.of_models for name in rows.ids]))
    hidden = [rows.schema.index(name) for group in variant.without for name in rows.schema.groups[group]]
    features = rows.features.copy()
    features[:, hidden] = 0.0
    return replace(rows, features=features)


def learn(rows: TrainingSet, data: Dataset, variant: Variant, config: TrainingConfig) -> Estimator:
    """The predictor that a variant learns from `rows`."""
    config = config.model_copy(update={"seed": config.seed + variant.seed})
    if variant.other_settings:
        config = config.model_copy(update={"xgboost": config.xgboost_gpu, "xgboost_gpu": config.xgboost})
    if variant.learner == "two stages":
        return fit_two_stages(rows, data.label, data.cuda_class, config)
    typical_ms = float(np.median(rows.times_ms[data.label]))  # of a kernel type that is in none of the rows
    problem = learning_problem(rows, data.label, None if variant.roofline else FLAT.model_copy(update={"scale": typical_ms}))
    chosen = data.chosen if variant.dedicated else {}
    if variant.learner == "forest":
        chosen = dict.fromkeys(problem.type_codes, FOREST)
    return fit_kernel_model(rows, data.label, chosen, config, problem)


def sum_mape(models: Sequence[MeasuredModel], predicted: TimesOfModels, measured: Mapping[str, Mapping[str, float]],
             label: str) -> float:
    """Mean error, in per cent, of the summed times of a model's nodes; nodes whose kernel was not measured are not counted."""
    errors = []
    for model in models:
        times = predicted[model.record.model]
        known = [node.kernel_id for node in model.record.nodes
                 if times[node.kernel_id] and label in measured.get(node.kernel_id, {})]
        if known:
            errors.append(abs(sum(times[name] for name in known) / sum(measured[name][label] for name in known) - 1))
    return 100 * float(np.mean(errors))


def evaluate(data: Dataset, variants: Mapping[str, Variant], config: TrainingConfig) -> list[dict[str, Any]]:
    """One row per variant, errors in per cent. Variants that need the names of CUDA kernels are omitted, with a warning, where
    the dataset has none."""
    left_out, groups = left_out_groups(data.models)
    table = []
    for name, variant in cli.progress(list(variants.items()), "ablation"):
        if variant.learner == "two stages" and not data.cuda_class:
            log.warning("variant %s omitted: the dataset has no names of CUDA kernels", name)
            continue
        rows = chosen_rows(data, variant)
        predicted = predict_out_of_fold(rows, data.models, groups, left_out, data.label, {}, config,
                                        partial(learn, data=data, variant=variant, config=config))
        errors = kernel_errors(predicted, data.measured, data.label)
        table.append({"variant": name, "what": variant.what, "learned_from": len(set(rows.ids.tolist())),
                      **{key: value for key, value in errors.items() if key != "kernels"},
                      "Σ_of_models_MAPE_%": sum_mape(data.models, predicted, data.measured, data.label)})
        log.info("%s: %.2f %% of kernels, %.2f %% of models' sums", name, errors["MAPE_%"], table[-1]["Σ_of_models_MAPE_%"])
    return table


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    add_options(parser)
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), help="(repeatable; default: all)")
    args = parser.parse_args()
    workspace = cli.start(args)
    config = read_config(args.config, TrainingConfig, args.changes)
    chosen = {name: VARIANTS[name] for name in args.variant or VARIANTS}

    def compare(target: str, show: Show) -> list[dict[str, Any]]:
        data = load(workspace, target)
        rows = evaluate(data, chosen, config)
        show(rows, f"{target}, label {data.label}: kernels of {len(data.models)} models, each "
                   f"{left_out_groups(data.models)[0]} left out in turn")
        return rows

    results = for_each_target([args.target] if args.target else trained_targets(workspace), compare, args.json)
    if args.json:
        cli.print_json(results)
    return 0


if __name__ == "__main__":
    cli.run(main)
