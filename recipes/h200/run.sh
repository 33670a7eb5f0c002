#!/usr/bin/env bash
# The dataset of this machine's GPU: models, their kernels and further shapes, measured. Started again, it goes on.
# Usage: recipes/h200/run.sh [workspace]     About an hour on a machine with a GPU and 16 cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/gpu_dataset}
jobs=$(($(nproc) / 2 + 1))
hase() { python "$1" --workspace "$out" "${@:2}"; }

mkdir -p "$out"
in_half="alexnet, convnext_tiny, densenet121, efficientnet_b0, googlenet, mnasnet1_0, mobilenet_v2, mobilenet_v3_large,
  regnet_y_400mf, regnet_x_3_2gf, resnet18, resnet50, resnext50_32x4d, shufflenet_v2_x1_0, squeezenet1_1, swin_t, vgg16, vit_b_16,
  vit_b_32"  # one or two models of each family
at_other_sizes="convnext_tiny, densenet121, efficientnet_b0, googlenet, mobilenet_v2, regnet_y_400mf, resnet18, resnet50,
  shufflenet_v2_x1_0, squeezenet1_1, vgg11"  # of the families that take them
zoo=recipes/h200/model_zoo.yaml
hase model_zoo/torchvision_exporter.py --config $zoo
hase model_zoo/torchvision_exporter.py --config $zoo --set "models=[$in_half]" --set 'dtypes=[fp16]'
hase model_zoo/torchvision_exporter.py --config $zoo --set "models=[$at_other_sizes]" --set 'image_sizes=[224, 160, 288]'
hase ort_analysis/fusion_detector.py --device cuda --jobs "$jobs" --static --dim batch=1,4,16,64,128
hase kernel_model/kernel_builder.py > "$out/kernels.txt"
hase kernel_model/kernel_sampler.py --count 10000 --free 25000 --batch-sizes 1,2,4,8,16,32,64,128 \
  --most-gflop 600 --most-mib 2000 --jobs "$jobs"
hase benchmark/collector.py --config recipes/h200/collector.yaml
