"""Prints answers about models as tables, sentences and JSON, and a watched prediction line by line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hase.inference.compare.choices import BestBatches, best_batch_sentences, order_sentence
from hase.inference.prediction.answers import chance_text, slo_statistic
from hase.inference.reporting.runs import device_name
from hase.utils import cli
from hase.utils.logger import get_logger
from hase.utils.processes import stop_event
from hase.utils.text import first_and_count

if TYPE_CHECKING:
    from hase.inference.live.watch import Watch, WatchLine
    from hase.inference.prediction.answers import Prediction
    from hase.inference.prediction.energy import EnergyPrediction
    from hase.inference.prediction.run import PredictedRun
    from hase.inference.prediction.sources import Precision
    from hase.inference.sharing.shared_models import SloUnderLoad

MOST_NOTES = 3  # lines below an answer, without --explain
FIRST_NOTES = ("rough estimate", "forced", "memory", "interval")  # words of the notes that come first
KERNEL_ID = re.compile(r"\b([A-Z][A-Za-z0-9]*(?:_[A-Z][A-Za-z0-9]*)*)_[\w.-]*_[0-9a-f]{8}\b")
log = get_logger("predict")


class Answer(NamedTuple):
    """The prediction of a model's file, in its own or half precision, with the other results that were asked for."""

    model: Path
    dtype: Precision | None
    run: PredictedRun
    slo: SloUnderLoad | None
    energy: EnergyPrediction | None

    @property
    def prediction(self) -> Prediction:
        return self.run.prediction


def summary(prediction: Prediction, show_sum: bool = False, slo: SloUnderLoad | None = None) -> dict[str, Any]:
    """A prediction as a table row; `show_sum` adds the plain α·Σ+β, and an objective how likely it is met."""
    shares: dict[str, str] = {name: f"{share:.0%}" for name, share in prediction.time_share.items()}
    if prediction.unsteady_share:
        shares["measured"] += f" ({prediction.unsteady_share:.0%} unsteadily)"
    return {
        "model": prediction.model, "batch": prediction.batch,
        **({"sizes": "fixed" if prediction.static else "left open"} if prediction.dims else {}),
        **({"host pace": prediction.host_pace} if prediction.host_pace is not None else {}),
        **(prediction.under_load.columns() if prediction.under_load else {"latency (ms)": prediction.latency_ms}),
        **({"α·Σ+β (ms)": prediction.sum_latency_ms} if show_sum else {}),
        "90 % between (ms)": "{:.4g} and {:.4g}".format(*prediction.interval_ms),
        **({f"within {slo.limit_ms:g} ms": chance_text(slo.chance)} if slo else {}),
        "items/s": prediction.items_per_second, "peak memory (MiB)": prediction.peak_memory_mib,
        "Σ kernels (ms)": prediction.kernel_sum_ms, **shares}


def kernel_rows(prediction: Prediction, top: int) -> list[dict[str, Any]]:
    """The `top` kernels with the most time, as table rows."""
    return [
        {"kernel": kernel.id, "type": kernel.type, "runs": kernel.count, "each (ms)": kernel.latency_ms,
         "total (ms)": kernel.total_ms, "share": f"{kernel.share:.1%}",
         "provenance": kernel.provenance + " unsteadily" * kernel.unsteady}
        for kernel in prediction.kernels[:top]]


def headline(answers: Sequence[Answer]) -> str:
    """The answer in a sentence, with its interval."""
    predictions, device = [answer.prediction for answer in answers], device_name(answers[0].run.fitted)
    fastest, slowest = (choose(predictions, key=lambda one: one.latency_ms) for choose in (min, max))
    if len(predictions) > 1:
        return (f"{fastest.latency_ms:.4g} ms ({fastest.model}) to {slowest.latency_ms:.4g} ms ({slowest.model}) on {device}, "
                "each with the interval that nine of ten latencies are in")
    low_ms, high_ms = fastest.interval_ms
    mean, rough = " on average" if fastest.under_load else "", " (a rough estimate)" if fastest.rough_estimate else ""
    return (f"{fastest.model}: {fastest.latency_ms:.4g} ms{mean} on {device}; nine of ten such latencies lie between "
            f"{low_ms:.4g} and {high_ms:.4g} ms{rough}")


def basis(prediction: Prediction) -> str:
    """What a prediction holds for, and how kernels' times became a latency."""
    composition = prediction.composition
    if composition.costs is not None:
        formula = "when the host and the GPU are both done, by a simulation of each kernel's launch and time"
    else:
        formula = f"{composition.alpha:.4g} · {'longest path' if composition.kind == 'critical_path' else 'sum'} of the kernels"
        if composition.kind == "sum_nodes":
            formula += f" {1000 * composition.node_ms:+.3g} µs a node"
        formula += f" {composition.beta_ms:+.4g} ms, times by label {composition.label}"
    load = prediction.load if isinstance(prediction.load, str) else ", ".join(f"{k}={v:g}" for k, v in prediction.load.items())
    if prediction.under_load and prediction.under_load.told_by == "probe":
        load = ", ".join(filter(None, (load, "as the probe met it")))
    return "; ".join((f"target {prediction.target}, {prediction.way.description}, load {load}", f"the latency is {formula}",
                      *(f"holds for {what}" for what in prediction.holds_for)))


def log_notes(warned: Mapping[str, Sequence[str]], rows: int, explain: bool) -> None:
    """Logs what a reader should know, the most important first: MOST_NOTES lines without kernels' hashes, or with `explain` all
    as they are. `warned`: the models that each concerns, of an answer with so many rows."""
    ranked = sorted(warned, key=lambda text: [word not in text for word in FIRST_NOTES])
    lines = [f"{first_and_count(warned[text])}: {text}" if 1 < rows > len(warned[text]) else text for text in ranked]
    if not explain:
        lines = [KERNEL_ID.sub(r"\1", line) for line in lines]
        if (more := len(lines) - MOST_NOTES) > 0:
            lines[MOST_NOTES - 1:] = [f"{lines[MOST_NOTES - 1]} (and {more} more: --explain)"]
    for line in lines:
        log.warning("%s", line)


def print_predictions(answers: Sequence[Answer], top: int, show_sum: bool = False) -> None:
    """Prints a row for each prediction and, if there is only one, the kernels with the most time.

    A column shows their files if several have the same name.
    """
    predictions, energies = [answer.prediction for answer in answers], [answer.energy for answer in answers if answer.energy]
    any_rough = any(prediction.rough_estimate for prediction in predictions)
    all_fit = all(prediction.fits_memory is not False for prediction in predictions)
    names = {(answer.prediction.model, answer.model) for answer in answers}
    ambiguous = len({model for model, _ in names}) < len(names)
    cli.print_table([({"file": str(answer.model)} if ambiguous else {})
                     | summary(answer.prediction, show_sum, answer.slo if len(answers) > 1 else None)
                     | ({"rough estimate": "yes" if answer.prediction.rough_estimate else "no"} if any_rough else {})
                     | ({} if all_fit else {"fits in memory": "no" if answer.prediction.fits_memory is False else "yes"})
                     for answer in answers], "predicted latency")
    if energies:
        print()
        cli.print_table([{"model": energy.model, "batch": energy.batch, **energy.columns(),
                          "rough estimate": "yes" if energy.rough_estimate else "no"} for energy in energies],
                        "predicted energy")
    if len(predictions) == 1 and top:
        print()
        cli.print_table(kernel_rows(predictions[0], top),
                        f"the kernels that take most of {predictions[0].kernel_sum_ms:.4g} ms")


def verdict(prediction: Prediction, slo: SloUnderLoad) -> str:
    """A sentence about an objective: whether it is met, by how much, how likely, and up to which load."""
    upper_end = f" (it could be {slo.could_be_ms:.4g})"
    sentence = (f"{prediction.model}: {slo_statistic(prediction, slo)} {slo.latency_ms:.4g} ms{upper_end} "
                f"{'meets' if slo.met else 'misses'} the SLO of {slo.limit_ms:g} ms by "
                f"{abs(slo.headroom_ms):.4g} ms, {abs(slo.headroom_percent):.3g} %; that it is met is "
                f"{chance_text(slo.chance)}; ")
    if slo.unknown_because is not None:
        return sentence + f"what load still meets it is not known: {slo.unknown_because}"
    if slo.highest_busy_share is None:
        return sentence + (f"p{slo.percentile:g} misses it on an idle device too" if prediction.under_load
                           else "beside other work it is missed by more")
    return sentence + (f"p{slo.percentile:g} meets it next to a background that is busy for up to {slo.highest_busy_share:.1%} "
                       "of the time")


def print_answers(answers: Sequence[Answer], best: Sequence[BestBatches], several: bool, top: int, show_sum: bool) -> None:
    """Prints the answers about one model or several: tables, then sentences about ranks, batches and an objective."""
    predictions, slos = [answer.prediction for answer in answers], [answer.slo for answer in answers]
    print_predictions(answers, top, show_sum)
    if several:
        print(order_sentence(predictions))
    for choice in best:
        first = answers[choice.indices[0]]
        sizes = ",".join(f"{name}={size}" for name, size in choice.others.items())
        name = f"{first.model.stem}{f'@{sizes}' if sizes else ''}{f', {first.dtype}' if first.dtype else ''}"
        print(*best_batch_sentences(choice, predictions, slos, name), sep="\n")
    if len(answers) == 1 and slos[0]:
        print(verdict(predictions[0], slos[0]))


def answers_json(answers: Sequence[Answer], best: Sequence[BestBatches], several: bool) -> list[dict[str, Any]]:
    """The answers as --json prints them; for several models, with their files."""
    best_for = {index: {"best_for": choice.best_for(index)} for choice in best for index in choice.indices}
    rows = []
    for index, answer in enumerate(answers):
        results = {"slo": answer.slo, "energy": answer.energy}
        rows.append(answer.prediction.model_dump(mode="json") | ({"file": str(answer.model)} if several else {})
                    | {name: record.model_dump(mode="json") for name, record in results.items() if record}
                    | best_for.get(index, {}))
    return rows


def watch_row(reading: WatchLine) -> dict[str, Any]:
    """A reading of a watch as a table row."""
    slo = reading.slo
    return {
        "time": reading.time, "busy share": None if reading.busy_share is None else f"{reading.busy_share:.0%}",
        "mean (ms)": reading.mean_ms, "p50 (ms)": reading.p50_ms, "p95 (ms)": reading.p95_ms,
        "rough estimate": None if reading.rough_estimate is None else "yes" if reading.rough_estimate else "no",
        "host pace": reading.host_pace,
        "SLO": None if slo is None else "met" if slo.met else "missed",
        "trouble": f"reading failed ({reading.failed} so far): {reading.trouble}" if reading.trouble else None}


def print_watch(watch: Watch, address: tuple[str, int] | None, as_json: bool, web_config: Path | None) -> None:
    """Prints a line for each prediction of a watch, until Ctrl-C or SIGTERM, and serves the latest at `address`, if any."""
    from hase.inference.live.watch import export  # noqa: PLC0415 - most predictions do not need it

    stop = stop_event()
    server = export(watch, *address, web_config) if address else None
    if server:
        log.info("the latest prediction: %s", server.url)
    count = 0
    for count, reading in enumerate(watch.readings(stop), 1):
        if as_json:
            print(reading.model_dump_json(), flush=True)
        else:
            cli.print_line(watch_row(reading), heading=count == 1)
    if server:
        server.shutdown()
        server.server_close()
    log.info("%d readings, of which %d failed", count, watch.failed)
