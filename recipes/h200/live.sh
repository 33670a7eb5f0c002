#!/usr/bin/env bash
# The live path on this machine's GPU, at five levels of two kinds of load that it starts: predictions against latencies measured
# in the same minute. It has three parts, named after the source of the load. from_metrics: the exporter's metrics in Prometheus;
# from_probe: a probe on the spot; from_exported_probe: the exporter's own probes in Prometheus, taken while the models run, too.
# Needs `prometheus` and predictors for this GPU: as shipped, an H200's. A quarter of an hour. Usage: recipes/h200/live.sh [workspace [part]...]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/live}
models=(resnet18 mobilenet_v2 efficientnet_b0)
parts=("${@:2}")
[ ${#parts[@]} -gt 0 ] || parts=(from_metrics from_probe from_exported_probe)
worst=0
fail() { echo "error: $1" >&2; exit "${2:-1}"; }
for part in "${parts[@]}"; do
  case $part in from_metrics | from_probe | from_exported_probe) ;; *) fail "$part: no such part; there are from_metrics, from_probe and from_exported_probe" 2 ;; esac
done
command -v prometheus > /dev/null || fail "no prometheus on the PATH: apt-get install prometheus"
for port in 9090 9400; do
  (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null && fail "port $port is taken; stop what listens there, another Prometheus perhaps"
done
mkdir -p "$out"
hase() { python "$1" --workspace "$out" "${@:2}"; }
compare() {  # and keeps what it found as $out/$1.txt and .json, also where a model or a level failed
  rm -f "$out"/evaluation/*/evaluation.json "$out/$1.json"
  hase evaluator.py "${models[@]/%/.onnx}" --static --dim batch=1,16 --rounds 1 --budget-s 0.5 --under-load recipes/h200/live.yaml \
    "${@:2}" | tee "$out/$1.txt" || worst=1
  cp "$out"/evaluation/*/evaluation.json "$out/$1.json" || worst=1
}
by_prometheus() {  # a part, and the exporter's options; the exporter says at its end what it took of a core
  python benchmark/metrics_exporter.py --workspace "$out" --host 127.0.0.1 "${@:2}" >> "$out/exporter.txt" 2>&1 &
  local exporter=$!
  compare "$1" --set prometheus.url=http://127.0.0.1:9090 --set prometheus.window_s=10 --set prometheus.max_age_s=10 \
    --set prometheus.probe_max_age_s=15  # no sample from before the load in question enters a mean
  kill "$exporter" 2> /dev/null || fail "the exporter ended by itself; see $out/exporter.txt"
  wait "$exporter"
}
ready() {  # whether Prometheus answers, which is later than that it listens
  (exec 3<> /dev/tcp/127.0.0.1/9090; printf 'GET /-/ready HTTP/1.0\r\n\r\n' >&3; head -n 1 <&3 | grep -q 200) 2> /dev/null
}

hase model_zoo/torchvision_exporter.py --config recipes/h200/model_zoo.yaml --model resnet50 "${models[@]/#/--model=}" \
  > "$out/exported.txt"
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
prometheus --config.file recipes/h200/prometheus.yml --storage.tsdb.path "$out/prometheus" --web.listen-address 127.0.0.1:9090 \
  --log.level warn &
until ready; do
  kill -0 $! 2> /dev/null || fail "prometheus ended by itself"
  sleep 0.2
done
for part in "${parts[@]}"; do
  case $part in
    from_metrics) by_prometheus "$part" ;;
    from_probe) compare "$part" --probe ;;
    from_exported_probe) by_prometheus "$part" --probe-every 5 ;;
  esac
done
exit "$worst"
