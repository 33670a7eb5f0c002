"""Learns how processes share a target's GPU, and prints how accurate latencies next to a co-runner are.

Reads the dataset, records and predictors of a GPU target (default: all targets that were measured with backgrounds). Also reads
the models that were measured with backgrounds and the sharing probe, from the same dataset or other workspaces (--beside).
Writes training/predictors/<target>/sharing.json: the length of a time slice, what the probe's work takes alone, how long waits
are where only metrics are known, and what a switch between processes costs.

Prints the errors of the mean, the median and the 95th percentile of latencies. Each family of models and each background is
held out of every fit in turn, and all kernels are predicted. The predictions are made from

- a reading of the probe just before;
- the metrics alone;
- the background's busy share alone (inference/load_curve.py asks for such a share; here it is the one that the probe measured);
- the prediction of the background, where that is a model in a loop.

For comparison, it prints the errors of the baseline of kernels measured under load (training/fits/time_slices.py),
of the idle latency, of the idle latency divided by the share of time that the co-runner leaves, and of another machine's
measurement of the same model and background.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hase.learned import target_files
from hase.learned.kernels.interface import TrainingConfig
from hase.learned.sharing import Sharing, co_runner_guessed
from hase.records.dataset_files import collected_targets, read_header, read_journal
from hase.records.measurement import Background
from hase.training.fits import time_slices
from hase.training.kernels.targets import Show, add_options, for_each_target, trained_targets
from hase.utils import cli, files
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger, progress
from hase.utils.paths import Workspace
from hase.utils.timing import Floats

log = get_logger("sharing")
SLICES_MS = (1.6, 1.8, 1.9, 2.0, 2.1, 2.2, 2.4)  # candidates; on an H200, 2.2 is best
LEAST_LEFT = 0.05  # least share of time that a co-runner leaves, as a divisor: a GPU that is always busy leaves none
PROBED, FROM_METRICS, PAIRED = "a probe", "metrics alone", "the looped model's prediction"
FROM_SHARE = "the background's busy share"
BASELINE, ELSEWHERE = "kernels under load, summed", "measured on another machine"
EXAMPLES = """
python training/fit_sharing.py
python training/fit_sharing.py --workspace out/h200 --beside out/h200_beside --json
"""


class SharingEvaluation:
    """Measured runs with backgrounds, and their predictions with the family and the background held out. `measured` has the
    runs' statistics, shape (runs, 3)."""

    def __init__(self, runs: Sequence[time_slices.SharedRuns], models: time_slices.SimulatedModels,
                 alone: Mapping[str, float]) -> None:
        """Simulates every run with every slice length in SLICES_MS; `alone` as from `alone_ms`."""
        self.runs = [run for run in runs if run.model in models.strict]
        if not self.runs:
            raise UserError("no model that was measured with a background is in the composition's fit")
        self._strict, self._alone = models.strict, alone
        self._family = [models.groups[run.model] for run in self.runs]
        self.measured = np.array([time_slices.statistics_of(run.samples_ms) for run in self.runs])
        self._as_measured = np.array([[
            self._calibrated(models.known[run.model], run).next_to(run.co_runner, slice_ms) for slice_ms in SLICES_MS]
            for run in progress(self.runs, "simulating")])

    @staticmethod
    def _calibrated(model: time_slices.Simulated, run: time_slices.SharedRuns) -> time_slices.Simulated:
        """The model with its measured idle latency, so that only the sharing can be wrong."""
        return time_slices.Simulated(model.tracks, model.costs, run.idle_ms - model.idle_ms())

    def fit_slice(self, kept: Sequence[int]) -> int:
        """The index in SLICES_MS of the slice with the smallest error of the means of the runs `kept`."""
        errors = np.abs(self._as_measured[kept, :, 0] / self.measured[kept, None, 0] - 1.0).mean(axis=0)
        return int(errors.argmin())

    def fits(self) -> list[tuple[int, Sharing]]:
        """For each run, the index of the slice and the sharing, learned without its background and its family."""
        fit_of: dict[tuple[str, str], tuple[int, Sharing]] = {}
        for run, family in zip(self.runs, self._family, strict=True):
            if (run.background, family) not in fit_of:
                others = [i for i, other in enumerate(self.runs)
                          if other.background != run.background and self._family[i] != family] or list(range(len(self.runs)))
                slice_index = self.fit_slice(others)
                learned = time_slices.typical([self.runs[i] for i in others], SLICES_MS[slice_index], self._alone)
                fit_of[run.background, family] = slice_index, learned
        return [fit_of[run.background, family] for run, family in zip(self.runs, self._family, strict=True)]

    def left_out(self, fits: Sequence[tuple[int, Sharing]]) -> dict[str, Floats]:
        """Predictions (ms) by their source, each of shape (runs, 3): mean, median, 95th percentile."""
        predicted: dict[str, list[Floats]] = defaultdict(list)
        for index, (run, (slice_index, learned)) in enumerate(zip(self.runs, fits, strict=True)):
            model = self._strict[run.model]
            idle = model.idle_ms()
            predicted[PROBED].append(model.next_to(run.co_runner, learned.slice_ms))
            predicted[FROM_SHARE].append(model.next_to(co_runner_guessed(run.co_runner.busy_share, learned), learned.slice_ms))
            predicted[FROM_METRICS].append(model.next_to(co_runner_guessed(run.busy, learned), learned.slice_ms))
            predicted["a probe, idle latency as measured"].append(self._as_measured[index, slice_index])
            predicted["idle latency"].append(np.full(3, idle))
            predicted["idle latency ÷ (1 − busy share)"].append(np.full(3, idle / max(1.0 - run.busy, LEAST_LEFT)))
        return {what: np.array(values) for what, values in predicted.items()}

    def learned(self) -> Sharing:
        """Learns the sharing from all runs. Warns if the best slice is at the edge of SLICES_MS."""
        slice_ms = SLICES_MS[self.fit_slice(range(len(self.runs)))]
        if slice_ms in (SLICES_MS[0], SLICES_MS[-1]):
            log.warning("a slice of %g ms gives the smallest error, and is the edge of those tried (%g to %g ms): the GPU's "
                        "slice may lie beyond; extend SLICES_MS in training/fit_sharing.py", slice_ms, SLICES_MS[0],
                        SLICES_MS[-1])
        return time_slices.typical(self.runs, slice_ms, self._alone)


def tables(evaluation: SharingEvaluation, left_out: Mapping[str, Floats]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Two tables of errors in per cent: by source of the prediction, with the probe's errors for the same runs, and by
    background."""
    measured = evaluation.measured

    def errors(predicted: Floats, kept: Floats, prefix: str = "") -> dict[str, float]:
        mean_errors = time_slices.errors_of(predicted[kept], measured[kept])
        return {f"{prefix}{name}_%": 100 * getattr(mean_errors, name) for name in time_slices.STATISTICS}

    def row(name: Mapping[str, Any], predicted: Floats, kept: Floats) -> dict[str, Any]:
        within = np.abs(predicted[kept, 0] / measured[kept, 0] - 1.0) <= 0.1
        return {**name, "cases": int(kept.sum()), **errors(predicted, kept), "mean_within_10_%": 100 * float(within.mean())}

    loads = sorted({(run.background, run.level) for run in evaluation.runs})
    is_load = {load: np.array([(run.background, run.level) == load for run in evaluation.runs]) for load in loads}
    is_predicted = {what: np.isfinite(predicted[:, 0]) for what, predicted in left_out.items()}
    return ([row({"latency by": what}, predicted, is_predicted[what]) | errors(left_out[PROBED], is_predicted[what], "probe_")
             for what, predicted in left_out.items()],
            [row({"background": name, "level": level}, left_out[PROBED], is_load[name, level]) for name, level in loads])


def fit_target(workspace: Workspace, workspaces: Sequence[Workspace], target: str,
               config: TrainingConfig) -> tuple[Sharing, list[dict[str, Any]], list[dict[str, Any]]]:
    """Learns a target's sharing; also returns both tables of `tables`."""
    backgrounds = backgrounds_of(workspaces, target)
    datasets = [measured_in.dataset(target) for measured_in in workspaces]
    blocks = [block for dataset in datasets for block in read_journal(dataset)]
    alone = time_slices.alone_ms(blocks)
    runs = time_slices.shared_runs(blocks, alone)
    if not runs:
        raise UserError(f"{', '.join(map(str, datasets))}: no model was measured with a background "
                        "with the sharing probe read before it; add levels and stress.backgrounds to the collector's config")
    models = time_slices.simulated_models(workspace, target, config)
    evaluation = SharingEvaluation(runs, models, alone)
    fits, measured = evaluation.fits(), evaluation.measured
    left_out = evaluation.left_out(fits)
    learned = evaluation.learned()
    looped = time_slices.looped_models(backgrounds, models.strict)
    pairs = time_slices.Pairs(evaluation.runs, measured, models.strict, models.groups, looped, [fit for _, fit in fits])
    if pairs.cases:
        left_out[PAIRED] = np.full_like(measured, np.nan)
        left_out[PAIRED][pairs.cases] = pairs.left_out()
        learned = learned.model_copy(update={"switch_ms": pairs.switch_ms()})
    else:
        log.warning("%s: no model was measured next to another one in a loop, so the cost of a switch between processes is "
                    "assumed to be %g ms, as on an H200", target, learned.switch_ms)
    left_out |= {BASELINE: baseline_ms(evaluation, workspaces, target, models, config),
                 ELSEWHERE: time_slices.measured_elsewhere(evaluation.runs)}
    left_out = {what: predicted for what, predicted in left_out.items() if np.isfinite(predicted).any()}
    errors = {field: time_slices.errors_of(left_out[what], measured) for field, what in (
        ("probed", PROBED), ("from_metrics", FROM_METRICS), ("paired", PAIRED)) if what in left_out}
    return learned.model_copy(update=errors), *tables(evaluation, left_out)


def backgrounds_of(workspaces: Sequence[Workspace], target: str) -> dict[str, Background]:
    """The backgrounds of a target's datasets, by name. Raises UserError: a dataset is missing, or two datasets use one name for
    different backgrounds."""
    backgrounds: dict[str, Background] = {}
    for workspace in workspaces:
        for name, background in read_header(workspace.dataset(target)).backgrounds.items():
            if backgrounds.setdefault(name, background) != background:
                raise UserError(f"{workspace.dataset(target)}: background {name} differs from that of the same "
                                "name in a dataset before it; learn from one dataset at a time")
    return backgrounds


def baseline_ms(evaluation: SharingEvaluation, workspaces: Sequence[Workspace], target: str,
                models: time_slices.SimulatedModels, config: TrainingConfig) -> Floats:
    """The baseline "kernels measured under load" (ms), from the first dataset that can predict the run. Shape (runs, 3), with
    one number for all three statistics."""
    predicted_ms = np.full(len(evaluation.runs), np.nan)
    for workspace in workspaces:
        if rows := time_slices.measured_under_load(workspace, target):
            summed = time_slices.summed_ms(rows, evaluation.runs, models.records, models.groups, config)
            predicted_ms = np.where(np.isfinite(predicted_ms), predicted_ms, summed)
    return np.repeat(predicted_ms[:, None], evaluation.measured.shape[1], axis=1)


def shared_targets(workspace: Workspace, workspaces: Sequence[Workspace]) -> list[str]:
    """The targets with predictors that were measured with backgrounds."""
    names = sorted(set(trained_targets(workspace)) & {
        name for measured_in in workspaces for name in collected_targets(measured_in)
        if read_header(measured_in.dataset(name)).backgrounds})
    if not names:
        raise UserError(f"{', '.join(str(measured_in.dataset('')) for measured_in in workspaces)}: no target with predictors "
                        "was measured with backgrounds; add levels and stress.backgrounds to the collector's config")
    return names


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    add_options(parser, "name of a target in training/predictors (default: all measured with backgrounds)")
    parser.add_argument("--beside", type=Path, metavar="WORKSPACE", action="append",
                        help="workspace with models measured with backgrounds (repeatable; default: the same workspace)")
    args = parser.parse_args()
    workspace = cli.start(args)
    workspaces = [Workspace(folder) for folder in args.beside or [workspace.root]]
    config = read_config(args.config, TrainingConfig, args.changes)

    def fit(target: str, show: Show) -> dict[str, Any]:
        workspaces_of_target = [candidate for candidate in workspaces if args.target or target in collected_targets(candidate)]
        sharing, by_what, by_load = fit_target(workspace, workspaces_of_target, target, config)
        path = target_files.SHARING.path(workspace.predictors(target))
        files.write_json(path, sharing)
        log.info("saved %s: a slice of %g ms, waits of up to %g ms, a switch of %g ms", path, sharing.slice_ms,
                 sharing.longest_wait_ms, sharing.switch_ms)
        show(by_what, f"{target}: latencies next to a co-runner, families and backgrounds held out")
        show(by_load, f"{target}: the same by background, from a probe")
        return {"sharing": sharing.model_dump(mode="json"), "latency_by": by_what, "backgrounds": by_load}

    with sole_writer(workspace.predictors("")):
        for_each_target([args.target] if args.target else shared_targets(workspace, workspaces), fit, args.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
