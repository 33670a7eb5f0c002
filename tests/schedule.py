"""Which tests are slow, and which of two workers runs what.

`make quick` omits the slow ones. Tests of a file run in one worker, in their order. MEASURING_FILES run one after another in
the same worker, so that no two of them measure at once. The longest files begin, so that both workers end at about the same
time.
"""

from __future__ import annotations

LIMIT_S = 2.0  # a test that takes longer, its fixtures included, belongs to the slow ones
MEASURING = "measuring"  # the group of:
MEASURING_FILES = (
    "benchmark/test_collector.py", "benchmark/test_stressor.py", "benchmark/test_machine_ties.py",
    "benchmark/test_unprofiled.py", "benchmark/test_runner.py", "benchmark/test_label_table.py", "benchmark/test_quiet_host.py",
    "benchmark/test_sharing_probe.py", "benchmark/test_anatomy.py", "benchmark/test_metrics.py", "benchmark/test_gpu_turns.py",
    "inference/test_evaluator.py", "inference/test_missing_kernels.py", "inference/test_no_training.py", "test_stopping.py")
LONGEST_FIRST = (  # files and groups
    MEASURING, "recipes/test_gpu_dataset.py", "test_readme.py", "inference/test_prometheus.py", "model_zoo/test_exporter.py",
    "inference/test_memory.py", "inference/test_answers.py", "benchmark/test_probe_metrics.py", "test_light_install.py")

SLOW_FIXTURES = {
    "torch_models",       # exports three models
    "trained_workspace",  # trains
    "copy",               # the README's commands
    "part",               # learns from the shipped dataset
    "collected",          # collections, killed and resumed
    "exported",           # exports a model
}
SLOW_FILES = {
    "inference/test_missing_kernels.py", "inference/test_no_training.py", "inference/test_prometheus.py", "test_stopping.py",
    "training/test_ablation.py", "training/test_training.py", "test_wrong_arguments.py", "test_scripts.py",
}
SLOW_TESTS: set[str] = set()  # file::function


def group_of(file: str) -> str:
    """The group of a test file, named as from tests/: a worker runs a group from beginning to end."""
    return MEASURING if file in MEASURING_FILES else file


def position(group: str) -> int:
    """Where a group stands in the order of running."""
    return LONGEST_FIRST.index(group) if group in LONGEST_FIRST else len(LONGEST_FIRST)


def is_slow(file: str, function: str, fixtures: list[str]) -> bool:
    return file in SLOW_FILES or f"{file}::{function}" in SLOW_TESTS or not SLOW_FIXTURES.isdisjoint(fixtures)
