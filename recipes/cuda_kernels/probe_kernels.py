"""Finds which operators ONNX Runtime's CUDA provider runs, by asking it: one small graph per operator, version and types.

Needs an NVIDIA GPU. Reads the operator schemas of the installed ONNX Runtime and writes its answers; `--table` makes of them
the table by which `ort_analysis` assigns nodes to providers on machines without a GPU (no GPU needed, but the same version):

    python recipes/cuda_kernels/probe_kernels.py --out answers.json
    python recipes/cuda_kernels/probe_kernels.py --table answers.json --out ort_analysis/cuda/cuda_kernels.json

Each graph is `input → Identity → operator → Identity → output`, opened without optimisation. Where the operator went says
whether the CUDA provider has a kernel for these types. The Memcpy nodes around it say which of its inputs and outputs the
kernel keeps in host memory. A combination that no provider runs fails to load, and is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import functools
import itertools
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ort_analysis.records.elements import session_dtype, type_code
from utils import cli, files
from utils.fingerprint import ort_version
from utils.lazy import onnx, onnxruntime
from utils.logger import get_logger
from utils.processes import process_pool

log = get_logger("probe")
DOMAINS = ("", "com.microsoft", "ai.onnx.ml")
ONNX_OPSET = 21  # of a graph whose operator is of another domain: Identity takes all element types there
OLDEST_OPSET = 7  # ONNX Runtime promises nothing for older ones
MOST_COMBINATIONS = 300  # of an operator's types that are tried exhaustively; beyond, two type variables at a time
BATCH = 64  # graphs opened in one session, as long as all of them load
TYPES = ("float", "float16", "bfloat16", "double", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
         "bool", "string", "int4", "uint4", "float8e4m3fn", "float8e5m2")
PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]
SKIPPED = {"Constant", "ATen", "If", "Loop", "Scan", "BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch", "Optional",
           "SequenceMap", "ExpandDims"}
LEFT_OUT = {("LSTM", "P")}  # optional inputs for which the CUDA provider refuses an operator that it has a kernel for
# Values of attributes where the type's usual value would not load.
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
        types: by type variable, as ONNX Runtime spells them (`tensor(float)`).
    """

    domain: str
    op_type: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: tuple[tuple[str, str], ...]
    attributes: tuple[tuple[str, Any], ...]


@dataclass
class Found:
    """What a session made of a probe: whether CUDA ran it, and which inputs and outputs lay in host memory."""

    cuda: bool
    host_inputs: list[int] = field(default_factory=list)
    host_outputs: list[int] = field(default_factory=list)


def tensor_types(allowed: Sequence[str]) -> list[str]:
    """The tensor types among `allowed` that are tried, the usual ones first."""
    return [f"tensor({name})" for name in TYPES if f"tensor({name})" in allowed]


def combinations(variables: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Every choice of types, or, where there are too many, every choice for each pair of variables around two usual ones."""
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
    """A value that a required attribute may take."""
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
        with_optional: give it its optional inputs too.
    """
    variables: dict[str, list[str]] = {}
    constraints = {one.type_param_str: list(one.allowed_type_strs) for one in schema.type_constraints}

    def formals(parameters: Sequence[Any], most: int) -> tuple[str, ...]:
        found: list[str] = []
        for parameter in parameters:
            option = str(parameter.option).rsplit(".", 1)[-1]
            left_out = option == "Optional" and (not with_optional or (schema.name, parameter.name) in LEFT_OUT)
            found += [""] if left_out else [parameter.typeStr] * (2 if option == "Variadic" and most > 1 else 1)
        while found and not found[-1]:
            found.pop()
        return tuple(found)

    inputs, outputs = formals(schema.inputs, 2), formals(schema.outputs, 1)
    for name in dict.fromkeys(inputs + outputs):
        if name in constraints:
            variables[name] = tensor_types(constraints[name])
    if any(not types for types in variables.values()):
        return  # sequences and maps: no CUDA tensor
    given = ATTRIBUTES.get(schema.name, {})
    attributes = {name: given.get(name, usual_attribute(name, one)) for name, one in schema.attributes.items()
                  if one.required or name in given}
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
    """A model that holds the graphs of several probes of one operator version side by side."""
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


def read_session(model: bytes, probes: Sequence[Probe], folder: Path) -> list[Found]:
    """Opens probes' graphs and reads what became of each; whatever ONNX Runtime raises passes."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    saved = folder / "saved.onnx"
    options.optimized_model_filepath = str(saved)
    session = onnxruntime.InferenceSession(model, options, providers=PROVIDERS)
    providers = {node.name: part.ep_name for part in session.get_provider_graph_assignment_info() for node in part.get_nodes()}
    graph = onnx.load(str(saved)).graph
    by_name = {node.name: node for node in graph.node}
    copies = {node.output[0] for node in graph.node if node.op_type.startswith("Memcpy")}
    consumers = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            consumers[name].append(node)
    found = []
    for number, probe in enumerate(probes):
        cuda = providers.get(f"op{number}") == "CUDAExecutionProvider"
        one = Found(cuda)
        if cuda:
            node = by_name[f"op{number}"]
            one.host_inputs = [place for place in range(len(probe.inputs)) if node.input[place] in copies]
            for place in range(len(probe.outputs)):
                after = providers.get(f"out{number}_{place}")
                reader = by_name.get(f"out{number}_{place}")
                copied = reader is not None and reader.input[0] in copies
                if after is not None and (after == "CUDAExecutionProvider") == copied:
                    one.host_outputs.append(place)
        found.append(one)
    return found


def ask(probes: Sequence[Probe], opset: int, folder: Path) -> list[tuple[Probe, Found | str]]:
    """What becomes of each probe; an error's text where no provider runs it. Probes that fail together are asked apart."""
    try:
        return list(zip(probes, read_session(graph_of(probes, opset), probes, folder), strict=True))
    except Exception as error:  # noqa: BLE001 - ONNX Runtime raises whatever it likes for graphs that make no sense
        if len(probes) == 1:
            return [(probes[0], " ".join(str(error).split())[:300])]
        half = len(probes) // 2
        return ask(probes[:half], opset, folder) + ask(probes[half:], opset, folder)


@functools.cache
def _schemas() -> list[Any]:
    return list(onnxruntime.capi.onnxruntime_pybind11_state.get_all_operator_schema())


def one_schema(name: str, domain: str, version: int, opset: int) -> dict[str, Any]:
    """All that is found about one operator at one version."""
    onnxruntime.set_default_logger_severity(4)
    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    schema = next(one for one in _schemas()
                  if (one.name, one.domain, one.since_version) == (name, domain, version))
    answers: dict[tuple[tuple[str, str], ...], Found | str] = {}
    shapes: dict[str, tuple[str, ...]] = {}
    with tempfile.TemporaryDirectory(prefix="hase-probe-") as folder:
        for with_optional in (True, False):
            probes = [probe for probe in probes_of(schema, with_optional) if probe.types not in answers
                      or isinstance(answers[probe.types], str)]
            for start in range(0, len(probes), BATCH):
                for probe, answer in ask(probes[start:start + BATCH], opset, Path(folder)):
                    answers[probe.types] = answer
                    if with_optional or not isinstance(answer, str):
                        shapes["inputs"], shapes["outputs"] = probe.inputs, probe.outputs
    cuda = [dict(types) for types, answer in answers.items() if isinstance(answer, Found) and answer.cuda]
    hosts = [answer for answer in answers.values() if isinstance(answer, Found) and answer.cuda]
    errors = sorted({answer for answer in answers.values() if isinstance(answer, str)
                     and "Could not find an implementation" not in answer})
    formal = {"inputs": [one.typeStr for one in schema.inputs], "outputs": [one.typeStr for one in schema.outputs]}
    return {
        "domain": domain, "op_type": name, "version": version, **formal, "tried": len(answers),
        "loaded": sum(isinstance(answer, Found) for answer in answers.values()),
        "cuda": cuda, "host_inputs": sorted({tuple(one.host_inputs) for one in hosts}),
        "host_outputs": sorted({tuple(one.host_outputs) for one in hosts}), "errors": errors[:3], "error_count": len(errors),
        "has_function": bool(getattr(schema, "has_function", False)),
    }


def versions_in_use() -> list[tuple[str, str, int, int]]:
    """Operator, domain, version and an opset that means it, of all that opsets from OLDEST_OPSET on can name."""
    versions: dict[tuple[str, str], list[int]] = defaultdict(list)
    for schema in _schemas():
        if schema.domain in DOMAINS and not schema.deprecated and schema.name not in SKIPPED:
            versions[schema.domain, schema.name].append(schema.since_version)
    found = []
    for (domain, name), there in sorted(versions.items()):
        there.sort()
        for place, version in enumerate(there):
            last = there[place + 1] - 1 if place + 1 < len(there) else 10_000
            if domain or last >= OLDEST_OPSET:
                found.append((name, domain, version, max(version, OLDEST_OPSET) if not domain else version))
    return found


def products(accepted: Sequence[Mapping[str, str]]) -> list[dict[str, list[str]]]:
    """Combinations of types as few products of sets: two that differ in one variable alone become one."""
    found = [{name: frozenset([kind]) for name, kind in one.items()} for one in accepted]
    for name in found[0] if found else ():
        merged: dict[tuple[tuple[str, frozenset[str]], ...], frozenset[str]] = {}
        for one in found:
            rest = tuple(sorted((other, kinds) for other, kinds in one.items() if other != name))
            merged[rest] = merged.get(rest, frozenset()) | one[name]
        found = [{**dict(rest), name: kinds} for rest, kinds in merged.items()]
    return [{name: sorted(session_dtype(kind) for kind in one[name]) for name in sorted(one)} for one in found]


def accepted_types(answer: Mapping[str, Any], schema: Any) -> list[dict[str, list[str]]]:
    """The types that a kernel takes. Where not every combination was tried, none that was tried and refused lies in the product
    of all that were taken; then that product is what it takes."""
    sets: dict[str, set[str]] = defaultdict(set)
    for one in answer["cuda"]:
        for name, kind in one.items():
            sets[name].add(kind)
    taken = [dict(zip(sets, kinds, strict=True)) for one in answer["cuda"]  # without optional inputs, their types are free
             for kinds in itertools.product(*([one[name]] if name in one else sorted(sets[name]) for name in sets))]
    tried = [dict(probe.types) for probe in probes_of(schema, with_optional=True)]
    inside = [one for one in tried if all(one.get(name) in kinds for name, kinds in sets.items())]
    if all(one in taken for one in inside):
        return [{name: sorted(map(session_dtype, kinds)) for name, kinds in sorted(sets.items())}]
    return products(taken)


def union(places: Sequence[Sequence[int]]) -> list[int]:
    return sorted({place for one in places for place in one})


def table_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By domain, operator and version: what the CUDA provider's kernel takes; null where it has none for that version."""
    schemas = {(one.domain, one.name, one.since_version): one for one in _schemas()}
    table: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for answer in sorted(answers, key=lambda one: (one["domain"], one["op_type"], one["version"])):
        schema = schemas[answer["domain"], answer["op_type"], answer["version"]]
        kernel = None
        if answer["cuda"]:
            kernel = {"inputs": answer["inputs"], "outputs": answer["outputs"],
                      "variadic": any(str(one.option).endswith("Variadic") for one in schema.inputs),
                      "types": accepted_types(answer, schema), "host_inputs": union(answer["host_inputs"]),
                      "host_outputs": [] if answer["op_type"] == "MemcpyToHost" else union(answer["host_outputs"])}
        table[answer["domain"]][answer["op_type"]][str(answer["version"])] = kernel
    return {domain: {name: versions for name, versions in operators.items() if any(versions.values())}
            for domain, operators in table.items()}


def write_table(answers_path: Path, out: Path) -> None:
    """Writes the table, one operator a line."""
    saved = files.read_json(answers_path)
    lines = [f'{{"ort_version": {json.dumps(saved["ort_version"])},', ' "source": "recipes/cuda_kernels/probe_kernels.py",',
             ' "kernels": {']
    table = table_of(saved["answers"])
    domains = [f' {json.dumps(domain)}: {{\n' + ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(versions, separators=(',', ':'))}" for name, versions in operators.items()) + "}"
        for domain, operators in table.items() if operators]
    files.write_text(out, "\n".join(lines) + "\n" + ",\n".join(domains) + "}}\n")


def main() -> int:
    parser = cli.parser(__doc__, "python recipes/cuda_kernels/probe_kernels.py --out answers.json")
    parser.add_argument("--out", type=Path, required=True, help="where the answers go")
    parser.add_argument("--table", type=Path, metavar="ANSWERS", help="make the table of answers that were written before")
    parser.add_argument("--only", nargs="*", help="operators to ask about (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="sessions opened at a time")
    args = parser.parse_args()
    if args.table:
        write_table(args.table, args.out)
        return 0
    work = [one for one in versions_in_use() if not args.only or one[0] in args.only]
    answers, failed = [], []
    with process_pool(args.jobs) as pool:
        pending = {pool.submit(one_schema, *one): one for one in work}
        for done in cli.track(list(pending), "asking"):
            try:
                answers.append(done.result())
            except Exception as error:  # noqa: BLE001 - one operator must not cost the others
                failed.append([*pending[done], repr(error)[:300]])
    files.write_json(args.out, {"ort_version": ort_version(), "answers": answers, "failed": failed})
    log.info("%d operator versions, %d with CUDA kernels, %d failed", len(work), sum(bool(one["cuda"]) for one in answers),
             len(failed))
    return 0


if __name__ == "__main__":
    cli.run(main)
