"""Profiles whole models: how long each node kept the host busy, on which provider, and how often it ran.

For CUDA sessions with nodes on the CPU: ONNX Runtime's profile gives the wall time of these nodes, and of copies and nodes at
which the host waits. Reads every record in the workspace with its model; writes the raw samples of all into one file.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from typing import Any

from measuring.run_times import Effort
from records.kernel_record import ModelRecord
from records.kernel_record_files import read_model_records
from runtimes import flavour_of
from runtimes.ort.graph.parsing import optimize
from runtimes.ort.graph.source import read_source
from runtimes.ort.profile import counted_runs, profile_runs
from runtimes.ort.runner import bind, random_feed
from utils import cli, files
from utils.errors import UserError
from utils.fingerprint import machine, resolve_device
from utils.logger import get_logger
from utils.ort_sessions import model_errors, open_session
from utils.paths import as_file_name, model_files
from utils.temporary import temporary_folder

log = get_logger("profiles")
EFFORT = Effort(warmup=2, warmup_s=0.0, budget_s=0.2, least_runs=5, most_runs=10)
EXAMPLES = "python recipes/cuda_kernels/profile_nodes.py --workspace out/pool --out out/pool/node_profiles.json"


def profile(path: Path, record: ModelRecord, device: str) -> list[dict[str, Any]]:
    """The nodes of a model's runs: name, operator, provider, and for each run how often it ran and its time in all, in µs.

    Raises:
        UserError: ONNX Runtime can't load or run it.
    """
    source = read_source(path, record.dims)
    with temporary_folder() as folder:
        optimized = folder / "optimized.onnx"
        optimize(source, record.flavour, optimized, record.static)
        session = open_session(optimized, device, optimize="none", name=str(path), profile_prefix=folder / "run")
        feed = random_feed(session, source.dims, source.steering, source.graph_only.graph)
        with model_errors(str(path)):
            counted = profile_runs(bind(session, feed, device, "device"), EFFORT, device)
            runs = counted_runs(session.end_profiling(), counted)
    nodes: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(runs):
        for event in run.nodes:
            node = nodes.setdefault(event.node, {"node": event.node, "op_type": event.op_type, "provider": event.provider,
                                                 "runs": [0] * len(runs), "us": [0.0] * len(runs), "start_us": []})
            node["runs"][number] += 1
            node["us"][number] += event.duration_us
            if number == len(runs) - 1:
                node["start_us"].append(event.start_us - run.start_us)
    return list(nodes.values())


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--out", type=cli.out_file, required=True, metavar="FILE", help="where the samples go")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where (default: auto)")
    args = parser.parse_args()
    workspace, device = cli.start(args), resolve_device(args.device)
    paths = {as_file_name(path.stem): path for path in model_files([workspace.models])}
    models, failed = [], 0
    for record in cli.progress(read_model_records(workspace, flavour_of(device)), "profiling"):
        try:
            nodes = profile(paths[record.file_stem], record, device)
        except (UserError, KeyError) as error:
            log.error("%s: %s", record.model, error)
            failed += 1
            continue
        models.append({"model": record.model, "group": record.group, "nodes": nodes})
    files.write_json(args.out, {"machine": machine(device).model_dump(mode="json"), "models": models})
    log.info("%d models profiled, %d failed", len(models), failed)
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
