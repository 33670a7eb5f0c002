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
    FOLDER,
    FUSED,
    MAIN,
    TUNED,
    arch_here,
    built_function,
    check_tvm,
    compile_for,
    compiled_model,
    on_gpu,
    read_function,
    read_kernel,
    target_to_run_on,
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
NAME = "canary"
# Where the tensors of a kernel lie decides which of their lines a cache can hold together: one product of 5 x 768 by 768 x 3072
# took 32 ms with some tensors and 48 ms with others. A network has many such tensors, so a kernel is timed with several. And it
# reads each weight once a run, so weights are not in the caches when their kernel begins.
PLACEMENTS = 5


def tensor_for(described: Tensor, device: str = "cpu") -> Any:
    """A TVM tensor on `cpu` or `cuda`: random numbers, or zeros for integers, which may be indices."""
    if "float" in described.dtype:
        numbers = np.array(random_floats(described.shape, described.dtype), order="C")
    else:
        numbers = np.zeros(described.shape, numpy_dtype(described.dtype))
    return tvm.runtime.tensor(numbers, device=tvm.device(device))


def opened_model(module: Any, target: Any) -> Any:
    """A lowered module, compiled for a TVM target and loaded into TVM's virtual machine."""
    compiled = compiled_model(module, target)
    try:
        return tvm.relax.VirtualMachine(compiled, tvm.device("cuda" if on_gpu(target) else "cpu"))
    except Exception as error:  # TVM raises all sorts
        raise UserError(f"TVM can't open it: {type(error).__name__}: {error}") from error


def samples_ms(timed: Any, arguments: Sequence[Any], effort: Effort, device: str = "cpu",
               cold: bool = False) -> tuple[float, ...]:
    """Times (ms) of runs of `main` by TVM's time evaluator; on a GPU by CUDA events.

    If a run is shorter than SAMPLE_S, a sample is the mean of as many runs as fit into that. `arguments` include a function's
    outputs. With `cold`, on a CPU, all arguments but the first are evicted from the caches before each single run.
    """
    def times_s(number: int, repeat: int) -> list[float]:
        flush = {"f_preproc": FLUSH} if cold and number == 1 else {}
        evaluate = timed.time_evaluator(MAIN, tvm.device(device), number=number, repeat=repeat, **flush)
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
    """Memory (MiB) of a model's weights, its inputs and outputs, and its activations."""

    weights: float
    ends: float
    activations: float

    @property
    def peak(self) -> float:
        return self.weights + self.ends + self.activations


def planned_memory(module: Any, record: ModelRecord) -> PlannedMemory:
    """The peak memory of a model's run in TVM's own plan, without buffers inside kernels."""
    passes = tvm.relax.transform
    planned = tvm.transform.Sequential([passes.ToNonDataflow(), passes.RemovePurityChecking(), passes.CallTIRRewrite(),
                                        passes.StaticPlanBlockMemory()])(module)
    activations = sum(int(binding.value.args[0].values[0].value) for binding in bindings(planned["main"])
                      if relax_name(binding.value) == "relax.memory.alloc_storage")
    ends = sum(tensor.bytes for tensor in (*record.inputs.values(), *record.outputs.values()))
    return PlannedMemory(record.weight_bytes / 2**20, ends / 2**20, activations / 2**20)


@functools.cache
def settled(setting: RuntimeSetting) -> None:
    """Sets this process's threads and cores (on a GPU, the host's), before TVM starts its threads."""
    check_tvm()
    if settled.cache_info().currsize:
        raise UserError("a worker of TVM keeps its first setting; start another one")
    setting.take_cores()
    os.environ["TVM_NUM_THREADS"], os.environ["TVM_BIND_THREADS"] = str(setting.threads), "0"


def setting_of(request: Request) -> RuntimeSetting:
    """The setting of a request, which becomes that of this process."""
    setting = request.setting or RuntimeSetting(level=FUSED)
    settled(setting)
    if request.device == "cuda":
        compile_here(Path(setting.kernels) / FOLDER if setting.kernels else None)
    return setting


@functools.cache
def compile_here(folder: Path | None) -> None:
    """Makes TVM compile for this machine's GPU, and keep machine code in `folder`."""
    compile_for(arch_here(), folder)


@functools.cache
def canary(device: str, threads: int) -> tuple[Any, tuple[Any, ...]]:
    """A compiled product of two matrices, with its arguments."""
    te, side = tvm.te, CANARY_SIDE[device]
    a, b = (te.placeholder((side, side), name=name) for name in "ab")
    k = te.reduce_axis((0, side), name="k")
    product = te.compute((side, side), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="product")
    matrix = Tensor(dtype="float32", shape=(side, side))
    built = built_function(te.create_prim_func([a, b, product]), target_to_run_on(device, threads))
    return built, tuple(tensor_for(matrix, device) for _ in range(3))


def time_canary(request: Request) -> Reply:
    """Times the canary."""
    built, arguments = canary(request.device, setting_of(request).threads)
    return Reply(measurements=(Measurement(subject=NAME, id=NAME, label="run", context="alone", place="alone",
                                           samples_ms=samples_ms(built, arguments, request.effort, request.device)),))


def time_alone(request: Request) -> Reply:
    """Label `run`: a kernel's function with its own tensors, in several parts of the memory."""
    setting, path = setting_of(request), Path(request.paths[0])
    kernel = read_kernel(path)
    built = built_function(read_function(path), target_to_run_on(request.device, setting.threads))
    on_cpu = request.device == "cpu"
    placements = PLACEMENTS if on_cpu else 1
    part = request.effort.part(placements)
    held, samples = [], list[float]()  # all are held, or the next tensors would lie where the last ones did
    for _ in range(placements):
        held.append([tensor_for(tensor, request.device) for tensor in (*kernel.inputs, *kernel.outputs)])
        samples += samples_ms(built, held[-1], part, request.device, cold=on_cpu)
    return Reply(measurements=(Measurement(subject="kernel", id=kernel.id, label="run", context="alone", place="alone",
                                           samples_ms=tuple(samples)),))


def time_model(request: Request) -> Reply:
    """A whole model's latency in TVM's virtual machine, and its memory."""
    setting, record = setting_of(request), read_model_record(Path(request.record))
    parsed = parse_at(setting.level, Path(request.paths[0]), request.dims, request.device)
    if [node.kernel_id for node in parsed.graph.nodes] != [node.kernel_id for node in record.nodes]:
        raise UserError(f"{request.paths[0]}: TVM's graph is not the one in its record; make the record anew: "
                        "python runtimes/tvm/relax_parser.py")
    return timed(parsed._replace(record=record), setting, request.effort)


def time_session(request: Request) -> Reply:
    """A whole model's latency, without comparing its graph with a record."""
    setting = setting_of(request)
    parsed = parse_at(setting.level, Path(request.paths[0]), request.dims, request.device)
    return timed(parsed, setting, request.effort)


def timed(parsed: TvmModel, setting: RuntimeSetting, effort: Effort) -> Reply:
    """The latency of an analysed model on its record's device."""
    lowered, graph, record = parsed
    device = record.flavour.device
    memory, limit_mib = planned_memory(lowered.module, record), setting.memory_limit_mib
    if limit_mib and memory.peak > limit_mib:
        raise UserError(f"{record.model}: refused, since it needs {memory.peak:.1f} MiB of memory at its peak and the limit is "
                        f"{limit_mib:g} MiB")
    module = lowered.module
    if setting.level == TUNED:
        module = with_searched_schedules(module, graph.callees, Path(setting.kernels))
    before_mib = resident_mib()
    machine = opened_model(module, target_to_run_on(device, setting.threads))
    times = samples_ms(machine, [tensor_for(record.inputs[name], device) for name in graph.inputs], effort, device)
    facts = {"weights_mib": memory.weights, "activations_mib": memory.activations, "peak_memory_mib": memory.peak,
             "resident_mib": max(resident_mib() - before_mib, 0.0)}
    return Reply(measurements=(Measurement(
        subject="model", id=record.model, label="latency", context=record.model, place="alone", samples_ms=times,
        facts={name: round(value, 3) for name, value in facts.items()}),), memory_mib=memory.peak)


def resident_mib() -> float:
    """The peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def prepare(request: Request) -> Reply:
    """Loads TVM and does a run."""
    time_canary(request)
    return Reply()


WORK: dict[str, Callable[[Request], Reply]] = {"alone": time_alone, "model": time_model, "session": time_session,
                                               "canary": time_canary, "prepare": prepare}


def main() -> None:
    serve(WORK)


if __name__ == "__main__":
    main()
