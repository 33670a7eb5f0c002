"""The process that runs kernels and models under TVM for the collector; it uses runtimes/protocol.py.

The setting of its first request (threads, cores) is final, since TVM starts its threads once.
"""

from __future__ import annotations

import functools
import math
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hase.kernel_model.building.dummy_data import random_floats
from hase.records.kernel_record import ModelRecord, Tensor, numpy_dtype
from hase.records.kernel_record_files import read_model_record
from hase.records.measurement import Effort, Measurement
from hase.runtimes.protocol import Reply, Request, RuntimeSetting, serve
from hase.runtimes.tvm.compiling import (
    CUBINS,
    FUSED,
    MAIN,
    TUNED,
    arch_here,
    check_tvm,
    compile_for,
    compile_function,
    compile_lowered,
    local_tvm_target,
    on_gpu,
    read_function,
    read_kernel,
    with_searched_schedules,
)
from hase.runtimes.tvm.lowering import bindings, relax_name
from hase.runtimes.tvm.recording import TvmModel, parse_at
from hase.utils.errors import UserError
from hase.utils.lazy import tvm

# A sample of a function that is shorter is the mean of several runs. CUDA events are too coarse for a single short kernel. On a
# CPU, only a single run finds its weights outside of the caches: with 5e-4 there, too, the kernels of networks with searched
# schedules added up to 10 to 33 % less than the networks took.
SAMPLE_S = {"cpu": 3e-5, "cuda": 5e-4}
FLUSH = "cache_flush_cpu_non_first_arg"  # TVM's own
CANARY_SIDE = {"cpu": 128, "cuda": 1024}  # of the matrices: about two milliseconds on a CPU
CANARY = "canary"
# The addresses of a kernel's tensors decide which of their lines a cache can hold together: one product of 5 x 768 by 768 x
# 3072 took 32 ms with some tensors and 48 ms with others. A network has many tensors, so a kernel is timed with several sets of
# them. A network also reads each weight once a run, so weights are not in the caches when their kernel begins.
PLACEMENTS = 5


def tensor_for(described: Tensor, device: str = "cpu") -> Any:
    """A TVM tensor on `cpu` or `cuda`: random numbers, or zeros for integers, which may be indices."""
    if "float" in described.dtype:
        numbers = np.array(random_floats(described.shape, described.dtype), order="C")
    else:
        numbers = np.zeros(described.shape, numpy_dtype(described.dtype))
    return tvm.runtime.tensor(numbers, device=tvm.device(device))


def open_model(module: Any, target: Any) -> Any:
    """Compiles a lowered module for a TVM target, and loads it into TVM's virtual machine."""
    compiled = compile_lowered(module, target)
    try:
        return tvm.relax.VirtualMachine(compiled, tvm.device("cuda" if on_gpu(target) else "cpu"))
    except Exception as error:  # TVM raises all sorts
        raise UserError(f"TVM can't open it: {type(error).__name__}: {error}") from error


def time_main_ms(compiled: Any, arguments: Sequence[Any], effort: Effort, device: str = "cpu",
                 cold: bool = False) -> tuple[float, ...]:
    """Times (ms) of runs of the compiled `main` by TVM's time evaluator; on a GPU by CUDA events.

    If a run is shorter than SAMPLE_S, a sample is the mean of as many runs as fit into that. `arguments` include a function's
    outputs. With `cold`, on a CPU, all arguments but the first are evicted from the caches before each single run.
    """
    def times_s(number: int, repeat: int) -> list[float]:
        flush = {"f_preproc": FLUSH} if cold and number == 1 else {}
        evaluate = compiled.time_evaluator(MAIN, tvm.device(device), number=number, repeat=repeat, **flush)
        try:
            return [float(seconds) for seconds in evaluate(*arguments).results]
        except Exception as error:  # TVM raises all sorts
            raise UserError(f"TVM can't run it: {type(error).__name__}: {error}") from error

    one_run_s = min(times_s(1, effort.warmup + 1))
    if one_run_s < effort.warmup_s:
        times_s(1, min(math.ceil(effort.warmup_s / max(one_run_s, 1e-6)), 10_000))
    number = max(1, math.ceil(SAMPLE_S[device] / max(one_run_s, 1e-7)))
    return tuple(round(1e3 * seconds, 7) for seconds in times_s(number, effort.runs(number * one_run_s)))


class PlannedMemory(NamedTuple):
    """The memory of a model's run in TVM's own plan, in MiB."""

    weights_mib: float
    inputs_outputs_mib: float
    activations_mib: float

    @property
    def peak_mib(self) -> float:
        return self.weights_mib + self.inputs_outputs_mib + self.activations_mib


def planned_memory(module: Any, record: ModelRecord) -> PlannedMemory:
    """The memory of a model's run in TVM's own plan, without buffers inside kernels."""
    passes = tvm.relax.transform
    planned = tvm.transform.Sequential([passes.ToNonDataflow(), passes.RemovePurityChecking(), passes.CallTIRRewrite(),
                                        passes.StaticPlanBlockMemory()])(module)
    activation_bytes = sum(int(binding.value.args[0].values[0].value) for binding in bindings(planned["main"])
                           if relax_name(binding.value) == "relax.memory.alloc_storage")
    inputs_outputs_bytes = sum(tensor.bytes for tensor in (*record.inputs.values(), *record.outputs.values()))
    return PlannedMemory(record.weight_bytes / 2**20, inputs_outputs_bytes / 2**20, activation_bytes / 2**20)


@functools.cache
def _apply_setting(setting: RuntimeSetting) -> None:
    """Sets this process's threads and cores (on a GPU, the host's), before TVM starts its threads."""
    check_tvm()
    if _apply_setting.cache_info().currsize:
        raise UserError("a worker of TVM keeps its first setting; start another one")
    setting.take_cores()
    os.environ["TVM_NUM_THREADS"], os.environ["TVM_BIND_THREADS"] = str(setting.threads), "0"


def applied_setting(request: Request) -> RuntimeSetting:
    """Applies the setting of a request to this process, and returns it."""
    setting = request.setting or RuntimeSetting(level=FUSED)
    _apply_setting(setting)
    if request.device == "cuda":
        _compile_here(Path(setting.kernels) / CUBINS if setting.kernels else None)
    return setting


@functools.cache
def _compile_here(folder: Path | None) -> None:
    """Makes TVM compile for this machine's GPU, and cache machine code in `folder`."""
    compile_for(arch_here(), folder)


@functools.cache
def canary(device: str, threads: int) -> tuple[Any, tuple[Any, ...]]:
    """A compiled product of two matrices, with its arguments."""
    te, side = tvm.te, CANARY_SIDE[device]
    a, b = (te.placeholder((side, side), name=name) for name in "ab")
    k = te.reduce_axis((0, side), name="k")
    product = te.compute((side, side), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="product")
    matrix = Tensor(dtype="float32", shape=(side, side))
    built = compile_function(te.create_prim_func([a, b, product]), local_tvm_target(device, threads))
    return built, tuple(tensor_for(matrix, device) for _ in range(3))


def time_canary(request: Request) -> Reply:
    """Times the canary."""
    compiled, arguments = canary(request.device, applied_setting(request).threads)
    return Reply(measurements=(Measurement(subject=CANARY, id=CANARY, label="run", context="alone", place="alone",
                                           samples_ms=time_main_ms(compiled, arguments, request.effort, request.device)),))


def time_alone(request: Request) -> Reply:
    """Label `run`: a kernel's function with its own tensors, in several parts of the memory."""
    setting, path = applied_setting(request), Path(request.paths[0])
    kernel = read_kernel(path)
    compiled = compile_function(read_function(path), local_tvm_target(request.device, setting.threads))
    on_cpu = request.device == "cpu"
    placements = PLACEMENTS if on_cpu else 1
    part = request.effort.part(placements)
    tensors, samples_ms = [], list[float]()  # all tensors are kept, or the next ones would get the addresses of the last ones
    for _ in range(placements):
        tensors.append([tensor_for(tensor, request.device) for tensor in (*kernel.inputs, *kernel.outputs)])
        samples_ms += time_main_ms(compiled, tensors[-1], part, request.device, cold=on_cpu)
    return Reply(measurements=(Measurement(subject="kernel", id=kernel.id, label="run", context="alone", place="alone",
                                           samples_ms=tuple(samples_ms)),))


def time_model(request: Request) -> Reply:
    """A whole model's latency in TVM's virtual machine, and its memory."""
    setting, record = applied_setting(request), read_model_record(Path(request.record))
    parsed = parse_at(setting.level, Path(request.paths[0]), request.dims, request.device)
    if not parsed.record.same_kernels(record):
        raise UserError(f"{request.paths[0]}: TVM's graph is not the one in its record; make the record anew: "
                        "python runtimes/tvm/relax_parser.py")
    return time_parsed(parsed._replace(record=record), setting, request.effort)


def time_session(request: Request) -> Reply:
    """A whole model's latency, without comparing its graph with a record."""
    setting = applied_setting(request)
    parsed = parse_at(setting.level, Path(request.paths[0]), request.dims, request.device)
    return time_parsed(parsed, setting, request.effort)


def time_parsed(parsed: TvmModel, setting: RuntimeSetting, effort: Effort) -> Reply:
    """The latency of an analysed model on its record's device."""
    lowered, graph, record = parsed
    device = record.flavour.device
    memory, limit_mib = planned_memory(lowered.module, record), setting.memory_limit_mib
    if limit_mib and memory.peak_mib > limit_mib:
        raise UserError(f"{record.model}: refused, since it needs {memory.peak_mib:.1f} MiB of memory at its peak and the "
                        f"limit is {limit_mib:g} MiB")
    module = lowered.module
    if setting.level == TUNED:
        module = with_searched_schedules(module, graph.callees, Path(setting.kernels))
    before_mib = resident_mib()
    machine = open_model(module, local_tvm_target(device, setting.threads))
    samples_ms = time_main_ms(machine, [tensor_for(record.inputs[name], device) for name in graph.inputs], effort, device)
    facts = {"weights_mib": memory.weights_mib, "activations_mib": memory.activations_mib, "peak_memory_mib": memory.peak_mib,
             "resident_mib": max(resident_mib() - before_mib, 0.0)}
    return Reply(measurements=(Measurement(
        subject="model", id=record.model, label="latency", context=record.model, place="alone", samples_ms=samples_ms,
        facts={name: round(value, 3) for name, value in facts.items()}),), memory_mib=memory.peak_mib)


def resident_mib() -> float:
    """The peak memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def prepare(request: Request) -> Reply:
    """Loads TVM and does a run."""
    time_canary(request)
    return Reply()


WORK: dict[str, Callable[[Request], Reply]] = {"alone": time_alone, "model": time_model, "session": time_session,
                                               "canary": time_canary, "prepare": prepare}


if __name__ == "__main__":
    serve(WORK)
