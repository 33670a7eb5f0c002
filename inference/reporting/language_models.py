"""The page of requests to a language model: of one, or of a sweep of batches and prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hase.inference.llm.report import memory_row, sweep_row, time_row, verdict
from hase.inference.reporting.common import about, device_name, pace_of, sentence, target_basis
from hase.inference.reporting.runs import folded_run, operators_by_time
from hase.utils import cli
from hase.utils.pages.page import (
    COLOURS,
    Axis,
    Chart,
    Fact,
    Grid,
    Limit,
    Page,
    Piece,
    Section,
    Series,
    Shares,
    Table,
)
from hase.utils.pages.scales import axis_for

if TYPE_CHECKING:
    from hase.inference.core.targets import Fitted
    from hase.inference.llm.answers import LlmPrediction, Objective, Time
    from hase.inference.llm.language_model import LanguageModel
    from hase.inference.llm.predicting import Runs

MIB_PER_GIB = 1024.0
UNFIT = "does not fit in the memory"


def requests_page(model: LanguageModel, predicted: Sequence[tuple[LlmPrediction, Runs]], fitted: Fitted) -> Page:
    """The page of requests to a model on one target.

    Args:
        model: the language model.
        predicted: the requests' answers, each with the runs that it was made from.
        fitted: what was learned for the target.
    """
    answers, (first, runs), device = [answer for answer, _ in predicted], predicted[0], device_name(fitted)
    warnings, basis = about(warned_requests(answers), len(answers)), _basis(first, fitted)
    if len(answers) == 1:
        shown = [("The prompt's run", runs.prompt, model.prefill.path)]
        if runs.middle:
            shown.append(("A token's run, in the middle of the generation", runs.middle, model.decode.path))
        return Page("Predicted request", f"{first.model}, batch {first.batch}, prompt {first.prompt}", _answer(first, device),
                    [_more(first)], _facts(first), [*_sections(first), *(folded_run(*of_run) for of_run in shown)], warnings,
                    basis, operators_by_time([run.prediction for _, run, _ in shown]))
    most = max(answers, key=lambda answer: answer.device_tokens_per_second if answer.fits_memory is not False else 0.0)
    said = (f"{first.model} on {device}: up to {cli.cell(most.device_tokens_per_second)} tokens per second, at batch "
            f"{most.batch} with prompts of {most.prompt} tokens.")
    more = [f"Its first token comes after {most.ttft.ms:.4g} ms there (90 % between {most.ttft.between}). "
            f"{first.generate} tokens are generated for each prompt.", *_met(answers)]
    return Page("Predicted requests", f"{first.model}, {len(answers)} requests", said, more, (),
                [Section("By batch and prompt", _grids(answers)), Section("With their intervals", sweep_charts(answers)),
                 Section("All requests", [Table([sweep_row(answer) for answer in answers], most=40)])], warnings, basis)


def warned_requests(answers: Sequence[LlmPrediction]) -> dict[str, list[str]]:
    """Which requests each warning concerns."""
    return cli.warned_of((f"batch {answer.batch}, prompt {answer.prompt}", answer.warnings) for answer in answers)


def sweep_charts(answers: Sequence[LlmPrediction]) -> list[Chart]:
    """Time to first token, time per token and tokens per second over the batch, a line for each length of the prompt; over the
    prompt where there is one batch. With lines at the objectives, and crosses where a request does not fit in the memory."""
    over, each = ("batch", "prompt") if len({answer.batch for answer in answers}) > 1 else ("prompt", "batch")
    lines = sorted({getattr(answer, each) for answer in answers})
    by_line = {line: sorted((answer for answer in answers if getattr(answer, each) == line),
                            key=lambda answer: getattr(answer, over)) for line in lines[:COLOURS]}
    ticks = sorted({getattr(answer, over) for answer in answers})

    def chart(title: str, unit: str, values: Callable[[LlmPrediction], tuple[float, float, float] | None],
              objective: Objective | None = None) -> Chart | None:
        series = []
        for line, requests in by_line.items():
            known = [(answer, numbers) for answer in requests if (numbers := values(answer))]
            if known:
                middle, low, high = zip(*(numbers for _, numbers in known), strict=True)
                series.append(Series(f"{each} {line}", [getattr(answer, over) for answer, _ in known], middle, low, high,
                                     marked=[place for place, (answer, _) in enumerate(known) if answer.fits_memory is False]))
        limits = {one.limit_ms for answer in answers for one in answer.objectives if one.objective == objective}
        return Chart(title, Axis(over, log=len(ticks) > 1), axis_for(unit, [y for one in series for y in one.y]), series,
                     [Limit(f"{limit:g} ms", limit) for limit in limits], ticks) if series else None

    charts = (chart("Time to first token", "ms", lambda answer: _with_ends(answer.ttft), "ttft"),
              chart("Mean time per further token", "ms", lambda answer: _with_ends(answer.tpot), "tpot"),
              chart("Tokens per second of the device", "tokens/s", _rate_with_ends))
    return [one for one in charts if one]


def _with_ends(time: Time | None) -> tuple[float, float, float] | None:
    return (time.ms, *time.interval_ms) if time else None


def _rate_with_ends(answer: LlmPrediction) -> tuple[float, float, float]:
    """Tokens per second, and the same at the ends of the whole request's interval."""
    (low, high), rate = answer.request.interval_ms, answer.device_tokens_per_second
    return rate, rate * answer.request.ms / high, rate * answer.request.ms / low


def _grids(answers: Sequence[LlmPrediction]) -> list[Piece]:
    """What was asked for, by batch and prompt."""
    batches, prompts = (sorted({getattr(answer, name) for answer in answers}) for name in ("batch", "prompt"))
    places = {(answer.batch, answer.prompt): answer for answer in answers}

    def grid(title: str, value_of: Callable[[LlmPrediction], float | None]) -> Grid:
        found = {(row, column): places[batch, prompt] for row, batch in enumerate(batches)
                 for column, prompt in enumerate(prompts) if (batch, prompt) in places}
        notes = {place: UNFIT for place, answer in found.items() if answer.fits_memory is False}
        return Grid(title, "batch", "prompt (tokens)", [str(batch) for batch in batches], [str(prompt) for prompt in prompts],
                    [[value_of(found[row, column]) if (row, column) in found else None for column in range(len(prompts))]
                     for row in range(len(batches))], notes)

    return [grid("Time to first token (ms)", lambda answer: answer.ttft.ms),
            *([grid("Mean time per further token (ms)", lambda answer: answer.tpot.ms if answer.tpot else None)]
              if any(answer.tpot for answer in answers) else []),
            grid("Tokens per second of the device", lambda answer: answer.device_tokens_per_second)]


def _met(answers: Sequence[LlmPrediction]) -> list[str]:
    """Which requests meet all objectives."""
    if not answers[0].objectives:
        return []
    met = [answer for answer in answers if all(one.met for one in answer.objectives) and answer.fits_memory is not False]
    limits = " and ".join(f"{one.objective.upper()} {one.limit_ms:g} ms" for one in answers[0].objectives)
    best = max(met, key=lambda answer: answer.device_tokens_per_second, default=None)
    return [f"{len(met)} of {len(answers)} requests fit and keep to {limits}" + (
        f"; of these, batch {best.batch} with prompts of {best.prompt} tokens makes the most of the device: "
        f"{cli.cell(best.device_tokens_per_second)} tokens per second." if best else ".")]


def _answer(answer: LlmPrediction, device: str) -> str:
    further = f", then one every {answer.tpot.ms:.4g} ms" if answer.tpot else ""
    return (f"{answer.model} gives its first token after {'about ' if answer.rough_estimate else ''}{answer.ttft.ms:.4g} "
            f"ms{further} on {device}.")


def _more(answer: LlmPrediction) -> str:
    lines = [f"That is for {answer.batch} prompt{'s' if answer.batch > 1 else ''} of {answer.prompt} tokens and "
             f"{answer.generate} tokens generated for each. Nine of ten such predictions of the first token lie between "
             f"{answer.ttft.between} ms.",
             *(sentence(verdict(answer, objective)) for objective in answer.objectives)]
    if answer.rough_estimate:
        lines.append("This is a rough estimate; see the notes below.")
    if answer.fits_memory is False:
        lines.append("It needs more memory than the device has.")
    return " ".join(lines)


def _facts(answer: LlmPrediction) -> list[Fact]:
    def of(name: str, time: Time) -> Fact:
        low, high = time.interval_ms
        return Fact(name, f"{time.ms:.4g}", "ms", f"90 % between {low:.4g} and {high:.4g}",
                    "doubtful" if answer.rough_estimate else "", (low, time.ms, high))

    facts = [of("first token", answer.ttft), *([of("each further token", answer.tpot)] if answer.tpot else []),
             of("whole request", answer.request)]
    rate, low, high = _rate_with_ends(answer)
    facts.append(Fact("throughput", cli.cell(rate), "tokens/s", f"between {cli.cell(low)} and {cli.cell(high)}",
                      between=(low, rate, high)))
    of_device = f"of {answer.device_memory_mib / MIB_PER_GIB:.0f} GiB" if answer.device_memory_mib else ""
    facts.append(Fact("peak memory", cli.cell(answer.memory.peak_mib), "MiB", of_device,
                      "bad" if answer.fits_memory is False else ""))
    if answer.largest_batch is not None:
        facts.append(Fact("largest batch that fits", str(answer.largest_batch), "", f"with {answer.max_length} tokens each"))
    if answer.longest_context is not None:
        facts.append(Fact("longest context that fits", str(answer.longest_context), "tokens", f"at batch {answer.batch}"))
    if energy := answer.energy:
        low, high = energy.token_interval_j
        facts.append(Fact("energy of a token", cli.cell(energy.token_j), "J", f"between {low:.4g} and {high:.4g}",
                          "doubtful" if energy.rough_estimate else "", (low, energy.token_j, high)))
    return facts


def _sections(answer: LlmPrediction) -> list[Section]:
    """The parts of the page of one request."""
    memory, sections = answer.memory, list[Section]()
    if len(answer.tokens) > 1:
        cached = [token.cached for token in answer.tokens]
        lows, highs = zip(*(token.interval_ms for token in answer.tokens), strict=True)
        times = Series("time of a token", cached, [token.ms for token in answer.tokens], lows, highs)
        sections.append(Section("Token after token", [Chart(
            "Time of a token over those in the cache, with its interval", Axis("tokens in the cache"),
            axis_for("ms", times.y), [times])], "The further an answer goes, the more of the cache each token reads."))
    shares: list[Piece] = [Shares("The prompt's run", {str(name): part for name, part in answer.prompt_share.items()})]
    if answer.token_share:
        shares.append(Shares("The middle token's run", {str(name): part for name, part in answer.token_share.items()}))
    parts = {name.removesuffix("_mib"): mib for name, mib in memory.model_dump().items() if name != "peak_mib" and mib}
    return [*sections, Section("Where the kernels' times come from", shares),
            Section("Peak memory", [Shares(f"{memory.peak_mib:.4g} MiB", parts, "MiB")]),
            Section("In numbers", [Table([time_row(answer)], "Times"), Table([memory_row(answer)], "Memory, and what fits")])]


def _basis(answer: LlmPrediction, fitted: Fitted) -> dict[str, str]:
    cache = "one buffer that all runs share" if answer.shares_cache else "each run has its own"
    return {"model": answer.model, **target_basis(fitted), "cache": f"{cache}, for {answer.max_length} tokens",
            "CUDA graph": "yes" if answer.cuda_graph else "no", "other work": "none", "host's pace": pace_of(answer)}
