"""Learns how processes share a target's GPU through MPS, and prints how accurate latencies beside other models are.

Reads datasets that were measured under MPS, one for each way of sharing, as recipes/h200/measure_sharing.sh leaves them: a
workspace with the models' records, and in it a workspace for each way. Also reads the target's composition. The datasets may
be of another GPU with as many multiprocessors; predictions then say so.

Writes training/predictors/<target>/mps.json and mps_width-<hash>.npz: how wide kernels are, and the rules by which kernels of
several processes run at the same time. Prints the errors of the mean, the median and the 95th percentile of latencies beside
models in loops, each with the model's family and the looped model held out.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hase.learned import target_files
from hase.learned.composition.fitted import read_composition
from hase.learned.kernels.interface import TrainingConfig
from hase.learned.kernels.predictors import read_predictors
from hase.learned.kernels.saved_form import save_estimator
from hase.learned.sharing import GPU_BOUND, STEM, MpsSharing, SharingErrors, write_mps
from hase.records.dataset_files import collected_targets, read_header
from hase.records.measurement import GPU_LABEL
from hase.training.fits.mps import MeasuredWay, MpsFit, bytes_per_ms, fit_widths, host_slowdown, read_way, records_of
from hase.training.kernels.targets import Show, add_options, for_each_target, trained_targets
from hase.training.kernels.training_set import read_training_set
from hase.utils import cli
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

if TYPE_CHECKING:
    from hase.graph_model.simulation.pipeline import PipelineCosts
    from hase.records.kernel_record import ModelRecord

log = get_logger("mps")
EXAMPLES = """
python training/fit_mps.py --ways out/sharing
python training/fit_mps.py --workspace out/h200 --target nvidia-h200-cuda-ort1.31-all --ways out/sharing --json
"""


class MeasuredCard(NamedTuple):
    """Datasets of a card, one for each way of sharing it; `first` is the workspace of one way, since all have the same
    kernels."""

    card: str
    ways: list[MeasuredWay]
    records: dict[str, ModelRecord]
    first: Workspace

    def fit(self, costs: PipelineCosts) -> MpsFit:
        """Prepares a fit, or a judgement, of sharing rules."""
        return MpsFit([way for way in self.ways if way.sharing.mps], self.records, costs)


def read_measured(workspace: Workspace) -> MeasuredCard:
    """The datasets in the folders of a workspace, which holds the models' records. Raises UserError: nothing was measured, or
    on several cards, or a record is missing."""
    folders = [folder for path in sorted(workspace.root.iterdir()) for folder in [Workspace(path)]
               if folder.dataset("").is_dir()]
    cards = sorted({name for folder in folders for name in collected_targets(folder)})
    if len(cards) != 1:
        raise UserError(f"{workspace.root}: " + (f"datasets of {', '.join(cards)}; give a folder for each" if cards else
                        "no dataset in any folder of it; measure with: recipes/h200/measure_sharing.sh"))
    ways = [read_way(folder, cards[0]) for folder in folders]
    models = sorted({model for way in ways if way.sharing.mps for model in way.idle_ms})
    target = read_header(folders[0].dataset(cards[0])).target
    return MeasuredCard(cards[0], ways, records_of(workspace, target, models), folders[0])


def costs_of(workspace: Workspace, target: str) -> PipelineCosts:
    """The costs of a target's runs."""
    composition = read_composition(workspace.predictors(target))
    if composition.costs is None:
        raise UserError(f"{target}: its composition is {composition.kind}; runs under MPS can only be predicted with a GPU's "
                        "two tracks (composition pipeline)")
    return composition.costs


def fit_target(workspace: Workspace, measured: Workspace, target: str, config: TrainingConfig, jobs: int) -> MpsSharing:
    """Learns a target's sharing through MPS, and writes the estimator of widths beside its predictors."""
    costs, measured_card = costs_of(workspace, target), read_measured(measured)
    fit = measured_card.fit(costs)
    rules, gpu_bound, host_bound = fit.fit(jobs)
    width, width_error = fit_widths(read_training_set(measured_card.first, measured_card.card), fit.widths, config.seed)
    kernels = {kernel.id: kernel for record in measured_card.records.values() for kernel in record.kernels.values()}
    gpu_ms = read_predictors(workspace.predictors(target)).predict(list(kernels.values()), {}, GPU_LABEL).latency_ms
    fastest = bytes_per_ms(measured_card.records.values(), dict(zip(kernels, gpu_ms, strict=True)))
    return MpsSharing(learned_on=measured_card.card, rules=rules, bytes_per_ms=fastest,
                      host_slowdown=host_slowdown(measured_card.ways), width_error=width_error, gpu_bound=gpu_bound,
                      host_bound=host_bound, width=save_estimator(workspace.predictors(target), STEM, width))


def table(gpu_bound: Mapping[str, SharingErrors], host_bound: Mapping[str, SharingErrors]) -> list[dict[str, Any]]:
    """The errors in per cent, one row for each kind of model and way."""
    def row(models: str, way: str, errors: SharingErrors) -> dict[str, Any]:
        return {"models": models, "way": way, "cases": errors.cases,
                **{f"{name}_%": 100 * getattr(errors, name) for name in ("mean", "p50", "p95")}}

    kinds = {"GPU-bound": gpu_bound, "host-bound": host_bound}
    return [row(models, way, errors) for models, errors_by_way in kinds.items() for way, errors in errors_by_way.items()]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    add_options(parser)
    parser.add_argument("--ways", type=Path, required=True, metavar="WORKSPACE",
                        help="workspace with the models' records, and in it a workspace for each way of sharing")
    parser.add_argument("--jobs", type=cli.count, default=2, metavar="N", help="processes that simulate (default: 2)")
    args = parser.parse_args()
    workspace = cli.start(args)
    config = read_config(args.config, TrainingConfig, args.changes)
    cli.existing_folder("--ways", args.ways, f"measure with: recipes/h200/measure_sharing.sh {args.ways}")

    def fit(target: str, show: Show) -> dict[str, Any]:
        learned = fit_target(workspace, Workspace(args.ways), target, config, args.jobs)
        path = target_files.MPS.path(workspace.predictors(target))
        write_mps(workspace.predictors(target), learned)
        log.info("saved %s: widths of kernels are off by %.1f %% in families left out; %s", path, 100 * learned.width_error,
                 learned.rules)
        show(table(learned.gpu_bound, learned.host_bound),
             f"{target}: latencies beside models in loops under MPS, measured on {learned.learned_on} "
             f"(GPU-bound: kernels take {GPU_BOUND:.0%} of the latency or more)")
        return {"mps": learned.model_dump(mode="json")}

    with sole_writer(workspace.predictors("")):
        for_each_target([args.target] if args.target else trained_targets(workspace), fit, args.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
