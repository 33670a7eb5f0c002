"""How far off predicted times may be: learned from errors of kernels that were held out, and told in answers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from made_up_dataset import TARGET, conv, draw_kernels, relu, write_dataset

from hase.inference.prediction.uncertainty import DOUBTFUL, KernelUncertainty, Span, uncertainty_warnings
from hase.learned.composition.intervals import KNOWN, Novelty, sources
from hase.learned.kernels.estimators import KernelModel, predict_kernels
from hase.learned.kernels.interface import TrainingSet
from hase.records.kernel_record import Kernel
from hase.records.measurement import GPU_LABEL
from hase.training.kernels.left_out import LARGEST, LAUNCH_MS, learn_doubt
from hase.training.kernels.training_set import read_training_set
from hase.utils.paths import Workspace


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TrainingSet:
    workspace = Workspace(tmp_path_factory.mktemp("doubt"))
    write_dataset(workspace, {kernel.id: kernel for kernel in draw_kernels(400)}, {}, {}, {0.0: 0.0})
    made = read_training_set(workspace, TARGET.name)
    return replace(made, times_ms={GPU_LABEL: made.times_ms["run"]})


def is_wide(rows: TrainingSet) -> np.ndarray:
    return rows.features[:, rows.schema.index("kernel_width")] >= 5


def left_out(rows: TrainingSet, measured: np.ndarray, predicted: np.ndarray) -> dict[str, tuple[float, float]]:
    """By kernel, what was measured, and what a training without it predicted."""
    return dict(zip(rows.ids.tolist(), zip(measured.tolist(), predicted.tolist(), strict=True), strict=True))


def doubts_of(doubt: KernelModel, rows: TrainingSet, *kernels: Kernel) -> list[float]:
    factors = predict_kernels(doubt, kernels, rows.schema.matrix(kernels), list(rows.idle_load.values()))
    return [math.log(factor) for factor in factors]


def test_doubt_is_large_where_kernels_that_were_held_out_were_far_off(rows: TrainingSet) -> None:
    """Predictions of wide windows are off by a factor of four, up or down; the others by 5 %."""
    generator = np.random.default_rng(0)
    signs = generator.choice([-1.0, 1.0], len(rows))
    errors, gpu_ms = np.where(is_wide(rows), math.log(4.0), 0.05), rows.times_ms[GPU_LABEL]
    doubt = learn_doubt(rows, left_out(rows, gpu_ms, gpu_ms * np.exp(signs * errors)), {}, seed=1)
    narrow, wide, other = doubts_of(doubt, rows, conv(window=3), conv(window=7), relu())
    assert narrow == pytest.approx(0.05, abs=0.1)
    assert wide == pytest.approx(math.log(4.0), rel=0.2)
    assert other == pytest.approx(0.05, abs=0.05)


def test_launches_that_take_the_host_longer_than_the_gpu_are_doubted_likewise(rows: TrainingSet) -> None:
    """The GPU's times are right. Four times as many launches as predicted matter where they take longer than the GPU's work."""
    gpu_ms, many = rows.times_ms[GPU_LABEL], 2.0 * rows.times_ms[GPU_LABEL] / LAUNCH_MS
    times = left_out(rows, gpu_ms, gpu_ms)
    doubted = learn_doubt(rows, times, left_out(rows, np.where(is_wide(rows), 4.0, 1.0) * many, many), seed=1)
    certain = learn_doubt(rows, times, left_out(rows, np.where(is_wide(rows), 4.0, 1.0) * 0.1 * many, 0.1 * many), seed=1)
    narrow, wide = doubts_of(doubted, rows, conv(window=3), conv(window=7))
    assert narrow == pytest.approx(0.0, abs=0.1)
    assert wide == pytest.approx(math.log(4.0), rel=0.2)
    assert doubts_of(certain, rows, conv(window=7)) == [pytest.approx(0.0, abs=0.01)]


def test_a_huge_error_counts_up_to_a_limit(rows: TrainingSet) -> None:
    gpu_ms = rows.times_ms[GPU_LABEL]
    doubt = learn_doubt(rows, left_out(rows, gpu_ms, gpu_ms * 1e6), {}, seed=1)
    assert doubts_of(doubt, rows, conv()) == [pytest.approx(LARGEST, rel=0.01)]


def test_the_doubts_of_a_model_are_weighted_by_time() -> None:
    doubted = Novelty("known", doubt=0.5)
    kernels = [("a", 6.0, doubted), ("b", 2.0, KNOWN), ("c", 2.0, None)]
    assert sources(kernels, 10.0, 5.0).doubt == pytest.approx(0.3)
    assert sources(kernels, 20.0, 10.0).doubt == pytest.approx(0.15)  # half of the time the GPU waits
    assert sources(kernels, 10.0, 5.0).predicted == pytest.approx(0.2)  # of the kernel whose doubt is not known
    # different kernels err independently, and the nodes of one alike
    assert sources([(name, 2.5, doubted) for name in "abcd"], 10.0, 5.0).doubt == pytest.approx(0.25)
    assert sources([("a", 2.5, doubted)] * 4, 10.0, 5.0).doubt == pytest.approx(0.5)


def test_doubtful_kernels_are_named() -> None:
    uncertain = KernelUncertainty("doubtful", Span(0.5, 2.0), Span(1.0, 1.0), True)
    (warning,) = uncertainty_warnings([(conv(), uncertain)], Span(0.8, 1.4))
    assert warning.startswith("rough estimate: Conv: near sizes at which a library changes its algorithm")
    assert 0.1 < DOUBTFUL < 0.5
