"""Campaign `cluster`: a collection on two Ray nodes, of which the driver, an actor, a process in which it measures or a whole
node is killed at a random moment. Nothing may be lost, and nothing may stand twice."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ray_nodes import ACTOR, WORKER, NodesHere, nodes_here

from fuzz.kills import (
    Commands,
    analysed,
    collecting,
    hear_interrupts,
    interrupted,
    journal_lines,
    measured,
    resumed,
    started,
)
from fuzz.reporting import HANG_S, Outcome, titled
from hase.utils.files import PREFIX, UNLOCKED_PREFIX
from hase.utils.ray_cluster import check_packages

CASES = 25
VICTIMS = ("driver", "driver (Ctrl-C)", "actor", "worker", "node")
NODES = 2
MODELS = 6
MEASURES = 0.7  # of the time that a collection takes: about so much is left when its actors are there
LOOK_EVERY_S = 0.05
STARTS_WITHIN_S = 60.0  # an actor, and the processes in which it measures


def on_cluster(root: Path, address: str) -> Commands:
    """The collector's command, with Ray."""
    return [[*command, "--ray", address, "--set", "each_machine=false"] for command in collecting(root)]


def victim_of(what: str, cluster: NodesHere, rng: random.Random) -> psutil.Process | Any | None:
    """What is to be killed, chosen at random: a process, or a node; None where there is none yet."""
    processes = cluster.processes(ACTOR) if what == "actor" else cluster.processes("", WORKER)
    if not processes:
        return None
    return rng.choice(cluster.nodes) if what == "node" else rng.choice(processes)


def killed_beside(what: str, root: Path, after_s: float, cluster: NodesHere, rng: random.Random,
                  temporary: Path) -> tuple[str, bytes]:
    """Starts a collection, kills something of the cluster `after_s` seconds after that is there, and waits until the collection
    ends; returns what is wrong, "" where nothing is, and the journal's lines when it was killed."""
    command = on_cluster(root, cluster.address)[0]
    process = started(command, temporary)
    until_s = time.monotonic() + STARTS_WITHIN_S
    while process.poll() is None and victim_of(what, cluster, rng) is None and time.monotonic() < until_s:
        time.sleep(LOOK_EVERY_S)
    with suppress(subprocess.TimeoutExpired):
        process.wait(after_s)
    before = journal_lines(root)
    if (victim := victim_of(what, cluster, rng)) is not None:
        if what == "node":
            cluster.kill(victim)
        else:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
    try:
        stderr = process.communicate(timeout=HANG_S)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "it did not end", before
    while len(cluster.nodes) < NODES:
        cluster.add()
    fault = "Traceback" in stderr or "terminate called" in stderr or process.returncode not in (0, 1)
    return stderr if fault else "", before


@dataclass
class Counts:
    """How many kills so far came when a part was measured, and after how many of these the same run measured the rest."""

    in_the_middle: int = 0
    went_on: int = 0

    def __str__(self) -> str:
        return f"{self.in_the_middle} came in the middle; after {self.went_on} of them the run measured the rest"


def interruption(what: str, prepared: Path, wanted: Counter[tuple[str, ...]], lasts_s: float, rng: random.Random,
                 cluster: NodesHere, counts: Counts) -> Outcome:
    """The outcomes of a collection that is disturbed once and then run again."""
    with tempfile.TemporaryDirectory(dir=prepared.parent) as folder:
        root, temporary = Path(folder) / prepared.name, Path(folder) / "temporary"
        temporary.mkdir()
        shutil.copytree(prepared, root)
        commands, began_s = on_cluster(root, cluster.address), time.monotonic()
        begins_s = lasts_s * (1 - MEASURES) if what.startswith("driver") else 0.0  # what else is killed has to be there first
        after_s = begins_s + rng.uniform(0.0, lasts_s * MEASURES)
        case = f"{what} killed after {after_s:.2f} s"
        if what.startswith("driver"):
            number = signal.SIGINT if "Ctrl-C" in what else signal.SIGKILL
            wrong = interrupted(commands[0], after_s, number, temporary)
            before = journal_lines(root)
        else:
            wrong, before = killed_beside(what, root, after_s, cluster, rng, temporary)
        if wrong:
            fault = "traceback" if "Traceback" in wrong else "hang" if "did not end" in wrong else "crash"
            return Outcome(fault, case, wrong)
        kept = journal_lines(root)
        if wrong := resumed(commands, temporary):
            return Outcome("traceback" if "Traceback" in wrong else "crash", case, f"run again: {wrong}")
        seconds, lines = time.monotonic() - began_s, journal_lines(root)
        if not lines.startswith(kept) or not kept.startswith(before):
            return Outcome("another answer", case, "lines of the journal are lost")
        if (state := measured(root)) != wanted:
            return Outcome("another answer", case, f"{state - wanted} too many, {wanted - state} lost", seconds=seconds)
        if before and before != lines:
            counts.in_the_middle += 1
            counts.went_on += kept == lines
        return Outcome("answer", case, seconds=seconds, remark=str(counts))


def outcomes(count: int, seed: int, folder: Path) -> Iterator[tuple[str, Outcome]]:
    """The outcomes of `count` kills, of each victim about as many."""
    check_packages()
    hear_interrupts()
    shutil.rmtree(folder / "collector", ignore_errors=True)
    prepared, whole, temporary = (folder / "collector" / name for name in ("workspace", "whole", "temporary"))
    temporary.mkdir(parents=True)
    analysed(prepared, MODELS)
    shutil.copytree(prepared, whole)
    with nodes_here(temporary, [()] * NODES) as cluster:
        began_s = time.monotonic()
        if wrong := resumed(on_cluster(whole, cluster.address), temporary):
            raise RuntimeError(wrong)
        lasts_s, wanted = time.monotonic() - began_s, measured(whole)
        for index, what in enumerate(VICTIMS):
            counts = Counts()
            yield from titled(f"{what} killed", (
                interruption(what, prepared, wanted, lasts_s, random.Random(f"{seed} {what} {number}"), cluster, counts)
                for number in range(len(range(index, count, len(VICTIMS))))))
        if resumed(on_cluster(whole, cluster.address), temporary) or (left := _left(temporary)):
            yield "files left", Outcome("another answer", "temporary files", f"files are left: {left}")


def _left(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith((PREFIX, UNLOCKED_PREFIX))]
