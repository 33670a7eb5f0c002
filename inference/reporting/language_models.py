"""Reports requests to a language model: as printed tables, as a CSV file, and as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hase.inference.prediction.answers import chance_text
from hase.inference.reporting.runs import about, device_name, folded_run, operators_by_time, pace_of, sentence, target_basis
from hase.utils import cli, files
from hase.utils.pages.page import (
    COLOURS,
    Chart,
    ChartAxis,
    ChartSeries,
    Fact,
    Grid,
    Limit,
    Page,
    PageSection,
    PageTable,
    Piece,
    Shares,
    axis_for,
)
from hase.utils.text import cell, names_by_warning

if TYPE_CHECKING:
    from hase.inference.llm.answers import LlmPrediction, LlmTime, Objective, ObjectiveMet
    from hase.inference.llm.language_model import LanguageModel
    from hase.inference.llm.predicting import RequestRuns
    from hase.inference.prediction.targets import Fitted

MIB_PER_GIB = 1024.0
UNFIT = "does not fit in the memory"
NAMES = {"ttft": "time to first token", "tpot": "mean time per further token"}


def requests_page(model: LanguageModel, predicted: Sequence[tuple[LlmPrediction, RequestRuns]], fitted: Fitted) -> Page:
    """The page of requests to a model on one target, each answer with its runs."""
    answers, (first, runs), device = [answer for answer, _ in predicted], predicted[0], device_name(fitted)
    warnings, basis = about(warned_requests(answers), len(answers)), _basis(first, fitted)
    if len(answers) == 1:
        shown = [("The prompt's run", runs.prompt, model.prefill.path)]
        if runs.middle:
            shown.append(("A token's run, in the middle of the generation", runs.middle, model.decode.path))
        return Page("Predicted request", f"{first.model}, batch {first.batch}, prompt {first.prompt}", _headline(first, device),
                    [_sentences(first)], _facts(first), [*_sections(first), *(folded_run(*run) for run in shown)], warnings,
                    basis, operators_by_time([run.prediction for _, run, _ in shown]))
    fastest = max(answers, key=lambda answer: answer.device_tokens_per_second if answer.fits_memory is not False else 0.0)
    headline = (f"{first.model} on {device}: up to {cell(fastest.device_tokens_per_second)} tokens per second, at batch "
            f"{fastest.batch} with prompts of {fastest.prompt} tokens.")
    more = [f"Its first token comes after {fastest.ttft.ms:.4g} ms there (90 % between {fastest.ttft.between}). "
            f"{first.generate} tokens are generated for each prompt.", *_met_objectives(answers)]
    return Page("Predicted requests", f"{first.model}, {len(answers)} requests", headline, more, (),
                [PageSection("By batch and prompt", _grids(answers)),
                 PageSection("With their intervals", sweep_charts(answers)),
                 PageSection("All requests", [PageTable([sweep_row(answer) for answer in answers], most=40)])], warnings, basis)


def warned_requests(answers: Sequence[LlmPrediction]) -> dict[str, list[str]]:
    """The requests that each warning concerns."""
    return names_by_warning((f"batch {answer.batch}, prompt {answer.prompt}", answer.warnings) for answer in answers)


def sweep_charts(answers: Sequence[LlmPrediction]) -> list[Chart]:
    """Time to first token, time per token, tokens per second and energy of a token over the batch, a line for each length of
    the prompt; over the prompt if there is only one batch. Lines mark objectives; crosses mark requests that do not fit.
    """
    over, by = ("batch", "prompt") if len({answer.batch for answer in answers}) > 1 else ("prompt", "batch")
    lines = sorted({getattr(answer, by) for answer in answers})
    by_line = {line: sorted((answer for answer in answers if getattr(answer, by) == line),
                            key=lambda answer: getattr(answer, over)) for line in lines[:COLOURS]}
    ticks = sorted({getattr(answer, over) for answer in answers})

    def chart(title: str, unit: str, values: Callable[[LlmPrediction], tuple[float, float, float] | None],
              objective: Objective | None = None) -> Chart | None:
        series = []
        for line, requests in by_line.items():
            known = [(answer, numbers) for answer in requests if (numbers := values(answer))]
            if known:
                middle, low, high = zip(*(numbers for _, numbers in known), strict=True)
                series.append(ChartSeries(f"{by} {line}", [getattr(answer, over) for answer, _ in known], middle, low, high,
                                     marked=[index for index, (answer, _) in enumerate(known) if answer.fits_memory is False]))
        limits = {one.limit_ms for answer in answers for one in answer.objectives if one.objective == objective}
        return Chart(title, ChartAxis(over, log=len(ticks) > 1), axis_for(unit, [y for one in series for y in one.y]), series,
                     [Limit(f"{limit:g} ms", limit) for limit in limits], ticks) if series else None

    charts = (chart("Time to first token", "ms", lambda answer: _with_ends(answer.ttft), "ttft"),
              chart("Mean time per further token", "ms", lambda answer: _with_ends(answer.tpot), "tpot"),
              chart("Tokens per second of the device", "tokens/s", _rate_with_ends),
              chart("Energy of a token", "J", lambda answer: (
                  answer.energy.token_j, *answer.energy.token_interval_j) if answer.energy else None))
    return [one for one in charts if one]


def _with_ends(time: LlmTime | None) -> tuple[float, float, float] | None:
    return (time.ms, *time.interval_ms) if time else None


def _rate_with_ends(answer: LlmPrediction) -> tuple[float, float, float]:
    """Tokens per second, and the same at the ends of the whole request's interval."""
    (low, high), rate = answer.request.interval_ms, answer.device_tokens_per_second
    return rate, rate * answer.request.ms / high, rate * answer.request.ms / low


def _grids(answers: Sequence[LlmPrediction]) -> list[Piece]:
    """Tables of results by batch and prompt."""
    batches, prompts = (sorted({getattr(answer, name) for answer in answers}) for name in ("batch", "prompt"))
    by_sizes = {(answer.batch, answer.prompt): answer for answer in answers}

    def grid(title: str, value_of: Callable[[LlmPrediction], float | None]) -> Grid:
        cells = {(row, column): by_sizes[batch, prompt] for row, batch in enumerate(batches)
                 for column, prompt in enumerate(prompts) if (batch, prompt) in by_sizes}
        notes = {index: UNFIT for index, answer in cells.items() if answer.fits_memory is False}
        return Grid(title, "batch", "prompt (tokens)", [str(batch) for batch in batches], [str(prompt) for prompt in prompts],
                    [[value_of(cells[row, column]) if (row, column) in cells else None for column in range(len(prompts))]
                     for row in range(len(batches))], notes)

    return [grid("Time to first token (ms)", lambda answer: answer.ttft.ms),
            *([grid("Mean time per further token (ms)", lambda answer: answer.tpot.ms if answer.tpot else None)]
              if any(answer.tpot for answer in answers) else []),
            grid("Tokens per second of the device", lambda answer: answer.device_tokens_per_second)]


def _met_objectives(answers: Sequence[LlmPrediction]) -> list[str]:
    """The requests that meet all objectives."""
    if not answers[0].objectives:
        return []
    met = [answer for answer in answers if all(one.met for one in answer.objectives) and answer.fits_memory is not False]
    limits = " and ".join(f"{one.objective.upper()} {one.limit_ms:g} ms" for one in answers[0].objectives)
    best = max(met, key=lambda answer: answer.device_tokens_per_second, default=None)
    return [f"{len(met)} of {len(answers)} requests fit and keep to {limits}" + (
        f"; of these, batch {best.batch} with prompts of {best.prompt} tokens makes the most of the device: "
        f"{cell(best.device_tokens_per_second)} tokens per second." if best else ".")]


def _headline(answer: LlmPrediction, device: str) -> str:
    further = f", then one every {answer.tpot.ms:.4g} ms" if answer.tpot else ""
    return (f"{answer.model} gives its first token after {'about ' if answer.rough_estimate else ''}{answer.ttft.ms:.4g} "
            f"ms{further} on {device}.")


def _sentences(answer: LlmPrediction) -> str:
    lines = [f"That is for {answer.batch} prompt{'s' if answer.batch > 1 else ''} of {answer.prompt} tokens and "
             f"{answer.generate} tokens generated for each. In nine of ten such cases the time to the first token lies between "
             f"{answer.ttft.between} ms.",
             *(sentence(verdict(answer, objective)) for objective in answer.objectives)]
    if answer.rough_estimate:
        lines.append("This is a rough estimate; see the notes below.")
    if answer.fits_memory is False:
        lines.append("It needs more memory than the device has.")
    return " ".join(lines)


def _facts(answer: LlmPrediction) -> list[Fact]:
    def time_fact(name: str, time: LlmTime) -> Fact:
        low, high = time.interval_ms
        return Fact(name, f"{time.ms:.4g}", "ms", f"90 % between {low:.4g} and {high:.4g}",
                    "doubtful" if answer.rough_estimate else "", (low, time.ms, high))

    facts = [time_fact("first token", answer.ttft), *([time_fact("each further token", answer.tpot)] if answer.tpot else []),
             time_fact("whole request", answer.request)]
    rate, low, high = _rate_with_ends(answer)
    facts.append(Fact("throughput", cell(rate), "tokens/s", f"between {cell(low)} and {cell(high)}",
                      between=(low, rate, high)))
    share_of_device = f"of {answer.device_memory_mib / MIB_PER_GIB:.0f} GiB" if answer.device_memory_mib else ""
    facts.append(Fact("peak memory", cell(answer.memory.peak_mib), "MiB", share_of_device,
                      "bad" if answer.fits_memory is False else ""))
    if answer.largest_batch is not None:
        facts.append(Fact("largest batch that fits", str(answer.largest_batch), "", f"with {answer.max_length} tokens each"))
    if answer.longest_context is not None:
        facts.append(Fact("longest context that fits", str(answer.longest_context), "tokens", f"at batch {answer.batch}"))
    if energy := answer.energy:
        low, high = energy.token_interval_j
        facts.append(Fact("energy of a token", cell(energy.token_j), "J", f"between {low:.4g} and {high:.4g}",
                          "doubtful" if energy.rough_estimate else "", (low, energy.token_j, high)))
    return facts


def _sections(answer: LlmPrediction) -> list[PageSection]:
    """The sections of the page of one request."""
    memory, sections = answer.memory, list[PageSection]()
    if len(answer.tokens) > 1:
        cached = [token.cached for token in answer.tokens]
        lows, highs = zip(*(token.interval_ms for token in answer.tokens), strict=True)
        times = ChartSeries("time of a token", cached, [token.ms for token in answer.tokens], lows, highs)
        sections.append(PageSection("Token after token", [Chart(
            "Time of a token over those in the cache, with its interval", ChartAxis("tokens in the cache"),
            axis_for("ms", times.y), [times])], "The further an answer goes, the more of the cache each token reads."))
    shares: list[Piece] = [Shares("The prompt's run", {str(name): part for name, part in answer.prompt_share.items()})]
    if answer.token_share:
        shares.append(Shares("The middle token's run", {str(name): part for name, part in answer.token_share.items()}))
    parts = {name.removesuffix("_mib"): mib for name, mib in memory.model_dump().items() if name != "peak_mib" and mib}
    return [*sections, PageSection("Where the kernels' times come from", shares),
            PageSection("Peak memory", [Shares(f"{memory.peak_mib:.4g} MiB", parts, "MiB")]),
            PageSection("In numbers", [PageTable([time_row(answer)], "Times"),
                                       PageTable([memory_row(answer)], "Memory, and what fits")])]


def _basis(answer: LlmPrediction, fitted: Fitted) -> dict[str, str]:
    cache = "one buffer that all runs share" if answer.shares_cache else "each run has its own"
    return {"model": answer.model, **target_basis(fitted), "cache": f"{cache}, for {answer.max_length} tokens",
            "CUDA graph": "yes" if answer.cuda_graph else "no", "other work": "none", "host's pace": pace_of(answer)}


def _sizes(answer: LlmPrediction) -> dict[str, Any]:
    return {"batch": answer.batch, "prompt": answer.prompt, "generate": answer.generate}


def time_row(answer: LlmPrediction) -> dict[str, Any]:
    """The times of a request, as a table row."""
    def pair(time: LlmTime | None) -> tuple[float | None, str | None]:
        return (time.ms, time.between) if time else (None, None)

    (first, first_between), (mean, mean_between), (whole, whole_between) = map(pair, (answer.ttft, answer.tpot, answer.request))
    return {
        **_sizes(answer), "first token (ms)": first, "90 % between (ms)": first_between,
        "per token (ms)": mean, "tokens 90 % between (ms)": mean_between,
        "at start": pair(answer.tpot_start)[0], "middle": pair(answer.tpot_middle)[0], "end": pair(answer.tpot_end)[0],
        "request (ms)": whole, "request 90 % between (ms)": whole_between,
        "tokens/s each": answer.tokens_per_second, "tokens/s": answer.device_tokens_per_second,
        "rough estimate": "yes" if answer.rough_estimate else "no"}


def memory_row(answer: LlmPrediction) -> dict[str, Any]:
    """The memory of a request and what fits, as a table row."""
    memory, fits = answer.memory, answer.fits_memory
    return {**_sizes(answer), "max length": answer.max_length, "weights (MiB)": memory.weights_mib,
            "cache (MiB)": memory.cache_mib, "peak (MiB)": memory.peak_mib,
            "fits in memory": None if fits is None else "yes" if fits else "no", "largest batch": answer.largest_batch,
            "longest context": answer.longest_context}


def energy_row(answer: LlmPrediction) -> dict[str, Any]:
    """The energy of a request, as a table row; dashes if unknown."""
    energy = answer.energy
    return {**_sizes(answer), "J/token": energy.token_j if energy else None,
            "J/token 90 % between": "{:.4g} and {:.4g}".format(*energy.token_interval_j) if energy else None,
            "prompt (J)": energy.prompt_j if energy else None, "request (J)": energy.request_j if energy else None,
            "energy a rough estimate": ("yes" if energy.rough_estimate else "no") if energy else None}


def sweep_row(answer: LlmPrediction) -> dict[str, Any]:
    """A request of a sweep, as a table row."""
    return {**_sizes(answer), "first token (ms)": answer.ttft.ms, "per token (ms)": answer.tpot.ms if answer.tpot else None,
            "request (ms)": answer.request.ms, "tokens/s each": answer.tokens_per_second,
            "tokens/s": answer.device_tokens_per_second, "J/token": answer.energy.token_j if answer.energy else None,
            "cache (MiB)": answer.memory.cache_mib, "peak (MiB)": answer.memory.peak_mib,
            "fits in memory": memory_row(answer)["fits in memory"],
            **({"meets objectives": "yes" if all(objective.met for objective in answer.objectives) else "no",
                "that it does": chance_text(min(objective.chance for objective in answer.objectives))}
               if answer.objectives else {}),
            "rough estimate": "yes" if answer.rough_estimate else "no"}


def print_answers(answers: Sequence[LlmPrediction], sweep: bool) -> None:
    """Prints the answers about one model (three tables, or one for a sweep), and a sentence for each objective."""
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
    """Whether an objective is met, and by how much, in a sentence."""
    return (f"batch {answer.batch}, prompt {answer.prompt}: {NAMES[objective.objective]} {objective.predicted_ms:.4g} ms "
            f"{'meets' if objective.met else 'misses'} {objective.limit_ms:g} ms by {abs(objective.headroom_ms):.4g} ms, "
            f"{abs(objective.headroom_ms) / objective.limit_ms:.1%}; that it is met is {chance_text(objective.chance)}")


def flat_row(answer: LlmPrediction) -> dict[str, Any]:
    """A request as a row of a CSV file: every number of the answer, with its unit in the name."""
    row: dict[str, Any] = {"model": answer.model, "target": answer.target, **_sizes(answer), "max_length": answer.max_length}
    for name in ("ttft", "tpot", "tpot_start", "tpot_middle", "tpot_end", "request"):
        time: LlmTime | None = getattr(answer, name)
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
