"""Campaign `rewriting`: processes that predict while predictors are trained again and again, with two configs in turn.

Every latency must be one that some training gave.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fuzz.reading import Outcome, Parts
from fuzz.small_workspace import TRAINING, learning, trained_workspace
from hase.inference import predict
from hase.records.kernel_record_files import record_path
from hase.runtimes import local_flavour, local_target
from hase.utils import files
from hase.utils.paths import ROOT, Workspace

CASES = 50  # processes
MODELS = ("anet_c16", "cnet_c32")  # by their records, so that no process needs another one that parses a model
TREES = (60, 20)  # of the two trainings
ANSWERS = 30  # of a process
MOST_S = 1200.0  # of all processes together
PAUSE_S = 0.1  # between two answers of a process


def latencies_ms(root: Path) -> list[float]:
    """The latencies of MODELS, each once with times that were measured, and once predicted."""
    records = [record_path(Workspace(root), local_flavour("cpu"), model) for model in MODELS]
    return [predict(record, target=local_target("cpu").name, workspace=root, strict=strict).latency_ms
            for record in records for strict in (False, True)]


def train(root: Path, trees: int) -> Iterator[list[float]]:
    """Trains with so many trees; yields the latencies after each of the two commands."""
    files.write_text(root / "training.yaml", TRAINING.replace(f"trees: {TREES[0]}", f"trees: {trees}"))
    for command in learning(root):
        subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        yield latencies_ms(root)


def cases(count: int, root: Path, answers: int = ANSWERS) -> Iterator[Outcome]:
    """The outcomes of `count` processes that predict in the small workspace at `root`."""
    right = [latencies_ms(root), *(answer for trees in reversed(TREES) for answer in train(root, trees))]
    processes = [subprocess.Popen([sys.executable, "-m", "fuzz.rewriting", str(root), str(answers)], cwd=ROOT / "tests",
                                  env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True) for _ in range(count)]
    trainings, began_s = 0, time.monotonic()
    while any(process.poll() is None for process in processes) and time.monotonic() - began_s < MOST_S:
        trainings += 1
        right += train(root, TREES[trainings % 2])
    for process in processes:
        if hangs := process.poll() is None:
            process.kill()
        stdout, stderr = process.communicate()
        what = "hang" if hangs else "traceback" if "Traceback" in stderr else "crash" if process.returncode else "answer"
        for answer in map(json.loads, stdout.splitlines()) if what == "answer" else ():
            if not all(any(math.isclose(latency, known) for known in column)  # each by itself: a training may end between two
                       for latency, column in zip(answer, zip(*right, strict=True), strict=True)):
                what, stderr = "another answer", f"{answer} where {right} are right"
        yield Outcome(what, f"process {process.pid}", stderr, remark=f"{trainings} trainings, {answers} answers of each")


def parts(count: int, seed: int, folder: Path) -> Parts:
    yield "processes that predict while predictors are trained", cases(count, trained_workspace(folder / "workspace").root)


if __name__ == "__main__":
    for _ in range(int(sys.argv[2])):
        print(json.dumps(latencies_ms(Path(sys.argv[1]))), flush=True)
        time.sleep(PAUSE_S)
