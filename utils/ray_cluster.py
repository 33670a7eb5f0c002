"""Connects to a Ray cluster as the driver of a job, and sends code of this repository to the nodes.

The packages that the code needs must be installed on the nodes.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from hase.utils.errors import UserError
from hase.utils.lazy import ray
from hase.utils.logger import get_logger
from hase.utils.paths import IN_CLONE, ROOT
from hase.utils.processes import SIGNALS

log = get_logger("ray")
AUTO = "auto"  # this machine's cluster; if there is none, one is started here
RAY = {"ray": "ray"}  # the package, and the extra that brings it
PACKAGE = ("hase/__init__.py", "pyproject.toml")  # with these, a node finds the package as in a clone
STORE_BYTES = 200 << 20  # object store of a cluster started here
CONNECT_S = 5.0
NO_CLUSTER = "no Ray cluster can be reached there; name HOST:PORT as `ray start --head` prints it"


@contextmanager
def connected(address: str, code: Collection[str], packages: Mapping[str, str] = RAY) -> Iterator[None]:
    """Makes this process the driver of a job on a cluster while the block runs.

    Args:
        address: HOST:PORT, or AUTO.
        code: files and folders of the repository to send to the nodes.
        packages: packages needed here and on the nodes, each with its requirements file.
    """
    check_packages(packages)
    _connect(address, code)
    try:
        yield
    finally:
        ray.shutdown()


def check_packages(packages: Mapping[str, str] = RAY) -> None:
    """Raises `UserError` if one of the packages is not installed."""
    for package, extra in packages.items():
        try:
            import_module(package)
        except ModuleNotFoundError:
            raise UserError(
                f"--ray needs the package {package}, here and on every node: pip install '.[{extra}]'") from None


def _connect(address: str, code: Collection[str]) -> None:
    """Connects to a cluster; with AUTO, starts one here if there is none. Signal handlers that Ray replaces are restored."""
    if "://" in address:
        raise UserError(f"--ray {address}: run this on a node of the cluster, with --ray auto or with HOST:PORT of the "
                        "cluster's head")
    if address != AUTO:
        _check_answers(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    sent = {*PACKAGE, *code, "hase"}
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if IN_CLONE:  # a package is installed on every node
        left_out = [f"/{name}" for path in (*ROOT.iterdir(), *(ROOT / "hase").iterdir())
                    if (name := path.relative_to(ROOT).as_posix()) not in sent]
        options["runtime_env"] = {"working_dir": str(ROOT), "excludes": left_out}
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        try:
            ray.init(address=address, **options)
        except ConnectionError:
            if address != AUTO:
                raise
            log.info("no Ray cluster is running here: one is started on this machine, until this command ends")
            ray.init(include_dashboard=False, object_store_memory=STORE_BYTES, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"--ray {address}: {NO_CLUSTER} ({next(iter(str(error).splitlines()), '')})") from None
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:  # Ray has replaced it
                signal.signal(number, handler)


def _check_answers(address: str) -> None:
    """Checks that something listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise UserError(f"--ray {address}: {NO_CLUSTER} ({error})") from None
