"""How long requests take while several models are served on one device at the same time, under several ways of sharing it.

Reads a config with sets of models, and the models' files, by default in model_zoo/models. Each model of a set is served by a
process of its own. Its requests arrive at random (a Poisson process with a seed) and do not wait for answers; whenever the
process is free, it runs all that wait, up to the model's `batch`, padded to exactly that size. Requests whose run has not
begun when the time is over count as unserved.

Writes benchmark/served_sets/<target>.jsonl, one line for each set and way of sharing, and all requests to <target>/<key>.npz
beside it. Results that are there are not measured again, even on another machine of the target; failed ones are. Prints for
each model the latency of its requests (from arrival to answer), the share within its `slo_ms` (unserved ones are not), and
`busy`, the share of the time in which it ran.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from itertools import groupby
from typing import NamedTuple

from hase.benchmark.load.mps import gpu_shared
from hase.benchmark.serving.server import ModelServer
from hase.benchmark.serving.sets import (
    ModelRequests,
    ServedModel,
    ServedRuns,
    ServedSetsConfig,
    SetResult,
    append_result,
    arrivals_s,
    read_results,
    result_key,
)
from hase.records.devices import current_environment
from hase.records.measurement import now
from hase.runtimes import local_target
from hase.utils import cli
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.fingerprint import machine, resolve_device
from hase.utils.locks import measuring, sole_writer
from hase.utils.logger import get_logger, progress
from hase.utils.paths import ROOT, Workspace
from hase.utils.processes import WorkerFailed
from hase.utils.sharing_mode import GpuSharing, SetSharing

OPEN_S = 180.0  # limit for opening a model
LEAD_S = 0.1  # between telling the processes to begin and the first request
EXAMPLES = """
python benchmark/served_sets.py --config recipes/h200/served_sets.yaml --first 20  # needs a GPU
python benchmark/served_sets.py --config recipes/h200/served_sets.yaml --set 'ways=[slices]' --set device=cpu --first 1 --json
"""

log = get_logger("served_sets")


class SetToMeasure(NamedTuple):
    """A set to measure under one way of sharing."""

    number: int  # in the config, from 1
    models: Sequence[ServedModel]
    way: str  # how the device is shared, in text form
    key: str  # see `result_key`


def asked_for(config: ServedSetsConfig, first: int | None = None) -> list[SetToMeasure]:
    """What a config asks for, in its `first` sets or all, ordered so that MPS starts rarely."""
    sets = []
    for number, models in enumerate(config.sets[:first], 1):
        fitting = [way for way in config.ways if SetSharing.parse(way).fits(len(models))]
        sets += [SetToMeasure(number, models, way, result_key(models, way, config))
                 for way in sorted(fitting, key=lambda way: SetSharing.parse(way).mps, reverse=number % 2 == 0)]
    return sets


def measure_sets(workspace: Workspace, config: ServedSetsConfig, first: int | None = None) -> list[tuple[int, SetResult]]:
    """Measures and writes what is missing; returns every requested result with its set's number."""
    device = resolve_device(config.device)
    config.check_on(device)
    path = workspace.served_sets(local_target(device).name)
    requested = asked_for(config, first)
    for way in config.ways:
        fitting = sum(one_set.way == way for one_set in requested)
        if fitting < len(config.sets[:first]):
            log.info("%s: measured for the %d sets with so many models, of %d", way, fitting, len(config.sets[:first]))
    with sole_writer(path.parent), measuring(device):
        results = read_results(path)
        missing = [one_set for one_set in requested if one_set.key not in results or results[one_set.key].status != "ok"]
        if len(missing) < len(requested):
            log.info("%d of %d are there already", len(requested) - len(missing), len(requested))
        for mps, same_way in groupby(progress(missing, "measuring"), lambda one_set: SetSharing.parse(one_set.way).mps):
            with gpu_shared(GpuSharing(mps)) if device == "cuda" else nullcontext():
                for one_set in same_way:
                    results[one_set.key] = _measure_set(one_set, workspace, config, device, path)
    return [(one_set.number, results[one_set.key]) for one_set in requested]


def _measure_set(one_set: SetToMeasure, workspace: Workspace, config: ServedSetsConfig, device: str, path: Path) -> SetResult:
    """Measures one set under one way of sharing, and writes the result."""
    result = SetResult(
        key=one_set.key, models=tuple(one_set.models), way=one_set.way, seconds=config.seconds, warmup_s=config.warmup_s,
        seed=config.seed, provider_options=config.provider_options, machine=machine(device),
        environment=current_environment(local_target(device)), started=now())
    requests = list[ModelRequests]()
    try:
        requests = served(one_set.models, workspace, config, device, SetSharing.parse(one_set.way))
        result = result.model_copy(update={"results": tuple(
            one.result(model.slo_ms, config.seconds) for one, model in zip(requests, one_set.models, strict=True))})
    except UserError as error:
        log.error("set %d under %s: %s", one_set.number, one_set.way, error)
        result = result.model_copy(update={"status": "failed", "error": str(error)})
    append_result(path, result, requests)
    return result


def served(models: Sequence[ServedModel], workspace: Workspace, config: ServedSetsConfig, device: str,
           sharing: SetSharing) -> list[ModelRequests]:
    """Serves the models of a set in parallel, each in its own process; UserError if one cannot run."""
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
    return [ModelRequests.of(*parts) for parts in zip(arrivals, replies, warm, strict=True)]


def _replies(servers: Sequence[ModelServer], pending: Sequence[Future[ServedRuns]]) -> list[ServedRuns]:
    """Replies of all servers. Raises UserError with the first one that failed, and why."""
    replies = []
    for server, future in zip(servers, pending, strict=True):
        try:
            replies.append(future.result())
        except WorkerFailed as error:
            raise UserError(f"{server.model.name}: {error}") from None
        if replies[-1].error:
            raise UserError(replies[-1].error)
    return replies


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    cli.add_config(parser, ROOT / "recipes" / "h200" / "served_sets.yaml", "ways=[slices, mps:50]",
                   "the sets, and how to measure them")
    parser.add_argument("--first", type=cli.count, metavar="N", help="only the first N sets (default: all)")
    args = parser.parse_args()
    workspace = cli.start(args)
    results = measure_sets(workspace, read_config(args.config, ServedSetsConfig, args.changes), args.first)
    if args.json:
        cli.print_json([{"set": number} | result.model_dump(mode="json") for number, result in results])
    else:
        cli.print_table([row for number, result in results for row in result.rows(number)])
    failed = [f"set {number} under {result.way}" for number, result in results if result.status != "ok"]
    if failed:
        log.error("%d failed, which their lines say: %s", len(failed), ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main, kept="what was measured")
