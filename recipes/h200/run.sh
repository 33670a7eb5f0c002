#!/usr/bin/env bash
# The dataset of this machine's GPU: models, their kernels and further shapes, measured. Started again, it goes on.
# Usage: recipes/h200/run.sh [workspace]     About an hour on a machine with a GPU and 16 cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/gpu_dataset}
jobs=$(($(nproc) / 2 + 1))
hase() { python "$1" --workspace "$out" "${@:2}"; }

mkdir -p "$out"
for config in model_zoo model_zoo_fp16 model_zoo_sizes; do
  hase model_zoo/torchvision_exporter.py --config "recipes/h200/$config.yaml"
done
hase ort_analysis/fusion_detector.py --device cuda --jobs "$jobs" --static --dim batch=1,4,16,64,128
hase kernel_model/kernel_builder.py > "$out/kernels.txt"
hase kernel_model/kernel_sampler.py --count 10000 --free 25000 --batch-sizes 1,2,4,8,16,32,64,128 \
  --most-gflop 600 --most-mib 2000 --jobs "$jobs"
hase benchmark/collector.py --config recipes/h200/collector.yaml
