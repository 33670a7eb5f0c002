"""Evaluates the candidates of a search: predictions, score, and the probability that the limits are kept."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from hase.inference.library.predictor import Predictor
from hase.inference.prediction.answers import chance_within
from hase.inference.prediction.brief import BriefPrediction
from hase.inference.prediction.conditions import AS_USUAL, UNKNOWN, HostPace, pace_of
from hase.inference.prediction.sources import Source
from hase.inference.prediction.uncertainty import HOSTS, host_warning
from hase.inference.search.spaces import Choice, space_of, user_code_error
from hase.records.kernel_record import ModelRecord
from hase.utils.errors import UserError
from hase.utils.fingerprint import FROM_SHEET
from hase.utils.lazy import onnx
from hase.utils.paths import SHIPPED, Workspace
from hase.utils.processes import MIB

OWN, FLOPS, WEIGHTS = "own", "flops", "weights"  # what a candidate can be scored by, besides a table
TABLE_SUFFIX = ".csv"
NAME, SCORE = "model", "score"  # the columns that a table of scores needs; tables of earlier searches have them


class SearchLimits(NamedTuple):
    """The limits of a candidate; None where there is none. `least_chance`: the required probability of keeping to them, 0 to 1;
    at 0.5 the predicted numbers themselves must keep to the limits."""

    latency_ms: float | None = None
    memory_mib: float | None = None
    energy_j: float | None = None
    least_chance: float = 0.5


class SearchQuestion(NamedTuple):
    """The question of a search, in a form that can be sent to another process. `space`, `most` and `seed` are arguments of
    `space_of`.

    Attributes:
        energy: predict energies, even without a limit.
        score: the space's own score, operations, weights, or the path of a table of scores; None: the space's own, else
            operations.
        force: predict although the target is of another version (with a warning).
    """

    workspace: Path
    target: str | None
    space: str
    most: int | None
    seed: int
    limits: SearchLimits
    energy: bool
    score: str | None
    host_pace: float | HostPace | None
    force: bool


class SearchCandidate(NamedTuple):
    """A candidate's numbers; empty if not asked for, or if it can't be predicted (`error`).

    Attributes:
        model: the choice as text, or the model's name.
        latency_low_ms, latency_high_ms: the 90 % interval; energies have one too.
        peak_memory_mib: also empty where the other limits alone exclude the candidate.
        chance: the probability of keeping to all limits, 0 to 1. Those of latency and energy are multiplied, which is cautious
            since they are correlated; memory has no interval, so the predicted value counts.
        score: larger is better.
        number: its index in the space, from 0; names may be repeated.
    """

    model: str
    latency_ms: float | None = None
    latency_low_ms: float | None = None
    latency_high_ms: float | None = None
    rough_estimate: bool | None = None
    energy_j: float | None = None
    energy_low_j: float | None = None
    energy_high_j: float | None = None
    peak_memory_mib: float | None = None
    gflop: float | None = None
    weights_mib: float | None = None
    score: float | None = None
    chance: float | None = None
    error: str | None = None
    number: int = 0


class Evaluator:
    """Evaluates batches of choices for one question, and caches kernels between batches."""

    def __init__(self, question: SearchQuestion) -> None:
        self._question = question
        self._space = space_of(question.space, Workspace(question.workspace), question.most, question.seed)
        self._score_by = question.score or (FLOPS if self._space.score is None else OWN)
        if question.score == OWN and self._space.score is None:
            raise UserError(f"{question.space}: has no score of its own (a Python file defines it as score(choice)); choose "
                            "--score flops or --score weights, or give a table (.csv)")
        self._scores = read_scores(Path(self._score_by)) if self._score_by.endswith(TABLE_SUFFIX) else {}
        self._predictor = Predictor(question.workspace, question.target, force=question.force, any_device=True)
        self._brief = self._predictor.brief(energy=question.energy or question.limits.energy_j is not None,
                                            host_pace=question.host_pace)
        self._with_memory = self._predictor.brief(memory=True, host_pace=question.host_pace)

    @property
    def notices(self) -> tuple[str, ...]:
        """Warnings that concern all candidates."""
        return (*self._predictor.fitted.notices, *(host_warning(HOSTS) if self._pace == UNKNOWN else ()))

    @property
    def portable_question(self) -> SearchQuestion:
        """The question for another machine, with target and pace fixed, since that machine would find others."""
        given, chosen = self._question.target, self._predictor.fitted.target.name
        return self._question._replace(target=given if given and FROM_SHEET in given else chosen, host_pace=self._pace)

    @property
    def predictor_files(self) -> dict[str, bytes]:
        """The predictors' files by their paths in the workspace, without those shipped with Hase."""
        root = self._question.workspace
        folders = self._predictor.fitted.predictors.folder, Workspace(root).data_sheets
        return {str(path.relative_to(root)): path.read_bytes() for folder in folders if not folder.is_relative_to(SHIPPED)
                for path in sorted(folder.glob("**/*")) if path.is_file()}

    @property
    def _pace(self) -> HostPace | None:
        fitted = self._predictor.fitted
        return pace_of(self._question.host_pace, fitted, fitted.composition, AS_USUAL, self._predictor.workspace)

    def __call__(self, choices: Sequence[Choice]) -> list[SearchCandidate]:
        """The candidates of choices, in order. One that can't be predicted has an error."""
        try:
            return self._candidates(choices)
        except UserError as error:
            if len(choices) == 1:
                return [SearchCandidate(choice_name(choices[0]), error=str(error))]
            return [candidate for choice in choices for candidate in self([choice])]

    def _candidates(self, choices: Sequence[Choice]) -> list[SearchCandidate]:
        models = [self._model(choice) for choice in choices]
        records = [self._predictor.record(model) for model in models]
        sources = [model if record.guessed else record for model, record in zip(models, records, strict=True)]
        candidates = [self._candidate(*one) for one in zip(choices, records, self._brief(sources), strict=True)]
        limits = self._question.limits
        if limits.memory_mib is None:
            return candidates
        left = [index for index, candidate in enumerate(candidates) if (candidate.chance or 0.0) >= limits.least_chance]
        for index, answer in zip(left, self._with_memory([sources[index] for index in left]), strict=True):
            peak_mib = answer.peak_memory_mib or 0.0
            fits = peak_mib <= limits.memory_mib and answer.fits_memory is not False
            candidates[index] = candidates[index]._replace(
                peak_memory_mib=peak_mib, chance=candidates[index].chance if fits else 0.0)
        return candidates

    def _model(self, choice: Choice) -> Source:
        try:
            return self._space.make(choice, self._predictor.fitted.target.flavour)
        except UserError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise user_code_error(choice_name(choice), "make", error) from error

    def _candidate(self, choice: Choice, record: ModelRecord, answer: BriefPrediction) -> SearchCandidate:
        limits, energy, chance = self._question.limits, answer.energy, 1.0
        if limits.latency_ms is not None:
            chance *= chance_within(answer.latency_ms, answer.interval_ms, limits.latency_ms)
        if limits.energy_j is not None and energy is not None:
            chance *= chance_within(energy.energy_j, energy.interval_j, limits.energy_j)
        gflop = sum(record.kernel_of(node).flops * node.runs for node in record.nodes) / 1e9
        weights_mib = record.weight_bytes / MIB
        name = record.model if is_model_choice(choice) else choice_name(choice)
        candidate = SearchCandidate(name, answer.latency_ms, *answer.interval_ms, answer.rough_estimate, gflop=gflop,
                                    weights_mib=weights_mib, score=self._score(choice, name, gflop, weights_mib), chance=chance)
        if energy is None:
            return candidate
        low_j, high_j = energy.interval_j
        return candidate._replace(energy_j=energy.energy_j, energy_low_j=low_j, energy_high_j=high_j)

    def _score(self, choice: Choice, name: str, gflop: float, weights_mib: float) -> float:
        if self._score_by in (FLOPS, WEIGHTS):
            return gflop if self._score_by == FLOPS else weights_mib
        if self._score_by != OWN or self._space.score is None:
            return table_score(self._scores, name, Path(self._score_by).name)
        try:
            score = self._space.score(choice)
        except Exception as error:  # the user's code may raise anything
            raise user_code_error(name, "score", error) from error
        return checked_score(score, name)


def is_model_choice(choice: Choice) -> bool:
    """Whether a choice is a model in memory or a record: it has a name, but no short text that tells it from others."""
    return isinstance(choice, (onnx.ModelProto, ModelRecord))


def choice_name(choice: Choice) -> str:
    """The text of a choice, or the name of a model in memory."""
    if isinstance(choice, ModelRecord):
        return choice.model
    return choice.graph.name if isinstance(choice, onnx.ModelProto) else str(choice)


@lru_cache(1)
def evaluator_for(question: SearchQuestion) -> Evaluator:
    """The evaluator of a question in this process; the latest is kept."""
    return Evaluator(question)


def evaluate_choices(question: SearchQuestion, choices: Sequence[Choice]) -> list[SearchCandidate]:
    """The candidates of choices; a function that can be sent to another process."""
    return evaluator_for(question)(choices)


def read_scores(path: Path) -> Mapping[str, float]:
    """The scores in a table, by the candidate's name. Rows without a score are left out."""
    scores: dict[str, float] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            table = csv.DictReader(lines)
            if missing := [column for column in (NAME, SCORE) if column not in (table.fieldnames or ())]:
                raise UserError(f"{path}: has no column {' and no column '.join(missing)}; a table of scores has a row per "
                                f"candidate, with the columns {NAME} and {SCORE}")
            for row in table:
                if row[SCORE]:
                    score = checked_score(row[SCORE], f"{path}, line {table.line_num}")
                    if scores.setdefault(row[NAME], score) != score:
                        raise UserError(f"{path}, line {table.line_num}: {row[NAME]} has another score above")
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: no table of scores: {error}") from None
    return scores


def table_score(scores: Mapping[str, float], name: str, table: str) -> float:
    """A candidate's score in a table, by its name or its file's name; `table` is the table's name for errors."""
    for known_as in (name, Path(name).name):
        if known_as in scores:
            return scores[known_as]
    raise UserError(f"{name}: has no score in {table}; add a row for it")


def checked_score(score: object, what: str) -> float:
    """A score as a finite number; a `UserError` if it is none."""
    try:
        number = float(score)  # type: ignore[arg-type]  # the user's function may return anything
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{what}: the score {score!r} is no finite number")
    return number
