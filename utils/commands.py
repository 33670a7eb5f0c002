"""The commands of `hase`, the script that each one runs, and how a command is typed where Hase is a package.

Texts name scripts as one types them in a clone: `python inference/predict_model_latency.py --model a.onnx`. Whoever typed
`hase predict` reads `hase predict --model a.onnx` instead.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from hase.utils.paths import ROOT

_SCRIPT = re.compile(r"\b(?:python )?((?:\w+/)*\w+)\.py\b")
_EXTRA = re.compile(r"pip install '\.\[(\w+)\]'")


@dataclass(frozen=True)
class Command:
    """A command of `hase`: the script that it runs, and what it answers or does."""

    script: str
    purpose: str


COMMANDS = {
    "predict": Command("inference/predict_model_latency", "the latency of models on a device"),
    "compare": Command("inference/compare_models", "why one model takes longer than another"),
    "gate": Command("inference/gate", "whether a change made a model slower, for CI"),
    "devices": Command("inference/compare_devices", "one model on several devices"),
    "llm": Command("inference/predict_llm", "first and further tokens of a language model"),
    "sharing": Command("inference/sharing_advice", "how several models best share one GPU"),
    "search": Command("inference/search_models", "the best of thousands of models"),
    "measure": Command("recipes/this_device/measure_this_device", "this machine, in minutes, so that it can be predicted"),
    "collect": Command("benchmark/collector", "measures kernels and models on this machine, as a config says"),
    "train": Command("training/train_kernel_model", "learns from measurements"),
    "evaluate": Command("evaluator", "predicted against measured latencies"),
    "export": Command("model_zoo/torchvision_exporter", "torchvision's models as ONNX files"),
    "doctor": Command("inference/doctor", "what this machine is, what is missing, and what to do"),
}
_NAMES = {command.script: name for name, command in COMMANDS.items()}
_typed = ""  # the command of `hase` that this process runs; "" for a script of a clone


def run_as(name: str) -> None:
    """From now on, texts name commands as one types them where Hase is installed; this process runs `hase NAME`."""
    global _typed
    _typed = name


def as_typed(text: str) -> str:
    """A text with its commands as the user types them."""
    if not _typed:
        return text
    return _EXTRA.sub(r"pip install 'hase[\1]'", _SCRIPT.sub(lambda found: _installed(found[0], found[1]), text))


def _installed(text: str, script: str) -> str:
    """`hase predict` for `python inference/predict_model_latency.py`; a script without such a name is run as a module."""
    if not ("/" in script or text.startswith("python")) or not (ROOT / f"{script}.py").is_file():
        return text
    return f"hase {_NAMES[script]}" if script in _NAMES else f"python -m hase.{script.replace('/', '.')}"


def command_name() -> str:
    """The name of the command that this process runs, as a command of `hase` or as its script in a clone; "" for others."""
    script = Path(sys.argv[0]).resolve().with_suffix("")
    return _typed or (_NAMES.get(script.relative_to(ROOT).as_posix(), "") if script.is_relative_to(ROOT) else "")


def program() -> str:
    """This process's command without its arguments: `hase predict`, or `predict_model_latency.py` in a clone."""
    return f"hase {_typed}" if _typed else Path(sys.argv[0]).name


def command_line() -> str:
    """This process's command as the user typed it, in a clone from the repository's root."""
    if _typed:
        return shlex.join(["hase", _typed, *sys.argv[1:]])
    script = Path(sys.argv[0]).resolve()
    return shlex.join(["python", str(script.relative_to(ROOT) if script.is_relative_to(ROOT) else script), *sys.argv[1:]])
