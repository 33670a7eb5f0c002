"""What was measured of a set of models under one way of sharing: statistics in a line, all requests in a file beside it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import ValidationError

from hase.benchmark.serving.config import ModelSet, ServedModel, ServedSetsConfig
from hase.benchmark.serving.server import PaceRead, Reply
from hase.records.environment import Environment
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.files import digest_of
from hase.utils.fingerprint import Machine
from hase.utils.frozen import Frozen
from hase.utils.sharing_mode import SetSharingText
from hase.utils.timing import Floats

KEY_DIGITS = 16
ARRAYS = ("arrivals_s", "starts_s", "ends_s", "counts")  # of Requests, in the file of each result


class Times(Frozen):
    """Statistics of at least one time, in milliseconds."""

    count: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float

    @classmethod
    def of(cls, times_s: Floats) -> Self | None:
        """Those of times in seconds; None where there are none."""
        if not times_s.size:
            return None
        p50, p95, p99 = np.percentile(1e3 * times_s, [50, 95, 99])
        return cls(count=times_s.size, mean_ms=float(1e3 * times_s.mean()), p50_ms=float(p50), p95_ms=float(p95),
                   p99_ms=float(p99))


class ModelResult(Frozen):
    """How one model of a set was served while requests counted.

    Attributes:
        requests: that arrived.
        served, unserved: of these, whose run began before the time was over, and the others.
        latency: from arrival to the end of the run, of the served ones; None if there are none.
        within_slo: the share of all requests that were answered within the model's `slo_ms`.
        runs: how long runs took; None if there were none.
        requests_per_run: on average; 0 if there were none.
        busy: the share of the time in which a run was going on.
        alone_ms: the median of a run, again and again, just before the requests while the other models waited, with its share
            of the GPU; None where it was not measured.
        probe_us: the time of the host's probe in the model's process, just before the requests and just after; empty where it
            was not read.
        dispatched_s, stalls_ms: for how long that probe dispatched, both times together, and how long each stall was meanwhile.
    """

    requests: int
    served: int
    unserved: int
    latency: Times | None
    within_slo: float
    runs: Times | None
    requests_per_run: float
    busy: float
    alone_ms: float | None = None
    probe_us: tuple[float, ...] = ()
    dispatched_s: float = 0.0
    stalls_ms: tuple[float, ...] = ()


class Requests(Frozen):
    """All requests to one model, those of the warm-up too, in the order of arrival. Times are seconds from the beginning of the
    counted time; those that were not served come last, without start and end.

    Attributes:
        arrivals_s: one each request.
        starts_s, ends_s: of the run that took it.
        counts: the requests in each run, in order.
        alone_ms, paces: what the model's process measured before and after them; see `ModelResult`.
    """

    arrivals_s: tuple[float, ...]
    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    counts: tuple[int, ...]
    alone_ms: float | None = None
    paces: tuple[PaceRead, ...] = ()

    @classmethod
    def of(cls, arrivals_s: Floats, reply: Reply, warm: Reply | None = None) -> Self:
        """From what a server answered after the requests, and after its warm-up."""
        starts_s, ends_s = np.repeat(reply.starts_s, reply.counts), np.repeat(reply.ends_s, reply.counts)
        return cls(arrivals_s=tuple(arrivals_s.tolist()), starts_s=tuple(starts_s.tolist()), ends_s=tuple(ends_s.tolist()),
                   counts=reply.counts, alone_ms=warm.alone_ms if warm else None,
                   paces=tuple(each.pace for each in (warm, reply) if each and each.pace))

    @property
    def runs_s(self) -> tuple[Floats, Floats]:
        """When each run started and ended, in order."""
        counts = np.asarray(self.counts, dtype=int)
        firsts = np.cumsum(counts) - counts
        return np.asarray(self.starts_s)[firsts], np.asarray(self.ends_s)[firsts]

    def begun_at_once(self, batch: int) -> Self:
        """The same arrivals and times of runs, where a run that finds requests waiting begins as soon as the one before has
        ended: what a server does that takes no time between runs. Where the recorded runs are too few for all requests, since
        the others waited together, the last ones are left out.

        Args:
            batch: the most requests in a run.
        """
        arrivals_s, counts = np.asarray(self.arrivals_s), np.asarray(self.counts, dtype=int)
        firsts, (starts_s, ends_s) = np.cumsum(counts) - counts, self.runs_s
        before_s = np.append(-np.inf, ends_s[:-1])
        late_s = np.where(arrivals_s[firsts] > before_s, starts_s - arrivals_s[firsts], 0.0)  # a process that wakes up
        begun_s, ended_s, taken = list[float](), list[float](), list[int]()
        end_s, answered = -np.inf, 0
        for took_s, waking_s in zip((ends_s - starts_s).tolist(), late_s.tolist(), strict=True):
            if answered == counts.sum():
                break
            first_s = float(arrivals_s[answered])
            start_s = first_s + waking_s if first_s > end_s else end_s
            waiting = int(np.searchsorted(arrivals_s[:counts.sum()], start_s, side="right")) - answered
            end_s = start_s + took_s
            begun_s.append(start_s)
            ended_s.append(end_s)
            taken.append(max(1, min(waiting, batch)))
            answered += taken[-1]
        kept = len(arrivals_s) if answered == counts.sum() else answered
        return self.model_copy(update={
            "arrivals_s": self.arrivals_s[:kept], "starts_s": tuple(np.repeat(begun_s, taken).tolist()),
            "ends_s": tuple(np.repeat(ended_s, taken).tolist()), "counts": tuple(taken)})

    def result(self, slo_ms: float, seconds: float) -> ModelResult:
        """Their statistics over the counted time."""
        arrivals_s, served = np.asarray(self.arrivals_s), len(self.starts_s)
        counted = arrivals_s >= 0.0
        latencies_s = (np.asarray(self.ends_s) - arrivals_s[:served])[counted[:served]]
        (run_starts_s, run_ends_s), counts = self.runs_s, np.asarray(self.counts, dtype=int)
        inside_s = np.clip(run_ends_s, 0.0, seconds) - np.clip(run_starts_s, 0.0, seconds)
        inside = run_starts_s >= 0.0
        requests = int(counted.sum())
        return ModelResult(
            requests=requests, served=latencies_s.size, unserved=requests - latencies_s.size, latency=Times.of(latencies_s),
            within_slo=float((1e3 * latencies_s <= slo_ms).sum()) / max(requests, 1),
            runs=Times.of((run_ends_s - run_starts_s)[inside]),
            requests_per_run=float(counts[inside].mean()) if inside.any() else 0.0, busy=float(inside_s.sum()) / seconds,
            alone_ms=self.alone_ms, probe_us=tuple(pace.probe_us for pace in self.paces),
            dispatched_s=sum(pace.dispatched_s for pace in self.paces),
            stalls_ms=tuple(stall for pace in self.paces for stall in pace.stalls_ms))


class SetResult(Frozen):
    """A set under one way of sharing.

    Attributes:
        key: of what was asked for (see `key_of`); its requests are in `<key>.npz`.
        models: the set.
        way: of sharing.
        seconds, warmup_s, seed, provider_options: as in the config.
        machine, environment: where it was measured.
        started: when (UTC, ISO 8601).
        status: `failed` where a model could not be served; a later call tries again.
        error: why.
        results: one each model; none where it failed.
    """

    version: Literal[2] = 2
    key: str
    models: ModelSet
    way: SetSharingText
    seconds: float
    warmup_s: float
    seed: int
    provider_options: dict[str, str]
    machine: Machine
    environment: Environment
    started: str
    status: Literal["ok", "failed"] = "ok"
    error: str = ""
    results: tuple[ModelResult, ...] = ()

    def rows(self, number: int) -> list[dict[str, Any]]:
        """Rows of a table, one each model; `number` is the set's in the config."""
        rows = []
        for place, model in enumerate(self.models):
            row: dict[str, Any] = {"set": number, "way": self.way, "model": model.model.stem, "batch": model.batch,
                                   "rate_per_s": model.rate_per_s, "slo_ms": model.slo_ms}
            result = self.results[place] if self.results else None
            latency = result.latency if result else None
            row |= {"requests": result and result.requests, "unserved": result and result.unserved,
                    "mean_ms": latency and latency.mean_ms, "p95_ms": latency and latency.p95_ms,
                    "p99_ms": latency and latency.p99_ms, "within_slo": result and result.within_slo,
                    "busy": result and result.busy, "status": self.status}
            rows.append(row)
        return rows


def key_of(models: Sequence[ServedModel], way: str, config: ServedSetsConfig) -> str:
    """A short text that is the same for the same set, way of sharing and settings."""
    return digest_of([[model.model_dump(mode="json") for model in models], way, config.seconds, config.warmup_s, config.seed,
                      config.provider_options])[:KEY_DIGITS]


def read_results(path: Path) -> dict[str, SetResult]:
    """What was measured, by key; the latest one for each. No file: nothing.

    Raises:
        UserError: a line is damaged, or of another version.
    """
    results = {}
    for number, line in enumerate(files.read_lines(path), 1):
        try:
            result = SetResult.model_validate_json(files.line_without_digest(line))
        except ValidationError as error:
            if error.errors()[0]["loc"] == ("version",):
                raise UserError(f"{path}, line {number}: of another version of Hase; move the file and its folder "
                                f"{path.stem} away, and measure again") from None
            raise UserError(f"{path}, line {number}: damaged ({error.errors()[0]['msg']}); remove the line") from None
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; remove the line") from None
        results[result.key] = result
    return results


def samples_path(path: Path, key: str) -> Path:
    """The file with the requests of one result, beside the file of results."""
    return path.parent / path.name.removesuffix(".jsonl") / f"{key}.npz"


def read_requests(path: Path, result: SetResult) -> list[Requests]:
    """The requests to each model of a result, whose line is in the file of results `path`.

    Raises:
        UserError: their file is missing.
    """
    samples = samples_path(path, result.key)
    try:
        with np.load(samples) as arrays:
            return [Requests(**{name: tuple(arrays[f"{name}_{place}"].tolist()) for name in ARRAYS},
                             alone_ms=of_model.alone_ms) for place, of_model in enumerate(result.results)]
    except FileNotFoundError:
        raise UserError(f"{samples}: missing, though {path.name} has a line for it; copy the folder {samples.parent.name}, "
                        "too") from None


def add_result(path: Path, result: SetResult, requests: Sequence[Requests]) -> None:
    """Writes the requests of a set, and then its line, so that what has a line is complete."""
    if requests:
        arrays = {f"{name}_{place}": np.asarray(getattr(of_model, name)) for place, of_model in enumerate(requests)
                  for name in ARRAYS}
        packed = io.BytesIO()
        np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
        files.write_bytes(samples_path(path, result.key), packed.getvalue())
    files.append_line(path, files.line_with_digest(result.model_dump_json()))
