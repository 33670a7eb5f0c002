"""Searches schedules for kernels by TVM's meta-schedule, under a budget of trials.

Trials are built, and run one after another, in this process. TVM's own pools of processes load its intrinsics for GPUs each,
which takes 10 s and more: on two busy cores, all of 16 trials ran into their time limit of 30 s.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from hase.benchmark.measuring.run_times import Effort
from hase.records.kernel_record import Kernel
from hase.runtimes.tvm.compiling import built_function, on_gpu, scheduled
from hase.runtimes.tvm.functions import MAIN
from hase.runtimes.tvm.package import target_to_run_on
from hase.runtimes.tvm.worker import samples_ms, tensor_for
from hase.utils.errors import UserError
from hase.utils.lazy import tvm

COMPARISON = Effort(budget_s=0.1, least_runs=5, most_runs=50)
TRIAL = Effort(warmup=0, budget_s=0.05, least_runs=2, most_runs=20)
DATABASE = "tuning"  # the folder of the database, next to the kernels


class Tuned(NamedTuple):
    """The fastest function that a search found, that without a schedule included; the times (ms) before and after, and how many
    trials worked."""

    function: Any
    before_ms: float
    after_ms: float
    worked: int


def _searched(candidate: Any, target: Any) -> Any:
    """The function of a module that a search scheduled."""
    return scheduled(candidate[MAIN]) if on_gpu(target) else candidate[MAIN]


def _in_process(arguments: Sequence[Any], target: Any, device: str) -> tuple[Any, Any, list[str]]:
    """A builder and a runner for one kernel on a target of TVM, whose tensors are `arguments` on `device`; and the list of the
    trials that ran, which the runner fills. TVM's database has those that failed, too."""
    schedules, functions, worked = tvm.s_tir.meta_schedule, dict[str, Any](), list[str]()
    builds_at_once = psutil.cpu_count() or 1 if on_gpu(target) else 1  # NVIDIA's compiler takes a second, and blocks no thread
    derived = tvm.ir.utils.derived_object

    @derived
    class Builder(schedules.builder.PyBuilder):  # type: ignore[name-defined]
        def build(self, build_inputs: Sequence[Any]) -> list[Any]:
            with ThreadPoolExecutor(builds_at_once) as threads:
                return list(threads.map(self.built, map(str, range(len(build_inputs))), build_inputs))

        def built(self, name: str, candidate: Any) -> Any:
            try:
                functions[name] = built_function(_searched(candidate.mod, target), target)
            except UserError as error:
                return schedules.builder.BuilderResult(None, str(error))
            return schedules.builder.BuilderResult(name, None)

    @derived
    class Result(schedules.runner.PyRunnerFuture):  # type: ignore[name-defined]
        def __init__(self, times_s: list[float] | None, error: str | None) -> None:
            super().__init__()
            self.outcome = times_s, error

        def done(self) -> bool:
            return True

        def result(self) -> Any:
            return schedules.runner.RunnerResult(*self.outcome)

    @derived
    class Runner(schedules.runner.PyRunner):  # type: ignore[name-defined]
        def run(self, runner_inputs: Sequence[Any]) -> list[Any]:
            return [self.timed(str(runner_input.artifact_path)) for runner_input in runner_inputs]

        def timed(self, name: str) -> Any:
            try:
                times_ms = samples_ms(functions.pop(name), arguments, TRIAL, device)
            except UserError as error:
                return Result(None, str(error))
            worked.append(name)
            return Result([1e-3 * time_ms for time_ms in times_ms], None)

    return Builder(), Runner(), worked


def _load_intrinsics() -> None:
    """Loads TVM's intrinsics for GPUs, which every search loads.

    They ask for the whole stack hundreds of times, and for each of its frames that has no file `inspect` looks through all
    loaded modules: a minute in all. No frame needs that, and without it they load in three seconds.
    """
    getmodule = inspect.getmodule
    inspect.getmodule = lambda *_: None
    try:
        import_module("tvm.s_tir.tensor_intrin")
    finally:
        inspect.getmodule = getmodule


def tune(function: Any, kernel: Kernel, device: str, threads: int, trials: int, database: Path, seed: int = 0) -> Tuned:
    """Searches a schedule for a kernel.

    Args:
        function: of the kernel, not scheduled.
        kernel: its tensors.
        device: `cpu` or `cuda`, which must be here.
        threads: that the schedule may use on a CPU.
        trials: at most.
        database: TVM's database of trials, a folder. Trials of earlier searches count for the best.
        seed: of the schedules drawn.

    Raises:
        UserError: TVM can't compile the function as it is, or finds no GPU.
    """
    target = target_to_run_on(device, threads)
    _load_intrinsics()
    schedules, module = tvm.s_tir.meta_schedule, tvm.IRModule({MAIN: function.with_attr("global_symbol", MAIN)})
    database.mkdir(parents=True, exist_ok=True)
    log = logging.getLogger("tvm.s_tir.meta_schedule")
    log.setLevel(logging.ERROR)
    log.handlers.clear()  # TVM writes to its own alone, and breaks where another has no name
    arguments = [tensor_for(tensor, device) for tensor in (*kernel.inputs, *kernel.outputs)]
    builder, runner, worked = _in_process(arguments, target, device)
    kept = schedules.tune_tir(module, target, work_dir=str(database), max_trials_global=trials,
                              num_trials_per_iter=min(trials, 16), builder=builder, runner=runner, cost_model="random",
                              strategy="replay-trace", seed=seed,
                              measure_callbacks=[schedules.measure_callback.AddToDatabase()])
    schedule = schedules.tir_integration.compile_tir(kept, module, target)

    def time_ms(candidate: Any) -> float:
        return median(samples_ms(built_function(candidate, target), arguments, COMPARISON, device))

    before_ms = time_ms(function)
    after_ms = before_ms if schedule is None else time_ms(_searched(schedule.mod, target))
    if schedule is None or after_ms >= before_ms:
        return Tuned(function, before_ms, before_ms, len(worked))
    return Tuned(_searched(schedule.mod, target), before_ms, after_ms, len(worked))
