#!/usr/bin/env bash
# The energy of about 60 models and batch sizes on this machine's GPU, in ten minutes. Started again, it goes on (there are 88).
# Usage: recipes/h200/collect_energy.sh [workspace [minutes]]     Needs pip install '.[pool]' for timm and transformers; without
# it, the models of torchvision are measured. Then: python training/fit_energy.py --workspace WORKSPACE --predictors FOLDER --limit-w 700
# Nothing else should run on the machine: where the host is slow, runs take longer, and the energy of idle power with them.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/energy}
minutes=${2:-9.5}
jobs=$(($(nproc) / 2 + 1))
torchvision="resnet50 vgg16 densenet121 mobilenet_v2 efficientnet_b0 convnext_tiny vit_b_16 swin_t alexnet googlenet
  regnet_y_1_6gf shufflenet_v2_x1_0 mnasnet1_0 squeezenet1_1 wide_resnet50_2 resnext50_32x4d"
timm="seresnet50 dpn68 efficientnet_lite0 mixnet_s hgnetv2_b0 repvit_m1 deit_tiny_patch16_224 pvt_v2_b2 focalnet_tiny_srf
  gmlp_s16_224"
timm_fp16="seresnet50 deit_tiny_patch16_224 hgnetv2_b0"
transformers="albert llama_prefill llama_token"

hase() { python "$1" --workspace "$out" "${@:2}"; }
exported() { OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE hase "$@"; } # many at a time: more threads would only wait for cores
named() { printf -- '--model %s ' "$@"; }
step() { # name command…: keeps its output and says how it ended
  local name=$1 began=$SECONDS
  shift
  "$@" > "$out/$name.out" 2> "$out/$name.log"
  echo "$name: exit code $?, $((SECONDS - began)) s" | tee -a "$out/steps.txt"
}
torchvision() { # the models, a few at a time, and their records at three batch sizes
  # shellcheck disable=SC2086
  printf '%s\n' $torchvision | OMP_NUM_THREADS=2 xargs -P "$jobs" -I NAME python model_zoo/torchvision_exporter.py \
    --workspace "$out" --config recipes/h200/model_zoo.yaml --model NAME
  # shellcheck disable=SC2046,SC2086
  hase ort_analysis/fusion_detector.py --device cuda --jobs "$jobs" --static --dim batch=1,16,64 \
    $(printf -- '--model %s.onnx ' $torchvision)
}

mkdir -p "$out"
step torchvision torchvision &
# shellcheck disable=SC2046,SC2086
{
  step export_timm exported model_zoo/pool_exporter.py --collection timm --jobs "$jobs" $(named $timm) &
  step export_transformers exported model_zoo/pool_exporter.py --collection transformers --jobs 3 $(named $transformers) &
  wait
  step export_half exported model_zoo/pool_exporter.py --collection timm --jobs 3 --dtype fp16 $(named $timm_fp16)
}
wait
step pool_records hase recipes/h200/pool_records.py --device cuda --jobs "$jobs"
# shellcheck disable=SC2046
step build_some hase kernel_model/kernel_builder.py $(find "$out/ort_analysis/ort_kernel_record" \
  \( -name 'resnet50@batch=16.json' -o -name 'deit_tiny_patch16_224*@batch=16.json' \) -printf '--record %p ')
left=$(awk "BEGIN {print $minutes - $SECONDS / 60}")
# each model's latency for a moment, then three seconds of its runs; and, of a few batches of kernels, the largest of each
# operator and element type among those that were built (docs/energy.md)
step energy hase benchmark/collector.py --config recipes/h200/collect_pool.yaml --minutes "$left" --set energy_s=3 \
  --set energy_of_kernels=true --set 'labels=[run]' --set model_labels=false --set kernel_levels=null \
  --set 'kernel={warmup: 1, budget_s: 0.01}' --set tracers=1
tail -3 "$out/energy.log"
