#!/usr/bin/env bash
# Compares what is said of sharing a GPU with measurements: models beside models in loops, and sets of models that were served.
# Usage: recipes/h200/judge_advice.sh [workspace]     An hour and a quarter on two cores.
# First on H200s, with the predictors that come with Hase; nothing was learned from what is judged. Then on H100s, whose predictors
# are learned here; of what is judged only models that were served alone are learned from, which tell how a host serves requests.
# Time slices are those of an H200.
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

for name in pairs served pairs-one-card served-one-card; do unpack "$here/$name-nvidia-h200.tar.xz" "$name-h200"; done
judge=(--workspace "$out" --target nvidia-h200-cuda-ort1.31-all)
python recipes/h200/judge_pairs.py "${judge[@]}" --measured "$out/pairs-h200"
python recipes/h200/judge_pairs.py "${judge[@]}" --measured "$out/pairs-one-card-h200"
python recipes/h200/judge_advice.py "${judge[@]}" --served "$out/served-one-card-h200"
python recipes/h200/judge_advice.py "${judge[@]}" --served "$out/served-h200" --begun-at-once

unpack recipes/gpus/nvidia-h100.tar.xz learned
for name in sharing served served-again served-four served-one-card served-one-card-more pairs-one-card; do unpack "$here/$name-nvidia-h100.tar.xz" "$name"; done
hase training/train_kernel_model.py
hase training/fit_composition.py
hase training/fit_mps.py --ways "$out/sharing"
hase training/fit_serving.py --served "$out/served"
cp training/shipped/nvidia-h200-cuda-ort1.31-all/sharing.json "$out/learned/training/predictors/$target/"
hase recipes/h200/judge_pairs.py --measured "$out/pairs-one-card"
for name in served-one-card served-one-card-more; do hase recipes/h200/judge_advice.py --served "$out/$name"; done
for name in served served-again served-four; do
  hase recipes/h200/judge_advice.py --served "$out/$name" --begun-at-once
done
