"""Asks Hase about the models of `make_models.py` as a user would, measures them here, and compares.

For each model: a prediction for the shipped H200; one for this machine's CPU; a measurement on it; a prediction after
--measure-missing; and a second measurement, whose difference from the first is the noise. All measurements wait until the
machine is as fast as at its best. Every step is a separate process with a time limit, so that a crash affects one step. Writes
judgement.jsonl into the models' folder, one line per step; a second run continues there, and measures again what was measured
while the machine was slower. Prints one row per model and target, and a summary against the limits that Hase has to meet.
--measure-missing adds to the dataset of --workspace, so give a copy. --gpu reads what compare_on_gpu.py measured on a GPU
machine: latencies, and the host pace for each model. The H200's predictions are then made at that pace (again, if they were
made at another).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hase.benchmark.measuring.bench import Canary, busy_share
from hase.benchmark.measuring.run_times import Effort
from hase.inference.core.host_pace import ratio_of
from hase.inference.core.targets import fitted_for
from hase.inference.evaluation.evaluate import LEAST_RUNS, MOST_RUNS, PATIENCE_S, STEADY, WARMUP, MeasuringPlan
from hase.recipes.kinds.judgement import (
    JUDGEMENT,
    MEASUREMENTS,
    SAID,
    Step,
    StepResult,
    page,
    read_judgement,
    rows_of,
    shortest_canary_ms,
    shown,
    summary,
)
from hase.recipes.kinds.manifest import MadeModel, read_manifest
from hase.runtimes.protocol import Request, Worker
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.fingerprint import machine, ort_version
from hase.utils.locks import measuring
from hase.utils.logger import get_logger
from hase.utils.paths import ROOT, Workspace
from hase.utils.worker_process import WorkerFailed

log = get_logger("kinds")

H200 = "nvidia-h200"
PREDICT = "inference/predict_model_latency.py"
COMMANDS = """\
python recipes/kinds/make_models.py --out out/kinds
python recipes/kinds/compare_on_gpu.py out/kinds --out out/kinds_on_gpu  # on the machine with the GPU
mkdir -p out/kinds_cpu  # a workspace without a dataset: nothing was learned of this CPU
# again until it measures nothing any more: what was measured while the machine was slower is measured again
python recipes/kinds/judge.py out/kinds --workspace out/kinds_cpu --steps h200 measured cpu_filled measured_again \\
  --rounds 2 --budget-s 0.5 --patience-s 60 --gpu out/kinds_on_gpu/on_gpu.json --docs docs/kinds.md"""
STEPS: tuple[Step, ...] = ("h200", "cpu", "measured", "cpu_filled", "measured_again")
ASKED_FIRST: tuple[Step, ...] = ("h200", "cpu")  # before kernels are measured that other models share
EXAMPLES = """
python recipes/kinds/judge.py out/kinds --workspace out/demo
python recipes/kinds/judge.py out/kinds --workspace out/demo --only unet bert_mask --again cpu h200
python recipes/kinds/judge.py out/kinds --table-only --gpu out/kinds/on_gpu.json --docs docs/kinds.md
"""


@dataclass(frozen=True)
class Ended:
    """The result of a command: exit status (None: it took too long), output, and length in seconds."""

    status: int | None
    out: str
    err: str
    seconds: float

    @property
    def outcome(self) -> str:
        if self.status is None:
            return "too long"
        if "Traceback (most recent call last)" in self.err:
            return "traceback"
        if self.status == 0:
            return "answered"
        return "refused" if self.status > 0 and "error: " in self.err else "died"

    @property
    def message(self) -> str:
        lines = [line for line in self.err.strip().splitlines() if line.strip()]
        errors = [line for line in lines if "error: " in line] or lines
        return errors[-1].removeprefix("error: ")[:400] if errors else ""

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(line.removeprefix("warning: ") for line in self.err.splitlines() if line.startswith("warning: "))


def run_limited(command: Sequence[str], limit_s: float) -> Ended:
    """Runs a script of this repository; after `limit_s` seconds it is ended, with its child processes."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    status: int | None
    try:
        out, err = process.communicate(timeout=limit_s)
        status = process.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        status = None
    return Ended(status, out, err, round(time.monotonic() - began, 2))


def predicted(model: MadeModel, path: Path, step: Step, workspace: Path, limit_s: float,
              host_pace: float | None = None) -> StepResult:
    """Asks for a prediction, as step `h200` (at the host pace, if that is known), `cpu` or `cpu_filled`."""
    options = {"h200": ["--target", H200], "cpu": ["--target", "cpu"], "cpu_filled": ["--measure-missing"]}[step]
    if host_pace is not None:
        options += ["--host-pace", f"{host_pace:g}"]
    ended = run_limited([PREDICT, "--model", str(path), *model.dim_options, *options, "--workspace", str(workspace), "--json"],
                        limit_s)
    figures: dict[str, Any] = {}
    if ended.outcome == "answered":
        answer = json.loads(ended.out)
        answer = answer[0] if isinstance(answer, list) else answer
        figures = {"latency_ms": answer["latency_ms"], "interval_ms": answer["interval_ms"], "time_share": answer["time_share"],
                "unsteady_share": answer["unsteady_share"], "rough": answer["rough_estimate"],
                "operators": (*answer["estimated_operators"], *answer["doubtful_operators"])}
    return StepResult.model_validate({
        "model": model.name, "step": step, "outcome": ended.outcome, "seconds": ended.seconds, "warnings": ended.warnings,
        "message": "" if ended.outcome == "answered" else ended.message, "host_pace": host_pace, **figures})


def wait_until_best(plan: MeasuringPlan, best_canary_ms: float) -> None:
    """Waits until the machine is as fast as at its best, when the canary took `best_canary_ms`; for `plan.patience_s` seconds
    at most."""
    with measuring("cpu"), Worker(plan.timeout_s) as worker:
        Canary(partial(worker.canary_ms, "cpu"), best_ms=best_canary_ms, busy=busy_share).steady_ms(STEADY, plan.patience_s)


def measured(model: MadeModel, path: Path, step: Step, plan: MeasuringPlan, best_canary_ms: float) -> StepResult:
    """Measures a model in `plan.rounds` sessions of a new process. Before each it waits as `wait_until_best` does."""
    began, samples_ms, canaries_ms = time.monotonic(), list[float](), list[float]()
    outcome, message = "answered", ""
    with measuring("cpu"), Worker(plan.timeout_s) as worker:
        canary = Canary(partial(worker.canary_ms, "cpu"), best_ms=best_canary_ms, busy=busy_share)
        try:
            for _ in range(plan.rounds):
                canaries_ms.append(canary.steady_ms(STEADY, plan.patience_s))
                reply = worker.ask(Request(
                    do="session", device="cpu", paths=(str(path),), dims=model.dims, labels=("latency",),
                    effort=Effort(warmup=WARMUP, budget_s=plan.budget_s, least_runs=LEAST_RUNS, most_runs=MOST_RUNS)))
                canaries_ms.append(canary.now_ms())
                if reply.error:
                    outcome, message = "refused", reply.error
                    break
                samples_ms += reply.measurements[0].samples_ms
        except WorkerFailed as error:
            outcome, message = ("too long" if error.status == "timeout" else "died"), str(error)
    return StepResult.model_validate({
        "model": model.name, "step": step, "outcome": outcome, "message": message,
        "seconds": round(time.monotonic() - began, 2),
        "measured_ms": round(statistics.median(samples_ms), 6) if outcome == "answered" else None,
        "canaries_ms": canaries_ms})


def on_gpu(path: Path | None) -> dict[str, float]:
    """Latencies in ms by model, from a file of compare_on_gpu.py; empty without a file."""
    if path is None:
        return {}
    return {row["model"]: row["latency_ms"] for row in files.read_json(path)["models"] if row.get("latency_ms")}


def paces_on_gpu(path: Path | None, workspace: Path) -> dict[str, float]:
    """The host pace by model, from a file of compare_on_gpu.py: its ratio, to four digits, to the pace of the shipped
    predictors. Empty without a file."""
    rows = files.read_json(path)["models"] if path else []
    probes = {row["model"]: row["host_probe_us"] for row in rows if row.get("host_probe_us")}
    if not probes:
        return {}
    fitted = fitted_for(Workspace(workspace), H200)
    return {model: float(f"{ratio_of(probe_us, fitted):.4g}") for model, probe_us in probes.items()}


def context() -> str:
    """This machine and the software that measured, as a sentence."""
    here = machine("cpu")
    return (f"This CPU: {here.cores} cores of {here.cpu}, ONNX Runtime {ort_version()}. What the H200 really takes is "
            "measured by `recipes/kinds/compare_on_gpu.py`.")


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("folder", type=Path, metavar="DIR", help="where make_models.py wrote the models")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these models alone")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="what to do (default: all)")
    parser.add_argument("--again", nargs="+", choices=STEPS, default=[], metavar="STEP", help="steps to do anew")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="sessions of each measurement (default: 3)")
    parser.add_argument("--minutes", type=cli.positive, metavar="M",
                        help="begin no further model after so long; a second run continues")
    parser.add_argument("--budget-s", type=cli.positive, default=0.7, metavar="S", help="for each session (default: 0.7)")
    parser.add_argument("--patience-s", type=cli.positive, default=PATIENCE_S, metavar="S",
                        help="how long to wait before each until the machine is as fast as at its best (default: "
                             f"{PATIENCE_S:g})")
    parser.add_argument("--limit-s", type=cli.positive, default=300.0, metavar="S", help="for each command (default: 300)")
    parser.add_argument("--table-only", action="store_true", help="run nothing; print the results so far")
    parser.add_argument("--gpu", type=Path, metavar="FILE", help="what compare_on_gpu.py wrote")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="also write the results as a page")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be positive")
    workspace = cli.start(args).root
    models = read_manifest(args.folder).chosen(args.only)
    if not models:
        raise UserError(f"{args.folder}: no model with the name {' or '.join(args.only)}")
    judged, paces = read_judgement(args.folder), paces_on_gpu(args.gpu, workspace)

    def is_done(model: str, step: Step) -> bool:
        """Whether a step is done. A prediction for another host pace than the measured one is not, nor is a measurement, of the
        model or its kernels, while the machine was slower than at its best."""
        result = judged.get((model, step))
        if result is None or result.unsteady_share or result.slowed(shortest_canary_ms(judged.values())) > STEADY:
            return False
        return step != "h200" or model not in paces or result.host_pace == paces[model]

    steps = [] if args.table_only else args.steps
    todo = [(model, step) for asked in (ASKED_FIRST, tuple(set(STEPS) - set(ASKED_FIRST))) for model in models
            for step in STEPS if step in asked and step in steps and (step in args.again or not is_done(model.name, step))]
    until = time.monotonic() + 60 * args.minutes if args.minutes else math.inf
    plan = MeasuringPlan(args.rounds, args.budget_s, args.patience_s, args.limit_s)
    begun, results = "", list[StepResult]()
    for model, step in cli.progress(todo, "judging"):
        if model.name != begun and time.monotonic() > until:
            log.warning("%g minutes are over; the same command continues with %s", args.minutes, model.name)
            break
        begun, path = model.name, (args.folder / model.file).resolve()
        best_ms = shortest_canary_ms([*judged.values(), *results])
        if step in MEASUREMENTS:
            result = measured(model, path, step, plan, best_ms)
        else:
            if step == "cpu_filled":
                wait_until_best(plan, best_ms)
            result = predicted(model, path, step, workspace, args.limit_s, paces.get(model.name) if step == "h200" else None)
        results.append(result)
        files.append_line(args.folder / JUDGEMENT, result.model_dump_json())
        if result.outcome != "answered":
            log.info("%s, %s: %s", model.name, SAID.get(step, step), result.description)
    rows = rows_of(models, read_judgement(args.folder), on_gpu(args.gpu))
    if args.docs:
        files.write_text(args.docs, page(rows, COMMANDS, context()))
    if args.json:
        cli.print_json({"models": shown(rows), "summary": summary(rows)})
        return 0
    cli.print_table(shown(rows))
    print()
    cli.print_table(summary(rows))
    return 0


if __name__ == "__main__":
    cli.run(main)
