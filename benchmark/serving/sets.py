"""Sets of models that are served at the same time: their config, the arrival of requests, and the files of results.

Statistics of a set are a line of the results file; all its requests are in a file of their own.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, field_validator

from hase.records.devices import Environment
from hase.utils import files
from hase.utils.config import Config, Frozen
from hase.utils.errors import UserError
from hase.utils.fingerprint import Machine
from hase.utils.sharing_mode import SetSharing, SetSharingText
from hase.utils.timing import Floats

BATCH = "batch"  # the dimension that batches requests, as exporters name it


class ServedModel(Config):
    """A model of a set, and its requests, each of which has one input."""

    model: Path  # the ONNX file, with a dynamic dimension `batch`; a bare name is also looked for among the exported models
    dims: dict[str, Annotated[int, Field(ge=1)]] = {}  # sizes of its other dynamic dimensions
    batch: int = Field(ge=1, le=1024)  # the most requests in one run; each run has this size, full or not
    rate_per_s: float = Field(gt=0, le=1e5)  # requests per second, on average
    slo_ms: float = Field(gt=0, le=1e6)  # the latency within which a request should be answered

    @field_validator("dims")
    @classmethod
    def _without_batch(cls, dims: dict[str, int]) -> dict[str, int]:
        if BATCH in dims:
            raise ValueError("the size of batch has a key of its own; leave it out here")
        return dims


ModelSet = Annotated[tuple[ServedModel, ...], Field(min_length=1, max_length=16)]


class ServedSetsConfig(Config):
    """The config of benchmark/served_sets.py."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    # ways to share the device; one that lists a share for each of n models is used only for sets of n models
    ways: Annotated[tuple[SetSharingText, ...], Field(min_length=1)] = ("slices",)
    seconds: float = Field(5.0, gt=0, le=3600)  # how long requests arrive that count in the statistics
    warmup_s: float = Field(0.5, ge=0, le=600)  # how long requests arrive before that
    seed: int = Field(0, ge=0)  # of the arrivals
    provider_options: dict[str, str] = {}  # of ONNX Runtime's CUDA provider
    sets: Annotated[tuple[ModelSet, ...], Field(min_length=1)]  # the models that are served at the same time

    def check_on(self, device: str) -> None:
        """Raises UserError if the device, `cpu` or `cuda`, cannot be shared in these ways."""
        for way in self.ways:
            if device == "cpu" and SetSharing.parse(way).mps:
                raise UserError(f"sharing {way}: this is a way of sharing a GPU, and the target is a CPU; leave it out")


def arrivals_s(models: Sequence[ServedModel], index: int, config: ServedSetsConfig) -> Floats:
    """When the requests to a model of a set arrive: ascending seconds from the start of counting (negative: warm-up). A Poisson
    process seeded by the config, the set and the model's index, so that each way of sharing gets the same requests."""
    set_seed = int(files.content_digest([model.model_dump(mode="json") for model in models])[:16], 16)
    generator = np.random.default_rng([config.seed, set_seed, index])
    count = generator.poisson(models[index].rate_per_s * (config.warmup_s + config.seconds))
    return np.sort(generator.uniform(-config.warmup_s, config.seconds, count))


class PaceReading(Frozen):
    """Readings of the host's probe (a fixed graph that shows how fast the host dispatches) over some time: their median, the
    total time of dispatching, and the length of each stall of the host."""

    probe_us: float
    dispatched_s: float
    stalls_ms: tuple[float, ...]


class ServedRuns(Frozen):
    """What a server process answers to each of its tasks (to open the model, warm it up, and serve it): the runs of serving, in
    order; none for the other tasks."""

    error: str = ""  # why it failed; "" if it did not
    alone_ms: float = 0.0  # of warm-up: the median of repeated runs while the other models wait; 0 for other tasks
    pace: PaceReading | None = None  # by the host's probe in this process after the task; None if it was not read
    starts_s: tuple[float, ...] = ()  # of each run, in seconds after `begin_s`
    ends_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()  # the requests in each run


# results -----------------------------------------------------------------------------------------------------------------

KEY_DIGITS = 16
ARRAYS = ("arrivals_s", "starts_s", "ends_s", "counts")  # of ModelRequests, in the requests file of each result


class TimeStatistics(Frozen):
    """Statistics of at least one time, in ms."""

    count: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float

    @classmethod
    def of(cls, times_s: Floats) -> Self | None:
        """Statistics of times in seconds; None without any."""
        if not times_s.size:
            return None
        p50, p95, p99 = np.percentile(1e3 * times_s, [50, 95, 99])
        return cls(count=times_s.size, mean_ms=float(1e3 * times_s.mean()), p50_ms=float(p50), p95_ms=float(p95),
                   p99_ms=float(p99))


class ModelResult(Frozen):
    """How one model of a set was served while requests counted. Without times, statistics are None and shares 0."""

    requests: int  # number that arrived
    served: int  # requests whose run began before the counted time ended
    unserved: int  # the other requests
    latency: TimeStatistics | None  # of the served ones, from arrival to the end of the run
    within_slo: float  # share of all requests that were answered within the model's `slo_ms`
    runs: TimeStatistics | None  # how long runs took
    requests_per_run: float  # on average
    busy: float  # share of time with a run in progress
    # the median of a run just before the requests, while the other models waited; None if it was not measured
    alone_ms: float | None = None
    # of the host's probe in the model's process, just before the requests and just after; empty if it was not read
    probe_us: tuple[float, ...] = ()
    dispatched_s: float = 0.0  # total dispatch time of that probe
    stalls_ms: tuple[float, ...] = ()  # length of each stall in that time


class ModelRequests(Frozen):
    """All requests to one model in order of arrival; times are seconds from the start of counting, unserved ones come last."""

    arrivals_s: tuple[float, ...]  # one per request
    starts_s: tuple[float, ...]  # start of the run with the request
    ends_s: tuple[float, ...]
    counts: tuple[int, ...]  # the requests in each run, in order
    alone_ms: float | None = None  # see `ModelResult`
    paces: tuple[PaceReading, ...] = ()  # after warm-up and after serving, as far as they were read

    @classmethod
    def of(cls, arrivals_s: Floats, reply: ServedRuns, warm: ServedRuns | None = None) -> Self:
        """The requests, from a server's answers after serving and after warm-up."""
        starts_s, ends_s = np.repeat(reply.starts_s, reply.counts), np.repeat(reply.ends_s, reply.counts)
        return cls(arrivals_s=tuple(arrivals_s.tolist()), starts_s=tuple(starts_s.tolist()), ends_s=tuple(ends_s.tolist()),
                   counts=reply.counts, alone_ms=warm.alone_ms if warm else None,
                   paces=tuple(each.pace for each in (warm, reply) if each and each.pace))

    @property
    def runs_s(self) -> tuple[Floats, Floats]:
        """Start and end of each run, in order."""
        counts = np.asarray(self.counts, dtype=int)
        firsts = np.cumsum(counts) - counts
        return np.asarray(self.starts_s)[firsts], np.asarray(self.ends_s)[firsts]

    def result(self, slo_ms: float, seconds: float) -> ModelResult:
        """Statistics of the counted time, which lasts `seconds`."""
        arrivals_s, served = np.asarray(self.arrivals_s), len(self.starts_s)
        counted = arrivals_s >= 0.0
        latencies_s = (np.asarray(self.ends_s) - arrivals_s[:served])[counted[:served]]
        (run_starts_s, run_ends_s), counts = self.runs_s, np.asarray(self.counts, dtype=int)
        inside_s = np.clip(run_ends_s, 0.0, seconds) - np.clip(run_starts_s, 0.0, seconds)
        inside = run_starts_s >= 0.0
        requests = int(counted.sum())
        return ModelResult(
            requests=requests, served=latencies_s.size, unserved=requests - latencies_s.size,
            latency=TimeStatistics.of(latencies_s),
            within_slo=float((1e3 * latencies_s <= slo_ms).sum()) / max(requests, 1),
            runs=TimeStatistics.of((run_ends_s - run_starts_s)[inside]),
            requests_per_run=float(counts[inside].mean()) if inside.any() else 0.0, busy=float(inside_s.sum()) / seconds,
            alone_ms=self.alone_ms, probe_us=tuple(pace.probe_us for pace in self.paces),
            dispatched_s=sum(pace.dispatched_s for pace in self.paces),
            stalls_ms=tuple(stall for pace in self.paces for stall in pace.stalls_ms))


class SetResult(Frozen):
    """A set under one way of sharing."""

    version: Literal[2] = 2
    key: str  # see `result_key`; the requests are in `<key>.npz`
    models: ModelSet  # the set
    way: SetSharingText  # of sharing
    seconds: float  # as in the config
    warmup_s: float
    seed: int
    provider_options: dict[str, str]
    machine: Machine  # where it was measured
    environment: Environment
    started: str  # when (UTC, ISO 8601)
    status: Literal["ok", "failed"] = "ok"  # `failed` if a model could not be served; a later call tries again
    error: str = ""  # why
    results: tuple[ModelResult, ...] = ()  # one per model; empty if it failed

    def rows(self, number: int) -> list[dict[str, Any]]:
        """Table rows, one per model, with None for what was not measured; `number` is the set's in the config."""
        rows = []
        for model, result in zip(self.models, self.results or [None] * len(self.models), strict=True):
            latency = result and result.latency
            rows.append({
                "set": number, "way": self.way, "model": model.model.stem, "batch": model.batch,
                "rate_per_s": model.rate_per_s, "slo_ms": model.slo_ms,
                **{name: result and getattr(result, name) for name in ("requests", "unserved")},
                **{name: latency and getattr(latency, name) for name in ("mean_ms", "p95_ms", "p99_ms")},
                **{name: result and getattr(result, name) for name in ("within_slo", "busy")}, "status": self.status})
        return rows


def result_key(models: Sequence[ServedModel], way: str, config: ServedSetsConfig) -> str:
    """A short text that identifies the set, the way of sharing and the settings."""
    return files.content_digest([[model.model_dump(mode="json") for model in models], way, config.seconds, config.warmup_s,
                           config.seed, config.provider_options])[:KEY_DIGITS]


def read_results(path: Path) -> dict[str, SetResult]:
    """The latest result of each key; none without a file."""
    results = {}
    for number, line in enumerate(files.read_lines(path), 1):
        try:
            result = SetResult.model_validate_json(files.line_without_digest(line))
        except ValidationError as error:
            if error.errors()[0]["loc"] == ("version",):
                raise UserError(f"{path}, line {number}: written by another version of Hase; move the file and its folder "
                                f"{path.stem} away, and measure again") from None
            raise UserError(f"{path}, line {number}: damaged ({error.errors()[0]['msg']}); remove the line") from None
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; remove the line") from None
        results[result.key] = result
    return results


def requests_path(path: Path, key: str) -> Path:
    """The file with the requests of one result, in a folder beside the results file `path`."""
    return path.parent / path.name.removesuffix(".jsonl") / f"{key}.npz"


def read_requests(path: Path, result: SetResult) -> list[ModelRequests]:
    """The requests to each model of a result in the results file `path`. Raises UserError if their file is missing."""
    requests = requests_path(path, result.key)
    try:
        with np.load(requests) as arrays:
            return [ModelRequests(**{name: tuple(arrays[f"{name}_{index}"].tolist()) for name in ARRAYS},
                             alone_ms=model.alone_ms) for index, model in enumerate(result.results)]
    except FileNotFoundError:
        raise UserError(f"{requests}: missing, though {path.name} has a line for it; copy the folder {requests.parent.name}, "
                        "too") from None


def append_result(path: Path, result: SetResult, requests: Sequence[ModelRequests]) -> None:
    """Writes the requests of a set, then its line; so a set with a line is complete."""
    if requests:
        arrays = {f"{name}_{index}": np.asarray(getattr(model, name))
                  for index, model in enumerate(requests) for name in ARRAYS}
        packed = io.BytesIO()
        np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
        files.write_bytes(requests_path(path, result.key), packed.getvalue())
    files.append_line(path, files.line_with_digest(result.model_dump_json()))
