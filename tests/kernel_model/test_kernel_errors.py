"""Sampling near badly predicted kernels: known errors, how often each kernel is a seed, and the families of the seeds."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import build_workspace, small_model
from made_up_dataset import TARGET, conv, gemm, relu, tensor, write_workspace

from hase.kernel_model.kernel_sampler import FREE, NEAR_SPREAD, Drawn, near_batch, sample_near_errors
from hase.kernel_model.sampling.draws import read_seeds
from hase.kernel_model.sampling.usefulness import (
    MOST_LOG_ERROR,
    KernelError,
    KernelErrors,
    read_errors,
    seed_weights,
    write_errors,
)
from hase.learned.kernels.interface import ForestSettings, TrainingConfig, XgboostSettings
from hase.learned.kernels.measured import measured_times
from hase.ort_analysis.graph.source import built_kernel
from hase.records.dataset_files import read_kernels
from hase.records.kernel_record import Kernel
from hase.records.kernel_types import describe_kernel
from hase.training.kernels.label_training import train_label
from hase.training.kernels.training_set import read_training_set
from hase.training.train_kernel_model import kept_sidecar, save
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.paths import Workspace
from tests.kernel_model.test_sampler import run_sampler

QUICK = TrainingConfig(folds=3, threads=1, xgboost=XgboostSettings(trees=40, learning_rate=0.2), forest=ForestSettings(trees=3))


def unary(op_type: str) -> Kernel:
    """An activation of tokens: thousands of sizes are near."""
    shape = tensor(4, 800, 1600)
    return describe_kernel(op_type, "", 13, {}, [shape], [shape])


def erring(kernel: Kernel, log_error: float, *families: str, measured_ms: float = 1.0) -> KernelError:
    return KernelError(kernel=kernel, families=families, measured_ms=measured_ms,
                       predicted_ms=measured_ms * math.exp(log_error))


def errors_of(*kernels: KernelError, held_out: tuple[str, ...] = (), flavour: Flavour = TARGET.flavour) -> KernelErrors:
    return KernelErrors(target=TARGET.model_copy(update={"flavour": flavour}), label="run", held_out=held_out,
                        dataset_sha256="0" * 64, kernels=kernels)


def sampled_near(errors: KernelErrors, count: int, without: tuple[str, ...] = (), seed: int = 0) -> dict[str, Drawn]:
    return sample_near_errors(errors, count, np.random.default_rng(seed), [1, 2, 4, 8], 10.0, without=without)[0]


def test_weights_follow_the_error_and_the_time() -> None:
    usual = [erring(relu(), 0.1)] * 96
    weights = seed_weights([*usual, erring(gemm(), -0.2), erring(conv(), 0.1, measured_ms=0.5),
                            erring(conv(), 0.1, measured_ms=80.0), erring(conv(), 0.0)])
    assert weights * 101.5 == pytest.approx(np.array([1.0] * 96 + [4.0, 0.5, 1.0, 0.0]))  # the longest counts once
    capped = seed_weights([erring(relu(), MOST_LOG_ERROR), erring(gemm(), -3.0)])
    assert capped == pytest.approx([0.5, 0.5])
    assert seed_weights([erring(relu(), 0.0)]).tolist() == [0.0]
    assert not seed_weights([]).size


def test_kernels_seed_in_proportion_to_their_squared_errors() -> None:
    drawn = sampled_near(errors_of(erring(unary("Relu"), 0.1), erring(unary("Exp"), -0.2), erring(unary("Abs"), 0.0)), 300)
    counts = Counter(kernel.op_type for kernel, _ in drawn.values())
    assert counts == {"Relu": pytest.approx(60, abs=25), "Exp": pytest.approx(240, abs=25)}
    assert sampled_near(errors_of(erring(unary("Abs"), 0.0)), 5) == {}


@pytest.mark.slow
def test_sizes_are_near_the_erring_kernels() -> None:
    """A batch far from those asked for stays."""
    seed = conv(batch=4, channels=256, side=56, out=512)
    drawn = sampled_near(errors_of(erring(seed, 0.3, "anet")), 60)
    assert len(drawn) == 60
    assert seed.id not in drawn
    reach = 2.0**NEAR_SPREAD * 1.12  # sides are rounded to usual ones, channels to multiples of 8
    for kernel, _ in drawn.values():
        batch, channels, side, _ = kernel.inputs[0].shape
        assert batch in (2, 4, 8)
        for size, seed_size in ((channels, 256), (side, 56), (kernel.inputs[1].shape[0], 512)):
            assert 1 / reach <= size / seed_size <= reach
    assert near_batch(relu(batch=64), [1, 2, 4], np.random.default_rng(0)) == 64


def test_samples_keep_their_families_and_held_out_families_seed_nothing() -> None:
    errors = errors_of(erring(unary("Relu"), 0.3, "anet"), erring(unary("Tanh"), 0.3),
                       erring(unary("Exp"), 0.3, "anet", "bnet"), erring(unary("Neg"), 0.3, "secretnet"),
                       erring(unary("Erf"), 0.3, "opennet", "secretnet"), held_out=("secretnet",))

    def families(*without: str) -> set[tuple[str, tuple[str, ...]]]:
        return {(kernel.op_type, seeded_by) for kernel, seeded_by in sampled_near(errors, 120, without).values()}

    assert families() == {("Relu", ("anet",)), ("Tanh", FREE), ("Exp", ("anet", "bnet")), ("Erf", ("opennet",))}
    assert families("anet", "opennet") == {("Tanh", FREE), ("Exp", ("bnet",))}


def test_errors_are_read_as_written(tmp_path: Path) -> None:
    errors = errors_of(erring(conv(), 0.1, "anet"), erring(gemm(), -0.2), held_out=("bnet",))
    path = tmp_path / "errors.json"
    write_errors(path, errors)
    assert read_errors(path) == errors
    path.write_text(path.read_text().replace('"version":2', '"version":3'))
    with pytest.raises(UserError, match=r"version 3, .*train_kernel_model\.py --force"):
        read_errors(path)
    with pytest.raises(UserError, match=r"no such file.*train_kernel_model\.py --force"):
        read_errors(tmp_path / "none.json")


@pytest.mark.slow
def test_training_writes_the_errors_of_left_out_kernels(workspace: Workspace) -> None:
    """They are of label `gpu` where it was measured (here `run` under that name), are not shipped with predictors, and are made
    anew."""
    write_workspace(workspace, families=("anet", "bnet", "secretnet"), held_out=("secretnet",), sampled=120)
    rows = read_training_set(workspace, TARGET.name)
    trained = train_label(rows, "run", QUICK)
    path = workspace.kernel_errors(TARGET.name)
    save(workspace, rows, [trained], QUICK)
    written = read_errors(path)
    assert (written.label, written.held_out, written.target) == ("run", ("secretnet",), TARGET)
    assert {error.kernel.id for error in written.kernels} == set(rows.ids)
    assert {name for error in written.kernels for name in error.families} == {"anet", "bnet", "othernet"}
    of_others = {entry.kernel.id for entry in read_kernels(workspace.dataset(TARGET.name)) if "secretnet" in entry.groups}
    assert of_others - set(rows.ids)  # some were measured, but none of them is used
    measured = measured_times(workspace, TARGET.name)
    assert {error.kernel.id: error.measured_ms for error in written.kernels} == {
        name: pytest.approx(measured[name]["run"]) for name in set(rows.ids)}
    mape = float(np.mean([abs(math.exp(error.log_error) - 1) for error in written.kernels]))
    assert mape == pytest.approx(trained.errors[0].mape)  # cross-validated: the fit to all rows has smaller errors
    assert trained.errors[0].rows_of == "idle"
    save(workspace, rows, [trained, replace(trained, label="gpu")], QUICK)
    assert read_errors(path).label == "gpu"
    assert not path.is_relative_to(workspace.predictors(TARGET.name))
    assert kept_sidecar(workspace, rows, QUICK) is not None
    path.unlink()
    assert kept_sidecar(workspace, rows, QUICK) is None


@pytest.mark.slow
def test_the_command_adds_to_earlier_samples(workspace: Workspace) -> None:
    flavour = build_workspace(workspace, {"anet_b1": small_model()})
    folder, path = workspace.kernel_onnx / flavour.name, workspace.root / "errors.json"
    assert run_sampler(workspace, "--count", "6", "--batch-sizes", "1,2").returncode == 0
    before = read_seeds(folder)
    write_errors(path, errors_of(erring(unary("Relu"), 0.3, "cnet", "dnet"), erring(unary("Tanh"), 0.3), flavour=flavour))
    done = run_sampler(workspace, "--errors", str(path), "--count", "20", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert [(row["sampled"], row["free"], row["there_before"]) for row in json.loads(done.stdout)] == [(20, 0, 6)]
    after = read_seeds(folder)
    assert before.items() <= after.items()
    new = {name: seeded_by for name, seeded_by in after.items() if name not in before}
    assert {(built_kernel(folder / f"{name}.onnx").op_type, seeded_by) for name, seeded_by in new.items()} == {
        ("Relu", ("cnet", "dnet")), ("Tanh", FREE)}
    more = run_sampler(workspace, "--errors", str(path), "--count", "5")
    assert json.loads(more.stdout)[0]["there_before"] == 26
    assert len(read_seeds(folder)) == 31
