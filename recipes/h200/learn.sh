#!/usr/bin/env bash
# Learns from the H200's dataset in this folder, on any machine, and ships what was learned: training/shipped/ is what
# `--target nvidia-h200` predicts from. Usage: recipes/h200/learn.sh [workspace]     A quarter of an hour on two cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/h200}
target=nvidia-h200-cuda-ort1.31-all
mkdir -p "$out"
tar xJf "recipes/h200/$target.tar.xz" -C "$out"
tar xJf recipes/h200/host-nvidia-h200.tar.xz -C "$out"
python training/train_kernel_model.py --workspace "$out" --target "$target"
python training/train_kernel_model.py --workspace "$out/host"
python training/fit_host.py --workspace "$out" --target "$target" --host "$out/host"
python training/fit_composition.py --workspace "$out" --target "$target"
others=()
for name in beside under-load beside-more; do
  mkdir -p "$out/$name"
  tar xJf "recipes/h200/$name-nvidia-h200.tar.xz" -C "$out/$name"
  others+=(--beside "$out/$name")
done
python training/fit_sharing.py --workspace "$out" --target "$target" "${others[@]}"
mkdir -p "training/shipped/$target"
rm -rf "training/shipped/$target"/*
cp -r "$out/training/predictors/$target"/* "training/shipped/$target/"
python training/leave_families_out.py --workspace "$out" --target "$target"
