"""Replies about model files, kept in the user's cache (`hase.utils.cache_folder`), so that a file is taken apart once.

The key of a reply is what it depends on: the content of the file, sizes and times of the files with its weights, the question,
the versions of ONNX Runtime and ONNX, this machine's CPU and GPU, and Hase's own code that takes models apart.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from hase.ort_analysis.isolated.messages import Reply, Task
from hase.utils.cache_folder import cache_folder, code_of, key_of, read_entry, write_entry
from hase.utils.files import kept_sha256, signature
from hase.utils.fingerprint import DEFAULT_RUNTIME, gpu_facts, instruction_set, ort_version, package_version

KEPT = ("record", "sizes", "weights", "interface")  # what is asked again and again about a file


def is_known(model: Path) -> bool:
    """Whether an earlier command asked about this file, which was not changed since."""
    return (of_file := signature(model)) is not None and read_entry(_digest_key(of_file)) is not None


def reply_key(task: Task, weights: Sequence[Path]) -> str | None:
    """The key of a reply; None where none is kept.

    Args:
        task: the question.
        weights: the files of the model's weights.
    """
    if task.do not in KEPT or task.in_memory or task.runtime not in ("", DEFAULT_RUNTIME) or cache_folder() is None:
        return None
    model = task.folder / task.model
    if (digest := _digest(model)) is None:
        return None
    place = str(model) if task.do == "weights" else model.name  # the reply names files
    question = task.model_dump(mode="json", exclude={"folder", "model", "kept"})
    return key_of("reply", place, digest, sorted(question.items()),
                  [(path.name, *signed[1:2], *signed[3:4]) for path in weights if (signed := signature(task.folder / path))],
                  _circumstances())


def kept_reply(key: str | None, task: Task) -> Reply | None:
    """The reply that is kept under a key; None where there is none, or a file that it names is no longer there."""
    if key is None or (data := read_entry(key)) is None:
        return None
    try:
        reply = Reply.model_validate_json(data)
    except ValidationError:  # of a Hase whose records were others, though nothing else in the key
        return None
    return reply if all(_still_right(task.folder / path, task) for path in reply.files) else None


def _still_right(weights: Path, task: Task) -> bool:
    """Whether a file of weights is where it was found: in the folder of its model, or perhaps missing."""
    if not weights.exists():
        return task.no_weights
    model = task.folder / task.model
    return weights.is_file() and any(weights.resolve().is_relative_to(folder)
                                     for folder in (model.parent.resolve(), model.resolve().parent))


def keep_reply(key: str | None, reply: Reply) -> None:
    """Keeps a reply, unless it says that something failed."""
    if key is not None and reply.failure is None:
        write_entry(key, reply.model_dump_json().encode())


def _digest(model: Path) -> str | None:
    """The SHA-256 of a file, which is read only if it changed since the last command that asked; None if it can't be read."""
    before = signature(model)
    if before is None or not model.is_file():
        return None
    key = _digest_key(before)
    if kept := read_entry(key):
        return kept.decode("ascii", "replace")
    try:
        digest = kept_sha256(model)
    except OSError:
        return None
    if before == signature(model):
        write_entry(key, digest.encode())
    return digest


def _digest_key(of_file: Sequence[object]) -> str:
    return key_of("digest", *of_file)


@functools.cache
def _circumstances() -> tuple[object, ...]:
    """What replies depend on besides the model and the question."""
    return (ort_version(), package_version("onnx"), platform.python_version(), platform.platform(), instruction_set(),
            sorted(gpu_facts().items()), code_of("records", "runtimes", "utils"))
