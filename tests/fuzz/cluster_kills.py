"""Campaign `cluster`: a collection on two Ray nodes, of which the driver, an actor, a process in which it measures or a whole
node is killed at a random moment. Nothing may be lost, and nothing may stand twice."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from ray_nodes import ACTOR, WORKER, NodesHere, nodes_here

from fuzz.kills import (
    Commands,
    Work,
    analysed,
    collecting,
    ended,
    interrupted,
    journal_lines,
    left_in,
    measured,
    outcome_of,
    resumed,
    started,
    whole_run,
)
from fuzz.reading import HANG_S, Outcome, Parts
from hase.utils.ray_cluster import check_packages

CASES = 25
VICTIMS = ("driver", "driver (Ctrl-C)", "actor", "worker", "node")
NODES, MODELS = 2, 6
MEASURES = 0.7  # of the time that a collection takes: about so much is left when its actors are there
STARTS_WITHIN_S = 60.0  # an actor, and the processes in which it measures


def on_cluster(address: str, root: Path) -> Commands:
    """The collector's command, with Ray."""
    return [[*command, "--ray", address, "--set", "each_machine=false"] for command in collecting(root)]


def victim_of(what: str, cluster: NodesHere, rng: random.Random) -> psutil.Process | Any | None:
    """What is to be killed, chosen at random: a process, or a node; None where nothing is measured yet."""
    processes = cluster.processes(ACTOR) if what == "actor" else cluster.processes("", WORKER)
    return rng.choice(cluster.nodes if what == "node" else processes) if processes else None


def killed_beside(what: str, command: list[str | Path], root: Path, after_s: float, cluster: NodesHere, rng: random.Random,
                  temporary: Path) -> tuple[str, bytes]:
    """Starts a collection, kills something of the cluster `after_s` seconds after that is there, and waits until the collection
    ends; returns what is wrong, "" where nothing is, and the journal's lines when it was killed."""
    process, until_s = started(command, temporary), time.monotonic() + STARTS_WITHIN_S
    while process.poll() is None and victim_of(what, cluster, rng) is None and time.monotonic() < until_s:
        time.sleep(0.05)
    with suppress(subprocess.TimeoutExpired):
        process.wait(after_s)
    before = journal_lines(root)
    if (victim := victim_of(what, cluster, rng)) is not None:
        with suppress(psutil.NoSuchProcess):
            cluster.kill(victim) if what == "node" else victim.kill()
    stderr, wrong = ended(process, HANG_S)
    while len(cluster.nodes) < NODES:
        cluster.add()
    fault = "Traceback" in stderr or "terminate called" in stderr or process.returncode not in (0, 1)
    return wrong or (stderr if fault else ""), before


def kills(what: str, numbers: Sequence[int], work: Work, prepared: Path, whole: tuple[Any, float], seed: int,
          cluster: NodesHere) -> Iterator[Outcome]:
    """The outcomes of collections that are disturbed once and then run again."""
    wanted, lasts_s = whole
    in_the_middle = went_on = 0  # kills that came when a part was measured; after how many the same run measured the rest
    for number in numbers:
        rng, before = random.Random(f"{seed} {what} {number}"), list[bytes]()
        begins_s = lasts_s * (1 - MEASURES) if what.startswith("driver") else 0.0  # what else is killed has to be there first
        after_s = begins_s + rng.uniform(0.0, lasts_s * MEASURES)

        def disturb(root: Path, temporary: Path, after_s: float = after_s, rng: random.Random = rng,
                    before: list[bytes] = before) -> Iterator[str]:
            command = work.commands(root)[0]
            if what.startswith("driver"):
                wrong = interrupted(command, after_s, signal.SIGINT if "Ctrl-C" in what else signal.SIGKILL, temporary)
                lines = journal_lines(root)
            else:
                wrong, lines = killed_beside(what, command, root, after_s, cluster, rng, temporary)
            before.append(lines)
            yield wrong

        outcome, journals = outcome_of(work, prepared, wanted, f"{what} killed after {after_s:.2f} s", disturb)
        if not outcome.fault:
            kept, lines = journals
            if not kept.startswith(before[0]):
                outcome = Outcome("another answer", outcome.case, "lines of the journal are lost")
            if before[0] and before[0] != lines:
                in_the_middle, went_on = in_the_middle + 1, went_on + (kept == lines)
            outcome.remark = f"{in_the_middle} came in the middle; after {went_on} of them the run measured the rest"
        yield outcome


def parts(count: int, seed: int, folder: Path, victims: Sequence[str] = VICTIMS, models: int = MODELS) -> Parts:
    """`count` kills, of each victim about as many."""
    check_packages()
    prepared = folder / "collector" / "workspace"
    with nodes_here(folder / "nodes", [()] * NODES) as cluster:
        work = Work("collector", partial(on_cluster, cluster.address), partial(analysed, models=models), measured)
        whole = whole_run(work, prepared)
        for index, what in enumerate(victims):
            if numbers := range(len(range(index, count, len(victims)))):
                yield f"{what} killed", kills(what, numbers, work, prepared, whole, seed, cluster)
        if resumed(work.commands(prepared.parent / "whole"), folder / "nodes") or (left := left_in(folder / "nodes")):
            yield "files left", [Outcome("another answer", "temporary files", f"files are left: {left}")]
