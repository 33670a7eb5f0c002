"""Exports torchvision's models as ONNX files, and ONNX Runtime's optimised graphs of them.

Exporting runs in a process of its own, so that a crash affects only one model. Each file is checked before it gets its final
name.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import multiprocessing
import signal
import warnings
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from hase.model_zoo.exporting.torch_models import SEED, build, check_names, group_of, is_sized, reference, weight_bytes
from hase.model_zoo.exporting.zoo_config import SMALLEST_IMAGE, Export
from hase.runtimes import local_flavour, local_target
from hase.utils import files, logger
from hase.utils.errors import UserError, user_can_fix
from hase.utils.fingerprint import ort_version, package_version
from hase.utils.lazy import onnx, onnxruntime, torch
from hase.utils.model_files import COLLECTION_KEY, DEFAULT_DIMS_KEY, GROUP_KEY
from hase.utils.ort_sessions import model_errors, open_session
from hase.utils.paths import OPTIMIZED_SUFFIX, Workspace
from hase.utils.processes import begin_child, exit_cause

EXPORTER_VERSION = 2  # files of another version are exported again
LARGEST_FILE = 2**31 - 2**20  # bytes: protobuf's limit, minus room for the graph
LIMITS = {"batch": (1, 65536), "height": (SMALLEST_IMAGE, 8192), "width": (SMALLEST_IMAGE, 8192)}  # of dynamic dimensions

# The largest allowed difference between ORT's outputs and torch's float32 outputs, relative to the largest output of torch.
# Float32 rounding gives 1e-7 to 4e-5. Products rounded to 10 bits (fp16, and TF32, which ORT's CUDA provider uses for float32)
# give 1e-3, which grows to at most 0.06 in a deep model with random weights. A wrong weight or layout gives about 1.
TOLERANCE = {"fp32": 1e-3, "reduced": 0.1}
STOP_SECONDS = 10.0
log = logger.get_logger("exporter")


class ModelSource:
    """Builds torch models on demand, and keeps the last one for the next export, which is often of the same model."""

    def __init__(self) -> None:
        self._key: Any = None
        self._model: Any = None

    def get(self, export: Export) -> torch.nn.Module:
        key = (export.model, export.dtype, export.size if is_sized(export.model) else None)
        if key != self._key:
            self._model = None  # frees its memory before the next one is built
            self._model, self._key = build(export.model, export.dtype, export.size), key
        return self._model


def export_metadata(export: Export) -> dict[str, str]:
    """The metadata of an exported file. An existing file with the same metadata is kept."""
    dims = {DEFAULT_DIMS_KEY: json.dumps(export.default_dims)} if export.batch is None else {}
    return dims | {
        GROUP_KEY: group_of(export.model), COLLECTION_KEY: "torchvision",
        "hase.exporter": str(EXPORTER_VERSION), "hase.model": export.model, "hase.dtype": export.dtype,
        "hase.batch": ("alone open" if export.batch_alone else "open") if export.batch is None else str(export.batch),
        "hase.size": "x".join(map(str, export.size)),
        "hase.torch": package_version("torch"), "hase.torchvision": package_version("torchvision")}


def optimized_metadata(export: Export, device: str) -> dict[str, str]:
    """The metadata of an optimised graph; it does not depend on the machine that wrote it."""
    flavour = json.dumps(local_flavour(device).model_dump(), sort_keys=True)
    return export_metadata(export) | {"hase.flavour": flavour, "hase.onnxruntime": ort_version()}


def has_metadata(path: Path, expected: Mapping[str, str]) -> bool:
    """Whether `path` is an undamaged ONNX file with at least this metadata."""
    if not path.is_file():
        return False
    try:
        metadata = {prop.key: prop.value for prop in onnx.load(path).metadata_props}
    except DecodeError:
        return False
    return expected.items() <= metadata.items()


def add_metadata(proto: onnx.ModelProto, properties: Mapping[str, str]) -> None:
    """Adds metadata to a model, in place; a key that is there gets the new value."""
    known = {prop.key: prop.value for prop in proto.metadata_props}
    onnx.helper.set_model_props(proto, known | dict(properties))


@contextlib.contextmanager
def silent_exporter() -> Iterator[None]:
    """Silences torch's exporter: what it prints, its warnings, and its log of failed attempts, which the caller handles."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def trace(model: torch.nn.Module, export: Export, open_dims: Mapping[int, str]) -> onnx.ModelProto:
    """The model as exported by torch. `open_dims` are the names of the input's dynamic dimensions, by axis."""
    size = weight_bytes(model)
    if size > LARGEST_FILE:
        raise UserError(f"{export.model} has {size / 1e9:.1f} GB of weights in {export.dtype}; one ONNX file holds 2 GB at most"
                        + ("; try --dtype fp16" if export.dtype == "fp32" and size < 2 * LARGEST_FILE else ""))
    dtype = torch.float16 if export.dtype == "fp16" else torch.float32
    images = torch.zeros(export.batch or 2, 3, *export.size, dtype=dtype)  # a traced batch of 1 would stay 1
    dims = {axis: torch.export.Dim(name, min=LIMITS[name][0], max=LIMITS[name][1]) for axis, name in open_dims.items()}
    try:
        with silent_exporter():
            proto = exported(model, (images,), ["input"], (dims,) if dims else None, ["output"])
    finally:
        torch._dynamo.reset()  # its caches keep every traced model
    return remove_paths(proto)


def exported(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], input_names: list[str], shapes: tuple[Any, ...] | None,
             output_names: list[str] | None = None) -> onnx.ModelProto:
    """A module as torch's exporter writes it; `shapes` has torch's dynamic dimensions of each input."""
    program = torch.onnx.export(module, inputs, dynamo=True, external_data=False, verbose=False, input_names=input_names,
                                output_names=output_names, dynamic_shapes=shapes)
    if program is None:
        raise RuntimeError("torch.onnx.export returned nothing")
    return program.model_proto


def remove_paths(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Removes this machine's paths, which torch's exporter writes into every node, in place; returns `proto`."""
    for node in proto.graph.node:
        kept = [prop for prop in node.metadata_props if prop.key != "pkg.torch.onnx.stack_trace"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    return proto


def relative_difference(actual: Any, expected: Any) -> float:
    """The largest difference, relative to the largest expected value; infinite if the shapes differ."""
    if actual.shape != expected.shape:
        return float("inf")
    return float(np.abs(actual.astype(np.float32) - expected).max() / np.abs(expected).max())


def check_outputs(path: Path, device: str, optimize: str, images: Any, expected: Any, dtype: str) -> float:
    """Runs the file on `images` and returns the `relative_difference` of its outputs from `expected`. Raises UserError if that
    is larger than TOLERANCE."""
    name = "ORT's optimised graph" if optimize == "none" else "the exported graph"  # not the path, which is temporary
    session = open_session(path, device, optimize=optimize, name=name)
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4  # errors are raised as exceptions, too
    with model_errors(name):
        error = relative_difference(session.run(None, {"input": images}, options)[0], expected)
    tolerance = TOLERANCE["fp32" if dtype == "fp32" and device == "cpu" else "reduced"]
    if not error <= tolerance:  # NaN, too
        raise UserError(f"its outputs differ from torch's by {error:.2g} of the largest; {tolerance:g} is allowed")
    return error


class Exporter:
    """Writes and checks files, one export after another; optimised graphs and checks are for `device`."""

    def __init__(self, workspace: Workspace, device: str, force: bool) -> None:
        self.workspace, self.device, self.force = workspace, device, force
        self._models = ModelSource()
        self._reference: tuple[Any, Any] | None = None  # of the current export

    check_names = staticmethod(check_names)

    def write(self, export: Export) -> list[dict[str, Any]]:
        """Writes the files of one export, or keeps existing ones; returns one row per file."""
        self._reference = None  # a failed export may have left its own
        plain = self.workspace.models / f"{export.stem}.onnx"
        kept = not self.force and has_metadata(plain, export_metadata(export))
        rows = [self._row(export, plain, None if kept else self._write_plain(export, plain))]
        if export.batch is not None:
            optimized = plain.with_name(f"{export.stem}.{local_flavour(self.device).name}{OPTIMIZED_SUFFIX}")
            kept = kept and has_metadata(optimized, optimized_metadata(export, self.device))
            rows.append(self._row(export, optimized, None if kept else self._write_optimized(export, plain, optimized)))
        self._reference = None
        gc.collect()
        return rows

    def _row(self, export: Export, path: Path, error: float | None) -> dict[str, Any]:
        log.debug("%s: %s", path.name, "kept" if error is None else f"written, outputs within {error:.2g} of torch's")
        return {"model": export.model, "file": str(path), "status": "kept" if error is None else "written",
                "mb": round(path.stat().st_size / 1e6, 2), "difference": error}

    def _images_and_outputs(self, export: Export, batch: int, size: tuple[int, int]) -> tuple[Any, Any]:
        images = np.random.default_rng(SEED).standard_normal((batch, 3, *size), dtype=np.float32)
        images = images.astype(np.float16) if export.dtype == "fp16" else images
        outputs = reference(self._models.get(export), images, self.device)
        if not np.isfinite(outputs).all() or not outputs.any():
            raise UserError(f"{export.model} in {export.dtype}: torch's own outputs are all zero or not finite, "
                            "so nothing can be compared with them")
        return images, outputs

    def _reference_for(self, export: Export) -> tuple[Any, Any]:
        """Images of the export's shape and torch's outputs for them; computed once for both files."""
        if self._reference is None:
            self._reference = self._images_and_outputs(export, export.batch or 1, export.size)
        return self._reference

    def _write_plain(self, export: Export, path: Path) -> float:
        if export.batch is not None:
            return self._save_checked(trace(self._models.get(export), export, {}), export, path, [(export.batch, export.size)])
        if export.batch_alone:
            return self._write_open(export, path, {0: "batch"})
        reason = f"{export.model} is built for one size"
        if not is_sized(export.model):
            try:
                return self._write_open(export, path, {0: "batch", 2: "height", 3: "width"})
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever fails here, a dynamic batch alone may still work
                reason = short_message(error)
        log.info("%s: only the batch is dynamic, images are %dx%d (%s)", path.name, *export.size, reason)
        return self._write_open(export, path, {0: "batch"})

    def _write_open(self, export: Export, path: Path, open_dims: Mapping[int, str]) -> float:
        """Writes a file with dynamic dimensions, checked at two shapes, since tracing can fix a size unnoticed."""
        proto = trace(self._models.get(export), export, open_dims)
        dim_names = [dim.dim_param for dim in proto.graph.input[0].type.tensor_type.shape.dim]
        if any(dim_names[axis] != name for axis, name in open_dims.items()):
            raise UserError("torch.export fixed a dimension that was to be dynamic")
        height, width = export.size
        other_size = (height + 32, width + 64) if 2 in open_dims else export.size
        return self._save_checked(proto, export, path, [(1, export.size), (3, other_size)])

    def _save_checked(self, proto: onnx.ModelProto, export: Export, path: Path,
                      shapes: list[tuple[int, tuple[int, int]]]) -> float:
        """Checks a plain file by onnx.checker and a run at each of `shapes`, then saves it; returns the largest difference."""
        add_metadata(proto, export_metadata(export))
        with files.replacing(path) as temporary:
            onnx.save(proto, temporary)
            del proto
            onnx.checker.check_model(str(temporary))
            worst = 0.0
            for batch, size in shapes:
                as_exported = (batch, size) == (export.batch, export.size)
                images, expected = (self._reference_for(export) if as_exported
                                    else self._images_and_outputs(export, batch, size))
                worst = max(worst, check_outputs(temporary, self.device, "all", images, expected, export.dtype))
        return worst

    def _write_optimized(self, export: Export, plain: Path, path: Path) -> float:
        """Checks ORT's optimised graph by a run without further optimisation, and saves it; returns the difference."""
        with files.replacing(path) as temporary:
            open_session(plain, self.device, save_to=temporary, name=plain.name)
            proto = onnx.load(temporary)
            target = local_target(self.device).name
            add_metadata(proto, optimized_metadata(export, self.device) | {"hase.target": target})
            onnx.save(proto, temporary)
            if all(node.domain in ("", "ai.onnx") for node in proto.graph.node):  # the checker does not know contrib operators
                onnx.checker.check_model(str(temporary))
            del proto
            return check_outputs(temporary, self.device, "none", *self._reference_for(export), export.dtype)


def short_message(error: BaseException) -> str:
    """The message of an error in one line of about 200 characters at most."""
    cause = error.__cause__ or error
    text = " ".join(str(cause).split()) or type(cause).__name__
    return text if len(text) <= 200 else text[:200] + " …"


class ExportProcess:
    """An Exporter in another process, started at the first request and again after a crash. A context manager."""

    def __init__(self, workspace: Workspace, device: str, force: bool) -> None:
        self._exporter_args = (workspace, device, force)
        self._process: Any = None
        self._connection: Connection | None = None

    def __enter__(self) -> ExportProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop(STOP_SECONDS if kind is None else 0.0)

    def stop(self, grace_s: float = 0.0) -> None:
        """Ends the process, which first removes its unfinished files. The next request starts another one. An idle process gets
        `grace_s` to end by itself, so that it leaves no semaphores behind."""
        if self._connection is not None:
            self._connection.close()
            self._process.join(grace_s)
            self._process.terminate()
            self._process.join(STOP_SECONDS)
            self._process.kill()
            self._process.join()
        self._process, self._connection = None, None

    def check_names(self, names: Iterable[str]) -> None:
        """Raises UserError unless torchvision has all these models."""
        self._ask("check_names", tuple(names))

    def write(self, export: Export) -> list[dict[str, Any]]:
        """Writes the files of one export, or keeps existing ones; returns one row per file."""
        try:
            rows: list[dict[str, Any]] = self._ask("write", export)
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self.stop()
            for unfinished in self._exporter_args[0].models.glob(f".{export.stem}.*.tmp.onnx"):
                unfinished.unlink(missing_ok=True)
            if code == -signal.SIGKILL:
                raise UserError("the exporting process was killed, most likely for lack of memory: "
                                "try a smaller batch or image size") from None
            raise UserError(f"torch or ONNX Runtime crashed while exporting it ({exit_cause(code)})") from None
        return rows

    def _ask(self, request: str, argument: Any) -> Any:
        """The answer to a request. An error in the process is raised here; EOFError if the process crashed."""
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            handlers = logging.getLogger("hase").handlers
            quiet = all(handler.level > logging.INFO for handler in handlers if not isinstance(handler, logging.FileHandler))
            self._process = context.Process(target=_serve, args=(theirs, self._exporter_args, quiet), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._connection.send((request, argument))
            answer = self._connection.recv()
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(connection: Connection, exporter_args: tuple[Workspace, str, bool], quiet: bool) -> None:
    """Answers requests until the other process closes its end or ends."""
    begin_child()
    logger.configure(exporter_args[0].log_file, quiet=quiet)
    exporter = Exporter(*exporter_args)
    while True:
        try:
            request, argument = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(exporter, request)(argument)
        except UserError as error:
            answer = error
        except OSError as error:
            log.debug("%s", argument, exc_info=True)
            answer = error if user_can_fix(error) else UserError(short_message(error))
        except Exception as error:  # if one model fails, the others continue
            log.debug("%s", argument, exc_info=True)
            answer = UserError(short_message(error))
        connection.send(answer)
