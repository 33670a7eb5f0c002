"""Opens ONNX Runtime sessions: providers, options, and readable errors for models that it refuses."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hase.utils.errors import DeviceUnavailable, UserError
from hase.utils.fingerprint import allowed_cores, physical_cores
from hase.utils.lazy import onnx, onnxruntime

PROVIDERS = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
CUDA_GRAPH = {"enable_cuda_graph": "1"}  # options of the CUDA provider: capture a model once, then replay it
NO_CUDA = ("the CUDA provider of ONNX Runtime did not come up, only the CPU's; "
           "it needs the CUDA 13 libraries that torch's wheels bring and a driver that knows CUDA 13")
FATAL = 4  # ORT's number for the log level above errors
PROVIDER_NAMES = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda"}

# The CPU provider fuses activations into these; the CUDA provider does not. With them off, level EXTENDED on a machine
# without a GPU gives the graph that the CUDA provider runs (docs/how_it_works.md says how that was checked).
CPU_ONLY_FUSIONS = ("ConvActivationFusion", "GemmActivationFusion", "MatMulActivationFusion")
NO_MODEL = "not an ONNX model"
FILE_KINDS = (  # files often mistaken for ONNX: identifying bytes, their offset (None: anywhere), what it is and what to do
    (b"version https://git-lfs", 0, "a git-lfs pointer in place of the model; fetch the model with: git lfs pull"),
    (b"<!doctype html", None, "a web page, not the model behind it; download the file itself"),
    (b"<html", None, "a web page, not the model behind it; download the file itself"),
    (b"ortm", 4, "a model in ONNX Runtime's own format (.ort); give the ONNX file that it was made from"),
    (b"/data.pkl", None, "a model of PyTorch (.pt); export it with torch.onnx.export, and give the .onnx file"),
    (b"\x80\x02", 0, "a Python pickle, as PyTorch writes (.pt); export it with torch.onnx.export, and give the .onnx file"),
    (b'{"', 8, "weights alone (.safetensors); export the model to ONNX"),
    (b"tfl3", 4, "a model of TensorFlow Lite; convert it to ONNX"),
    (b"\x89hdf", 0, "a model of Keras (HDF5); convert it to ONNX"),
    (b"gguf", 0, "a model of llama.cpp (GGUF); give an ONNX export of it"),
    (b"pk\x03\x04", 0, "a ZIP archive; unpack it, and give the .onnx file in it"),
    (b"\x1f\x8b", 0, "compressed (gzip); unpack it first"),
)
FILE_START = 512  # bytes of a file that are searched for them


@functools.cache
def _load_runtime(device: str) -> Any:
    onnxruntime.set_default_logger_severity(FATAL)  # errors come as exceptions
    if device == "cuda":
        onnxruntime.preload_dlls()  # finds the CUDA libraries in torch's wheels
    return onnxruntime


def open_session(
    model: Path | bytes, device: str, *, optimize: str = "all", disabled: Sequence[str] = (),
    dims: Mapping[str, int] | None = None, save_to: Path | None = None, profile_prefix: Path | None = None,
    provider_options: Mapping[str, str] | None = None, name: str = "", entries: Mapping[str, str] | None = None,
    threads: int = 0, weights: Mapping[str, np.ndarray] | None = None, plan_memory: bool = True,
) -> onnxruntime.InferenceSession:
    """An inference session with ORT's defaults, changed only by the arguments.

    Args:
        optimize: `all`, `extended`, `basic` or `none`.
        disabled: ORT's names of optimisers to switch off.
        dims: sizes of dynamic dimensions, fixed before optimising.
        save_to: where ORT writes the optimised graph.
        profile_prefix: turns ORT's profiler on; its file begins with this path.
        name: the model's name in errors; by default its path.
        entries: settings of the session by ORT's keys.
        threads: threads per operator on the CPU. 0 is ORT's choice, or one per allowed core if this process may use only some
            cores: ORT would count all cores and pin threads to forbidden ones.
        weights: values by name, for constants that the model declares as external.
        plan_memory: let ORT allocate memory for all constants at once, which fails if they exceed the memory.

    Raises:
        DeviceUnavailable: the CUDA provider can't be initialised.
    """
    runtime = _load_runtime(device)
    options = runtime.SessionOptions()
    levels = runtime.GraphOptimizationLevel
    options.graph_optimization_level = {
        "all": levels.ORT_ENABLE_ALL, "extended": levels.ORT_ENABLE_EXTENDED,
        "basic": levels.ORT_ENABLE_BASIC, "none": levels.ORT_DISABLE_ALL}[optimize]
    options.log_severity_level = FATAL
    options.intra_op_num_threads = threads or (physical_cores() if device == "cpu" and allowed_cores() else 0)
    options.enable_mem_pattern = plan_memory
    for dim, size in (dims or {}).items():
        options.add_free_dimension_override_by_name(dim, size)
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    if weights:
        options.add_external_initializers(list(weights), list(map(ort_value, weights.values())))
    if save_to is not None:
        options.optimized_model_filepath = str(save_to)
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile_prefix)
    providers: list[Any] = list(PROVIDERS[device])
    if provider_options and device == "cuda":
        providers[0] = (providers[0], dict(provider_options))
    source = model if isinstance(model, bytes) else str(model)
    try:
        with model_errors(name or (str(model) if isinstance(model, Path) else "the model")):
            session = runtime.InferenceSession(source, options, providers=providers, disabled_optimizers=list(disabled))
    except UserError as error:
        if device == "cuda" and not _cuda_initialises():  # the CPU provider alone would refuse GPU-only operators
            raise DeviceUnavailable(NO_CUDA) from error
        raise
    if device == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
        raise DeviceUnavailable(NO_CUDA)
    return session


def _cuda_initialises() -> bool:
    """Whether the CUDA provider can be initialised in this process, tried with a trivial model."""
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "probe",
                                   [value("x", onnx.TensorProto.FLOAT, [1])], [value("y", onnx.TensorProto.FLOAT, [1])])
    model = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)])
    try:
        session = _load_runtime("cuda").InferenceSession(model.SerializeToString(), providers=PROVIDERS["cuda"])
    except Exception:  # noqa: BLE001 - ONNX Runtime raises any exception
        return False
    return "CUDAExecutionProvider" in session.get_providers()


def outputs_by_schema(model: bytes) -> list[onnxruntime.NodeArg]:
    """A model's outputs with types and shapes that ORT infers from the operators' schemas, even without kernels for them. Empty
    if ORT refuses the model; opening a session then gives the reason."""
    runtime = _load_runtime("cpu")
    options = runtime.SessionOptions()
    options.log_severity_level = FATAL
    try:
        # as onnxruntime.InferenceSession does before it chooses kernels
        return list(runtime.capi._pybind_state.InferenceSession(options, model, False, False).outputs_meta)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises any exception
        return []


def ort_value(array: np.ndarray, device: str = "cpu") -> onnxruntime.OrtValue:
    """An array as ONNX Runtime's value on `cpu` (sharing the memory) or `cuda`. ONNX Runtime reads the raw bits of types that
    numpy lacks (bfloat16, float8)."""
    if not array.dtype.name.startswith(("bfloat16", "float8")):
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, device, 0)
    bits, code = array.view(f"uint{8 * array.dtype.itemsize}"), onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    if device == "cpu":
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, code)
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(array.shape), code, device, 0)
    value.update_inplace(bits)
    return value


def open_nodes(nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], shape: Sequence[int], device: str,
               name: str) -> onnxruntime.InferenceSession:
    """A session of a graph of these nodes, without fusions. All tensors are float32 and have the same `shape`."""
    names = (*inputs, nodes[-1].output[0])
    values = [onnx.helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, shape) for value in names]
    graph = onnx.helper.make_graph(nodes, name, values[:-1], values[-1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    return open_session(model.SerializeToString(), device, optimize="none", name=name)


def kind_of_file(path: Path) -> str:
    """What a file is, if not an ONNX model, and what to do; "" if unknown or missing."""
    try:
        with path.open("rb") as file:
            start = file.read(FILE_START).lower()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return ""
    return "an empty file" if not start else next(
        (kind for marker, offset, kind in FILE_KINDS
         if (marker in start if offset is None else start.startswith(marker, offset))), "")


class model_errors:  # lower case, as it is used like a function: `with model_errors(path):`
    """Turns errors of ORT and onnx about the model `name` into a `UserError`; other exceptions pass."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None or error is None or issubclass(kind, UserError):
            return
        if kind is UnicodeDecodeError:  # in a message of ORT's
            raise UserError(f"{self.name}: damaged: it holds text that is not UTF-8") from None
        module = kind.__module__ or ""
        running = kind is RuntimeError and str(error).startswith("Error in execution")  # what IOBinding's runs raise
        if running or module.startswith("onnxruntime.") or module.startswith("google.protobuf") or (
                module.startswith("onnx") and kind.__name__ in ("ValidationError", "InferenceError", "Fail")):
            message = advise(str(error))
            if message.startswith(NO_MODEL) and (file_kind := kind_of_file(Path(self.name))):
                message = f"{NO_MODEL}: this is {file_kind}"
            raise UserError(f"{self.name}: {message}") from None


def advise(message: str) -> str:
    """The last sentence of ORT's message, preceded by what it means for the user, if that is known."""
    short = " ".join(message.split())
    short = short.split(" : ")[-1] if short.startswith("[ONNXRuntimeError]") else short
    short = short if len(short) <= 300 else short[:300] + " …"
    meanings = (
        (("Protobuf parsing failed", "Error parsing message", "INVALID_PROTOBUF"), f"{NO_MODEL}, or cut short"),
        (("NOT_IMPLEMENTED", "Could not find an implementation", "not a registered function/op", "No Op registered",
          "No opset import"), "holds an operator that this ONNX Runtime can't run"),
        (("External data", "external data", "External initializer", "GetFileLength", "ReadExternal", "file_size: No such file",
          "external_data", "filesystem error"), "its weights lie in a separate file that is missing or too short"),
        (("Failed to construct locale",), "reads text by the rules of a language that is not installed on this machine: "
         "install its locale (Debian: apt-get install locales-all)"),
        (("Failed to serialize proto",),
         "takes over 2 GiB in memory; save it with its weights in a separate file, and name all its dynamic dimensions"),
        (("INVALID_GRAPH", "This is an invalid model"), "not a valid graph"),
        (("Failed to allocate memory", "out of memory", "CUDA_ERROR_OUT_OF_MEMORY"), "does not fit in the memory"),
    )
    for needles, meaning in meanings:
        if any(needle in message for needle in needles):
            return f"{meaning} ({short})"
    return short
