#!/usr/bin/env bash
# Sets of models that are served at the same time, under several ways of sharing this machine's GPU. Started again, it goes on.
# Usage: recipes/h200/measure_served_sets.sh [workspace] [prepare | way of sharing...]     SETS=20 measures the first 20 sets alone.
#   recipes/h200/measure_served_sets.sh out/sharing prepare         # exports the models; needs no GPU
#   recipes/h200/measure_served_sets.sh out/sharing                 # all sets, all ways of served_sets.yaml
#   SETS=20 recipes/h200/measure_served_sets.sh out/sharing slices mps mps:50
# Results go to WORKSPACE/benchmark/served_sets/. The card's settings stay as they are.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath -m "${1:-out/sharing}")
ways=("${@:2}")

export_model() { # name: in a workspace of its own, since only one process at a time writes to one
  if [ -f "$out/model_zoo/models/$1.onnx" ]; then return; fi
  mkdir -p "$out/exporting/$1"
  python model_zoo/torchvision_exporter.py --workspace "$out/exporting/$1" --config recipes/h200/model_zoo.yaml --model "$1"
  mv "$out/exporting/$1/model_zoo/models/$1.onnx" "$out/model_zoo/models/"
  rm -r "$out/exporting/$1"
}
if [ "${ways[0]:-}" = prepare ]; then
  mkdir -p "$out/model_zoo/models"
  export out
  export -f export_model
  grep -o 'model: [a-z0-9_]*' recipes/h200/served_sets.yaml | sort -u | cut -d' ' -f2 |
    OMP_NUM_THREADS=2 xargs -P "$((($(nproc) + 1) / 2))" -I{} bash -euc 'export_model {}'
  exit
fi
options=()
if [ -n "${SETS:-}" ]; then options+=(--first "$SETS"); fi
if ((${#ways[@]})); then options+=(--set "ways=[$(IFS=,; echo "${ways[*]}")]"); fi
python benchmark/served_sets.py --workspace "$out" --config recipes/h200/served_sets.yaml "${options[@]}"
