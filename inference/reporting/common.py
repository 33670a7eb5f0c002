"""What pages of answers have in common: the device by its name, what its predictors rest on, and whom warnings concern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hase.inference.core.from_data_sheet import gpu_of_target

if TYPE_CHECKING:
    from hase.inference.core.answers import Prediction
    from hase.inference.core.targets import Fitted
    from hase.inference.llm.answers import LlmPrediction


def device_name(fitted: Fitted) -> str:
    """The device that a prediction is for, as people call it."""
    if card := gpu_of_target(fitted.target.name):
        return card.name
    machines = fitted.predictors.sidecar.machines
    return machines[-1].device_name if machines else fitted.target.name


def target_basis(fitted: Fitted) -> dict[str, str]:
    """What all answers for a target rest on."""
    machines = fitted.predictors.sidecar.machines
    versions = ", ".join(f"{name} {number}" for name, number in machines[-1].versions.items()) if machines else ""
    return {"target": fitted.target.name, "device": device_name(fitted),
            **({"measured with": f"{versions}, driver {machines[-1].driver}"} if versions else {})}


def about(warned: Mapping[str, Sequence[str]], asked: int) -> dict[str, Sequence[str]]:
    """The warnings of a page: whom each concerns; nobody in particular where it concerns all that were `asked` about.

    Args:
        warned: the names of those that each warning concerns.
        asked: how many there are.
    """
    return {text: () if len(names) == asked else names for text, names in warned.items()}


def pace_of(answer: Prediction | LlmPrediction) -> str:
    """The pace of the host that an answer is for, in words."""
    if answer.host_pace_source is None:
        return "does not matter"
    return "not known" if answer.host_pace is None else f"{answer.host_pace:.3g} ({answer.host_pace_source})"


def sentence(words: str) -> str:
    """Words as a sentence."""
    return f"{words[:1].upper()}{words[1:]}{'' if words.endswith('.') else '.'}"
