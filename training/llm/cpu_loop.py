"""Fits what onnxruntime-genai's loop takes on a CPU beside the runs of a model.

There, choosing a token reads all its logits, and a prompt's logits lie in memory that is new to the process, whose pages the
system must make first. Both take as long as some models do. The runs' times come from measured kernels, so what is left of a
step is the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hase.learned.composition.fitted import Mask
from hase.learned.composition.formulas import each_left_out
from hase.learned.llm import FittedStep, GenerationLoop, LearnedGeneration
from hase.records.generations import PHASES, Phase
from hase.utils.lazy import scipy
from hase.utils.timing import error_statistics

ODD = 0.1  # error from which a step counts as an outlier
DIGITS = 6  # of the fitted times, µs: what the search leaves of a time that is none becomes 0
FIRST_US = (5.0, 5.0, 50.0, 5.0, 20.0, 600.0, 800.0)  # where the search begins: a `GenerationLoop`, in microseconds


class LoopStep(NamedTuple):
    """A measured step of requests of one size, beside the time of its run.

    Attributes:
        model: the name of its folder.
        family: of the model; held out together.
        phase: which step.
        batch, prompt: sequences, and tokens of each prompt.
        words, layers: logits for each sequence, and layers with a cache.
        other_logits: as in `GenerationLoop.time_ms`.
        run_ms: the time of the model's run, from measured kernels.
        measured_ms: the median time of the whole step.
    """

    model: str
    family: str
    phase: Phase
    batch: int
    prompt: int
    words: int
    layers: int
    other_logits: int
    run_ms: float
    measured_ms: float

    def loop_ms(self, loop: GenerationLoop) -> float:
        return loop.time_ms(self.phase, self.batch, self.words, self.layers, other_logits=self.other_logits)


def fit_loop(steps: Sequence[LoopStep]) -> GenerationLoop:
    """The loop with which predicted steps are nearest to measured ones, by their ratios."""
    run_ms, measured_ms = (np.array([getattr(step, name) for step in steps]) for name in ("run_ms", "measured_ms"))

    def loop(values_us: Sequence[float]) -> GenerationLoop:
        return GenerationLoop(**{name: float(value) / 1e3
                                 for name, value in zip(GenerationLoop.model_fields, values_us, strict=True)})

    def errors(values_us: Sequence[float]) -> npt.NDArray[np.float64]:
        of_values = loop(values_us)
        return np.asarray(np.log((run_ms + np.array([step.loop_ms(of_values) for step in steps])) / measured_ms))

    found = scipy.optimize.least_squares(errors, FIRST_US, bounds=(0.0, np.inf), x_scale=FIRST_US, loss="soft_l1", f_scale=ODD)
    return loop(np.round(found.x, DIGITS))


def fit_on_cpu(target: str, steps: Sequence[LoopStep], genai_version: str, predictors_created: str) -> LearnedGeneration:
    """What generation takes on a CPU, with each family held out in turn for the errors.

    Args:
        target: its name.
        steps: of at least two families.
        genai_version: of the onnxruntime-genai that was measured.
        predictors_created: of the target.
    """
    def without(kept: Mask, held_out: Mask) -> list[float]:
        loop = fit_loop(list(compress(steps, kept)))
        return [step.run_ms + step.loop_ms(loop) for step in compress(steps, held_out)]

    predicted_ms = each_left_out([step.family for step in steps], without)
    errors = {}
    for phase in PHASES:
        places = [place for place, step in enumerate(steps) if step.phase == phase]
        errors[phase] = error_statistics(predicted_ms[places].tolist(), [steps[place].measured_ms for place in places])
    return LearnedGeneration(
        target=target, genai_version=genai_version, predictors_created=predictors_created, loop=fit_loop(steps),
        left_out=errors, steps=tuple(
            FittedStep(model=step.model, family=step.family, phase=step.phase, batch=step.batch, prompt=step.prompt, pace=1.0,
                       measured_ms=step.measured_ms, predicted_ms=predicted)
            for step, predicted in zip(steps, predicted_ms.tolist(), strict=True)))
