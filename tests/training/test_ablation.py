"""The ablation: the rows and features of each variant, sums of models by hand, and a first stage that never sees the answer."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from command import run_script
from made_up_dataset import METRIC, TARGET, chain, conv, relu, write_workspace

from training.ablation import VARIANTS, Dataset, Variant, chosen_rows, learn, load, sum_mape
from training.composition.measured_models import MeasuredModel
from training.kernels import cuda_classes
from training.kernels.cuda_classes import cuda_class
from training.kernels.estimators import KernelModel, fit_kernel_model
from training.kernels.features import KERNEL_FEATURES
from training.kernels.settings import ForestSettings, TrainingConfig, XgboostSettings
from training.kernels.training_set import TrainingSet
from utils.paths import Workspace

pytestmark = pytest.mark.slow

QUICK = TrainingConfig(folds=3, threads=1, xgboost=XgboostSettings(trees=40, learning_rate=0.2), forest=ForestSettings(trees=5))
SMALL = "folds: 2\nthreads: 1\nxgboost: {trees: 20}\nforest: {trees: 3}\n"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A made-up CPU, with predictors."""
    workspace = Workspace(tmp_path_factory.mktemp("ablation"))
    write_workspace(workspace, sampled=150)
    (workspace.root / "small.yaml").write_text(SMALL)
    assert run(workspace, "train_kernel_model").returncode == 0
    return workspace


@pytest.fixture(scope="module")
def data(workspace: Workspace) -> Dataset:
    return load(workspace, TARGET.name)


def run(workspace: Workspace, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return run_script(f"training/{script}.py", "--workspace", workspace.root, "--config", workspace.root / "small.yaml",
                      *options)


@pytest.mark.parametrize(("names", "expected"), [
    (["void nchwToNhwcKernel<float>(float const*)", "Memset (Device)",
      "sm90_xmma_fprop_implicit_gemm_tf32f32_nhwc_tilesize64x128x32__5x_cudnn", "void op_generic_tensor_kernel<4>(float*)"],
     "sm_xmma_fprop_implicit_gemm_tf_f_nhwc_tilesize_x_x_x_cudnn"),
    (["void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4>(cutlass_80_tensorop_s1688gemm::Params)"],
     "cutlass_Kernel_cutlass_tensorop_s_gemm_x_x_nn_align"),
    (["void cask::init_device_workspace_kernel<xmma::implicit_gemm::fprop>(int)", "conv2d_c1_k1_nchw_hw_packed"],
     "conv_d_c_k_nchw_hw_packed"),
    (["void relu<float>(float*)"], ""),
    ([], ""),
])
def test_classes_of_cuda_kernels(names: list[str], expected: str) -> None:
    assert cuda_class(names) == expected


def test_rows_and_features_of_variants(data: Dataset) -> None:
    rows = data.rows
    hidden = chosen_rows(data, VARIANTS["no-tiles-alignment"]).features
    tiles = [KERNEL_FEATURES.index(name) for name in (*KERNEL_FEATURES.groups["tiles"], *KERNEL_FEATURES.groups["alignment"])]
    visible = [place for place in range(len(KERNEL_FEATURES.names)) if place not in tiles]
    assert (hidden[:, tiles] == 0).all()
    assert (hidden[:, visible] == rows.features[:, visible]).all()
    assert (rows.features[:, tiles] != 0).any()  # the dataset does not change
    of_models = chosen_rows(data, VARIANTS["no-samples"])
    assert set(of_models.ids) == {name for model in data.models for name in model.record.kernels}
    assert len(chosen_rows(data, VARIANTS["no-free"])) == len(rows)  # all were sampled near a family
    free = replace(data, rows=replace(rows, groups=(frozenset(), *rows.groups[1:])))
    assert len(chosen_rows(free, VARIANTS["no-free"])) == len(rows) - 1


def test_times_are_learned_without_a_roofline(data: Dataset) -> None:
    """A kernel type without rows is estimated from its sizes, like other types of its class."""
    rows = data.rows.rows(data.rows.idle & (data.rows.types == "Conv"))
    for variant in (VARIANTS["no-roofline"], VARIANTS["forest"], VARIANTS["one-for-all"]):
        times_ms = learn(rows, data, variant, QUICK).predict_ms(rows.kernels)
        assert np.median(np.abs(times_ms / rows.times_ms["run"] - 1)) < 0.02
    unknown = learn(rows, data, VARIANTS["no-roofline"], QUICK).predict_ms(
        replace(rows.kernels, types=np.array(["Unheard"] * len(rows))))
    assert np.median(np.abs(unknown / rows.times_ms["run"] - 1)) < 0.01


def test_sums_of_models() -> None:
    """Two models: 2 · 1 + 3 against 2 · 2 + 3, and one whose second kernel was never measured: 5 against 4."""
    convolution, small_relu, large_relu = conv(), relu(), relu(batch=2)
    models = [MeasuredModel(chain(name, kernels), name, 1.0) for name, kernels in (
        ("anet", [convolution, convolution, small_relu]), ("bnet", [convolution, large_relu]))]
    predicted = {"anet": {convolution.id: 1.0, small_relu.id: 3.0}, "bnet": {convolution.id: 5.0, large_relu.id: 100.0}}
    measured = {convolution.id: {"gpu": 2.0}, small_relu.id: {"gpu": 3.0}, large_relu.id: {"run": 1.0}}
    assert sum_mape(models, predicted, measured, "gpu") == pytest.approx(100 * (2 / 7 + 3 / 2) / 2)


def test_the_first_stage_does_not_see_the_answer(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each family has its own class. The guesses for a row come from other families, so they never include its class."""
    rows = data.rows.rows(np.array([len(families) == 1 for families in data.rows.groups]))
    family_of = {str(name): min(families) for name, families in zip(rows.ids, rows.groups, strict=True)}
    guesses: list[npt.NDArray[np.float64]] = []

    def remember(training: TrainingSet, *options: object) -> KernelModel:
        guesses.append(training.features[:, len(KERNEL_FEATURES.names):])
        return fit(training, *options)  # type: ignore[arg-type]

    fit = fit_kernel_model
    monkeypatch.setattr(cuda_classes, "fit_kernel_model", remember)
    model = cuda_classes.fit_two_stages(rows, "run", family_of, QUICK)
    (guessed,) = guesses
    assert guessed.sum(axis=1) == pytest.approx(np.ones(len(rows)))
    families = Counter(family_of[str(row)] for row in rows.ids).most_common()  # the order of the columns
    for column, (name, _) in enumerate(families):
        mine = np.array([family_of[str(row)] == name for row in rows.ids])
        assert (guessed[mine, column] == 0).all()
        assert guessed[~mine, column].any()
    times_ms = model.predict_ms(rows.kernels)
    assert np.median(np.abs(times_ms / rows.times_ms["run"] - 1)) < 0.04


def test_every_variant_has_a_description_and_a_difference() -> None:
    assert len({variant.what for variant in VARIANTS.values()}) == len(VARIANTS)
    plain = [replace(variant, what="") for variant in VARIANTS.values()]
    assert len(set(plain)) == len(plain)
    assert plain[0] == Variant("")
    assert {group for variant in VARIANTS.values() for group in variant.without} <= set(KERNEL_FEATURES.groups)


def test_the_command(workspace: Workspace, tmp_path: Path) -> None:
    """On a device without CUDA kernels: one row for each variant that does not need their names, and a warning."""
    done = run(workspace, "ablation", "--json")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)[TARGET.name]
    assert [row["variant"] for row in table] == [name for name in VARIANTS if name != "two-stages"]
    assert "two-stages omitted" in done.stderr
    assert METRIC in load(workspace, TARGET.name).rows.metrics
    missing = run(workspace, "ablation", "--target", "none-such")
    assert (missing.returncode, len(missing.stderr.splitlines())) == (1, 1)
    assert "none-such" in missing.stderr
