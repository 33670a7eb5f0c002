#!/usr/bin/env bash
# How well a model is predicted whose whole family was left out: the figures of docs/accuracy.md, on this machine, idle.
# Usage: recipes/families/run.sh [workspace]     About 20 minutes on two cores; a second run goes on where the first stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/families}
hase() { python "$1" --workspace "$out" "${@:2}"; }

mkdir -p "$out"
hase model_zoo/torchvision_exporter.py --config recipes/families/model_zoo.yaml > "$out/exported.txt"
hase ort_analysis/fusion_detector.py > "$out/analysed.txt"
hase kernel_model/kernel_builder.py > "$out/kernels.txt"
hase kernel_model/kernel_sampler.py --count 1000 --batch-sizes 1,2,4,8,16 --most-gflop 1.5
hase benchmark/collector.py --config recipes/families/collector.yaml
hase training/train_kernel_model.py
hase training/fit_composition.py
hase benchmark/repeatability.py --config recipes/families/collector.yaml
