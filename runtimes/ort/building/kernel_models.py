"""A kernel as an ONNX model of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from records.elements import type_code
from records.kernel_record import Kernel, KernelIndex, KernelInput, ModelRecord
from records.kernel_record_files import read_index, read_model_record
from runtimes.ort.building.dummy_data import dummy_inputs, input_name, output_name, random_floats, weight_value
from utils import files
from utils.errors import UserError
from utils.fingerprint import Flavour
from utils.lazy import onnx
from utils.ort_sessions import model_errors, open_session
from utils.paths import Workspace

KERNEL_KEY = "hase.kernel"  # metadata of a built model: its Kernel as JSON
INLINE_BYTES = 1 << 16  # larger weights go to the shared file …
SHARED_TYPES = {"float32", "float16"}  # … if they are of these types
IR_VERSION = 10


def kernel_node(kernel: Kernel, inputs: list[str], outputs: list[str], name: str) -> onnx.NodeProto:
    """The kernel's node with the given tensor names.

    Raises:
        UserError: the kernel holds a subgraph, of which records keep only a hash, or takes or gives what is no tensor.
    """
    node = onnx.helper.make_node(kernel.op_type, inputs, outputs, name=name, domain=kernel.domain)
    if kernel.subgraphs:
        raise UserError(f"{kernel.id}: holds a subgraph ({kernel.subgraphs[0]}); such a kernel can't be built alone")
    if other := next((t.dtype for t in (*kernel.inputs, *kernel.outputs) if t.present and not t.is_tensor), None):
        raise UserError(f"{kernel.id}: takes or gives a {other}, and only kernels of tensors can be built alone")
    for key, value in sorted(kernel.attributes.items()):
        if isinstance(value, dict):
            tensor_type = type_code(value["dtype"])
            value = onnx.helper.make_tensor(key, tensor_type, value["shape"], value["values"])
        if value == []:
            continue
        node.attribute.append(onnx.helper.make_attribute(key, value))
    return node


def shareable(tensor: KernelInput) -> bool:
    """Whether a constant's value does not matter and it is large enough to lie outside the model's file."""
    return tensor.constant and tensor.bytes > INLINE_BYTES and tensor.dtype in SHARED_TYPES


def build_model(kernel: Kernel, weights: Mapping[int, np.ndarray] | None = None,
                shared: Callable[[str, KernelInput], onnx.TensorProto] | None = None) -> onnx.ModelProto:
    """The kernel as a model: one node, typed inputs `x<i>`, constants inside, outputs `y<i>`.

    Args:
        kernel: what to build.
        weights: values of constant inputs by position; random ones where not given.
        shared: makes a large weight that lies elsewhere, from its name and description; else weights lie inside.
    """
    names = [input_name(i) if tensor.present else "" for i, tensor in enumerate(kernel.inputs)]
    outs = [output_name(i) if tensor.present else "" for i, tensor in enumerate(kernel.outputs)]
    graph = onnx.helper.make_graph(
        [kernel_node(kernel, names, outs, kernel.type)], "kernel",
        [onnx.helper.make_tensor_value_info(names[i], type_code(t.dtype), t.shape)
         for i, t in enumerate(kernel.inputs) if t.present and not t.constant],
        [onnx.helper.make_tensor_value_info(outs[i], type_code(t.dtype), t.shape)
         for i, t in enumerate(kernel.outputs) if t.present],
        [shared(names[i], t) if shared and shareable(t)
         else onnx.numpy_helper.from_array(np.asarray(weight_value(kernel, i, weights), order="C"), names[i])
         for i, t in enumerate(kernel.inputs) if t.present and t.constant],
    )
    opsets = {kernel.domain: kernel.opset} | ({} if kernel.domain == "" else {"": 20})
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in opsets.items()],
                              ir_version=IR_VERSION, producer_name="hase")
    model.metadata_props.append(onnx_prop(KERNEL_KEY, kernel.model_dump_json()))
    return model


def onnx_prop(key: str, value: str) -> onnx.StringStringEntryProto:
    """A metadata entry of a model."""
    return onnx.StringStringEntryProto(key=key, value=value)


def shared_weight(folder: Path, name: str, tensor: KernelInput) -> onnx.TensorProto:
    """A weight that lies in the file of random numbers of its type in `folder`, which grows as needed."""
    shared = folder / f"random_{tensor.dtype}.bin"
    if not shared.exists() or shared.stat().st_size < tensor.bytes:
        files.write_bytes(shared, random_floats((tensor.elements,), tensor.dtype).tobytes())
    made = onnx.TensorProto(name=name, data_type=type_code(tensor.dtype), dims=tensor.shape,
                            data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", shared.name), ("offset", "0"), ("length", str(tensor.bytes))):
        made.external_data.append(onnx.StringStringEntryProto(key=key, value=value))
    return made


def kernel_build(kernel: Kernel, folder: Path, weights: Mapping[int, np.ndarray] | None = None) -> Path:
    """Writes `kernel` to `<folder>/<kernel id>.onnx` and returns the path.

    Args:
        kernel: what to build.
        folder: where; made if missing.
        weights: values of constant inputs by position (then they are written into the file).

    Raises:
        UserError: the kernel can't be built alone, or a tensor's type has no numpy counterpart.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = build_model(kernel, weights, functools.partial(shared_weight, folder) if weights is None else None)
    path = folder / f"{kernel.id}.onnx"
    files.write_bytes(path, model.SerializeToString())
    return path


def built_kernel(path: Path) -> Kernel:
    """The description of the kernel in a file that `kernel_build` wrote.

    Raises:
        UserError: no ONNX, or no kernel of Hase's.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with model_errors(str(path)):
        model = onnx.load(str(path), load_external_data=False)
    kernel = kernel_in(model, str(path))
    if kernel is None:
        raise UserError(f"{path}: an ONNX model, but not a kernel that kernel_builder.py wrote")
    return kernel


def kernel_in(model: onnx.ModelProto, name: str) -> Kernel | None:
    """The kernel that a built model describes in its metadata; None for any other model.

    Raises:
        UserError: the description is damaged; `name` says whose.
    """
    found = [prop.value for prop in model.metadata_props if prop.key == KERNEL_KEY]
    try:
        return Kernel.model_validate_json(found[0]) if found else None
    except ValidationError as error:
        raise UserError(f"{name}: the description of its kernel is damaged ({error.errors()[0]['msg']}); build it anew: "
                        "python kernel_model/kernel_builder.py --force") from None


def check_kernel(path: Path, kernel: Kernel, device: str) -> None:
    """Runs a built kernel once on dummy inputs.

    Raises:
        UserError: it does not load or run, or gives NaN.
    """
    session = open_session(path, device, optimize="none")
    with model_errors(str(path)):
        outputs = session.run(None, dummy_inputs(kernel))
    if any(np.issubdtype(out.dtype, np.floating) and np.isnan(out).any() for out in map(np.asarray, outputs)):
        raise UserError(f"{path}: gives NaN on its dummy inputs")


def read_kernels(path: Path) -> tuple[Flavour | None, list[Kernel]]:
    """The kernels in a model's record, an index, or a single kernel's JSON, with their flavour (None for the last).

    Raises:
        UserError: no such file, or none of the three.
    """
    data = files.read_json(path)
    if isinstance(data, dict) and "nodes" in data:
        record: ModelRecord = read_model_record(path)
        return record.flavour, list(record.kernels.values())
    if isinstance(data, dict) and "op_type" in data:
        try:
            return None, [Kernel.model_validate(data)]
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"{path}: not a kernel: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    index: KernelIndex = read_index(path)
    return index.flavour, index.all_kernels()


def default_sources(workspace: Workspace) -> list[Path]:
    """The index of every flavour that was analysed; `UserError` where there is none."""
    found = sorted(workspace.kernel_records.glob("*/index.json"))
    if not found:
        raise UserError(f"{workspace.kernel_records}: no kernel records; make them with: "
                        "python ort_analysis/fusion_detector.py")
    return found
