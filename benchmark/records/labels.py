"""Names of labels and variants, and the version of the dataset."""

from __future__ import annotations

from typing import Literal, get_args

DATASET_VERSION = 2
Label = Literal["run", "kernel_time", "node_span", "unprofiled", "gpu"]
LABELS: tuple[Label, ...] = get_args(Label)
UNPROFILED, GPU_LABEL = LABELS[3:]
IN_MODEL_LABELS = LABELS[1:4]  # that tell what a kernel takes in a model: taken in models
DEFAULT_LABELS = LABELS[:3]  # those that every device has, and every kernel gets unless more are asked for
COLLECT = "python benchmark/collector.py"
BELOW_BEST = 0.05  # how much slower than its best the canary may be beyond what drift is admitted
Variant = Literal["host_io", "cuda_graph"]  # further ways to run a whole model: numpy in and out; captured and replayed
VARIANTS: tuple[Variant, ...] = get_args(Variant)
DISTURBANCE_ADMITTED = 0.12  # by which a probe of the host may exceed a good reading; beside a disturbed host it does by 0.4
