#!/usr/bin/env bash
# Models beside co-runners and their kernels alone, under several ways of sharing this machine's GPU. Started again, it goes on.
# CONFIG=recipes/h200/processes.yaml measures models alone and beside one to three processes that run a model in a loop.
# Usage: recipes/h200/measure_sharing.sh [workspace] [way of sharing...]     Eight minutes for each way.
#   recipes/h200/measure_sharing.sh out/sharing                       # slices mps mps:50 mps:25/75 mps:75/25
#   recipes/h200/measure_sharing.sh out/sharing mps:50 mps:25/75      # halves, then a quarter beside three quarters
#   recipes/h200/measure_sharing.sh out/sharing prepare               # exports and builds what is measured
# The dataset of a way is WORKSPACE/<way>/benchmark/dataset/<target>. The card's settings stay as they are; an MPS daemon of the
# collector's own runs meanwhile.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath -m "${1:-out/sharing}")
ways=("${@:2}")
((${#ways[@]})) || ways=(slices mps mps:50 mps:25/75 mps:75/25)

hase() { python "$1" --workspace "$out" "${@:2}"; }
analyse() { # batch model…
  local model models=()
  for model in "${@:2}"; do models+=(--model "$model.onnx"); done
  hase ort_analysis/fusion_detector.py --device cuda --jobs "$(nproc)" --static --dim "batch=$1" "${models[@]}"
}
prepare() {
  local models="convnext_tiny, densenet121, efficientnet_b0, googlenet, mobilenet_v2, regnet_y_400mf, resnet18, resnet50,
    shufflenet_v2_x1_0, squeezenet1_1, swin_t, vgg13_bn, vit_b_16"
  mkdir -p "$out"
  hase model_zoo/torchvision_exporter.py --config recipes/h200/model_zoo.yaml --set "models=[$models]"
  analyse 1 densenet121 efficientnet_b0 googlenet mobilenet_v2 resnet18 resnet50 squeezenet1_1
  analyse 4 swin_t vgg13_bn vit_b_16
  analyse 16 convnext_tiny efficientnet_b0 mobilenet_v2 regnet_y_400mf resnet18 resnet50 shufflenet_v2_x1_0
  hase kernel_model/kernel_builder.py > "$out/kernels.txt"
}

[ -f "$out/kernels.txt" ] || prepare
for way in "${ways[@]}"; do
  if [ "$way" = prepare ]; then continue; fi
  folder=$out/$(tr ':/' '-_' <<< "$way") # mps:25/75 in mps-25_75
  mkdir -p "$folder"
  for made in model_zoo ort_analysis kernel_model; do ln -sfn "../$made" "$folder/$made"; done
  python benchmark/collector.py --workspace "$folder" --config "${CONFIG:-recipes/h200/sharing.yaml}" --set "sharing=$way"
done
