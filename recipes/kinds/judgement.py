"""The results of each step for each model, the table made from them, and the summary against the limits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from recipes.kinds.manifest import MadeModel
from utils import cli, files
from utils.errors import UserError

JUDGEMENT = "judgement.jsonl"
JUDGEMENT_VERSION = 1
PACE = "host pace"  # a column
Step = Literal["h200", "cpu", "cpu_filled", "measured"]
SAID: dict[Step, str] = {"h200": "nvidia-h200", "cpu": "this CPU", "cpu_filled": "this CPU, kernels measured"}
CLASSIFICATION = "torchvision classification"
SHORT_MS = 1.0  # below this a run's own cost dominates the latency; errors are also given without such models
MOST_OFF = 0.30  # largest error of an unmarked answer
CLOSE = 0.15  # a marked answer with a smaller error needed no mark
BARS = {"median": 0.08, "mape": 0.15, "close": 1 / 3}


class Found(BaseModel):
    """One step of one model.

    Attributes:
        step: a prediction for a target (`cpu_filled`: after its missing kernels were measured), or the model's measurement.
        outcome: `answered`; `refused`: an error for the user; `traceback`; `died`: by a signal or without a message; `too
            long`.
        message: if there was no answer: the last line on stderr.
        warnings: of the command.
        seconds: time of the command.
        latency_ms, interval_ms, time_share: of a prediction, as in its JSON.
        host_pace: at which a prediction for a GPU was made, a ratio; None if it was not known.
        rough: whether the prediction is marked as a rough estimate; None without a prediction.
        operators: those that were never measured, and measured ones that may still change the answer.
        first_ms, second_ms: medians of two alternating measurements.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = JUDGEMENT_VERSION
    model: str
    step: Step
    outcome: Literal["answered", "refused", "traceback", "died", "too long"]
    message: str = ""
    warnings: tuple[str, ...] = ()
    seconds: float
    latency_ms: float | None = None
    interval_ms: tuple[float, float] | None = None
    time_share: dict[str, float] = {}
    host_pace: float | None = None
    rough: bool | None = None
    operators: tuple[str, ...] = ()
    first_ms: float | None = None
    second_ms: float | None = None

    @property
    def description(self) -> str:
        """The answer that the user got, in words."""
        if self.outcome != "answered":
            return f"{self.outcome}: {self.message}"
        operators = f" ({', '.join(dict.fromkeys(self.operators))})" if self.operators else ""
        return f"rough estimate{operators}" if self.rough else "unmarked"


class Row(BaseModel):
    """One model on one target: predicted and measured. Errors are ratios, None if one of the two is missing."""

    model_config = ConfigDict(frozen=True)

    model: str
    kind: str
    step: Step
    found: Found
    measured_ms: float | None
    second_difference: float | None

    @property
    def error(self) -> float | None:
        if self.found.latency_ms is None or not self.measured_ms:
            return None
        return self.found.latency_ms / self.measured_ms - 1.0

    @property
    def off(self) -> float:
        """The absolute error; 0 if there is none."""
        return abs(self.error or 0.0)

    @property
    def interval_width(self) -> float | None:
        """The width of the prediction interval over the prediction, a ratio."""
        if self.found.interval_ms is None or not self.found.latency_ms:
            return None
        return (self.found.interval_ms[1] - self.found.interval_ms[0]) / self.found.latency_ms

    @property
    def held(self) -> bool | None:
        """Whether the prediction interval contains the measurement."""
        if self.found.interval_ms is None or self.measured_ms is None:
            return None
        return self.found.interval_ms[0] <= self.measured_ms <= self.found.interval_ms[1]

    def columns(self) -> dict[str, Any]:
        """As a row of the table."""
        between = self.found.interval_ms
        return {
            "model": self.model, "kind": self.kind, "target": SAID[self.step], PACE: self.found.host_pace,
            "predicted (ms)": self.found.latency_ms,
            "90 % between (ms)": f"{between[0]:.4g} and {between[1]:.4g}" if between else None, "said": self.found.description,
            "measured (ms)": self.measured_ms, "error": percent(self.error),
            "second measurement": percent(self.second_difference),
        }


def shown(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of the table; without the column PACE if no model was predicted at its host pace."""
    columns = [row.columns() for row in rows]
    if all(row.found.host_pace is None for row in rows):
        columns = [{name: value for name, value in one.items() if name != PACE} for one in columns]
    return columns


def percent(ratio: float | None) -> str | None:
    """A ratio as per cent with its sign."""
    return None if ratio is None else f"{ratio:+.1%}"


def read_judgement(folder: Path) -> dict[tuple[str, Step], Found]:
    """The results so far, the latest for each model and step.

    Raises:
        UserError: a line is damaged or of another version.
    """
    path, found = folder / JUDGEMENT, {}
    for number, line in enumerate(files.read_lines(path), 1):
        try:
            one = Found.model_validate_json(line)
        except ValidationError as error:
            raise UserError(f"{path}, line {number}: damaged ({error.errors()[0]['msg']}); remove the line") from None
        if one.version != JUDGEMENT_VERSION:
            raise UserError(f"{path}, line {number}: version {one.version}, this Hase reads version {JUDGEMENT_VERSION}; "
                            "remove the file")
        found[one.model, one.step] = one
    return found


def rows_of(models: Sequence[MadeModel], found: Mapping[tuple[str, Step], Found],
            on_gpu_ms: Mapping[str, float] | None = None) -> list[Row]:
    """One row per model and target that was asked for.

    Args:
        on_gpu_ms: latencies of the models on an NVIDIA H200 in ms, by name.
    """
    rows = []
    for model in models:
        measured = found.get((model.name, "measured"))
        first, second = (measured.first_ms, measured.second_ms) if measured else (None, None)
        for step in SAID:
            if one := found.get((model.name, step)):
                here = step != "h200"
                rows.append(Row(
                    model=model.name, kind=model.kind, step=step, found=one,
                    measured_ms=first if here else (on_gpu_ms or {}).get(model.name),
                    second_difference=second / first - 1.0 if here and first and second else None))
    return rows


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each limit, the value that was reached, and whether that is enough (None: no limit)."""
    filled = [row for row in rows if row.step == "cpu_filled" and row.error is not None]
    lines: list[dict[str, Any]] = []

    def line(what: str, bar: str, reached: str, met: bool | None) -> None:
        lines.append({"what": what, "bar": bar, "reached": reached, "met": {True: "yes", False: "no", None: "-"}[met]})

    longer = [row for row in filled if (row.measured_ms or 0.0) >= SHORT_MS]
    for title, some in (("this CPU, kernels measured", filled), (f"… models of {SHORT_MS:g} ms and more", longer)):
        if some:
            own = title[0] != "…"
            median, mape = statistics.median(row.off for row in some), statistics.fmean(row.off for row in some)
            line(f"{title}: median error of {len(some)}", f"{BARS['median']:.0%}", f"{median:.1%}",
                 median <= BARS["median"] if own else None)
            line(f"{title}: MAPE", f"{BARS['mape']:.0%}", f"{mape:.1%}", mape <= BARS["mape"] if own else None)
            floor = [abs(row.second_difference) for row in some if row.second_difference is not None]
            if floor:
                line(f"{title}: a second measurement, median / mean", "",
                     f"{statistics.median(floor):.1%} / {statistics.fmean(floor):.1%}", None)
    for outcome in ("traceback", "died", "too long", "refused"):
        some = [row for row in rows if row.found.outcome == outcome]
        bar, met = ("", None) if outcome == "refused" else ("0", not some)
        line(f"answers: {outcome}", bar, _names(some), met)
    unmarked = [row for row in rows if row.error is not None and not row.found.rough]
    off = [row for row in unmarked if row.off > MOST_OFF]
    line(f"of {len(unmarked)} unmarked answers off by more than {MOST_OFF:.0%}", "0", _names(off), not off)
    marked = [row for row in rows if row.error is not None and row.found.rough]
    close = [row for row in marked if row.off <= CLOSE]
    line(f"of {len(marked)} marked answers within {CLOSE:.0%}", "a third", _names(close),
         not marked or len(close) / len(marked) <= BARS["close"])
    wrongly = [row for row in rows if row.kind == CLASSIFICATION and row.found.rough]
    line("torchvision classification models marked", "0", _names(wrongly), not wrongly)
    for step, name in SAID.items():
        of_step = [row for row in rows if row.step == step and row.found.outcome == "answered"]
        widths = [row.interval_width for row in of_step if row.interval_width is not None]
        held = [row.held for row in of_step if row.held is not None]
        if of_step:
            line(f"{name}: answers with an interval", f"{len(of_step)}", f"{len(widths)}", len(widths) == len(of_step))
        if widths:
            line(f"{name}: interval's width over the prediction, median / widest", "",
                 f"{statistics.median(widths):.0%} / {max(widths):.0%}", None)
        errors = [row.off for row in of_step if row.error is not None and not row.found.rough]
        if errors:
            line(f"{name}: error of {len(errors)} unmarked answers, median / mean", "",
                 f"{statistics.median(errors):.1%} / {statistics.fmean(errors):.1%}", None)
        if held:
            line(f"{name}: intervals that hold what was measured", "90 %", f"{sum(held) / len(held):.0%} of {len(held)}", None)
    return lines


def _names(rows: Iterable[Row]) -> str:
    """The number of rows, and their names."""
    named = [f"{row.model} ({SAID[row.step]}{', ' + str(percent(row.error)) if row.error is not None else ''})" for row in rows]
    return f"{len(named)}: {', '.join(named)}" if named else "0"


def page(rows: Sequence[Row], command: str, context: str) -> str:
    """The documentation page: the summary first, then every model.

    Args:
        command: the command that made the results.
        context: machine and versions, in a sentence.
    """
    opening = f"Hase was asked about {len({row.model for row in rows})} models of {len({row.kind for row in rows})} kinds. "
    for step, name in SAID.items():
        asked = [row for row in rows if row.step == step]
        compared = [row.off for row in asked if row.error is not None]
        if asked:
            marked = sum(bool(row.found.rough) for row in asked)
            answered, refused = (sum(row.found.outcome == outcome for row in asked) for outcome in ("answered", "refused"))
            opening += (f"On {name}: {answered} of {len(asked)} were answered, {marked} of these as rough estimates, "
                        f"{refused} refused with a reason, {len(asked) - answered - refused} failed; ")
            opening += (f"median error {statistics.median(compared):.1%}, MAPE {statistics.fmean(compared):.1%} of "
                        f"{len(compared)} that were measured. " if compared else "none was measured yet. ")
    paced = sum(row.found.host_pace is not None for row in rows)
    words = (" *Host pace*: dispatch time of the GPU's host over its usual time, measured together with the model; "
             f"{paced} predictions hold for that pace.") if paced else ""
    return "\n".join((
        "# Models of every kind", "", opening.strip(), "", context, "", "Made by:", "", "```sh", command, "```", "",
        "## Against the bars", "", table(summary(rows)), "", "## Every model", "",
        "*Said*: an answer is unmarked, a rough estimate, or refused with a reason. *Second measurement*: how far it was from "
        f"the first; both alternate.{words}", "", table(shown(rows)), ""))


def table(rows: Sequence[Mapping[str, Any]], cell: Callable[[Any], str] = cli.cell) -> str:
    """Rows as a Markdown table."""
    columns = list(rows[0]) if rows else []
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(column)).replace("|", "\\|").replace("\n", " ") for column in columns) + " |"
              for row in rows]
    return "\n".join(lines)
