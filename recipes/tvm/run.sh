#!/usr/bin/env bash
# Twelve networks under TVM and under ONNX Runtime, on this CPU: sums and longest paths against whole networks, kernels with and
# without searched schedules, predictions with each family held out, and a setting of threads and cores that was left out.
# Usage: recipes/tvm/run.sh [workspace] [minutes of search, default 60] [minutes for each further setting, default 25]
# Needs TVM: pip install '.[tvm]'. A second run goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/tvm} search_minutes=${2:-60} setting_minutes=${3:-25}
hase() { python "$1" --workspace "$out" "${@:2}"; }

mkdir -p "$out"
hase model_zoo/torchvision_exporter.py --config recipes/tvm/model_zoo.yaml > "$out/exported.txt"
hase runtimes/tvm/relax_parser.py
hase runtimes/tvm/operator_sampler.py --count 400
hase runtimes/tvm/operator_sampler.py --count 550 --operators product,convolution --seed 1
hase ort_analysis/fusion_detector.py --device cpu > "$out/analysed.txt"
hase kernel_model/kernel_builder.py > "$out/kernels.txt"
hase benchmark/collector.py --config recipes/tvm/cpu.yaml
for threads in 2 1; do
  hase benchmark/collector.py --config recipes/tvm/cpu.yaml --set setting.threads=$threads --set setting.cores=1 \
    --minutes "$setting_minutes"
done
# all kernels of three networks, which can then be summed up; then those of the others with most work
hase runtimes/tvm/tune_kernels.py --trials 16 --model resnet18 --model squeezenet --model shufflenet
hase runtimes/tvm/tune_kernels.py --trials 16 --minutes "$search_minutes"
hase benchmark/collector.py --config recipes/tvm/cpu.yaml --set setting.level=tuned
hase benchmark/collector.py --config recipes/demo/collector.yaml --set device=cpu --set 'levels=[0.0]' --set 'held_out=[]' \
  --set sessions=3 --set model.budget_s=1.5 --set block_kernels=32
hase training/train_kernel_model.py
hase training/fit_composition.py
hase inference/sum_and_path.py --choose-by densenet --choose-by efficientnet --choose-by regnet --choose-by convnext
hase training/held_out.py --by setting
