#!/usr/bin/env bash
# The live path on this machine's GPU, at five levels of two kinds of load that it starts: predictions from exporter and
# Prometheus, against latencies measured in the same minute; then the same from a probe on the spot, and from readings of the
# probe that the exporter takes and serves, beside the models as well. Needs `prometheus` and predictors for this GPU: as shipped,
# an H200's. A quarter of an hour. Usage: gpu_dataset/live.sh [workspace [part]...]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-out/live}
models=(resnet18 mobilenet_v2 efficientnet_b0)
all=(from_metrics from_probe from_exported_probe)
parts=("${@:2}")
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")
for part in "${parts[@]}"; do
  [[ " ${all[*]} " == *" $part "* ]] || { echo "error: $part is none of ${all[*]}" >&2; exit 2; }
done
worst=0
command -v prometheus > /dev/null || { echo "error: no prometheus on the PATH: apt-get install prometheus" >&2; exit 1; }
mkdir -p "$out"
hase() { python "$1" --workspace "$out" "${@:2}"; }
compare() {  # and keeps what it found as $out/$1.txt and .json, also where a model or a level failed
  hase evaluator.py "${models[@]/%/.onnx}" --dim batch=1,16 --rounds 1 --budget-s 0.5 --under-load gpu_dataset/live.yaml \
    "${@:2}" | tee "$out/$1.txt" || worst=1
  cp "$(ls -t "$out"/evaluation/*/evaluation.json | head -n 1)" "$out/$1.json"
}
start_exporter() {
  python benchmark/metrics_exporter.py --workspace "$out" --host 127.0.0.1 "$@" >> "$out/exporter.txt" 2>&1 &
  exporter=$!
}
stop_exporter() {  # it says what it took of a core
  kill "$exporter"
  wait "$exporter"
}
from_metrics() {
  start_exporter
  compare from_metrics --config gpu_dataset/live_prometheus.yaml
  stop_exporter
}
from_probe() { compare from_probe --probe; }
from_exported_probe() {
  start_exporter --probe-every 5
  compare from_exported_probe --config gpu_dataset/live_prometheus.yaml
  stop_exporter
}

hase model_zoo/torchvision_exporter.py --config gpu_dataset/model_zoo.yaml --model resnet50 "${models[@]/#/--model=}" \
  > "$out/exported.txt"
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
prometheus --config.file gpu_dataset/prometheus.yml --storage.tsdb.path "$out/prometheus" --web.listen-address 127.0.0.1:9090 \
  --log.level warn &
for part in "${parts[@]}"; do "$part"; done
exit "$worst"
