"""How much of a co-runner's effect metrics can tell: latencies next to it, predicted from metrics in several ways.

Reads the kernel records of --workspace (`learn.sh out/h200 unpack` writes them), predictions of the shipped predictors, and the
models measured next to co-runners in the workspaces --beside. Where such a workspace has `metrics.csv`, a row for each tenth of
a second, how metrics change within two seconds counts too. The idle latency is the measured one, so that only what is said of
the co-runner can be wrong, and each kind of co-runner is left out of what the others teach. Prints the errors, and what
metrics show of each kind; writes nothing.

Each way guesses the co-runner's busy share, how long one waits for its turns, or both. The floor takes the waits that the
sharing probe measured: no metrics can do better, as long as the busy share comes from them.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from graph_model.simulation.sharing import CoRunner
from inference.core.predictor import Predictor
from records.blocks import Block
from records.dataset_files import read_journal
from records.kernel_record_files import record_path
from training.sharing.learned import ALWAYS, Sharing
from training.sharing.shared_runs import SharedRuns, Simulated, alone_ms, errors_of, shared_runs, statistics_of, typical
from utils import cli
from utils.errors import UserError
from utils.lazy import pandas as pd
from utils.lazy import sklearn
from utils.paths import Workspace

Floats = npt.NDArray[np.float64]
BUSY = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
RATIOS = ("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_OCCUPANCY", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_DRAM_ACTIVE",
          "DCGM_FI_PROF_PIPE_FP32_ACTIVE")
TRAFFIC = ("DCGM_FI_PROF_PCIE_RX_BYTES", "DCGM_FI_PROF_PCIE_TX_BYTES")
SERIES = "metrics.csv"
WINDOW_S, LAG_S = 2.0, 0.35  # of the series before a reading of the probe; counters lag by up to 0.17 s
SEED = 7
EXAMPLES = """
python recipes/h200/metrics_study.py --workspace out/h200 --beside out/h200/beside --beside out/h200/beside-more
python recipes/h200/metrics_study.py --workspace out/h200 --beside out/h200/metrics
"""


def means_of(run: SharedRuns) -> list[float]:
    """What the means of the metrics say of the kind of work, whatever its busy share: each by the time that it is at work."""
    busy = max(run.metrics[BUSY], 0.01)
    return [*(run.metrics[field] / busy for field in RATIOS), *(np.log10(run.metrics[field] / busy) for field in TRAFFIC)]


def changes_before(block: Block, series: pd.DataFrame) -> list[float]:
    """How the metrics changed from one tenth of a second to the next before a block's reading of the probe, and how many
    processes the GPU had.

    Raises:
        UserError: the series has nothing of that time.
    """
    if block.probe is None:
        raise UserError(f"{block.key}: no reading of the sharing probe")
    until = datetime.fromisoformat(block.probe.started).timestamp() - LAG_S
    window = series[series["time"].between(until - WINDOW_S, until)]
    if len(window) < 2:
        raise UserError(f"{SERIES} has nothing of the {WINDOW_S:g} s before {block.probe.started}")
    busy, received, utilisation = (window[field] for field in (BUSY, TRAFFIC[0], "DCGM_FI_DEV_GPU_UTIL"))
    return [float(value) for value in (busy.std(), busy.diff().abs().mean(), received.std() / received.mean(),
                                       utilisation.std(), window["processes"].mean())]


def simulated(workspace: Workspace, runs: Iterable[SharedRuns]) -> dict[tuple[str, float], Simulated]:
    """Each model and measured idle latency, ready for simulation, with kernels as the shipped predictors know them.

    Raises:
        UserError: a model's record is missing.
    """
    predictor = Predictor(target="nvidia-h200")
    models = {name: predictor.shared(record_path(workspace, predictor.fitted.target.flavour, name))
              for name in sorted({run.model for run in runs})}
    at_pace = {name: Simulated(model.tracks, model.costs) for name, model in models.items()}
    return {(run.model, run.idle_ms): Simulated(*at_pace[run.model].run, run.idle_ms - at_pace[run.model].idle_ms())
            for run in runs}


def left_out(features: Floats, values: Floats, kinds: Floats, model: Callable[[], Any]) -> Floats:
    """`values` as learned from `features` of the other kinds, for each run."""
    scaled = (features - features.mean(axis=0)) / np.maximum(features.std(axis=0), 1e-9)
    predicted = np.empty(len(values))
    for kind in set(kinds):
        predicted[kinds == kind] = model().fit(scaled[kinds != kind], values[kinds != kind]).predict(scaled[kinds == kind])
    return predicted


class Study:
    """Runs next to co-runners, and what can be guessed of these from metrics.

    Attributes:
        runs: of models next to co-runners.
        learned: what the other kinds teach, for each run.
    """

    def __init__(self, runs: Sequence[SharedRuns], models: Mapping[tuple[str, float], Simulated],
                 alone: Mapping[str, float], slice_ms: float) -> None:
        self.runs, self._models, self._slice_ms = runs, models, slice_ms
        self._kinds = np.array([run.background for run in runs])
        of_kind = {kind: typical([run for run in runs if run.background != kind], slice_ms, alone)
                   for kind in cli.progress(sorted(set(self._kinds)), "learning without a kind")}
        self.learned = [of_kind[run.background] for run in runs]

    def row(self, way: str, co_runners: Iterable[CoRunner]) -> dict[str, Any]:
        """The errors of latencies next to these co-runners."""
        predicted = np.array([self._models[run.model, run.idle_ms].next_to(co_runner, self._slice_ms)
                              for run, co_runner in zip(self.runs, co_runners, strict=True)])
        errors = errors_of(predicted, np.array([statistics_of(run.samples_ms) for run in self.runs]))
        return {"latency by": way, "cases": errors.cases, "mean_%": 100 * errors.mean, "p50_%": 100 * errors.p50,
                "p95_%": 100 * errors.p95}

    def scaled(self, features: Floats, model: Callable[[], Any]) -> list[CoRunner]:
        """Co-runners whose mean wait is learned from `features`."""
        waits = np.array([run.co_runner.waits_ms.mean() for run in self.runs])
        guessed = np.exp(left_out(features, np.log(waits), self._kinds, model))
        return [with_waits(run.busy, np.array(learned.waits_ms) * wait / np.mean(learned.waits_ms), learned)
                for run, learned, wait in zip(self.runs, self.learned, guessed, strict=True)]

    def most_alike(self, features: Floats) -> list[CoRunner]:
        """Co-runners with the waits of the run of another kind whose features are nearest."""
        scaled = features / np.maximum(features.std(axis=0), 1e-9)
        nearest = [int(np.where(self._kinds != kind, np.linalg.norm(scaled - row, axis=1), np.inf).argmin())
                   for row, kind in zip(scaled, self._kinds, strict=True)]
        return [with_waits(run.busy, self.runs[place].co_runner.waits_ms, learned)
                for run, learned, place in zip(self.runs, self.learned, nearest, strict=True)]

    def shares(self) -> Floats:
        """The busy share that the probe would find, learned from the busy share in the metrics."""
        busy, probed = (np.array(values) for values in zip(*((run.busy, run.co_runner.busy_share) for run in self.runs),
                                                           strict=True))
        learned = np.empty(len(busy))
        for kind in set(self._kinds):
            line = sklearn.isotonic.IsotonicRegression(out_of_bounds="clip")
            line.fit(busy[self._kinds != kind], probed[self._kinds != kind])
            learned[self._kinds == kind] = line.predict(busy[self._kinds == kind])
        return learned


def kind_rows(runs: Sequence[SharedRuns]) -> list[dict[str, Any]]:
    """What metrics show of each kind of co-runner, by the time that it is at work, and how long one waits for it by the probe;
    medians over its runs."""
    rows = []
    for kind in sorted({run.background for run in runs}):
        of_kind = [run for run in runs if run.background == kind]
        means = np.median([means_of(run) for run in of_kind], axis=0)
        wait_ms = float(np.median([run.co_runner.waits_ms.mean() for run in of_kind]))
        shown = {field.removeprefix("DCGM_FI_PROF_"): float(mean) for field, mean in zip(RATIOS, means, strict=False)}
        rows.append({"co-runner": kind, "runs": len(of_kind), **shown, "wait_ms": wait_ms})
    return rows


def with_waits(share: float, waits_ms: Floats, learned: Sharing) -> CoRunner:
    """A co-runner that is busy for a share of the time, with these waits and the usual cycle."""
    if share > ALWAYS:
        return CoRunner(1.0, 0.0, waits_ms)
    return CoRunner(share * learned.cycle_ms, (1.0 - share) * learned.cycle_ms, waits_ms)


def study(runs: Sequence[SharedRuns], sets: Mapping[str, Floats], models: Mapping[tuple[str, float], Simulated],
          alone: Mapping[str, float], slice_ms: float) -> list[dict[str, Any]]:
    """A row of errors for each way; `sets`: features of the runs, by what they are."""
    of = Study(runs, models, alone, slice_ms)
    usual = [with_waits(run.busy, np.array(learned.waits_ms), learned) for run, learned in zip(runs, of.learned, strict=True)]
    rows = [of.row("the probe", [run.co_runner for run in runs]),
            of.row("metrics, waits as with an average kind (as Hase does)", usual),
            of.row("metrics, waits as the probe found them: the floor",
                   [with_waits(run.busy, run.co_runner.waits_ms, learned)
                    for run, learned in zip(runs, of.learned, strict=True)]),
            of.row("busy share learned from that in the metrics", [
                with_waits(float(share), np.array(learned.waits_ms), learned)
                for share, learned in zip(of.shares(), of.learned, strict=True)])]
    for name, features in cli.progress(list(sets.items()), "trying features"):
        rows += [of.row(f"waits by a ridge regression of {name}",
                        of.scaled(features, lambda: sklearn.linear_model.Ridge(alpha=3.0))),
                 of.row(f"waits by a random forest of {name}",
                        of.scaled(features, lambda: sklearn.ensemble.RandomForestRegressor(
                            n_estimators=200, min_samples_leaf=4, random_state=SEED))),
                 of.row(f"waits of the kind that is most alike in {name}", of.most_alike(features))]
    return rows


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--beside", type=Path, metavar="WORKSPACE", action="append", required=True,
                        help="workspace with models measured next to co-runners (repeatable)")
    args = parser.parse_args()
    workspace = cli.start(args)
    fitted = Predictor(target="nvidia-h200").fitted
    if fitted.sharing is None:
        raise UserError(f"{fitted.target.name}: nothing was learned of how it is shared")
    datasets = [Workspace(folder).dataset(fitted.target.name) for folder in args.beside]
    blocks = [block for dataset in datasets for block in read_journal(dataset)]
    alone = alone_ms(blocks)
    runs = [run for run in shared_runs(blocks, alone) if len(run.co_runner.waits_ms)]
    sets = {"the metrics' means": np.array([means_of(run) for run in runs])}
    series = [folder / SERIES for folder in args.beside if (folder / SERIES).is_file()]
    if len(series) == len(datasets):
        recorded = pd.concat([pd.read_csv(path) for path in series])
        changes = {block.load: changes_before(block, recorded) for block in blocks if block.level}
        changed = np.array([changes[run.level, run.background] for run in runs])
        sets |= {"their changes": changed, "means and changes": np.hstack([*sets.values(), changed])}
    rows = study(runs, sets, simulated(workspace, runs), alone, fitted.sharing.slice_ms)
    if args.json:
        cli.print_json({"latency": rows, "kinds": kind_rows(runs)})
    else:
        cli.print_table(rows)
        cli.print_table(kind_rows(runs), "each kind by its metrics for each second at work, and how long one waits for it")
    return 0


if __name__ == "__main__":
    cli.run(main)
