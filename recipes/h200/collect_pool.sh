#!/usr/bin/env bash
# The pool (model_zoo/pool.yaml) on this machine's GPU: models, their latencies and kernels. Started again, it goes on.
# Usage: recipes/h200/collect_pool.sh [workspace]     About an hour on a machine with a GPU and 16 cores.
# Needs pip install '.[pool]'. A model or kernel that fails costs only itself; the logs in the workspace say which.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/pool}
jobs=$(($(nproc) / 2 + 1))
in_half="seresnet50 regnetz_c16 nf_resnet50 eca_nfnet_l0 xception41 efficientnet_lite0 mixnet_s mobilenetv4_conv_small
  inception_next_tiny convmixer_768_32 rdnet_tiny hgnetv2_b0 repvit_m1 vit_tiny_patch16_224 deit_tiny_patch16_224 cait_xxs24_224
  twins_svt_small pvt_v2_b2 swin_s3_tiny_224 davit_tiny focalnet_tiny_srf hiera_tiny_224 gmlp_s16_224 resmlp_12_224
  efficientformer_l1"  # models of timm that are taken in half precision, too

hase() { python "$1" --workspace "$out" "${@:2}"; }
exported() { OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE hase "$@"; } # many at a time: more threads would only wait for cores
step() { # name command…: keeps its output and says how it ended
  local name=$1 began=$SECONDS
  shift
  "$@" > "$out/$name.out" 2> "$out/$name.log"
  echo "$name: exit code $?, $((SECONDS - began)) s" | tee -a "$out/steps.txt"
}
export_half() {
  # shellcheck disable=SC2046
  exported model_zoo/pool_exporter.py --collection timm --json --jobs $((jobs / 2)) --dtype fp16 $(printf -- '--model %s ' $in_half)
}

mkdir -p "$out"
step export_timm exported model_zoo/pool_exporter.py --collection timm --json --jobs $((jobs + 1)) &
step export_transformers exported model_zoo/pool_exporter.py --collection transformers --json --dtype fp32 --dtype fp16 --jobs $((jobs * 2 / 3)) &
for collection in torchvision other random; do
  step "export_$collection" exported model_zoo/pool_exporter.py --collection "$collection" --json --jobs $((jobs / 4)) &
done
step export_half export_half &
wait
step records hase recipes/h200/pool_records.py --device cuda --jobs $((jobs * 3 / 2))
first=$(find "$out/ort_analysis/ort_kernel_record" -name '*.json' ! -name index.json | sort | head -1)
step build_first hase kernel_model/kernel_builder.py --record "$first" # the collector wants a kernel to begin with
step pace hase benchmark/host_pace.py --json
step build hase kernel_model/kernel_builder.py &
step models hase benchmark/collector.py --config recipes/h200/collect_pool.yaml
wait
step kernels hase benchmark/collector.py --config recipes/h200/collect_pool.yaml --set model_labels=false \
  --set 'kernel_levels=[0.0]' --set patience_s=0.5
step pace_after hase benchmark/host_pace.py --json
