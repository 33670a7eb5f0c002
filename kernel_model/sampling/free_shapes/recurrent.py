"""Recurrent layers."""

from __future__ import annotations

from typing import Any

from kernel_model.sampling.free_shapes.sizes import ABSENT, Generator, channels, kernel, log_uniform, pick, tensor
from records.kernel_record import Kernel

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
HIDDEN = (16, 32, 48, 64, 96, 100, 128, 192, 256, 300, 384, 512, 640, 768, 1024, 1536)


def recurrent(dtype: str, batch: int, generator: Generator) -> Kernel:
    """A layer over a sequence of words, frames, or the rows of an image; in one direction or both."""
    op = str(generator.choice(list(GATES), p=[0.42, 0.33, 0.25]))
    steps, both = max(1, round(log_uniform(1, 512, generator))), generator.random() < 0.4
    rows = batch * (pick([14, 28, 56], generator) if generator.random() < 0.15 else 1)  # of an image, each a sequence
    hidden, ways = pick(HIDDEN, generator), 2 if both else 1
    wide = hidden * ways if generator.random() < 0.4 else channels(generator, 16, 1024)
    gates = GATES[op] * hidden
    state = tensor(dtype, ways, rows, hidden, constant=True)
    inputs = [tensor(dtype, steps, rows, wide), tensor(dtype, ways, gates, wide, constant=True),
              tensor(dtype, ways, gates, hidden, constant=True), tensor(dtype, ways, 2 * gates, constant=True)]
    if generator.random() < 0.8:
        inputs += [ABSENT, state, *([state] if op == "LSTM" else [])]
    last = (ways, rows, hidden)
    outputs = [(steps, ways, rows, hidden), last, *([last] if op == "LSTM" else [])]
    own: dict[str, dict[str, Any]] = {"LSTM": {"input_forget": 0}, "GRU": {"linear_before_reset": 1},
                                      "RNN": {"activations": ["Tanh"] * ways}}
    return kernel(op, inputs, outputs[:1] if generator.random() < 0.3 else outputs,
                  direction="bidirectional" if both else "forward", hidden_size=hidden, layout=0, **own[op])
