#!/usr/bin/env bash
# How well a model is predicted whose whole family was left out: the figures of docs/accuracy.md, on this machine, idle.
# Usage: recipes/families/run.sh [workspace]     About 20 minutes on two cores; a second run goes on where the first stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/families}
hase() { python "$1" --workspace "$out" "${@:2}"; }
# Fourteen families of torchvision models, so that each can be left out of everything in turn
models="resnet18, resnet50, resnext50_32x4d, squeezenet1_1, mobilenet_v2, mobilenet_v3_small, shufflenet_v2_x1_0, regnet_y_400mf,
  googlenet, mnasnet1_0, efficientnet_b0, densenet121, alexnet, vgg11, vit_b_32, convnext_tiny"
# Measured as in the demo, but idle only: the question is how well a family is predicted that nothing was learned from
settings=(--config recipes/demo/collector.yaml --set 'levels=[0.0]' --set 'held_out=[]' --set model.budget_s=1.5)

mkdir -p "$out"
hase model_zoo/torchvision_exporter.py --config recipes/demo/model_zoo.yaml --set "models=[$models]" > "$out/exported.txt"
hase ort_analysis/fusion_detector.py > "$out/analysed.txt"
hase kernel_model/kernel_builder.py > "$out/kernels.txt"
hase kernel_model/kernel_sampler.py --count 1000 --batch-sizes 1,2,4,8,16 --most-gflop 1.5
hase benchmark/collector.py "${settings[@]}"
hase training/train_kernel_model.py
hase training/fit_composition.py
hase benchmark/repeatability.py "${settings[@]}"
