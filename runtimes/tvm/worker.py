"""The process that runs kernels and models under TVM for the collector.

Speaks runtimes/protocol.py. The setting of its first request (threads, cores) holds as long as it lives, since TVM
starts its threads once.
"""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring.effort import Effort
from records.kernel_record import Tensor
from records.kernel_record_files import read_model_record
from records.measurement import Measurement
from runtimes.protocol import Reply, Request, Setting
from runtimes.serving import serve
from runtimes.tvm.compiling import built_function, with_searched_schedules
from runtimes.tvm.cuda_code import FOLDER, compile_for
from runtimes.tvm.functions import read_function, read_kernel
from runtimes.tvm.memory import planned_memory
from runtimes.tvm.package import FUSED, TUNED, arch_here, check_tvm, target_to_run_on
from runtimes.tvm.recording import Parsed, parse_at
from runtimes.tvm.runs import opened_model, samples_ms, tensor_for
from utils.errors import UserError
from utils.lazy import tvm

CANARY_SIDE = {"cpu": 128, "cuda": 1024}  # of the matrices: about two milliseconds on a CPU
NAME = "canary"
# Where the tensors of a kernel lie decides which of their lines a cache can hold together: one product of 5 x 768 by 768 x 3072
# took 32 ms with some tensors and 48 ms with others. A network has many such places, so a kernel is timed in several. A network
# reads each weight once a run, so weights are not in the caches when their kernel begins.
PLACEMENTS = 5


@functools.cache
def settled(setting: Setting) -> None:
    """Gives this process its threads and cores, before TVM starts its own. On a GPU, they are the host's.

    Raises:
        UserError: the process had another setting before, or there are fewer cores.
    """
    check_tvm()
    if settled.cache_info().currsize:
        raise UserError("a worker of TVM keeps its first setting; start another one")
    there = sorted(os.sched_getaffinity(0))
    if setting.cores > len(there):
        raise UserError(f"cores: {setting.cores}, but this process may use {len(there)}")
    if setting.cores:
        os.sched_setaffinity(0, there[:setting.cores])
    os.environ["TVM_NUM_THREADS"], os.environ["TVM_BIND_THREADS"] = str(setting.threads), "0"


def setting_of(request: Request) -> Setting:
    """The setting of a request, which holds from now on.

    Raises:
        UserError: see `settled`.
    """
    setting = request.setting or Setting(level=FUSED)
    settled(setting)
    if request.device == "cuda":
        compile_here(Path(setting.kernels) / FOLDER if setting.kernels else None)
    return setting


@functools.cache
def compile_here(folder: Path | None) -> None:
    """As `compile_for`, for this machine's GPU; errors as of `arch_here`, too."""
    compile_for(arch_here(), folder)


@functools.cache
def canary(device: str, threads: int) -> tuple[Any, tuple[Any, ...]]:
    """A product of two matrices as a compiled function, with its arguments."""
    te, side = tvm.te, CANARY_SIDE[device]
    a, b = (te.placeholder((side, side), name=name) for name in "ab")
    k = te.reduce_axis((0, side), name="k")
    product = te.compute((side, side), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="product")
    matrix = Tensor(dtype="float32", shape=(side, side))
    built = built_function(te.create_prim_func([a, b, product]), target_to_run_on(device, threads))
    return built, tuple(tensor_for(matrix, device) for _ in range(3))


def time_canary(request: Request) -> Reply:
    """The canary, as often as the effort says."""
    built, arguments = canary(request.device, setting_of(request).threads)
    return Reply(measurements=(Measurement(subject=NAME, id=NAME, label="run", context="alone", place="alone",
                                           samples_ms=samples_ms(built, arguments, request.effort, request.device)),))


def time_alone(request: Request) -> Reply:
    """Label `run`: a kernel's function with tensors of its own, in several places of the memory."""
    setting, path = setting_of(request), Path(request.paths[0])
    kernel = read_kernel(path)
    built = built_function(read_function(path), target_to_run_on(request.device, setting.threads))
    on_cpu = request.device == "cpu"
    placements = PLACEMENTS if on_cpu else 1
    part = request.effort.part(placements)
    held, samples = [], list[float]()  # all are held, or the next tensors would lie where the last ones did
    for _ in range(placements):
        held.append([tensor_for(one, request.device) for one in (*kernel.inputs, *kernel.outputs)])
        samples += samples_ms(built, held[-1], part, request.device, cold=on_cpu)
    return Reply(measurements=(Measurement(subject="kernel", id=kernel.id, label="run", context="alone", place="alone",
                                           samples_ms=tuple(samples)),))


def time_model(request: Request) -> Reply:
    """A whole model's latency in TVM's virtual machine, with the memory that it takes.

    Raises:
        UserError: as `timed`; or TVM's graph is not the one of the model's record.
    """
    setting, record = setting_of(request), read_model_record(Path(request.record))
    parsed = parse_at(setting.level, Path(request.paths[0]), request.dims, request.device)
    if [node.kernel_id for node in parsed.graph.nodes] != [node.kernel_id for node in record.nodes]:
        raise UserError(f"{request.paths[0]}: TVM's graph is not the one in its record; make the record anew: "
                        "python tvm_analysis/relax_parser.py")
    return timed(parsed._replace(record=record), setting, request.effort)


def time_session(request: Request) -> Reply:
    """As `time_model`, without a record; errors as of `timed`."""
    setting = setting_of(request)
    parsed = parse_at(setting.level, Path(request.paths[0]), request.dims, request.device)
    return timed(parsed, setting, request.effort)


def timed(parsed: Parsed, setting: Setting, effort: Effort) -> Reply:
    """The latency of a model that was taken apart, on the device of its record.

    Raises:
        UserError: it needs more memory than the limit; or TVM can't take it apart.
    """
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
    """The most memory that this process ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def prepare(request: Request) -> Reply:
    """Loads TVM and runs something."""
    time_canary(request)
    return Reply()


WORK: dict[str, Callable[[Request], Reply]] = {"alone": time_alone, "model": time_model, "session": time_session,
                                               "canary": time_canary, "prepare": prepare}


def main() -> None:
    serve(WORK)


if __name__ == "__main__":
    main()
