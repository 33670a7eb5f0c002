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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from fuzz.reading import HANG_S, Outcome, Parts
from fuzz.small_workspace import conv_net, learning, make_workspace
from hase.inference import predict
from hase.records.dataset_files import journal_path, read_journal
from hase.records.dataset_tables import read_kernel_table, read_model_table
from hase.runtimes import local_target
from hase.utils.files import TEMPORARY_PREFIX, UNLOCKED_PREFIX, complete_bytes, sha256
from hase.utils.locks import FOLDER_VARIABLE
from hase.utils.paths import ROOT, Workspace

CASES = 40
SIGNALS = (signal.SIGKILL, signal.SIGINT)  # in turn; the first goes to the command alone, the second as from a terminal
ENDS_WITHIN_S = 5.0  # the children of a command that was killed
RESUMED_S = 600.0
TARGET = local_target("cpu").name
COLLECTOR = """{levels: [0.0], window_s: 0.2, patience_s: 0, attempts: 1, block_kernels: 2, kernel: {
warmup: 1, budget_s: 0.01, least_runs: 3, most_runs: 10}, model: {warmup: 1, budget_s: 0.05, least_runs: 4, most_runs: 50}}
"""
Commands = list[list[str | Path]]


@dataclass(frozen=True)
class Work:
    """Work that a campaign interrupts: its commands by the folder of its workspace, the first of which is interrupted."""

    name: str
    commands: Callable[[Path], Commands]
    prepare: Callable[[Path], object]  # makes the workspace
    state: Callable[[Path], Any]  # what must be the same in the end as without an interruption


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


def collecting(root: Path) -> Commands:
    return [["benchmark/collector.py", "--workspace", root, "--config", root / "collector.yaml", "--quiet"]]


def analysed(root: Path, models: int = 2) -> None:
    """A workspace with some small models, their records and their kernels."""
    with_models(root, models)
    (root / "collector.yaml").write_text(COLLECTOR)
    for command in analysing(root):
        subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


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


def exporting(root: Path) -> Commands:
    return [["model_zoo/torchvision_exporter.py", "--workspace", root, "--model", "squeezenet1_1", "--model", "squeezenet1_0",
             "--image-size", "32", "--device", "cpu", "--quiet"]]


def exported(root: Path) -> tuple[str, ...]:
    """The files of a zoo with their sizes."""
    return tuple(f"{path.relative_to(root)}: {path.stat().st_size}" for path in sorted((root / "model_zoo").rglob("*"))
                 if path.is_file() and path.name not in (".writer", ".lock"))


def measuring(root: Path) -> Commands:
    return [["inference/predict_model_latency.py", "--workspace", root, "--model", root / "newnet.onnx", "--target", TARGET,
             "--measure-missing", "--quiet"]]


def looked_up(root: Path) -> tuple[int, list[str], float]:
    """How often a kernel was measured while the machine was steady, at the most; which kernels were measured at all; and which
    share of the model's latency is."""
    workspace = Workspace(root)
    blocks = read_journal(workspace.dataset(TARGET))
    steady = Counter((m.id, m.label, m.place) for block in blocks for m in block.measurements if not block.unsteady)
    share = predict(root / "newnet.onnx", target=TARGET, workspace=workspace).time_share["measured"]
    return max(steady.values(), default=1), sorted({m.id for block in blocks for m in block.measurements}), round(share, 6)


WORKS = (Work("analysis", analysing, with_models, built), Work("collector", collecting, analysed, measured),
         Work("training", learning, make_workspace, predicted), Work("exporter", exporting, Path.mkdir, exported),
         Work("measure-missing", measuring, lambda root: conv_net(root / "newnet.onnx", channels=20, size=12), looked_up))


def started(command: list[str | Path], temporary: Path) -> subprocess.Popen[str]:
    """Starts a command, with temporary files and locks of devices of its own: it waits for nobody else who measures."""
    settings = {"TMPDIR": str(temporary), FOLDER_VARIABLE: str(temporary)}
    return subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, env=os.environ | settings,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)


def ended(process: subprocess.Popen[str], within_s: float) -> tuple[str, str]:
    """What a command wrote on stderr, and "it did not end" where it had to be killed."""
    try:
        return process.communicate(timeout=within_s)[1], ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "", "it did not end"


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
    stderr, wrong = ended(process, HANG_S)
    if wrong:
        return wrong
    _, alive = psutil.wait_procs(family, ENDS_WITHIN_S)
    if left := [child.pid for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]:
        return f"its children {left} did not end by themselves"
    # while Python still loads the command, it says so in its own words
    loading = stderr.rstrip().endswith("KeyboardInterrupt") and "cli.run(main" not in stderr
    return stderr if ("Traceback" in stderr and not loading) or "terminate called" in stderr else ""


def resumed(commands: Commands, temporary: Path) -> str:
    """Runs commands, and returns what is wrong; "" where nothing is."""
    for command in commands:
        process = started(command, temporary)
        stderr, wrong = ended(process, RESUMED_S)
        if wrong or process.returncode:
            return f"{command[0]}: {wrong or f'exit code {process.returncode}: {stderr}'}"
    return ""


def journal_lines(root: Path) -> bytes:
    """The complete lines of the workspace's journal."""
    path = journal_path(Workspace(root).dataset(TARGET))
    return path.read_bytes()[:complete_bytes(path)] if path.is_file() else b""


def left_in(folder: Path) -> list[str]:
    """Temporary files of Hase."""
    return [path.name for path in folder.iterdir() if path.name.startswith((TEMPORARY_PREFIX, UNLOCKED_PREFIX))]


Disturb = Callable[[Path, Path], Iterable[str]]  # in a workspace, with a folder for temporary files: what is wrong each time


def outcome_of(work: Work, prepared: Path, wanted: Any, case: str, disturb: Disturb) -> tuple[Outcome, list[bytes]]:
    """The outcome of a work that is disturbed and then runs to its end, and the lines of its journal after each of these."""
    with tempfile.TemporaryDirectory(dir=prepared.parent) as folder:
        root, temporary, began_s, wrong = Path(folder) / prepared.name, Path(folder) / "temporary", time.monotonic(), ""
        temporary.mkdir()
        shutil.copytree(prepared, root)
        journals = list[bytes]()
        for found in disturb(root, temporary):
            wrong = wrong or found
            journals.append(journal_lines(root))
        if wrong := wrong or resumed(work.commands(root), temporary):
            what = "traceback" if "Traceback" in wrong else "hang" if "did not end" in wrong else "crash"
            return Outcome(what, case, wrong), journals
        journals.append(journal_lines(root))
        what, message, state = "another answer", "", work.state(root)
        if not all(after.startswith(before) for before, after in pairwise(journals)):
            message = "lines of the journal are lost"
        elif state != wanted:
            message = f"{state} where {wanted} is right"
        elif left := left_in(temporary):
            message = f"files are left: {left}"
        else:
            what = "answer"
        return Outcome(what, case, message, seconds=time.monotonic() - began_s), journals


def whole_run(work: Work, prepared: Path) -> tuple[Any, float]:
    """What is right in the end, by a run without interruption, and the seconds that its first command takes."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell started this in the background, where none hears Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    shutil.rmtree(prepared.parent, ignore_errors=True)
    prepared.parent.mkdir(parents=True)
    work.prepare(prepared)
    whole, began_s = shutil.copytree(prepared, prepared.parent / "whole"), time.monotonic()
    wrong, lasts_s = resumed(work.commands(whole)[:1], prepared.parent), time.monotonic() - began_s
    if wrong := wrong or resumed(work.commands(whole)[1:], prepared.parent):
        raise RuntimeError(f"{work.name}: {wrong}")
    return work.state(whole), lasts_s


def interruptions(work: Work, numbers: Sequence[int], seed: int, folder: Path) -> Iterator[Outcome]:
    """The outcomes of interruptions of a work, each with a number of its own; every other one is a SIGKILL."""
    prepared = folder / work.name / "workspace"
    wanted, lasts_s = whole_run(work, prepared)
    for number in numbers:
        rng, signal_number = random.Random(f"{seed} {work.name} {number}"), SIGNALS[number % len(SIGNALS)]
        moments_s = [rng.uniform(0.0, lasts_s) for _ in range(rng.choice([1, 1, 2]))]
        case = f"{work.name}, {signal_number.name} after {' and '.join(f'{moment_s:.2f} s' for moment_s in moments_s)}"

        def disturb(root: Path, temporary: Path, moments_s: list[float] = moments_s,
                    number: signal.Signals = signal_number) -> Iterator[str]:
            for moment_s in moments_s:
                yield interrupted(work.commands(root)[0], moment_s, number, temporary)

        yield outcome_of(work, prepared, wanted, case, disturb)[0]


def parts(count: int, seed: int, folder: Path) -> Parts:
    """`count` interruptions, of each work about as many."""
    for index, work in enumerate(WORKS):
        if numbers := range(len(range(index, count, len(WORKS)))):
            yield f"{work.name}, interrupted and resumed", interruptions(work, numbers, seed, folder)
