"""Prints predictions as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hase.inference.core.chances import said
from hase.utils import cli
from hase.utils.logger import get_logger

if TYPE_CHECKING:
    from hase.inference.core.answers import Prediction
    from hase.inference.core.energy import EnergyPrediction
    from hase.inference.core.missing_kernels import Filled
    from hase.inference.core.model_run import PredictedRun
    from hase.inference.core.sources import Precision
    from hase.inference.sharing.shared_models import Slo, SloUnderLoad

log = get_logger("predict")


class Answer(NamedTuple):
    """A prediction of the file `model`, as it is or in half precision; how it compares with the objective, and its energy, if
    asked for."""

    model: Path
    dtype: Precision | None
    run: PredictedRun
    slo: SloUnderLoad | None
    energy: EnergyPrediction | None

    @property
    def prediction(self) -> Prediction:
        return self.run.prediction


def summary(prediction: Prediction, show_sum: bool = False) -> dict[str, Any]:
    """A prediction as one row of a table; with `show_sum`, the plain α·Σ+β stands beside it."""
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
        "items/s": prediction.items_per_second, "peak memory (MiB)": prediction.peak_memory_mib,
        "Σ kernels (ms)": prediction.kernel_sum_ms,
        **shares,
    }


def kernel_rows(prediction: Prediction, top: int) -> list[dict[str, Any]]:
    """The `top` kernels with the most time, as rows of a table."""
    return [
        {"kernel": kernel.id, "type": kernel.type, "runs": kernel.count, "each (ms)": kernel.latency_ms,
         "total (ms)": kernel.total_ms, "share": f"{kernel.share:.1%}",
         "provenance": kernel.provenance + " unsteadily" * kernel.unsteady}
        for kernel in prediction.kernels[:top]]


def print_predictions(predictions: Sequence[Prediction], top: int, energies: Sequence[EnergyPrediction] = (),
                      show_sum: bool = False, files: Sequence[Path] = ()) -> None:
    """Prints one row per prediction on stdout and, if there is only one, the kernels with the most time. What the predictions
    hold for goes to stderr.

    Args:
        energies: of the predictions, if they are to be printed.
        show_sum: whether the plain α·Σ+β stands beside each prediction.
        files: of the predictions, in order: a column shows them where predictions of several files have the same name.
    """
    first = predictions[0]
    used = first.composition
    base = "longest path" if used.kind == "critical_path" else "Σ"
    if used.kind == "sum_nodes":
        base += f" {1000 * used.node_ms:+.3g} µs a node"
    how = (f"{used.alpha:.4g}·{base} {used.beta_ms:+.4g} ms over kernels by label {used.label}" if used.costs is None
           else "the end of the host's and the GPU's track, kernels by label gpu")
    load = first.load if isinstance(first.load, str) else ", ".join(f"{k}={v:g}" for k, v in first.load.items())
    if first.under_load and first.under_load.told_by == "probe":
        load = ", ".join(filter(None, (load, "as the probe met it")))
    log.info("%s", "; ".join((f"target {first.target}, {first.way.description}, load {load}", f"latency = {how}",
                              *(f"holds for {what}" for what in first.holds_for))))
    any_rough = any(prediction.rough_estimate for prediction in predictions)
    all_fit = all(prediction.fits_memory is not False for prediction in predictions)
    named = {(prediction.model, file) for prediction, file in zip(predictions, files, strict=False)}
    ambiguous = len({model for model, _ in named}) < len(named)
    cli.print_table([({"file": str(files[place])} if ambiguous else {}) | summary(prediction, show_sum)
                     | ({"rough estimate": "yes" if prediction.rough_estimate else "no"} if any_rough else {})
                     | ({} if all_fit else {"fits in memory": "no" if prediction.fits_memory is False else "yes"})
                     for place, prediction in enumerate(predictions)], "predicted latency")
    if energies:
        print()
        cli.print_table([{"model": energy.model, "batch": energy.batch, **energy.columns(),
                          "rough estimate": "yes" if energy.rough_estimate else "no"} for energy in energies],
                        "predicted energy")
    if len(predictions) == 1 and top:
        print()
        cli.print_table(kernel_rows(first, top), f"the kernels that take most of {first.kernel_sum_ms:.4g} ms")


def verdict(prediction: Prediction, slo: SloUnderLoad) -> str:
    """A sentence that says whether an objective is met, by how much, how likely that is, and up to which load it still would
    be."""
    could = f" (it could be {slo.could_be_ms:.4g})"
    sentence = (f"{prediction.model}: {statistic(prediction, slo)} {slo.latency_ms:.4g} ms{could} "
                f"{'meets' if slo.met else 'misses'} the SLO of {slo.limit_ms:g} ms by "
                f"{abs(slo.headroom_ms):.4g} ms, {abs(slo.headroom_percent):.3g} %; that it is met is "
                f"{said(slo.chance)}; ")
    if slo.unknown_because is not None:
        return sentence + f"what load still meets it is not known: {slo.unknown_because}"
    if slo.highest_busy_share is None:
        return sentence + (f"p{slo.percentile:g} misses it on an idle device too" if prediction.under_load
                           else "beside other work it is missed by more")
    return sentence + (f"p{slo.percentile:g} meets it next to a background that is busy for up to {slo.highest_busy_share:.1%} "
                       "of the time")


def statistic(prediction: Prediction, slo: Slo) -> str:
    """Which of the runs' latencies is compared with an objective: how they spread is predicted beside other work only."""
    return f"p{slo.percentile:g}" if prediction.under_load else "median"


def log_measured(filled: Filled) -> None:
    """Logs what was measured for the prediction."""
    if filled.measured:
        log.info("measured %d kernels in %.1f s; %.1f s in all", filled.measured, filled.measuring_s,
                 filled.seconds)
    else:
        log.info("nothing to measure: all kernels were measured before, or failed")
    if filled.unsteady:
        log.warning("the machine was unsteady while it measured %s; repeat the command when nothing else runs",
                    cli.first_of(filled.unsteady))
    if filled.left:
        log.warning("%d kernels could not be measured and stay predicted: %s", len(filled.left), ", ".join(filled.left))
