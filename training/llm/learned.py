"""What onnxruntime-genai's loop takes for each token beyond the model's own run: choosing a token, copies of logits and tokens,
bookkeeping of the cache."""

from __future__ import annotations

from pathlib import Path

from training.composition.intervals import ErrorRange
from utils import files
from utils.frozen import Frozen

LOOP_VERSION = 1
FILE = "generation_loop.json"  # beside what else was learned of a target
FIT = "measure onnxruntime-genai on the target and learn from it"


class GenerationLoop(Frozen):
    """`generation_loop.json`: the loop's time for one token of every sequence in a batch, on a target's host and device:
    step_ms + sequence_ms · sequences + million_logits_ms · sequences · words ∕ 10⁶. None is negative.

    Attributes:
        target: its name.
        genai_version: of the onnxruntime-genai that was measured.
        step_ms: for each step, however many sequences there are.
        sequence_ms: for each sequence.
        million_logits_ms: for each million of logits from which a token is chosen.
        interval: of such times of models that were held out; None where too few were.
        models: those that were measured.
    """

    version: int = LOOP_VERSION
    target: str
    genai_version: str
    step_ms: float
    sequence_ms: float
    million_logits_ms: float
    interval: ErrorRange | None = None
    models: tuple[str, ...] = ()

    def token_ms(self, sequences: int, words: int) -> float:
        """The loop's time for one token of each of some sequences, which is one of `words`."""
        return self.step_ms + sequences * (self.sequence_ms + self.million_logits_ms * words / 1e6)


def loop_path(folder: Path) -> Path:
    return folder / FILE


def read_loop(folder: Path) -> GenerationLoop | None:
    """What was learned for the target whose predictors lie in `folder`; None where nothing was.

    Raises:
        UserError: the file can't be read.
    """
    path = loop_path(folder)
    return files.read_record(path, GenerationLoop, LOOP_VERSION, FIT) if path.is_file() else None
