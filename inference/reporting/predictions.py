"""The page of predictions: of one model, of one at several sizes, or of several models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hase.inference.compare.choices import BestBatches, best_batch_sentences, compared_ms, order_sentence, ranked_per_item
from hase.inference.prediction.answers import chance_text, slo_statistic
from hase.inference.reporting.printed import kernel_rows, summary
from hase.inference.reporting.runs import (
    about,
    device_name,
    operators_by_time,
    pace_of,
    run_sections,
    target_basis,
    where_time_goes,
)
from hase.utils.pages.page import (
    COLOURS,
    Bar,
    Bars,
    Chart,
    ChartAxis,
    ChartSeries,
    Fact,
    Limit,
    Page,
    PageSection,
    PageTable,
    Piece,
    Shares,
    axis_for,
)
from hase.utils.text import cell, first_and_count

if TYPE_CHECKING:
    from pathlib import Path

    from hase.inference.prediction.answers import Prediction
    from hase.inference.reporting.printed import Answer

DETAILED = 12  # number of answers that a page shows in detail
MIB_PER_GIB = 1024.0


def prediction_page(answers: Sequence[Answer], best: Sequence[BestBatches], warned: Mapping[str, Sequence[str]],
                    several: bool, failed: Mapping[Path, str]) -> Page:
    """The page of some answers, in the order given. `warned` has the models that each warning concerns, `failed` the reasons
    for missing predictions."""
    first, predictions = answers[0], [answer.prediction for answer in answers]
    device = device_name(first.run.fitted)
    colours = operators_by_time(predictions)
    warnings = about(warned, len({one.model for one in predictions}))
    stem = first.run.run.record.file_stem
    if len(answers) == 1:
        return Page("Predicted latency", first.prediction.model, _headline(first, device), _sentences(first), _facts(first),
                    [*run_sections(first.run, first.model), _kernels(first.prediction), _memory(first.prediction),
                     *_failures(failed)], warnings, basis_of(answers), colours)
    lines = [order_sentence(predictions)] if several else []
    for choice in best:  # the batch within the objective first, if there is one
        lines += reversed(best_batch_sentences(choice, predictions, [answer.slo for answer in answers],
                                          _model_and_sizes(answers[choice.indices[0]], choice)))
    answer, *more = [f"{line}." for line in lines] or [f"{len(answers)} answers about {stem} on {device}."]
    title = f"{len({answer.model for answer in answers})} models on {device}" if several else f"{stem} on {device}"
    text = "Open an answer to see its operators and layers."
    if len(answers) > DETAILED:
        text += f" The first {DETAILED} of {len(answers)} are here; ask for fewer at once to see the others."
    details = [PageSection(_label(answer), where_time_goes(answer.run, answer.model), folded=True)
               for answer in answers[:DETAILED]]
    return Page("Predicted latencies", title, f"{answer[0].upper()}{answer[1:]}" if several else answer, more, (),
                [_comparison(answers, best), *_failures(failed), PageSection("Where the time goes", (), text), *details],
                warnings, basis_of(answers), colours)


def _label(answer: Answer) -> str:
    return answer.prediction.model + (f", {answer.dtype}" if answer.dtype else "")


def _model_and_sizes(answer: Answer, choice: BestBatches) -> str:
    sizes = ",".join(f"{name}={size}" for name, size in choice.others.items())
    return f"{answer.run.run.record.file_stem}{f'@{sizes}' if sizes else ''}{f', {answer.dtype}' if answer.dtype else ''}"


def _headline(answer: Answer, device: str) -> str:
    prediction, slo = answer.prediction, answer.slo
    shared = prediction.under_load
    duration = (f"takes {prediction.latency_ms:.4g} ms on the mean, p95 {shared.percentile_ms(95):.4g} ms, beside other work on"
                if shared else f"takes {'about ' if prediction.rough_estimate else ''}{prediction.latency_ms:.4g} ms on")
    verdict = f", {'within' if slo.met else 'more than'} the {slo.limit_ms:g} ms asked for" if slo else ""
    return f"{answer.run.run.record.file_stem} {duration} {device}{verdict}."


def _sentences(answer: Answer) -> list[str]:
    prediction, slo = answer.prediction, answer.slo
    low, high = prediction.interval_ms
    lines = [f"In nine of ten such cases the latency lies between {low:.4g} and {high:.4g} ms."]
    if slo:
        lines.append(f"That its {slo_statistic(prediction, slo)} keeps to {slo.limit_ms:g} ms is {chance_text(slo.chance)}.")
    if prediction.rough_estimate:
        lines.append("This is a rough estimate: what it rests on was not measured well enough; see the notes below.")
    if prediction.fits_memory is False:
        lines.append("It needs more memory than the device has.")
    return [" ".join(lines)]


def _facts(answer: Answer) -> list[Fact]:
    prediction, slo, energy = answer.prediction, answer.slo, answer.energy
    low, high = prediction.interval_ms
    facts = [Fact("latency", f"{prediction.latency_ms:.4g}", "ms", f"90 % between {low:.4g} and {high:.4g}",
                  "doubtful" if prediction.rough_estimate else "", (low, prediction.latency_ms, high))]
    if shared := prediction.under_load:
        p50, p95, p99 = (shared.percentile_ms(percent) for percent in (50, 95, 99))
        facts.append(Fact("p95 beside other work", f"{p95:.4g}", "ms", f"p50 {p50:.4g}, p99 {p99:.4g} ms"))
    if prediction.items_per_second and prediction.batch:
        least_rate, most_rate = (prediction.batch / end * 1e3 for end in (high, low))
        facts.append(Fact("throughput", cell(prediction.items_per_second), "items/s",
                          f"batch {prediction.batch}, between {cell(least_rate)} and {cell(most_rate)}",
                          between=(least_rate, prediction.items_per_second, most_rate)))
    share_of_device = f"of {prediction.device_memory_mib / MIB_PER_GIB:.0f} GiB" if prediction.device_memory_mib else ""
    facts.append(Fact("peak memory", cell(prediction.peak_memory_mib), "MiB", share_of_device,
                      "bad" if prediction.fits_memory is False else ""))
    others = [f"{share:.0%} {name}" for name, share in prediction.time_share.items() if name != "measured" and share >= 0.005]
    facts.append(Fact("measured", f"{100 * prediction.time_share['measured']:.0f}", "%",
                      "of its kernels' time" + "".join(f", {other}" for other in others)))
    if slo:
        words, _, number = chance_text(slo.chance).removesuffix(" %)").partition(" (")
        facts.append(Fact(f"within {slo.limit_ms:g} ms", number, "%", words,
                          "good" if words == "very likely" else "bad" if "unlikely" in words else "doubtful"))
    if energy:
        facts.append(Fact("energy of a run", cell(energy.energy_j), "J", "between {:.4g} and {:.4g}".format(
            *energy.interval_j) + f", {cell(energy.mean_power_w)} W", "doubtful" if energy.rough_estimate else "",
            (energy.interval_j[0], energy.energy_j, energy.interval_j[1])))
    return facts


def _kernels(prediction: Prediction) -> PageSection:
    order = ("kernel", "share", "total (ms)", "each (ms)", "runs", "type", "provenance")
    rows = [{name: row[name] for name in order} for row in kernel_rows(prediction, len(prediction.kernels))]
    return PageSection("Kernels", [PageTable(rows, bar="share", coloured="type")],
                   "A kernel is an operation with its shapes; nodes that are alike share one.")


def _memory(prediction: Prediction) -> PageSection:
    memory = prediction.memory
    parts = {"weights": memory.weights_mib, "activations": memory.activations_mib, "arena": memory.arena_mib,
             "workspace": memory.workspace_mib or 0.0}
    return PageSection("Peak memory", [Shares(f"{memory.peak_mib:.4g} MiB", parts, "MiB")])


def _failures(failed: Mapping[Path, str]) -> list[PageSection]:
    """The models without a prediction."""
    rows = [{"model": str(model), "why": why} for model, why in failed.items()]
    return [PageSection("Without a prediction", [PageTable(rows)])] if rows else []


def _comparison(answers: Sequence[Answer], best: Sequence[BestBatches]) -> PageSection:
    """Several answers side by side."""
    predictions = [answer.prediction for answer in answers]
    rough, unfit = any(one.rough_estimate for one in predictions), any(one.fits_memory is False for one in predictions)
    rows = [summary(answer.prediction)
            | ({"dtype": answer.dtype or "as it is"} if any(other.dtype for other in answers) else {})
            | ({"within SLO": chance_text(answer.slo.chance)} if answer.slo else {})
            | ({"energy (J)": answer.energy.energy_j} if answer.energy else {})
            | ({"rough estimate": "yes" if answer.prediction.rough_estimate else "no"} if rough else {})
            | ({"fits in memory": "no" if answer.prediction.fits_memory is False else "yes"} if unfit else {})
            for answer in answers]
    limit = Limit(f"{answers[0].slo.limit_ms:g} ms", answers[0].slo.limit_ms) if answers[0].slo else None
    by_batch = best and sum(len(choice.indices) for choice in best) == len(answers) and len(best) <= COLOURS
    pieces: list[Piece] = _batch_charts(answers, best, limit) if by_batch else _ranked(answers, limit)
    return PageSection("Batches" if by_batch else "Side by side", [*pieces, PageTable(rows, "All answers", most=30)])


def _batch_charts(answers: Sequence[Answer], best: Sequence[BestBatches], limit: Limit | None) -> list[Piece]:
    """Latency, throughput and, if asked for, energy of an item over the batch, a line for each model."""
    latencies, rates, energies = list[ChartSeries](), list[ChartSeries](), list[ChartSeries]()
    batches = sorted({answer.prediction.batch or 0 for answer in answers})
    for choice in best:
        predictions = [answers[index].prediction for index in choice.indices]
        sizes, name = [one.batch or 0 for one in predictions], _model_and_sizes(answers[choice.indices[0]], choice)
        lows, highs = zip(*(one.interval_ms for one in predictions), strict=True)
        marked = [index for index, one in enumerate(predictions) if one.fits_memory is False]
        latencies.append(ChartSeries(name, sizes, [one.latency_ms for one in predictions], lows, highs, marked=marked))
        slowest, fastest = ([1e3 * size / end for size, end in zip(sizes, ends, strict=True)] for ends in (highs, lows))
        rates.append(ChartSeries(name, sizes, [one.items_per_second or 0.0 for one in predictions], slowest, fastest,
                                 marked=marked))
        items = [(size, energy.energy_per_item_j, *energy.item_interval_j)
                 for size, energy in zip(sizes, (answers[index].energy for index in choice.indices), strict=True)
                 if energy and energy.energy_per_item_j is not None and energy.item_interval_j]
        if items:
            known, joules, least, most = zip(*items, strict=True)
            energies.append(ChartSeries(name, known, joules, least, most))
    log = len(batches) > 2 and batches[-1] > 4 * max(batches[0], 1)
    batch_axis = ChartAxis("batch", log)
    charts: list[Piece] = [
        Chart("Latency, with its interval", batch_axis, axis_for("ms", [y for one in latencies for y in one.y]), latencies,
              [limit] if limit else [], batches),
        Chart("Throughput, with its interval", batch_axis, ChartAxis("items/s", zero=True), rates, [], batches)]
    if energies:
        charts.append(Chart("Energy of an item, with its interval", batch_axis,
                            axis_for("J", [y for one in energies for y in one.y]), energies, [], batches))
    return charts


def _ranked(answers: Sequence[Answer], limit: Limit | None) -> list[Piece]:
    """Bars of latency and, if asked for, energy, one for each answer; per item if batches differ."""
    per_item = ranked_per_item([answer.prediction for answer in answers])
    bars, energies = list[Bar](), list[Bar]()
    for answer in answers:
        prediction = answer.prediction
        value = compared_ms(prediction, per_item)
        low, high = (end * value / prediction.latency_ms for end in prediction.interval_ms)
        bars.append(Bar(_label(answer), value, low, high, "a rough estimate" if prediction.rough_estimate else ""))
        if energy := answer.energy:
            joules, least, most = (value / prediction.latency_ms * end for end in (energy.energy_j, *energy.interval_j))
            energies.append(Bar(_label(answer), joules, least, most, "a rough estimate" if energy.rough_estimate else ""))
    of = " per item" if per_item else ""
    return [Bars(f"Latency{of}, with its interval", axis_for(f"ms{of}", [bar.value for bar in bars]), bars,
                 None if per_item else limit),
            *([Bars(f"Energy{of or ' of a run'}, with its interval", axis_for(f"J{of}", [bar.value for bar in energies]),
                    energies)] if energies else [])]


def basis_of(answers: Sequence[Answer]) -> dict[str, str]:
    """What the answers for one target are based on."""
    prediction, fitted = answers[0].prediction, answers[0].run.fitted
    composition = prediction.composition
    load = prediction.load if isinstance(prediction.load, str) else ", ".join(
        f"{name}={value:g}" for name, value in prediction.load.items()) or "as the probe met it"
    sizes = ", ".join(f"{name}={size}" for name, size in prediction.dims.items()) if len(answers) == 1 else ""
    uncertain = {name: sorted({operator for answer in answers for operator in getattr(answer.prediction, field)})
                 for name, field in (("estimated operators", "estimated_operators"),
                                     ("doubtful operators", "doubtful_operators"))}
    return {"model": first_and_count(list(dict.fromkeys(str(answer.model) for answer in answers))),
            **({"sizes": sizes} if sizes else {}), **target_basis(fitted),
            **({"holds for": "; ".join(prediction.holds_for)} if prediction.holds_for else {}),
            "run": prediction.way.description, "other work": load, "host's pace": pace_of(prediction),
            "latency is": "the end of the host's and the GPU's track" if composition.costs else
            f"{composition.alpha:.4g}·{'longest path' if composition.kind == 'critical_path' else 'Σ'} "
            f"{composition.beta_ms:+.4g} ms",
            "measured kernels": "not looked up (--strict)" if prediction.strict else "looked up",
            **{name: ", ".join(operators) for name, operators in uncertain.items() if operators}}
