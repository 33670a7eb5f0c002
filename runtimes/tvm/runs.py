"""Opens models of TVM, and times them and functions by TVM's time evaluator: no Python, and no allocation, in the times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from measuring.effort import Effort
from records.elements import numpy_dtype
from records.kernel_record import Tensor
from runtimes.ort.building.dummy_data import random_floats
from runtimes.tvm.compiling import compiled_model, on_gpu
from runtimes.tvm.functions import MAIN
from utils.errors import UserError
from utils.lazy import tvm

# A sample of a function that is shorter is the mean of several runs. CUDA events are too coarse for a single short kernel. On a
# CPU, only a single run finds its weights outside of the caches: with 5e-4 there, too, the kernels of networks with searched
# schedules added up to 10 to 33 % less than the networks took.
SAMPLE_S = {"cpu": 3e-5, "cuda": 5e-4}
FLUSH = "cache_flush_cpu_non_first_arg"  # TVM's own


def tensor_for(described: Tensor, device: str = "cpu") -> Any:
    """A tensor of TVM on `cpu` or `cuda`: random numbers, or zeros if they are integers, since they may be indices."""
    if "float" in described.dtype:
        numbers = np.array(random_floats(described.shape, described.dtype), order="C")
    else:
        numbers = np.zeros(described.shape, numpy_dtype(described.dtype))
    return tvm.runtime.tensor(numbers, device=tvm.device(device))


def opened_model(module: Any, target: Any) -> Any:
    """A lowered module, compiled for a target of TVM and opened in TVM's virtual machine.

    Raises:
        UserError: TVM can't compile it, or the device can't hold it.
    """
    compiled = compiled_model(module, target)
    try:
        return tvm.relax.VirtualMachine(compiled, tvm.device("cuda" if on_gpu(target) else "cpu"))
    except Exception as error:  # TVM raises all sorts
        raise UserError(f"TVM can't open it: {type(error).__name__}: {error}") from error


def samples_ms(timed: Any, arguments: Sequence[Any], effort: Effort, device: str = "cpu",
               cold: bool = False) -> tuple[float, ...]:
    """Times of runs of `main` in ms, by the time evaluator. On a GPU, CUDA events time them.

    Args:
        timed: what has a time evaluator: a compiled function, or a virtual machine.
        arguments: of `main`, outputs of a function included.
        effort: how often. If a run is shorter than SAMPLE_S, a sample is the mean of as many runs as fit into that.
        device: where the arguments lie, `cpu` or `cuda`.
        cold: whether all arguments but the first are taken out of the caches before each sample of a single run; on a CPU only.

    Raises:
        UserError: TVM can't run it.
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
