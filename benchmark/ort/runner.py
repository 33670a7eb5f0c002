"""Opens a model in ONNX Runtime and times its runs."""

from __future__ import annotations

import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hase.benchmark.measuring.quiet_host import off_the_workers_cores
from hase.benchmark.measuring.run_times import Effort
from hase.kernel_model.building.dummy_data import dummy_inputs, input_ranges, looked_up, random_floats
from hase.kernel_model.building.kernel_models import kernel_in, open_kernel
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.bodies import open_branches
from hase.ort_analysis.graph.nodes import shared_caches
from hase.ort_analysis.graph.source import read_source
from hase.records.kernel_record import Tensor, numpy_dtype, session_dtype, zeros
from hase.records.measurement import now
from hase.utils.errors import UserError
from hase.utils.fingerprint import DEFAULT_RUNTIME, resolve_device
from hase.utils.frozen import Frozen
from hase.utils.lazy import onnxruntime
from hase.utils.ort_sessions import CUDA_GRAPH, model_errors, open_session, ort_value
from hase.utils.timing import LatencyStatistics, summarize

if TYPE_CHECKING:
    import onnx

DEFAULT_WARMUP = 5
DEFAULT_LOOPS = 50


class Timing(Frozen):
    """One timed session: the raw samples (ms, in order), when (UTC, ISO 8601), and how."""

    model: str
    device: str
    runtime: str = DEFAULT_RUNTIME
    io: str
    warmup: int
    samples_ms: tuple[float, ...]
    started: str
    ended: str

    @property
    def statistics(self) -> LatencyStatistics:
        return summarize(self.samples_ms)


def warm_up(run_once: Callable[[], Any], runs: int, seconds: float = 0.0) -> tuple[int, float]:
    """Runs untimed, `runs` times and for at least `seconds`.

    Returns:
        How often it ran, and the seconds that the last run took (0 if there was none).
    """
    began, done, last_s = time.perf_counter(), 0, 0.0
    while done < runs or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        run_once()
        last_s = time.perf_counter() - start
        done += 1
    return done, last_s


def timer(run_once: Callable[[], Any]) -> Callable[[], float]:
    """A function that runs once and returns the seconds that took."""
    def run_s() -> float:
        start = time.perf_counter()
        run_once()
        return time.perf_counter() - start

    return run_s


@dataclass
class Runner:
    """An open session with its inputs (`feed`) in place; `run_once` runs it and waits for the result. `shared` are the outputs
    that are written into the buffer of an input, and that input."""

    session: onnxruntime.InferenceSession
    name: str
    device: str
    io: str
    run_once: Callable[[], Any]
    feed: Mapping[str, np.ndarray] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)

    def run_s(self) -> float:
        """Runs once; the seconds that took."""
        return timer(self.run_once)()

    def warm_up(self, runs: int, seconds: float = 0.0) -> float:
        """Runs untimed, see `warm_up`; returns the seconds that the last run took (0 if there was none).

        Raises:
            UserError: the model fails while running.
        """
        with model_errors(self.name), off_the_workers_cores(self.device):
            return warm_up(self.run_once, runs, seconds)[1]

    def time(self, *, warmup: int = DEFAULT_WARMUP, loops: int | None = None, budget_s: float | None = None,
             least_runs: int = 3) -> Timing:
        """Runs `warmup` times untimed, then `loops` times, or for `budget_s` seconds (at least `least_runs` runs).

        Raises:
            UserError: the model fails while running.
        """
        if loops is None and budget_s is None:
            loops = DEFAULT_LOOPS
        self.warm_up(warmup)
        with model_errors(self.name), off_the_workers_cores(self.device):
            started, began = now(), time.perf_counter()
            samples: list[float] = []
            while len(samples) < (loops or least_runs) or (loops is None and time.perf_counter() - began < (budget_s or 0)):
                samples.append(1000 * self.run_s())
        return Timing(model=self.name, device=self.device, io=self.io, warmup=warmup,
                      samples_ms=tuple(round(sample, 6) for sample in samples), started=started, ended=now())

    def time_as(self, effort: Effort) -> Timing:
        """Warms up and runs as often as `effort` says.

        Raises:
            UserError: the model fails while running.
        """
        one_run_s = self.warm_up(effort.warmup + 1, effort.warmup_s)
        return self.time(warmup=0, loops=effort.runs(one_run_s))


def read_inputs(path: Path, expected: Mapping[str, Tensor] | None = None) -> dict[str, np.ndarray]:
    """The arrays in a file that `numpy.savez` wrote, by name; of the types of `expected`, if that is given.

    Args:
        path: of the file.
        expected: the inputs of the model that they are for.

    Raises:
        UserError: the file is missing or of another kind, or an array is no input of the model, or of another shape or kind.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            given = {name: np.asarray(arrays[name]) for name in arrays.files}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: not a file of arrays by name, as numpy.savez writes them ({error})") from None
    if expected is None:
        return given
    for name, array in given.items():
        if name not in expected:
            raise UserError(f"{path}: the model has no input {name}; its inputs are {', '.join(expected)}")
        tensor = expected[name]
        if array.shape != tensor.shape:
            raise UserError(f"{path}: {name} has shape {list(array.shape)}, and the model takes {list(tensor.shape)}; give "
                            "other values, or other sizes with --dim")
        dtype = numpy_dtype(tensor.dtype)
        if not np.can_cast(array.dtype, dtype, "same_kind") and tensor.dtype != "bfloat16":
            raise UserError(f"{path}: {name} is {array.dtype}, and the model takes {tensor.dtype}")
        given[name] = array.astype(dtype)
    return given


def random_feed(session: onnxruntime.InferenceSession, dims: Mapping[str, int] | None = None,
                steering: Mapping[str, Any] | None = None, graph: onnx.GraphProto | None = None,
                inputs: Path | None = None) -> dict[str, np.ndarray]:
    """A value for every input of a session: standardised random floats, zeros for whole numbers.

    Whole-number inputs of a model are indices or masks, and 0 is always a valid one. Where they are nothing but places in
    tables of the model's weights, they are random ones.

    Args:
        session: open.
        dims: the sizes that the session leaves open.
        steering: values for inputs that decide how often a Loop runs or which branch of an If, and for inputs of text (see
            `steering_inputs`).
        graph: of the model; columns that it standardises itself, or that trees compare, get values from their range.
        inputs: a file with the values of some inputs, which are taken instead.

    Raises:
        UserError: the values in `inputs` don't fit the model.
    """
    feed, ranges, places = {}, input_ranges(graph) if graph is not None else {}, looked_up(graph) if graph is not None else {}
    generator = np.random.default_rng(0)
    for value in session.get_inputs():
        dtype = session_dtype(value.type)
        shape = tuple((dims or {}).get(size, size) for size in value.shape)
        feed[value.name] = random_floats(shape, dtype) if "float" in dtype else zeros(shape, dtype)
        if value.name in ranges and "float" in dtype and shape:
            feed[value.name] = ranges[value.name].around(feed[value.name]).astype(numpy_dtype(dtype))
        if value.name in places:
            feed[value.name] = generator.integers(0, places[value.name], shape).astype(numpy_dtype(dtype))
        if value.name in (steering or {}):
            feed[value.name] = np.full(shape, (steering or {})[value.name], numpy_dtype(dtype))
    return feed | (read_inputs(inputs, {value.name: Tensor(dtype=session_dtype(value.type), shape=feed[value.name].shape)
                                        for value in session.get_inputs()}) if inputs else {})


def bind(session: onnxruntime.InferenceSession, feed: Mapping[str, np.ndarray], device: str,
         io: str, shared: Mapping[str, str] | None = None) -> Callable[[], Any]:
    """A function that runs the session once, with inputs and outputs on the device (`device`) or as numpy arrays (`host`).
    Inputs of text are always arrays, because ORT can't bind them. `shared` is that of `device_binding`."""
    if io == "host" or any(array.dtype == object for array in feed.values()):
        fed = dict(feed)
        return lambda: session.run(None, fed)
    binding = device_binding(session, feed, "cuda" if device == "cuda" else "cpu", shared=shared)
    return lambda: session.run_with_iobinding(binding)


def device_binding(session: onnxruntime.InferenceSession, feed: Mapping[str, np.ndarray], device: str,
                   outputs_on: str | None = None, shared: Mapping[str, str] | None = None) -> onnxruntime.IOBinding:
    """Binds a session's inputs on `device`, and its outputs there or on the device that `outputs_on` names.

    Args:
        session: open.
        feed: values of inputs, by name.
        device: `cpu` or `cuda`.
        outputs_on: `cpu` or `cuda`.
        shared: outputs that are written into the buffer of an input, and that input (see `shared_caches`).
    """
    binding = session.io_binding()
    values = {name: ort_value(array, device) for name, array in feed.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        past = (shared or {}).get(output.name, "")
        if past in values and values[past].device_name() == device:
            binding.bind_ortvalue_output(output.name, values[past])
        else:
            binding.bind_output(output.name, outputs_on or device)
    return binding


def queue_run(session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding) -> Callable[[], None]:
    """A function that dispatches one run to the GPU without waiting for it."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return lambda: session.run_with_iobinding(binding, options)


def dispatcher(session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding) -> Callable[[], float]:
    """A function that dispatches one run to an idle GPU, without waiting for it, and returns the seconds that took."""
    run_s = timer(queue_run(session, binding))

    def dispatch_s() -> float:
        binding.synchronize_outputs()
        return run_s()

    return dispatch_s


def open_runner(model: Path, device: str = "auto", *, dims: Mapping[str, int] | None = None, io: str = "device",
                cuda_graph: bool = False, profile_prefix: Path | None = None,
                provider_options: Mapping[str, str] | None = None, static: bool = False,
                inputs: Path | None = None) -> Runner:
    """Opens a file to be run: optimised as ORT does by default, or unchanged if it is a built kernel.

    If an input decides which branch of an If runs, and `dims` do not, the branch is the one that a prediction counts.

    Args:
        model: the ONNX file.
        device: `auto`, `cpu` or `cuda`.
        dims: sizes of dynamic dimensions.
        io: `device` or `host`.
        cuda_graph: whether its first run is captured and then replayed.
        profile_prefix: where ORT's profiler writes; None leaves it off.
        provider_options: options of the CUDA provider.
        static: whether `dims` are fixed before ONNX Runtime optimises the model; else its session takes any sizes.
        inputs: a file with values of inputs; a built kernel has its own.

    Raises:
        UserError: the model can't be read, `inputs` don't fit it, a dynamic dimension is unknown or has no size, ORT can't load
            the model, or a CUDA graph is asked for where there can be none.
    """
    device = resolve_device(device)
    if cuda_graph and (device != "cuda" or io == "host"):
        raise UserError("a CUDA graph needs an NVIDIA GPU, and reads and writes tensors at fixed places on it: leave "
                        "--cuda-graph out, or run on device cuda with --io device")
    options = {**(provider_options or {}), **(CUDA_GRAPH if cuda_graph else {})}
    source = read_source(model, dims)
    kernel = kernel_in(source.graph_only, str(model))
    if kernel:
        session = open_kernel(model, device, kernel, profile_prefix=profile_prefix, provider_options=options)
    else:
        session = open_session(source.loadable, device, dims=source.dims if static else {}, profile_prefix=profile_prefix,
                               provider_options=options, name=str(model))
    if not kernel and open_branches(source.graph_only.graph, source.dims):  # run what a prediction counts
        source = replace(source, dims=analyze(model, device, dims, static=static).dims_run)
    if kernel and inputs:
        raise UserError(f"{model}: a built kernel has inputs of its own; leave --inputs out, or give the model that holds it")
    feed = dummy_inputs(kernel) if kernel else random_feed(
        session, source.dims, source.steering, source.graph_only.graph, inputs)
    shared = shared_caches(source.graph_only.graph, source.dims)
    return Runner(session=session, name=model.stem, device=device, io=io,
                  run_once=bind(session, feed, device, io, shared), feed=feed, shared=shared)
