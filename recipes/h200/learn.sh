#!/usr/bin/env bash
# Learns from the H200's datasets in this folder, on any machine, and shows how far off predictions are for models that were held
# out of everything. Usage: recipes/h200/learn.sh [workspace [part...]]     The parts, in this order (default: all but pack):
#   unpack       the dataset of this folder, into the workspace; without it, learns from what the workspace holds
#   learn        the predictors of kernels, the host's side, the composition      1.5 to 2 hours on two cores
#   sharing      what a co-runner does to a model, in time slices and through MPS, and what a host does that serves requests
#                                                                                 20 minutes
#   energy       what a run takes of the GPU's energy, by these predictors        some seconds
#   generation   what generation with language models takes besides, from recipes/llm    two minutes
#   collections  figures: each collection of models held out in turn              20 minutes
#   forms        figures: forms of operators held out, and cliffs between kernels 15 minutes
#   families     figures: families and operators held out                         90 minutes
#   ship         into the repository: predictors to learned/shipped/, which `--target nvidia-h200` predicts from, and the
#                tables of operators, forms and energy to docs/tables/, if there are any
#   pack         what the workspace's dataset holds beyond the archives of this folder, as a further archive; and the host's side,
#                whose two archives are small and written again where they changed
# Figures go to WORKSPACE/figures. TRAINING_CONFIG=FILE takes other settings than training/config.yaml.
set -euo pipefail
usage="usage: recipes/h200/learn.sh [workspace [unpack|learn|sharing|energy|generation|collections|forms|families|ship|pack ...]]"
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-$here/../../out/h200}")
config=$(realpath -m "${TRAINING_CONFIG:-$here/../../training/config.yaml}")
cd "$here/../.."
parts=("${@:2}")
((${#parts[@]})) || parts=(unpack learn sharing energy generation collections forms families ship)
target=nvidia-h200-cuda-ort1.31-all
failed=()

hase() { python "$1" --workspace "$out" "${@:2}"; } # script option…
figure() { # name command…: keeps what it prints; when it fails, the others go on
  local name=$1
  shift
  mkdir -p "$out/figures"
  if "$@" > "$out/figures/$name.part"; then
    mv "$out/figures/$name.part" "$out/figures/$name.txt"
    cat "$out/figures/$name.txt"
  else
    failed+=("$name")
  fi
}
archive() { # name folder path…: packs paths of a folder, without tables, so that the same files give the same archive
  tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 --exclude=.writer.lock --exclude=tables.json --exclude='*.csv' -C "$2" \
    -ch "${@:3}" |
    xz -9e > "$here/$1.part"
  mv "$here/$1.part" "$here/$1"
}

part_unpack() {
  mkdir -p "$out"
  hase recipes/h200/dataset_archives.py unpack --archives "$here"
  tar xJf "$here/host-nvidia-h200.tar.xz" -C "$out"
  if [ -f "$here/host-kernels-nvidia-h200.tar.xz" ]; then
    mkdir -p "$out/host" "$out/host_kernels"
    tar xJf "$here/host-kernels-nvidia-h200.tar.xz" -C "$out/host_kernels"
    python recipes/h200/quiet_host_kernels.py --workspace "$out/host" --from "$out/host_kernels/drawn" --from "$out/host_kernels/models"
  fi
}
part_learn() {
  mkdir -p "$out/carried"
  tar xJf "$here/carried-nvidia-h100.tar.xz" -C "$out/carried" # of an H100, by collect_kernels.sh standard
  hase training/train_kernel_model.py --target "$target" --config "$config" --carried "$out/carried" "$here/../gpus/tables.csv.xz"
  python training/train_kernel_model.py --workspace "$out/host" --config "$config"
  hase training/fit_host.py --target "$target" --host "$out/host"
  hase training/fit_composition.py --target "$target" --config "$config"
}
part_sharing() {
  local name others=()
  for name in beside under-load beside-more; do # measured once, apart from the other archives
    mkdir -p "$out/$name"
    tar xJf "$here/$name-nvidia-h200.tar.xz" -C "$out/$name"
    others+=(--beside "$out/$name")
  done
  hase training/fit_sharing.py --target "$target" --config "$config" "${others[@]}"
  mkdir -p "$out/ways"
  tar xJf "$here/sharing-nvidia-h100.tar.xz" -C "$out/ways" # of an H100, by measure_sharing.sh
  figure mps hase training/fit_mps.py --target "$target" --config "$config" --ways "$out/ways"
  mkdir -p "$out/served"
  tar xJf "$here/served-nvidia-h100.tar.xz" -C "$out/served" # of an H100's host, by measure_served_sets.sh
  figure serving hase training/fit_serving.py --target "$target" --served "$out/served"
}
part_energy() {
  mkdir -p "$out/energy"
  tar xJf "$here/energy-nvidia-h200.tar.xz" -C "$out/energy" # measured once, by collect_energy.sh
  figure energy python training/fit_energy.py --workspace "$out/energy" --predictors "$out/training/predictors/$target" \
    --limit-w 700 --markdown "$out/figures/energy.md"
}
part_generation() { # after energy, whose measurements it learns from, too
  local name
  for name in genai again loop graph judged; do
    mkdir -p "$out/$name"
    tar xJf "$here/../llm/$name-nvidia-h200.tar.xz" -C "$out/$name"
  done
  for name in genai again loop graph; do
    python recipes/llm/record_steps.py --workspace "$out/$name"
  done
  figure generation hase training/fit_generation.py --target "$target" --generations "$out/genai" \
    --generations "$out/again" --loops "$out/loop" --captured "$out/graph" --energy "$out/energy"
}
part_collections() {
  figure collections hase training/held_out.py --by collection --target "$target" --config "$config"
}
part_forms() {
  figure forms hase training/held_out.py --by form --target "$target" --config "$config" --markdown "$out/figures/forms.md"
}
part_families() {
  figure families hase training/held_out.py --by family --target "$target" --config "$config" --at-most 12
  figure operators hase training/held_out.py --by operator --target "$target" --config "$config" --markdown "$out/figures/operators.md"
}
part_ship() {
  local learned=$out/training/predictors/$target shipped=learned/shipped/$target file
  for file in predictors.json host.json composition.json sharing.json mps.json serving.json energy.json generation.json generation_energy.json; do
    [ -f "$learned/$file" ] || {
      echo "$learned/$file is missing; run: recipes/h200/learn.sh $out learn sharing energy generation" >&2
      exit 1
    }
  done
  mkdir -p "$shipped"
  rm -rf "${shipped:?}"/*
  python -c 'import sys; from pathlib import Path; from hase.learned.kernels.sidecar import copy_predictors
copy_predictors(*map(Path, sys.argv[1:]))' "$learned" "$shipped"  # without what only an earlier training used
  for file in operators.md forms.md energy.md; do
    if [ -f "$out/figures/$file" ]; then cp "$out/figures/$file" "docs/tables/$file"; fi
  done
}
part_pack() {
  hase recipes/h200/dataset_archives.py pack --archives "$here"
  archive host-nvidia-h200.tar.xz "$out" host/ort_analysis/ort_kernel_record "benchmark/dataset/$target/copies.json" \
    node_profiles.json
  if [ -d "$out/host_kernels" ]; then
    archive host-kernels-nvidia-h200.tar.xz "$out/host_kernels" drawn models
  elif [ -d "$out/host/benchmark" ]; then
    echo "$out/host/benchmark is not packed: put the workspaces it was made from into $out/host_kernels, as drawn and models" >&2
  fi
}

for part in "${parts[@]}"; do
  case $part in
    unpack | learn | sharing | energy | generation | collections | forms | families | ship | pack) ;;
    *) echo "$part: no such part; $usage" >&2; exit 2 ;;
  esac
done
for part in "${parts[@]}"; do
  "part_$part"
done
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}" >&2; exit 1; }
