"""Names of labels and variants, and the version of the dataset."""

from __future__ import annotations

DATASET_VERSION = 1
GPU_LABEL, UNPROFILED = "gpu", "unprofiled"
IN_MODEL_LABELS = ("kernel_time", "node_span", UNPROFILED)  # that tell what a kernel takes in a model: taken in models
LABELS = ("run", *IN_MODEL_LABELS, GPU_LABEL)
DEFAULT_LABELS = LABELS[:3]  # those that every device has, and every kernel gets unless more are asked for
COLLECT = "python benchmark/collector.py"
BELOW_BEST = 0.05  # how much slower than its best the canary may be beyond what drift is admitted
VARIANTS = ("host_io", "cuda_graph")  # further ways to run a whole model: numpy in and out; captured and replayed
DISTURBANCE_ADMITTED = 0.12  # by which a probe of the host may exceed a good reading; beside a disturbed host it does by 0.4
