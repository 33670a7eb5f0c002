"""Opens a model in ONNX Runtime and times its runs."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hase.benchmark.measuring.quiet_host import off_the_workers_cores
from hase.kernel_model.building.dummy_data import dummy_inputs, input_ranges, random_floats, table_indices
from hase.kernel_model.building.kernel_models import open_kernel
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.bodies import open_branches
from hase.ort_analysis.graph.nodes import shared_caches
from hase.ort_analysis.graph.source import kernel_in, read_source
from hase.records.kernel_record import Tensor, numpy_dtype, session_dtype, zeros
from hase.records.measurement import Effort, now
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.fingerprint import DEFAULT_RUNTIME, resolve_device
from hase.utils.lazy import onnxruntime
from hase.utils.ort_sessions import CUDA_GRAPH, model_errors, open_session, ort_value
from hase.utils.timing import LatencyStatistics, summarize, time_runs_ms, timed, warm_up

if TYPE_CHECKING:
    import onnx


DEFAULT_WARMUP = 5
DEFAULT_LOOPS = 50


class Timing(Frozen):
    """One timed session: samples (ms, in order), when (UTC, ISO 8601), and how."""

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


@dataclass
class Runner:
    """An open session with its inputs (`feed`); `shared` maps outputs to the inputs whose buffer they are written into."""

    session: onnxruntime.InferenceSession
    name: str
    device: str
    io: str
    run_once: Callable[[], Any]
    feed: Mapping[str, np.ndarray] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)

    def run_s(self) -> float:
        """Runs once and returns the time in seconds."""
        return timed(self.run_once)()

    def warm_up(self, runs: int, seconds: float = 0.0) -> float:
        """Runs without recording; returns the seconds of the last run (0 without one)."""
        with model_errors(self.name), off_the_workers_cores(self.device):
            return warm_up(self.run_once, runs, seconds)[1]

    def time(self, *, warmup: int = DEFAULT_WARMUP, loops: int | None = None, budget_s: float | None = None,
             least_runs: int = 3) -> Timing:
        """Runs `warmup` times, then `loops` times, or for `budget_s` seconds (at least `least_runs` runs)."""
        if loops is None and budget_s is None:
            loops = DEFAULT_LOOPS
        self.warm_up(warmup)
        with model_errors(self.name), off_the_workers_cores(self.device):
            started = now()
            samples = time_runs_ms(self.run_once, loops or least_runs, budget_s or 0.0 if loops is None else 0.0)
        return Timing(model=self.name, device=self.device, io=self.io, warmup=warmup,
                      samples_ms=tuple(round(sample, 6) for sample in samples), started=started, ended=now())

    def time_as(self, effort: Effort) -> Timing:
        """Warms up and runs as often as `effort` says."""
        one_run_s = self.warm_up(effort.warmup + 1, effort.warmup_s)
        return self.time(warmup=0, loops=effort.runs(one_run_s))


def read_inputs(path: Path, expected: Mapping[str, Tensor] | None = None) -> dict[str, np.ndarray]:
    """Arrays from a file by `numpy.savez`, in the `expected` types. Raises UserError if they do not fit the model's inputs."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            inputs = {name: np.asarray(arrays[name]) for name in arrays.files}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: not a file of arrays by name, as numpy.savez writes them ({error})") from None
    if expected is None:
        return inputs
    for name, value in inputs.items():
        if name not in expected:
            raise UserError(f"{path}: the model has no input {name}; its inputs are {', '.join(expected)}")
        tensor = expected[name]
        if value.shape != tensor.shape:
            raise UserError(f"{path}: {name} has shape {list(value.shape)}, and the model takes {list(tensor.shape)}; give "
                            "other values, or other sizes with --dim")
        dtype = numpy_dtype(tensor.dtype)
        if not np.can_cast(value.dtype, dtype, "same_kind") and tensor.dtype != "bfloat16":
            raise UserError(f"{path}: {name} is {value.dtype}, and the model takes {tensor.dtype}")
        inputs[name] = value.astype(dtype)
    return inputs


def random_feed(session: onnxruntime.InferenceSession, dims: Mapping[str, int] | None = None,
                steering: Mapping[str, Any] | None = None, graph: onnx.GraphProto | None = None,
                inputs: Path | None = None) -> dict[str, np.ndarray]:
    """A value for every input of a session: standardised random floats, and zeros for integers.

    Integer inputs are indices or masks, for which 0 is always valid; those that only look up rows of the model's weights are
    random. Columns that the model's `graph` standardises, or that trees compare, get values from their range. `steering` has
    values for inputs that decide how often a Loop runs or which branch of an If, and for text inputs (see `steering_inputs`);
    `dims` has sizes that the session leaves open. Values from the file `inputs` take precedence.
    """
    feed, ranges = {}, input_ranges(graph) if graph is not None else {}
    table_rows = table_indices(graph) if graph is not None else {}
    generator = np.random.default_rng(0)
    for value in session.get_inputs():
        dtype = session_dtype(value.type)
        shape = tuple((dims or {}).get(size, size) for size in value.shape)
        feed[value.name] = random_floats(shape, dtype) if "float" in dtype else zeros(shape, dtype)
        if value.name in ranges and "float" in dtype and shape:
            feed[value.name] = ranges[value.name].around(feed[value.name]).astype(numpy_dtype(dtype))
        if value.name in table_rows:
            feed[value.name] = generator.integers(0, table_rows[value.name], shape).astype(numpy_dtype(dtype))
        if value.name in (steering or {}):
            feed[value.name] = np.full(shape, (steering or {})[value.name], numpy_dtype(dtype))
    return feed | (read_inputs(inputs, {value.name: Tensor(dtype=session_dtype(value.type), shape=feed[value.name].shape)
                                        for value in session.get_inputs()}) if inputs else {})


def bind(session: onnxruntime.InferenceSession, feed: Mapping[str, np.ndarray], device: str,
         io: str, shared: Mapping[str, str] | None = None) -> Callable[[], Any]:
    """A function that runs the session once, with tensors on the device (`io` is `device`) or as numpy arrays (`host`). Text
    inputs are always arrays, because ORT cannot bind them."""
    if io == "host" or any(array.dtype == object for array in feed.values()):
        return partial(session.run, None, dict(feed))
    binding = device_binding(session, feed, "cuda" if device == "cuda" else "cpu", shared=shared)
    return partial(session.run_with_iobinding, binding)


def device_binding(session: onnxruntime.InferenceSession, feed: Mapping[str, np.ndarray], device: str,
                   outputs_on: str | None = None, shared: Mapping[str, str] | None = None) -> onnxruntime.IOBinding:
    """Binds inputs on `device` and outputs there or on `outputs_on`; `shared` outputs use an input's buffer."""
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
    return partial(session.run_with_iobinding, binding, options)


def dispatcher(session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding) -> Callable[[], float]:
    """A function that dispatches one run to an idle GPU without waiting, and returns the seconds of the dispatch."""
    return timed(queue_run(session, binding), before=binding.synchronize_outputs)


def open_runner(model: Path, device: str = "auto", *, dims: Mapping[str, int] | None = None, io: str = "device",
                cuda_graph: bool = False, profile_prefix: Path | None = None,
                provider_options: Mapping[str, str] | None = None, static: bool = False,
                inputs: Path | None = None) -> Runner:
    """Opens a file to run: optimised as ORT does by default, or unchanged if it is a built kernel, which has its own inputs.

    If an input decides the branch of an If and `dims` does not, a run takes the branch that a prediction counts. With
    `cuda_graph` the first run is captured and then replayed. `static`: `dims` are fixed before ONNX Runtime optimises the
    model; otherwise the session takes any sizes. Raises UserError if a dynamic dimension has no size.
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
