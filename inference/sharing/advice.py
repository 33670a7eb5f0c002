"""Which way of sharing a GPU lets several models meet their latency objectives, with which shares and batches.

For each way and each choice of shares the run times are predicted (`hase.inference.sharing.ways`), and the queues of requests
simulated (`hase.graph_model.simulation.serving`). Batches are searched model after model, for all ways at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain, combinations
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from hase.benchmark.serving.config import BATCH, ServedModel
from hase.graph_model.simulation.serving import PACES, SLOWER, STEADY, Case, Served, served, set_of
from hase.inference.core.chances import chance_within, in_words
from hase.inference.core.host_pace import HostPace
from hase.inference.core.uncertainty import CERTAIN
from hase.inference.sharing.co_runner import SAMPLES, NotShared
from hase.inference.sharing.instances import NEVER_MEASURED, SPAN
from hase.inference.sharing.mps import learned_elsewhere
from hase.inference.sharing.shared_models import PERCENTILE
from hase.inference.sharing.ways import MIG, MPS, MPS_SHARES, ways_of
from hase.records.host_pace import MEASURE
from hase.utils.config import Config
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.sharing_mode import SetSharing

if TYPE_CHECKING:
    from hase.graph_model.simulation.pipeline import Floats
    from hase.inference.core.model_run import PredictedRun
    from hase.inference.core.predictor import Predictor
    from hase.inference.core.targets import Fitted
    from hase.records.host_pace import Stalls

SEED = 36  # of arrivals: the same question has the same answer
SEARCH = (1000, 40)  # requests and repetitions while batches are searched;
FINAL = (20_000, 400)  # and for the answer
ROUNDS = 3  # of the search, each over all models
MOST_MODELS = 4  # what was simulated; more are refused
DISTURBED_PER_S = 2.0  # stalls of a host in a second of dispatching: the one that was learned from had 0.6, two others 5 and 9
# Factors by which intervals are wider, by `disturbed`. Chosen so that intervals held for 90 % of the percentiles in half of the
# sets that were measured on such a host, before slowdowns depended on the pace; docs/sharing.md says for how many they do now.
SPREADS = {False: 1.15, True: 1.75}
ROOM = 1.5  # the search begins with batches for which so many times as many requests could come


class ServedSet(Config):
    """A file with the models of `--set`.

    Attributes:
        models: as in a set of benchmark/served_sets.py.
    """

    models: Annotated[tuple[ServedModel, ...], Field(min_length=1, max_length=MOST_MODELS)]


class AdvisedModel(Frozen):
    """One model under a way of sharing.

    Attributes:
        model, dims: the file's name without its ending, and the sizes given to its dynamic dimensions, its batch too.
        batch: the most requests in a run, and the size of each run.
        percent: the most of the GPU's threads that it may use, or has in its instance; None where the way has no shares.
        rate_per_s: the requests that come.
        alone_ms: a run, while nothing else runs.
        run_ms: a run beside the other models, on average.
        mean_ms, p50_ms, p95_ms, p99_ms: the latency of requests, from arrival to answer; None where too many are not answered.
        slo_ms: the objective for `latency_ms`.
        latency_ms: the latency that the percentile of the objective does not exceed.
        between_ms: the 90 % interval of `latency_ms`: with all runs at the lower and at the upper ends of theirs, and widened
            by how wrong queues and hosts were where they were measured; None for an end that is not known.
        headroom: how far `latency_ms` is below `slo_ms`, in parts of it (a ratio); negative where it is missed.
        chance, chance_in_words: how likely the objective is met, 0 to 1, given how wrong predictions may be.
        busy: the share of the time in which a run goes on; a ratio.
        stable: whether fewer requests come than full runs could take.
        rough_estimate: whether the prediction of its runs is one, or the host stalls much more often than one that was learned
            from, or the way was never measured on any GPU, as instances (MIG).
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
        sharing: with shares, as benchmark/served_sets.py takes it, or with the kind of instance for each model (`mig:4g/3g`).
        models: in the order in which they were given.
        meets: whether all meet their objectives.
        headroom: the least of the models; None where a model's requests are not answered.
        chance, chance_in_words: of the model that is least likely to meet its objective.
    """

    way: str
    sharing: str
    models: tuple[AdvisedModel, ...]
    meets: bool
    headroom: float | None
    chance: float
    chance_in_words: str


class SharingAdvice(Frozen):
    """Which way of sharing a GPU to choose.

    Attributes:
        target: whose GPU.
        percentile: of the requests, in per cent, must keep to the objectives.
        advised: the measured way with the most headroom, as `sharing` has it; where none meets all objectives, it comes
            closest.
        meets: whether it meets all objectives.
        ways: the best shares and batches of each way, the one with the most headroom first; last the one that was never
            measured.
        not_learned: ways whose times were not learned for the target.
        warnings: of the predictions that `ways` shows.
    """

    target: str
    percentile: float
    advised: str
    meets: bool
    ways: tuple[SharedWay, ...]
    not_learned: tuple[str, ...]
    warnings: tuple[str, ...]


class Plan(NamedTuple):
    """A way of sharing with shares, and a batch for each model."""

    way: str
    sharing: SetSharing
    batches: tuple[int, ...]


class PlacedModel(NamedTuple):
    """A model of a plan: its place among the models, its batch, and its share of the GPU's threads in per cent."""

    place: int
    batch: int
    percent: int


class Question:
    """What is asked: models with their requests, and the predictions that answer it."""

    def __init__(self, fitted: Fitted, models: Sequence[ServedModel], runs: Sequence[Mapping[int, PredictedRun]],
                 percentile: float = PERCENTILE, stalls: Stalls | None = None) -> None:
        """Asks.

        Args:
            fitted: what was learned of the target.
            models: with their requests and objectives; their `batch` is not read.
            runs: each model's predicted runs by batch, ascending.
            percentile: of the requests must keep to the objectives, in per cent.
            stalls: of the host; None: as those of a host that was learned from.

        Raises:
            NotShared: no way of sharing was learned for the target.
        """
        self.models, self.percentile, self.runs = models, percentile, runs
        self.fitted, serving = fitted, fitted.serving
        self.host = serving.host(stalls) if serving else STEADY
        self.serving = [{batch: run.at_pace(serving.middle) if serving else run for batch, run in of_model.items()}
                        for of_model in self.runs]  # as the host runs them while it serves requests
        ways = ways_of(self.fitted)
        self.ways = {name: times for name, times in ways.items() if times is not None}
        self.not_learned = tuple(name for name, times in ways.items() if times is None)
        if not self.ways:
            raise NotShared(self.fitted.target.name)
        self.alone_ms: Callable[[str, int, int, int], float] = cache(self._alone_ms)
        self.at_paces_ms: Callable[[str, int, int, int], Floats] = cache(self._at_paces_ms)
        self.slowdowns: Callable[[str, PlacedModel, tuple[PlacedModel, ...], float], Floats] = cache(self._slowdowns)

    def plans(self) -> list[Plan]:
        """Every way with every choice of shares. Each batch is the smallest with room for the requests, where one has."""
        plans = []
        for way, times in self.ways.items():
            for sharing in times.choices(len(self.models)):
                batches = []
                for place, model in enumerate(self.models):
                    of_model = list(self.runs[place])
                    needed = ROOM * model.rate_per_s / 1e3
                    enough = (batch for batch in of_model
                              if batch >= needed * self.alone_ms(way, place, batch, sharing.percent_of(place)))
                    batches.append(next(enough, of_model[-1]))
                plans.append(Plan(way, sharing, tuple(batches)))
        return plans

    def case(self, plan: Plan, end: int | None = None, adding: bool = False) -> Case:
        """A plan to simulate.

        Args:
            plan: what to simulate.
            end: with all runs at the lower (0) or the upper (1) end of their intervals; None: as predicted.
            adding: whether the effects of several others add up and are those at the usual pace of the host, which saves
                simulating each set of them, and at another pace; under MPS they are larger beside models that fill the GPU.
        """
        of_models = [PlacedModel(place, batch, plan.sharing.percent_of(place)) for place, batch in enumerate(plan.batches)]
        runs_ms = []
        for place, batch, percent in of_models:
            prediction = self.runs[place][batch].prediction
            ratio = 1.0 if end is None else prediction.interval_ms[end] / prediction.latency_ms
            runs_ms.append(ratio * self.at_paces_ms(plan.way, place, batch, percent))
        paces = (1.0, 1.0) if adding else (1.0, SLOWER)
        slowdowns = np.ones((len(of_models), 1 << len(of_models), len(paces), SAMPLES))
        for model in of_models:
            others = [other for other in of_models if other != model]
            for some in chain.from_iterable(combinations(others, count) for count in range(1, len(of_models))):
                number = set_of(other.place for other in some)
                of_sets = [(other,) for other in some] if adding else [some]
                together = [1.0 + sum(self.slowdowns(plan.way, model, of_set, pace) - 1.0 for of_set in of_sets)
                            for pace in paces]
                slowdowns[model.place, [number, number | set_of([model.place])]] = together
        return Case([model.rate_per_s for model in self.models], plan.batches, runs_ms, slowdowns)

    def simulated(self, cases: Sequence[Case], effort: tuple[int, int]) -> list[list[Served]]:
        requests, repetitions = effort
        return served(cases, np.random.default_rng(SEED), requests, repetitions, self.host)

    @property
    def disturbed(self) -> bool:
        """Whether the host stalls much more often than one that was learned from."""
        return self.host.stalls_per_s > DISTURBED_PER_S

    def between_ms(self, low: Served, high: Served, way: str = "") -> tuple[float, float]:
        """The 90 % interval of the latency that has an objective.

        Args:
            low, high: with all runs at the lower and at the upper ends of their intervals.
            way: of sharing; wider for one that was never measured.
        """
        spread, further = SPREADS[self.disturbed], SPAN if way == MIG else CERTAIN
        return (low.percentile_ms(self.percentile) / spread * further.low,
                high.percentile_ms(self.percentile) * spread * further.high)

    def merit(self, results: Sequence[Served]) -> tuple[float, ...]:
        """What a plan is chosen by, more is better: the headrooms, the least first; then, where requests are not answered, how
        many come for each that could be."""
        headrooms = sorted(1.0 - result.percentile_ms(self.percentile) / model.slo_ms
                           for result, model in zip(results, self.models, strict=True))
        return (*headrooms, -max(result.offered for result in results))

    def _alone_ms(self, way: str, place: int, batch: int, percent: int) -> float:
        return self.ways[way].alone_ms(self.runs[place][batch], percent)

    def _at_paces_ms(self, way: str, place: int, batch: int, percent: int) -> Floats:
        """How long a run takes alone at each of PACES."""
        run = self.serving[place][batch]
        return np.array([self.ways[way].alone_ms(run.at_pace(pace), percent) for pace in PACES])

    def _slowdowns(self, way: str, model: PlacedModel, others: tuple[PlacedModel, ...], pace: float) -> Floats:
        """How many times as long as alone, with the same share, runs take while the others run in loops: equally likely ratios,
        SAMPLES of them. `pace` is the host's, relative to the usual one of a host that serves."""
        (run, percent), *beside = ((self.serving[of.place][of.batch].at_pace(pace), of.percent) for of in (model, *others))
        alone_ms, under_load = self.ways[way].beside(run, percent, beside)
        return under_load.slowdowns(alone_ms)


def advise(predictor: Predictor, models: Sequence[ServedModel], batches: Sequence[Sequence[int]],
           percentile: float = PERCENTILE, host_pace: float | HostPace | None = None) -> SharingAdvice:
    """Which way of sharing the target's GPU lets models meet their objectives.

    Args:
        predictor: of the target.
        models: with their requests and objectives; their `batch` is not read.
        batches: those to choose from, for each model.
        percentile: of the requests must keep to the objectives, in per cent.
        host_pace: as for a prediction.

    Raises:
        UserError: a model can't be predicted at a batch, or there are too many.
        NotShared: no way of sharing was learned for the target.
    """
    if len(models) > MOST_MODELS:
        raise UserError(f"{len(models)} models: advice is for {MOST_MODELS} at most")
    runs = [{batch: predictor.run(model.model, dims={**model.dims, BATCH: batch}, host_pace=host_pace)
             for batch in sorted(set(of_model))}
            for model, of_model in zip(models, batches, strict=True)]
    measured = host_pace.measured if isinstance(host_pace, HostPace) else None
    question = Question(predictor.fitted, models, runs, percentile, measured.stalls if measured else None)
    plans = _searched(question)
    best: dict[str, tuple[Plan, list[Served]]] = {}
    for plan, results in zip(plans, question.simulated([question.case(plan) for plan in plans], FINAL), strict=True):
        if plan.way not in best or question.merit(results) > question.merit(best[plan.way][1]):
            best[plan.way] = plan, results
    ranked = sorted(best.values(), key=lambda found: (found[0].way != MIG, question.merit(found[1])), reverse=True)
    ends = question.simulated([question.case(plan, end) for plan, _ in ranked for end in (0, 1)], FINAL)
    ways = tuple(_shared_way(question, plan, results, ends[2 * place:2 * place + 2])
                 for place, (plan, results) in enumerate(ranked))
    warned: dict[str, list[str]] = {}
    for plan, _ in ranked:
        for place, model in enumerate(models):
            for warning in question.runs[place][plan.batches[place]].prediction.warnings:
                warned.setdefault(warning, []).append(f"{model.model.stem} at batch {plan.batches[place]}")
    warnings = [f"{', '.join(dict.fromkeys(names))}: {warning}" for warning, names in warned.items()]
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


def _searched(question: Question) -> list[Plan]:
    """The plans of all ways and shares, each with the best batches that were found: model after model, with those of the others
    as they are, until nothing changes."""
    plans = question.plans()
    for _ in range(ROUNDS):
        before = list(plans)
        for place, of_model in enumerate(question.runs):
            if len(of_model) == 1:
                continue
            tried = [[plan._replace(batches=(*plan.batches[:place], batch, *plan.batches[place + 1:])) for batch in of_model]
                     for plan in plans]
            found = iter(question.simulated(
                [question.case(plan, adding=True) for of_plan in tried for plan in of_plan], SEARCH))
            plans = [max(((question.merit(next(found)), plan) for plan in of_plan), key=lambda each: each[0])[1]
                     for of_plan in tried]
        if plans == before:
            break
    return plans


def _shared_way(question: Question, plan: Plan, results: Sequence[Served], ends: Sequence[Sequence[Served]]) -> SharedWay:
    """A plan as it is answered."""
    models, sharing = [], plan.sharing
    for place, (model, result, low, high) in enumerate(zip(question.models, results, *ends, strict=True)):
        run = question.runs[place][plan.batches[place]].prediction
        latency, (low_ms, high_ms) = result.percentile_ms(question.percentile), question.between_ms(low, high, plan.way)
        chance = chance_within(latency, (low_ms, high_ms), model.slo_ms) if math.isfinite(latency) else 0.0
        models.append(AdvisedModel(
            model=model.model.stem, dims=run.dims, batch=plan.batches[place],
            percent=sharing.percent_of(place) if sharing.mps or sharing.instances else None, rate_per_s=model.rate_per_s,
            alone_ms=question.alone_ms(plan.way, place, plan.batches[place], sharing.percent_of(place)),
            run_ms=result.run_ms, mean_ms=_known(result.mean_ms), **{
                f"p{percent}_ms": _known(result.percentile_ms(percent)) for percent in (50, 95, 99)},
            slo_ms=model.slo_ms, latency_ms=_known(latency), between_ms=(_known(low_ms), _known(high_ms)),
            headroom=_known(1.0 - latency / model.slo_ms), chance=chance, chance_in_words=in_words(chance), busy=result.busy,
            stable=result.stable, rough_estimate=run.rough_estimate or question.disturbed or plan.way == MIG,
            estimated_operators=run.estimated_operators))
    headrooms = [model.headroom for model in models if model.headroom is not None]
    headroom = min(headrooms) if len(headrooms) == len(models) else None
    chance = min(model.chance for model in models)
    return SharedWay(way=plan.way, sharing=str(sharing), models=tuple(models),
                     meets=headroom is not None and headroom >= 0.0, headroom=headroom, chance=chance,
                     chance_in_words=in_words(chance))


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def rows(advice: SharingAdvice) -> list[dict[str, Any]]:
    """A table of ways, a row for each model; a way that was not learned has one."""
    latency = f"p{advice.percentile:g} (ms)"
    table = [{"way": way.sharing, "model": model.model, "batch": model.batch,
              "share": "" if model.percent is None else f"{model.percent} %", "alone (ms)": model.alone_ms,
              "beside (ms)": model.run_ms, "mean (ms)": model.mean_ms, latency: model.latency_ms, "SLO (ms)": model.slo_ms,
              "headroom": "none" if model.headroom is None else f"{model.headroom:.0%}", "busy": f"{model.busy:.0%}",
              "within SLO": model.chance_in_words, "note": "never measured" if way.way == MIG else (
                  "a rough estimate" if model.rough_estimate else "")}
             for way in advice.ways for model in way.models]
    return table + [{"way": name, "note": "not learned for this target"} for name in advice.not_learned]


def verdict(advice: SharingAdvice) -> str:
    """A sentence with the answer."""
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
