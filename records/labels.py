"""Names of labels and variants, and the version of the dataset."""

from __future__ import annotations

from typing import Literal, get_args

DATASET_VERSION = 2
Label = Literal["run", "kernel_time", "node_span", "unprofiled", "gpu"]
LABELS: tuple[Label, ...] = get_args(Label)
UNPROFILED, GPU_LABEL = LABELS[3:]
IN_MODEL_LABELS = LABELS[1:4]  # the time of a kernel in a model; taken in models
DEFAULT_LABELS = LABELS[:3]  # every device has these, and every kernel gets them by default
COLLECT = "python benchmark/collector.py"
BELOW_BEST = 0.05  # how much slower than at its best the canary may be, beyond the admitted drift
Variant = Literal["host_io", "cuda_graph"]  # further ways to run a whole model: numpy in and out; captured and replayed
VARIANTS: tuple[Variant, ...] = get_args(Variant)
KERNELS = "kernels"  # subject of a batch of kernels whose energy is measured together
ENERGY = "energy"  # label of a whole model: what a run takes of the device's energy
# Runs for the energy may take so many times as long as for the latency: a device that works for long gets warm. Where they take
# longer, other work ran meanwhile.
SLOWDOWN_ADMITTED = 1.3
DISTURBANCE_ADMITTED = 0.12  # how far the host probe may exceed a good reading; on a disturbed host it does by 0.4
