"""Campaign `kills`: commands that are killed or stopped at a random moment, and run again. Nothing may be lost, and nothing may
stand twice."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fuzz.reporting import HANG_S, Outcome, titled
from fuzz.small_workspace import conv_net, learning, make_workspace
from hase.inference import predict
from hase.records.dataset_files import journal_path, read_journal
from hase.records.dataset_tables import read_kernel_table, read_model_table
from hase.runtimes import local_target
from hase.utils.files import PREFIX, UNLOCKED_PREFIX, complete_bytes, sha256
from hase.utils.locks import FOLDER_VARIABLE
from hase.utils.paths import ROOT, Workspace

CASES = 40
SIGNALS = (signal.SIGKILL, signal.SIGINT)  # in turn; the first goes to the command alone, the second as from a terminal
ENDS_WITHIN_S = 5.0  # the children of a command that was killed
RESUMED_S = 600.0
TARGET = local_target("cpu").name
COLLECTOR = """
levels: [0.0]
window_s: 0.2
patience_s: 0
attempts: 1
block_kernels: 2
kernel: {warmup: 1, budget_s: 0.01, least_runs: 3, most_runs: 10}
model: {warmup: 1, budget_s: 0.05, least_runs: 4, most_runs: 50}
"""
Commands = list[list[str | Path]]


@dataclass(frozen=True)
class Work:
    """Work that a campaign interrupts.

    Attributes:
        name: of it.
        commands: it by the folder of its workspace, one command after another; the first is interrupted.
        prepare: makes the workspace.
        state: what must be the same in the end as without an interruption.
    """

    name: str
    commands: Callable[[Path], Commands]
    prepare: Callable[[Path], object]
    state: Callable[[Path], Any]


def analysed(root: Path, models: int = 2) -> None:
    """A workspace with some small models, their records and their kernels."""
    with_models(root, models)
    (root / "collector.yaml").write_text(COLLECTOR)
    for command in analysing(root):
        subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def collecting(root: Path) -> Commands:
    return [["benchmark/collector.py", "--workspace", root, "--config", root / "collector.yaml", "--quiet"]]


def measured(root: Path) -> Counter[tuple[str, ...]]:
    """How often the journal holds each measurement, and each table each row."""
    workspace = Workspace(root)
    counts: Counter[tuple[str, ...]] = Counter((m.subject, m.id, m.label) for block in read_journal(workspace.dataset(TARGET))
                                               for m in block.measurements)
    counts.update(("kernel row", str(name)) for name in read_kernel_table(workspace, TARGET)["Kernel_ID"])
    counts.update(("model row", str(name)) for name in read_model_table(workspace, TARGET)["Model"])
    return counts


def predicted(root: Path) -> tuple[str, ...]:
    """The predictions of what a training learned, and the files that it left."""
    workspace = Workspace(root)
    kept = sorted(path.name for path in workspace.predictors(TARGET).iterdir() if not path.name.startswith("."))
    answers = [predict(model, target=TARGET, workspace=workspace, strict=strict).latency_ms
               for model in ("anet_c16.onnx", "cnet_c32.onnx") for strict in (False, True)]
    return *kept, *(f"{latency_ms:.9g}" for latency_ms in answers)


def made(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)


def exporting(root: Path) -> Commands:
    return [["model_zoo/torchvision_exporter.py", "--workspace", root, "--model", "squeezenet1_1", "--model", "squeezenet1_0",
             "--image-size", "32", "--device", "cpu", "--quiet"]]


def exported(root: Path) -> tuple[str, ...]:
    """The models of a workspace with their sizes; everything else there is hidden or a log."""
    return tuple(f"{path.relative_to(root)}: {path.stat().st_size}" for path in sorted((root / "model_zoo").rglob("*"))
                 if path.is_file() and path.name not in (".writer", ".lock"))


def with_a_model(root: Path) -> None:
    made(root)
    conv_net(root / "newnet.onnx", channels=20, size=12)


def measuring(root: Path) -> Commands:
    return [["inference/predict_model_latency.py", "--workspace", root, "--model", root / "newnet.onnx", "--target", TARGET,
             "--measure-missing", "--quiet"]]


def looked_up(root: Path) -> tuple[Any, ...]:
    """How often the kernel that was measured most was measured while the machine was steady; which kernels were; and which
    share of the model's latency is measured."""
    workspace = Workspace(root)
    blocks = read_journal(workspace.dataset(TARGET))
    steady = Counter((m.id, m.label, m.place) for block in blocks for m in block.measurements if not block.unsteady)
    kernels = sorted({m.id for block in blocks for m in block.measurements})
    prediction = predict(root / "newnet.onnx", target=TARGET, workspace=workspace)
    return max(steady.values(), default=1), kernels, round(prediction.time_share["measured"], 6)


def learned(root: Path) -> None:
    make_workspace(root)


def analysing(root: Path) -> Commands:
    return [["ort_analysis/fusion_detector.py", "--workspace", root, "--quiet"],
            ["kernel_model/kernel_builder.py", "--workspace", root, "--quiet"]]


def with_models(root: Path, count: int = 6) -> None:
    for channels in range(8, 8 + 4 * count, 4):
        conv_net(Workspace(root).models / f"net_c{channels}.onnx", channels=channels)


def built(root: Path) -> tuple[str, ...]:
    """The records and the kernels of a workspace, by their contents."""
    return tuple(f"{path.relative_to(root)} {sha256(path)}" for part in ("ort_analysis", "kernel_model")
                 for path in sorted((root / part).rglob("*.*")) if path.is_file() and not path.name.startswith("."))


WORKS = (Work("analysis", analysing, with_models, built), Work("collector", collecting, analysed, measured),
         Work("training", learning, learned, predicted), Work("exporter", exporting, made, exported),
         Work("measure-missing", measuring, with_a_model, looked_up))


def started(command: list[str | Path], temporary: Path) -> subprocess.Popen[str]:
    """Starts a command, with temporary files and locks of devices of its own: it waits for nobody else who measures."""
    settings = {"TMPDIR": str(temporary), FOLDER_VARIABLE: str(temporary)}
    return subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, env=os.environ | settings,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)


def interrupted(command: list[str | Path], after_s: float, number: signal.Signals, temporary: Path) -> str:
    """Starts a command, ends it by a signal after a time, and returns what is wrong with how it ended; "" where nothing is."""
    process = started(command, temporary)
    with suppress(subprocess.TimeoutExpired):
        process.wait(after_s)
    family = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    if number == signal.SIGINT:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    try:
        stderr = process.communicate(timeout=HANG_S)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "it did not end"
    _, alive = psutil.wait_procs(family, ENDS_WITHIN_S)
    left = [child.pid for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    if left:
        return f"its children {left} did not end"
    # while Python still loads the command, it says so in its own words
    loading = stderr.rstrip().endswith("KeyboardInterrupt") and "cli.run(main" not in stderr
    return stderr if ("Traceback" in stderr and not loading) or "terminate called" in stderr else ""


def resumed(commands: Commands, temporary: Path) -> str:
    """Runs commands, and returns what is wrong; "" where nothing is."""
    for command in commands:
        process = started(command, temporary)
        try:
            stderr = process.communicate(timeout=RESUMED_S)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"{command[0]} did not end"
        if process.returncode:
            return f"{command[0]}: exit code {process.returncode}: {stderr}"
    return ""


def journal_lines(root: Path) -> bytes:
    """The complete lines of the workspace's journal."""
    path = journal_path(Workspace(root).dataset(TARGET))
    return path.read_bytes()[:complete_bytes(path)] if path.is_file() else b""


def interruption(work: Work, prepared: Path, wanted: Any, lasts_s: float, rng: random.Random,
                 number: signal.Signals) -> Outcome:
    """The outcomes of a work that is interrupted once or twice at a random moment, and then runs to its end."""
    with tempfile.TemporaryDirectory(dir=prepared.parent) as folder:
        root, temporary = Path(folder) / prepared.name, Path(folder) / "temporary"
        temporary.mkdir()
        shutil.copytree(prepared, root)
        commands, began_s = work.commands(root), time.monotonic()
        moments_s = [rng.uniform(0.0, lasts_s) for _ in range(rng.choice([1, 1, 2]))]
        case = f"{work.name}, {number.name} after {' and '.join(f'{moment_s:.2f} s' for moment_s in moments_s)}"
        for moment_s in moments_s:
            if wrong := interrupted(commands[0], moment_s, number, temporary):
                what = "traceback" if "Traceback" in wrong else "hang" if "did not end" in wrong else "crash"
                return Outcome(what, case, wrong)
            kept = journal_lines(root)
        if wrong := resumed(commands, temporary):
            return Outcome("traceback" if "Traceback" in wrong else "crash", case, f"run again: {wrong}")
        seconds = time.monotonic() - began_s
        if not journal_lines(root).startswith(kept):
            return Outcome("another answer", case, "lines of the journal are lost")
        if (state := work.state(root)) != wanted:
            return Outcome("another answer", case, f"{state} where {wanted} is right", seconds=seconds)
        if left := [path.name for path in temporary.iterdir() if path.name.startswith((PREFIX, UNLOCKED_PREFIX))]:
            return Outcome("another answer", case, f"files are left: {left}", seconds=seconds)
        return Outcome("answer", case, seconds=seconds)


def hear_interrupts() -> None:
    """Has the commands that this process starts hear Ctrl-C, even if a shell started it in the background, where none does."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def interruptions(work: Work, numbers: Sequence[int], seed: int, folder: Path) -> Iterator[Outcome]:
    """The outcomes of interruptions of a work, each with a number of its own; every other one is a SIGKILL."""
    hear_interrupts()
    prepared, whole = folder / work.name / "workspace", folder / work.name / "whole"
    shutil.rmtree(folder / work.name, ignore_errors=True)
    prepared.parent.mkdir(parents=True)
    work.prepare(prepared)
    shutil.copytree(prepared, whole)
    began_s = time.monotonic()
    wrong = resumed(work.commands(whole)[:1], folder)
    lasts_s = time.monotonic() - began_s
    if wrong := wrong or resumed(work.commands(whole)[1:], folder):
        raise RuntimeError(f"{work.name}: {wrong}")
    wanted = work.state(whole)
    for number in numbers:
        yield interruption(work, prepared, wanted, lasts_s, random.Random(f"{seed} {work.name} {number}"),
                           SIGNALS[number % len(SIGNALS)])


def outcomes(count: int, seed: int, folder: Path) -> Iterator[tuple[str, Outcome]]:
    """The outcomes of `count` interruptions, of each work about as many."""
    for index, work in enumerate(WORKS):
        if numbers := range(len(range(index, count, len(WORKS)))):
            yield from titled(f"{work.name}, interrupted and resumed", interruptions(work, numbers, seed, folder))
