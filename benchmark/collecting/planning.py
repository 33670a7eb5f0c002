"""Which blocks are still to be measured, and in which order."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmark.collecting.work import KernelItem, ModelItem, Planned, Work
from benchmark.records.blocks import Block
from benchmark.records.tables import model_sessions
from utils import cli


def chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(items), size):
        yield items[begin:begin + size]


def sessions_missing(models: Sequence[ModelItem], there: Iterable[Block], wanted: int, variants: Sequence[str]) -> list[int]:
    """For each model, how many of the `wanted` sessions are still to be opened: none for one that failed; otherwise those count
    that hold all variants and tell of the model and not of its host."""
    failed, counted = set[str](), Counter[str]()
    for session in model_sessions(there):
        if "latency" in session.labels and session.labels["latency"].status != "ok":
            failed.add(session.model)
        counted[session.model] += set(variants) <= set(session.labels) and session.tells
    return [0 if item.record.model in failed else max(wanted - counted[item.record.model], 0) for item in models]


def plan(work: Work, there: Iterable[Block], block_kernels: int, first_label: str = "run",
         block_models: int = 1, variants: Sequence[str] = (),
         sessions: int = 1) -> list[Planned]:
    """The blocks still to be measured where `there` are measured: a name, kernels, models.

    A kernel is measured once it has label `first_label` (or failed to get it) from a block of kernels, a model once
    `sessions_missing` says so. A model's second session comes after all models' first, and so on.
    """
    there = list(there)
    timed = {m.id for block in there for m in block.measurements
             if m.label == first_label and m.subject == "kernel" and m.place != "in_model"}
    kernels = [item for item in work.kernels if item.kernel.id not in timed]
    shuffled = [kernels[i] for i in np.random.default_rng(0).permutation(len(kernels))]  # no type at one time of day only
    of_kernels: list[Planned] = [
        (f"{len(chunk)} kernels from {chunk[0].kernel.type}", list(chunk), []) for chunk in chunks(shuffled, block_kernels)]
    missing = sessions_missing(work.models, there, sessions, variants)
    planned: list[Planned] = []
    for turn in range(max(missing, default=0) or 1):
        models = [item for item, left in zip(work.models, missing, strict=True) if left > turn]
        of_turn: list[Planned] = [
            (cli.first_of([item.record.model for item in chunk]), [], list(chunk))
            for chunk in chunks(models, block_models)]
        of_turn += of_kernels if not turn else []
        planned += [of_turn[i] for i in np.random.default_rng(turn + 1).permutation(len(of_turn))]  # models and kernels in turn
    return planned


def choose_ties(kernels: Sequence[KernelItem], there: Iterable[Block], uuid: str, first_label: str,
                count: int) -> list[KernelItem]:
    """The kernels to measure on machine `uuid` although others have, so that `count` of its kernels tie it to them.

    Those that most machines have measured come first, so that the same ones tie all; then the order is that of their ids'
    hashes: chosen whenever, they are the same, and of no type above others. One that failed here is not tried again.
    """
    machines: dict[str, set[str]] = defaultdict(set)
    for block in there:
        for m in block.measurements:
            if (m.subject, m.label) == ("kernel", first_label) and m.place != "in_model" and (
                    m.status == "ok" or block.machine == uuid):
                machines[m.id].add(block.machine)
    elsewhere = [item for item in kernels if machines[item.kernel.id] - {uuid}]
    new = [item for item in elsewhere if uuid not in machines[item.kernel.id]]
    new.sort(key=lambda item: (-len(machines[item.kernel.id]), hashlib.sha256(item.kernel.id.encode()).digest()))
    return new[:max(0, count - (len(elsewhere) - len(new)))]
