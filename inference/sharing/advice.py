"""Finds how several models can share a GPU so that they meet their latency objectives: the way, the shares and the batches.

For each way and each choice of shares, run times are predicted (`hase.inference.sharing.ways`), and the queues of requests are
simulated (`hase.graph_model.simulation.serving`). Batches are searched model after model, for all ways at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain, combinations
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import numpy as np
from pydantic import Field

from hase.benchmark.serving.sets import BATCH, ServedModel
from hase.graph_model.simulation.serving import PACES, SLOWER, STEADY, Case, Served, served, set_of
from hase.inference.prediction.answers import PERCENTILE, ReadableResult, chance_within, chance_word
from hase.inference.prediction.conditions import HostPace
from hase.inference.prediction.uncertainty import CERTAIN
from hase.inference.prediction.under_load import SAMPLES, NotShared
from hase.inference.sharing.ways import MIG, MIG_SPAN, MPS, MPS_SHARES, NEVER_MEASURED, learned_elsewhere, ways_of
from hase.records.host_pace import MEASURE
from hase.utils.config import Config, Frozen
from hase.utils.errors import UserError
from hase.utils.sharing_mode import SetSharing

if TYPE_CHECKING:
    from pathlib import Path

    from hase.graph_model.simulation.pipeline import Floats
    from hase.inference.prediction.run import PredictedRun
    from hase.inference.prediction.targets import Fitted
    from hase.records.host_pace import Stalls

SEED = 36  # for arrivals, so that the same question has the same answer
SEARCH_EFFORT = (1000, 40)  # simulated requests and repetitions for each plan of the search,
FINAL_EFFORT = (20_000, 400)  # and for the final answer
SEARCH_ROUNDS = 3  # each over all models
BATCHES = (1, 2, 4, 8, 16)  # to choose from, unless others are given
MOST_MODELS = 4  # more are refused
DISTURBED_PER_S = 2.0  # stalls per second of dispatching; the host of the training data had 0.6, two others 5 and 9
# Factors by which intervals are wider, by `disturbed`. Chosen so that intervals held for 90 % of the percentiles in half of the
# sets that were measured on such a host, before slowdowns depended on the pace; docs/sharing.md says for how many they do now.
SPREADS = {False: 1.15, True: 1.75}
CAPACITY_FACTOR = 1.5  # the search begins with batches that have capacity for this multiple of the request rate


class RunPredictor(Protocol):
    """The interface of `Predictor` that is needed here."""

    @property
    def fitted(self) -> Fitted: ...

    def run(self, source: Path, *, dims: Mapping[str, int] | None, host_pace: float | HostPace | None) -> PredictedRun: ...


class ServedSet(Config):
    """The file of `--set`: models as in a set of benchmark/served_sets.py."""

    models: Annotated[tuple[ServedModel, ...], Field(min_length=1, max_length=MOST_MODELS)]


class AdvisedModel(Frozen):
    """One model under a way of sharing.

    Attributes:
        model, dims: file and sizes, batch included.
        batch: the most requests in a run, and the size of each run.
        percent: of the GPU's threads that it may use.
        rate_per_s: the requests that come.
        alone_ms: a run, while nothing else runs.
        run_ms: a run beside the other models, on average.
        mean_ms, p50_ms, p95_ms, p99_ms: latency of requests, from arrival to answer.
        slo_ms: the objective for `latency_ms`.
        latency_ms: the objective's percentile.
        between_ms: its 90 % interval.
        headroom: how far `latency_ms` is below `slo_ms`, a ratio of it.
        chance, chance_in_words: how likely the objective is met, 0 to 1.
        busy: share of the time in which a run goes on.
        stable: whether fewer requests come than full runs could take.
        rough_estimate: whether its prediction is one, the host stalls often, or the way was never measured.
        estimated_operators: of the prediction of its runs.
    """

    model: str
    dims: dict[str, int]
    batch: int
    percent: int | None
    rate_per_s: float
    alone_ms: float
    run_ms: float
    mean_ms: float | None
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    slo_ms: float
    latency_ms: float | None
    between_ms: tuple[float | None, float | None] = (None, None)
    headroom: float | None
    chance: float
    chance_in_words: str
    busy: float
    stable: bool
    rough_estimate: bool
    estimated_operators: tuple[str, ...]


class SharedWay(Frozen):
    """All models under one way of sharing.

    Attributes:
        way: its name, without shares.
        sharing: with shares, as benchmark/served_sets.py takes it (`mig:4g/3g`: instances).
        models: in the order in which they were given.
        meets: whether all meet their objectives.
        headroom: the least of the models.
        chance, chance_in_words: of the model least likely to meet its objective.
    """

    way: str
    sharing: str
    models: tuple[AdvisedModel, ...]
    meets: bool
    headroom: float | None
    chance: float
    chance_in_words: str


class SharingAdvice(ReadableResult):
    """Which way of sharing a GPU to choose.

    Attributes:
        target: whose GPU.
        percentile: of the requests, in per cent, must keep to the objectives.
        advised: the measured way with the most headroom, or the closest.
        meets: whether it meets all objectives.
        ways: best shares and batches of each way, the most headroom first.
        not_learned: ways whose times were not learned for the target.
        warnings: of the predictions that `ways` shows.
    """

    version: int = 1
    target: str
    percentile: float
    advised: str
    meets: bool
    ways: tuple[SharedWay, ...]
    not_learned: tuple[str, ...]
    warnings: tuple[str, ...]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each way and model."""
        return advice_rows(self)


class SharingPlan(NamedTuple):
    """A way of sharing with shares, and a batch for each model."""

    way: str
    sharing: SetSharing
    batches: tuple[int, ...]


class PlannedModel(NamedTuple):
    """A model of a plan: its index among the models, its batch, and its share of the GPU's threads in per cent."""

    number: int
    batch: int
    percent: int


class SharingQuestion:
    """Models with their requests and objectives, and the predictions needed to share a GPU among them."""

    def __init__(self, fitted: Fitted, models: Sequence[ServedModel], runs: Sequence[Mapping[int, PredictedRun]],
                 percentile: float = PERCENTILE, stalls: Stalls | None = None) -> None:
        """Prepares the question; simulates nothing yet. The models' `batch` is not read.

        Args:
            runs: each model's predicted runs by batch, ascending.
            percentile: the percentage of requests that must meet the objectives.
            stalls: of the host; None: those of the host in the training data.
        """
        self.models, self.percentile, self.runs = models, percentile, runs
        self.fitted, serving = fitted, fitted.serving
        self.host = serving.host(stalls) if serving else STEADY
        self.serving = [{batch: run.at_pace(serving.median_pace) if serving else run for batch, run in runs_by_batch.items()}
                        for runs_by_batch in self.runs]  # at the pace of a host that serves requests
        ways = ways_of(self.fitted)
        self.ways = {name: times for name, times in ways.items() if times is not None}
        self.not_learned = tuple(name for name, times in ways.items() if times is None)
        if not self.ways:
            raise NotShared(self.fitted.target.name)
        self.alone_ms: Callable[[str, int, int, int], float] = cache(self._alone_ms)
        self.at_paces_ms: Callable[[str, int, int, int], Floats] = cache(self._at_paces_ms)
        self.slowdowns: Callable[[str, PlannedModel, tuple[PlannedModel, ...], float], Floats] = cache(self._slowdowns)

    def plans(self) -> list[SharingPlan]:
        """Every way with every choice of shares. Each batch is the smallest with enough capacity for the requests, else the
        largest."""
        return [SharingPlan(way, sharing, tuple(self._first_batch(way, index, sharing) for index in range(len(self.models))))
                for way, times in self.ways.items() for sharing in times.choices(len(self.models))]

    def _first_batch(self, way: str, index: int, sharing: SetSharing) -> int:
        per_ms = CAPACITY_FACTOR * self.models[index].rate_per_s / 1e3
        return next((batch for batch in self.runs[index]
                     if batch >= per_ms * self.alone_ms(way, index, batch, sharing.percent_of(index))), max(self.runs[index]))

    def case(self, plan: SharingPlan, end: int | None = None, adding: bool = False) -> Case:
        """A plan as a case to simulate. All runs are at the lower (`end` 0) or the upper (1) end of their intervals, or as
        predicted (None). `adding` approximates the effect of several co-runners by the sum of their single effects at the
        host's usual pace. That saves simulating each set; under MPS the true effects are larger beside models that fill the
        GPU."""
        planned = [PlannedModel(index, batch, plan.sharing.percent_of(index)) for index, batch in enumerate(plan.batches)]
        runs_ms = []
        for index, batch, percent in planned:
            prediction = self.runs[index][batch].prediction
            ratio = 1.0 if end is None else prediction.interval_ms[end] / prediction.latency_ms
            runs_ms.append(ratio * self.at_paces_ms(plan.way, index, batch, percent))
        paces = (1.0, 1.0) if adding else (1.0, SLOWER)
        slowdowns = np.ones((len(planned), 1 << len(planned), len(paces), SAMPLES))
        for model in planned:
            others = [other for other in planned if other != model]
            for some in chain.from_iterable(combinations(others, count) for count in range(1, len(planned))):
                number = set_of(other.number for other in some)
                sets = [(other,) for other in some] if adding else [some]
                together = [1.0 + sum(self.slowdowns(plan.way, model, one_set, pace) - 1.0 for one_set in sets)
                            for pace in paces]
                slowdowns[model.number, [number, number | set_of([model.number])]] = together
        return Case([model.rate_per_s for model in self.models], plan.batches, runs_ms, slowdowns)

    def simulate(self, cases: Sequence[Case], effort: tuple[int, int]) -> list[list[Served]]:
        """How the requests of each case are served; `effort` is the number of requests and of repetitions."""
        requests, repetitions = effort
        return served(cases, np.random.default_rng(SEED), requests, repetitions, self.host)

    @property
    def disturbed(self) -> bool:
        """Whether the host stalls much more often than the one in the training data."""
        return self.host.stalls_per_s > DISTURBED_PER_S

    def between_ms(self, low: Served, high: Served, way: str) -> tuple[float, float]:
        """The 90 % interval of the latency that has an objective, wider for a `way` that was never measured. `low` and `high`
        are results with all runs at the lower and at the upper ends of their intervals."""
        spread, way_span = SPREADS[self.disturbed], MIG_SPAN if way == MIG else CERTAIN
        return (low.percentile_ms(self.percentile) / spread * way_span.low,
                high.percentile_ms(self.percentile) * spread * way_span.high)

    def merit(self, results: Sequence[Served]) -> tuple[float, ...]:
        """The sort key of a plan, larger is better: the models' headrooms, ascending. Last comes the negative offered load,
        which compares plans in which requests are not answered."""
        headrooms = sorted(1.0 - result.percentile_ms(self.percentile) / model.slo_ms
                           for result, model in zip(results, self.models, strict=True))
        return (*headrooms, -max(result.offered for result in results))

    def _alone_ms(self, way: str, index: int, batch: int, percent: int) -> float:
        return self.ways[way].alone_ms(self.runs[index][batch], percent)

    def _at_paces_ms(self, way: str, index: int, batch: int, percent: int) -> Floats:
        """The time of a run alone at each of PACES."""
        run = self.serving[index][batch]
        return np.array([self.ways[way].alone_ms(run.at_pace(pace), percent) for pace in PACES])

    def _slowdowns(self, way: str, model: PlannedModel, others: tuple[PlannedModel, ...], pace: float) -> Floats:
        """SAMPLES equally likely ratios of a run's time while the others run in loops to its time alone. `pace` is relative to
        the usual one of a host that serves."""
        (run, percent), *beside = ((self.serving[one.number][one.batch].at_pace(pace), one.percent) for one in (model, *others))
        alone_ms, under_load = self.ways[way].beside(run, percent, beside)
        return under_load.slowdowns(alone_ms)


def advise_sharing(predictor: RunPredictor, models: Sequence[ServedModel], batches: Sequence[Sequence[int]],
           percentile: float = PERCENTILE, host_pace: float | HostPace | None = None) -> SharingAdvice:
    """Finds the way of sharing the target's GPU in which models meet their objectives, and the best of the given `batches`.
    `percentile` is the percentage of requests that must meet them. The models' own `batch` is not read. Raises UserError if a
    model can't be predicted at a batch, and NotShared if no way of sharing was learned for the target."""
    if len(models) > MOST_MODELS:
        raise UserError(f"{len(models)} models: advice is for {MOST_MODELS} at most; leave some out")
    runs = [{batch: predictor.run(model.model, dims={**model.dims, BATCH: batch}, host_pace=host_pace)
             for batch in sorted(set(sizes))} for model, sizes in zip(models, batches, strict=True)]
    measured = host_pace.measured if isinstance(host_pace, HostPace) else None
    question = SharingQuestion(predictor.fitted, models, runs, percentile, measured.stalls if measured else None)
    plans = _search(question)
    best: dict[str, tuple[SharingPlan, list[Served]]] = {}
    for plan, results in zip(plans, question.simulate([question.case(plan) for plan in plans], FINAL_EFFORT), strict=True):
        if plan.way not in best or question.merit(results) > question.merit(best[plan.way][1]):
            best[plan.way] = plan, results
    ranked = sorted(best.values(), key=lambda found: (found[0].way != MIG, question.merit(found[1])), reverse=True)
    ends = question.simulate([question.case(plan, end) for plan, _ in ranked for end in (0, 1)], FINAL_EFFORT)
    ways = tuple(_shared_way(question, plan, results, ends[2 * index:2 * index + 2])
                 for index, (plan, results) in enumerate(ranked))
    names_by_warning: dict[str, list[str]] = {}
    for plan, _ in ranked:
        for model, batch, model_runs in zip(models, plan.batches, runs, strict=True):
            for warning in model_runs[batch].prediction.warnings:
                names_by_warning.setdefault(warning, []).append(f"{model.model.stem} at batch {batch}")
    warnings = [f"{', '.join(dict.fromkeys(names))}: {warning}" for warning, names in names_by_warning.items()]
    if any(way.way in (MPS, MPS_SHARES) for way in ways):
        warnings += learned_elsewhere(question.fitted)
    if any(way.way == MIG for way in ways):
        warnings.append(NEVER_MEASURED)
    if question.disturbed:
        warnings.append(f"the host stalls {question.host.stalls_per_s:.0f} times a second, far more often than an undisturbed "
                        "one: percentiles were off by a third on such hosts, so all of these are rough estimates")
    serving, device = question.fitted.serving, question.fitted.target.device_name
    if serving and serving.learned_on != device:
        warnings.append("what a host does while it serves requests was learned on another machine, one with "
                        f"{serving.learned_on}; hosts differ, and percentiles with them: measure this one, "
                        f"{MEASURE} --out machine.json, and give --machine machine.json")
    return SharingAdvice(target=question.fitted.target.name, percentile=percentile, advised=ways[0].sharing,
                         meets=ways[0].meets, ways=ways, not_learned=question.not_learned, warnings=tuple(warnings))


def _search(question: SharingQuestion) -> list[SharingPlan]:
    """The plans of all ways and shares with the best batches found. Batches are chosen for one model at a time, with the others
    fixed, until nothing changes."""
    plans = question.plans()
    for _ in range(SEARCH_ROUNDS):
        before = list(plans)
        for index, runs_by_batch in enumerate(question.runs):
            if len(runs_by_batch) == 1:
                continue
            variants = [plan._replace(batches=(*plan.batches[:index], batch, *plan.batches[index + 1:]))
                        for plan in plans for batch in runs_by_batch]
            results = question.simulate([question.case(plan, adding=True) for plan in variants], SEARCH_EFFORT)
            merits = [question.merit(result) for result in results]
            plans = [variants[max(range(first, first + len(runs_by_batch)), key=merits.__getitem__)]
                     for first in range(0, len(variants), len(runs_by_batch))]
        if plans == before:
            break
    return plans


def _shared_way(question: SharingQuestion, plan: SharingPlan, results: Sequence[Served],
                ends: Sequence[Sequence[Served]]) -> SharedWay:
    """A plan as part of the answer."""
    models, sharing = [], plan.sharing
    for index, (model, batch, result, low, high) in enumerate(zip(question.models, plan.batches, results, *ends, strict=True)):
        run, percent = question.runs[index][batch].prediction, sharing.percent_of(index)
        latency_ms, (low_ms, high_ms) = result.percentile_ms(question.percentile), question.between_ms(low, high, plan.way)
        chance = chance_within(latency_ms, (low_ms, high_ms), model.slo_ms) if math.isfinite(latency_ms) else 0.0
        models.append(AdvisedModel(
            model=model.model.stem, dims=run.dims, batch=batch, percent=percent if sharing.mps or sharing.instances else None,
            rate_per_s=model.rate_per_s, alone_ms=question.alone_ms(plan.way, index, batch, percent), run_ms=result.run_ms,
            mean_ms=_if_finite(result.mean_ms),
            **{f"p{number}_ms": _if_finite(result.percentile_ms(number)) for number in (50, 95, 99)},
            slo_ms=model.slo_ms, latency_ms=_if_finite(latency_ms), between_ms=(_if_finite(low_ms), _if_finite(high_ms)),
            headroom=_if_finite(1.0 - latency_ms / model.slo_ms), chance=chance, chance_in_words=chance_word(chance),
            busy=result.busy, stable=result.stable, rough_estimate=run.rough_estimate or question.disturbed or plan.way == MIG,
            estimated_operators=run.estimated_operators))
    headrooms = [model.headroom for model in models if model.headroom is not None]
    headroom = min(headrooms) if len(headrooms) == len(models) else None
    chance = min(model.chance for model in models)
    return SharedWay(way=plan.way, sharing=str(sharing), models=tuple(models),
                     meets=headroom is not None and headroom >= 0.0, headroom=headroom, chance=chance,
                     chance_in_words=chance_word(chance))


def _if_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def advice_rows(advice: SharingAdvice) -> list[dict[str, Any]]:
    """The table of an advice, with a row for each way and model, and one for each way that was not learned."""
    latency = f"p{advice.percentile:g} (ms)"
    table = [{"way": way.sharing, "model": model.model, "batch": model.batch,
              "share": "" if model.percent is None else f"{model.percent} %", "alone (ms)": model.alone_ms,
              "beside (ms)": model.run_ms, "mean (ms)": model.mean_ms, latency: model.latency_ms, "SLO (ms)": model.slo_ms,
              "headroom": "none" if model.headroom is None else f"{model.headroom:.0%}", "busy": f"{model.busy:.0%}",
              "within SLO": model.chance_in_words, "note": "never measured" if way.way == MIG else (
                  "a rough estimate" if model.rough_estimate else "")} for way in advice.ways for model in way.models]
    return table + [{"way": name, "note": "not learned for this target"} for name in advice.not_learned]


def advice_verdict(advice: SharingAdvice) -> str:
    """An advice in a sentence."""
    best = advice.ways[0]
    batches = ", ".join(f"{model.model} at batch {model.batch}" for model in best.models)
    if best.meets:
        return (f"{best.sharing} meets all objectives, with {best.headroom:.0%} of the tightest to spare; that it does is "
                f"{best.chance_in_words}: {batches}.")
    missed = [f"{model.model} " + (f"answers {advice.percentile:g} % of its requests within {model.latency_ms:.3g} ms, not "
                                   f"{model.slo_ms:g}" if model.latency_ms is not None else "gets more than it can serve")
              for model in best.models if model.headroom is None or model.headroom < 0.0]
    might = next((f" By the data sheet, {way.sharing} meets them." for way in advice.ways if way.way == MIG and way.meets), "")
    return (f"No way that was measured meets all objectives. {best.sharing} comes closest: {batches}; {', and '.join(missed)}. "
            f"That it meets them is {best.chance_in_words}.{might}")
