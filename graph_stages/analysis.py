"""From raw measurements to the tables for planners: times, regressions, bandwidths, a report and a plot."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from graph_stages.lookup import lookup_table, write_lookup
from graph_stages.plot import draw
from graph_stages.records import raw_path, read_raw
from graph_stages.regression import Regression, fit_stages
from graph_stages.report import report
from utils import files
from utils.logger import get_logger
from utils.paths import Workspace

BANDWIDTH, REGRESSION = "bandwidth_table.json", "regression_table.json"
REPORT, PLOT = "profiling_report.txt", "regression.png"
NO_SKLEARN = "scikit-learn is not installed: the regression was skipped (pip install scikit-learn)"
log = get_logger("stages")


def analyze(workspace: Workspace) -> list[dict[str, Any]]:
    """Writes lookup_table.json, bandwidth_table.json, regression_table.json, profiling_report.txt and regression.png beside the
    raw measurements, and returns a row for each unit and stage.

    Without scikit-learn there is no regression, and so neither bandwidth nor plot; the other files say so.

    Raises:
        UserError: there are no measurements, or they are damaged.
    """
    folder = workspace.stage_results
    raw = read_raw(raw_path(workspace))
    skipped = "" if find_spec("sklearn") else NO_SKLEARN
    fits = {} if skipped else {(fit.unit, fit.stage): fit for fit in fit_stages(raw.records)}
    measured = dict.fromkeys((record.unit, record.stage) for record in raw.records)
    table = lookup_table(raw.records, fits, skipped or "no run succeeded")
    keyed = {f"{unit}_stage{stage}": fits.get((unit, stage)) or Regression(unit, stage, 0, reason=skipped or "no run succeeded")
             for unit, stage in measured}
    write_lookup(folder, table)
    files.write_json(folder / BANDWIDTH, {key: fit.bandwidth for key, fit in keyed.items()})
    files.write_json(folder / REGRESSION, {key: asdict(fit) for key, fit in keyed.items()})
    files.write_text(folder / REPORT, report(raw, table, keyed.values(), skipped))
    if skipped:
        log.warning("%s", skipped)
    else:
        draw(raw.records, fits, folder / PLOT)
    log.info("%d records of times, %d bandwidths (%d null): %s", len(table), len(keyed),
             sum(fit.bandwidth is None for fit in keyed.values()), folder)
    return [row(fit) for fit in keyed.values()]


def row(fit: Regression) -> dict[str, Any]:
    """A regression as a row of a table."""
    unknown = fit.slope_low is None or fit.slope_high is None
    within = None if unknown else f"{_per_mb(fit.slope_low)} to {_per_mb(fit.slope_high)}"
    return {"unit": fit.unit, "stage": fit.stage, "sizes": fit.points, "ms per MB": _per_mb(fit.slope_ms_per_byte),
            "95 % interval": within, "intercept (ms)": fit.intercept_ms, "R²": fit.r2, "bandwidth (MB/s)": fit.bandwidth,
            "reason": fit.reason}


def _per_mb(slope: float | None) -> str | None:
    return None if slope is None else f"{slope * 1024**2:.4g}"
