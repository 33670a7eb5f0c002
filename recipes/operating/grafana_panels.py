"""Defines the Grafana dashboard, and makes it with Grafana's builders."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common as options
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as Number
from grafana_foundation_sdk.builders.statetimeline import Panel as States
from grafana_foundation_sdk.builders.timeseries import Panel as Lines
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models

from hase.benchmark.metrics.names import NAMES, metric_names
from hase.inference.prediction.answers import CHANCE_WORDS

ON_DEVICE, OF_MODEL = 'Hostname=~"$host"', 'model=~"$model"'  # what the variables at the top choose
DEVICE, MODEL = "{{Hostname}} {{device}}", "{{model}} on {{target}}"  # legends
HEIGHT = 8  # of a panel, in rows of Grafana's grid, which has 24 columns
PANELS: dict[str, Any] = {"lines": Lines, "number": Number, "states": States}
RATIO, SECONDS, YES_NO, NUMBER = "percentunit", "s", "bool_yes_no", "none"  # Grafana's names of units
SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True)
class Panel:
    """The description of a panel."""

    title: str
    description: str
    unit: str
    queries: Sequence[tuple[str, str]]  # PromQL, each with the legend of its series
    width: int = 12
    kind: str = "lines"  # or `number`, the latest value; or `states`
    colours: Sequence[tuple[str, float | None]] = ()  # of numbers and states, each with its smallest value; None for the first


def metric(field: str, scale: float = 1.0) -> str:
    """PromQL for a device's metric under its old or new name. Values in the unit of FIELDS are multiplied by `scale`."""
    factors = [(name, NAMES[name].scale * scale) for name in metric_names(field)]
    return " or ".join(f"{name}{{{ON_DEVICE}}}" + (f" * {factor:g}" if factor != 1.0 else "") for name, factor in factors)


# A colour for each of Hase's words for chances
CHANCE_COLOURS = [("red", None),
                  *zip(("orange", "yellow", "light-green", "green"), (most for most, _ in CHANCE_WORDS), strict=True)]
PREDICTIONS = (
    Panel("Chance that the objective is met", "From how wrong the prediction may be; 65 % and less is about even or worse.",
          RATIO, [(f"hase_objective_chance_ratio{{{OF_MODEL}}}", MODEL)], 6, "number", CHANCE_COLOURS),
    Panel("Predicted latency, and the limit", "Under the load of that moment: quantiles, the mean, and the objective's limit.",
          SECONDS, [(f"hase_predicted_latency_seconds{{{OF_MODEL}}}", "{{model}}, quantile {{quantile}}"),
                    (f"hase_predicted_latency_mean_seconds{{{OF_MODEL}}}", "{{model}}, mean"),
                    (f"hase_objective_limit_seconds{{{OF_MODEL}}}", "{{model}}, limit of quantile {{quantile}}")], 18),
    Panel("Headroom", "How far the predicted latency is below the limit, as a share of it; negative if it is above.",
          RATIO, [(f"hase:objective_headroom:ratio{{{OF_MODEL}}}", MODEL)]),
    Panel("Rough estimates", "Predictions that could be far off, since operators in them were never measured.",
          YES_NO, [(f"hase_prediction_rough_estimate{{{OF_MODEL}}}", MODEL)], kind="states",
          colours=(("green", None), ("orange", 1.0))),
)
SHARING = (
    Panel("Time that other work keeps the device busy", "By the sharing probe (--probe-every).",
          RATIO, [(f"hase:busy_share:ratio{{{ON_DEVICE}}}", DEVICE)]),
    Panel("How long tiny work takes", "Runs of the sharing probe. Other work makes them wait.",
          SECONDS, [(f'hase_probe_latency_seconds{{runs="all", quantile=~"0.5|0.95", {ON_DEVICE}}}',
                     DEVICE + ", quantile {{quantile}}")]),
    Panel("Processes that have the GPU open", "Without the exporter itself.",
          NUMBER, [(f"hase_gpu_processes{{{ON_DEVICE}}}", DEVICE)]),
    Panel("How long the host takes to dispatch a fixed graph", "The host probe (--host-pace-every). Small models wait for it.",
          SECONDS, [(f"hase_host_probe_seconds{{{ON_DEVICE}}}", DEVICE)], 6),
    Panel("Host pace of the predictions", "How many times as long as usual the host takes.",
          NUMBER, [(f"hase_prediction_host_pace{{{OF_MODEL}}}", MODEL)], 6),
)
DEVICES = (
    Panel("Busy", "Time that any engine of the GPU was active, or that the CPU was not idle.",
          RATIO, [(metric("DCGM_FI_PROF_GR_ENGINE_ACTIVE"), DEVICE), (metric("DCGM_FI_DEV_CPU_UTIL_TOTAL"), DEVICE)]),
    Panel("SMs and tensor cores", "SMs with a warp, and tensor cores at work, averaged over the SMs.",
          RATIO, [(metric("DCGM_FI_PROF_SM_ACTIVE"), DEVICE + ", SMs"),
                  (metric("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"), DEVICE + ", tensor cores")]),
    Panel("Memory", "Time that the GPU's memory moved data.", RATIO, [(metric("DCGM_FI_PROF_DRAM_ACTIVE"), DEVICE)], 8),
    Panel("Power", "Drawn by the GPU.", "watt", [(metric("DCGM_FI_DEV_POWER_USAGE"), DEVICE)], 8),
    Panel("Clock of the SMs", "Lower under a limit of power or heat.", "hertz",
          [(metric("DCGM_FI_DEV_SM_CLOCK", 1e6), DEVICE)], 8),
)
HASE = (
    Panel("Alerts", "Of hase_rules.yml, pending or firing.",
          NUMBER, [('sum by (alertname, alertstate, instance, model) (ALERTS{alertname=~"Hase.*"})',
                    "{{alertname}} {{alertstate}} {{instance}} {{model}}")], kind="states", colours=(("orange", None),)),
    Panel("Scraped", "Whether Prometheus gets metrics. An exporter refuses where it has nothing fresh.",
          YES_NO, [('up{job=~"hase.*"}', "{{job}} {{instance}}")], kind="states", colours=(("red", None), ("green", 1.0))),
    Panel("Age of what is served", "Samples, predictions, and readings of the probes.",
          SECONDS, [("hase:exporter_sample_age:seconds", "{{instance}}, sample"),
                    ("hase:prediction_age:seconds", "{{model}}, prediction"),
                    (f"time() - hase_probe_timestamp_seconds{{{ON_DEVICE}}}", DEVICE + ", sharing probe"),
                    (f"time() - hase_host_probe_timestamp_seconds{{{ON_DEVICE}}}", DEVICE + ", host probe")]),
    Panel("Predictions that failed, in 5 minutes", "Their reasons stand in the log of the command.",
          NUMBER, [("increase(hase_prediction_failed_readings_total[5m])", "{{instance}}")]),
)
ROWS = {"Predictions and objectives": PREDICTIONS, "How the device is shared": SHARING, "The device": DEVICES,
        "Hase itself": HASE}
VARIABLES = (("host", "Host", 'label_values({__name__=~"DCGM_FI_.*"}, Hostname)'),
             ("model", "Model", "label_values(hase_predicted_latency_mean_seconds, model)"))


def dashboard() -> builders.Dashboard:
    """The dashboard, ready to be built."""
    board = (builders.Dashboard("Hase").uid("hase").tags(["hase"]).refresh("30s").time("now-3h", "now")
             .description("Predicted latencies, their objectives, and the devices that they are for")
             .with_variable(builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")))
    for name, label, values in VARIABLES:
        board.with_variable(builders.QueryVariable(name).label(label).datasource(SOURCE).query(values).multi(True)
                            .include_all(True).all_value(".*").current(models.VariableOption(text=["All"], value=["$__all"]))
                            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED))
    ids = itertools.count(1)  # Grafana's links to panels need them
    for title, panels in ROWS.items():
        board.with_row(builders.Row(title).id(next(ids)))
        for spec in panels:
            board.with_panel(_panel(spec).id(next(ids)))
    return board


def _panel(spec: Panel) -> Any:
    """A panel, ready to be built."""
    panel = (PANELS[spec.kind]().title(spec.title).description(spec.description).unit(spec.unit).datasource(SOURCE)
             .height(HEIGHT).span(spec.width))
    for index, (expr, legend) in enumerate(spec.queries):
        panel.with_target(Dataquery().expr(expr).legend_format(legend).ref_id(chr(ord("A") + index)).datasource(SOURCE).range())
    if spec.kind == "number":
        panel.reduce_options(options.ReduceDataOptions().calcs(["lastNotNull"]))
    else:
        panel.legend(options.VizLegendOptions().show_legend(spec.kind == "lines").placement(common.LegendPlacement.BOTTOM)
                     .display_mode(common.LegendDisplayMode.LIST))
        panel.tooltip(options.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
    if spec.kind == "lines":
        panel.fill_opacity(5).show_points(common.VisibilityMode.AUTO)
    else:
        steps = [models.Threshold(value=least, color=colour) for colour, least in spec.colours]
        panel.thresholds(builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        panel.color_scheme(builders.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    return panel


def dashboard_json() -> str:
    """The dashboard as the text of a file."""
    return json.dumps(dashboard().build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"
