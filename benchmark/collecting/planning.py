"""Which blocks of kernels and models are still to be measured, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from benchmark.collecting.config import CollectorConfig
from benchmark.collecting.work import Item, ModelItem, Work
from benchmark.measuring.pending import Planned, choose_ties, chunks, first_names, in_blocks, pending, shuffled
from benchmark.records.blocks import Block
from benchmark.records.measurement import Measurement
from benchmark.records.tables import model_sessions


def sessions_missing(models: Sequence[ModelItem], blocks: Iterable[Block], wanted: int, variants: Sequence[str]) -> list[int]:
    """For each model, the number of sessions that are still to be opened, out of `wanted`.

    A model that failed needs none. Otherwise a session counts if it holds all variants and no other work disturbed it.
    """
    failed, counted = set[str](), Counter[str]()
    for session in model_sessions(blocks):
        if "latency" in session.labels and session.labels["latency"].status != "ok":
            failed.add(session.model)
        counted[session.model] += set(variants) <= set(session.labels) and session.undisturbed
    return [0 if item.id in failed else max(wanted - counted[item.id], 0) for item in models]


def takes_label(measurement: Measurement, label: str) -> bool:
    """Whether a measurement is what a block of kernels gives: a kernel's `label`, taken alone or in a carrier."""
    return (measurement.subject, measurement.label) == ("kernel", label) and measurement.place != "in_model"


def plan(work: Work, blocks: Iterable[Block], block_kernels: int, first_label: str = "run", block_models: int = 1,
         variants: Sequence[str] = (), sessions: int = 1) -> list[Planned[Item]]:
    """The blocks that are still to be measured, given those that exist.

    A kernel is measured once it has label `first_label` from a block of kernels, or failed to get it. A model is measured
    once `sessions_missing` says so. Second sessions of models come after all first sessions, and so on.
    """
    blocks = list(blocks)
    of_kernels = in_blocks(pending(work.kernels, blocks, lambda m: takes_label(m, first_label)), block_kernels,
                           lambda chunk: f"{len(chunk)} kernels from {chunk[0].kernel.type}")
    missing = sessions_missing(work.models, blocks, sessions, variants)
    planned: list[Planned[Item]] = []
    for turn in range(max(missing, default=0) or 1):
        models = [item for item, left in zip(work.models, missing, strict=True) if left > turn]
        of_turn: list[Planned[Item]] = [Planned(first_names(chunk), chunk) for chunk in chunks(models, block_models)]
        of_turn += of_kernels if not turn else []
        planned += shuffled(of_turn, turn + 1)  # mixes models and kernels
    return planned


def plan_load(config: CollectorConfig, work: Work, device: str, machine_uuid: str, level: float,
              blocks: Sequence[Block]) -> list[Planned[Item]]:
    """The blocks of `work` that a machine still has to measure at a level, as the config says.

    Args:
        config: of the collector.
        work: everything to measure.
        device: `cpu` or `cuda`.
        machine_uuid: the machine that measures.
        level: of the load.
        blocks: all blocks of this load, of every machine.
    """
    first_label = config.labels_on(device)[0]
    own = [block for block in blocks if block.machine == machine_uuid]
    wanted = work if config.kernel_levels is None or level in config.kernel_levels else Work((), work.models, ())
    todo = plan(wanted, own if config.each_machine else blocks, config.block_kernels, first_label, config.block_models,
                () if level else config.variants_on(device), 1 if level else config.sessions)
    if config.each_machine or level:
        return todo
    ties = choose_ties(work.kernels, blocks, machine_uuid, config.ties, lambda m: takes_label(m, first_label))
    return plan(Work(tuple(ties), (), ()), own, config.block_kernels, first_label) + todo
