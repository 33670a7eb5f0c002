"""Makes the table of CUDA kernels, which `ort_analysis` reads, from the answers of ONNX Runtime."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hase.recipes.cuda_kernels.probes import probes_of, schemas
from hase.records.kernel_record import session_dtype
from hase.utils import files


def products(accepted: Sequence[Mapping[str, str]]) -> list[dict[str, list[str]]]:
    """Combinations of types as a few products of sets: two that differ in only one variable become one."""
    merging = [{name: frozenset([kind]) for name, kind in types.items()} for types in accepted]
    for name in merging[0] if merging else ():
        merged: dict[tuple[tuple[str, frozenset[str]], ...], frozenset[str]] = {}
        for types in merging:
            rest = tuple(sorted((variable, kinds) for variable, kinds in types.items() if variable != name))
            merged[rest] = merged.get(rest, frozenset()) | types[name]
        merging = [{**dict(rest), name: kinds} for rest, kinds in merged.items()]
    return [{name: sorted(session_dtype(kind) for kind in types[name]) for name in sorted(types)} for types in merging]


def accepted_types(answer: Mapping[str, Any], schema: Any) -> list[dict[str, list[str]]]:
    """The types that a kernel accepts: the product of all accepted types per variable, if no combination in it was refused;
    else the accepted combinations themselves."""
    sets: dict[str, set[str]] = defaultdict(set)
    for types in answer["cuda"]:
        for name, kind in types.items():
            sets[name].add(kind)
    taken = [dict(zip(sets, kinds, strict=True)) for types in answer["cuda"]  # without optional inputs, their types are free
             for kinds in itertools.product(*([types[name]] if name in types else sorted(sets[name]) for name in sets))]
    tried = [dict(probe.types) for probe in probes_of(schema, with_optional=True)]
    inside = [types for types in tried if all(types.get(name) in kinds for name, kinds in sets.items())]
    if all(types in taken for types in inside):
        return [{name: sorted(map(session_dtype, kinds)) for name, kinds in sorted(sets.items())}]
    return products(taken)


def union(places: Sequence[Sequence[int]]) -> list[int]:
    return sorted({place for of_probe in places for place in of_probe})


def table_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By domain, operator and version: the types that the CUDA provider's kernel accepts; null if it has none."""
    by_version = {(known.domain, known.name, known.since_version): known for known in schemas()}
    table: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for answer in sorted(answers, key=lambda answer: (answer["domain"], answer["op_type"], answer["version"])):
        schema = by_version[answer["domain"], answer["op_type"], answer["version"]]
        kernel = None
        if answer["cuda"]:
            kernel = {"inputs": answer["inputs"], "outputs": answer["outputs"],
                      "variadic": any(str(parameter.option).endswith("Variadic") for parameter in schema.inputs),
                      "types": accepted_types(answer, schema), "host_inputs": union(answer["host_inputs"]),
                      "host_outputs": [] if answer["op_type"] == "MemcpyToHost" else union(answer["host_outputs"])}
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
