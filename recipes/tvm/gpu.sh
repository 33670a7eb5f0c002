#!/usr/bin/env bash
# The twelve networks of run.sh under TVM on an NVIDIA GPU, at a size at which it has something to do: sums and longest paths
# against whole networks, and predictions with each family held out.
# Usage: recipes/tvm/gpu.sh [workspace] [minutes of measuring, default 10]
# Needs a GPU and TVM: pip install -r requirements-tvm.txt. A second run goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/tvm_gpu} minutes=${2:-10}
hase() { python "$1" --workspace "$out" "${@:2}"; }

mkdir -p "$out"
hase model_zoo/torchvision_exporter.py --config recipes/tvm/model_zoo.yaml --image-size 224 --batch-size 8 \
  > "$out/exported.txt"
hase tvm_analysis/relax_parser.py --device cuda
hase kernel_model/operator_sampler.py --device cuda --count 300
hase kernel_model/operator_sampler.py --device cuda --count 300 --operators product,convolution --seed 1
hase benchmark/collector.py --config recipes/tvm/gpu.yaml --minutes "$minutes"
hase training/train_kernel_model.py
hase training/fit_composition.py
hase inference/sum_and_path.py --choose-by densenet --choose-by efficientnet --choose-by regnet --choose-by convnext
