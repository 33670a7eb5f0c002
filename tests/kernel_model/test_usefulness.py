"""Which kernels are worth a measurement: near badly predicted ones, between cliffs, and their order if time is short."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import run_script
from conftest import build_workspace, small_model
from made_up_dataset import TARGET, conv, gemm, relu, write_workspace

from hase.kernel_model.building.kernel_models import check_kernel, write_kernel
from hase.kernel_model.kernel_sampler import FREE, NEAR_SPREAD, Drawn, sample_between_cliffs, sample_near_errors
from hase.kernel_model.sampling import usefulness
from hase.kernel_model.sampling.cliffs import Cliff, NothingBetween, TimedKernel, find_cliffs, kernel_between, timed_kernels
from hase.kernel_model.sampling.draws import read_seeds
from hase.kernel_model.sampling.free_shapes.sizes import inferred, kernel, numbers, tensor
from hase.kernel_model.sampling.usefulness import KernelError, KernelErrors, order_by_usefulness, read_errors, write_errors
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


def activation(op_type: str) -> Kernel:
    """Of tokens: thousands of sizes are near."""
    shape = tensor("float32", 4, 800, 1600)
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
    weights = usefulness.seed_weights([*usual, erring(gemm(), -0.2), erring(conv(), 0.1, measured_ms=0.5),
                            erring(conv(), 0.1, measured_ms=80.0), erring(conv(), 0.0)])
    assert weights * 101.5 == pytest.approx(np.array([1.0] * 96 + [4.0, 0.5, 1.0, 0.0]))  # the longest counts once
    capped = usefulness.seed_weights([erring(relu(), usefulness.MOST_LOG_ERROR), erring(gemm(), -3.0)])
    assert capped == pytest.approx([0.5, 0.5])


@pytest.mark.slow
def test_sizes_are_near_the_erring_kernels() -> None:
    seed = conv(batch=4, channels=256, side=56, out=512)
    drawn = sampled_near(errors_of(erring(seed, 0.3, "anet")), 60)
    assert len(drawn) == 60
    assert seed.id not in drawn
    reach = 2.0**NEAR_SPREAD * 1.12  # sides are rounded to usual ones, channels to multiples of 8
    for made, _ in drawn.values():
        batch, channels, side, _ = made.inputs[0].shape
        assert batch in (2, 4, 8)
        for size, seed_size in ((channels, 256), (side, 56), (made.inputs[1].shape[0], 512)):
            assert 1 / reach <= size / seed_size <= reach


def test_samples_keep_their_families_and_held_out_families_seed_nothing() -> None:
    errors = errors_of(erring(activation("Relu"), 0.3, "anet"), erring(activation("Tanh"), 0.3),
                       erring(activation("Exp"), 0.3, "anet", "bnet"), erring(activation("Neg"), 0.3, "secretnet"),
                       erring(activation("Erf"), 0.3, "opennet", "secretnet"), held_out=("secretnet",))

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
    assert all(error.measured_ms == pytest.approx(measured[error.kernel.id]["run"]) for error in written.kernels)
    mape = float(np.mean([abs(math.exp(error.log_error) - 1) for error in written.kernels]))
    assert mape == pytest.approx(trained.errors[0].mape)  # cross-validated: the fit to all rows has smaller errors
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
    write_errors(path, errors_of(erring(activation("Relu"), 0.3, "cnet", "dnet"), erring(activation("Tanh"), 0.3),
                                 flavour=flavour))
    done = run_sampler(workspace, "--errors", str(path), "--count", "20", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert [(row["sampled"], row["free"], row["there_before"]) for row in json.loads(done.stdout)] == [(20, 0, 6)]
    after = read_seeds(folder)
    assert before.items() <= after.items()
    new = {name: seeded_by for name, seeded_by in after.items() if name not in before}
    assert {(built_kernel(folder / f"{name}.onnx").op_type, seeded_by) for name, seeded_by in new.items()} == {
        ("Relu", ("cnet", "dnet")), ("Tanh", FREE)}


H200 = "nvidia-h200-cuda-ort1.31-all"


def signal(channels: int, width: int, length: int = 256) -> Kernel:
    """A depthwise convolution of a signal."""
    return inferred("Conv", [tensor("float32", 1, channels, length), tensor("float32", channels, 1, width, constant=True)],
                    kernel_shape=[width], strides=[1], pads=[width // 2] * 2, dilations=[1], group=channels)


def recurrent(hidden: int) -> Kernel:
    weights = [tensor("float32", 1, 4 * hidden, 8, constant=True), tensor("float32", 1, 4 * hidden, hidden, constant=True)]
    return inferred("LSTM", [tensor("float32", 5, 2, 8), *weights], hidden_size=hidden, layout=0)


def test_cliffs_are_found_between_neighbours() -> None:
    """From a width of 31 on, a made-up library takes 50 times as long. One of images is no neighbour of a signal's."""
    timed = [TimedKernel(signal(64, width), 0.05 * (50 if width >= 31 else 1)) for width in range(3, 60, 4)]
    first, *others = find_cliffs([*timed, TimedKernel(conv(), 90.0)])
    assert (first.faster.kernel, first.slower.kernel) == (signal(64, 27), signal(64, 31))
    assert first.height == pytest.approx(50 / (31 / 27), rel=0.05)
    taken = [entry.kernel.id for cliff in (first, *others) for entry in (cliff.slower, cliff.faster)]
    assert len(taken) == len(set(taken))
    assert conv().id not in taken
    assert not find_cliffs([TimedKernel(entry.kernel, 0.01) for entry in timed])


@pytest.mark.parametrize(("one", "two"), [
    (signal(64, 3), signal(256, 63)), (conv(channels=16, out=16), conv(channels=96, out=32, group=2)), (gemm(), gemm(rows=512)),
    (recurrent(24), recurrent(100)),
    *[tuple(kernel("Pad", [tensor("float32", 6, size), numbers(0, wide, 0, wide)], [(6, size + 2 * wide)], mode="constant")
            for size, wide in ((8, 1), (64, 9)))]])
def test_a_kernel_between_two_runs(one: Kernel, two: Kernel, tmp_path: Path) -> None:
    for share in (0.3, 0.5, 0.7):
        middle = kernel_between(one, two, share)
        check_kernel(write_kernel(middle, tmp_path), middle, "cpu")
        assert all(min(ends) <= size <= max(ends) for *tensors, made in zip(one.inputs, two.inputs, middle.inputs, strict=True)
                   for *ends, size in zip(*(tensor.shape for tensor in (*tensors, made)), strict=True))


def test_where_no_kernel_lies_between_the_edge_is_known() -> None:
    with pytest.raises(NothingBetween, match="no kernel lies between them"):
        kernel_between(signal(64, 30), signal(64, 31))


def test_kernels_between_belong_to_the_families_of_both() -> None:
    one, two = TimedKernel(signal(64, 3), 0.1, ("anet",)), TimedKernel(signal(512, 63), 9.0, ("bnet",))
    drawn, _ = sample_between_cliffs([Cliff(two, one, 90.0)], 5, np.random.default_rng(0), most_gflop=1.0)
    assert len(drawn) == 5
    assert {families for _, families in drawn.values()} == {("anet", "bnet")}
    assert all(3 < made.attributes["kernel_shape"][0] < 63 for made, _ in drawn.values())
    held_out = Cliff(two._replace(families=("vgg",)), one, 90.0)
    of_held_out, _ = sample_between_cliffs([held_out], 5, np.random.default_rng(0), most_gflop=1.0, without=("vgg",))
    assert not of_held_out


@pytest.mark.slow
@pytest.mark.nightly
def test_the_command_draws_between_cliffs_of_a_dataset(h200_workspace: Workspace, tmp_path: Path) -> None:
    """From the shipped dataset, whose kernels were measured on an H200."""
    dataset = Workspace(tmp_path).dataset(H200)
    dataset.parent.mkdir(parents=True)
    dataset.symlink_to(h200_workspace.dataset(H200))
    done = run_script("kernel_model/kernel_sampler.py", "--workspace", tmp_path, "--cliffs", H200, "--count", "20", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["flavour"], row["sampled"]) == ("cuda-ort1.31-all", 20)
    cliffs = find_cliffs(timed_kernels(h200_workspace, H200))
    assert len(cliffs) > 500
    widest = next(cliff for cliff in cliffs if cliff.slower.kernel.op_type == "Conv")
    assert widest.height > 20
    assert widest.slower.cuda_kernels != widest.faster.cuda_kernels


def points(**lines: Sequence[float]) -> usefulness.KernelPoints:
    """For each kind, points on a line."""
    return usefulness.KernelPoints(np.array([kind for kind, values in lines.items() for _ in values]),
                        np.concatenate(list(lines.values())).astype(float).reshape(-1, 1))


NOTHING = usefulness.KernelPoints(np.array([], dtype=str), np.zeros((0, 1)))


def test_a_doubled_size_is_a_distance_of_one() -> None:
    small, large = (np.array(usefulness.coordinates(relu(channels=64, side=side))) for side in (7, 15))
    assert sorted((large - small)[large != small].round(2)) [:2] == [1.0, 1.0]  # an axis in and out


def test_kinds_that_were_never_measured_come_first() -> None:
    candidates = points(Conv=range(50), Gemm=[1.0, 2.0], Pow=[5.0])
    order = order_by_usefulness(candidates, points(Conv=[3.5, 7.5]), 20, np.random.default_rng(3))
    assert {str(candidates.kinds[place]) for place in order[:2]} == {"Gemm", "Pow"}
    assert all(candidates.kinds[place] == "Conv" for place in order[2:10]), "then each kind in proportion"


def test_every_candidate_comes_once_and_the_order_is_the_same_each_time() -> None:
    candidates = points(Conv=range(30), Gemm=range(10))
    order = order_by_usefulness(candidates, NOTHING, 100, np.random.default_rng(3))
    assert sorted(order) == list(range(40))
    np.testing.assert_array_equal(order[:12], order_by_usefulness(candidates, NOTHING, 12, np.random.default_rng(3))[:12])


def test_kernels_near_badly_predicted_ones_weigh_more() -> None:
    measured = points(Conv=[0.0, 0.1, 0.2, 10.0, 10.1, 10.2], Gemm=[0.0])
    errors = np.log([1.0, 1.0, 1.0, 3.0, 1 / 3.0, 3.0, 1.25])
    candidates = points(Conv=[0.1, 10.1], Gemm=[5.0], Pow=[0.0])
    weights = usefulness.neighbour_weights(candidates, measured, errors)
    assert weights.tolist() == pytest.approx([usefulness.LEAST_WEIGHT, 1.0, np.log(1.25) / 0.5, 1.0])
    order = [order_by_usefulness(points(Conv=[0.1, 10.1]), measured, 1, np.random.default_rng(seed),
                                 weights[:2])[0] for seed in range(100)]
    assert np.mean(order) > 0.85
    assert order_by_usefulness(candidates, NOTHING, 4, np.random.default_rng(3), np.array([0.0, 1.0, 0.0, 0.0])).tolist() == [1]
