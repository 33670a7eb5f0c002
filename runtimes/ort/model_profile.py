"""Runs a whole model under ONNX Runtime's profiler, with a name for each node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from measuring.affinity import off_the_workers_cores
from measuring.effort import Effort
from records.kernel_record import BRANCHES
from runtimes.ort.graph.bodies import steering_inputs
from runtimes.ort.graph.parsing import ParsedGraph, parse_into
from runtimes.ort.profile import ProfiledRun, read_profile
from runtimes.ort.runner import bind, random_feed, timer, warm_up
from utils.ort_sessions import model_errors, open_session
from utils.temporary import temporary_folder


class ModelProfile(NamedTuple):
    """Profiled runs of a model, and the graph that ran; the nodes of both have the same names.

    Attributes:
        plain_ms: times of runs of the same session without the profiler; empty if they were not asked for.
    """

    runs: list[ProfiledRun]
    graph: ParsedGraph
    plain_ms: list[float]


def plain_runs_ms(run: Callable[[], Any], profiled: list[bool]) -> list[float]:
    """Times of runs after their session's profiling has ended (ms): as many as counted while it was on."""
    with off_the_workers_cores():
        run()
        return [1000 * timer(run)() for _ in range(sum(profiled))]


def profile_runs(run: Callable[[], Any], effort: Effort) -> list[bool]:
    """Runs a profiled session as `effort` says; returns for each run whether it counts (warm-up does not)."""
    with off_the_workers_cores():
        warmed, one_run_s = warm_up(run, effort.warmup + 1, effort.warmup_s)
        counted = effort.runs(one_run_s)
        for _ in range(counted):
            run()
    return [False] * warmed + [True] * counted


def counted_runs(profile: str, counted: list[bool]) -> list[ProfiledRun]:
    """The runs that count, from the profile that ORT wrote. Its file is removed."""
    path = Path(profile)
    runs = [run for run, keep in zip(read_profile(path), counted, strict=True) if keep]
    path.unlink()
    return runs


def steering_of(graph: ParsedGraph) -> dict[str, int | bool]:
    """Values of a model's inputs with which its Loops and Ifs run as the graph assumes."""
    taken = {f"{node}.{guess.taken}": 1 for node, guess in graph.guessed.items() if guess.taken in BRANCHES}
    return steering_inputs(graph.source.graph_only.graph, taken | graph.source.dims)


def profile_model(model: Path, device: str, dims: Mapping[str, int], effort: Effort,
                  provider_options: Mapping[str, str] | None = None, static: bool = False,
                  plain: bool = False) -> ModelProfile:
    """Runs a model under the profiler, and, with `plain`, without it too.

    Args:
        model: the ONNX file.
        device: `cpu` or `cuda`.
        dims: sizes of dynamic dimensions.
        effort: how many runs.
        provider_options: options of the CUDA provider.
        static: whether `dims` are fixed before ONNX Runtime optimises the model.

    Raises:
        UserError: ORT can't load or run it.
    """
    with temporary_folder() as folder:
        optimized = folder / "optimized.onnx"
        graph = parse_into(optimized, model, device, dims, static=static)
        session = open_session(optimized, device, optimize="none", name=str(model),
                               profile_prefix=folder / "model", provider_options=provider_options)
        feed = random_feed(session, graph.source.dims, steering_of(graph))
        with model_errors(str(model)):
            run = bind(session, feed, device, "device")
            counted = profile_runs(run, effort)
            profile = session.end_profiling()
            return ModelProfile(counted_runs(profile, counted), graph, plain_runs_ms(run, counted) if plain else [])
