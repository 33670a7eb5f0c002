"""Takes models apart under a runtime, several at a time, and writes their records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from records.kernel_record import ModelOrigin, ModelRecord
from runtimes import runtime_named
from utils.errors import UserError
from utils.paths import Workspace
from utils.processes import CRASHED, each_in_a_process

ModelAtSize = tuple[Path, dict[str, int]]  # a model's file, and the sizes of its dynamic dimensions
AS_THE_FILE_SAYS = ModelOrigin()


def analyze_all(workspace: Workspace, runtime: str, work: Sequence[ModelAtSize], device: str, jobs: int, static: bool = False,
                origin: ModelOrigin = AS_THE_FILE_SAYS) -> list[list[ModelRecord] | UserError]:
    """Writes the records of models, `jobs` at a time.

    Args:
        workspace: where to.
        runtime: its name.
        work: the models.
        device: `cpu` or `cuda`.
        jobs: processes at a time.
        static: whether sizes are fixed before the runtime optimises a model.
        origin: of all the models, where their user gives it.

    Returns:
        For each model its records, or its error, in the order of `work`. If one of several models crashes the runtime, only
        that one fails.
    """
    analyze = partial(_analyze_one, workspace, runtime, device, static, origin)
    if len(work) == 1:
        return [analyze(work[0])]
    return each_in_a_process(analyze, work, jobs, crashed, "analysing")


def _analyze_one(workspace: Workspace, runtime: str, device: str, static: bool, origin: ModelOrigin,
                 model: ModelAtSize) -> list[ModelRecord] | UserError:
    try:
        return runtime_named(runtime).write_records(workspace, model[0], device, model[1], static, origin)
    except UserError as error:
        return error


def crashed(model: ModelAtSize) -> UserError:
    """The error of a model that took its process down."""
    return UserError(f"{model[0]}: {CRASHED}")
