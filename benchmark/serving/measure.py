"""Measures sets of models under ways of sharing a device, one after another, and keeps what is there already."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from hase.benchmark.load.mps import gpu_shared
from hase.benchmark.serving.config import ServedModel, ServedSetsConfig, arrivals_s
from hase.benchmark.serving.results import Requests, SetResult, add_result, key_of, read_results
from hase.benchmark.serving.server import ModelServer, Reply
from hase.records.environment import environment_of
from hase.records.measurement import now
from hase.runtimes import local_target
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.fingerprint import machine, resolve_device
from hase.utils.locks import measuring, sole_writer
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.sharing_mode import GpuSharing, SetSharing
from hase.utils.worker_process import WorkerFailed

OPEN_S = 180.0  # that opening a model may take
LEAD_S = 0.1  # between telling the processes to begin, and the first request

log = get_logger("served_sets")


class SetFailed(UserError):
    """A model of a set could not be served."""


class Asked(NamedTuple):
    """A set under one way of sharing, which is to be measured.

    Attributes:
        number: the set's in the config, from 1.
        models: the set.
        way: of sharing, as people write it.
        key: see `key_of`.
    """

    number: int
    models: Sequence[ServedModel]
    way: str
    key: str


def asked_for(config: ServedSetsConfig, first: int | None = None) -> list[Asked]:
    """What a config asks for, of its first sets where `first` says how many. The ways of one set follow one another, so that
    they meet the same machine. Time slices come first for every second set, MPS for the others: its daemon starts seldom."""
    found = []
    for number, models in enumerate(config.sets[:first], 1):
        fitting = [way for way in config.ways if SetSharing.parse(way).fits(len(models))]
        found += [Asked(number, models, way, key_of(models, way, config))
                  for way in sorted(fitting, key=lambda way: SetSharing.parse(way).mps, reverse=number % 2 == 0)]
    return found


def measure_sets(workspace: Workspace, config: ServedSetsConfig, first: int | None = None) -> list[tuple[int, SetResult]]:
    """Measures what the config asks for and the workspace lacks, and writes it there.

    Returns:
        All that is asked for, each with the number of its set.

    Raises:
        UserError: no such device, it can't be shared in a way, another process measures on it, or a result is damaged.
    """
    device = resolve_device(config.device)
    config.check_on(device)
    path = workspace.served_sets(local_target(device).name)
    asked = asked_for(config, first)
    for way in config.ways:
        fitting = sum(each.way == way for each in asked)
        if fitting < len(config.sets[:first]):
            log.info("%s: measured for the %d sets with so many models, of %d", way, fitting, len(config.sets[:first]))
    with sole_writer(path.parent), measuring(device):
        results = read_results(path)
        missing = [each for each in asked if each.key not in results or results[each.key].status != "ok"]
        if len(missing) < len(asked):
            log.info("%d of %d are there already", len(asked) - len(missing), len(asked))
        for mps, alike in groupby(cli.progress(missing, "measuring"), lambda each: SetSharing.parse(each.way).mps):
            with gpu_shared(GpuSharing(mps)) if device == "cuda" else nullcontext():
                for each in alike:
                    results[each.key] = _measured(each, workspace, config, device, path)
    return [(each.number, results[each.key]) for each in asked]


def _measured(asked: Asked, workspace: Workspace, config: ServedSetsConfig, device: str, path: Path) -> SetResult:
    """Measures one set under one way of sharing, and writes the result."""
    result = SetResult(
        key=asked.key, models=tuple(asked.models), way=asked.way, seconds=config.seconds, warmup_s=config.warmup_s,
        seed=config.seed, provider_options=config.provider_options, machine=machine(device),
        environment=environment_of(local_target(device)), started=now())
    requests = list[Requests]()
    try:
        requests = served(asked.models, workspace, config, device, SetSharing.parse(asked.way))
        result = result.model_copy(update={"results": tuple(
            of_model.result(model.slo_ms, config.seconds) for of_model, model in zip(requests, asked.models, strict=True))})
    except UserError as error:
        log.error("set %d under %s: %s", asked.number, asked.way, error)
        result = result.model_copy(update={"status": "failed", "error": str(error)})
    add_result(path, result, requests)
    return result


def served(models: Sequence[ServedModel], workspace: Workspace, config: ServedSetsConfig, device: str,
           sharing: SetSharing) -> list[Requests]:
    """Serves the models of a set at the same time, each in a process of its own, which ends with this function.

    Raises:
        UserError: a model is missing, can't be run, or its process ended.
    """
    paths = [workspace.find_model(model.model) for model in models]
    arrivals = [arrivals_s(models, number, config) for number in range(len(models))]
    timeout_s = OPEN_S + config.warmup_s + config.seconds
    with ThreadPoolExecutor(len(models)) as threads, ExitStack() as processes:  # the processes end first, and free the threads
        servers = [processes.enter_context(ModelServer(path.resolve(), model, timeout_s, environment))
                   for path, model, environment in zip(paths, models, sharing.environments(len(models)), strict=True)]
        _replies(servers, [threads.submit(server.open, device, config.provider_options) for server in servers])
        warm = [reply for server in servers for reply in _replies([server], [threads.submit(server.warm_up)])]  # one by one
        begin_s = time.monotonic() + LEAD_S + config.warmup_s
        replies = _replies(servers, [threads.submit(server.serve, times.tolist(), begin_s, config.seconds)
                                     for server, times in zip(servers, arrivals, strict=True)])
    return [Requests.of(*of_model) for of_model in zip(arrivals, replies, warm, strict=True)]


def _replies(servers: Sequence[ModelServer], pending: Sequence[Future[Reply]]) -> list[Reply]:
    """The replies of all servers.

    Raises:
        SetFailed: the first one that failed, and why.
    """
    replies = []
    for server, future in zip(servers, pending, strict=True):
        try:
            replies.append(future.result())
        except WorkerFailed as error:
            raise SetFailed(f"{server.model.name}: {error}") from None
        if replies[-1].error:
            raise SetFailed(replies[-1].error)
    return replies
