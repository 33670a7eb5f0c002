"""Warnings about a model's graph, its kernels' sizes, and the estimators in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hase.inference.core.answers import UsedEstimator
from hase.inference.core.kernels_in_model import KernelInModel, Placed, runs_of_kernels
from hase.ort_analysis.cuda.capture import capture_obstacle
from hase.utils.errors import UserError

if TYPE_CHECKING:
    from hase.inference.core.conditions import Conditions
    from hase.inference.core.run_modes import RunMode
    from hase.learned.kernels.admitted import Admitted
    from hase.records.kernel_record import ModelRecord


def model_warnings(record: ModelRecord, known: Mapping[Placed, KernelInModel], run_mode: RunMode) -> tuple[str, ...]:
    """All warnings about a model's graph.

    Raises:
        UserError: the model is to be captured as a CUDA graph, and ONNX Runtime can't do that.
    """
    return (*_capture_warning(record, run_mode), *_assumed_warning(record), *_uncounted_warning(record),
            *_guessed_warnings(record), *_range_warning(record, known), *_unsteady_warning(record, known))


def weights_warning(missing: Sequence[Path]) -> tuple[str, ...]:
    """A warning where files of a model's weights are missing."""
    if not missing:
        return ()
    names = ", ".join(path.name for path in missing)
    return (f"its weights were not read (--no-weights), since {names} is missing: what is in it counts as zeros",)


def _capture_warning(record: ModelRecord, run_mode: RunMode) -> tuple[str, ...]:
    """A warning about a model that is to be captured as a CUDA graph, if some of its nodes run on the CPU.

    Raises:
        UserError: ONNX Runtime can't capture it.
    """
    if not run_mode.cuda_graph:
        return ()
    if (obstacle := capture_obstacle(record)) is not None:
        raise UserError(f"{record.model}: ONNX Runtime can't capture it as a CUDA graph: {obstacle}; predict it without "
                        "--cuda-graph")
    on_cpu = [node.name for node in record.nodes if node.provider == "cpu"]
    return (f"{len(on_cpu)} of its nodes work out sizes on the CPU ({', '.join(on_cpu[:2])}{' …' if len(on_cpu) > 2 else ''}): "
            "a captured graph keeps the sizes of the run that was captured",) if on_cpu else ()


def _assumed_warning(record: ModelRecord) -> tuple[str, ...]:
    """A warning where sizes depend on data, so the largest possible ones were taken."""
    if not record.assumed:
        return ()
    tensor, shape = next(iter(record.assumed.items()))
    sizes = "×".join(map(str, shape))
    return (f"sizes that depend on data are taken to be the largest possible, so the latency is an upper estimate: tensor "
            f"{tensor} is {sizes}{f', and {len(record.assumed) - 1} more' * (len(record.assumed) > 1)}; say how large with "
            f"--dim {tensor}.<axis>=SIZE",)


def uncounted(record: ModelRecord) -> list[str]:
    """The nodes whose bodies are not in the record, so that nothing in them is counted."""
    held = {node.inside for node in record.nodes}
    return [node.name for node in record.nodes if record.kernel_of(node).subgraphs and node.name not in held]


def _uncounted_warning(record: ModelRecord) -> tuple[str, ...]:
    """A warning about nodes whose bodies are not counted."""
    names = uncounted(record)
    return (f"rough estimate: {len(names)} of its nodes hold graphs of their own ({', '.join(names[:3])}"
            f"{' …' if len(names) > 3 else ''}), and what runs in them is not counted: it takes longer than predicted",
            ) if names else ()


def _guessed_warnings(record: ModelRecord) -> list[str]:
    """Warnings about bodies whose number of runs is a guess."""
    warnings = []
    for name, guess in record.guessed.items():
        if guess.taken.isdigit() and guess.high == 1.0:
            warnings.append(f"{name} may end before its {guess.taken} trips, by what its body computes; all are counted: say "
                            f"how many with --dim {name}.trips=N")
        elif guess.taken.isdigit():
            warnings.append(f"how often {name} runs its body can't be known; {guess.taken} trips are taken, a guess: say how "
                            f"many with --dim {name}.trips=N")
        else:
            other_branch = "else" if guess.taken == "then" else "then"
            warnings.append(f"which branch {name} takes can't be known; the more expensive one, {guess.taken}, is counted, "
                            f"and the interval holds both; say otherwise with --branch {name}={other_branch}")
    return warnings


def _unsteady_warning(record: ModelRecord, known: Mapping[Placed, KernelInModel]) -> tuple[str, ...]:
    """A warning about kernels whose measured times rest on blocks that were kept although the machine was unsteady."""
    off = {key: uncertainty.time.high for key in runs_of_kernels(record)
           if (uncertainty := known[key].uncertainty) is not None and known[key].unsteady}
    if not off:
        return ()
    return (f"{len(off)} of its kernels, {_time_share(record, known, list(off)):.1%} of the kernel time, were measured while "
            f"the machine was unsteady (by up to {max(off.values()) - 1.0:.0%}), and are less sure: {_first_names(list(off))}; "
            "--measure-missing measures them again",)


def _range_warning(record: ModelRecord, known: Mapping[Placed, KernelInModel]) -> tuple[str, ...]:
    """A warning about kernels that are smaller or larger than any measured one."""
    beyond = [key for key in runs_of_kernels(record)
              if (uncertainty := known[key].uncertainty) is not None and uncertainty.reason == "beyond"]
    if not beyond:
        return ()
    return (f"{len(beyond)} of its kernels, {_time_share(record, known, beyond):.1%} of the kernel time, are beyond what was "
            f"measured in some size, and less sure: {_first_names(beyond)}",)


def _time_share(record: ModelRecord, known: Mapping[Placed, KernelInModel], keys: Sequence[Placed]) -> float:
    """The share of some kernels in the model's kernel time, a ratio."""
    counts = runs_of_kernels(record)
    part, total = (sum(counts[key] * known[key].latency_ms for key in summed) for summed in (keys, counts))
    return part / total if total else 0.0


def _first_names(keys: Sequence[Placed]) -> str:
    return ", ".join(name for name, _ in keys[:2]) + (" …" if len(keys) > 2 else "")


def entries_used(record: ModelRecord, known: Mapping[Placed, KernelInModel],
                 conditions: Conditions) -> list[tuple[Admitted, tuple[str, ...]]]:
    """The admitted estimators that predicted kernels of a model, each with the kernel types."""
    admitted = conditions.fitted.predictors.admitted
    if admitted is None:
        return []
    by_type, used = admitted.of(conditions.used.label), dict[str, set[str]]()
    for key in runs_of_kernels(record):
        kernel, in_model = record.kernels[key[0]], known[key]
        constant = in_model.uncertainty is not None and in_model.uncertainty.reason == "control flow"
        if (entry := by_type.get(kernel.type)) and kernel.moves_data and in_model.provenance == "predicted" and not (
                in_model.on_host or constant):
            used.setdefault(entry.name, set()).add(kernel.type)
    by_name = {entry.name: entry for entry in by_type.values()}
    return [(by_name[name], tuple(sorted(types))) for name, types in sorted(used.items())]


def used_estimators(record: ModelRecord, known: Mapping[Placed, KernelInModel],
                    conditions: Conditions) -> tuple[UsedEstimator, ...]:
    return tuple(UsedEstimator(name=entry.name, source=entry.source, types=types, mape=entry.errors.mape, forced=entry.forced)
                 for entry, types in entries_used(record, known, conditions))


def estimator_warnings(record: ModelRecord, known: Mapping[Placed, KernelInModel], conditions: Conditions) -> tuple[str, ...]:
    """A sentence about each, and one where the dataset has changed since its check."""
    trained_on, warnings = conditions.fitted.predictors.sidecar.dataset_sha256, []
    for entry, types in entries_used(record, known, conditions):
        warnings.append(entry.model_copy(update={"types": types}).said)
        if outdated := entry.outdated(conditions.fitted.target.name, trained_on):
            warnings.append(outdated)
    return tuple(warnings)
