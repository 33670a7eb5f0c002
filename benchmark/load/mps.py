"""Shares this machine's GPU through NVIDIA's MPS while something is measured.

Under MPS, kernels of several processes run at the same time, and each process may be limited to a share of the GPU's threads. A
process becomes a client when it opens CUDA, so the daemon must start before the measuring processes, which find it by their
inherited environment. Sources: NVIDIA's guide to MPS; manual page of nvidia-cuda-mps-control.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hase.utils.errors import UserError
from hase.utils.files import temporary_folder
from hase.utils.fingerprint import VISIBLE_GPUS, gpu_facts
from hase.utils.logger import get_logger
from hase.utils.sharing_mode import ALL_THREADS, PIPE_DIRECTORY, SLICES, THREADS, GpuSharing, mps_daemon_answers

CONTROL = "nvidia-cuda-mps-control"
LOG_DIRECTORY = "CUDA_MPS_LOG_DIRECTORY"
STOP_S = 30.0

log = get_logger("mps")


@contextmanager
def gpu_shared(sharing: GpuSharing) -> Iterator[None]:
    """Shares the GPU among processes started in the block.

    Raises UserError if MPS does not start, or already runs although time slices are requested.
    """
    is_running = mps_daemon_answers()
    if not sharing.mps:
        if is_running:
            raise UserError(f"sharing {SLICES}: an MPS daemon runs, so processes would share the GPU through it; stop it "
                            f"(echo quit | {CONTROL}), or measure with sharing: mps")
        yield
    elif is_running:
        with _environment(_chosen_gpu() | {THREADS: str(sharing.percent)}):
            yield
    else:
        with (temporary_folder() as folder, _environment(_chosen_gpu() | {
                PIPE_DIRECTORY: str(folder), LOG_DIRECTORY: str(folder), THREADS: str(sharing.percent)}), _daemon()):
            yield


def _chosen_gpu() -> dict[str, str]:
    """VISIBLE_GPUS with the GPU's UUID, if the environment chooses the GPU by its index; else nothing. An MPS daemon counts
    only its own GPUs, so for its clients an index could mean another GPU or none."""
    chosen = os.environ.get(VISIBLE_GPUS, "")
    return {VISIBLE_GPUS: gpu_facts()["uuid"]} if chosen.split(",")[0].strip().isdecimal() and gpu_facts() else {}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables during the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _daemon() -> Iterator[None]:
    """Runs an MPS control daemon during the block, with its pipes where this process's environment says."""
    limit = {THREADS: str(ALL_THREADS)}  # no client may use more than the daemon's own environment says
    try:
        started = subprocess.run([CONTROL, "-d"], env=os.environ | limit, stdin=subprocess.DEVNULL, capture_output=True,
                                 text=True)
    except FileNotFoundError:
        raise UserError(f"sharing mps: {CONTROL} is not installed (NVIDIA's driver packages bring it); measure with sharing: "
                        f"{SLICES}") from None
    if started.returncode or not mps_daemon_answers():
        reason = (started.stderr or started.stdout).strip() or f"exit code {started.returncode}"
        raise UserError(f"sharing mps: the MPS daemon does not start: {reason}")
    try:
        yield
    finally:
        try:  # it waits for its clients, which have ended by now
            subprocess.run([CONTROL], input="quit\n", capture_output=True, text=True, timeout=STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("the MPS daemon has not ended within %g s; end it: echo quit | %s=%s %s", STOP_S, PIPE_DIRECTORY,
                        os.environ[PIPE_DIRECTORY], CONTROL)
