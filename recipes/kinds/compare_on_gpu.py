"""Compares the CUDA graphs that Hase derives without a GPU with those of real sessions, node by node.

On a machine with an NVIDIA GPU, opens a CUDA session for each model that make_models.py wrote (with fixed sizes, and with
dynamic dimensions), lists its nodes with their providers and the copies between host and GPU, and times the model together with
the host probe (judge.py predicts it at that pace). Derives the same graphs as on a machine without a GPU, and prints the
differences. Writes into --out: on_gpu.json (latencies and host probes), real_nodes.json.gz and differences.json. With
--derive-only no GPU is needed: the script derives the graphs again and compares them with an existing real_nodes.json.gz.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import gzip
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from hase.benchmark.measuring.quiet_host import all_samples_ms
from hase.benchmark.measuring.run_times import Effort
from hase.benchmark.ort.probes import host_probe
from hase.benchmark.ort.runner import Runner, bind
from hase.ort_analysis.graph.source import read_source
from hase.recipes.kinds.manifest import MadeModel, read_manifest
from hase.recipes.kinds.node_lists import Compared, NodeList, compare, derived_nodes, feed_of, real_nodes, versions, ways_of
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.fingerprint import WITHOUT_GPU, gpu_facts
from hase.utils.logger import get_logger
from hase.utils.ort_sessions import model_errors, open_session
from hase.utils.paths import ROOT
from hase.utils.temporary import temporary_folder
from hase.utils.timing import summarize

log = get_logger("kinds")

Work = Literal["real", "derived", "times"]
REAL = "real_nodes.json.gz"
MOST_RUNS = 10 ** 6  # of a model; a measurement ends by time, not by the number of runs
TABLE_ROWS = 60  # of differences on the console; the file has all
EXAMPLES = """
python recipes/kinds/compare_on_gpu.py out/kinds --out out/kinds_on_gpu --jobs 8
python recipes/kinds/compare_on_gpu.py out/kinds --out out/kinds_on_gpu --derive-only
"""


class GpuLatency(BaseModel):
    """The latency of a model on the GPU, in ms: median and 95th percentile of `runs` runs.

    Attributes:
        io: `device`: tensors stay on the device; `host`: numpy in and out.
        host_probe_us: time of the host probe meanwhile (benchmark/measuring/quiet_host.py).
    """

    model_config = ConfigDict(frozen=True)

    model: str
    way: str
    latency_ms: float | None = None
    p95_ms: float | None = None
    runs: int = 0
    io: str = ""
    host_probe_us: float | None = None
    error: str = ""


def gpu_latency(model: MadeModel, path: Path, way: str, budget_s: float, device: str = "cuda") -> GpuLatency:
    """Times a CUDA session (in tests one of `cpu`) together with the host probe. Tensors stay on the device, unless inputs or
    outputs can't (maps, for example)."""
    probe = host_probe(device)
    session = open_session(path, device, dims=model.dims if way == "static" else None, name=model.name)
    feed = feed_of(session, model.dims, read_source(path, model.dims).steering)
    io = "device" if all(value.type.startswith("tensor(") and "string" not in value.type
                         for value in (*session.get_inputs(), *session.get_outputs())) else "host"
    runner = Runner(session=session, name=model.name, device=device, io=io,
                    run_once=bind(session, feed, device, io))
    runner.warm_up(5)
    with model_errors(model.name):
        timed = all_samples_ms(probe, runner.run_s, Effort(budget_s=budget_s, least_runs=20, most_runs=MOST_RUNS))
    statistics = summarize(timed.samples_ms)
    return GpuLatency(model=model.name, way=way, latency_ms=statistics.median_ms, p95_ms=statistics.p95_ms,
                      runs=statistics.runs, io=io, host_probe_us=timed.probe_us)


def results_of(work: Work, model: MadeModel, folder: Path, budget_s: float) -> list[dict[str, Any]]:
    """Does one piece of work for one model in this process; a failure is a result too."""
    path, results = folder / model.file, []
    for way in ways_of(model):
        made: Any
        try:
            with temporary_folder() as scratch:
                if work == "real":
                    made = real_nodes(model, path, way, scratch)
                elif work == "derived":
                    made = derived_nodes(model, path, way)
                else:
                    made = gpu_latency(model, path, way, budget_s)
        except Exception as error:  # noqa: BLE001 - whatever fails, the other models go on
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            made = GpuLatency(model=model.name, way=way, error=message) if work == "times" else NodeList(
                model=model.name, way=way, error=message)
        results.append(made.model_dump(mode="json"))
    return results


def work_through(work: Work, models: Sequence[MadeModel], folder: Path, lines: Path, budget_s: float, limit_s: int) -> None:
    """Does a piece of work for several models and writes one line for each. A model that hangs ends this process (SIGALRM)."""
    for model in models:
        signal.alarm(limit_s)
        results = results_of(work, model, folder, budget_s)
        signal.alarm(0)
        files.append_line(lines, json.dumps({"model": model.name, "found": results}))


def in_processes(work: Work, names: Sequence[str], folder: Path, scratch: Path, jobs: int, budget_s: float,
                 limit_s: int) -> list[dict[str, Any]]:
    """Does a piece of work for models in `jobs` processes. If a process dies, only the model at fault is lost.

    Returns:
        All results, in the order of `names`.
    """
    def chunk(number: int) -> dict[str, list[dict[str, Any]]]:
        left, lines = list(names[number::jobs]), scratch / f"{work}{number}.jsonl"
        results: dict[str, list[dict[str, Any]]] = {}
        while left:
            options = ["--work", work, "--lines", str(lines), "--budget-s", str(budget_s), "--limit-s", str(limit_s), "--only"]
            environment = os.environ | ({WITHOUT_GPU: "1"} if work == "derived" else {})
            done = subprocess.run([sys.executable, __file__, str(folder), "--out", str(scratch), *options, *left], cwd=ROOT,
                                  env=environment, capture_output=True, text=True)
            results = {line["model"]: line["found"] for line in map(json.loads, files.read_lines(lines))}
            left = [name for name in left if name not in results]
            if left:
                last = (done.stderr.strip().splitlines() or [""])[-1][:300]
                log.warning("%s, %s: its process ended with %d %s", left[0], work, done.returncode, last)
                failed = {"model": left[0], "way": work, "error": f"its process ended with {done.returncode} {last}"}
                files.append_line(lines, json.dumps({"model": left[0], "found": [failed]}))
                results[left.pop(0)] = [failed]
        return results

    with ThreadPoolExecutor(jobs) as pool:
        every = {name: results for part in pool.map(chunk, range(jobs)) for name, results in part.items()}
    return [row for name in names for row in every.get(name, ())]


def read_real(path: Path) -> list[NodeList]:
    """The nodes of real sessions; `UserError` if there is no such file."""
    if not path.exists():
        raise UserError(f"{path}: no such file; run without --derive-only on a machine with an NVIDIA GPU, and copy it here")
    return [NodeList.model_validate(row) for row in json.loads(gzip.decompress(path.read_bytes()))["sessions"]]


def compare_all(real: Sequence[NodeList], derived: Sequence[NodeList]) -> list[Compared]:
    """Compares each derived graph with the real session of its model of the same kind (static or dynamic), if there is one."""
    sessions = {(session.model, session.way): session for session in real}
    return [compare(sessions[graph.model, graph.way], graph) for graph in derived if (graph.model, graph.way) in sessions]


def difference_rows(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """The differences of all models; equal ones are counted."""
    alike: Counter[tuple[Any, ...]] = Counter()
    where: dict[tuple[Any, ...], set[str]] = {}
    for model in compared:
        for difference in model.differences:
            dtypes = " ".join(text.partition("[")[0] or "-" for text in difference.types.split())
            key = (difference.what, difference.operator, difference.opset, dtypes, difference.derived, difference.real)
            alike[key] += 1
            where.setdefault(key, set()).add(model.model)
    return [dict(zip(("difference", "operator", "opset", "types", "derived", "real"), key, strict=True))
            | {"nodes": count, "models": ", ".join(sorted(where[key])[:4])} for key, count in alike.most_common()]


def report(compared: Sequence[Compared], say: Callable[[str], None]) -> None:
    """Prints the differences, and how many graphs and nodes agree."""
    cli.print_table([model.columns() for model in compared if not model.agrees], "graphs that differ")
    rows = difference_rows(compared)
    say("")
    cli.print_table(rows[:TABLE_ROWS], "how they differ")
    nodes, same = sum(model.nodes for model in compared), sum(model.same for model in compared)
    say(f"\n{sum(model.agrees for model in compared)} of {len(compared)} graphs agree; {same} of {nodes} nodes "
        f"({same / max(1, nodes):.2%}) have the same operator and provider")


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("folder", type=Path, metavar="DIR", help="where make_models.py wrote the models")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the results go")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these models alone")
    parser.add_argument("--derive-only", action="store_true", help="without a GPU: compare with the real nodes in --out")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes in parallel (default: 2); "
                        "models are always timed one at a time")
    parser.add_argument("--budget-s", type=cli.positive, default=1.0, metavar="S", help="to time each session (default: 1)")
    parser.add_argument("--limit-s", type=int, default=60, metavar="S", help="for each model (default: 60)")
    parser.add_argument("--no-times", action="store_true", help="leave the latencies out")
    parser.add_argument("--work", choices=("real", "derived", "times"), help="used by the script itself: one piece of work")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="used by the script itself: output file")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error("--jobs must be positive")
    cli.start(args)
    models = read_manifest(args.folder).chosen(args.only)
    if args.work:
        work_through(args.work, models, args.folder, args.lines, args.budget_s, args.limit_s)
        return 0
    if not args.derive_only and not gpu_facts():
        raise UserError("this machine has no NVIDIA GPU; --derive-only compares with files from a machine with one")
    names, folder = [model.name for model in models], args.folder.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    with temporary_folder() as scratch:
        def each(work: Work, jobs: int) -> list[dict[str, Any]]:
            log.info("%s: %d models", work, len(names))
            return in_processes(work, names, folder, scratch, jobs, args.budget_s, args.limit_s)

        if not args.derive_only:
            real = each("real", args.jobs)
            document = json.dumps({"gpu": gpu_facts(), "versions": versions(), "sessions": real})
            files.write_bytes(args.out / REAL, gzip.compress(document.encode()))
        times = [] if args.derive_only or args.no_times else each("times", 1)
        derived = [NodeList.model_validate(row) for row in each("derived", args.jobs)]
    compared = compare_all(read_real(args.out / REAL), derived)
    files.write_json(args.out / "differences.json", [model.model_dump(mode="json") for model in compared])
    if times:
        # the latency is that of the session that a user opens: with dynamic dimensions, if the model has any
        latest = {row["model"]: row for row in sorted(times, key=lambda row: row["way"] == "dynamic") if row.get("latency_ms")}
        files.write_json(args.out / "on_gpu.json", {
            "gpu": gpu_facts(), "versions": versions(), "models": list(latest.values()), "sessions": times})
    if args.json:
        cli.print_json({"graphs": [model.columns() for model in compared], "differences": difference_rows(compared)})
    else:
        report(compared, print)
    return 0


if __name__ == "__main__":
    cli.run(main)
