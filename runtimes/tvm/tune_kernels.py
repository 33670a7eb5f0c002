"""Searches fast schedules for the kernels of models under TVM, which otherwise run with naive ones.

Reads the records of TVM's fused kernels and their functions (runtimes/tvm/relax_parser.py). Writes records of the flavour
`tuned`, with the fastest function of each kernel, to the same folders, and TVM's trials to the folder `tuning` next to the
functions. Trials are built, and run one after another, in this process: each process of TVM's own pools loads its intrinsics
for GPUs, which takes 10 s and more, and on two busy cores all 16 trials exceeded their time limit of 30 s. The same command
goes on where it was stopped, and skips kernels that were searched. Needs TVM: pip install '.[tvm]'
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import inspect
import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple

import psutil

from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.kernel_record_files import read_model_records, record_path, update_index
from hase.records.measurement import Effort
from hase.runtimes.tvm.compiling import (
    FUSED,
    IS_SCHEDULED,
    MAIN,
    TUNED,
    arch_here,
    compile_for,
    compile_function,
    function_path,
    local_tvm_target,
    on_gpu,
    read_function,
    tvm_flavour,
    write_function,
)
from hase.runtimes.tvm.worker import tensor_for, time_main_ms
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.lazy import tvm
from hase.utils.locks import measuring, sole_writer
from hase.utils.logger import get_logger, progress
from hase.utils.paths import Workspace

log = get_logger("tuning")
EXAMPLES = """
python runtimes/tvm/tune_kernels.py
python runtimes/tvm/tune_kernels.py --trials 64 --minutes 30 --threads 2
python runtimes/tvm/tune_kernels.py --model resnet18 --trials 32      # one network as a whole
python runtimes/tvm/tune_kernels.py --device cuda --trials 32 --minutes 30
"""

COMPARISON = Effort(budget_s=0.1, least_runs=5, most_runs=50)
TRIAL = Effort(warmup=0, budget_s=0.05, least_runs=2, most_runs=20)
DATABASE = "tuning"  # the folder of the database, next to the kernels


class Tuned(NamedTuple):
    """The fastest function found (or the unscheduled one), the times (ms) before and after, and the number of valid trials."""

    function: Any
    before_ms: float
    after_ms: float
    worked: int


def _searched(candidate: Any, target: Any) -> Any:
    """The function of a module with a searched schedule, marked so that rules do not change it."""
    return candidate[MAIN].with_attr(IS_SCHEDULED, True) if on_gpu(target) else candidate[MAIN]


def _builder_and_runner(arguments: Sequence[Any], target: Any, device: str) -> tuple[Any, Any, list[str]]:
    """A builder and a runner for one kernel in this process, and the list of completed trials, which the runner fills. TVM's
    database also contains failed trials. `arguments` are the kernel's tensors on `device`."""
    schedules, functions, valid_trials = tvm.s_tir.meta_schedule, dict[str, Any](), list[str]()
    builds_at_once = psutil.cpu_count() or 1 if on_gpu(target) else 1  # NVIDIA's compiler takes a second, and blocks no thread
    derived = tvm.ir.utils.derived_object

    @derived
    class Builder(schedules.builder.PyBuilder):  # type: ignore[name-defined]
        def build(self, build_inputs: Sequence[Any]) -> list[Any]:
            with ThreadPoolExecutor(builds_at_once) as threads:
                return list(threads.map(self.built, map(str, range(len(build_inputs))), build_inputs))

        def built(self, name: str, candidate: Any) -> Any:
            try:
                functions[name] = compile_function(_searched(candidate.mod, target), target)
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
                times_ms = time_main_ms(functions.pop(name), arguments, TRIAL, device)
            except UserError as error:
                return Result(None, str(error))
            valid_trials.append(name)
            return Result([1e-3 * time_ms for time_ms in times_ms], None)

    return Builder(), Runner(), valid_trials


def _load_intrinsics() -> None:
    """Loads TVM's intrinsics for GPUs, which every search loads, in 3 s instead of a minute. They inspect the whole stack
    hundreds of times, and for each frame without a file `inspect` searches all loaded modules, which is never needed."""
    getmodule = inspect.getmodule
    inspect.getmodule = lambda *_: None
    try:
        import_module("tvm.s_tir.tensor_intrin")
    finally:
        inspect.getmodule = getmodule


def tune(function: Any, kernel: Kernel, device: str, threads: int, trials: int, database: Path, seed: int = 0) -> Tuned:
    """Searches a kernel's schedule with at most `trials` trials, including earlier ones in TVM's folder `database`."""
    target = local_tvm_target(device, threads)
    _load_intrinsics()
    schedules, module = tvm.s_tir.meta_schedule, tvm.IRModule({MAIN: function.with_attr("global_symbol", MAIN)})
    database.mkdir(parents=True, exist_ok=True)
    log = logging.getLogger("tvm.s_tir.meta_schedule")
    log.setLevel(logging.ERROR)
    log.handlers.clear()  # TVM writes only to its own handler, and fails if another has no name
    arguments = [tensor_for(tensor, device) for tensor in (*kernel.inputs, *kernel.outputs)]
    builder, runner, valid_trials = _builder_and_runner(arguments, target, device)
    found = schedules.tune_tir(module, target, work_dir=str(database), max_trials_global=trials,
                               num_trials_per_iter=min(trials, 16), builder=builder, runner=runner, cost_model="random",
                               strategy="replay-trace", seed=seed,
                               measure_callbacks=[schedules.measure_callback.AddToDatabase()])
    schedule = schedules.tir_integration.compile_tir(found, module, target)

    def time_ms(candidate: Any) -> float:
        return median(time_main_ms(compile_function(candidate, target), arguments, COMPARISON, device))

    before_ms = time_ms(function)
    after_ms = before_ms if schedule is None else time_ms(_searched(schedule.mod, target))
    if schedule is None or after_ms >= before_ms:
        return Tuned(function, before_ms, before_ms, len(valid_trials))
    return Tuned(_searched(schedule.mod, target), before_ms, after_ms, len(valid_trials))


def records_named(records: Sequence[ModelRecord], names: Sequence[str]) -> list[ModelRecord]:
    """The records whose names begin with one of `names`; all without names."""
    for name in names:
        if not any(record.model.startswith(name) for record in records):
            raise UserError(f"--model {name}: no record of this model under TVM (analysed: "
                            f"{', '.join(record.model for record in records)})")
    return [record for record in records if not names or record.model.startswith(tuple(names))]


def by_work(records: Sequence[ModelRecord]) -> list[Kernel]:
    """The kernels of all models that compute something, those with most work first."""
    work: dict[str, float] = {}
    kernels = {name: kernel for record in records for name, kernel in record.kernels.items() if "function" in kernel.attributes}
    for record in records:
        for node in record.nodes:
            kernel = record.kernel_of(node)
            work[kernel.id] = work.get(kernel.id, 0.0) + kernel.flops + kernel.bytes_read + kernel.bytes_written
    return sorted(kernels.values(), key=lambda kernel: -work[kernel.id])


def tune_kernels(workspace: Workspace, trials: int, threads: int, seconds: float = math.inf,
                 device: str = "cpu", models: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Searches schedules of kernels without one; returns a row per searched kernel.

    When the time is over, the remaining kernels have no function of the flavour `tuned`: a later call searches them, and until
    then whole networks run them without a schedule.
    """
    flavour, tuned = tvm_flavour(device, FUSED), tvm_flavour(device, TUNED)
    if device == "cuda":
        compile_for(arch_here())
    records = read_model_records(workspace, flavour)
    chosen, until_s, rows = records_named(records, models), time.monotonic() + seconds, []
    for record in records:
        files.write_json(record_path(workspace, tuned, record.model), record.model_copy(update={"flavour": tuned}))
    update_index(workspace, tuned)
    database = workspace.kernel_onnx / tuned.name / DATABASE
    to_search = [kernel for kernel in by_work(chosen) if not function_path(workspace, tuned, kernel.id).is_file()]
    for kernel in progress(to_search, f"searching schedules, {trials} trials each"):
        if time.monotonic() > until_s:
            break
        function = read_function(function_path(workspace, flavour, kernel.id))
        result = tune(function, kernel, device, threads, trials, database)
        write_function(function_path(workspace, tuned, kernel.id), kernel, result.function)
        rows.append({"kernel": kernel.id, "type": kernel.type, "before_ms": result.before_ms, "after_ms": result.after_ms,
                     "times_faster": result.before_ms / result.after_ms, "trials": result.worked})
    if left := len(to_search) - len(rows):
        log.warning("%d kernels are left without a schedule; run the same command again to go on", left)
    return rows


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", action="append", default=[], metavar="NAME",
                        help="only kernels of models whose names begin so (repeatable; default: all)")
    parser.add_argument("--trials", type=cli.count, default=16, metavar="N",
                        help="schedules tried for each kernel (default: 16)")
    parser.add_argument("--threads", type=cli.count, default=psutil.cpu_count(logical=False) or 1, metavar="N",
                        help="that schedules may use on a CPU (default: one for each physical core)")
    parser.add_argument("--minutes", type=cli.positive, default=math.inf, metavar="N",
                        help="begin no further kernel after N minutes (default: no limit)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose kernels (default: cpu)")
    args = parser.parse_args()
    workspace = cli.start(args)
    with sole_writer(workspace.kernel_records), measuring(args.device):
        rows = tune_kernels(workspace, args.trials, args.threads, 60 * args.minutes, args.device, args.model)
    cli.print_rows(rows, args.json, "kernels and their schedules")


if __name__ == "__main__":
    cli.run(main, kept="the schedules that were found")
