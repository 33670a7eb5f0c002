"""Which blocks of kernels and models are still to be measured, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from benchmark.collecting.config import CollectorConfig
from benchmark.collecting.work import Item, KernelItem, ModelItem, Work
from kernel_model.sampling.kernel_errors import KernelError
from kernel_model.sampling.usefulness import useful_kernels
from measuring.pending import Planned, choose_ties, chunks, first_names, in_blocks, pending, shuffled
from records.blocks import Block
from records.dataset_tables import model_sessions
from records.measurement import IN_MODEL_LABELS, Measurement


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


def _block_name(kernels: Sequence[KernelItem]) -> str:
    return f"{len(kernels)} kernels from {kernels[0].kernel.type}"


def plan(work: Work, blocks: Iterable[Block], block_kernels: int, first_label: str = "run", block_models: int = 1,
         variants: Sequence[str] = (), sessions: int = 1) -> list[Planned[Item]]:
    """The blocks that are still to be measured, given those that exist.

    A kernel is measured once it has label `first_label` from a block of kernels, or failed to get it. A model is measured
    once `sessions_missing` says so. Second sessions of models come after all first sessions, and so on.
    """
    blocks = list(blocks)
    of_kernels = in_blocks(pending(work.kernels, blocks, lambda m: takes_label(m, first_label)), block_kernels, _block_name)
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
    measured_here = [block for block in blocks if block.machine == machine_uuid]
    wanted = work if config.kernel_levels is None or level in config.kernel_levels else Work((), work.models, ())
    todo = plan(wanted, measured_here if config.each_machine else blocks, config.block_kernels, first_label,
                config.block_models, () if level else config.model_labels_on(device), 1 if level else config.sessions)
    if config.each_machine or level:
        return todo
    ties = choose_ties(work.kernels, blocks, machine_uuid, config.ties, lambda m: takes_label(m, first_label))
    return plan(Work(tuple(ties), (), ()), measured_here, config.block_kernels, first_label) + todo


def plan_by_usefulness(config: CollectorConfig, work: Work, device: str, machine_uuid: str, level: float,
                       blocks: Sequence[Block], errors: Sequence[KernelError] = ()) -> list[Planned[Item]]:
    """As `plan_load`, for a collector that may have to stop before it is done: the models and their kernels come first, in
    mixed order, then the sampled kernels, the most useful ones first.

    A kernel of a model is not measured in a block of kernels if the model gives its time.

    Args:
        errors: what a training wrote of the kernels that it held out; none before the first training.
    """
    first_label = config.labels_on(device)[0]
    counted = [block for block in blocks if not config.each_machine or block.machine == machine_uuid]
    missing = sessions_missing(work.models, counted, 1, () if level else config.model_labels_on(device))
    models = [item for item, left in zip(work.models, missing, strict=True) if left]
    from_models = {name for item in models for name in item.record.kernels
                   if config.model_labels and item.labels and first_label in IN_MODEL_LABELS}
    sampled = {entry.kernel.id for entry in work.described if entry.sampled}
    todo = pending(work.kernels, counted, lambda m: (m.subject, m.label) == ("kernel", first_label))
    held_by_models = [item for item in todo if item.id not in sampled | from_models]
    samples = {item.id: item for item in todo if item.id in sampled}
    known = [item.kernel for item in work.kernels if item.id not in samples]
    ordered = useful_kernels([item.kernel for item in samples.values()], known, len(samples), np.random.default_rng(0), errors)
    of_kernels = in_blocks(held_by_models, config.block_kernels, _block_name)
    first: list[Planned[Item]] = [Planned(first_names(chunk), chunk) for chunk in chunks(models, config.block_models)]
    return shuffled([*first, *of_kernels]) + [Planned(_block_name(chunk), chunk) for chunk in chunks(
        [samples[kernel.id] for kernel in ordered], config.block_kernels)]
