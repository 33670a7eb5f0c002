"""Times predictions: from the shell, for a new file, for the same file again, and from a kernel record.

Reads a model and what training learned for the target, as the predictor does. If --config names a Prometheus, or with --metrics
FILE, predictions under load are timed too, with the load read each time. Prints one row per case; writes nothing.

With --shell it takes several models, and times only the command: without a cache, with an empty one, and again. Each model has
a row with seconds of wall-clock and of CPU time, which depends less on what else runs.

With --against FOLDER, the checkout of another version, it prints how many times as much CPU time this version takes as that
one, for one answer in a fresh process, a repeated answer, and many records; both versions take turns.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import gc
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

from hase.inference import Predictor, predict
from hase.inference.live.load import CONFIG_FILE, InferenceConfig, LoadReading, current_load, fields_asked
from hase.inference.prediction.sources import source_record
from hase.inference.prediction.targets import choose_target, fitted_for
from hase.inference.prediction.under_load import co_runner_from_summary
from hase.utils import cli
from hase.utils.cache_folder import OFF, VARIABLE
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.files import temporary_folder
from hase.utils.logger import progress
from hase.utils.paths import ROOT, Workspace
from hase.utils.timing import summarize, time_runs_ms

if TYPE_CHECKING:
    from hase.records.kernel_record import ModelRecord

MANY = 1000  # records in one call
ROUNDS = 3  # with --against: each runs both versions
# Prints the seconds of a case with the version in a folder: those of the process for its first answer, of an answer that was
# given before, and of whole answers for many records. A version without the folder hase/ is imported without that prefix.
TIMED = """
import gc, statistics, sys, time
from importlib import import_module
from pathlib import Path
folder, case, record, target, many = sys.argv[1:]
sys.path.insert(0, folder)
prefix = "hase." if Path(folder, "hase").is_dir() else ""
Record = import_module(prefix + ("records" if prefix else "ort_analysis.records") + ".kernel_record").ModelRecord
predictor = import_module(prefix + "inference").Predictor(target=target)
text = Path(record).read_text(encoding="utf-8")
records = [Record.model_validate_json(text).model_copy(update={"model": str(number)})
           for number in range(int(many) if case == "many" else 1)]
if case == "first":
    predictor.predict(records[0])
    print(time.process_time())
elif case == "again":
    taken = []
    for _ in range(60):
        began = time.process_time()
        predictor.predict(records[0])
        taken.append(time.process_time() - began)
    print(statistics.median(taken[10:]))
else:
    gc.collect()  # garbage from reading the records is no part of predicting
    began = time.process_time()
    predictor.predict_many(records)
    print(time.process_time() - began)
"""
SHELLS = 3  # predictions from the shell, at most
SHOWN_FIELDS = ("without_cache", "first", "again")
EXAMPLES = """
python inference/prediction_speed.py --model resnet18.onnx
python inference/prediction_speed.py --workspace out/demo --model resnet18_fp32_b1_224x224.onnx  # needs make demo
python inference/prediction_speed.py --model resnet18.onnx --on h200
python inference/prediction_speed.py --model resnet18.onnx --on h200 --config my.yaml  # needs a Prometheus
python inference/prediction_speed.py --model model_zoo/models --on h200 --shell
python inference/prediction_speed.py --model resnet50.onnx --on h200 --against ../before  # needs a checkout
"""


def milliseconds(work: Callable[[], Any], repeats: int) -> float:
    """The median time of `work` over `repeats` calls, in milliseconds."""
    return summarize(time_runs_ms(work, repeats)).median_ms


def from_the_shell(model: Path, workspace: Workspace, target: str, strict: bool = False, cache: str = OFF) -> None:
    """Makes one prediction by the command; `cache`: the folder of its cache, or OFF."""
    command = [sys.executable, "inference/predict_model_latency.py", "--workspace", str(workspace.root), "--model", str(model),
               "--target", target]
    result = subprocess.run([*command, "--strict"] if strict else command, cwd=ROOT, env=os.environ | {VARIABLE: cache},
                            capture_output=True, text=True, check=False)
    if result.returncode:
        raise UserError(result.stderr.strip().removeprefix("error: "))


def shell_row(model: Path, workspace: Workspace, target: str, repeats: int) -> dict[str, Any]:
    """The median wall-clock and CPU seconds of one model's predictions from the shell."""
    def times_s(cache: str) -> tuple[float, float]:
        began, used = time.perf_counter(), _processor_s()
        from_the_shell(model, workspace, target, cache=cache)
        return time.perf_counter() - began, _processor_s() - used

    rounds: list[tuple[tuple[float, float], ...]] = []
    for _ in range(repeats):
        with temporary_folder() as cache:
            rounds.append((times_s(OFF), times_s(str(cache)), times_s(str(cache))))
    medians = {field: [statistics.median(times[index][clock] for times in rounds) for clock in range(2)]
               for index, field in enumerate(SHOWN_FIELDS)}
    return {"model": model.stem} | {f"{field}_s": clock_s for field, (clock_s, _) in medians.items()} | {
        f"{field}_processor_s": processor_s for field, (_, processor_s) in medians.items()}


def _processor_s() -> float:
    """The CPU time of ended child processes."""
    used = psutil.Process().cpu_times()
    return float(used.children_user + used.children_system)


def ratios(record: ModelRecord, target: str, other: Path) -> list[dict[str, Any]]:
    """A row for each case: the CPU seconds with this version and with the one in the folder `other`, and their ratio. Raises
    UserError, with the version's own message, if one of them fails."""
    rows = []
    with temporary_folder() as folder:
        path = folder / "record.json"
        path.write_text(record.model_dump_json(), encoding="utf-8")

        def case_s(root: Path, case: str) -> float:
            result = subprocess.run([sys.executable, "-c", TIMED, str(root), case, str(path), target, str(MANY)], cwd=root,
                                    env=os.environ | {VARIABLE: OFF}, capture_output=True, text=True, check=False)
            if result.returncode:
                raise UserError(f"{root}: {result.stderr.strip()}")
            return float(result.stdout)

        for case, what in (("first", "one answer, in a fresh process"), ("again", "the same answer again"),
                           ("many", f"{MANY} records in one call, each read by itself")):
            rounds = [(case_s(ROOT, case), case_s(other, case)) for _ in range(ROUNDS)]
            here_s, there_s = (statistics.median(times_s) for times_s in zip(*rounds, strict=True))
            rows.append({"case": what, "processor_s": here_s, "other_processor_s": there_s, "ratio": here_s / there_s})
    return rows


def copies(record: ModelRecord, count: int) -> list[ModelRecord]:
    """`count` copies of a record under different names that share no objects, as if read from as many files."""
    text = record.model_dump_json()
    return [type(record).model_validate_json(text).model_copy(update={"model": f"{record.model}_{number}"})
            for number in range(count)]


def cases(model: Path, workspace: Workspace, target: str | None, repeats: int,
          read_load: Callable[[], LoadReading] | None = None) -> list[dict[str, Any]]:
    """One row per case: what is predicted from what, and the median time in ms; with `read_load`, also under that load."""
    os.environ[VARIABLE] = OFF  # for this process; the commands name theirs
    target, _ = choose_target(workspace, target)
    cold, strict_cold = (milliseconds(partial(from_the_shell, model, workspace, target, strict), min(repeats, SHELLS))
                         for strict in (False, True))
    with temporary_folder() as cache:
        from_the_shell(model, workspace, target, cache=str(cache))
        cached = milliseconds(partial(from_the_shell, model, workspace, target, cache=str(cache)), min(repeats, SHELLS))
    predict_one = partial(predict, target=target)
    flavour = fitted_for(workspace, target).target.flavour
    first = milliseconds(lambda: predict_one(model, workspace=workspace), 1)
    again = milliseconds(lambda: predict_one(model, workspace=workspace), repeats)
    record = source_record(model, flavour)
    from_record = milliseconds(lambda: predict_one(record, workspace=workspace), repeats)
    strict_first = milliseconds(lambda: predict_one(record, workspace=workspace, strict=True), 1)
    strict_again = milliseconds(lambda: predict_one(record, workspace=workspace, strict=True), repeats)
    loaded_cases: list[tuple[str, float]] = []
    if read_load:
        def under_load() -> None:
            load = read_load()
            predict_one(model, workspace=workspace, load=load.metrics,
                        co_runner=co_runner_from_summary(fitted_for(workspace, target), load.probe))

        loaded_cases = [("reading the load", milliseconds(read_load, repeats)),
                        ("the same file under load, which is read each time", milliseconds(under_load, repeats))]
    records = copies(record, MANY)
    gc.collect()  # garbage from reading the records must not count
    many = milliseconds(lambda: Predictor(workspace, target).predict_many(records), 1)
    return [{"case": case, "median_ms": median_ms} for case, median_ms in (
        ("from the shell", cold), ("from the shell, --strict", strict_cold), ("from the shell, again", cached),
        ("in a running process, first prediction of all", first), ("the same file again", again),
        ("from its record", from_record), ("from its record, strict, first", strict_first),
        ("from its record, strict, again", strict_again), *loaded_cases,
        (f"{MANY} records in one call, each read by itself", many))]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    cli.add_models(parser)
    parser.add_argument("--shell", action="store_true",
                        help="of each model, only the command: without a cache, first and again")
    parser.add_argument("--against", type=Path, metavar="FOLDER",
                        help="a checkout of another version: how many times as long this one takes")
    parser.add_argument("--repeats", type=cli.count, default=20, help="calls of the cases that can be repeated (default: 20)")
    cli.add_target(parser)
    cli.add_load(parser, CONFIG_FILE)
    args = parser.parse_args()
    workspace = cli.start(args)
    models = workspace.find_models(args.model)
    if args.shell:
        target, _ = choose_target(workspace, args.target)
        cli.print_rows([shell_row(model.resolve(), workspace, target, min(args.repeats, SHELLS))
                        for model in progress(models, "models")], args.json, "seconds of a prediction from the shell")
        return 0
    if len(models) > 1:
        parser.error(f"--model names {len(models)} models: give --shell, or one model")
    if args.against:
        target, _ = choose_target(workspace, args.target)
        record = source_record(models[0].resolve(), fitted_for(workspace, target).target.flavour)
        cli.print_rows(ratios(record, target, args.against.resolve()), args.json, "this version against another")
        return 0
    config = read_config(args.config, InferenceConfig, args.changes).never_idle()

    def read_load() -> LoadReading:
        fitted = fitted_for(workspace, args.target)
        return current_load(config, args.metrics, fields_asked(fitted), fitted.sharing is not None)

    rows = cases(models[0].resolve(), workspace, args.target, args.repeats,
                 read_load if args.metrics or config.prometheus.url else None)
    cli.print_rows(rows, args.json, "how long a prediction takes")
    return 0


if __name__ == "__main__":
    cli.run(main)
