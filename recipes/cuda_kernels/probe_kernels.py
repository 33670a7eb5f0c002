"""Finds the operators that ONNX Runtime's CUDA provider runs, by trying them: one small graph per operator, version and types.

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

import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hase.recipes.cuda_kernels.kernel_table import write_table
from hase.recipes.cuda_kernels.probes import Probe, graph_of, probes_of, schemas
from hase.utils import cli, files
from hase.utils.fingerprint import ort_version
from hase.utils.lazy import onnx, onnxruntime
from hase.utils.logger import get_logger
from hase.utils.processes import process_pool

log = get_logger("probe")
DOMAINS = ("", "com.microsoft", "ai.onnx.ml")
OLDEST_OPSET = 7  # ONNX Runtime does not support older ones
BATCH = 64  # graphs opened in one session, as long as all of them load
PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]
SKIPPED = {"Constant", "ATen", "If", "Loop", "Scan", "BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch", "Optional",
           "SequenceMap", "ExpandDims"}
EXAMPLES = """
python recipes/cuda_kernels/probe_kernels.py --out answers.json
python recipes/cuda_kernels/probe_kernels.py --table answers.json --out ort_analysis/cuda/cuda_kernels.json
"""


@dataclass
class Found:
    """The result of a probe: whether CUDA ran it, and which inputs and outputs were in host memory."""

    cuda: bool
    host_inputs: list[int] = field(default_factory=list)
    host_outputs: list[int] = field(default_factory=list)


def read_session(model: bytes, probes: Sequence[Probe], folder: Path) -> list[Found]:
    """Opens the graph of some probes and reads the result of each; exceptions of ONNX Runtime are not caught."""
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
        result = Found(cuda)
        if cuda:
            node = by_name[f"op{number}"]
            result.host_inputs = [place for place in range(len(probe.inputs)) if node.input[place] in copies]
            for place in range(len(probe.outputs)):
                after = providers.get(f"out{number}_{place}")
                reader = by_name.get(f"out{number}_{place}")
                copied = reader is not None and reader.input[0] in copies
                if after is not None and (after == "CUDAExecutionProvider") == copied:
                    result.host_outputs.append(place)
        results.append(result)
    return results


def ask(probes: Sequence[Probe], opset: int, folder: Path) -> list[tuple[Probe, Found | str]]:
    """The result of each probe, or the error's text if no provider runs it. Probes that fail together are tried separately."""
    try:
        return list(zip(probes, read_session(graph_of(probes, opset), probes, folder), strict=True))
    except Exception as error:  # noqa: BLE001 - ONNX Runtime raises any exception for invalid graphs
        if len(probes) == 1:
            return [(probes[0], " ".join(str(error).split())[:300])]
        half = len(probes) // 2
        return ask(probes[:half], opset, folder) + ask(probes[half:], opset, folder)


def one_schema(name: str, domain: str, version: int, opset: int) -> dict[str, Any]:
    """All results for one operator at one version."""
    onnxruntime.set_default_logger_severity(4)
    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    schema = next(candidate for candidate in schemas()
                  if (candidate.name, candidate.domain, candidate.since_version) == (name, domain, version))
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
    formal = {"inputs": [parameter.typeStr for parameter in schema.inputs],
              "outputs": [parameter.typeStr for parameter in schema.outputs]}
    return {
        "domain": domain, "op_type": name, "version": version, **formal, "tried": len(answers),
        "loaded": sum(isinstance(answer, Found) for answer in answers.values()),
        "cuda": cuda, "host_inputs": sorted({tuple(answer.host_inputs) for answer in hosts}),
        "host_outputs": sorted({tuple(answer.host_outputs) for answer in hosts}), "errors": errors[:3],
        "error_count": len(errors),
        "has_function": bool(getattr(schema, "has_function", False)),
    }


def versions_in_use() -> list[tuple[str, str, int, int]]:
    """Operator, domain, version, and an opset that uses it, for all versions in opsets from OLDEST_OPSET on."""
    versions: dict[tuple[str, str], list[int]] = defaultdict(list)
    for schema in schemas():
        if schema.domain in DOMAINS and not schema.deprecated and schema.name not in SKIPPED:
            versions[schema.domain, schema.name].append(schema.since_version)
    used = []
    for (domain, name), of_operator in sorted(versions.items()):
        of_operator.sort()
        for place, version in enumerate(of_operator):
            last = of_operator[place + 1] - 1 if place + 1 < len(of_operator) else 10_000
            if domain or last >= OLDEST_OPSET:
                used.append((name, domain, version, max(version, OLDEST_OPSET) if not domain else version))
    return used


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--out", type=Path, required=True, help="where the answers go")
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
        pending = {pool.submit(one_schema, *version): version for version in work}
        for done in cli.progress(list(pending), "asking"):
            try:
                answers.append(done.result())
            except Exception as error:  # noqa: BLE001 - one operator must not cost the others
                failed.append([*pending[done], repr(error)[:300]])
    files.write_json(args.out, {"ort_version": ort_version(), "answers": answers, "failed": failed})
    log.info("%d operator versions, %d with CUDA kernels, %d failed", len(work),
             sum(bool(answer["cuda"]) for answer in answers), len(failed))
    return 0


if __name__ == "__main__":
    cli.run(main)
