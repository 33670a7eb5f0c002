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
# The standard deviation of a session's latency around the model's usual one, as a logarithm: where the host limits the run (its
# work takes at least HOST_BOUND of the latency), and elsewhere. The medians of models measured several times say so.
SESSION_NOISE, HOST_BOUND = (0.045, 0.006), 0.9
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


def fit(pairs: Sequence[Pair]) -> tuple[Floats, float]:
    """The likeliest reaches for errors with a Laplace distribution around the predicted ratio, and the 90 % end in scales."""
    squares, noise = np.array([pair.sources for pair in pairs]) ** 2, np.array([pair.noise for pair in pairs]) ** 2
    sizes, weights = np.abs([pair.error for pair in pairs]), weights_of(pairs)

    def loss(reach: Floats) -> float:
        scale = np.sqrt(noise + squares @ reach ** 2)
        return float(weights @ (np.log(scale) + sizes / scale))

    reach = min((scipy.optimize.minimize(loss, np.full(len(NAMES), start), bounds=[(1e-4, 10.0)] * len(NAMES))
                 for start in (0.02, 0.1, 0.5)), key=lambda found: found.fun).x
    scaled = sizes / np.sqrt(noise + squares @ reach ** 2)
    order = np.argsort(scaled)
    return reach, float(scaled[order][np.searchsorted(np.cumsum(weights[order]), 0.9 * weights.sum())])


class Judged(NamedTuple):
    """Pairs whose collection was held out of the fit: the share inside the 90 % interval, with the noise, and the changes in
    both directions."""

    inside: float
    changes: list[JudgedChange]


def judge_held_out(pairs: Sequence[Pair]) -> Judged:
    """Each collection held out in turn."""
    changes, inside, order = [], [], []
    for collection in sorted({pair.collection for pair in pairs}):
        reach, end = fit([pair for pair in pairs if pair.collection != collection])
        for pair in (pair for pair in pairs if pair.collection == collection):
            own = end * math.hypot(*(reach * pair.sources))
            order.append(pair)
            inside.append(abs(pair.error) <= math.hypot(own, end * pair.noise))
            changes += [JudgedChange.of_logarithms(sign * (pair.predicted + pair.error), sign * pair.predicted, own)
                        for sign in (1, -1)]
    return Judged(float(np.average(inside, weights=weights_of(order))), changes)


def main() -> int:
    args = cli.parser(__doc__, EXAMPLES).parse_args()
    workspace = cli.start(args)
    pairs = [pair for strict in (True, False) for pair in pairs_of(judged_models(workspace, strict))]
    (reach, end), judged = fit(pairs), judge_held_out(pairs)
    fitted = {"pairs": len(pairs), **dict(zip(NAMES, reach.tolist(), strict=True)), "end": end, "inside": judged.inside}
    if args.json:
        cli.print_json({"fitted": fitted, "verdicts": verdict_rows(judged.changes)})
    else:
        cli.print_table([fitted], "reaches, END, and the share of pairs inside their interval, collections held out")
        cli.print_table(verdict_rows(judged.changes), "verdicts, collections held out")
    return 0


if __name__ == "__main__":
    cli.run(main)
