"""Several Ray nodes on this machine, each in place of a machine of its own, for tests and the campaign of kills.

Two nodes of one machine measure the same CPU, and Hase would refuse that: each node has a folder of its own for the locks of
devices.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from hase.utils.lazy import ray
from hase.utils.locks import FOLDER_VARIABLE

STORE_BYTES = 80 << 20  # of each node's object store
ACTOR = "ray::RemoteMeasurer"  # how the command line of an actor's process begins
WORKER = "hase.benchmark.ort.worker"  # stands in that of a process in which it measures
ENDS_WITHIN_S = 10.0  # the processes of a node that was killed


class NodesHere:
    """A Ray cluster on this machine. Its head runs nothing; `add` adds the nodes that measure. `folder`: for their locks."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.folder = folder
        self._cluster: Any = ray.cluster_utils.Cluster(initialize_head=True, head_node_args={
            "num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False})
        self.address: str = self._cluster.address
        self.nodes: list[Any] = []

    def add(self, cores: Sequence[int] = (), **environment: str) -> Any:
        """Adds a node, and returns it. With `cores`, all that runs there runs on these cores. `environment`: more variables."""
        place = self.folder / f"node{time.monotonic_ns()}"
        place.mkdir(parents=True)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores or before)  # the node's processes inherit it
        try:
            self.nodes.append(self._cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, include_dashboard=False,
                                                     env_vars={FOLDER_VARIABLE: str(place), "TMPDIR": str(self.folder),
                                                               **environment}))
        finally:
            os.sched_setaffinity(0, before)
        return self.nodes[-1]

    def processes(self, begins: str, contains: str = "") -> list[psutil.Process]:
        """The processes of the nodes whose command line begins so, and contains that."""
        found = []
        for node in self.nodes:
            with suppress(psutil.NoSuchProcess):
                for process in psutil.Process(raylet(node)).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        line = " ".join(process.cmdline())
                        if line.startswith(begins) and contains in line:
                            found.append(process)
        return found

    def kill(self, node: Any) -> None:
        """Ends a node without warning, and waits for the processes that ran on it."""
        below = psutil.Process(raylet(node)).children(recursive=True)
        self.nodes.remove(node)
        os.kill(raylet(node), signal.SIGKILL)
        _, alive = psutil.wait_procs(below, ENDS_WITHIN_S)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def shutdown(self) -> None:
        """Ends all nodes, and removes Ray's logs of them."""
        session = self._cluster.head_node.get_session_dir_path()
        self._cluster.shutdown()
        shutil.rmtree(session, ignore_errors=True)


def raylet(node: Any) -> int:
    """The number of the process that is the node."""
    return int(node.all_processes["raylet"][0].process.pid)


@contextmanager
def nodes_here(folder: Path, nodes: Sequence[Sequence[int]]) -> Iterator[NodesHere]:
    """A cluster with a node for each of `nodes`, its cores (none: all); it ends with the block."""
    cluster = NodesHere(folder)
    try:
        for cores in nodes:
            cluster.add(cores)
        yield cluster
    finally:
        cluster.shutdown()
