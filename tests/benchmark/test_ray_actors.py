"""The collector on a real Ray cluster: nodes on this machine, each pinned to a core; stand-ins for machines, and no GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import run_script
from conftest import build_workspace, small_model
from optional_packages import needs, without
from ray_nodes import ACTOR, NodesHere, nodes_here

from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.devices import FoundDevice, check_alike
from hase.benchmark.collecting.plans import find_work
from hase.benchmark.collecting.ray_actors import ray_devices
from hase.records.dataset_files import journal_path, kernel_table_path, model_table_path, read_journal, read_table
from hase.runtimes import local_target
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.files import TEMPORARY_PREFIX
from hase.utils.fingerprint import Target, machine
from hase.utils.paths import ROOT, Workspace

pytestmark = [pytest.mark.measuring, pytest.mark.slow, pytest.mark.nightly,
              pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="two cores")]

CONFIG = {"device": "cpu", "levels": [0.0], "window_s": 0.2, "attempts": 1, "patience_s": 0, "canary_drift": 100.0,
          "block_kernels": 2, "each_machine": False, "ties": 3,
          "kernel": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.005, "least_runs": 3, "most_runs": 5},
          "model": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.02, "least_runs": 4, "most_runs": 6}}
MODELS = {f"{name}_b1": small_model(channels=channels) for name, channels in (("anet", 8), ("bnet", 12), ("cnet", 16))}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodesHere]:
    """Two nodes, each pinned to a core; every test leaves two."""
    needs("ray", "ray")
    with nodes_here(tmp_path_factory.mktemp("nodes"), [(0,), (1,)]) as cluster:
        yield cluster


@pytest.fixture
def filled(workspace: Workspace) -> Workspace:
    build_workspace(workspace, MODELS)
    return workspace


def collect_on(cluster: NodesHere, workspace: Workspace, **changes: Any) -> dict[str, Any]:
    config = CollectorConfig.model_validate(CONFIG | changes)
    with ray_devices(cluster.address, config) as devices:
        return collect(workspace, config, devices=devices)


def pinned_target() -> Target:
    """What a node that is pinned to a core is: a target of one thread."""
    return local_target("cpu").model_copy(update={"threads": 1})


def second_block(journal: Path, running: Callable[[], bool] = lambda: True) -> None:
    """Returns once two blocks are measured."""
    until_s = time.monotonic() + 300
    while len(files.read_lines(journal)) < 2 and running() and time.monotonic() < until_s:
        time.sleep(0.02)


def times_measured(workspace: Workspace, target: str) -> Counter[tuple[str, str, str]]:
    return Counter((m.subject, m.id, m.label + m.context) for block in read_journal(workspace.dataset(target))
                   for m in block.measurements)


def test_two_actors_measure_everything_once_at_other_paths(cluster: NodesHere, filled: Workspace) -> None:
    """The files lie where the driver's do not. Nothing is left there."""
    done = collect_on(cluster, filled)
    assert done["target"] == pinned_target().name
    assert (done["left"], done["lost_actors"], done["failed"]) == (0, 0, [])
    assert set(times_measured(filled, done["target"]).values()) == {1}
    folder = filled.dataset(done["target"])
    table = read_table(kernel_table_path(folder))
    assert set(table["Kernel_ID"]) == {item.id for item in find_work(filled, local_target("cpu"), ()).kernels}
    assert (set(table["Status"]), (table["Latency_ms"] > 0).all()) == ({"ok"}, True)
    assert set(read_table(model_table_path(folder))["Model"]) == set(MODELS)
    assert done["measuring_s"] > 1.2 * done["took_s"], "hardly two blocks were measured at the same time"
    assert not list(cluster.folder.glob(f"{TEMPORARY_PREFIX}*"))


def test_a_node_that_is_lost_costs_only_its_blocks_in_flight(cluster: NodesHere, filled: Workspace,
                                                             caplog: pytest.LogCaptureFixture) -> None:
    def kill_a_node() -> None:
        second_block(journal_path(filled.dataset(pinned_target().name)))
        cluster.kill(cluster.nodes[0])

    killer = threading.Thread(target=kill_a_node)
    killer.start()
    done = collect_on(cluster, filled, block_kernels=1)
    killer.join()
    cluster.add((0,))
    assert (done["lost_actors"], done["left"], done["failed"]) == (1, 0, [])
    assert "is lost, and others measure what it had not finished" in caplog.text
    assert set(times_measured(filled, done["target"]).values()) == {1}


def test_a_killed_driver_is_resumed_and_leaves_no_actor(cluster: NodesHere, filled: Workspace) -> None:
    (filled.root / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    command = [sys.executable, "benchmark/collector.py", "--ray", cluster.address, "--workspace", str(filled.root), "--config",
               str(filled.root / "config.yaml")]
    journal = journal_path(filled.dataset(pinned_target().name))
    process = subprocess.Popen([*command, "--set", "block_kernels=1"], cwd=ROOT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    second_block(journal, lambda: process.poll() is None)
    process.kill()
    process.wait()
    kept = journal.read_bytes()
    until_s = time.monotonic() + 20
    while cluster.processes(ACTOR) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not cluster.processes(ACTOR)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert journal.read_bytes().startswith(kept)
    assert set(times_measured(filled, pinned_target().name).values()) == {1}


def test_errors_of_all_actors_are_one_line(cluster: NodesHere, filled: Workspace) -> None:
    command = ("benchmark/collector.py", "--ray", cluster.address, "--workspace", filled.root, "--quiet")
    done = run_script(*command, "--set", "metrics=[DCGM_FI_DEV_GPU_TEMP]", "--set", "levels=[0.0]")
    assert "metric DCGM_FI_DEV_GPU_TEMP: psutil can't read it here" in done.stderr.splitlines()[-1]
    done = run_script(*command, "--set", "device=cuda")
    assert done.stderr.splitlines() == ["error: the Ray cluster has no GPU to measure"]


@pytest.mark.parametrize(("address", "change", "message"), [
    ("127.0.0.1:1", "device=cpu", "--ray 127.0.0.1:1: no Ray cluster can be reached there; name HOST:PORT as"),
    ("ray://here:10001", "device=cpu", "run this on a node of the cluster, with --ray auto or"),
    ("auto", "runtime=openvino", "error: --ray measures ONNX Runtime alone, with metrics that each machine reads itself"),
    ("none", "", "error: --ray needs the package ray, here and on every node: pip install '.[ray]'\n")])
def test_what_is_refused_before_it_starts(tmp_path: Path, address: str, change: str, message: str) -> None:
    command = ("benchmark/collector.py", "--ray", address, "--workspace", str(tmp_path), "--set", change)
    if address == "none":
        done = subprocess.run([sys.executable, *command[:-2]], cwd=ROOT, env=without(["ray"], tmp_path / "none"),
                              capture_output=True, text=True)
    else:
        needs("ray", "ray")
        done = run_script(*command)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert message in done.stderr


def test_devices_of_two_targets_are_refused() -> None:
    here = FoundDevice("here", local_target("cpu"), machine("cpu"), ("a", "b"), False)
    elsewhere = Target(device_name="other", flavour=here.target.flavour, threads=4)
    other = FoundDevice("there", elsewhere, here.machine, here.metrics, False)
    with pytest.raises(UserError, match=r"the devices are of 2 targets, .* \(here\); other-4t-.* \(there\)"):
        check_alike([here, other])
