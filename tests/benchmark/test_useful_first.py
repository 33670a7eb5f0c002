"""A collector that may have to stop before it is done: models first, then the most useful kernels, and no block too late."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest import build_workspace, small_model
from fake_worker import replace_workers

from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.plans import Item, find_work, plan_by_usefulness
from hase.benchmark.measuring.blocks import PlannedBlock
from hase.benchmark.metrics.sources import CpuSource
from hase.kernel_model.building.kernel_models import write_kernel
from hase.kernel_model.sampling.draws import SEED_FILE, draw_kernel
from hase.kernel_model.sampling.usefulness import KernelError
from hase.records.dataset_files import read_journal
from hase.records.kernel_record import Kernel
from hase.records.kernel_record_files import index_path, read_index
from hase.runtimes import local_target
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import machine
from hase.utils.paths import Workspace

TARGET = local_target("cpu")
CONFIG = CollectorConfig.model_validate({
    "device": "cpu", "labels": ["kernel_time"], "levels": [0.0], "window_s": 0.03, "patience_s": 0, "attempts": 1,
    "block_kernels": 2, "canary_drift": 100.0})


def convolutions(kernels: Sequence[Kernel], count: int) -> list[Kernel]:
    """Further convolutions near those of the models."""
    generator, kernels_by_id = np.random.default_rng(0), dict[str, Kernel]()
    seed = next(kernel for kernel in kernels if kernel.op_type == "Conv")
    while len(kernels_by_id) < count:
        try:
            drawn = draw_kernel(seed, int(generator.choice([1, 2])), generator)
        except UserError:
            continue
        kernels_by_id[drawn.id] = drawn
    return list(kernels_by_id.values())


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, list[Kernel]]:
    """A workspace with two models and six sampled convolutions."""
    workspace = Workspace(tmp_path_factory.mktemp("sampled"))
    flavour = build_workspace(workspace, {"a_net": small_model(), "b_net": small_model(channels=16)})
    drawn = convolutions(read_index(index_path(workspace, flavour)).all_kernels(), 6)
    for kernel in drawn:
        write_kernel(kernel, workspace.kernel_onnx / flavour.name)
    files.write_json(workspace.kernel_onnx / flavour.name / SEED_FILE, {kernel.id: ["a"] for kernel in drawn})
    return workspace, drawn


def ids(planned: Sequence[PlannedBlock[Item]]) -> list[str]:
    return [item.id for block in planned for item in block.units]


def test_models_come_first_and_give_the_times_of_their_kernels(sampled: tuple[Workspace, list[Kernel]]) -> None:
    workspace, drawn = sampled
    work = find_work(workspace, TARGET, ())
    planned = ids(plan_by_usefulness(CONFIG, work, "cpu", ["here"], 0.0, []).own["here"])
    assert set(planned[:2]) == {"a_net", "b_net"}
    assert set(planned[2:]) == {kernel.id for kernel in drawn}
    without = CONFIG.model_copy(update={"model_labels": False})
    alone = ids(plan_by_usefulness(without, work, "cpu", ["here"], 0.0, []).own["here"])
    assert set(alone[-6:]) == {kernel.id for kernel in drawn}, "samples still come last"
    assert set(alone) == {*(item.id for item in work.kernels), *(item.id for item in work.models)}


def test_errors_of_the_last_training_change_the_order(sampled: tuple[Workspace, list[Kernel]]) -> None:
    workspace, drawn = sampled
    work = find_work(workspace, TARGET, ())

    def first(bad: Kernel) -> str:
        errors = [KernelError(kernel=kernel, families=(), measured_ms=1.0, predicted_ms=5.0 if kernel == bad else 1.0)
                  for kernel in drawn]
        return ids(plan_by_usefulness(CONFIG, work, "cpu", ["here"], 0.0, [], errors).own["here"])[2]

    assert len({first(kernel) for kernel in drawn}) > 1


@pytest.mark.slow
def test_a_collector_stops_in_time_and_the_next_one_goes_on(sampled: tuple[Workspace, list[Kernel]],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    replace_workers(monkeypatch)
    monkeypatch.setattr(CpuSource, "minimum_window_s", 0.03)
    workspace, drawn = sampled
    stopped = collect(workspace, CONFIG, minutes=1e-6)
    assert stopped["left"] == 8
    assert stopped["measured_kernels"] == 0
    done = collect(workspace, CONFIG, minutes=5.0)
    assert (done["left"], done["failed"]) == (0, [])
    blocks = read_journal(Path(done["dataset"]))
    assert [block.measurements[0].subject for block in blocks] == ["model", "model", "kernel", "kernel", "kernel"]
    rows = read_training_set(workspace, TARGET.name)
    of_models = {kernel.id for kernel in read_index(index_path(workspace, TARGET.flavour)).all_kernels() if kernel.moves_data}
    assert of_models | {kernel.id for kernel in drawn} <= set(rows.ids.tolist())
    uuid = machine("cpu").uuid
    assert not plan_by_usefulness(CONFIG, find_work(workspace, TARGET, ()), "cpu", [uuid], 0.0, blocks).count, "nothing is left"
