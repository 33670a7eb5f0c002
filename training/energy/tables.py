"""Tables and the page of what was learned of a device's energy."""

from __future__ import annotations

import math
from typing import Any

from training.energy.learned import EnergyModel
from training.energy.work import UNITS, kind_of_work
from utils.markdown import markdown_table
from utils.timing import ErrorStatistics, error_statistics

MUCH = 2.0  # times idle power, which an H200 draws when it works for more than half of the time


def coefficient_rows(found: EnergyModel) -> list[dict[str, Any]]:
    """One row per coefficient, with its unit."""
    checked = [] if found.agreement is None else [
        {"what": "measured: integral of power over the energy counter", "value": found.agreement, "unit": "ratio"}]
    return [*checked, {"what": "idle power", "value": found.idle_w, "unit": "W"}, *(
        {"what": name, "value": value, "unit": UNITS[kind_of_work(name)]}
        for name, value in sorted(found.coefficients.items()))]


def error_rows(found: EnergyModel) -> list[dict[str, Any]]:
    """Errors of models whose family was held out, with the latency as measured and as predicted. The latter also for models
    that leave the device idle for much of the time, whose latency depends on the host, and for the others."""
    def with_latency(least_w: float, below_w: float) -> ErrorStatistics | None:
        pairs = [(model.with_latency_j, model.measured_j) for model in found.models
                 if model.with_latency_j is not None and least_w <= model.power_w < below_w]
        return error_statistics(*(list(column) for column in zip(*pairs, strict=True))) if pairs else None

    bound_w = MUCH * found.idle_w
    return [_error_row("latency as measured", found.left_out), _error_row("latency predicted", found.left_out_with_latency),
            _error_row(f"… models above {bound_w:.0f} W", with_latency(bound_w, math.inf)),
            _error_row(f"… models below {bound_w:.0f} W", with_latency(0.0, bound_w))]


def _error_row(what: str, errors: ErrorStatistics | None) -> dict[str, Any]:
    """A row of errors in per cent; no cells where nothing is known."""
    if errors is None:
        return {"what": f"{what}: not known"}
    return {"what": what, "count": errors.count, "MAPE": f"{errors.mape:.1%}", "median": f"{errors.median:.1%}",
            "within ±10 %": f"{errors.within_10:.0%}", "worst": f"{errors.worst:.1%}"}


def model_rows(found: EnergyModel) -> list[dict[str, Any]]:
    """One row per model: its mean power, its energy, and the errors of the energies that were predicted without its family."""
    return [{"model": model.model, "family": model.group, "mean (W)": f"{model.power_w:.0f}",
             "measured (J)": f"{model.measured_j:.4g}", "predicted (J)": f"{model.predicted_j:.4g}",
             "error": f"{model.predicted_j / model.measured_j - 1:+.1%}", "error, latency predicted":
             None if model.with_latency_j is None else f"{model.with_latency_j / model.measured_j - 1:+.1%}"}
            for model in found.models]


def page(found: EnergyModel) -> str:
    """The page about the energy of a target."""
    agreements = [model.agreement for model in found.models if model.agreement is not None]
    lines = [
        "# Energy of models, measured and predicted", "",
        f"Of `{found.target}`. Written by `recipes/h200/learn.sh` (`training/fit_energy.py --markdown FILE`). "
        "[energy.md](energy.md) says how energy is measured and predicted.", "",
        f"{len(found.models)} models and sizes ran for three seconds each. Idle with a session open, the device draws "
        f"{found.idle_w:.0f} W; the models drew {min(one.power_w for one in found.models):.0f} to "
        f"{max(one.power_w for one in found.models):.0f} W" + (
            "." if found.limit_w is None else f", and its power limit is {found.limit_w:.0f} W.")]
    if agreements:
        apart = sorted(abs(agreement - 1.0) for agreement in agreements)
        lines += [f"The integral of power and the device's energy counter differ by {apart[len(apart) // 2]:.1%} (median), and "
                  f"by {apart[-1]:.1%} at most."]
    lines += ["", "## Errors", "", "The family of each model was held out of the fit of energy. *Latency predicted*: with the "
              "family held out of the composition, too.", "",
              markdown_table([row for row in error_rows(found) if "count" in row]), ""]
    if found.interval:
        lines += [f"A 90 % interval is {found.interval.low:.2f} to {found.interval.high:.2f} times the prediction, if the "
                  "latency is right. Made from the errors of the other families, it held "
                  f"{found.interval.coverage:.0%} of the models.", ""]
    lines += ["## What the energy is made of", "", f"{found.kind[0].upper()}{found.kind[1:]}.", "",
              markdown_table([{**row, "value": f"{row['value']:.4g}"} for row in coefficient_rows(found)]), "",
              "Other combinations, and their errors on families that were held out:", "",
              markdown_table([{"combination": one.name, "MAPE": None if one.cv_mape is None else f"{one.cv_mape:.1%}"}
                              for one in found.candidates]), "",
              "## Each model, its family held out", "", markdown_table(model_rows(found)), ""]
    return "\n".join(lines)
