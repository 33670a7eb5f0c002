"""A connection to a Ray cluster: this process becomes the driver of a job, and code of this repository travels to the nodes.

The packages that the code needs are to be installed there.
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

from hase.utils.cli.running import SIGNALS
from hase.utils.errors import UserError
from hase.utils.lazy import ray
from hase.utils.logger import get_logger
from hase.utils.paths import ROOT

log = get_logger("ray")
AUTO = "auto"  # the address of the cluster that this machine belongs to; where there is none, one is started here
RAY = {"ray": "requirements-ray.txt"}  # the package, and the file that lists it
STORE_BYTES = 200 << 20  # of the object store of a cluster that is started here
CONNECT_S = 5.0
NO_CLUSTER = "no Ray cluster can be reached there; name HOST:PORT as `ray start --head` prints it"


@contextmanager
def connected(address: str, code: Collection[str], packages: Mapping[str, str] = RAY) -> Iterator[None]:
    """Makes this process the driver of a job on a cluster, until the block ends.

    Args:
        address: of the cluster, HOST:PORT, or AUTO.
        code: what travels to the nodes, by its name in the repository.
        packages: that are needed here and there, and the file with requirements that lists each.

    Raises:
        UserError: a package is missing, there is no such cluster, or it has other versions.
    """
    check_packages(packages)
    _connect(address, code)
    try:
        yield
    finally:
        ray.shutdown()


def check_packages(packages: Mapping[str, str] = RAY) -> None:
    """Checks that packages are installed.

    Raises:
        UserError: one is not.
    """
    for package, requirements in packages.items():
        try:
            import_module(package)
        except ModuleNotFoundError:
            raise UserError(
                f"--ray needs the package {package}, here and on every node: pip install -r {requirements}") from None


def _connect(address: str, code: Collection[str]) -> None:
    """Connects.

    Raises:
        UserError: there is no such cluster, or it has other versions.
    """
    if "://" in address:
        raise UserError(f"--ray {address}: run this on a node of the cluster, with --ray auto or with HOST:PORT of the "
                        "cluster's head")
    if address != AUTO:
        _check_answers(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    left_out = [f"/{path.name}" for path in ROOT.iterdir() if path.name not in code]
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR,
                               "runtime_env": {"working_dir": str(ROOT), "excludes": left_out}}
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
            if signal.getsignal(number) is not handler:  # Ray has put its own in place
                signal.signal(number, handler)


def _check_answers(address: str) -> None:
    """Checks that something listens at HOST:PORT; Ray itself would try for minutes.

    Raises:
        UserError: nothing does.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise UserError(f"--ray {address}: {NO_CLUSTER} ({error})") from None
