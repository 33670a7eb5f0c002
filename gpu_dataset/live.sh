#!/usr/bin/env bash
# The live path on this machine's GPU, at five levels of two kinds of load that it starts: exporter, Prometheus and prediction,
# against latencies measured in the same minute; then the same told by the probe. Needs `prometheus`; nine minutes.
# Usage: gpu_dataset/live.sh [workspace]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-out/live}
models=(resnet18 mobilenet_v2 efficientnet_b0)
mkdir -p "$out"
hase() { python "$1" --workspace "$out" "${@:2}"; }
compare() {  # and keeps what it found as $out/$1.txt and .json
  hase evaluator.py "${models[@]/%/.onnx}" --dim batch=1,16 --rounds 1 --budget-s 0.5 --under-load gpu_dataset/live.yaml \
    "${@:2}" | tee "$out/$1.txt"
  cp "$out"/evaluation/*/evaluation.json "$out/$1.json"
}

hase model_zoo/torchvision_exporter.py --config gpu_dataset/model_zoo.yaml --model resnet50 "${models[@]/#/--model=}" \
  > "$out/exported.txt"
trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT
python benchmark/metrics_exporter.py --workspace "$out" --host 127.0.0.1 > "$out/exporter.txt" &  # says at its end what it took
prometheus --config.file gpu_dataset/prometheus.yml --storage.tsdb.path "$out/prometheus" --web.listen-address 127.0.0.1:9090 \
  --log.level warn &
compare from_prometheus --config gpu_dataset/live_prometheus.yaml
compare from_probe --probe
