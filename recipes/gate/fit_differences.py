"""Fits how far off predicted ratios of latencies are (learned/composition/differences.py), to pairs of measured models.

Pairs are of one family, and one takes at most MOST times as long as the other. Each counts twice: with every kernel predicted
and the family held out (latencies as in composition.json), and with measured kernels looked up. Both models were measured in
sessions of their own, whose noise is assumed (SESSION_NOISE) and taken out. Prints the reaches and the end for the module's
constants; and, each collection of models held out of the fit, how many true ratios are in the 90 % interval, and for each limit
how many regressions are found and left as "maybe", and the false alarms. Reads a workspace with the H200's records and table of
models (recipes/h200/learn.sh out/h200 unpack).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hase.inference.compare.snapshots import costs_of
from hase.inference.library.predictor import Predictor
from hase.learned.composition.differences import DifferenceSources, RunCosts, sources_of_difference
from hase.recipes.gate.verdicts import JudgedChange, verdict_rows
from hase.records.dataset_tables import read_model_table
from hase.records.host_pace import paced_rows
from hase.records.kernel_record_files import read_model_record, record_path
from hase.utils import cli
from hase.utils.lazy import scipy
from hase.utils.paths import Workspace

TARGET = "nvidia-h200-cuda-ort1.31-all"
MOST = 1.6  # how many times as long one model of a pair takes
# The mean difference of a session's latency, at its host's pace, from the model's usual one, as a logarithm: where the host
# limits the run (its work takes at least HOST_BOUND of the latency), and elsewhere; of models measured several times.
SESSION_NOISE, HOST_BOUND = (0.026, 0.005), 0.9
NAMES = DifferenceSources._fields
Floats = npt.NDArray[np.float64]
EXAMPLES = """
python recipes/gate/fit_differences.py --workspace out/h200  # needs the unpacked dataset
"""


class JudgedModel(NamedTuple):
    """A measured model: its predicted costs, the error of its latency (log of measured over predicted), and its noise."""

    collection: str
    family: str
    costs: RunCosts
    predicted: float
    error: float
    noise: float


class Pair(NamedTuple):
    """A pair of models: where from, the sources of error, the logarithm of the predicted ratio, its error, and the noise."""

    collection: str
    family: str
    sources: DifferenceSources
    predicted: float
    error: float
    noise: float


def judged_models(workspace: Workspace, strict: bool) -> list[JudgedModel]:
    """The measured models, each predicted at the pace of its host."""
    predictor = Predictor(workspace, TARGET, strict=strict)
    rows = paced_rows(read_model_table(workspace, TARGET))
    sessions = rows[rows["undisturbed"]].groupby("Model")["pace"].agg(["median", "size"])
    flavour = predictor.fitted.target.flavour
    fitted = [model for model in predictor.fitted.composition.models if model.model in sessions.index
              and record_path(workspace, flavour, model.model).is_file()]
    records = [read_model_record(record_path(workspace, flavour, model.model)) for model in fitted]
    models = []
    for model, record, run in zip(fitted, records, predictor.runs(records, host_pace=1.0), strict=True):
        costs, (pace, count) = costs_of(run), map(float, sessions.loc[model.model])
        by_pace = run.at_pace(pace).alone_ms / run.alone_ms
        usual_ms = model.predicted_ms if strict else run.alone_ms
        host_ms = sum(kernel.runs * kernel.host_ms for kernel in costs.kernels.values())
        noise = SESSION_NOISE[host_ms < HOST_BOUND * costs.latency_ms] / math.sqrt(count)
        models.append(JudgedModel(record.collection, model.group, costs, math.log(usual_ms),
                                  math.log(model.measured_ms / usual_ms / by_pace), noise))
    return models


def pairs_of(models: Sequence[JudgedModel]) -> list[Pair]:
    """All pairs of models of one family that take about as long."""
    return [Pair(a.collection, f"{a.collection}/{a.family}", sources_of_difference(a.costs, b.costs), b.predicted - a.predicted,
                 b.error - a.error, math.hypot(a.noise, b.noise))
            for a, b in itertools.combinations(models, 2)
            if (a.collection, a.family) == (b.collection, b.family) and abs(b.predicted - a.predicted) < math.log(MOST)]


def weights_of(pairs: Sequence[Pair]) -> Floats:
    """The weight of each pair: 1 in total for each family."""
    counts = Counter(pair.family for pair in pairs)
    return np.array([1.0 / counts[pair.family] for pair in pairs])


def fit(pairs: Sequence[Pair]) -> Floats:
    """The likeliest reaches for errors with a Laplace distribution around the predicted ratio."""
    squares, noise = np.array([pair.sources for pair in pairs]) ** 2, np.array([pair.noise for pair in pairs]) ** 2
    sizes, weights = np.abs([pair.error for pair in pairs]), weights_of(pairs)

    def loss(reach: Floats) -> float:
        scale = np.sqrt(noise + squares @ reach ** 2)
        return float(weights @ (np.log(scale) + sizes / scale))

    found = (scipy.optimize.minimize(loss, np.full(len(NAMES), start), bounds=[(1e-4, 10.0)] * len(NAMES))
             for start in (0.02, 0.1, 0.5))
    return np.asarray(min(found, key=lambda fitted: fitted.fun).x)


class Judged(NamedTuple):
    """A pair whose collection was held out of the fit: the scale of its ratio's error, and its error in scales, with noise."""

    pair: Pair
    scale: float
    scaled: float


def judge_held_out(pairs: Sequence[Pair]) -> list[Judged]:
    """Each collection held out in turn."""
    judged = []
    for collection in sorted({pair.collection for pair in pairs}):
        reach = fit([pair for pair in pairs if pair.collection != collection])
        for pair in (pair for pair in pairs if pair.collection == collection):
            scale = math.hypot(*(reach * pair.sources))
            judged.append(Judged(pair, scale, abs(pair.error) / math.hypot(scale, pair.noise)))
    return judged


def end_of(judged: Sequence[Judged]) -> float:
    """The number of scales that hold 90 % of the errors."""
    scaled, weights = np.array([one.scaled for one in judged]), weights_of([one.pair for one in judged])
    order = np.argsort(scaled)
    return float(scaled[order][np.searchsorted(np.cumsum(weights[order]), 0.9 * weights.sum())])


def main() -> int:
    args = cli.parser(__doc__, EXAMPLES).parse_args()
    workspace = cli.start(args)
    pairs = [pair for strict in (True, False) for pair in pairs_of(judged_models(workspace, strict))]
    judged = judge_held_out(pairs)
    ends = {collection: end_of([one for one in judged if one.pair.collection != collection])
            for collection in {pair.collection for pair in pairs}}
    inside = np.average([one.scaled <= ends[one.pair.collection] for one in judged], weights=weights_of(
        [one.pair for one in judged]))
    rows = verdict_rows([JudgedChange.from_logarithms(
        sign * (pair.predicted + pair.error), sign * pair.predicted, ends[pair.collection] * scale)
        for pair, scale, _ in judged for sign in (1, -1)])
    fitted = {"pairs": len(pairs), **dict(zip(NAMES, fit(pairs).tolist(), strict=True)), "end": end_of(judged),
              "inside": float(inside)}
    if args.json:
        cli.print_json({"fitted": fitted, "verdicts": rows})
    else:
        cli.print_table([fitted], "reaches, END, and the share of pairs inside their interval, collections held out")
        cli.print_table(rows, "verdicts, collections held out")
    return 0


if __name__ == "__main__":
    cli.run(main)
