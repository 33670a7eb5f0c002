"""Phase 5.4: how a target's GPU turns between processes, and how far off latencies beside other work are.

Reads the dataset, records and predictors of a GPU target (by default of all that were measured beside backgrounds), and the
models measured beside backgrounds, with the sharing probe's readings, from the same dataset or from that of another workspace
(--beside). Writes training/predictors/<target>/sharing.json: how long a slice is, what the probe's work takes alone, and what
waits are like where only metrics are known.

Prints the errors of the mean, the median and the 95th percentile of latencies, each family of models and each background left
out of every fit, with all kernels predicted: from a probe's reading just before, and from the metrics alone; and beside them
what the idle latency errs, and the idle latency divided by the share of the time that is left.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from utils import cli, files
from utils.errors import UserError
from utils.logger import get_logger
from utils.paths import ROOT, Workspace

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from benchmark.dataset import Block, Measurement
    from overlap_simulator import OtherWork, PipelineCosts
    from training.estimators import TrainingConfig
    from training.pipeline import Tracks
    from training.sharing import Sharing, SharingErrors

    Floats = npt.NDArray[np.float64]

log = get_logger("sharing")
SLICES_MS = (1.6, 1.8, 1.9, 2.0, 2.1, 2.2, 2.4)  # to choose from: on an H200 about 2
SEED = 7
CYCLE_MS = 20.0  # where no background that pauses was measured
LEAST_LEFT = 0.05  # of the time, for the quotient: a GPU that is always busy leaves none
PROBED, FROM_METRICS = "a probe", "metrics alone"
STATISTICS = ("mean", "p50", "p95")
EXAMPLES = """
python training/fit_sharing.py
python training/fit_sharing.py --workspace out/h200 --beside out/h200_beside --json
"""


@dataclass(frozen=True)
class SharedRuns:
    """Runs of a model beside a background.

    Attributes:
        samples_ms: their latencies.
        idle_ms: the median latency on the same machine while it was idle.
        other: what the probe saw just before.
        busy: for what share of the time the GPU was busy before, by the metrics.
    """

    model: str
    background: str
    level: float
    samples_ms: Floats
    idle_ms: float
    other: OtherWork
    busy: float


def alone_ms(blocks: Iterable[Block]) -> dict[str, float]:
    """What the probe's pieces of work take on an idle GPU: the median of all runs, by name.

    Raises:
        UserError: no probe was read on an idle GPU.
    """
    import numpy as np

    runs: dict[str, list[float]] = defaultdict(list)
    for block in blocks:
        if block.probe and not block.level:
            runs["tiny"] += block.probe.tiny.latencies_ms
            runs["long"] += block.probe.long.latencies_ms
    if not runs:
        raise UserError("no reading of the sharing probe on an idle GPU: measure at level 0 too (levels, probe_s in the "
                        "collector's config)")
    return {name: float(np.median(found)) for name, found in runs.items()}


def latencies_in(block: Block) -> list[Measurement]:
    """The latencies of whole models that a block measured."""
    return [m for m in block.measurements if (m.subject, m.label, m.status) == ("model", "latency", "ok")]


def shared_runs(blocks: Sequence[Block], alone: Mapping[str, float]) -> list[SharedRuns]:
    """Every model's runs beside a background, where the same machine ran it idle and the probe was read."""
    import numpy as np

    from training.sharing import busy_share, other_work_probed

    idle: dict[tuple[str, str], list[float]] = defaultdict(list)
    for block in blocks:
        if not block.level:
            for m in latencies_in(block):
                idle[block.machine, m.id].append(float(np.median(m.samples_ms)))
    found = []
    for block in blocks:
        busy = busy_share(block.background)
        if not block.level or block.probe is None or busy is None:
            continue
        other = other_work_probed(block.probe, alone)
        found += [SharedRuns(m.id, block.background_name, block.level, np.array(m.samples_ms),
                             float(np.median(idle[block.machine, m.id])), other, busy)
                  for m in latencies_in(block) if (block.machine, m.id) in idle]
    return found


def typical(runs: Sequence[SharedRuns], slice_ms: float, alone: Mapping[str, float]) -> Sharing:
    """What was learned from some runs: waits of all probes alike, and how long a background that pauses takes for a cycle."""
    import numpy as np

    from training.sharing import QUANTILES, Sharing

    at = np.linspace(0.0, 1.0, QUANTILES)
    others = {id(run.other): run.other for run in runs if len(run.other.waits_ms)}.values()
    waits = np.concatenate([np.quantile(other.waits_ms, at) for other in others])
    cycles = [other.busy_ms + other.quiet_ms for other in others if other.quiet_ms]
    return Sharing(slice_ms=slice_ms, alone_ms=dict(alone), waits_ms=tuple(np.quantile(waits, at).round(4).tolist()),
                   cycle_ms=float(np.median(cycles)) if cycles else CYCLE_MS)


def statistics_of(latencies_ms: Floats) -> Floats:
    """Mean, median and 95th percentile."""
    import numpy as np

    return np.array([latencies_ms.mean(), *np.percentile(latencies_ms, (50, 95))])


@dataclass(frozen=True)
class Simulated:
    """A model as it is simulated: its tracks, the costs of a run, and what to add to each latency (ms)."""

    tracks: Tracks
    costs: PipelineCosts
    more_ms: float = 0.0

    def beside(self, other: OtherWork, slice_ms: float) -> Floats:
        """Mean, median and 95th percentile of its latency (ms)."""
        import numpy as np

        from overlap_simulator import shared_runs_ms

        return self.more_ms + statistics_of(shared_runs_ms(
            self.tracks.gpu_ms, self.tracks.launches, self.tracks.moves, self.costs, slice_ms, other,
            np.random.default_rng(SEED)))

    def idle_ms(self) -> float:
        from overlap_simulator import pipeline_ms

        return self.more_ms + pipeline_ms(self.tracks.gpu_ms, self.tracks.launches, self.tracks.moves, self.costs)


class Evaluation:
    """Runs beside backgrounds, and what models of the fit say of them, families and backgrounds left out.

    Attributes:
        runs: those of models that are in the fit.
    """

    def __init__(self, runs: Sequence[SharedRuns], strict: Mapping[str, Simulated], known: Mapping[str, Simulated],
                 family_of: Mapping[str, str], alone: Mapping[str, float]) -> None:
        """Simulates every run at every slice.

        Args:
            runs: see `shared_runs`.
            strict: each model with kernels predicted; costs of a run are fitted without its family.
            known: the same with kernels as measured.
            family_of: each model's.
            alone: see `alone_ms`.
        """
        import numpy as np

        self.runs = [run for run in runs if run.model in strict]
        if not self.runs:
            raise UserError("none of the models that were measured beside backgrounds is in the composition's fit")
        self._strict, self._alone = strict, alone
        self._family = [family_of[run.model] for run in self.runs]
        self.measured = np.array([statistics_of(run.samples_ms) for run in self.runs])
        self._as_measured = np.array([[
            self._calibrated(known[run.model], run).beside(run.other, slice_ms) for slice_ms in SLICES_MS]
            for run in cli.track(self.runs, "simulating")])

    @staticmethod
    def _calibrated(model: Simulated, run: SharedRuns) -> Simulated:
        """The model, as long on an idle GPU as it was measured: what the sharing alone errs."""
        return Simulated(model.tracks, model.costs, run.idle_ms - model.idle_ms())

    def best_slice(self, kept: Sequence[int]) -> int:
        """Which of SLICES_MS errs least for the means of some runs."""
        import numpy as np

        errors = np.abs(self._as_measured[kept, :, 0] / self.measured[kept, None, 0] - 1.0).mean(axis=0)
        return int(errors.argmin())

    def left_out(self) -> dict[str, Floats]:
        """Predictions by what they are made from, each shaped (runs, 3): mean, median, 95th percentile in ms."""
        import numpy as np

        from training.sharing import other_work_guessed

        found: dict[str, list[Floats]] = defaultdict(list)
        fits: dict[tuple[str, str], tuple[int, Sharing]] = {}
        for place, (run, family) in enumerate(zip(self.runs, self._family, strict=True)):
            key = (run.background, family)
            if key not in fits:
                kept = [i for i, other in enumerate(self.runs)
                        if other.background != run.background and self._family[i] != family] or list(range(len(self.runs)))
                chosen = self.best_slice(kept)
                fits[key] = chosen, typical([self.runs[i] for i in kept], SLICES_MS[chosen], self._alone)
            chosen, learned = fits[key]
            model = self._strict[run.model]
            idle = model.idle_ms()
            found[PROBED].append(model.beside(run.other, learned.slice_ms))
            found[FROM_METRICS].append(model.beside(other_work_guessed(run.busy, learned), learned.slice_ms))
            found["a probe, idle latency as measured"].append(self._as_measured[place, chosen])
            found["idle latency"].append(np.full(3, idle))
            found["idle latency ÷ (1 − busy share)"].append(np.full(3, idle / max(1.0 - run.busy, LEAST_LEFT)))
        return {what: np.array(values) for what, values in found.items()}

    def learned(self) -> Sharing:
        """From all runs."""
        return typical(self.runs, SLICES_MS[self.best_slice(range(len(self.runs)))], self._alone)


def errors_of(predicted: Floats, measured: Floats) -> SharingErrors:
    """Mean errors of the three statistics."""
    import numpy as np

    from training.sharing import SharingErrors

    errors = np.abs(predicted / measured - 1.0).mean(axis=0)
    return SharingErrors(cases=len(measured), **dict(zip(STATISTICS, errors.tolist(), strict=True)))


def tables(evaluation: Evaluation, left_out: Mapping[str, Floats]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Errors in per cent: a row a way of predicting, and a row a background (from a probe)."""
    import numpy as np

    def row(name: Mapping[str, Any], predicted: Floats, kept: Floats | slice = slice(None)) -> dict[str, Any]:
        found = errors_of(predicted[kept], evaluation.measured[kept])
        within = np.abs(predicted[kept, 0] / evaluation.measured[kept, 0] - 1.0) <= 0.1
        return {**name, "cases": found.cases, "mean_%": 100 * found.mean, "p50_%": 100 * found.p50, "p95_%": 100 * found.p95,
                "mean_within_10_%": 100 * float(within.mean())}

    loads = sorted({(run.background, run.level) for run in evaluation.runs})
    which = {load: np.array([(run.background, run.level) == load for run in evaluation.runs]) for load in loads}
    return ([row({"latency by": what}, predicted) for what, predicted in left_out.items()],
            [row({"background": name, "level": level}, left_out[PROBED], which[name, level]) for name, level in loads])


def simulated_models(workspace: Workspace, target: str,
                     config: TrainingConfig) -> tuple[dict[str, Simulated], dict[str, Simulated], dict[str, str]]:
    """Each model of the fit with kernels predicted, and with kernels as measured, the costs of a run fitted without its
    family; and its family.

    Raises:
        UserError: as `training.fit_composition.fit_target`, or a target whose runs are not two tracks.
    """
    from training.composition import load_composition
    from training.fit_composition import known_times, left_out_groups, measured_models, predict_out_of_fold, tracks
    from training.pipeline import left_out_costs
    from training.predictor_files import ON_GPU, read_sidecar
    from training.training_set import load_training_set, measured_times

    composition, sidecar = load_composition(workspace.predictors(target)), read_sidecar(workspace.predictors(target))
    if composition.kind != "pipeline":
        raise UserError(f"{target}: its composition is {composition.kind}, and only a GPU's two tracks tell what a run beside "
                        "other work takes")
    models = measured_models(workspace, target, sidecar)
    left_out, groups = left_out_groups(models)
    rows = load_training_set(workspace, target)
    strict = {label: predict_out_of_fold(rows, models, groups, left_out, label, sidecar.labels[label].own_types, config)
              for label in cli.track(ON_GPU, "leaving families out")}
    known = known_times(strict, measured_times(workspace, target))
    names = [model.record.model for model in models]
    of_strict, of_known = ([tracks(model, *(times[label][name] for label in ON_GPU)) for model, name in zip(
        models, names, strict=True)] for times in (strict, known))

    def simulated(found: Sequence[Tracks]) -> dict[str, Simulated]:
        costs = left_out_costs(found, groups)
        return {name: Simulated(one, costs[group]) for name, one, group in zip(names, found, groups, strict=True)}

    return simulated(of_strict), simulated(of_known), dict(zip(names, groups, strict=True))


def fit_target(workspace: Workspace, beside: Workspace, target: str,
               config: TrainingConfig) -> tuple[Sharing, list[dict[str, Any]], list[dict[str, Any]]]:
    """What was learned of a target's sharing, and the two tables of `tables`.

    Raises:
        UserError: nothing was measured beside backgrounds, or what a GPU's two tracks need is not there.
    """
    from benchmark.dataset import read_journal

    blocks = read_journal(beside.dataset(target))
    alone = alone_ms(blocks)
    runs = shared_runs(blocks, alone)
    if not runs:
        raise UserError(f"{beside.dataset(target)}: no model was measured beside a background with the sharing probe read "
                        "before it; add levels and stress.backgrounds to the collector's config")
    evaluation = Evaluation(runs, *simulated_models(workspace, target, config), alone)
    left_out = evaluation.left_out()
    by_what, by_load = tables(evaluation, left_out)
    sharing = evaluation.learned().model_copy(update={
        "probed": errors_of(left_out[PROBED], evaluation.measured),
        "from_metrics": errors_of(left_out[FROM_METRICS], evaluation.measured)})
    return sharing, by_what, by_load


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", help="name of a target in training/predictors (default: all measured beside backgrounds)")
    parser.add_argument("--beside", type=Path, metavar="WORKSPACE",
                        help="where the models measured beside backgrounds are (default: the same workspace)")
    parser.add_argument("--config", type=Path, default=ROOT / "training" / "config.yaml",
                        help="settings (default: training/config.yaml)")
    args = parser.parse_args()
    workspace = cli.start(args)
    beside = Workspace(args.beside) if args.beside else workspace
    from benchmark.dataset import collected_targets, load_header
    from training.estimators import TrainingConfig
    from training.fit_composition import targets
    from training.sharing import sharing_path
    from utils.config import load_config

    config = load_config(args.config, TrainingConfig)
    names = [args.target] if args.target else sorted(set(targets(workspace)) & {
        name for name in collected_targets(beside) if load_header(beside.dataset(name)).backgrounds})
    if not names:
        raise UserError(f"{beside.dataset('')}: no target with predictors was measured beside backgrounds; add levels and "
                        "stress.backgrounds to the collector's config")
    results: dict[str, Any] = {}
    for name in names:
        sharing, by_what, by_load = fit_target(workspace, beside, name, config)
        path = sharing_path(workspace.predictors(name))
        files.write_json(path, sharing)
        log.info("saved %s: a slice of %g ms", path, sharing.slice_ms)
        results[name] = {"sharing": sharing.model_dump(mode="json"), "latency_by": by_what, "backgrounds": by_load}
        if not args.json:
            cli.print_table(by_what, f"{name}: latencies beside other work, families and backgrounds left out")
            cli.print_table(by_load, f"{name}: the same by background, from a probe")
    if args.json:
        cli.print_json(results)
    return 0


if __name__ == "__main__":
    cli.run(main)
