#!/usr/bin/env bash
# One machine with several GPUs: the H200 recipe's dataset, measured on all of them at once, and how much they differ.
# Usage: recipes/cluster/several_gpus.sh [workspace]     Its models must be exported, analysed and built (recipes/h200/run.sh).
# Then the first GPU alone measures 200 kernels again: whether they disturbed each other. (Never run on several GPUs.)
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/h200}
settings=(--config recipes/h200/collector.yaml --workspace "$out")
python benchmark/collector.py "${settings[@]}" --ray auto
python benchmark/dataset.py --machines --workspace "$out"
CUDA_VISIBLE_DEVICES=0 python benchmark/dataset.py "${settings[@]}" --repeat 200
