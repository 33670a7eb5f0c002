"""What a search asks of each candidate: its numbers, and how likely it keeps to the limits; in one process or in many."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from hase.inference.core.brief import BriefPrediction
from hase.inference.core.chances import chance_within
from hase.inference.core.conditions import pace_of
from hase.inference.core.host_pace import UNKNOWN, HostPace
from hase.inference.core.predictor import Predictor
from hase.inference.core.run_modes import AS_USUAL
from hase.inference.core.sources import Source
from hase.inference.core.uncertainty import HOSTS, host_warning
from hase.inference.search.scores import FLOPS, OWN, TABLE, WEIGHTS, checked, read_scores, score_in
from hase.inference.search.spaces import Choice, failed, space_of
from hase.records.kernel_record import ModelRecord
from hase.utils.errors import UserError
from hase.utils.fingerprint import FROM_SHEET
from hase.utils.lazy import onnx
from hase.utils.paths import SHIPPED, Workspace

MIB = 2**20


class Limits(NamedTuple):
    """What a candidate has to keep to; None where there is no limit.

    Attributes:
        least_chance: how likely it has to be that it does, 0 to 1. At 0.5 the predicted numbers themselves keep to the limits.
    """

    latency_ms: float | None = None
    memory_mib: float | None = None
    energy_j: float | None = None
    least_chance: float = 0.5


class Question(NamedTuple):
    """What a search asks; another process can answer it, too.

    Attributes:
        workspace: the folder with the predictors.
        target: whose latency.
        space, most, seed: as for `space_of` (`most`: its `count`).
        limits: what candidates have to keep to.
        energy: whether energies are wanted, even without a limit.
        score: what makes a candidate good: the space's own score, its operations, its weights (inference/search/scores.py), or
            the path of a table of scores; None: its own, else its operations.
        host_pace: of the target's host; None where nothing was said of it.
        force: predict although the target is of another version (with a warning).
    """

    workspace: Path
    target: str | None
    space: str
    most: int | None
    seed: int
    limits: Limits
    energy: bool
    score: str | None
    host_pace: float | HostPace | None
    force: bool


class Candidate(NamedTuple):
    """A candidate's numbers, which are empty where they were not asked for, or where it can't be predicted (`error`).

    Attributes:
        model: the choice as text, or the model's name.
        latency_low_ms, latency_high_ms: the 90 % interval; so with energies.
        rough_estimate: whether the latency is a rough estimate.
        peak_memory_mib: empty, too, where the other limits alone rule the candidate out.
        chance: how likely it keeps to all limits, 0 to 1. The chances of latency and energy are multiplied, which is cautious
            since the two go together; the memory has no interval, so it counts as it is predicted.
        score: the larger the better.
        number: its place in the space, from 0 on; names may come twice.
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
    """Answers a question for batch after batch of choices; what it learns of kernels it keeps."""

    def __init__(self, question: Question) -> None:
        """Prepares.

        Raises:
            UserError: the space, its scores or the predictors can't be used, or nothing was learned of the target's energy.
        """
        self._question = question
        self._space = space_of(question.space, Workspace(question.workspace), question.most, question.seed)
        self._score_by = question.score or (FLOPS if self._space.score is None else OWN)
        if question.score == OWN and self._space.score is None:
            raise UserError(f"{question.space}: has no score of its own (a Python file defines it as score(choice)); choose "
                            "--score flops or --score weights, or give a table (.csv)")
        self._scores = read_scores(Path(self._score_by)) if self._score_by.endswith(TABLE) else {}
        self._predictor = Predictor(question.workspace, question.target, force=question.force, any_device=True)
        self._brief = self._predictor.brief(energy=question.energy or question.limits.energy_j is not None,
                                            host_pace=question.host_pace)
        self._with_memory = self._predictor.brief(memory=True, host_pace=question.host_pace)

    @property
    def notices(self) -> tuple[str, ...]:
        """What the reader should know about all candidates."""
        return (*self._predictor.fitted.notices, *(host_warning(HOSTS) if self._pace == UNKNOWN else ()))

    @property
    def elsewhere(self) -> Question:
        """The question for another machine, which would find another target or pace if these were not said."""
        asked, found = self._question.target, self._predictor.fitted.target.name
        return self._question._replace(target=asked if asked and FROM_SHEET in asked else found, host_pace=self._pace)

    @property
    def learned(self) -> dict[str, bytes]:
        """The files that it predicts from, by their paths in the workspace; without those that come with Hase."""
        root = self._question.workspace
        folders = self._predictor.fitted.predictors.folder, Workspace(root).data_sheets
        return {str(path.relative_to(root)): path.read_bytes() for folder in folders if not folder.is_relative_to(SHIPPED)
                for path in sorted(folder.glob("**/*")) if path.is_file()}

    @property
    def _pace(self) -> HostPace | None:
        fitted = self._predictor.fitted
        return pace_of(self._question.host_pace, fitted, fitted.composition, AS_USUAL, self._predictor.workspace)

    def __call__(self, choices: Sequence[Choice]) -> list[Candidate]:
        """The candidates that choices stand for, in their order. One that can't be predicted has an error."""
        try:
            return self._candidates(choices)
        except UserError as error:
            if len(choices) == 1:
                return [Candidate(named(choices[0]), error=str(error))]
            return [candidate for choice in choices for candidate in self([choice])]

    def _candidates(self, choices: Sequence[Choice]) -> list[Candidate]:
        made = [self._made(choice) for choice in choices]
        records = [self._predictor.record(source) for source in made]
        sources = [source if record.guessed else record for source, record in zip(made, records, strict=True)]
        found = [self._candidate(*one) for one in zip(choices, records, self._brief(sources), strict=True)]
        limits = self._question.limits
        if limits.memory_mib is None:
            return found
        left = [place for place, candidate in enumerate(found) if (candidate.chance or 0.0) >= limits.least_chance]
        for place, answer in zip(left, self._with_memory([sources[place] for place in left]), strict=True):
            peak_mib = answer.peak_memory_mib or 0.0
            fits = peak_mib <= limits.memory_mib and answer.fits_memory is not False
            found[place] = found[place]._replace(peak_memory_mib=peak_mib, chance=found[place].chance if fits else 0.0)
        return found

    def _made(self, choice: Choice) -> Source:
        try:
            return self._space.make(choice, self._predictor.fitted.target.flavour)
        except UserError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise failed(named(choice), "make", error) from error

    def _candidate(self, choice: Choice, record: ModelRecord, answer: BriefPrediction) -> Candidate:
        limits, energy = self._question.limits, answer.energy
        chance = 1.0
        if limits.latency_ms is not None:
            chance *= chance_within(answer.latency_ms, answer.interval_ms, limits.latency_ms)
        if limits.energy_j is not None and energy is not None:
            chance *= chance_within(energy.energy_j, energy.interval_j, limits.energy_j)
        kernels = record.kernels
        gflop = sum(kernels[node.kernel_id].flops * node.runs for node in record.nodes) / 1e9
        weights_mib = record.weight_bytes / MIB
        name = record.model if is_model(choice) else named(choice)
        found = Candidate(name, answer.latency_ms, *answer.interval_ms, answer.rough_estimate, gflop=gflop,
                          weights_mib=weights_mib, score=self._score(choice, name, gflop, weights_mib), chance=chance)
        if energy is None:
            return found
        return found._replace(energy_j=energy.energy_j, energy_low_j=energy.interval_j[0], energy_high_j=energy.interval_j[1])

    def _score(self, choice: Choice, name: str, gflop: float, weights_mib: float) -> float:
        if self._score_by in (FLOPS, WEIGHTS):
            return gflop if self._score_by == FLOPS else weights_mib
        if self._score_by != OWN or self._space.score is None:
            return score_in(self._scores, name, Path(self._score_by).name)
        try:
            score = self._space.score(choice)
        except Exception as error:  # the user's code may raise anything
            raise failed(name, "score", error) from error
        return checked(score, name)


def is_model(choice: Choice) -> bool:
    """Whether a choice is a model in memory or a record, which has a name, but no short text."""
    return isinstance(choice, (onnx.ModelProto, ModelRecord))


def named(choice: Choice) -> str:
    """A choice as text, which tells it from others, or the name of a model in memory."""
    if isinstance(choice, ModelRecord):
        return choice.model
    return choice.graph.name if isinstance(choice, onnx.ModelProto) else str(choice)


@lru_cache(1)
def evaluator(question: Question) -> Evaluator:
    """What answers a question in this process.

    Raises:
        UserError: the space, its scores or the predictors can't be used, or nothing was learned of the target's energy.
    """
    return Evaluator(question)


def evaluated(question: Question, choices: Sequence[Choice]) -> list[Candidate]:
    """The candidates that choices stand for, in any process."""
    return evaluator(question)(choices)
