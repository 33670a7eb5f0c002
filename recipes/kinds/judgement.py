"""The results of each step for each model, the table made from them, and the summary against the limits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from hase.inference.evaluation.evaluate import STEADY
from hase.recipes.kinds.manifest import MadeModel
from hase.utils import cli, files
from hase.utils.errors import UserError

JUDGEMENT = "judgement.jsonl"
JUDGEMENT_VERSION = 2
PACE = "host pace"  # a column
Step = Literal["h200", "cpu", "measured", "cpu_filled", "measured_again"]
MEASUREMENTS: tuple[Step, Step] = ("measured", "measured_again")
SAID: dict[Step, str] = {"h200": "nvidia-h200", "cpu": "this CPU", "cpu_filled": "this CPU, kernels measured"}
CLASSIFICATION = "torchvision classification"
SHORT_MS = 1.0  # below this a run's own cost dominates the latency; errors are also given without such models
MOST_OFF = 0.30  # largest error of an unmarked answer
CLOSE = 0.15  # a marked answer with a smaller error needed no mark
AGREES = 0.10  # largest difference between two measurements that agree: a greater one says nothing of the answer between them
# width: what the answers of a CPU had in the median before measurements in unsteady times were marked
BARS = {"median": 0.08, "mean": 0.15, "close": 1 / 3, "held": 0.90, "marked": 0.15, "width": 0.55}


class StepResult(BaseModel):
    """One step of one model.

    Attributes:
        step: a prediction for a target (`cpu_filled`: after its missing kernels were measured), or one of two measurements of
            the model, before and after that.
        outcome: `answered`; `refused`: an error for the user; `traceback`; `died`: by a signal or without a message; `too
            long`.
        message: if there was no answer: the last line on stderr.
        warnings: of the command.
        seconds: time of the command.
        latency_ms, interval_ms, time_share, unsteady_share: of a prediction, as in its JSON.
        host_pace: at which a prediction for a GPU was made, a ratio; None if it was not known.
        rough: whether the prediction is marked as a rough estimate; None without a prediction.
        operators: those that were never measured, and measured ones that may still change the answer.
        measured_ms: of a measurement, the median.
        canaries_ms: of a measurement, the canary's times before and after each session.
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
    unsteady_share: float = 0.0
    host_pace: float | None = None
    rough: bool | None = None
    operators: tuple[str, ...] = ()
    measured_ms: float | None = None
    canaries_ms: tuple[float, ...] = ()

    def slowed(self, best_canary_ms: float) -> float:
        """How much slower than at its best the machine was during a measurement, a ratio; 0 where the canary is not known."""
        return max(self.canaries_ms) / best_canary_ms - 1.0 if self.canaries_ms and best_canary_ms else 0.0

    @property
    def description(self) -> str:
        """The answer that the user got, in words."""
        if self.outcome != "answered":
            return f"{self.outcome}: {self.message}"
        operators = f" ({', '.join(dict.fromkeys(self.operators))})" if self.operators else ""
        return f"rough estimate{operators}" if self.rough else "unmarked"


def shortest_canary_ms(results: Iterable[StepResult]) -> float:
    """The canary's shortest time around any measurement; 0 if there is none."""
    return min((time_ms for result in results for time_ms in result.canaries_ms), default=0.0)


class Row(BaseModel):
    """One model on one target: predicted and measured. Errors are ratios, None if one of the two is missing.

    Attributes:
        second_difference: between the two measurements, a ratio.
        slowed: how much slower than at its best the machine was during one of them, a ratio.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    kind: str
    step: Step
    result: StepResult
    measured_ms: float | None
    second_difference: float | None
    slowed: float = 0.0

    @property
    def error(self) -> float | None:
        if self.result.latency_ms is None or not self.measured_ms:
            return None
        return self.result.latency_ms / self.measured_ms - 1.0

    @property
    def off(self) -> float:
        """The absolute error; 0 if there is none."""
        return abs(self.error or 0.0)

    @property
    def agrees(self) -> bool | None:
        """Whether the second measurement agrees with the first, both on a machine at its best; None if there are not two."""
        return None if self.second_difference is None else abs(self.second_difference) <= AGREES and self.slowed <= STEADY

    @property
    def interval_width(self) -> float | None:
        """The width of the prediction interval over the prediction, a ratio."""
        if self.result.interval_ms is None or not self.result.latency_ms:
            return None
        return (self.result.interval_ms[1] - self.result.interval_ms[0]) / self.result.latency_ms

    @property
    def held(self) -> bool | None:
        """Whether the prediction interval contains the measurement."""
        if self.result.interval_ms is None or self.measured_ms is None:
            return None
        return self.result.interval_ms[0] <= self.measured_ms <= self.result.interval_ms[1]

    def columns(self) -> dict[str, Any]:
        """As a row of the table."""
        between = self.result.interval_ms
        return {
            "model": self.model, "kind": self.kind, "target": SAID[self.step], PACE: self.result.host_pace,
            "predicted (ms)": self.result.latency_ms,
            "90 % between (ms)": f"{between[0]:.4g} and {between[1]:.4g}" if between else None, "said": self.result.description,
            "measured (ms)": self.measured_ms, "error": percent(self.error),
            "second measurement": percent(self.second_difference),
            "agrees": {True: "yes", False: "no", None: None}[self.agrees],
        }


def shown(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of the table; without the column PACE if no model was predicted at its host pace."""
    columns = [row.columns() for row in rows]
    if all(row.result.host_pace is None for row in rows):
        columns = [{name: value for name, value in row.items() if name != PACE} for row in columns]
    return columns


def percent(ratio: float | None) -> str | None:
    """A ratio as per cent with its sign."""
    return None if ratio is None else f"{ratio:+.1%}"


def read_judgement(folder: Path) -> dict[tuple[str, Step], StepResult]:
    """The results so far, the latest for each model and step.

    Raises:
        UserError: a line is damaged or of another version.
    """
    path, results = folder / JUDGEMENT, {}
    for number, line in enumerate(files.read_lines(path), 1):
        try:
            result = StepResult.model_validate_json(line)
        except ValidationError as error:
            raise UserError(f"{path}, line {number}: damaged ({error.errors()[0]['msg']}); remove the line") from None
        if result.version != JUDGEMENT_VERSION:
            raise UserError(f"{path}, line {number}: version {result.version}, this Hase reads version {JUDGEMENT_VERSION}; "
                            "remove the file")
        results[result.model, result.step] = result
    return results


def rows_of(models: Sequence[MadeModel], results: Mapping[tuple[str, Step], StepResult],
            on_gpu_ms: Mapping[str, float] | None = None) -> list[Row]:
    """One row per model and target that was asked for.

    Args:
        on_gpu_ms: latencies of the models on an NVIDIA H200 in ms, by name.
    """
    rows, best_ms = [], shortest_canary_ms(results.values())
    for model in models:
        measured = [results.get((model.name, step)) for step in MEASUREMENTS]
        first_ms, second_ms = (result.measured_ms if result else None for result in measured)
        slowed = max((result.slowed(best_ms) for result in measured if result), default=0.0)
        for step in SAID:
            if result := results.get((model.name, step)):
                measured_here = step != "h200"
                rows.append(Row(
                    model=model.name, kind=model.kind, step=step, result=result,
                    measured_ms=first_ms if measured_here else (on_gpu_ms or {}).get(model.name),
                    second_difference=second_ms / first_ms - 1.0 if measured_here and first_ms and second_ms else None,
                    slowed=slowed))
    return rows


class Line(NamedTuple):
    """A line of the summary: a share or a number that was reached, beside its bar.

    Attributes:
        what: what it is of.
        bar: the bar, as the page shows it; "" where there is none.
        reached: what was reached, as the page shows it.
        met: whether the bar is met; None where there is none.
    """

    what: str
    bar: str
    reached: str
    met: bool | None

    @classmethod
    def at_most(cls, what: str, bar: float, share: float, more: str = "") -> Line:
        """A share that should not be larger than `bar`; `more` follows it."""
        return cls(what, f"at most {100 * bar:.3g}%", f"{share:.1%}{more}", share <= bar)

    @classmethod
    def none_of(cls, what: str, rows: Sequence[Row]) -> Line:
        """Rows of which there should be none."""
        return cls(what, "0", named(rows), not rows)

    def columns(self) -> dict[str, str]:
        """As a row of the table."""
        return {"what": self.what, "bar": self.bar, "reached": self.reached,
                "met": {True: "yes", False: "no", None: "-"}[self.met]}


def summary(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Each bar, the value that was reached, and whether the bar is met ("-" where there is none)."""
    compared = [row for row in rows if row.error is not None]
    unmarked = [row for row in compared if not row.result.rough]
    marked = [row for row in compared if row.result.rough]
    close = [row for row in marked if row.off <= CLOSE]
    lines = filled_lines([row for row in rows if row.step == "cpu_filled" and row.result.outcome == "answered"])
    lines += [Line.none_of(f"answers: {outcome}", [row for row in rows if row.result.outcome == outcome])
              for outcome in ("traceback", "died", "too long")]
    lines.append(Line("answers: refused", "", named([row for row in rows if row.result.outcome == "refused"]), None))
    lines.append(Line.none_of(f"of {len(unmarked)} unmarked answers off by more than {MOST_OFF:.0%}",
                              [row for row in unmarked if row.off > MOST_OFF]))
    if marked:
        lines.append(Line.at_most(f"of {len(marked)} marked answers within {CLOSE:.0%}: these needed no mark", BARS["close"],
                                  len(close) / len(marked), f", {named(close)}"))
    lines.append(Line.none_of("torchvision classification models marked",
                              [row for row in rows if row.kind == CLASSIFICATION and row.result.rough]))
    for step in SAID:
        lines += interval_lines(step, [row for row in rows if row.step == step and row.result.outcome == "answered"])
    return [line.columns() for line in lines]


def filled_lines(answered: Sequence[Row]) -> list[Line]:
    """How models fare whose kernels were measured first: what is confident and wrong, marked, or wide; and the errors, once
    more without short models, for which there is no bar."""
    if not answered:
        return []
    rows = [row for row in answered if row.error is not None]
    sure = [row for row in rows if row.agrees and not row.result.rough]
    marked = [row for row in answered if row.result.rough]
    widths = [row.interval_width for row in answered if row.interval_width is not None]
    name = SAID["cpu_filled"]
    lines = [Line.none_of(f"{name}: of {len(sure)} unmarked answers whose two measurements agree, off by more than "
                          f"{MOST_OFF:.0%}", [row for row in sure if row.off > MOST_OFF]),
             Line.at_most(f"{name}: of {len(answered)} answers marked", BARS["marked"], len(marked) / len(answered),
                          f", {named(marked)}")]
    if widths:
        lines.append(Line.at_most(f"{name}: interval's width over the prediction, median", BARS["width"],
                                  statistics.median(widths)))
    for title, chosen in ((name, rows), (
            f"… models of {SHORT_MS:g} ms and more", [row for row in rows if (row.measured_ms or 0.0) >= SHORT_MS])):
        if not chosen:
            continue
        median, mean = statistics.median(row.off for row in chosen), statistics.fmean(row.off for row in chosen)
        if chosen is rows:
            lines += [Line.at_most(f"{title}: median error of {len(chosen)}", BARS["median"], median),
                      Line.at_most(f"{title}: mean error", BARS["mean"], mean)]
        else:
            lines.append(Line(f"{title}: error of {len(chosen)}, median / mean", "", f"{median:.1%} / {mean:.1%}", None))
        differences = [abs(row.second_difference) for row in chosen if row.second_difference is not None]
        if differences:
            lines.append(Line(f"{title}: a second measurement, median / mean", "",
                              f"{statistics.median(differences):.1%} / {statistics.fmean(differences):.1%}", None))
    return lines


def interval_lines(step: Step, answered: Sequence[Row]) -> list[Line]:
    """How many answers of a step have an interval, how wide it is, and how many intervals hold what was measured."""
    name, lines = SAID[step], []
    widths = [row.interval_width for row in answered if row.interval_width is not None]
    held = [row.held for row in answered if row.held is not None]
    errors = [row.off for row in answered if row.error is not None and not row.result.rough]
    if answered:
        lines.append(Line(f"{name}: answers with an interval", f"at least {len(answered)}", f"{len(widths)}",
                          len(widths) == len(answered)))
    if widths:
        lines.append(Line(f"{name}: interval's width over the prediction, median / widest", "",
                          f"{statistics.median(widths):.0%} / {max(widths):.0%}", None))
    if errors:
        lines.append(Line(f"{name}: error of {len(errors)} unmarked answers, median / mean", "",
                          f"{statistics.median(errors):.1%} / {statistics.fmean(errors):.1%}", None))
    if held:
        share = sum(held) / len(held)
        lines.append(Line(f"{name}: intervals that hold what was measured", f"at least {BARS['held']:.0%}",
                          f"{share:.1%} of {len(held)}", share >= BARS["held"]))
    return lines


def named(rows: Sequence[Row]) -> str:
    """The number of rows, and their names with their errors."""
    names = [f"{row.model} ({SAID[row.step]}{', ' + str(percent(row.error)) if row.error is not None else ''})" for row in rows]
    return f"{len(names)}: {', '.join(names)}" if names else "0"


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
            marked = sum(bool(row.result.rough) for row in asked)
            answered, refused = (sum(row.result.outcome == outcome for row in asked) for outcome in ("answered", "refused"))
            opening += (f"On {name}: {answered} of {len(asked)} were answered, {marked} of these as rough estimates, "
                        f"{refused} refused with a reason, {len(asked) - answered - refused} failed; ")
            opening += (f"median error {statistics.median(compared):.1%}, mean error {statistics.fmean(compared):.1%} of "
                        f"{len(compared)} that were measured. " if compared else "none was measured yet. ")
    paced = sum(row.result.host_pace is not None for row in rows)
    words = (" *Host pace*: dispatch time of the GPU's host over its usual time, measured together with the model; "
             f"{paced} predictions hold for that pace.") if paced else ""
    return "\n".join((
        "# Models of every kind", "", opening.strip(), "", context, "", "Made by:", "", "```sh", command, "```", "",
        "## Against the bars", "", table(summary(rows)), "", "## Every model", "",
        "*Said*: an answer is unmarked, a rough estimate, or refused with a reason. *Error*: on the CPU against the first of "
        "two measurements, which was taken before the kernels were measured. *Second measurement*: how far the one after that "
        f"was from the first. They *agree* within {AGREES:.0%}, with a machine as fast as at its best; else it changed "
        f"meanwhile, and the error says little.{words}", "", table(shown(rows)), ""))


def table(rows: Sequence[Mapping[str, Any]], cell: Callable[[Any], str] = cli.cell) -> str:
    """Rows as a Markdown table."""
    columns = list(rows[0]) if rows else []
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(column)).replace("|", "\\|").replace("\n", " ") for column in columns) + " |"
              for row in rows]
    return "\n".join(lines)
