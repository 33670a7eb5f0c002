"""Finds the operators that ONNX Runtime's CUDA provider runs, with one small graph per operator, version and types.

Needs an NVIDIA GPU. Reads the operator schemas of the installed ONNX Runtime and writes the answers; `--table` turns them into
the table by which `ort_analysis` assigns nodes to providers on machines without a GPU (no GPU needed, but the same version).

Each graph is `input → Identity → operator → Identity → output`, opened without optimisation. The operator's provider shows
whether the CUDA provider has a kernel for these types. The Memcpy nodes around it show which inputs and outputs the kernel
keeps in host memory. A combination that no provider runs fails to load, and is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import functools
import itertools
import json
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hase.records.kernel_record import session_dtype, type_code
from hase.utils import cli, files
from hase.utils.fingerprint import ort_version
from hase.utils.lazy import onnx, onnxruntime
from hase.utils.logger import get_logger, progress
from hase.utils.processes import process_pool

log = get_logger("probe")
DOMAINS = ("", "com.microsoft", "ai.onnx.ml")
OLDEST_OPSET = 7  # ONNX Runtime does not support older ones
BATCH = 64  # graphs opened in one session, as long as all of them load
PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]
UNTRIED = {"Constant", "ATen", "If", "Loop", "Scan", "BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch", "Optional",
           "SequenceMap", "ExpandDims"}  # operators without a probe; most of them need a body
EXAMPLES = """
python recipes/cuda_kernels/probe_kernels.py --out answers.json
python recipes/cuda_kernels/probe_kernels.py --table answers.json --out ort_analysis/cuda/cuda_kernels.json
"""
ONNX_OPSET = 21  # of a graph with an operator of another domain: its Identity takes all element types
MOST_COMBINATIONS = 300  # up to this many combinations of types are all tried; beyond, two type variables at a time
TYPES = ("float", "float16", "bfloat16", "double", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
         "bool", "string", "int4", "uint4", "float8e4m3fn", "float8e5m2")
REFUSED_OPTIONALS = {("LSTM", "P")}  # with these optional inputs the CUDA provider refuses an operator although it has a kernel
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
    """One graph: an operator at a version, with one type for each of its type variables."""

    domain: str
    op_type: str
    version: int
    inputs: tuple[str, ...]  # the type variable (or fixed type) of each
    outputs: tuple[str, ...]
    types: tuple[tuple[str, str], ...]  # by type variable, in ONNX Runtime's spelling (`tensor(float)`)
    attributes: tuple[tuple[str, Any], ...]


@functools.cache
def schemas() -> list[Any]:
    return list(onnxruntime.capi.onnxruntime_pybind11_state.get_all_operator_schema())


def tensor_types(allowed: Sequence[str]) -> list[str]:
    """Tensor types in `allowed` that are tried, the usual ones first."""
    return [f"tensor({name})" for name in TYPES if f"tensor({name})" in allowed]


def combinations(variables: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """All combinations of types; if too many, all for each pair of variables, with two usual types for the others."""
    names = list(variables)
    if math.prod(map(len, variables.values())) <= MOST_COMBINATIONS:
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
    """A valid value of a required attribute; None if its type has none here."""
    integers = [1, 1] if "shape" in name or "pads" in name or name == "scales" else [0]
    values = {"INT": 1, "FLOAT": 1.0, "STRING": "a", "INTS": integers, "FLOATS": [1.0, 1.0]}
    return values.get(str(attribute.type).rsplit(".", 1)[-1])


def probes_of(schema: Any, with_optional: bool) -> Iterator[Probe]:
    """The probes of one operator version, with or without its optional inputs."""
    variables: dict[str, list[str]] = {}
    constraints = {constraint.type_param_str: list(constraint.allowed_type_strs) for constraint in schema.type_constraints}

    def type_names_of(parameters: Sequence[Any], variadic_count: int) -> tuple[str, ...]:
        type_names: list[str] = []
        for parameter in parameters:
            option = str(parameter.option).rsplit(".", 1)[-1]
            left_out = option == "Optional" and (not with_optional or (schema.name, parameter.name) in REFUSED_OPTIONALS)
            type_names += [""] if left_out else [parameter.typeStr] * (variadic_count if option == "Variadic" else 1)
        while type_names and not type_names[-1]:
            type_names.pop()
        return tuple(type_names)

    inputs, outputs = type_names_of(schema.inputs, 2), type_names_of(schema.outputs, 1)
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
    """ONNX's number for an element type that is spelled like `tensor(float)`."""
    return type_code(session_dtype(text))


def graph_of(probes: Sequence[Probe], opset: int) -> bytes:
    """A model with the unconnected graphs of several probes of one operator version."""
    nodes, inputs, outputs = [], [], []
    for number, probe in enumerate(probes):
        types, read = dict(probe.types), []
        for index, name in enumerate(probe.inputs):
            if not name:
                read.append("")
                continue
            tensor = f"x{number}_{index}"
            inputs.append(onnx.helper.make_tensor_value_info(tensor, element_type(types.get(name, name)), None))
            nodes.append(onnx.helper.make_node("Identity", [tensor], [f"i{number}_{index}"], name=f"in{number}_{index}"))
            read.append(f"i{number}_{index}")
        attributes: dict[str, Any] = {name: element_type(value) if name in ("to", "dtype") and isinstance(value, str) else value
                                      for name, value in probe.attributes}
        outs = [f"o{number}_{index}" if name else "" for index, name in enumerate(probe.outputs)]
        nodes.append(onnx.helper.make_node(probe.op_type, read, outs, name=f"op{number}", domain=probe.domain, **attributes))
        for index in (index for index, name in enumerate(outs) if name):
            nodes.append(onnx.helper.make_node("Identity", [outs[index]], [f"y{number}_{index}"], name=f"out{number}_{index}"))
            outputs.append(onnx.helper.ValueInfoProto(name=f"y{number}_{index}"))
    graph = onnx.helper.make_graph(nodes, "probe", inputs, outputs)
    domains = {"": ONNX_OPSET if probes[0].domain else opset, "com.microsoft": 1}
    if probes[0].domain not in ("", "com.microsoft"):
        domains[probes[0].domain] = probes[0].version
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in domains.items()]
    return bytes(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


# the table ---------------------------------------------------------------------------------------------------------------

def products(accepted: Sequence[Mapping[str, str]]) -> list[dict[str, list[str]]]:
    """Combinations of types by variable, as few products of sets: combinations that differ in one variable are merged."""
    merging = [{name: frozenset([kind]) for name, kind in types.items()} for types in accepted]
    for name in merging[0] if merging else ():
        merged: dict[tuple[tuple[str, frozenset[str]], ...], frozenset[str]] = {}
        for types in merging:
            rest = tuple(sorted((variable, kinds) for variable, kinds in types.items() if variable != name))
            merged[rest] = merged.get(rest, frozenset()) | types[name]
        merging = [{**dict(rest), name: kinds} for rest, kinds in merged.items()]
    return [{name: sorted(session_dtype(kind) for kind in types[name]) for name in sorted(types)} for types in merging]


def accepted_types(answer: Mapping[str, Any], schema: Any) -> list[dict[str, list[str]]]:
    """The types that a kernel accepts, as products of sets of types by variable: a single one if CUDA ran all combinations that
    were tried in it, else several that hold just those that it ran (`products`)."""
    sets: dict[str, set[str]] = defaultdict(set)
    for types in answer["cuda"]:
        for name, kind in types.items():
            sets[name].add(kind)
    accepted = [dict(zip(sets, kinds, strict=True)) for types in answer["cuda"]  # types of inputs that were left out are free
                for kinds in itertools.product(*([types[name]] if name in types else sorted(sets[name]) for name in sets))]
    tried = [dict(probe.types) for probe in probes_of(schema, with_optional=True)]
    inside = [types for types in tried if all(types.get(name) in kinds for name, kinds in sets.items())]
    if all(types in accepted for types in inside):
        return [{name: sorted(map(session_dtype, kinds)) for name, kinds in sorted(sets.items())}]
    return products(accepted)


def table_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Types that the CUDA provider's kernel accepts, by domain, operator and version; null without a kernel."""
    by_version = {(known.domain, known.name, known.since_version): known for known in schemas()}
    table: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for answer in sorted(answers, key=lambda answer: (answer["domain"], answer["op_type"], answer["version"])):
        schema = by_version[answer["domain"], answer["op_type"], answer["version"]]
        kernel = None
        if answer["cuda"]:
            kernel = {"inputs": answer["inputs"], "outputs": answer["outputs"],
                      "variadic": any(str(parameter.option).endswith("Variadic") for parameter in schema.inputs),
                      "types": accepted_types(answer, schema), "host_inputs": sorted(set().union(*answer["host_inputs"])),
                      "host_outputs": [] if answer["op_type"] == "MemcpyToHost" else sorted(
                          set().union(*answer["host_outputs"]))}
        table[answer["domain"]][answer["op_type"]][str(answer["version"])] = kernel
    return {domain: {name: versions for name, versions in operators.items() if any(versions.values())}
            for domain, operators in table.items()}


def write_table(answers_path: Path, out: Path) -> None:
    """Writes the table, one operator per line."""
    saved = files.read_json(answers_path)
    lines = [f'{{"ort_version": {json.dumps(saved["ort_version"])},', ' "source": "recipes/cuda_kernels/probe_kernels.py",',
             ' "kernels": {']
    table = table_of(saved["answers"])
    domains = [f' {json.dumps(domain)}: {{\n' + ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(versions, separators=(',', ':'))}" for name, versions in operators.items()) + "}"
        for domain, operators in table.items() if operators]
    files.write_text(out, "\n".join(lines) + "\n" + ",\n".join(domains) + "}}\n")


# trying the probes -------------------------------------------------------------------------------------------------------

@dataclass
class ProbeResult:
    """Result of a probe: whether CUDA ran it, and which inputs and outputs were in host memory."""

    cuda: bool
    host_inputs: list[int] = field(default_factory=list)
    host_outputs: list[int] = field(default_factory=list)


def read_session(model: bytes, probes: Sequence[Probe], folder: Path) -> list[ProbeResult]:
    """Opens the graph of some probes and reads each result; exceptions of ONNX Runtime pass through."""
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
    results = []
    for number, probe in enumerate(probes):
        cuda = providers.get(f"op{number}") == "CUDAExecutionProvider"
        result = ProbeResult(cuda)
        if cuda:
            node = by_name[f"op{number}"]
            result.host_inputs = [index for index in range(len(probe.inputs)) if node.input[index] in copies]
            for index in range(len(probe.outputs)):
                after = providers.get(f"out{number}_{index}")
                reader = by_name.get(f"out{number}_{index}")
                copied = reader is not None and reader.input[0] in copies
                # it is in host memory if a reader on the GPU gets a copy of it, or one on the CPU gets none
                if after is not None and (after == "CUDAExecutionProvider") == copied:
                    result.host_outputs.append(index)
        results.append(result)
    return results


def ask(probes: Sequence[Probe], opset: int, folder: Path) -> list[tuple[Probe, ProbeResult | str]]:
    """The result of each probe, or the error if no provider runs it. Probes that fail together are tried one by one."""
    try:
        return list(zip(probes, read_session(graph_of(probes, opset), probes, folder), strict=True))
    except Exception as error:  # noqa: BLE001 - ONNX Runtime raises any exception for invalid graphs
        if len(probes) == 1:
            return [(probes[0], " ".join(str(error).split())[:300])]
        half = len(probes) // 2
        return ask(probes[:half], opset, folder) + ask(probes[half:], opset, folder)


def probe_operator(name: str, domain: str, version: int, opset: int) -> dict[str, Any]:
    """The answers about one operator at one version, as the file holds them."""
    onnxruntime.set_default_logger_severity(4)
    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    schema = next(candidate for candidate in schemas()
                  if (candidate.name, candidate.domain, candidate.since_version) == (name, domain, version))
    answers: dict[tuple[tuple[str, str], ...], ProbeResult | str] = {}
    with tempfile.TemporaryDirectory(prefix="hase-probe-") as folder:
        for with_optional in (True, False):  # the second time only combinations that failed or are new
            probes = [probe for probe in probes_of(schema, with_optional) if probe.types not in answers
                      or isinstance(answers[probe.types], str)]
            for start in range(0, len(probes), BATCH):
                for probe, answer in ask(probes[start:start + BATCH], opset, Path(folder)):
                    answers[probe.types] = answer
    cuda = [dict(types) for types, answer in answers.items() if isinstance(answer, ProbeResult) and answer.cuda]
    hosts = [answer for answer in answers.values() if isinstance(answer, ProbeResult) and answer.cuda]
    errors = sorted({answer for answer in answers.values() if isinstance(answer, str)
                     and "Could not find an implementation" not in answer})
    formal = {"inputs": [parameter.typeStr for parameter in schema.inputs],
              "outputs": [parameter.typeStr for parameter in schema.outputs]}
    return {
        "domain": domain, "op_type": name, "version": version, **formal, "tried": len(answers),
        "loaded": sum(isinstance(answer, ProbeResult) for answer in answers.values()),
        "cuda": cuda, "host_inputs": sorted({tuple(answer.host_inputs) for answer in hosts}),
        "host_outputs": sorted({tuple(answer.host_outputs) for answer in hosts}), "errors": errors[:3],
        "error_count": len(errors),
        "has_function": bool(getattr(schema, "has_function", False)),
    }


def versions_in_use() -> list[tuple[str, str, int, int]]:
    """Operator, domain, version, and an opset that uses it, for all versions in opsets from OLDEST_OPSET on."""
    versions: dict[tuple[str, str], list[int]] = defaultdict(list)
    for schema in schemas():
        if schema.domain in DOMAINS and not schema.deprecated and schema.name not in UNTRIED:
            versions[schema.domain, schema.name].append(schema.since_version)
    used = []
    for (domain, name), operator_versions in sorted(versions.items()):
        operator_versions.sort()
        for index, version in enumerate(operator_versions):
            last = operator_versions[index + 1] - 1 if index + 1 < len(operator_versions) else 10_000
            if domain or last >= OLDEST_OPSET:
                used.append((name, domain, version, max(version, OLDEST_OPSET) if not domain else version))
    return used


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--out", type=Path, required=True, help="file to write: the answers, or with --table the table")
    parser.add_argument("--table", type=Path, metavar="ANSWERS", help="make the table from an earlier file of answers")
    parser.add_argument("--only", nargs="*", help="operators to ask about (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="sessions opened at a time")
    args = parser.parse_args()
    if args.table:
        write_table(args.table, args.out)
        return 0
    work = [version for version in versions_in_use() if not args.only or version[0] in args.only]
    answers, failed = [], []
    with process_pool(args.jobs) as pool:
        pending = {pool.submit(probe_operator, *version): version for version in work}
        for future in progress(list(pending), "asking"):
            try:
                answers.append(future.result())
            except Exception as error:  # noqa: BLE001 - one operator must not cost the others
                failed.append([*pending[future], repr(error)[:300]])
    files.write_json(args.out, {"ort_version": ort_version(), "answers": answers, "failed": failed})
    log.info("%d operator versions, %d with CUDA kernels, %d failed", len(work),
             sum(bool(answer["cuda"]) for answer in answers), len(failed))
    return 0


if __name__ == "__main__":
    cli.run(main)
