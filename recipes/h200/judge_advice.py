"""Compares advice on sharing a GPU with how its models were then served.

Reads the predictors of --workspace and --target, and of the workspace --served the sets of models that were measured under
several ways of sharing (benchmark/served_sets.py), and their kernel records. Each set is predicted under each way as it was
measured, at the mean pace that the host's probe had in the servers' own processes, or else at that of the readings in the
folder `host_pace`; and with the stalls that models had which were served alone there, or else with those of these readings, or
with those that the servers saw.

The servers of archives with several cards slept for some 50 µs between two runs, after which a virtual machine now and
then goes on milliseconds later. They no longer do: with --begun-at-once latencies are those of the same runs without it.

Prints the errors of a run beside the others, and of the mean and the 95th percentile of requests; and how often the way with
the most predicted headroom met all objectives, of the sets in which any measured way did, and came within 5 % of the best
headroom. Percentiles of models that left more than 2 % of their requests unserved are not known; they miss their objectives.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmark.serving.results import ModelResult, SetResult, read_requests, read_results
from graph_model.simulation.serving import SLOWER, Served
from inference.core.host_pace import given_pace, ratio_of
from inference.core.model_run import PredictedRun
from inference.core.predictor import Predictor
from inference.sharing.advice import FINAL, Plan, Question
from inference.sharing.ways import MPS, MPS_SHARES, kind_of
from records.host_pace import Stalls
from training.sharing.serving_fit import host_pace_us, learned_from, paces_beside, served_record
from utils import cli
from utils.errors import UserError
from utils.paths import Workspace
from utils.sharing_mode import SLICES, SetSharing

MOST_UNSERVED = 0.02  # of the requests: with more the percentiles are not known
CLOSE = 0.05  # of the objective: headrooms that count as alike
PERCENT = 95
HOST_BOUND = 1.1  # times as long at SLOWER times the host's pace: more is bound by the host
EXAMPLES = """
python recipes/h200/judge_advice.py --workspace out/h100 --target nvidia-h100-80gb-hbm3-cuda-ort1.31-all \\
  --served out/served  # needs both
"""


class Judged(NamedTuple):
    """A model of a set under a way of sharing: as measured, and as predicted.

    Attributes:
        between_ms: the 90 % interval of the predicted percentile.
        host_bound: how many times as long its runs take alone where the host takes SLOWER times as long.
    """

    model: str
    slo_ms: float
    measured: ModelResult
    predicted: Served
    between_ms: tuple[float, float]
    host_bound: float

    @property
    def measured_ms(self) -> float:
        """The percentile of the objective; infinite where too many requests were not served."""
        latency = self.measured.latency
        served = self.measured.unserved <= MOST_UNSERVED * self.measured.requests
        return latency.p95_ms if latency and served else math.inf


class JudgedWay(NamedTuple):
    """A set under a way of sharing, and its models."""

    way: str
    models: tuple[Judged, ...]

    @property
    def measured(self) -> float:
        """The least headroom that was measured; −∞ where a model could not keep up."""
        return min(1.0 - model.measured_ms / model.slo_ms for model in self.models)

    @property
    def predicted(self) -> float:
        """The least headroom that is predicted."""
        return min(1.0 - model.predicted.percentile_ms(PERCENT) / model.slo_ms for model in self.models)


def stalls_of(results: Sequence[SetResult], served: Workspace, predictor: Predictor) -> Stalls | None:
    """The stalls of the host: of models that were served alone, or else those that its probe saw while nothing else ran, or
    else those that it saw in the servers; None where nobody watched."""
    if any(len(result.models) == 1 for result in results):
        host = learned_from(served, predictor.workspace.predictors(predictor.fitted.target.name))
        return Stalls(host.stalls_per_s, host.stalls_ms)
    if watched := [reading.stalls for reading in paces_beside(served) if reading.stalls]:
        return Stalls(float(np.mean([stalls.per_s for stalls in watched])),
                      [length_ms for stalls in watched for length_ms in stalls.lengths_ms])
    of_models = [of_model for result in results for of_model in result.results]
    dispatched_s = sum(of_model.dispatched_s for of_model in of_models)
    lengths_ms = [stall for of_model in of_models for stall in of_model.stalls_ms]
    return Stalls(len(lengths_ms) / dispatched_s, lengths_ms) if dispatched_s else None


def measured_of(result: SetResult, path: Path, begun_at_once: bool) -> Sequence[ModelResult]:
    """What was measured of the models of a set.

    Args:
        result: of the set.
        path: the file of results.
        begun_at_once: what it would be if each run had begun as soon as the one before had ended.

    Raises:
        UserError: the requests are missing.
    """
    if not begun_at_once:
        return result.results
    return [requests.begun_at_once(model.batch).result(model.slo_ms, result.seconds)
            for requests, model in zip(read_requests(path, result), result.models, strict=True)]


def judge(predictor: Predictor, served: Workspace, begun_at_once: bool = False) -> list[list[JudgedWay]]:
    """All sets of several models, each under the ways in which it was measured.

    Args:
        predictor: of the target.
        served: the workspace with what was measured.
        begun_at_once: see `measured_of`.

    Raises:
        UserError: nothing was measured on the target, or a record is missing.
    """
    path = served.served_sets(predictor.fitted.target.name)
    of_host = [result for result in read_results(path).values() if result.status == "ok"]
    results = [result for result in of_host if len(result.models) > 1]
    if not results:
        raise UserError(f"{path}: no set of several models was measured")
    pace = given_pace(ratio_of(host_pace_us(results, served), predictor.fitted))
    stalls = stalls_of(of_host, served, predictor)
    found: dict[str, list[JudgedWay]] = {}
    questions: dict[str, Question] = {}
    for result in cli.progress(results, "sets"):
        models, key = result.models, str(result.models)
        if key not in questions:
            records = [served_record(model, served, predictor.fitted.target.flavour) for model in models]
            runs = [{model.batch: predictor.run(record, host_pace=pace)} for model, record in zip(models, records, strict=True)]
            questions[key] = Question(predictor.fitted, models, runs, stalls=stalls)
        sharing = SetSharing.parse(result.way)
        plan = Plan(kind_of(sharing, len(models)), sharing, tuple(model.batch for model in models))
        question = questions[key]
        predicted, *ends = question.simulated([question.case(plan, end) for end in (None, 0, 1)], FINAL)
        found.setdefault(key, []).append(JudgedWay(result.way, tuple(
            Judged(model.model.stem, model.slo_ms, measured, of_model, question.between_ms(low, high),
                   _host_bound(of_batch[model.batch]))
            for model, measured, of_model, low, high, of_batch in zip(models, measured_of(result, path, begun_at_once),
                                                                      predicted, *ends, question.runs, strict=True))))
    return list(found.values())


def _host_bound(run: PredictedRun) -> float:
    return run.at_pace(SLOWER).alone_ms / run.alone_ms


def errors(name: str, models: Sequence[Judged]) -> dict[str, Any]:
    """Errors in per cent: of a run, of the mean latency and of the percentile, each with its bias (of the geometric mean); and
    how often the percentile lies within its 90 % interval."""
    row: dict[str, Any] = {"of": name, "cases": len(models)}
    for what, pairs in {
        "run": [(model.predicted.run_ms, model.measured.runs.mean_ms) for model in models if model.measured.runs],
        "mean": [(model.predicted.mean_ms, model.measured.latency.mean_ms) for model in models if model.measured.latency],
        f"p{PERCENT}": [(model.predicted.percentile_ms(PERCENT), model.measured_ms) for model in models],
    }.items():
        ratios = np.array([predicted / measured for predicted, measured in pairs if math.isfinite(predicted)])
        row |= {f"{what}_%": 100 * float(np.abs(ratios - 1.0).mean()),
                f"{what}_median_%": 100 * float(np.median(np.abs(ratios - 1.0))),
                f"{what}_bias_%": 100 * float(np.expm1(np.log(ratios).mean()))}
    within = [of.between_ms[0] <= of.measured_ms <= of.between_ms[1] for of in models]
    return row | {f"p{PERCENT}_in_90_%": 100 * sum(within) / len(within)}


def tables(sets: Sequence[Sequence[JudgedWay]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The errors, and how good the advice is."""
    known = [(kind_of(SetSharing.parse(way.way), len(way.models)), model) for ways in sets for way in ways
             for model in way.models if math.isfinite(model.measured_ms)]
    classes = {"all": [model for _, model in known]}
    classes |= {kind: of_kind for kind in (SLICES, MPS, MPS_SHARES)
                if (of_kind := [model for of, model in known if of == kind])}
    classes |= {name: of_class for name, bound in (("the GPU is the slower track", False), ("the host is", True))
                if (of_class := [model for _, model in known if (model.host_bound > HOST_BOUND) == bound])}
    advised = [max(ways, key=lambda way: way.predicted) for ways in sets]
    best = [max(way.measured for way in ways) for ways in sets]
    possible = [(way, headroom) for way, headroom in zip(advised, best, strict=True) if headroom >= 0.0]
    counts = {"sets": len(sets), "in which a measured way meets all objectives": len(possible),
              "… the advised way does": sum(way.measured >= 0.0 for way, _ in possible),
              f"… with a headroom within {CLOSE:.0%} of the best": sum(way.measured >= most - CLOSE for way, most in possible),
              **{f"… {name} would": sum(way.measured >= 0.0 for ways in sets for way in ways if way.way == name)
                 for name in (MPS, SLICES)},
              "rightly said whether a way does": sum((way.predicted >= 0.0) == (most >= 0.0)
                                                     for way, most in zip(advised, best, strict=True))}
    return [errors(name, models) for name, models in classes.items()], [
        {"advice": name, "count": count} for name, count in counts.items()]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", required=True, help="name of a target, as for a prediction")
    parser.add_argument("--served", type=Path, required=True, metavar="WORKSPACE",
                        help="workspace with measured sets, and the records of their models")
    parser.add_argument("--begun-at-once", action="store_true", help="as if no server had paused between two runs")
    args = parser.parse_args()
    workspace = cli.start(args)
    served = Workspace(cli.existing_folder("--served", args.served, "measure with: recipes/h200/measure_served_sets.sh"))
    of_errors, of_advice = tables(judge(Predictor(workspace, args.target), served, args.begun_at_once))
    if args.json:
        cli.print_json({"errors": of_errors, "advice": of_advice})
    else:
        cli.print_table(of_errors)
        cli.print_table(of_advice)
    return 0


if __name__ == "__main__":
    cli.run(main)
