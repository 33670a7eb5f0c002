#!/usr/bin/env bash
# The twelve networks of run.sh under TVM on an NVIDIA GPU, at a size at which it has something to do: sums and longest paths
# against whole networks, kernels with and without searched schedules, and predictions with each family held out.
# Usage: recipes/tvm/gpu.sh [workspace] [minutes of measuring, default 10] [minutes of search, default 30]
# Needs a GPU and TVM: pip install '.[tvm]'. A second run goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/tvm_gpu} minutes=${2:-10} search_minutes=${3:-30}
hase() { python "$1" --workspace "$out" "${@:2}"; }
draw() { # larger kernels than for a CPU
  hase runtimes/tvm/operator_sampler.py --device cuda --set 'channels=[1, 1024]' --set 'side=[4, 224]' --set 'rows=[1, 4096]' \
    --set most_gflop=20 --set most_mib=256 "$@"
}

mkdir -p "$out"
hase model_zoo/torchvision_exporter.py --config recipes/tvm/model_zoo.yaml --image-size 224 --batch-size 8 \
  > "$out/exported.txt"
hase runtimes/tvm/relax_parser.py --device cuda
draw --count 300
draw --count 300 --operators product,convolution --seed 1
hase runtimes/tvm/cuda_compiler.py
hase benchmark/collector.py --config recipes/tvm/gpu.yaml --minutes "$minutes"
hase runtimes/tvm/tune_kernels.py --device cuda --trials 16 --minutes "$search_minutes" --model resnet18 --model squeezenet
hase runtimes/tvm/cuda_compiler.py
hase benchmark/collector.py --config recipes/tvm/gpu.yaml --set setting.level=tuned
hase training/train_kernel_model.py
hase training/fit_composition.py
hase inference/sum_and_path.py --choose-by densenet --choose-by efficientnet --choose-by regnet --choose-by convnext
