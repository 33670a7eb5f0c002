"""The graphs that probe_kernels.py tries: one operator at one version, with given types."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hase.records.kernel_record import session_dtype, type_code
from hase.utils.lazy import onnx, onnxruntime

ONNX_OPSET = 21  # of a graph with an operator of another domain: its Identity takes all element types
MOST_COMBINATIONS = 300  # up to this many combinations of types are all tried; beyond, two type variables at a time
TYPES = ("float", "float16", "bfloat16", "double", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
         "bool", "string", "int4", "uint4", "float8e4m3fn", "float8e5m2")
LEFT_OUT = {("LSTM", "P")}  # with these optional inputs the CUDA provider refuses an operator although it has a kernel
# Values of attributes for which the usual value would not load.
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "Einsum": {"equation": "ij->ij"}, "BiasSoftmax": {"is_inner_broadcast": 1}, "LRN": {"size": 3},
    "DepthToSpace": {"blocksize": 2}, "SpaceToDepth": {"blocksize": 2}, "MatMulNBits": {"K": 32, "N": 32, "bits": 4,
                                                                                          "block_size": 32},
    "BitShift": {"direction": "LEFT"}, "Upsample": {"scales": [1.0, 1.0], "mode": "nearest"}, "StringNormalizer": {},
    "GatherBlockQuantized": {"block_size": 32}, "MatMulBnb4": {"K": 64, "N": 64, "block_size": 64, "quant_type": 1},
    "RNN": {"hidden_size": 4}, "LSTM": {"hidden_size": 4}, "GRU": {"hidden_size": 4, "linear_before_reset": 1},
    "MaxUnpool": {"kernel_shape": [1, 1]},
    "GroupNorm": {"groups": 2, "activation": 0}, "SkipGroupNorm": {"groups": 2, "activation": 0},
    "Affine": {"alpha": 1.0, "beta": 0.0}, "QMoE": {"expert_weight_bits": 4},
    "SparseAttention": {"num_heads": 2, "kv_num_heads": 2, "sparse_block_size": 64},
    "FusedConv": {"activation": "Relu"}, "Inverse": {}, "TfIdfVectorizer": {},
}


@dataclass(frozen=True)
class Probe:
    """One graph: an operator at a version, with one type for each of its type variables.

    Attributes:
        inputs, outputs: of the node: the type variable (or fixed type) of each.
        types: by type variable, in ONNX Runtime's spelling (`tensor(float)`).
    """

    domain: str
    op_type: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: tuple[tuple[str, str], ...]
    attributes: tuple[tuple[str, Any], ...]


@functools.cache
def schemas() -> list[Any]:
    return list(onnxruntime.capi.onnxruntime_pybind11_state.get_all_operator_schema())


def tensor_types(allowed: Sequence[str]) -> list[str]:
    """The tensor types in `allowed` that are tried, the usual ones first."""
    return [f"tensor({name})" for name in TYPES if f"tensor({name})" in allowed]


def combinations(variables: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """All combinations of types; if there are too many, all combinations for each pair of variables, with two usual types for
    the others."""
    names = list(variables)
    if not names:
        yield {}
        return
    total = 1
    for name in names:
        total *= len(variables[name])
    if total <= MOST_COMBINATIONS:
        for types in itertools.product(*variables.values()):
            yield dict(zip(names, types, strict=True))
        return
    seen: set[tuple[tuple[str, str], ...]] = set()
    for usual in ("tensor(float)", "tensor(float16)"):
        base = {name: usual if usual in variables[name] else variables[name][0] for name in names}
        for first, second in itertools.combinations(names, 2):
            for pair in itertools.product(variables[first], variables[second]):
                chosen = base | dict(zip((first, second), pair, strict=True))
                key = tuple(sorted(chosen.items()))
                if key not in seen:
                    seen.add(key)
                    yield chosen


def usual_attribute(name: str, attribute: Any) -> Any:
    """A valid value of a required attribute."""
    kind = str(attribute.type).rsplit(".", 1)[-1]
    if kind == "INT":
        return 1
    if kind == "FLOAT":
        return 1.0
    if kind == "STRING":
        return "a"
    if kind == "INTS":
        return [1, 1] if "shape" in name or "pads" in name or name == "scales" else [0]
    if kind == "FLOATS":
        return [1.0, 1.0]
    return None


def probes_of(schema: Any, with_optional: bool) -> Iterator[Probe]:
    """The probes of one operator at one version.

    Args:
        schema: as ONNX Runtime describes the operator.
        with_optional: also with its optional inputs.
    """
    variables: dict[str, list[str]] = {}
    constraints = {constraint.type_param_str: list(constraint.allowed_type_strs) for constraint in schema.type_constraints}

    def formals(parameters: Sequence[Any], most: int) -> tuple[str, ...]:
        type_names: list[str] = []
        for parameter in parameters:
            option = str(parameter.option).rsplit(".", 1)[-1]
            left_out = option == "Optional" and (not with_optional or (schema.name, parameter.name) in LEFT_OUT)
            type_names += [""] if left_out else [parameter.typeStr] * (2 if option == "Variadic" and most > 1 else 1)
        while type_names and not type_names[-1]:
            type_names.pop()
        return tuple(type_names)

    inputs, outputs = formals(schema.inputs, 2), formals(schema.outputs, 1)
    for name in dict.fromkeys(inputs + outputs):
        if name in constraints:
            variables[name] = tensor_types(constraints[name])
    if any(not types for types in variables.values()):
        return  # sequences and maps: no CUDA tensor
    given = ATTRIBUTES.get(schema.name, {})
    attributes = {name: given.get(name, usual_attribute(name, attribute)) for name, attribute in schema.attributes.items()
                  if attribute.required or name in given}
    if any(value is None for value in attributes.values()):
        return
    for chosen in combinations(variables):
        extra = dict(attributes)
        if schema.name == "Cast":
            extra["to"] = chosen["T2"]
        if schema.name in ("EyeLike", "RandomNormalLike", "RandomUniformLike", "Bernoulli") and "T2" in chosen:
            extra["dtype"] = chosen["T2"]
        yield Probe(schema.domain, schema.name, schema.since_version, inputs, outputs, tuple(sorted(chosen.items())),
                    tuple(sorted(extra.items(), key=lambda item: item[0])))


def element_type(text: str) -> int:
    """ONNX's number of `tensor(float)`."""
    return type_code(session_dtype(text))


def graph_of(probes: Sequence[Probe], opset: int) -> bytes:
    """A model with the graphs of several probes of one operator version, not connected to each other."""
    nodes, inputs, outputs = [], [], []
    for number, probe in enumerate(probes):
        types = dict(probe.types)

        def kind(name: str, types: dict[str, str] = types) -> str:
            return types.get(name, name)

        fed = []
        for place, name in enumerate(probe.inputs):
            if not name:
                fed.append("")
                continue
            tensor = f"x{number}_{place}"
            inputs.append(onnx.helper.make_tensor_value_info(tensor, element_type(kind(name)), None))
            nodes.append(onnx.helper.make_node("Identity", [tensor], [f"i{number}_{place}"], name=f"in{number}_{place}"))
            fed.append(f"i{number}_{place}")
        attributes: dict[str, Any] = {name: element_type(value) if name in ("to", "dtype") and isinstance(value, str) else value
                      for name, value in probe.attributes}
        made = [f"o{number}_{place}" if name else "" for place, name in enumerate(probe.outputs)]
        nodes.append(onnx.helper.make_node(probe.op_type, fed, made, name=f"op{number}", domain=probe.domain, **attributes))
        for place in (place for place, name in enumerate(made) if name):
            nodes.append(onnx.helper.make_node("Identity", [made[place]], [f"y{number}_{place}"], name=f"out{number}_{place}"))
            outputs.append(onnx.helper.ValueInfoProto(name=f"y{number}_{place}"))
    graph = onnx.helper.make_graph(nodes, "probe", inputs, outputs)
    domains = {"": ONNX_OPSET if probes[0].domain else opset, "com.microsoft": 1}
    if probes[0].domain not in ("", "com.microsoft"):
        domains[probes[0].domain] = probes[0].version
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in domains.items()]
    return bytes(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
