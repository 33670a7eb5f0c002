"""Prints what requests to a language model take, and writes it as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hase.inference.core.chances import said
from hase.utils import cli, files

if TYPE_CHECKING:
    from hase.inference.llm.answers import LlmPrediction, ObjectiveMet, Time

NAMES = {"ttft": "time to first token", "tpot": "mean time per further token"}


def _asked(answer: LlmPrediction) -> dict[str, Any]:
    return {"batch": answer.batch, "prompt": answer.prompt, "generate": answer.generate}


def time_row(answer: LlmPrediction) -> dict[str, Any]:
    """The times of a request, as a row of a table."""
    def of(time: Time | None) -> tuple[float | None, str | None]:
        return (time.ms, time.between) if time else (None, None)

    (first, first_between), (mean, mean_between), (whole, whole_between) = map(of, (answer.ttft, answer.tpot, answer.request))
    return {
        **_asked(answer), "first token (ms)": first, "90 % between (ms)": first_between,
        "per token (ms)": mean, "tokens 90 % between (ms)": mean_between,
        "at start": of(answer.tpot_start)[0], "middle": of(answer.tpot_middle)[0], "end": of(answer.tpot_end)[0],
        "request (ms)": whole, "request 90 % between (ms)": whole_between,
        "tokens/s each": answer.tokens_per_second, "tokens/s": answer.device_tokens_per_second,
        "rough estimate": "yes" if answer.rough_estimate else "no"}


def memory_row(answer: LlmPrediction) -> dict[str, Any]:
    """The memory of a request and what fits, as a row of a table."""
    memory, fits = answer.memory, answer.fits_memory
    return {**_asked(answer), "max length": answer.max_length, "weights (MiB)": memory.weights_mib,
            "cache (MiB)": memory.cache_mib, "peak (MiB)": memory.peak_mib,
            "fits in memory": None if fits is None else "yes" if fits else "no", "largest batch": answer.largest_batch,
            "longest context": answer.longest_context}


def energy_row(answer: LlmPrediction) -> dict[str, Any]:
    """The energy of a request, as a row of a table; dashes where it is not known."""
    energy = answer.energy
    return {**_asked(answer), "J/token": energy.token_j if energy else None,
            "J/token 90 % between": "{:.4g} and {:.4g}".format(*energy.token_interval_j) if energy else None,
            "prompt (J)": energy.prompt_j if energy else None, "request (J)": energy.request_j if energy else None,
            "energy a rough estimate": ("yes" if energy.rough_estimate else "no") if energy else None}


def sweep_row(answer: LlmPrediction) -> dict[str, Any]:
    """One line for a request among many."""
    return {**_asked(answer), "first token (ms)": answer.ttft.ms, "per token (ms)": answer.tpot.ms if answer.tpot else None,
            "request (ms)": answer.request.ms, "tokens/s each": answer.tokens_per_second,
            "tokens/s": answer.device_tokens_per_second, "J/token": answer.energy.token_j if answer.energy else None,
            "cache (MiB)": answer.memory.cache_mib, "peak (MiB)": answer.memory.peak_mib,
            "fits in memory": memory_row(answer)["fits in memory"],
            **({"meets objectives": "yes" if all(objective.met for objective in answer.objectives) else "no",
                "that it does": said(min(objective.chance for objective in answer.objectives))} if answer.objectives else {}),
            "rough estimate": "yes" if answer.rough_estimate else "no"}


def print_answers(answers: Sequence[LlmPrediction], sweep: bool) -> None:
    """Prints the answers about one model on stdout: in three tables, or in one with a line for each where they are a sweep; and
    a sentence for each objective."""
    name = f"{answers[0].model} on {answers[0].target}"
    if sweep:
        cli.print_table([sweep_row(answer) for answer in answers], name)
        return
    cli.print_table([time_row(answer) for answer in answers], f"{name}: predicted times")
    print()
    cli.print_table([memory_row(answer) for answer in answers], "memory, and what fits in it")
    if any(answer.energy for answer in answers):
        print()
        cli.print_table([energy_row(answer) for answer in answers], "energy")
    for answer in answers:
        for objective in answer.objectives:
            print(verdict(answer, objective))


def verdict(answer: LlmPrediction, objective: ObjectiveMet) -> str:
    """A sentence that says whether an objective is met, and by how much."""
    return (f"batch {answer.batch}, prompt {answer.prompt}: {NAMES[objective.objective]} {objective.predicted_ms:.4g} ms "
            f"{'meets' if objective.met else 'misses'} {objective.limit_ms:g} ms by {abs(objective.headroom_ms):.4g} ms, "
            f"{abs(objective.headroom_ms) / objective.limit_ms:.1%}; that it is met is {said(objective.chance)}")


def flat_row(answer: LlmPrediction) -> dict[str, Any]:
    """A request as a row of a CSV file: every number of the answer under a name of its own, with its unit."""
    row: dict[str, Any] = {"model": answer.model, "target": answer.target, **_asked(answer), "max_length": answer.max_length}
    for name in ("ttft", "tpot", "tpot_start", "tpot_middle", "tpot_end", "request"):
        time: Time | None = getattr(answer, name)
        low, high = time.interval_ms if time else (None, None)
        row |= {f"{name}_ms": time.ms if time else None, f"{name}_low_ms": low, f"{name}_high_ms": high}
    energy = answer.energy.model_dump() if answer.energy else {}
    low, high = energy.get("token_interval_j", (None, None))
    return row | {
        "tokens_per_second": answer.tokens_per_second, "device_tokens_per_second": answer.device_tokens_per_second,
        "genai_loop_ms": answer.genai_loop_ms, **answer.memory.model_dump(), "device_memory_mib": answer.device_memory_mib,
        "fits_memory": answer.fits_memory, "largest_batch": answer.largest_batch, "longest_context": answer.longest_context,
        "prompt_j": energy.get("prompt_j"), "request_j": energy.get("request_j"), "token_j": energy.get("token_j"),
        "token_low_j": low, "token_high_j": high, "rough_estimate": answer.rough_estimate}


def write_table(answers: Sequence[LlmPrediction], path: Path) -> None:
    """Writes the answers as CSV."""
    rows = [flat_row(answer) for answer in answers]
    files.write_csv(path, list(rows[0]), rows)
