"""Compares latencies beside processes that run a model in a loop with what is predicted of them.

Reads the predictors of --workspace and --target, and of the workspace --measured the models' kernel records and in it a
workspace for each way of sharing the GPU, as measure_sharing.sh leaves them. Each model is predicted as a user gets it, at the
pace that the host's probe had between its runs; so are the processes beside it. Nothing is known of the measured latencies.

Prints the errors of the latency alone, and of the mean, the median and the 95th percentile beside others, by way of sharing,
number of processes beside the model, and whether the GPU or the host is its slower track. Runs that the host held up, those
that took 3 ms longer than the median, decide the percentile on a host that often stalls: `p95_unstalled` is without them.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from inference.core.host_pace import UNKNOWN, given_pace, ratio_of
from inference.core.model_run import PredictedRun
from inference.core.predictor import Predictor
from inference.sharing.shared_models import one_of_two
from inference.sharing.ways import MPS, MPS_SHARES, kind_of, times_under
from records.dataset_files import read_journal
from records.host_pace import STALL_S
from training.sharing.mps import GPU_BOUND
from training.sharing.mps_fit import MeasuredWay, read_way, records_of
from training.sharing.shared_runs import latencies_in
from utils import cli
from utils.errors import UserError
from utils.paths import Workspace
from utils.sharing_mode import ALL_THREADS, SLICES, SetSharing

Floats = npt.NDArray[np.float64]
STATISTICS = ("mean", "p50", "p95", "p95_unstalled")
EXAMPLES = """
python recipes/h200/judge_pairs.py --target nvidia-h200 --measured out/pairs  # needs a measurement
"""


class Case(NamedTuple):
    """A model beside processes that run a model in a loop.

    Attributes:
        way: of sharing the GPU, without its shares.
        sharing: the way with them, as the collector takes it.
        model, background: which ran, and beside what.
        processes: beside it.
        of_gpu: whether its kernels take GPU_BOUND of its latency alone, or more.
        alone_ms: the latency alone, predicted and measured.
        predicted_ms, measured_ms: the STATISTICS beside the processes.
        in_interval: whether the mean lies within its 90 % interval.
    """

    way: str
    sharing: str
    model: str
    background: str
    processes: int
    of_gpu: bool
    alone_ms: tuple[float, float]
    predicted_ms: Floats
    measured_ms: Floats
    in_interval: bool


class Measured(NamedTuple):
    """What was measured under one way of sharing.

    Attributes:
        way: the dataset.
        unstalled_ms: the 95th percentile of the runs that the host did not hold up, by model and background.
    """

    way: MeasuredWay
    unstalled_ms: dict[tuple[str, str], float]


def unstalled_ms(folder: Path) -> dict[tuple[str, str], float]:
    """The 95th percentile of the runs of a dataset that took at most STALL_S longer than the median, by model and background;
    where several blocks have them, the median of theirs."""
    found: dict[tuple[str, str], list[float]] = {}
    for block in read_journal(folder):
        for measured in latencies_in(block) if block.level else ():
            samples_ms = np.array(measured.samples_ms)
            kept = samples_ms[samples_ms <= np.median(samples_ms) + 1e3 * STALL_S]
            found.setdefault((measured.id, block.background_name), []).append(float(np.percentile(kept, 95)))
    return {pair: float(np.median(values)) for pair, values in found.items()}


def ways_measured(measured: Workspace, target: str) -> list[Measured]:
    """What was measured on a target under each way.

    Raises:
        UserError: nothing, or a dataset is damaged.
    """
    folders = [Workspace(path) for path in sorted(measured.root.iterdir()) if Workspace(path).dataset(target).is_dir()]
    if not folders:
        raise UserError(f"{measured.root}: no dataset of {target} in any folder of it; measure with: "
                        "CONFIG=recipes/h200/processes.yaml recipes/h200/measure_sharing.sh")
    return [Measured(read_way(folder, target), unstalled_ms(folder.dataset(target))) for folder in folders]


def cases_of(measured: Measured, run_of: Callable[[str, float], PredictedRun]) -> Iterator[Case]:
    """The models of a way, each beside every looped model that has a record.

    Args:
        measured: the way.
        run_of: a model's predicted run, by the record's name, at a time of the host's probe (µs; NaN: not read).
    """
    way = measured.way
    sharing, shares = way.sharing, (way.sharing.percent, way.sharing.co_runner_percent)
    pair = SetSharing(sharing.mps, shares) if min(shares) < ALL_THREADS else SetSharing(sharing.mps)
    for (model, background), measured_ms in way.beside.items():
        looped, processes = way.looped[background]
        alone_us = way.probe_us.get(model, np.nan)
        beside_us = way.beside_probe_us.get((model, background), alone_us)
        run, other, before = run_of(model, beside_us), run_of(looped, beside_us), run_of(model, alone_us)
        times = times_under(run.fitted, pair)
        alone_ms, found = times.beside(run, shares[0], [(other, shares[1])] * processes)
        low_ms, high_ms = one_of_two(run.prediction, other.prediction, alone_ms, found,
                                     times.span(run, shares[0], alone_ms)).mean_interval_ms
        predicted_ms = np.array([found.mean_ms, *map(found.percentile_ms, (50, 95, 95))])
        yield Case(
            kind_of(pair, len(shares)), str(pair), model, background, processes,
            float(run.run.tracks.gpu_ms.sum()) >= GPU_BOUND * run.alone_ms,
            (times.alone_ms(before, shares[0]), way.idle_ms[model]), predicted_ms,
            np.append(measured_ms, measured.unstalled_ms[model, background]), low_ms <= measured_ms[0] <= high_ms)


def judge(predictor: Predictor, measured: Workspace) -> list[Case]:
    """All models beside looped models, under every way.

    Raises:
        UserError: nothing was measured on the target, or a record is missing.
    """
    fitted = predictor.fitted
    ways = ways_measured(measured, fitted.target.name)
    names = {name for way, _ in ways for name in (*way.idle_ms, *(looped for looped, _ in way.looped.values()))}
    records = records_of(measured, fitted.target, sorted(names))

    @cache
    def run_of(name: str, probe_us: float) -> PredictedRun:
        return predictor.run(records[name], host_pace=UNKNOWN if np.isnan(probe_us) else given_pace(ratio_of(probe_us, fitted)))

    return [case for of_way in cli.progress(ways, "ways of sharing") for case in cases_of(of_way, run_of)]


def errors(name: str, cases: Sequence[Case]) -> dict[str, Any]:
    """Errors in per cent, those beside others each with its bias (of the geometric mean); and how often the mean lies within
    its interval."""
    row: dict[str, Any] = {"of": name, "cases": len(cases),
                           "alone_%": 100 * float(np.mean([abs(predicted / alone - 1.0) for predicted, alone in
                                                         (case.alone_ms for case in cases)]))}
    for place, what in enumerate(STATISTICS):
        ratios = np.array([case.predicted_ms[place] / case.measured_ms[place] for case in cases])
        row |= {f"{what}_%": 100 * float(np.abs(ratios - 1.0).mean()),
                f"{what}_bias_%": 100 * float(np.expm1(np.log(ratios).mean()))}
    return row | {"mean_in_90_%": 100 * sum(case.in_interval for case in cases) / len(cases)}


def table(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The errors under each way: of all its cases, and of each kind."""
    rows = []
    for way in (SLICES, MPS, MPS_SHARES):
        of_way = [case for case in cases if case.way == way]
        rows += [errors(way, of_way)] if of_way else []
        for processes, of_host in sorted({(case.processes, not case.of_gpu) for case in of_way}):
            kind = [case for case in of_way if (case.processes, not case.of_gpu) == (processes, of_host)]
            rows.append(errors(f"{way}, beside {processes}, {'the host' if of_host else 'the GPU'} is the slower track", kind))
    return rows


def row(case: Case) -> dict[str, Any]:
    """A case in a table, in ms."""
    alone_ms, measured_ms = case.alone_ms
    return {"sharing": case.sharing, "model": case.model, "beside": case.background, "alone": measured_ms,
            "alone_predicted": alone_ms,
            **{f"{what}{suffix}": float(values[place]) for place, what in enumerate(STATISTICS)
               for suffix, values in (("", case.measured_ms), ("_predicted", case.predicted_ms))}}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", required=True, help="name of a target, as for a prediction")
    parser.add_argument("--measured", type=Path, required=True, metavar="WORKSPACE",
                        help="workspace with the models' records, and in it a workspace for each way of sharing")
    parser.add_argument("--cases", action="store_true", help="also print each model beside each background, in ms")
    args = parser.parse_args()
    workspace = cli.start(args)
    measured = Workspace(cli.existing_folder("--measured", args.measured, "measure with: recipes/h200/measure_sharing.sh"))
    cases = judge(Predictor(workspace, args.target), measured)
    if args.json:
        cli.print_json({"errors": table(cases)} | ({"cases": [row(case) for case in cases]} if args.cases else {}))
        return 0
    if args.cases:
        cli.print_table([row(case) for case in cases])
    cli.print_table(table(cases))
    return 0


if __name__ == "__main__":
    cli.run(main)
