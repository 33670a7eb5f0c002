"""What is learned of sharing through MPS: on made-up times, and on what an H100 measured."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from hase.learned import target_files
from hase.learned.composition.fitted import read_composition
from hase.learned.kernels.features import KERNEL_FEATURES
from hase.learned.kernels.interface import TrainingConfig
from hase.learned.kernels.sidecar import copy_predictors, read_sidecar, write_sidecar
from hase.learned.sharing import learned_mps, write_mps
from hase.records.dataset_files import read_header
from hase.training.fit_mps import fit_target
from hase.training.fits.mps import MeasuredWay, MpsFit, candidates, measured_widths, read_way, records_of
from hase.utils.errors import UserError
from hase.utils.paths import SHIPPED, Workspace
from hase.utils.sharing_mode import GpuSharing

ARCHIVE = Path(__file__).parents[2] / "recipes/h200/sharing-nvidia-h100.tar.xz"
CARD = "nvidia-h100-80gb-hbm3-cuda-ort1.31-all"
TARGET = "nvidia-h200-cuda-ort1.31-all"


def way(sharing: str, **gpu_ms: float) -> MeasuredWay:
    return MeasuredWay(GpuSharing.parse(sharing), gpu_ms, dict.fromkeys(gpu_ms, 1.0), {}, {}, {}, {})


def test_the_width_of_a_kernel_shows_in_its_times_with_fewer_threads() -> None:
    ways = [way("mps", wide=1.0, half=1.0, narrow=1.0, not_again=1.0), way("mps:50", wide=1.85, half=1.0, narrow=1.01),
            way("mps:25/75", wide=3.55, half=1.85, narrow=1.0)]
    assert measured_widths(ways) == pytest.approx({"wide": 1.0, "half": 0.5, "narrow": 0.25})


    for sharings in (("mps",), ("mps:50", "mps:25/75"), ("slices",)):
        with pytest.raises(UserError, match="the width of kernels shows in their times with all threads and with less"):
            measured_widths([way(sharing, kernel=1.0) for sharing in sharings])
    tried = candidates()  # each value of a rule is tried with each of another
    assert len({(rules.wave_ms, rules.switch_ms) for rules in tried}) == 9
    assert len(tried) == len(set(map(repr, tried))) == 81


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an H100 measured in two of the ways, and the models' records."""
    folder = tmp_path_factory.mktemp("sharing")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, [member for member in archive if member.name.startswith(("mps/", "mps-50/", "ort_"))],
                           filter="data")
    return folder


@pytest.mark.slow
def test_another_training_keeps_what_was_learned_of_mps(tmp_path: Path, measured: Path) -> None:
    """Files of widths lie beside those of the predictors, and are not theirs: neither a copy nor a training leaves them out."""
    copy_predictors(SHIPPED / TARGET, tmp_path)
    write_sidecar(tmp_path, read_sidecar(tmp_path))
    learned = learned_mps(tmp_path)
    assert learned
    target = read_header(Workspace(measured / "mps").dataset(CARD)).target
    record = records_of(Workspace(measured), target, ["resnet18@batch=1"])["resnet18@batch=1"]
    kernel = next(kernel for kernel in record.kernels.values() if kernel.op_type == "Conv")
    features = np.array([KERNEL_FEATURES.compute(kernel)], dtype=float)
    assert 0.0 < learned.grids([kernel], features, np.array([0.01])).width[0] <= 1.0
    (tmp_path / "mps_width-0.npz").write_bytes(b"of an earlier fit")
    write_mps(tmp_path, learned.sharing)
    assert [path.name for path in tmp_path.glob("mps_width-*")] == [learned.sharing.width.file]


@pytest.mark.slow
def test_the_shipped_rules_hold_for_what_an_h100_measured(measured: Path) -> None:
    """Latencies of a model whose kernels take most of its time, beside models in loops; docs/sharing.md has all errors."""
    ways = [read_way(Workspace(measured / name), CARD) for name in ("mps", "mps-50")]
    assert ways[0].idle_ms["resnet50@batch=16"] == pytest.approx(3.48, abs=0.01)
    assert ways[0].beside["resnet50@batch=16", "resnet50_16"][0] == pytest.approx(6.09, abs=0.01)
    assert ways[1].looped["resnet50_16_twice"] == ("resnet50@batch=16", 2)
    shipped, composition = target_files.MPS.read(SHIPPED / TARGET), read_composition(SHIPPED / TARGET)
    assert shipped
    assert composition.costs
    records = records_of(Workspace(measured), read_header(Workspace(measured / "mps").dataset(CARD)).target, ways[0].idle_ms)
    ways = [way._replace(beside={(model, background): times for (model, background), times in way.beside.items()
                                 if model == "resnet50@batch=16" and background.startswith("resnet50_16")}) for way in ways]
    fit = MpsFit(ways, records, composition.costs)
    assert shipped.bytes_per_ms == pytest.approx(1.12 * fit.bytes_per_ms, rel=0.01)  # that of the H200's memory
    assert all(fit.is_gpu_bound(case) for case in fit.cases)
    gpu_bound, host_bound = fit.errors(fit.predicted(shipped.rules))
    assert not host_bound
    assert max(errors.mean for errors in gpu_bound.values()) < 0.1
    assert len(gpu_bound) == 2


@pytest.mark.slow
def test_a_workspace_without_all_threads_is_refused(tmp_path: Path, measured: Path) -> None:
    shutil.copytree(measured / "mps-50", tmp_path / "ways/mps-50")
    shutil.copytree(measured / "ort_analysis", tmp_path / "ways/ort_analysis")
    copy_predictors(SHIPPED / TARGET, Workspace(tmp_path).predictors(TARGET))
    with pytest.raises(UserError, match="the width of kernels shows in their times with all threads and with less"):
        fit_target(Workspace(tmp_path), Workspace(tmp_path / "ways"), TARGET, TrainingConfig(), 1)
