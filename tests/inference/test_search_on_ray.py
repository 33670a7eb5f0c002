"""Searches on a real Ray cluster, two nodes on this machine: the same table as without Ray, whatever happens to a node or the
command; errors of one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from command import run_script
from optional_packages import needs, without
from ray_nodes import NodesHere, nodes_here
from test_search import H200, MY_SPACE
from test_search import question as h200_question
from trained_workspace import conv_net

from hase.inference.search import ofa, on_ray, searching
from hase.inference.search.evaluating import Evaluator, SearchLimits, SearchQuestion
from hase.inference.search.searching import search
from hase.recipes.same_predictions.record import CPU_WORKSPACE
from hase.utils.errors import UserError
from hase.utils.files import unpack
from hase.utils.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.nightly,
              pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="two cores")]

SMALL = 8  # candidates of a batch
SPACE = MY_SPACE.replace("12", "40")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodesHere]:
    """Two nodes; every test leaves two."""
    needs("ray", "ray")
    needs("pyarrow", "search")
    with nodes_here(tmp_path_factory.mktemp("nodes"), [(0,), (1,)]) as cluster:
        yield cluster


@pytest.fixture
def small_batches() -> Iterator[None]:
    with mock.patch.object(searching, "BATCH", SMALL):
        yield


def question(space: str = "ofa", count: int | None = 60, **others: Any) -> SearchQuestion:
    return h200_question(space, count, limits=SearchLimits(latency_ms=1.3, energy_j=0.2), **others)


@pytest.mark.usefixtures("small_batches")
def test_the_table_is_the_one_without_ray(cluster: NodesHere, tmp_path: Path) -> None:
    """The node has neither the Python file nor the table of scores, of which some candidates have none."""
    space, scores = tmp_path / "mine.py", tmp_path / "scores.csv"
    space.write_text(SPACE)
    scores.write_text("model,score\n" + "".join(f"{name},{number}\n" for number, name in enumerate(ofa.choices(50))))
    for asked in (question(score=str(scores)), question(str(space), None)):
        alone, on_nodes = tmp_path / "alone.csv", tmp_path / "nodes.csv"
        assert search(asked, 5, on_nodes, ray_address=cluster.address) == search(asked, 5, alone)
        assert on_nodes.read_bytes() == alone.read_bytes()
    space.write_text(SPACE.replace("range(40)", "(number // (number < 20) for number in range(40))", 1))
    with pytest.raises(UserError, match="choices failed with ZeroDivisionError"):
        search(question(str(space), None), 5, ray_address=cluster.address)


@pytest.mark.usefixtures("small_batches")
def test_a_node_that_is_lost_costs_nothing(cluster: NodesHere, tmp_path: Path) -> None:
    asked, out, whole = question(count=600), tmp_path / "found.csv", tmp_path / "whole.csv"
    before = search(asked, 5, whole)
    killed = []

    def kill_a_node() -> None:
        part, until_s = tmp_path / "found.csv.part", time.monotonic() + 60
        while time.monotonic() < until_s and not (part.exists() and len(part.read_bytes().splitlines()) > 2):
            time.sleep(0.02)
        cluster.kill(cluster.nodes[0])
        killed.append(not out.exists())

    killer = threading.Thread(target=kill_a_node)
    killer.start()
    found = search(asked, 5, out, ray_address=cluster.address)
    killer.join()
    cluster.add((0,))
    assert killed == [True]
    assert found == before
    assert out.read_bytes() == whole.read_bytes()


def test_predictors_of_ones_own_travel(cluster: NodesHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a node without the workspace."""
    monkeypatch.chdir(ROOT)  # an actor enters the driver's folder; here, this process is the actor
    unpack(CPU_WORKSPACE, tmp_path / "workspace")
    models = [conv_net(tmp_path / "models" / f"{channels}.onnx", channels=channels) for channels in (8, 16)]
    asked = h200_question(str(tmp_path / "models"), None, workspace=tmp_path / "workspace", target="avx512", host_pace=None,
                          force=True)
    found = search(asked, 5, ray_address=cluster.address)
    assert found == search(asked, 5)
    assert (len(found.best), found.failed) == (2, 0)
    here = Evaluator(asked)
    question = here.portable_question._replace(workspace=Path("/nowhere"))
    work = on_ray.ClusterWork(question, 0, SMALL, tmp_path, here.predictor_files, {})
    assert on_ray._evaluator(work, tmp_path / "elsewhere")(models) == here(models)


def test_a_stopped_command_goes_on_where_it_was(cluster: NodesHere, tmp_path: Path) -> None:
    out, whole, part = (tmp_path / name for name in ("found.csv", "whole.csv", "found.csv.part"))
    alone = f"inference/search_models.py --space ofa --target {H200} --latency-ms 1.1 --host-pace 1 --count 6000".split()
    command = [*alone, "--out", str(out), "--ray", cluster.address]
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        while process.poll() is None and not (part.exists() and len(part.read_bytes().splitlines()) > 1):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, "Traceback" in errors, out.exists()) == (130, False, False)
    assert "what was searched (with --out) is kept: run again to go on" in errors
    assert "candidates were searched before; going on from there" in run_script(*command).stderr
    run_script(*alone, "--out", whole)
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("package", ["onnx", "pydantic"])
def test_a_node_without_a_package_is_one_line(cluster: NodesHere, tmp_path: Path, package: str) -> None:
    """One that is loaded at its first use, and one without which nothing of Hase can be imported."""
    node = cluster.add((0,), PYTHONPATH=without([package], tmp_path / "none")["PYTHONPATH"])
    try:
        done = run_script("inference/search_models.py", "--space", "ofa", "--target", H200, "--host-pace", "1", "--count",
                          "3000", "--ray", cluster.address, "--quiet")
    finally:
        cluster.kill(node)
    line = done.stderr.splitlines()[-1]
    assert (done.returncode, line.startswith("error: "), "Traceback" in done.stderr) == (1, True, False)
    assert line.endswith(f"No module named {package}; install the same packages on all machines of the cluster")


def test_errors_are_one_line(tmp_path: Path) -> None:
    needs("ray", "ray")
    command = ("inference/search_models.py", "--space", "ofa", "--target", H200, "--host-pace", "1", "--count", "3", "--ray")
    done = run_script(*command, "127.0.0.1:1")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith("error: --ray 127.0.0.1:1: no Ray cluster can be reached there; name HOST:PORT as")
    for package, extra in (("ray", "ray"), ("pyarrow", "search")):
        done = subprocess.run([sys.executable, *command, "auto"], cwd=ROOT, env=without([package], tmp_path / package),
                              capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (
            1, f"error: --ray needs the package {package}, here and on every node: pip install '.[{extra}]'\n")
