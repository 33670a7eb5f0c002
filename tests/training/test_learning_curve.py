"""The learning curve: a made-up dataset replayed as if only some of its kernels had been measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import printed, run_script
from made_up_dataset import TARGET, conv, write_workspace

from hase.learned.kernels.settings import ForestSettings, TrainingConfig, XgboostSettings
from hase.training.kernels.replay import ORDERS, Replay, grow, in_single_precision, left_out_log_errors, read_replay
from hase.training.kernels.training_set import read_training_set
from hase.utils.paths import Workspace

QUICK = TrainingConfig(folds=3, threads=1, xgboost=XgboostSettings(trees=60, learning_rate=0.1, bins=64),
                       forest=ForestSettings(trees=3))
SETTINGS = "folds: 3\nthreads: 1\nxgboost: {trees: 60, learning_rate: 0.1}\n"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("curve"))
    write_workspace(workspace, sampled=150)
    (workspace.root / "training.yaml").write_text(SETTINGS, encoding="utf-8")
    return workspace


@pytest.fixture(scope="module")
def replay(workspace: Workspace) -> Replay:
    return read_replay(workspace, TARGET.name, read_training_set(workspace, TARGET.name), "run").held_out(3)


def curve(workspace: Workspace, *options: str) -> list[dict[str, float]]:
    output = printed("training/learning_curve.py", "--workspace", str(workspace.root), "--config",
                     str(workspace.root / "training.yaml"), "--json", *options)
    table: list[dict[str, float]] = json.loads(output)[TARGET.name]
    return table


def test_held_out_families_are_not_learned_from(replay: Replay) -> None:
    assert len(replay.folds) == 3
    assert len(set(replay.rows.ids)) == len(replay.rows)
    tested = np.zeros(len(replay.rows), dtype=int)
    for fold in replay.folds:
        assert not (fold.pool & fold.tested).any()
        out = set().union(*(groups for groups, is_tested in zip(replay.rows.groups, fold.tested, strict=True) if is_tested))
        assert not any(groups & out for groups, in_pool in zip(replay.rows.groups, fold.pool, strict=True) if in_pool)
        assert replay.of_models[fold.tested].all()
        tested += fold.tested
    assert tested.max() == 1


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_larger_sets_include_the_smaller_ones(replay: Replay, order: str) -> None:
    fold = replay.folds[1]
    grown = grow(replay, fold, [20, 60, 100], order, QUICK, 1)  # type: ignore[arg-type]
    assert [len(set(rows.tolist())) for rows in grown] == [20, 60, 100]
    assert set(grown[0]) < set(grown[1]) < set(grown[2])
    assert fold.pool[grown[2]].all()
    grown_again = grow(replay, fold, [20, 60, 100], order, QUICK, 1)  # type: ignore[arg-type]
    assert [rows.tolist() for rows in grown_again] == [rows.tolist() for rows in grown]


def test_errors_are_of_held_out_kernels(replay: Replay) -> None:
    pool_rows = np.flatnonzero(replay.folds[1].pool)[:90]
    errors = left_out_log_errors(replay, pool_rows, QUICK)
    assert 0.02 < np.abs(errors).mean() < 0.1, "in sample it would be less than the noise of 0.03"


def test_the_curve_falls(workspace: Workspace) -> None:
    table = curve(workspace, "--sizes", "10,55,100000", "--order", "random", "--order", "useful", "--repeats", "2")
    assert [(row["kernels"], row["order"], row["start_from"]) for row in table] == [
        (10, "random", "nothing"), (10, "useful", "nothing"), (55, "random", "nothing"), (55, "useful", "nothing")]
    for smaller, larger in zip(table[:2], table[2:], strict=True):
        assert larger["MAPE_%"] < smaller["MAPE_%"]
        assert larger["tested"] == smaller["tested"] > 10


def test_training_may_start_from_another_target(workspace: Workspace) -> None:
    """The other device is unlike this one, so the error only has to differ."""
    table = curve(workspace, "--sizes", "50", "--order", "useful", "--start-from", "nvidia-h200-cuda-ort1.31-all")
    assert [row["start_from"] for row in table] == ["nothing", "nvidia-h200-cuda-ort1.31-all"]
    assert table[0]["MAPE_%"] != table[1]["MAPE_%"]


def test_a_kernel_in_single_precision() -> None:
    float32 = conv(channels=40)
    float16 = float32.model_copy(update={
        "inputs": tuple(tensor.model_copy(update={"dtype": "float16"}) for tensor in float32.inputs),
        "outputs": tuple(tensor.model_copy(update={"dtype": "float16"}) for tensor in float32.outputs)})
    assert in_single_precision(float16) == float32
    assert in_single_precision(float32) == float32


def test_what_can_not_be_replayed(workspace: Workspace, tmp_path: Path) -> None:
    config = ("--workspace", str(workspace.root), "--config", str(workspace.root / "training.yaml"))
    refused = run_script("training/learning_curve.py", *config, "--half-from-single")
    assert (refused.returncode, "needs kernels of at least two families of models, in half precision" in refused.stderr) == (
        1, True)
    refused = run_script("training/learning_curve.py", *config, "--label", "gpu")
    assert (refused.returncode, "label gpu: not in the dataset" in refused.stderr) == (1, True)
