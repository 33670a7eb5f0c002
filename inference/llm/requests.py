"""A request to a language model as runs of its files, and the time of its tokens between those that are predicted.

A request is one run of the prompt with an empty cache, and then one run for each further token. How long such a run takes
grows about linearly with the tokens in the cache, in pieces: kernels change their algorithm at some lengths, mostly powers of
two. So a token is predicted at the start, in the middle and at the end of the generation, and at the powers of two between; the
others are interpolated linearly and added up one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hase.inference.llm.language_model import LanguageModel
from hase.records.generations import Generation, GenerationMemory
from hase.utils.errors import UserError

Floats = npt.NDArray[np.float64]


class Request(NamedTuple):
    """Prompts for which tokens are generated together.

    Attributes:
        batch: number of prompts.
        prompt: tokens of the longest; shorter ones are padded to it.
        generate: tokens generated for each.
        max_length: tokens of prompt and answer for which the cache is made.
    """

    batch: int
    prompt: int
    generate: int
    max_length: int

    @property
    def further(self) -> range:
        """The tokens in the cache before each run after the prompt's."""
        return range(self.prompt, self.prompt + self.generate - 1)

    @property
    def middle(self) -> int:
        return self.further[len(self.further) // 2]

    @property
    def outline(self) -> list[int]:
        """The lengths at the start, in the middle and at the end; fewer where there are fewer tokens."""
        return sorted({self.further[0], self.middle, self.further[-1]}) if self.further else []

    @property
    def lengths(self) -> list[int]:
        """The lengths at which a token is predicted: the outline, and the powers of two between."""
        powers = (1 << power for power in range(self.prompt.bit_length(), self.prompt.bit_length() + 64))
        return sorted({*self.outline, *(power for power in powers if power in self.further)})


def request_of(model: LanguageModel, point: Generation | GenerationMemory, generate: int) -> Request:
    """The request of a measured point, for so many tokens."""
    return Request(point.batch * model.beams, point.prompt, generate, max(point.cache, point.prompt + generate))


def request_for(model: LanguageModel, batch: int, prompt: int, generate: int, max_length: int | None = None) -> Request:
    """A request, checked.

    Args:
        model: the language model.
        batch, prompt, generate: as in `Request`.
        max_length: tokens of prompt and answer for which the cache is made; None: what the model's config says, and where it
            says nothing as many as are needed.

    Raises:
        UserError: a number is below 1, or there are more tokens than max_length or the model allow.
    """
    for what, count in (("batch", batch), ("prompt", prompt), ("generate", generate), ("max_length", max_length)):
        if count is not None and (not isinstance(count, int) or count < 1):
            raise UserError(f"{what}={count!r}: a whole number, 1 or more, is expected")
    needed, most = prompt + generate, model.context_length
    tokens = f"{needed} tokens ({prompt} + {generate})"
    if most is not None and needed > most:
        raise UserError(f"{model.name}: {tokens} are more than its context, {most}")
    if most is not None and max_length is not None and max_length > most:
        raise UserError(f"{model.name}: a max_length of {max_length} tokens is more than its context, {most}")
    length = max_length or model.max_length or needed
    if needed > length:
        raise UserError(f"{model.name}: {tokens} are more than max_length, {length}, at which the generation ends; give a "
                        "larger one (--max-length)")
    return Request(batch, prompt, generate, length)


def over_generation(request: Request, lengths: Sequence[int], values: Sequence[float]) -> Floats:
    """A value for each token after the first, interpolated linearly.

    Args:
        request: the request.
        lengths: tokens in the cache where the value is known, in order; the first and the last of the generation among them.
        values: there.
    """
    return np.interp(np.asarray(request.further, dtype=float), lengths, values)
