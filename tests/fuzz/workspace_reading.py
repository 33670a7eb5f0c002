"""What reads the files of a workspace, by the names that the lines of tests/fuzz/damaged_workspace.py use."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hase.benchmark.collecting.config import CollectorConfig
from hase.inference import predict
from hase.inference.evaluation.comparison import Evaluation
from hase.inference.evaluation.evaluate import evaluate
from hase.inference.live.load import InferenceConfig
from hase.kernel_model.sampling.usefulness import read_errors
from hase.learned.kernels.interface import TrainingConfig, TrainingSet
from hase.model_zoo.exporting.zoo_config import ZooConfig
from hase.records.dataset_files import read_journal, read_kernels
from hase.records.kernel_record_files import kernels_in_file, read_model_records
from hase.runtimes import flavour_of
from hase.training.kernels.training_set import read_training_set
from hase.utils.config import read_config
from hase.utils.paths import Workspace

__all__ = ["CollectorConfig", "InferenceConfig", "Path", "TrainingConfig", "Workspace", "ZooConfig", "evaluate", "evaluated_ms",
           "flavour_of", "kernels_in_file", "learned_ms", "predict", "read_config", "read_errors", "read_journal",
           "read_kernels", "read_model_records", "read_training_set"]


def evaluated_ms(evaluation: Evaluation) -> list[float]:
    return [value for row in evaluation.comparisons for value in (row.predicted_ms, row.strict_ms, row.measured_ms)]


def learned_ms(rows: TrainingSet) -> float:
    """A number that changes with any time, load or feature that training learns from."""
    return float(sum(sum(times_ms[times_ms > 0]) for times_ms in rows.times_ms.values()) + np.nansum(rows.load)
                 + rows.features.sum())
