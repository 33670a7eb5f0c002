#!/usr/bin/env bash
# Learns an H100's predictors from what H100s measured, and compares advice on sharing the GPU with sets of models that were served.
# Usage: recipes/h200/judge_advice.sh [workspace]     A quarter of an hour on two cores. Nothing that is judged is learned from, but
# for models that were served alone: they tell how a host serves requests. Time slices are those of an H200.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-$here/../../out/judged}")
cd "$here/../.."
target=nvidia-h100-80gb-hbm3-cuda-ort1.31-all

unpack() { # archive folder
  mkdir -p "$out/$2"
  tar xJf "$1" -C "$out/$2"
}
hase() { python "$1" --workspace "$out/learned" --target "$target" "${@:2}"; } # script option…

unpack recipes/gpus/nvidia-h100.tar.xz learned
for name in sharing sharing-paced served served-again served-four; do unpack "$here/$name-nvidia-h100.tar.xz" "$name"; done
hase training/train_kernel_model.py
hase training/fit_composition.py
hase training/fit_mps.py --ways "$out/sharing" --judged "$out/sharing-paced"
hase training/fit_serving.py --served "$out/served"
cp training/shipped/nvidia-h200-cuda-ort1.31-all/sharing.json "$out/learned/training/predictors/$target/"
for name in served served-again served-four; do
  hase recipes/h200/judge_advice.py --served "$out/$name"
done
