"""Simulates requests to models that are served on one device: they arrive at random, wait, and are run in batches.

Requests of a model arrive as a Poisson process. One server per model takes them: whenever it is free, it runs all that wait, up
to `batch`, first come, first served. A run takes the time of a full batch, however many requests are in it. While other models
run, it slows down by a factor for each set of them, which depends on the host's pace (`Case`). That pace changes meanwhile, and
a host that was idle is slower at first (`Host`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hase.graph_model.simulation.pipeline import Floats
from hase.utils.lazy import scipy

Ints = npt.NDArray[np.int_]
SURE = 1e-12  # neglected probability of more requests during a run
LONGEST_QUEUE = 2000  # the longest one considered, in requests
WARMING_UP = 0.25  # share of the counted time that is simulated before it, since queues are empty at first
LONGEST_RUNS = 60  # the counted time contains at least this many of the longest runs
MOST_IN_A_ROW = 1200  # requests of one repetition, unless LONGEST_RUNS needs more
MOST_AT_ONCE = 2e7  # requests simulated side by side: 160 MB
LEAST_REPETITIONS = 40
LEAST_BUSY = 0.003  # minimum busy share of a model; the results of the others hardly depend on it
LATE_RUNS = 20  # times of the longest run that are simulated after the counted time, for requests that still wait
LEAST_SLOWDOWN = 0.1
SLOWER_RANGE = (-1.0, 1.5)  # range in which slowdowns are linear in the logarithm of the pace; SLOWER is 1
ROUNDING = 1e-12  # of times
PERCENTILES = np.arange(101)
PACES = (0.6, 0.8, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0, 4.0)  # paces of the host, relative to usual, at which run times are given
SLOWER = 1.4  # one of PACES: the slowdown there shows how much the host is the slower track


class Host(NamedTuple):
    """How the pace of a host changes while it serves requests.

    Attributes:
        paces: equally likely ones, relative to the usual pace; all processes on the host have the same.
        lasts_ms: the mean duration of a pace.
        idle_ms, slower: factors on the host's time (`slower`) for a run that begins after the model's process was idle for
            `idle_ms` (ascending); interpolated linearly over the logarithm of the time.
        stalls_per_s: how often the host stalls, as a virtual machine does that waits for its cores.
        stalls_ms: equally likely durations; empty if it never stalls.
    """

    paces: Floats
    lasts_ms: float
    idle_ms: Floats
    slower: Floats
    stalls_per_s: float = 0.0
    stalls_ms: Floats = np.zeros(0)


STEADY = Host(np.ones(1), math.inf, np.ones(1), np.ones(1))


class Case(NamedTuple):
    """Models that are served on one device in one way.

    Attributes:
        rates_per_s: request rate of each model.
        batches: maximum requests in a run of each model.
        runs_ms: the time of a run alone, for each model: at each of PACES, or one value if the host does not matter.
        slowdowns: models × sets × 2 × samples: factors on the time of a model's run while the models of a set (`set_of`,
            without itself) run in loops: at the usual pace of the host, and at SLOWER, where more of a wait for the GPU is
            hidden. Each run uses one of the equally likely samples.
    """

    rates_per_s: Sequence[float]
    batches: Sequence[int]
    runs_ms: Sequence[Floats]
    slowdowns: Floats


def set_of(models: Iterable[int]) -> int:
    """The number of a set of models, by index: one bit each."""
    return sum(1 << model for model in models)


class Served(NamedTuple):
    """The simulated service of one model's requests.

    Attributes:
        mean_ms: mean latency, from arrival to answer; infinite if more requests arrive than can be served.
        percentiles_ms: the latency that p % of the requests do not exceed, for each whole p from 0 to 100; infinite if fewer
            are answered.
        run_ms: mean time of a run beside the others.
        busy: the share of the time in which a run is in progress.
        offered: requests divided by the capacity of full runs of `run_ms`, a ratio.
    """

    mean_ms: float
    percentiles_ms: tuple[float, ...]
    run_ms: float
    busy: float
    offered: float

    @property
    def stable(self) -> bool:
        """Whether fewer requests arrive than could be served."""
        return self.offered < 1.0

    def percentile_ms(self, percent: float) -> float:
        """The latency that `percent` % of the requests do not exceed."""
        below, above = self.percentiles_ms[math.floor(percent)], self.percentiles_ms[math.ceil(percent)]
        return below if below == above else below + (above - below) * (percent % 1)


def served(cases: Sequence[Case], generator: np.random.Generator, requests: int = 20_000, repetitions: int = 400,
           host: Host = STEADY) -> list[list[Served]]:
    """Simulates requests in each case; returns the results of its models. All cases have the same number of models and
    slowdown samples and the same arrivals, so they can be compared.

    Args:
        requests: about the number that is counted for the model with the fewest; fewer if others get far more.
        repetitions: independent simulations, side by side; fewer if runs are long and requests many.
        host: the host of all cases.
    """
    slowest = float(host.paces.max() * host.slower.max())
    longest_ms = max(float(np.interp(slowest, PACES, np.broadcast_to(run_ms, len(PACES))))
                     for case in cases for run_ms in case.runs_ms)
    rates = np.array([_rates(case) for case in cases])  # cases × models, in requests per ms
    most_per_ms = float(rates.sum(axis=1).max())
    counted_ms = max(min(requests / repetitions / rates.min(), MOST_IN_A_ROW / most_per_ms), LONGEST_RUNS * longest_ms)
    begin_ms = WARMING_UP * counted_ms
    end_ms = begin_ms + counted_ms
    last_ms = end_ms + LATE_RUNS * longest_ms
    repetitions = max(min(repetitions, int(MOST_AT_ONCE / (most_per_ms * last_ms))), min(LEAST_REPETITIONS, repetitions))
    arrivals = []  # of each model, in mean gaps: repetitions × requests
    for expected in rates.max(axis=0) * last_ms:
        arriving = int(expected + 8.0 * math.sqrt(expected) + 8.0)  # upper bound of their number
        arrivals.append(np.cumsum(generator.exponential(1.0, (repetitions, arriving)), axis=1))
    cases_at_once = max(int(MOST_AT_ONCE / sum(times.size for times in arrivals)), 1)
    results = []
    for first in range(0, len(cases), cases_at_once):
        simulated = _Simulated(cases[first:first + cases_at_once], arrivals, generator, host)
        while simulated.step(last_ms):
            pass
        model_results = [simulated.result(model, begin_ms, end_ms) for model in range(rates.shape[1])]
        results += [list(case_results) for case_results in zip(*model_results, strict=True)]
    return results


def _rates(case: Case) -> Floats:
    """The rates in requests per ms. Those of a model that is hardly ever busy are raised until its busy share is LEAST_BUSY, so
    that some of its requests are simulated."""
    return np.maximum(np.array(case.rates_per_s) / 1e3, [LEAST_BUSY / float(np.median(run_ms)) for run_ms in case.runs_ms])


class _Simulated:
    """All repetitions of all cases, side by side; a row each. Times are in ms."""

    def __init__(self, cases: Sequence[Case], units: Sequence[Floats], generator: np.random.Generator, host: Host) -> None:
        self.cases, self.repetitions, self.generator, self.host = cases, len(units[0]), generator, host
        rows, models = len(cases) * self.repetitions, len(units)
        self.case_of = np.repeat(np.arange(len(cases)), self.repetitions)
        self.arrivals = []  # rows × requests; the last is at infinity
        for unit, rates in zip(units, np.array([_rates(case) for case in cases]).T, strict=True):
            row_arrivals = (unit / rates[:, None, None]).reshape(rows, -1)
            row_arrivals = np.append(row_arrivals, np.full((rows, max(max(case.batches) for case in cases)), np.inf), axis=1)
            self.arrivals.append(row_arrivals)
        self.batches = np.array([case.batches for case in cases])[self.case_of]
        self.slowdowns = np.array([case.slowdowns for case in cases])  # cases × models × sets × 2 × samples
        self.sample = np.zeros((rows, models), dtype=int)  # slowdown sample of the current run
        self.models, self.bits = np.arange(models), 1 << np.arange(models)
        self.runs_ms = np.array([[np.broadcast_to(run_ms, len(PACES)) for run_ms in case.runs_ms] for case in cases])
        usual, slower = (self.runs_ms[..., PACES.index(pace)] for pace in (1.0, SLOWER))
        # of a run, in which the host is the slower track
        self.host_share = np.clip((slower / usual - 1.0) / (SLOWER - 1.0), 0.0, 1.0)
        self.now, self.idle_since = np.zeros(rows), np.full((rows, models), -np.inf)
        self.pace, self.pace_ends = np.zeros(rows), np.zeros(rows)
        self.towards_slower = np.zeros((rows, models))  # how far the pace of the current run is from usual: SLOWER is 1
        self.busy = np.zeros((rows, models), dtype=bool)
        self.left = np.full((rows, models), np.inf)  # remaining time of the current run, as if alone
        self.next = np.stack([arrivals[:, 0] for arrivals in self.arrivals], axis=1)  # the first waiting or future request
        self.first, self.count = np.zeros((rows, models), dtype=int), np.zeros((rows, models), dtype=int)
        self.began = np.zeros((rows, models))
        self.log: list[list[tuple[Ints, Ints, Ints, Floats, Floats]]] = [[] for _ in range(models)]

    def step(self, last_ms: float) -> bool:
        """Advances rows to their next event up to `last_ms` (end of a run, request for a free model); False if there is none.
        """
        running = self.busy.copy()
        at_paces = self.slowdowns[self.case_of[:, None], self.models, (running @ self.bits)[:, None], :, self.sample]
        usual, slower = at_paces[..., 0], at_paces[..., 1]
        slowdowns = np.maximum(usual + self.towards_slower * (slower - usual), LEAST_SLOWDOWN)
        ends = np.where(running, self.now[:, None] + self.left * slowdowns, np.inf)
        events = np.minimum(ends, np.where(running, np.inf, np.maximum(self.next, self.now[:, None])))
        after = events.min(axis=1)
        going = after <= last_ms
        if not going.any():
            return False
        after = np.where(going, after, self.now)
        self.left = np.where(running, self.left - (after - self.now)[:, None] / slowdowns, np.inf)
        ended = running & (ends <= after[:, None])
        self.now = after
        until = after * (1.0 + ROUNDING)
        for model in range(self.busy.shape[1]):
            if (rows := np.flatnonzero(ended[:, model])).size:
                self._end(model, rows)
            rows = np.flatnonzero(~self.busy[:, model] & (self.next[:, model] <= until))
            if rows.size:
                self._begin(model, rows, until[rows])
        return True

    def _end(self, model: int, rows: Ints) -> None:
        """Ends the run of a model."""
        first, count = self.first[rows, model], self.count[rows, model]
        self.log[model].append((rows, first, count, self.began[rows, model], self.now[rows]))
        self.first[rows, model] += count
        self.busy[rows, model], self.left[rows, model], self.idle_since[rows, model] = False, np.inf, self.now[rows]
        self.next[rows, model] = self.arrivals[model][rows, self.first[rows, model]]

    def _begin(self, model: int, rows: Ints, until: Floats) -> None:
        """Begins a run of a model, with all requests that wait."""
        first, most = self.first[rows, model], self.batches[rows, model]
        offsets = np.arange(int(most.max()))
        have_arrived = self.arrivals[model][rows[:, None], first[:, None] + offsets] <= until[:, None]
        self.count[rows, model] = np.minimum(have_arrived.sum(axis=1), most)
        self.left[rows, model] = self._alone_ms(model, rows)
        self.sample[rows, model] = self.generator.integers(0, self.slowdowns.shape[-1], rows.size)
        self.busy[rows, model], self.began[rows, model] = True, self.now[rows]

    def _alone_ms(self, model: int, rows: Ints) -> Floats:
        """The time alone of a run that begins now, at the host's current pace."""
        now, host = self.now[rows], self.host
        changed = rows[self.pace_ends[rows] <= now]
        self.pace[changed] = self.generator.choice(host.paces, changed.size)
        self.pace_ends[changed] = self.now[changed] + self.generator.exponential(1.0, changed.size) * host.lasts_ms
        idle_ms = np.maximum(now - self.idle_since[rows, model], host.idle_ms[0])
        paces = self.pace[rows] * np.interp(np.log(idle_ms), np.log(host.idle_ms), host.slower)
        self.towards_slower[rows, model] = np.clip(np.log(paces) / math.log(SLOWER), *SLOWER_RANGE)
        position = np.interp(paces, PACES, np.arange(len(PACES)))
        below = np.minimum(position.astype(int), len(PACES) - 2)
        cases, fraction = self.case_of[rows], position - below
        run_ms = (1.0 - fraction) * self.runs_ms[cases, model, below] + fraction * self.runs_ms[cases, model, below + 1]
        if not host.stalls_ms.size:
            return run_ms
        return run_ms + self._stalls_ms(run_ms * self.host_share[cases, model], self.idle_since[rows, model] < now)

    def _stalls_ms(self, host_ms: Floats, was_idle: npt.NDArray[np.bool_]) -> Floats:
        """Delays by stalls that begin while a run depends on the host, or that an idle process meets at the start of a run."""
        per_ms, lengths_ms, draw, size = self.host.stalls_per_s / 1e3, self.host.stalls_ms, self.generator, host_ms.size
        begins = draw.random(size) < -np.expm1(-per_ms * host_ms)
        goes_on = was_idle & (draw.random(size) < per_ms * lengths_ms.mean())
        return (np.where(begins, draw.choice(lengths_ms, size), 0.0)
                + np.where(goes_on, draw.random(size) * draw.choice(lengths_ms, size), 0.0))

    def result(self, model: int, begin_ms: float, end_ms: float) -> list[Served]:
        """The results of a model for requests that arrived between two times, for each case."""
        rows, firsts, counts, begins, ends = (np.concatenate(part) for part in zip(*self.log[model], strict=True))
        run_of_request = np.repeat(np.arange(rows.size), counts)
        indices = firsts[run_of_request] + np.arange(run_of_request.size) - np.repeat(np.cumsum(counts) - counts, counts)
        arrivals = self.arrivals[model][rows[run_of_request], indices]
        counted = (arrivals >= begin_ms) & (arrivals < end_ms)
        latencies, cases = (ends[run_of_request] - arrivals)[counted], self.case_of[rows[run_of_request]][counted]
        arrived = ((self.arrivals[model] >= begin_ms) & (self.arrivals[model] < end_ms)).sum(axis=1)
        inside = np.clip(ends, begin_ms, end_ms) - np.clip(begins, begin_ms, end_ms)
        results = []
        for index, case in enumerate(self.cases):
            case_runs = np.flatnonzero(self.case_of[rows] == index)
            requests = int(arrived[self.case_of == index].sum())
            run_ms = float((ends - begins)[case_runs].mean())
            answered = np.sort(latencies[cases == index])
            ranks = np.ceil(PERCENTILES / 100.0 * requests).astype(int) - 1
            offered = case.rates_per_s[model] * run_ms / 1e3 / case.batches[model]
            late_ms = np.inf if offered >= 1.0 else answered[-1]  # of the few that were not answered in the simulated time
            known = np.append(answered, np.full(requests - answered.size, late_ms))
            results.append(Served(
                mean_ms=float(known.mean()), percentiles_ms=tuple(known[np.maximum(ranks, 0)].tolist()), run_ms=run_ms,
                busy=float(inside[case_runs].sum()) / (self.repetitions * (end_ms - begin_ms)), offered=offered))
        return results


def busy_share(rate_per_s: float, run_ms: float, batch: int) -> float:
    """The busy share of a server (a ratio), if every run takes the same time. By the Markov chain of the queue length when a
    run ends (Bailey 1954, "On queueing processes with bulk service", with servers that don't wait for a full batch): with no
    request waiting, the server is idle for 1/rate on average, and then runs one. 1 if more requests arrive than it can
    serve."""
    offered = rate_per_s * run_ms / 1e3  # requests that arrive in a run
    if offered >= batch:
        return 1.0
    if not offered:
        return 0.0
    room = 1.0 - offered / batch
    states = min(LONGEST_QUEUE, int(batch + scipy.stats.poisson.isf(SURE, offered) + 30.0 / room))
    arriving = scipy.stats.poisson.pmf(np.arange(states), offered)
    balance = -np.eye(states)  # balance equations of the states
    for waiting in range(states):
        left = max(waiting - batch, 0)
        balance[left:, waiting] += arriving[:states - left]
    balance[-1] = 1.0
    chances = np.linalg.solve(balance, np.append(np.zeros(states - 1), 1.0))
    return float(1.0 / (1.0 + chances[0] / offered))
